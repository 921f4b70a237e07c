"""What weight files hold, as one digest: every tensor counts, whatever file or folder it lies in.

A checkpoint is read as regions: the tensors of a safetensors file, the records of a PyTorch archive, else the whole
file. Up to `FULL_BELOW` bytes all of it is read; above that, samples of each region (`docs/identity.md` says what is
not seen then), or all of it with `full`.
"""

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvledger.identity.kept import kept_digest

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".ckpt", ".npz")

FULL_BELOW = 256 * 1024**2
"""Checkpoints up to this many bytes are always read whole."""
SAMPLE_BYTES = 4096
STRIDE = 512 * 1024
"""In a large checkpoint there is a sample at least this often in a tensor, as far as the next two bounds allow."""
TENSOR_SAMPLES = 64
"""Most samples of one tensor."""
MAX_SAMPLES = 1 << 17
"""Most samples of a checkpoint, but 3 of each tensor always: a start must not wait for more than seconds."""
_THREADS = 16
_PIECE = 8 * 1024**2
_MAX_HEADER = 100 * 1024**2

# vLLM takes safetensors before .bin before .pt for all of these: the same files, read in another way.
FILE_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
_ONE_KIND = {"mistral": ("consolidated*.safetensors",), "pt": ("*.pt",), "npcache": ("*.bin", "*.pt")}
_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a file that belong together. `label` is all else that is known of them: name, type, shape, checksum."""

    label: str
    path: Path
    start: int
    size: int


# -- which files -----------------------------------------------------------


def served_files(folder: Path, load_format: str) -> list[Path]:
    """The weight files of `folder` that vLLM may read for `load_format`; all it could not rule out.

    Subfolders count, hidden ones and Llama's `original` do not. With a format that is not known here all files do.
    """
    known = load_format in FILE_FORMATS or load_format in _ONE_KIND
    files = [p for p in _walk(folder, skip_original=known) if p.suffix in SUFFIXES and p.name not in _TRAINING]
    if not known:
        return files
    top = [p for p in files if p.parent == folder]
    return _chosen(folder, top, load_format) + [p for p in files if p.parent != folder]


def _walk(folder: Path, *, skip_original: bool) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and not (skip_original and f == "original")]
        found += [Path(root, name) for name in names]
    return sorted(found)


def _chosen(folder: Path, top: list[Path], load_format: str) -> list[Path]:
    consolidated = [p for p in top if p.match("consolidated*.safetensors")]
    patterns = _ONE_KIND.get(load_format, ("*.safetensors", "*.bin", "*.pt"))
    if load_format == "auto" and consolidated:
        patterns = _ONE_KIND["mistral"]
    for pattern in patterns:
        matching = [p for p in top if p.match(pattern)]
        if matching:
            stem = "consolidated" if pattern.startswith("consolidated") else "model"
            return _indexed(folder / f"{stem}.safetensors.index.json", matching)
    return top


def _indexed(index: Path, files: list[Path]) -> list[Path]:
    """Those of `files` that the index names, if there is one."""
    if not index.is_file() or files[0].suffix != ".safetensors":
        return files
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [p for p in files if p.name in named]


# -- what they hold --------------------------------------------------------


def weights_digest(files: Sequence[Path], *, full: bool = False) -> str:
    """32 hex digits over all regions of `files`; no file's name, nor how tensors are spread over files, matters.

    `full` reads every byte, once per state of the files: the result is kept in the user's cache folder.

    Raises:
        OSError: a file cannot be read.
    """
    if full:
        return kept_digest(files, lambda: _digest(files, whole=True))
    return _digest(files, whole=sum(p.stat().st_size for p in files) <= FULL_BELOW)


def _digest(files: Sequence[Path], *, whole: bool) -> str:
    notes: set[str] = set()
    regions = [region for path in files for region in _regions(path, notes)]
    share = min(1.0, MAX_SAMPLES / max(1, sum(_wanted(r) for r in regions)))
    descriptors = {path: os.open(path, os.O_RDONLY) for path in files}
    try:
        for fd in descriptors.values():
            if not whole and hasattr(os, "posix_fadvise"):  # no read-ahead of 128 KiB around 4 KiB
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = pool.map(lambda r: _region_digest(descriptors[r.path], r, whole, share), regions)
            digest = hashlib.sha256("\n".join(sorted(notes)).encode())
            for part in sorted(parts):
                digest.update(part)
    finally:
        for fd in descriptors.values():
            os.close(fd)
    return digest.hexdigest()[:32]


def _wanted(region: Region) -> int:
    """Samples that a region should have; a file that could not be taken apart has no bound of its own."""
    strides = -(-region.size // STRIDE)
    return max(3, strides if region.label == "file" else min(TENSOR_SAMPLES, strides))


def _region_digest(fd: int, region: Region, whole: bool, share: float) -> bytes:
    digest = hashlib.sha256(f"{region.label}:{region.size};".encode())
    samples = max(3, int(_wanted(region) * share))
    if whole or region.size <= samples * SAMPLE_BYTES:
        for at in range(0, region.size, _PIECE):
            digest.update(os.pread(fd, min(_PIECE, region.size - at), region.start + at))
    else:
        for i in range(samples):
            at = (region.size - SAMPLE_BYTES) * i // (samples - 1)
            digest.update(os.pread(fd, SAMPLE_BYTES, region.start + at))
    return digest.digest()


def _regions(path: Path, notes: set[str]) -> Iterable[Region]:
    """The file taken apart; whole if its format is not known or its header is broken. `notes`: metadata beside them."""
    size = path.stat().st_size
    try:
        if path.suffix == ".safetensors":
            return list(_tensors(path, size, notes))
        if zipfile.is_zipfile(path):
            return list(_records(path))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, zipfile.BadZipFile):
        pass  # nothing is lost: the whole file counts
    return [Region("file", path, 0, size)]


def _tensors(path: Path, size: int, notes: set[str]) -> Iterable[Region]:
    """Every tensor that the header of a safetensors file lists.

    Raises:
        ValueError: not such a file.
    """
    with path.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        if length > min(size, _MAX_HEADER):
            raise ValueError("header longer than the file")
        header = json.loads(f.read(length))
    meta = {k: v for k, v in header.pop("__metadata__", {}).items() if k not in ("format", "total_size")}
    regions = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{name} lies outside the file")
        regions.append(Region(f"{name}:{entry['dtype']}:{entry['shape']}", path, 8 + length + begin, end - begin))
    if meta:
        notes.add(json.dumps(meta, sort_keys=True))
    return regions


def _records(path: Path) -> Iterable[Region]:
    """Every record of a PyTorch archive, with the CRC-32 that its directory has over all of its bytes."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as f:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]  # the first part is the file's own name
            if name.startswith(".data/"):
                continue
            f.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", f.read(4))
            start = info.header_offset + 30 + name_length + extra_length
            yield Region(f"{name}:{info.CRC:08x}:{info.file_size}", path, start, info.compress_size)
