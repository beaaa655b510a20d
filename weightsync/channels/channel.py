"""What a channel is: a rank fills slots and sends them, a worker receives them. One file for each kind beside this."""

from collections.abc import Collection
from typing import Any, Protocol

import torch

from weightsync.channels.collective import GroupAddress, Listener
from weightsync.channels.disk import FolderAddress, FolderReader
from weightsync.channels.shm import RingAddress, RingReader
from weightsync.plan import Bucket


class Outlet(Protocol):
    """A rank's side."""

    @property
    def address(self) -> Any:
        """Tells a reader where to look; pickled."""
        ...

    def connect(self) -> None:
        """Meets the readers, where that takes both sides. Blocks until they are there too."""
        ...

    def slot(self, index: int) -> torch.Tensor:
        """uint8 [slot_bytes] to be filled: what was in it has been sent."""
        ...

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """A push of these modules (None: all) begins."""
        ...

    def send(self, index: int, reader: int, bucket: Bucket) -> None:
        """Lets a reader have a bucket, which is in a slot. Does not wait for it."""
        ...

    def end(self, version: int) -> None:
        """Everything has been sent, and read."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """A worker's side of what one rank sends."""

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As Outlet."""
        ...

    def receive(self, slot: int, bucket: Bucket, memory: torch.Tensor) -> torch.Tensor:
        """uint8 [at least bucket.nbytes], valid until the next call, of which the bucket's segments are what was sent;
        in `memory`, which is as large, unless it is shared."""
        ...


def open_inlet(address: Any, reader: int, member: int) -> Inlet:
    """The worker's side of an address: it is number `member` of the workers that are this reader."""
    if isinstance(address, GroupAddress):
        return Listener(address, reader, member)
    if isinstance(address, FolderAddress):
        return FolderReader(address)
    assert isinstance(address, RingAddress)
    return RingReader(address)
