"""The two sides of a push, as the driver sees them: the policy's ranks, and the engines. Calls return futures."""

from concurrent.futures import Future
from typing import Any, Protocol

from weightsync.plan import Item, Link, Seat, Turn, Wanted

VERSIONS_KEPT = 2  # of which the trainer remembers log-probabilities, and weights with sync.snapshot


class Source(Protocol):
    """The policy's ranks. Calls return futures, so that packing and loading overlap."""

    @property
    def dtype(self) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model folder: name -> shape."""
        ...

    def plan(self, readers: list[Wanted], sizes: list[int], name: str) -> list[Link]:
        """Has every rank plan what it sends to whom. `sizes`: workers of each reader; `name`: of this connection."""
        ...

    def connect(self) -> Future[Any]:
        """Has every rank meet its readers, who are connecting too."""
        ...

    def take(self, version: int) -> Future[Any]:
        """Copies the live weights, as those of `version`; two versions are kept (sync.snapshot)."""
        ...

    def changed(self, version: int) -> Future[list[list[str]]]:
        """For each rank the modules of which it has something that it has not sent."""
        ...

    def begin_push(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        """A push of these modules begins: of the live weights, or with sync.snapshot of the copy of that version."""
        ...

    def pack(self, name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        """Has every rank send one of its buckets, or none. What was packed two calls ago must have been read."""
        ...

    def end_push(self, version: int) -> Future[Any]:
        """All engines that are left of those that `begin_push` was for have everything, verified; none samples yet."""
        ...

    def probe(self, row: list[int]) -> Future[list[float]]:
        """Log-probabilities, at temperature 1, of each token of `row` but the first."""
        ...


class Sink(Protocol):
    """One engine. A failed call leaves it paused."""

    name: str

    def wanted(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> Future[list[Wanted]]:
        """What each of its workers wants."""
        ...

    def connect(self, name: str, seats: list[Seat], links: list[Link]) -> Future[list[set[tuple[int, int]]]]:
        """Gives each worker its place, and tells what the ranks will send; which buckets (rank, number) each reads."""
        ...

    def pause(self) -> Future[Any]:
        """Stops stepping (requests stay) and clears every cache that was computed with the old weights."""
        ...

    def begin_update(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        """Prepares for a push over the connection `name`, which must be its last one."""
        ...

    def load(self, name: str, items: list[Item]) -> Future[Any]: ...

    def finish_update(self, name: str, version: int) -> Future[list[str]]:
        """Gives each worker's fingerprint of what has arrived."""
        ...

    def probe(self, row: list[int]) -> Future[list[float]]: ...

    def resume(self, name: str) -> Future[Any]:
        """Lets it step again: its weights, which came over the connection `name`, have been verified."""
        ...

    def restart(self) -> Future[Any]:
        """Ends it, whatever it does, and starts it again with its model folder's weights, paused."""
        ...

    def stop(self) -> None:
        """Ends it: nobody will bring it back."""
        ...
