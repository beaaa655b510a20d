"""Shared memory between processes of one host: a ring of pre-touched slots.

The memory is an anonymous file (memfd) that others open through /proc: it has no name to leave behind, does not count
against the size of /dev/shm, and is gone with the last process that maps it, however that ends.
"""

import os
from collections.abc import Iterator

import torch
import xxhash

from weightsync.manifest import Bucket


class Ring:
    """`num_slots` slots of `slot_bytes` each. The creator holds the file; `path` lets other processes open it."""

    def __init__(self, slot_bytes: int, num_slots: int):
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self._fd = os.memfd_create("tandem-ring")
        os.ftruncate(self._fd, slot_bytes * num_slots)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.memory = open_ring(self.path, slot_bytes, num_slots)
        self.memory.zero_()  # touched once here: first-touch faults cost ten times a copy

    def slot(self, index: int) -> torch.Tensor:
        """Bytes [slot_bytes] of one slot."""
        return slot_of(self.memory, index, self.slot_bytes)

    def close(self) -> None:
        """Gives the file up; mappings of other processes stay valid until they end."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_ring(path: str, slot_bytes: int, num_slots: int) -> torch.Tensor:
    """Maps a ring of another process: uint8 [num_slots * slot_bytes]. Raises RuntimeError when it cannot be opened."""
    return torch.from_file(path, shared=True, size=slot_bytes * num_slots, dtype=torch.uint8)


def slot_of(memory: torch.Tensor, index: int, slot_bytes: int) -> torch.Tensor:
    return memory[index * slot_bytes : (index + 1) * slot_bytes]


def views(slot: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a bucket, as views into the slot."""
    for spec in bucket.tensors:
        raw = slot[spec.offset : spec.offset + spec.nbytes]
        yield spec.name, raw.view(getattr(torch, spec.dtype)).view(spec.shape)


def checksum(slot: torch.Tensor, nbytes: int) -> int:
    """xxh3 (64 bits) of the first `nbytes` of a slot: finds what crc32 finds, at several times its speed."""
    return xxhash.xxh3_64_intdigest(slot[:nbytes].numpy())  # type: ignore[arg-type]  # a numpy array is a buffer
