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
Held = dict[tuple[int, int, int], int]  # digests by (rank, bucket, segment)


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
    paused: dict[str, float] = field(default_factory=dict)  # since when, by the monotonic clock
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


@dataclass(kw_only=True)
class Delivery:
    """One push to some engines: who is still in it, who failed and why, and who was cut off by another's failure."""

    left: list[Sink]
    failed: dict[str, str] = field(default_factory=dict)
    cut_off: list[Sink] = field(default_factory=list)

    def drop(self, down: dict[str, str], cuts_off: bool = False) -> None:
        """Some engines have failed. `cuts_off`: no bytes reach the others any more either."""
        self.failed |= down
        rest = [sink for sink in self.left if sink.name not in down]
        if down and cuts_off:
            self.cut_off += rest
            rest = []
        self.left = rest


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
        self.report: SyncReport | None = None  # of the last push, or the one that is going on
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
        """Pushes `version` to every engine that is left; each samples again once it is verified.

        Raises SyncError when the trainer fails, which leaves the engines that it was serving paused, or when no engine
        is left.
        """
        report = SyncReport(version=version, num_modules=len(self._modules), lost=dict(self.lost))
        self.report = report
        failed: dict[str, str] = {}
        if {sink.name for sink in self.living} != self._connected:
            failed = self._connect(self.living)
        ready = [sink for sink in self.living if sink.name not in failed]
        modules = None
        if self.cfg.delta and 0 < self._since_whole < self.cfg.full_every:
            started = time.monotonic()
            changed = self._trainer("compare", self.source.changed())
            modules = sorted({module for rank in changed for module in rank})
            report.detect_s = time.monotonic() - started
        report.modules = len(self._modules if modules is None else modules)
        self._since_whole = 1 if modules is None else self._since_whole + 1
        cut_off: list[Sink] = []
        for sinks in [[sink] for sink in ready] if self.cfg.one_by_one else [ready]:
            done = self._deliver(sinks, modules, report)
            failed |= done.failed
            cut_off += done.cut_off
        self._mend(failed, cut_off, report)
        return report.metrics()

    def _mend(self, failed: dict[str, str], cut_off: list[Sink], report: SyncReport) -> None:
        """Brings engines back that failed: by a whole push, else by a restart and a whole push; else gives them up.

        Those that another has cut off come first, without it; then each of the others alone.
        """
        if cut_off:
            self.say(f"{', '.join(sink.name for sink in cut_off)}: cut off by the failure of another engine; resend")
            done = self._deliver_anew(cut_off, report)
            failed |= done.failed | {sink.name: f"{sink.name} was cut off again" for sink in done.cut_off}
            report.resent += [sink.name for sink in cut_off if sink.name not in failed]
        for step, mended in (("resend", report.resent), ("restart", report.restarted)):
            sinks = [sink for sink in self.living if sink.name in failed]
            for sink in sinks:
                self.say(f"{failed[sink.name]}; {step}")
            failed = {}
            if step == "restart":
                failed = self._each(step, sinks, lambda sink: sink.restart(), self.restart_s)[1]
            for sink in sinks:
                if sink.name not in failed:
                    failed |= self._deliver_anew([sink], report).failed
            mended += [sink.name for sink in sinks if sink.name not in failed]
        for sink in self.living:
            if sink.name in failed:
                sink.stop()
        self.lost |= failed
        report.lost = dict(self.lost)
        if not self.living:
            raise SyncError("no rollout engine is left:\n  " + "\n  ".join(self.lost.values()))
        for why in failed.values():
            self.say(f"{why}; the engine is given up")

    def _deliver_anew(self, sinks: list[Sink], report: SyncReport) -> Delivery:
        """A whole push to some engines over new connections."""
        failed = self._connect(sinks)
        done = self._deliver([sink for sink in sinks if sink.name not in failed], None, report)
        done.failed |= failed
        return done

    def _connect(self, sinks: list[Sink]) -> dict[str, str]:
        """Plans for these engines and meets them. Gives those that failed, and why. The next push is whole."""
        shapes = self.source.shapes()
        wants, failed = self._each(
            "plan", sinks, lambda sink: sink.wanted(shapes, self.source.dtype), self.cfg.timeout_s
        )
        numbers: dict[str, int] = {}
        readers: list[Wanted] = []
        sizes: list[int] = []
        seats: dict[str, list[Seat]] = {name: [] for name in wants}
        for name, workers in wants.items():
            for wanted in workers:
                number = numbers.setdefault(wanted.fingerprint(), len(readers))
                if number == len(readers):
                    readers.append(wanted)
                    sizes.append(0)
                seats[name].append(Seat(reader=number, member=sizes[number]))
                sizes[number] += 1
        self._seats, self._connected, self._since_whole = seats, set(seats), 0
        if not seats:
            return failed
        self.links = self.source.plan(readers, sizes, uuid.uuid4().hex[:8])
        require_whole([link.stream for link in self.links], readers)
        self._modules = sorted({module for wanted in readers for module in wanted.modules})
        met = self.source.connect()
        answering = [sink for sink in sinks if sink.name in seats]
        _, down = self._each(
            "connect", answering, lambda sink: sink.connect(seats[sink.name], self.links), self.cfg.timeout_s
        )
        try:
            self._trainer("connect", met)
        except SyncError as error:
            if not down:
                raise
            down = {sink.name: str(error) for sink in answering} | down  # the ranks met none of them
        self._connected -= down.keys()
        return failed | down

    def _deliver(self, sinks: list[Sink], modules: list[str] | None, report: SyncReport) -> Delivery:
        """One push to some of the connected engines. Each resumes when it is verified, or else stays paused."""
        done = Delivery(left=list(sinks))
        began = time.monotonic()
        for sink in sinks:
            report.paused.setdefault(sink.name, began)
        self._step("pause", done, lambda sink: sink.pause(), before_last_byte=True)
        self._step("begin", done, lambda sink: sink.begin_update(modules), before_last_byte=True)
        if not done.left:
            return done
        self._trainer("begin", self.source.begin_push(modules))
        started = time.monotonic()
        held, ours = self._send(done, modules, report)
        if not done.left:
            return done
        prints = self._step("finish", done, lambda sink: sink.finish_update(report.version))
        loaded = time.monotonic()
        for sink in list(done.left):
            wanted = [fingerprint(held[seat.reader]) for seat in self._seats[sink.name]]
            if prints[sink.name] != wanted:
                why = self._text("finish", f"{sink.name} holds {prints[sink.name]}, sent were {wanted}")
                done.drop({sink.name: why})
        expected = self._trainer("probe", ours)
        theirs = self._step("probe", done, lambda sink: sink.probe(self.probe_row))
        for sink in list(done.left):
            if why := self._mismatch(sink.name, expected, theirs[sink.name]):
                done.drop({sink.name: why})
        self._step("resume", done, lambda sink: sink.resume())
        ended = time.monotonic()
        report.stall_s |= {sink.name: ended - report.paused[sink.name] for sink in done.left}
        report.transfer_s += loaded - started
        report.probe_s += ended - loaded
        return done

    def _send(
        self, done: Delivery, modules: list[str] | None, report: SyncReport
    ) -> tuple[dict[int, Held], Future[list[float]]]:
        """All rounds of a push: what each reader was sent, and the trainer's log-probabilities of the probe row."""
        readers = {seat.reader for sink in done.left for seat in self._seats[sink.name]}
        streams = [link.stream if modules is None else narrowed(link.stream, modules) for link in self.links]
        own = [[k for k, bucket in enumerate(stream.buckets) if bucket.reader in readers] for stream in streams]
        count = max(len(numbers) for numbers in own)
        rounds = [[numbers[k] if k < len(numbers) else None for numbers in own] for k in range(count)]
        held: dict[int, Held] = {reader: {} for reader in readers}
        packed = self.source.pack(rounds[0], 0) if rounds else None
        ours: Future[list[float]] | None = None
        for number, buckets in enumerate(rounds):
            assert packed is not None
            signed = self._trainer(f"pack round {number}", packed)
            items = []
            for link, stream, k, digests in zip(self.links, streams, buckets, signed, strict=True):
                if k is not None:
                    items.append(Item(rank=link.rank, number=k, slot=number % NUM_SLOTS, digests=digests))
                    held[stream.buckets[k].reader] |= {(link.rank, k, nth): d for nth, d in enumerate(digests)}
                    report.num_bytes += stream.buckets[k].nbytes
            loading = {sink.name: sink.load(items) for sink in done.left}
            if number + 1 < len(rounds):
                packed = self.source.pack(rounds[number + 1], (number + 1) % NUM_SLOTS)
            if ours is None:
                ours = self.source.probe(self.probe_row)  # while the engines load
            _, down = self._wait(f"load round {number}", loading, self.cfg.timeout_s)
            done.drop(down, cuts_off=self.cfg.channel is Channel.collective)
            if not done.left:
                break
        return held, ours or self.source.probe(self.probe_row)

    def _step(
        self, phase: str, done: Delivery, call: Callable[[Sink], Future[Any]], before_last_byte: bool = False
    ) -> dict[str, Any]:
        """Results of a call to every engine that is left, by its name; those that fail are dropped.

        `before_last_byte`: of a broadcast, which an engine that fails would keep from reaching the others.
        """
        results, down = self._each(phase, done.left, call, self.cfg.timeout_s)
        done.drop(down, cuts_off=before_last_byte and self.cfg.channel is Channel.collective)
        return results

    def _mismatch(self, name: str, ours: list[float], theirs: list[float]) -> str:
        """What is wrong with an engine's log-probabilities of the probe row; empty when nothing is."""
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
        if len(theirs) == len(ours) and all(gap <= self.probe_limit for gap in gaps):
            assert self.report is not None
            self.report.probe_max = max(self.report.probe_max, *gaps)
            return ""
        shown = f"differ by {gaps[:8]}" if len(theirs) == len(ours) else f"are {len(theirs)}, not {len(ours)}"
        return (
            f"{name} does not hold the trainer's weights{self._of_version()}: log-probabilities of the probe row "
            f"{shown}, limit {self.probe_limit:.3g} (sync.probe_limit)"
        )

    # -- waiting --

    def _text(self, phase: str, what: str) -> str:
        return f"{'push' if self.report else 'weight sync'}{self._of_version()}, phase {phase}: {what}"

    def _of_version(self) -> str:
        return f" of version {self.report.version}" if self.report else ""

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
