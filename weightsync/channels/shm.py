"""Shared memory between processes of one host: a ring of pre-touched slots.

The memory is an anonymous file (memfd) that others open through /proc: it has no name to leave behind, does not count
against the size of /dev/shm, and is gone with the last process that maps it, however that ends.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch

from weightsync.plan import Bucket


@dataclass(frozen=True, kw_only=True)
class RingAddress:
    """How another process of this host opens a ring."""

    path: str
    slot_bytes: int
    num_slots: int


class Ring:
    """`num_slots` slots of `slot_bytes` each. The creator holds the file; `path` lets other processes open it."""

    def __init__(self, slot_bytes: int, num_slots: int):
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self._fd = os.memfd_create("tandem-ring")
        os.ftruncate(self._fd, slot_bytes * num_slots)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.memory = open_ring(self.path, slot_bytes, num_slots)
        self.memory.zero_()  # touched once here: first-touch faults cost ten times a copy

    @property
    def address(self) -> RingAddress:
        return RingAddress(path=self.path, slot_bytes=self.slot_bytes, num_slots=self.num_slots)

    def connect(self) -> None:
        """As weightsync.channels.channel.Outlet: readers open the memory by themselves."""

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Outlet."""

    def send(self, index: int, reader: int, bucket: Bucket) -> None:
        """As weightsync.channels.channel.Outlet: what is in a slot is there for everybody."""

    def end(self, version: int) -> None:
        """As weightsync.channels.channel.Outlet."""

    def slot(self, index: int) -> torch.Tensor:
        """Bytes [slot_bytes] of one slot."""
        return slot_of(self.memory, index, self.slot_bytes)

    def close(self) -> None:
        """Gives the file up; mappings of other processes stay valid until they end."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RingReader:
    """A worker's side of a ring."""

    def __init__(self, address: RingAddress):
        self._slot_bytes = address.slot_bytes
        self._memory = open_ring(address.path, address.slot_bytes, address.num_slots)

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Inlet."""

    def receive(self, slot: int, bucket: Bucket, memory: torch.Tensor | None = None) -> torch.Tensor:
        """As weightsync.channels.channel.Inlet."""
        return slot_of(self._memory, slot, self._slot_bytes)


def open_ring(path: str, slot_bytes: int, num_slots: int) -> torch.Tensor:
    """Maps a ring of another process: uint8 [num_slots * slot_bytes]. Raises RuntimeError when it cannot be opened."""
    return torch.from_file(path, shared=True, size=slot_bytes * num_slots, dtype=torch.uint8)


def slot_of(memory: torch.Tensor, index: int, slot_bytes: int) -> torch.Tensor:
    return memory[index * slot_bytes : (index + 1) * slot_bytes]
