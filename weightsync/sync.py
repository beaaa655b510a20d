"""A push: the policy's live weights into every engine, verified, versioned; an engine never samples with anything else.

An engine that fails stays paused while the others go on, and gets a whole push of its own; fails it again, it is
restarted and gets another; fails it then too, it is given up.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from conf.choices import Channel
from conf.schema import SyncConfig
from rl.faults import RoleError, SyncError, reason_of
from rl.roles import Metrics
from weightsync.plan import Item, Link, Seat, Wanted, fingerprint, narrowed, require_whole
from weightsync.sender import NUM_SLOTS

TRAINER = "the policy's ranks"


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

    def changed(self) -> Future[list[list[str]]]:
        """For each rank the modules of which it has something that it has not sent."""
        ...

    def begin_push(self, modules: list[str] | None) -> Future[Any]: ...

    def pack(self, numbers: list[int | None], slot: int) -> Future[list[tuple[int, ...]]]:
        """Has every rank send one of its buckets through a slot, or none; the digests of its segments, by rank."""
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

    def connect(self, seats: list[Seat], links: list[Link]) -> Future[Any]:
        """Gives each worker its place, and tells what the ranks will send."""
        ...

    def pause(self) -> Future[Any]:
        """Stops stepping (requests stay) and clears every cache that was computed with the old weights."""
        ...

    def begin_update(self, modules: list[str] | None) -> Future[Any]: ...

    def load(self, items: list[Item]) -> Future[Any]: ...

    def finish_update(self, version: int) -> Future[list[str]]:
        """Gives each worker's fingerprint of what has arrived."""
        ...

    def probe(self, row: list[int]) -> Future[list[float]]: ...

    def resume(self) -> Future[Any]: ...

    def restart(self) -> Future[Any]:
        """Ends it, whatever it does, and starts it again with its model folder's weights, paused."""
        ...

    def stop(self) -> None:
        """Ends it: nobody will bring it back."""
        ...


@dataclass(kw_only=True)
class SyncReport:
    """What one push did. Times are seconds; `modules` counts those sent, of `num_modules`."""

    version: int
    num_bytes: int = 0
    modules: int = 0
    num_modules: int = 0
    detect_s: float = 0.0
    transfer_s: float = 0.0
    probe_s: float = 0.0
    probe_max: float = 0.0
    stall_s: dict[str, float] = field(default_factory=dict)
    resent: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> Metrics:
        """For the logs."""
        return {
            "sync/bytes": float(self.num_bytes),
            "sync/changed": self.modules / max(1, self.num_modules),
            "sync/detect_s": self.detect_s,
            "sync/transfer_s": self.transfer_s,
            "sync/gb_s": self.num_bytes / 1e9 / max(1e-9, self.transfer_s),
            "sync/probe_s": self.probe_s,
            "sync/probe_max": self.probe_max,
            "sync/stall_s": max(self.stall_s.values(), default=0.0),
            "sync/num_resent": float(len(self.resent)),
            "sync/num_restarted": float(len(self.restarted)),
            "sync/num_lost": float(len(self.lost)),
        }


