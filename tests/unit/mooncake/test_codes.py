"""What Mooncake's codes prove."""

import pytest

from kvledger.mooncake import codes
from kvledger.mooncake.codes import Code

FINAL = (-200, -600, -704, -705, -707, -900)


def test_every_code_has_a_meaning() -> None:
    assert set(codes.MEANING) == set(Code)
    for code in Code:
        assert code.name in codes.describe(code)


@pytest.mark.parametrize("code", [*FINAL, 0, 1, 4096, int(Code.CLIENT_CLOSED)])
def test_codes_that_prove_that_nothing_moves(code: int) -> None:
    assert codes.is_final(code)
    assert not codes.is_indeterminate(code)


@pytest.mark.parametrize("code", [-800, -801, -1, -2, -500, -901, -999, -123456])
def test_everything_else_is_indeterminate(code: int) -> None:
    assert codes.is_indeterminate(code)
    assert not codes.is_final(code)


def test_what_ranks_and_breakers_ask() -> None:
    assert [c for c in Code if codes.is_no_space(c)] == [Code.NO_AVAILABLE_HANDLE, Code.TENANT_QUOTA_EXCEEDED]
    assert codes.is_missing(-704)
    assert not codes.is_missing(-900)
    assert codes.is_store_down(-900)
    assert codes.is_store_down(-901)
    assert not any(codes.is_store_down(c) for c in (0, 1, -200, -704, -800, int(Code.CLIENT_CLOSED)))


def test_descriptions() -> None:
    assert codes.describe(-4711) == "unknown code -4711"
    assert codes.describe(12) == "12 bytes"
