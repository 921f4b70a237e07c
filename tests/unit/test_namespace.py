"""The namespace: what decides the bytes is in it."""

from kvledger.namespace import weights_identity


def test_new_weights_under_the_old_path_are_another_identity(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x01" * 4_000_000)
    before = weights_identity(str(tmp_path))
    weights.write_bytes(b"\x02" * 4_000_000)
    assert weights_identity(str(tmp_path)) != before
    assert weights_identity("some/hub-name") == ""