class WeightSync:
    """Pushes from all ranks to all engines.

    In each round every rank sends one bucket; the next is packed while this one is loaded.
    """

    def __init__(
        self,
        source: Source,
        sinks: Sequence[Sink],
        probe_row: list[int],
        probe_limit: float,
        cfg: SyncConfig,
        restart_s: float,
        say: Callable[[str], None] = lambda _line: None,
    ):
        """Plans and connects. Raises SyncError or weightsync.plan.PlanError when the two sides do not fit.

        `restart_s`: longest wait for an engine to start again; `say` is told of failures that were mended.
        """
        self.source, self.sinks, self.cfg, self.restart_s, self.say = source, list(sinks), cfg, restart_s, say
        self.probe_row, self.probe_limit = probe_row, probe_limit
        self.lost: dict[str, str] = {}  # engines that were given up, and why
        self._since_whole = 0  # pushes since the last whole one to everybody, that one included; 0: none
        if failed := self._connect(self.sinks):
            raise SyncError("\n".join(failed.values()))

    @property
    def living(self) -> list[Sink]:
        return [sink for sink in self.sinks if sink.name not in self.lost]

    @property
    def num_bytes(self) -> int:
        """Bytes of a whole push."""
        return sum(bucket.nbytes for link in self.links for bucket in link.stream.buckets)

    def push(self, version: int) -> Metrics:
        """Pushes `version`. Raises SyncError, with engines left paused, when the trainer fails or no engine is left."""
        self.report = SyncReport(version=version, num_modules=len(self._modules))
        failed: dict[str, str] = {}
        if {sink.name for sink in self.living} != self._connected:
            failed = self._connect(self.living)
        ready = [sink for sink in self.living if sink.name not in failed]
        modules = None
        if self.cfg.delta and 0 < self._since_whole < self.cfg.full_every:
            started = time.monotonic()
            changed = self._trainer("compare", self.source.changed())
            modules = sorted({module for rank in changed for module in rank})
            self.report.detect_s = time.monotonic() - started
        self.report.modules = len(self._modules if modules is None else modules)
        self._since_whole = 1 if modules is None else self._since_whole + 1
        for sinks in [[sink] for sink in ready] if self.cfg.one_by_one else [ready]:
            failed |= self._deliver(sinks, modules)
        if failed:
            self._repair(failed)
        return self.report.metrics()

    def _repair(self, failed: dict[str, str]) -> None:
        """Brings engines back that failed: by a whole push, else by a restart and a whole push; else gives them up."""
        for step, repaired in (("resend", self.report.resent), ("restart", self.report.restarted)):
            sinks = [sink for sink in self.living if sink.name in failed]
            for sink in sinks:
                self.say(f"{failed[sink.name]}; {step}")
            down: dict[str, str] = {}
            if step == "restart":
                _, down = self._each(step, sinks, lambda sink: sink.restart(), self.restart_s)
            failed = down | self._deliver_anew([sink for sink in sinks if sink.name not in down])
            repaired += [sink.name for sink in sinks if sink.name not in failed]
            if not failed:
                return
        self.lost |= failed
        self.report.lost = dict(self.lost)
        for sink in self.sinks:
            if sink.name in failed:
                sink.stop()
        if not self.living:
            raise SyncError("no rollout engine is left:\n  " + "\n  ".join(self.lost.values()))
        for why in failed.values():
            self.say(f"{why}; the engine is given up")

    def _deliver_anew(self, sinks: list[Sink]) -> dict[str, str]:
        """A whole push to some engines over new connections. Gives those that failed, and why."""
        if not sinks:
            return {}
        try:
            failed = self._connect(sinks)
        except SyncError as error:  # the ranks could not meet them
            return {sink.name: str(error) for sink in sinks}
        return failed | self._deliver([sink for sink in sinks if sink.name not in failed], None)

    def _connect(self, sinks: list[Sink]) -> dict[str, str]:
        """Plans for these engines and meets them. Gives those that failed, and why. The next push is whole."""
        shapes = self.source.shapes()
        wants, failed = self._each(
            "plan", sinks, lambda sink: sink.wanted(shapes, self.source.dtype), self.cfg.timeout_s
        )
        readers: dict[str, Wanted] = {}
        members: dict[str, int] = {}
        seats: dict[str, list[Seat]] = {name: [] for name in wants}
        for name, workers in wants.items():
            for wanted in workers:
                key = wanted.fingerprint()
                readers.setdefault(key, wanted)
                members[key] = members.get(key, 0) + 1
                seats[name].append(Seat(reader=list(readers).index(key), member=members[key] - 1))
        self._seats, self._connected, self._since_whole = seats, set(seats), 0
        if not seats:
            return failed
        wanted_all = list(readers.values())
        self.links = self.source.plan(wanted_all, list(members.values()), uuid.uuid4().hex[:8])
        require_whole([link.stream for link in self.links], wanted_all)
        self._modules = sorted({module for wanted in wanted_all for module in wanted.modules})
        met = self.source.connect()
        answering = [sink for sink in sinks if sink.name in seats]
        _, down = self._each(
            "connect", answering, lambda sink: sink.connect(seats[sink.name], self.links), self.cfg.timeout_s
        )
        self._trainer("connect", met)
        self._connected -= down.keys()
        return failed | down

    def _deliver(self, sinks: list[Sink], modules: list[str] | None) -> dict[str, str]:
        """One push to some of the connected engines, which resume when it is verified. Gives those that failed, and
        why. They are paused.
        """
        left, failed, began = list(sinks), dict[str, str](), time.monotonic()
        if not left:
            return failed

        def each(phase: str, call: Callable[[Sink], Future[Any]]) -> dict[str, Any]:
            results, down = self._each(phase, left, call, self.cfg.timeout_s)
            failed.update(down)
            if down and self.cfg.channel is Channel.collective:  # no broadcast reaches the others of its group
                failed.update({sink.name: f"{sink.name}: a member of its group failed" for sink in left} | down)
            left[:] = [sink for sink in left if sink.name not in failed]
            return results

        each("pause", lambda sink: sink.pause())
        each("begin", lambda sink: sink.begin_update(modules))
        self._trainer("begin", self.source.begin_push(modules))
        started = time.monotonic()
        streams = [link.stream if modules is None else narrowed(link.stream, modules) for link in self.links]
        counts = [len(stream.buckets) for stream in streams]
        rounds = [[k if k < count else None for count in counts] for k in range(max(counts))]
        held: dict[int, dict[tuple[int, int, int], int]] = {s.reader: {} for own in self._seats.values() for s in own}
        packed = self.source.pack(rounds[0], 0) if rounds else None
        expected = None
        for number, buckets in enumerate(rounds):
            assert packed is not None
            signed = self._trainer(f"pack round {number}", packed)
            items = [
                Item(rank=link.rank, number=bucket, slot=number % NUM_SLOTS, digests=own)
                for link, bucket, own in zip(self.links, buckets, signed, strict=True)
                if bucket is not None
            ]
            for item, stream in ((item, streams[item.rank]) for item in items):
                bucket = stream.buckets[item.number]
                self.report.num_bytes += bucket.nbytes
                held[bucket.reader] |= {(item.rank, item.number, k): digest for k, digest in enumerate(item.digests)}
            loading = {sink.name: sink.load(items) for sink in left}
            if number + 1 < len(rounds):
                packed = self.source.pack(rounds[number + 1], (number + 1) % NUM_SLOTS)
            if expected is None:
                expected = self.source.probe(self.probe_row)  # while the engines load
            each(f"load round {number}", lambda sink, loading=loading: loading[sink.name])  # type: ignore[misc]
            if not left:
                return failed
        prints = each("finish", lambda sink: sink.finish_update(self.report.version))
        loaded = time.monotonic()
        for sink in list(left):
            wanted = [fingerprint(held[seat.reader]) for seat in self._seats[sink.name]]
            if prints[sink.name] != wanted:
                failed[sink.name] = self._text("finish", f"{sink.name} holds {prints[sink.name]}, sent were {wanted}")
                left.remove(sink)
        ours = self._trainer("probe", expected or self.source.probe(self.probe_row))
        theirs = each("probe", lambda sink: sink.probe(self.probe_row))
        for sink in list(left):
            if why := self._mismatch(sink.name, ours, theirs[sink.name]):
                failed[sink.name] = why
                left.remove(sink)
        each("resume", lambda sink: sink.resume())
        ended = time.monotonic()
        self.report.stall_s |= {sink.name: ended - began for sink in left}
        self.report.transfer_s += loaded - started
        self.report.probe_s += ended - loaded
        return failed

    def _mismatch(self, name: str, ours: list[float], theirs: list[float]) -> str:
        """What is wrong with an engine's log-probabilities of the probe row; empty when nothing is."""
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
        if len(theirs) == len(ours) and all(gap <= self.probe_limit for gap in gaps):
            self.report.probe_max = max(self.report.probe_max, *gaps)
            return ""
        shown = f"differ by {gaps[:8]}" if len(theirs) == len(ours) else f"are {len(theirs)}, not {len(ours)}"
        return (
            f"{name} does not hold the trainer's weights of version {self.report.version}: log-probabilities of the "
            f"probe row {shown}, limit {self.probe_limit:.3g} (sync.probe_limit)"
        )

    # -- waiting --

    def _text(self, phase: str, what: str) -> str:
        begin = f"push of version {self.report.version}" if hasattr(self, "report") else "weight sync"
        return f"{begin}, phase {phase}: {what}"

    def _trainer(self, phase: str, future: Future[Any]) -> Any:
        """The trainer's answer. Raises SyncError when it fails or does not come."""
        results, down = self._wait(phase, {TRAINER: future}, self.cfg.timeout_s)
        if down:
            raise SyncError(down[TRAINER]) from future.exception() if future.done() else None
        return results[TRAINER]

    def _each(
        self, phase: str, sinks: list[Sink], call: Callable[[Sink], Future[Any]], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """(results, why it failed) of a call to each engine, by its name."""
        return self._wait(phase, {sink.name: call(sink) for sink in sinks}, timeout_s)

    def _wait(
        self, phase: str, futures: dict[str, Future[Any]], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        done, _ = wait(list(futures.values()), timeout=timeout_s)
        results, failed = {}, {}
        for name, future in futures.items():
            error = future.exception() if future in done else None
            if future not in done:
                failed[name] = self._text(phase, f"{name} did not answer in {timeout_s:g} s (sync.timeout_s)")
            elif error is None:
                results[name] = future.result()
            else:
                # A role's own error says already which of the ranks it was.
                said = str(error) if isinstance(error, RoleError) else f"{name} failed: {reason_of(error, name)}"
                failed[name] = self._text(phase, "; ".join([said, *getattr(error, "__notes__", [])]))
        return results, failed
