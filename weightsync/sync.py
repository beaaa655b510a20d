"""A push: the policy's live weights into every engine, verified, versioned; an engine never samples with anything else.

An engine that fails stays paused while the others go on, and gets a whole push of its own; fails it again, it is
restarted and gets another; fails it then too, it is given up.
"""

import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from conf.choices import Channel
from conf.schema import SyncConfig
from rl.faults import RoleError, SyncError, reason_of
from rl.roles import Metrics
from weightsync.channels.disk import folder_wanted
from weightsync.connection import Connection, Held, Streams, seat_workers
from weightsync.plan import TWO_DRIVERS, Item, Link, Turn
from weightsync.planner import require_whole
from weightsync.report import Delivery, SyncReport, memcpy_gb_s
from weightsync.sender import NUM_SLOTS
from weightsync.sides import VERSIONS_KEPT, Sink, Source

TRAINER = "the policy's ranks"


class WeightSync:
    """Pushes from all ranks to all engines.

    In each round every rank sends one bucket; the next is packed while this one is loaded. With sync.snapshot a push
    goes on in a thread once the ranks have copied their weights; `settle` waits for it.
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
        patience_s: float | None = None,
    ):
        """Plans and connects. Raises SyncError or weightsync.plan.PlanError when the two sides do not fit.

        `restart_s`: longest wait for an engine to start again; `say` is told of failures that were mended;
        `patience_s`: longest wait for the ranks, which may be busy with something else (sync.timeout_s when None).
        """
        self.patience_s = cfg.timeout_s if patience_s is None else patience_s
        self.source, self.sinks, self.cfg, self.restart_s, self.say = source, list(sinks), cfg, restart_s, say
        self.probe_row, self.probe_limit = probe_row, probe_limit
        self.lost: dict[str, str] = {}  # engines that were given up, and why
        self.report: SyncReport | None = None  # of the last push, or the one that is going on
        self.connection: Connection | None = None
        self._memcpy_gb_s = memcpy_gb_s()
        self._since_whole = 0  # pushes since the last whole one to everybody, that one included; 0: none
        self._expected: dict[int, list[float]] = {}  # the trainer's log-probabilities of the probe row, by version
        self._pushing: Future[Metrics] | None = None
        self._settled: Metrics = {}
        self.on_failure: Callable[[BaseException], None] = lambda _error: None  # of a push in its thread
        if failed := self._connect(self.sinks):
            raise SyncError("\n".join(failed.values()))

    @property
    def living(self) -> list[Sink]:
        return [sink for sink in self.sinks if sink.name not in self.lost]

    @property
    def links(self) -> list[Link]:
        """What the ranks send to whom, as it was planned last."""
        return [] if self.connection is None else self.connection.links

    @property
    def num_bytes(self) -> int:
        """Bytes of a whole push."""
        return sum(stream.num_bytes for link in self.links for stream in link.streams)

    def push(self, version: int) -> Metrics:
        """Pushes `version` to every engine that is left; each samples again once it is verified.

        With sync.snapshot it returns once the weights are copied and the engines paused, with the metrics of the push
        before. Raises SyncError when the trainer fails, which leaves the engines that it was serving paused, or when
        no engine is left.
        """
        before = self.settle()
        self._settled = {}
        if not self.cfg.snapshot:
            return self._push(version, lambda: None)
        taken = threading.Event()
        self._pushing = in_thread(lambda: self._push(version, taken.set), "weight sync")
        self._pushing.add_done_callback(lambda _: taken.set())
        taken.wait()  # not for ever: every phase of a push has its deadline
        if self._pushing.done() and self._pushing.exception() is not None:
            self.settle()
        self._pushing.add_done_callback(self._tell)
        return before

    def _tell(self, pushing: Future[Metrics]) -> None:
        if (error := pushing.exception()) is not None:
            self.on_failure(error)

    def settle(self) -> Metrics:
        """Waits for a push that is going on. Gives the metrics of the last one, until `push` has given them.

        Raises what `push` raises.
        """
        if self._pushing is not None:
            pushing, self._pushing = self._pushing, None
            self._settled = pushing.result()
        return self._settled

    def forget(self) -> None:
        """Has the next push be whole, as the first one."""
        self.settle()
        self._since_whole = 0

    def rollback(self) -> Metrics:
        """Gives the engines the version before the last one again, whole: sync.snapshot keeps its weights.

        Raises SyncError when the trainer does not hold it.
        """
        self.settle()
        assert self.report is not None
        version = max((kept for kept in self._expected if kept < self.report.version), default=None)
        if version is None or not self.cfg.snapshot:
            raise SyncError(
                f"no version before {self.report.version} is kept; sync.snapshot=true keeps one from the second push on"
            )
        self.forget()
        return self._push(version, lambda: None, again=True)

    def _push(self, version: int, taken: Callable[[], None], again: bool = False) -> Metrics:
        """`taken` is called once the weights may change; `again`: those of a version that was pushed before."""
        report = SyncReport(
            version=version,
            engines=[sink.name for sink in self.sinks],
            lost=dict(self.lost),
            memcpy_gb_s=self._memcpy_gb_s,
        )
        self.report = report
        if self.cfg.snapshot and not again:
            with report.timed("snapshot"):
                self._trainer("snapshot", self.source.take(version))
                self._expect(version, self.source.probe(self.probe_row))
        failed: dict[str, str] = {}
        if {sink.name for sink in self.living} != self._connected():
            paused = Delivery(left=self.living)
            self._note_pause(paused.left, report)
            self._step("pause", paused, lambda sink: sink.pause())  # one that cannot connect must not sample either
            failed = paused.failed | self._connect(paused.left)
        ready = [sink for sink in self.living if sink.name not in failed]
        modules = None
        if self.cfg.delta and 0 < self._since_whole < self.cfg.full_every:
            with report.timed("detect"):
                changed = self._trainer("compare", self.source.changed(version))
            modules = sorted({module for rank in changed for module in rank})
        if self.connection is not None:
            report.num_modules = len(self.connection.modules)
            report.modules = report.num_modules if modules is None else len(modules)
        since_whole, self._since_whole = self._since_whole, 0  # if the trainer fails now, the next push must be whole
        cut_off: list[Sink] = []
        for sinks in [[sink] for sink in ready] if self.cfg.one_by_one else [ready]:
            done = self._deliver(sinks, modules, report, taken)
            failed |= done.failed
            cut_off += done.cut_off
        self._since_whole = 1 if modules is None else since_whole + 1
        self._mend(failed, cut_off, report)
        return report.metrics()

    def _note_pause(self, sinks: Sequence[Sink], report: SyncReport) -> None:
        now = time.monotonic()
        for sink in sinks:
            report.paused.setdefault(sink.name, now)

    def _mend(self, failed: dict[str, str], cut_off: list[Sink], report: SyncReport) -> None:
        """Brings engines back that failed: by a whole push, else by a restart and a whole push; else gives them up.

        Those that another has cut off come first, without it; then each of the others alone. Raises SyncError when
        another driver has taken one of them: it is not to be taken back.
        """
        self._require_own(failed)
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
            self._require_own(failed)
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

    def _require_own(self, failed: dict[str, str]) -> None:
        """Raises SyncError when another driver has taken an engine."""
        if taken := [why for why in failed.values() if TWO_DRIVERS in why]:
            raise SyncError("\n".join(taken))

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
        self.connection, self._since_whole = None, 0
        if not wants:
            return failed
        if self.cfg.channel is Channel.disk:  # the folder is the only reader, and all workers read it
            workers = [wanted for found in wants.values() for wanted in found]
            folder = folder_wanted(shapes, self.source.dtype, workers)
            wants = {name: [folder] * len(found) for name, found in wants.items()}
        readers, sizes, seats = seat_workers(wants)
        name = uuid.uuid4().hex[:8]
        links = self.source.plan(readers, sizes, name)
        require_whole((stream for link in links for stream in link.streams), readers)
        modules = sorted({module for wanted in readers for module in wanted.modules})
        new = self.connection = Connection(name=name, links=links, seats=seats, modules=modules)
        met = self.source.connect()
        answering = [sink for sink in sinks if sink.name in seats]
        new.reads, down = self._each(
            "connect",
            answering,
            lambda sink: sink.connect(name, seats[sink.name], new.links_to(sink.name)),
            self.patience_s,
        )
        try:
            self._trainer("connect", met)
        except SyncError as error:
            if not down:
                raise
            new.reads = {}  # the ranks met none of them
            down = {sink.name: str(error) for sink in answering} | down
        return failed | down

    def _connected(self) -> set[str]:
        """Names of the engines that a push can reach."""
        return set() if self.connection is None else set(self.connection.reads)

    def _deliver(
        self,
        sinks: list[Sink],
        modules: list[str] | None,
        report: SyncReport,
        taken: Callable[[], None] = lambda: None,
    ) -> Delivery:
        """One push to some of the connected engines. Each resumes when it is verified, or else stays paused."""
        done = Delivery(left=list(sinks))
        if not self.cfg.snapshot:
            self._expected.pop(report.version, None)
        self._note_pause(sinks, report)
        version = report.version
        with report.timed("pause"):
            self._step("pause", done, lambda sink: sink.pause(), before_last_byte=True)
            if not done.left:
                return done
        with report.timed("begin"):
            assert self.connection is not None
            name = self.connection.name
            beginning = {sink.name: sink.begin_update(name, version, modules) for sink in done.left}
            self._trainer("begin", self.source.begin_push(name, version, modules))
            taken()
            streams, rounds = self.connection.rounds_to([sink.name for sink in done.left], modules)
            packing = [self.source.pack(name, turns) for turns in rounds[:NUM_SLOTS]]  # while the engines begin
            self._settle("begin", beginning, done, before_last_byte=True)
        with report.timed("transfer"):
            held = self._send(done, streams, rounds, packing, report)
            if not done.left:
                return done
        with report.timed("finish"):
            prints = self._step("finish", done, lambda sink: sink.finish_update(name, version))
        for sink in list(done.left):
            wanted = self.connection.fingerprints(sink.name, held)
            if prints[sink.name] != wanted:
                why = self._text("finish", f"{sink.name} holds {prints[sink.name]}, sent were {wanted}")
                done.drop({sink.name: why})
        with report.timed("probe"):
            if version not in self._expected:
                self._expect(version, self.source.probe(self.probe_row))
            theirs = self._step("probe", done, lambda sink: sink.probe(self.probe_row))
        for sink in list(done.left):
            if why := self._mismatch(sink.name, self._expected[version], theirs[sink.name]):
                done.drop({sink.name: why})
        if not done.left:
            return done
        with report.timed("resume"):
            self._trainer("end", self.source.end_push(version))
            self._step("resume", done, lambda sink: sink.resume(name))
        ended = time.monotonic()
        report.stall_s |= {sink.name: ended - report.paused[sink.name] for sink in done.left}
        report.verified += [sink.name for sink in done.left]
        return done

    def _expect(self, version: int, probe: Future[list[float]]) -> None:
        """Notes the trainer's log-probabilities of the probe row. Raises SyncError when they are not finite."""
        self._expected[version] = found = self._trainer("probe", probe)
        if not all(map(math.isfinite, found)):
            raise SyncError(
                self._text(
                    "probe",
                    f"{TRAINER} give log-probabilities {found[:8]} for the probe row: the policy's "
                    "weights are broken, and no engine gets them; resume from a checkpoint before that",
                )
            )
        for old in sorted(self._expected)[:-VERSIONS_KEPT]:
            del self._expected[old]

    def _send(
        self,
        done: Delivery,
        streams: Streams,
        rounds: Sequence[list[Turn | None]],
        packing: list[Future[list[Item | None]]],
        report: SyncReport,
    ) -> dict[int, Held]:
        """All rounds of a push, of which those in `packing` are under way; what each reader was sent.

        Engines are told of a round when it is packed, and so have the next one at hand when they are done with one;
        the ranks pack a round when what was in its slot has been read.
        """
        assert self.connection is not None
        name, readers_of = self.connection.name, self.connection.readers_of
        held: dict[int, Held] = {reader: {} for _, reader in streams}
        loading: deque[tuple[str, dict[str, Future[Any]]]] = deque()  # of rounds that are still in the slots
        probing: Future[list[float]] | None = None
        for number in range(len(rounds)):
            packed = self._trainer(f"pack round {number}", packing[number])
            items: list[Item] = [item for item in packed if item is not None]
            for item in items:
                held[item.reader] |= {(item.rank, item.number, nth): d for nth, d in enumerate(item.digests)}
                report.num_bytes += streams[item.rank, item.reader].buckets[item.number].num_sent
            own = {sink.name: readers_of([sink.name]) for sink in done.left}
            loads = {
                sink.name: sink.load(name, [item for item in items if item.reader in own[sink.name]])
                for sink in done.left
            }
            loading.append((f"load round {number}", loads))
            if probing is None and report.version not in self._expected:
                probing = self.source.probe(self.probe_row)  # while the engines load
            if len(loading) == NUM_SLOTS:
                self._settle(*loading.popleft(), done, before_last_byte=True)
            if not done.left:
                break
            if len(packing) == number + 1 < len(rounds):
                packing.append(self.source.pack(name, rounds[number + 1]))
        while loading:
            self._settle(*loading.popleft(), done, before_last_byte=True)
        if not done.left:
            wait(packing, timeout=self.cfg.timeout_s)  # nobody wants it any more, but it must be over
        if probing is not None:
            self._expect(report.version, probing)
        return held

    def _step(
        self, phase: str, done: Delivery, call: Callable[[Sink], Future[Any]], before_last_byte: bool = False
    ) -> dict[str, Any]:
        """As `_settle`, of a call to every engine that is left."""
        return self._settle(phase, {sink.name: call(sink) for sink in done.left}, done, before_last_byte)

    def _settle(
        self, phase: str, calls: dict[str, Future[Any]], done: Delivery, before_last_byte: bool = False
    ) -> dict[str, Any]:
        """Results of calls to engines, by their names; those of engines that are left and fail are dropped.

        `before_last_byte`: of a broadcast, which an engine that fails would keep from reaching the others.
        """
        left = {sink.name for sink in done.left}
        awaited = {name: call for name, call in calls.items() if name in left}
        results, down = self._wait(phase, awaited, self.cfg.timeout_s)
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
        results, down = self._wait(phase, {TRAINER: future}, self.patience_s)
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


def in_thread(work: Callable[[], Metrics], name: str) -> Future[Metrics]:
    """Runs `work` in a daemon thread of its own, and gives its future."""
    future: Future[Metrics] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
