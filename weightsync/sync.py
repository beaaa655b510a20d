"""A push: the policy's live weights into every engine, verified, versioned, all or nothing."""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

from rl.faults import RoleError, SyncError, reason_of
from rl.roles import Metrics

TRAINER = "policy rank 0"  # who answers for the source: every rank packs, and the first one owns the ring


class Source(Protocol):
    """The policy's side. Calls return futures, so that packing and loading overlap."""

    def pack(self, bucket: int) -> Future[int]:
        """Copies bucket number `bucket` into its slot; gives its checksum."""
        ...

    def probe(self, row: list[int]) -> Future[list[float]]:
        """Log-probabilities, at temperature 1, of each token of `row` but the first."""
        ...


class Sink(Protocol):
    """One engine. A failed call leaves it paused."""

    name: str

    def pause(self) -> Future[Any]:
        """Stops stepping (requests stay) and clears every cache that was computed with the old weights."""
        ...

    def begin_update(self) -> Future[Any]: ...

    def load(self, bucket: int, checksum: int) -> Future[Any]: ...

    def finish_update(self, version: int) -> Future[Any]: ...

    def probe(self, row: list[int]) -> Future[list[float]]: ...

    def resume(self) -> Future[Any]: ...


class WeightSync:
    """Pushes through one ring to all engines at once; packing bucket k+1 overlaps loading bucket k."""

    def __init__(
        self,
        source: Source,
        sinks: Sequence[Sink],
        num_buckets: int,
        num_bytes: int,
        probe_row: list[int],
        probe_limit: float,
        timeout_s: float,
    ):
        self.source, self.sinks, self.num_buckets, self.num_bytes = source, sinks, num_buckets, num_bytes
        self.probe_row, self.probe_limit, self.timeout_s = probe_row, probe_limit, timeout_s

    def push(self, version: int) -> Metrics:
        """Pushes `version`. Raises SyncError, with every engine left paused, when any phase or the probe fails."""
        self._all("pause", version, [sink.pause() for sink in self.sinks])
        self._all("begin", version, [sink.begin_update() for sink in self.sinks])
        transfer = time.monotonic()
        packed = self.source.pack(0)
        for bucket in range(self.num_buckets):
            (checksum,) = self._all(f"pack bucket {bucket}", version, [packed], TRAINER)
            loading = [sink.load(bucket, checksum) for sink in self.sinks]
            if bucket + 1 < self.num_buckets:
                packed = self.source.pack(bucket + 1)
            if bucket == 0:
                expected = self.source.probe(self.probe_row)  # while the engines load
            self._all(f"load bucket {bucket}", version, loading)
        self._all("finish", version, [sink.finish_update(version) for sink in self.sinks])
        loaded = time.monotonic()
        gap = self._verify(version, expected)
        self._all("resume", version, [sink.resume() for sink in self.sinks])
        ended = time.monotonic()
        return {
            "sync/transfer_s": loaded - transfer,
            "sync/probe_s": ended - loaded,
            "sync/bytes": float(self.num_bytes),
            "sync/probe_max": gap,
        }

    def _verify(self, version: int, ours: "Future[list[float]]") -> float:
        """Largest gap between engine and trainer on the probe row. Raises SyncError above the limit."""
        theirs = self._all("probe", version, [sink.probe(self.probe_row) for sink in self.sinks])
        (expected,) = self._all("probe", version, [ours], TRAINER)
        worst = 0.0
        for sink, found in zip(self.sinks, theirs, strict=True):
            gaps = [abs(a - b) for a, b in zip(expected, found, strict=False)]
            if len(found) != len(expected) or not all(gap <= self.probe_limit for gap in gaps):
                shown = (
                    f"differ by {gaps[:8]}" if len(found) == len(expected) else f"are {len(found)}, not {len(expected)}"
                )
                raise SyncError(
                    f"{sink.name} does not hold the trainer's weights of version {version}: log-probabilities of the "
                    f"probe row {shown}, limit {self.probe_limit:.3g} (sync.probe_limit). It stays paused"
                )
            worst = max(worst, *gaps)
        return worst

    def _all(self, phase: str, version: int, futures: Sequence[Future[Any]], who: str | None = None) -> list[Any]:
        """Results of all futures within the deadline; the first failure becomes a SyncError naming engine and phase."""
        done, waiting = wait(futures, timeout=self.timeout_s, return_when=FIRST_EXCEPTION)
        for index, future in enumerate(futures):
            error = future.exception() if future in done else None
            if error is not None:
                name = who or self.sinks[index].name
                # A role's own error says already which of the ranks it was.
                message = str(error) if isinstance(error, RoleError) else f"{name} failed: {reason_of(error, name)}"
                message = "; ".join([message, *getattr(error, "__notes__", [])])
                raise SyncError(f"push of version {version}, phase {phase}: {message}") from error
        if waiting:
            silent = who or ", ".join(s.name for s, f in zip(self.sinks, futures, strict=True) if f in waiting)
            raise SyncError(
                f"push of version {version}, phase {phase}: {silent} did not answer in "
                f"{self.timeout_s:g} s (sync.timeout_s)"
            )
        return [future.result() for future in futures]
