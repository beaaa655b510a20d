"""What a channel is: a rank fills slots and sends them, a worker receives them. One file for each kind beside this."""

from typing import Any, Protocol

import torch

from weightsync.channels.collective import GroupAddress, Listener
from weightsync.channels.shm import RingAddress, RingReader


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

    def send(self, index: int, nbytes: int, reader: int) -> None:
        """Lets a reader have the first bytes of a slot. Does not wait for it."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """A worker's side of what one rank sends."""

    def receive(self, slot: int, nbytes: int, memory: torch.Tensor) -> torch.Tensor:
        """uint8 [at least nbytes], valid until the next call; in `memory`, which is as large, unless it is shared."""
        ...


def open_inlet(address: Any, reader: int, member: int) -> Inlet:
    """The worker's side of an address: it is number `member` of the workers that are this reader."""
    if isinstance(address, GroupAddress):
        return Listener(address, reader, member)
    assert isinstance(address, RingAddress)
    return RingReader(address)
