"""Errors say what was asked, which value and what to do, also after a trip between processes."""

import pickle

import pytest

from kvledger.errors import ConfigError, ProtocolError, StoreError, StuckCopyError

ERRORS = {
    "no (action Emit, job 3, rank 0)": ProtocolError("no", job_id=3, rank=0, action="Emit"),
    "kvledger setting f = 7 (from file x): do this": ConfigError("f", 7, "do this", "file x"),
    "Mooncake setup failed (Mooncake code -600): do this": StoreError("setup", -600, "do this"),
    "Mooncake setup failed: do this": StoreError("setup", None, "do this"),
    "job 1: copying loaded bytes into KV blocks has not ended after 0.3 s (load_timeout_s + transfer_timeout_s); "
    "the device seems to hang: look at its driver's log, and restart this engine": StuckCopyError(1, 0.3),
}


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_says_everything_and_survives_pickling(text: str) -> None:
    again = pickle.loads(pickle.dumps(ERRORS[text]))
    assert str(again) == str(ERRORS[text]) == text
    assert vars(again) == vars(ERRORS[text])
