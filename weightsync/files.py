"""Tensors in safetensors files, mapped into memory: the kernel brings in what is touched, and no more of a file than
that has to be held.
"""

import errno
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightsync.plan import ITEM_BYTES

FULL = (errno.ENOSPC, errno.EDQUOT)  # what a disk says that has no room
HEADER_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
KNOWN_DTYPES = {code: name for name, code in HEADER_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a file. `offset` is that of its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


def header_of(tensors: Sequence[Entry]) -> tuple[bytes, list[Entry]]:
    """The header of a safetensors file of these tensors, in this order, and the tensors with their offsets."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends, end = [], 0
    for tensor in tensors:
        ends.append(end)
        end += tensor.nbytes
        described[tensor.name] = {
            "dtype": HEADER_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [ends[-1], end],
        }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = [
        Entry(name=t.name, dtype=t.dtype, shape=t.shape, offset=len(header) + at)
        for t, at in zip(tensors, ends, strict=True)
    ]
    return header, placed


def read_entries(path: Path) -> list[Entry]:
    """The tensors of a safetensors file, from its header.

    Raises OSError where the file cannot be read, and ValueError, naming it, where it is cut off or no such file, or
    holds a tensor in a dtype that is not one of ITEM_BYTES.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= size - 8 else b""
    try:
        described = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: its header cannot be read: it is damaged, or no safetensors file") from error
    try:
        described.pop("__metadata__", None)
        found = []
        for name, about in described.items():
            if about["dtype"] not in KNOWN_DTYPES:
                raise ValueError(
                    f"{name} is of dtype {about['dtype']}; {', '.join(KNOWN_DTYPES)} can be copied, and quantized "
                    "weights cannot"
                )
            begin, end = about["data_offsets"]
            shape = tuple(int(n) for n in about["shape"])
            entry = Entry(name=name, dtype=KNOWN_DTYPES[about["dtype"]], shape=shape, offset=8 + length + begin)
            if begin < 0 or end - begin != entry.nbytes or 8 + length + end > size:
                raise ValueError(
                    f"{name} of shape {list(shape)} should lie at bytes {begin} to {end} of the data, of which "
                    f"{size - 8 - length} are there: it is cut off or damaged"
                )
            found.append(entry)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = str(error) if isinstance(error, ValueError) else f"its header is damaged ({error!r})"
        raise ValueError(f"{path}: {told}") from error
    try:
        with safe_open(path, framework="pt"):  # finds what overlaps, stands twice or is left over
            pass
    except SafetensorError as error:
        raise ValueError(f"{path}: its header is damaged: {error}") from error
    return found


class Mapped:
    """A file of which tensors are used in place. Writable ones must be there in their full size."""

    def __init__(self, path: Path, writable: bool = False):
        self.path = path
        with path.open("r+b" if writable else "rb") as file:
            # Copies of pages that are written to, where nobody writes: torch asks for a buffer that it could write to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)

    def flat(self, entry: Entry) -> torch.Tensor:
        """[numel] of a tensor's elements, in its dtype."""
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not entry.numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=entry.numel, offset=entry.offset)

    def release(self) -> None:
        """Takes the file's pages out of this process's memory; what is used again comes back, from the kernel's."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Has what was written reach the disk. Raises OSError, naming the file."""
        with naming(self.path):
            self._map.flush()


def create(path: Path, header: bytes, nbytes: int) -> None:
    """A new file that begins with `header` and is zero up to `nbytes`, for which there is room on the disk.

    Raises OSError, naming the file: a disk that is full would otherwise end the process at a write to the mapped file.
    """
    with naming(path):
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            os.posix_fallocate(file, 0, max(nbytes, len(header)))
            write_at(file, header, 0)
        finally:
            os.close(file)


def sync_file(path: Path) -> None:
    """Has the file (or folder entry) reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(file: int, data: Any, offset: int) -> None:
    """Writes all of a buffer's bytes to an open file, from `offset` on."""
    view = memoryview(data).cast("B")
    while view:  # a write may do only a part
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names the file in an OSError that has no name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
