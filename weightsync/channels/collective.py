"""Broadcasts between a rank of the trainer and its readers, in process groups that stand alone from either side's own.

Each rank has a group with each reader that it sends to: the rank first, then the workers that are this reader.
Workers pass bytes on to each other, and gloo tells of a member that has left only those that talk to it. So whoever
meets an error leaves too, which frees the others at once: otherwise they would wait for their deadline.
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from weightsync.plan import Bucket


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """Where the groups of one rank meet. `sizes[r]`: workers of reader r; `readers`: those that the rank sends to.

    `meet_s`: longest wait for the others to come; `timeout_s`: for what is sent.
    """

    host: str
    port: int
    name: str
    slot_bytes: int
    sizes: tuple[int, ...]
    readers: tuple[int, ...]
    meet_s: float
    timeout_s: float


class Broadcaster:
    """The rank's side: `num_slots` slots of `slot_bytes` in memory of its own."""

    def __init__(self, address: GroupAddress, num_slots: int):
        self.address = address
        self._slots = [torch.zeros(address.slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._sent: list[Future[None] | None] = [None] * num_slots
        self._groups: dict[int, Any] = {}
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="broadcasts")

    def connect(self) -> None:
        """Meets every reader. Blocks until all its workers are there too."""
        for reader in self.address.readers:
            self._groups[reader] = join(self.address, reader, 0)

    def slot(self, index: int) -> torch.Tensor:
        """Bytes [slot_bytes] of a slot, once what was in it has been sent. Raises RuntimeError when that failed."""
        if (sent := self._sent[index]) is not None:
            sent.result()
        self._sent[index] = None
        return self._slots[index]

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Outlet."""

    def send(self, index: int, reader: int, bucket: Bucket) -> None:
        """Starts the broadcasts of what is sent of a bucket; none when a member has left, whose load says why."""
        memory = self._slots[index]
        if (group := self._groups.get(reader)) is not None:
            works = [broadcast(group, memory[a:b], self.address.timeout_s) for a, b in bucket.ranges]
            self._sent[index] = self._waiting.submit(self._finish, reader, works)

    def _finish(self, reader: int, works: list[Any]) -> None:
        """As `finish`; leaves the group of this reader when that fails."""
        try:
            finish(works)
        except Exception:
            self._groups.pop(reader, None)
            raise

    def end(self, version: int) -> None:
        """As weightsync.channels.channel.Outlet."""

    def close(self) -> None:
        """As weightsync.channels.channel.Outlet. Waits for what is under way, at most timeout_s."""
        self._groups.clear()
        self._waiting.shutdown(wait=False)


class Listener:
    """A worker's side of its group with one rank."""

    def __init__(self, address: GroupAddress, reader: int, member: int):
        self._timeout_s = address.timeout_s
        self._group = join(address, reader, 1 + member) if reader in address.readers else None

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Inlet."""

    def receive(self, slot: int, bucket: Bucket, memory: torch.Tensor) -> torch.Tensor:
        """The next bytes, whatever the slot that they were sent from, in `memory`. Raises RuntimeError when they do not
        come, and leaves the group."""
        try:
            finish([broadcast(self._group, memory[a:b], self._timeout_s) for a, b in bucket.ranges])
        except Exception:
            self._group = None
            raise
        return memory


def join(address: GroupAddress, reader: int, member: int) -> Any:
    """The group of a rank (member 0) with a reader's workers. Raises RuntimeError when they do not come in time."""
    timeout = timedelta(seconds=address.meet_s)
    store = TCPStore(address.host, address.port, is_master=False, timeout=timeout)
    own = PrefixStore(f"{address.name}-{reader}", store)
    return ProcessGroupGloo(own, member, 1 + address.sizes[reader], timeout)


def broadcast(group: Any, data: torch.Tensor, timeout_s: float) -> Any:
    """Starts a broadcast from member 0; gives the work to wait for."""
    options = BroadcastOptions()
    options.timeout = timedelta(seconds=timeout_s)
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([data], options)


def finish(works: list[Any]) -> None:
    """Waits for broadcasts, and takes them out of the list: each keeps the connections of its group open."""
    try:
        while works:
            works.pop(0).wait()
    finally:
        works.clear()


def serve(host: str, timeout_s: float) -> TCPStore:
    """The store where groups meet, on a free port of this host."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
