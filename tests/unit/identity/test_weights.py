"""Digests of weight files: what samples see, and when a whole reading is kept."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvledger.identity import kept, weights
from kvledger.identity.weights import served_files, weights_digest
from tests.unit.identity.engines import save_tensors, tensors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvledger"


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is a large one."""
    monkeypatch.setattr(weights, "FULL_BELOW", 0)


def poke(path: Path, at: int, count: int) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        f.write(b"\x77" * count)


@pytest.mark.usefixtures("sampled")
def test_a_sample_of_each_tensor_is_seen(tmp_path: Path) -> None:
    """The fault that was: samples at regular places in the file, and whole layers between them."""
    file = tmp_path / "model.safetensors"
    save_file(tensors(40), file)
    seen = {weights_digest([file])}
    for i in range(40):
        every = tensors(40)
        every[f"model.layers.{i}.weight"] += 1
        save_file(every, file)
        seen.add(weights_digest([file]))
    assert len(seen) == 41


@pytest.mark.usefixtures("sampled")
def test_a_row_of_changes_as_long_as_a_stride_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4 * 1024**2)}, file)
    before = weights_digest([file])
    for at in range(1024, 15 * 1024**2, 1_234_567):
        poke(file, at, weights.STRIDE + weights.SAMPLE_BYTES)
        assert weights_digest([file]) != before
        save_file({"w": torch.zeros(4 * 1024**2)}, file)


def test_samples_do_not_see_a_byte_between_them_and_full_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `docs/identity.md` says is not seen."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4 * 1024**2)}, file)
    whole = weights_digest([file])
    monkeypatch.setattr(weights, "FULL_BELOW", 0)
    samples, full = weights_digest([file]), weights_digest([file], full=True)
    poke(file, 100_000, 1)
    assert weights_digest([file]) == samples
    assert weights_digest([file], full=True) != full
    assert full == whole


@pytest.mark.usefixtures("sampled")
def test_a_byte_anywhere_in_a_torch_archive_is_seen_by_its_checksum(tmp_path: Path) -> None:
    one, other = tmp_path / "one.bin", tmp_path / "other.bin"
    big = torch.zeros(4 * 1024**2)
    torch.save({"w": big}, one)
    big[25_001] = 1.0
    torch.save({"w": big}, other)
    assert weights_digest([one]) != weights_digest([other])


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the reads from now on."""
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        reads.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    return reads


@pytest.mark.usefixtures("sampled")
def test_the_number_of_samples_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_SAMPLES", 100)
    file = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.zeros(512 * 1024) for i in range(20)}, file)
    reads = counted_reads(monkeypatch)
    weights_digest([file])
    assert 60 <= len(reads) <= 100


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 4000, (10).to_bytes(8, "little") + b'{"a": [1]}', b"PK\x03\x04rest"]
)
def test_a_broken_file_counts_as_a_whole(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    before = weights_digest([file])
    file.write_bytes(content + b"!")
    assert weights_digest([file]) != before


def test_a_kept_digest_is_used_until_a_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    save_tensors(file, 0)
    first = weights_digest([file], full=True)
    reads = counted_reads(monkeypatch)
    assert weights_digest([file], full=True) == first
    assert not reads
    save_tensors(file, 1)
    assert weights_digest([file], full=True) != first
    assert reads
    assert list(cache.glob("*.json"))


def test_a_damaged_kept_digest_is_made_anew(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_tensors(file, 0)
    first = weights_digest([file], full=True)
    (kept_file,) = cache.glob("*.json")
    for damage in ("", "[]", "{}", '{"state": 1}'):
        kept_file.write_text(damage)
        assert weights_digest([file], full=True) == first


def test_a_cache_folder_that_cannot_be_made_costs_only_the_keeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    file = tmp_path / "model.safetensors"
    save_tensors(file, 0)
    assert weights_digest([file], full=True) == weights_digest([file])
    assert "cannot be kept" in caplog.text


def test_waiting_for_another_reader_has_a_bound(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LOCK_WAIT_S", 0.0)
    file = tmp_path / "model.safetensors"
    save_tensors(file, 0)
    first = weights_digest([file], full=True)
    (lock,) = cache.glob("*.lock")
    with kept._locked(lock):
        assert weights_digest([file], full=True) == first


@pytest.mark.parametrize(
    ("load_format", "served"),
    [
        ("auto", ["a.safetensors", "sub/s.pth"]),
        ("safetensors", ["a.safetensors", "sub/s.pth"]),
        ("pt", ["c.pt", "sub/s.pth"]),
        ("npcache", ["b.bin", "sub/s.pth"]),
        ("of_a_plugin", ["a.safetensors", "b.bin", "c.pt", "original/o.pth", "sub/s.pth"]),
    ],
)
def test_files_that_a_format_may_read(load_format: str, served: list[str], tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.bin", "c.pt", "sub/s.pth", "original/o.pth", ".git/g.pt", "training_args.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [str(p.relative_to(tmp_path)) for p in served_files(tmp_path, load_format)]
    assert found == served
