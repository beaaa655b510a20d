"""A push is all or nothing: the right order, no slot overwritten unread, and any failure leaves engines paused."""

import concurrent.futures
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rl.faults import RoleOutOfMemory, SyncError
from tests.unit.stand_ins import TinyEngine, TinyLm, TinySource, broken, done
from weightsync.sync import WeightSync

ROW = [1, 2, 3, 4]
SCORES = [-1.0, -2.0, -3.0]


class Waited(Future[Any]):
    """A future whose work happens as late as possible: when somebody waits for it."""

    def __init__(self, work: Callable[[], Any]):
        super().__init__()
        self._work = work

    def work(self) -> None:
        if not self.done():
            self.set_result(self._work())


@pytest.fixture(autouse=True)
def late_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting is what makes pretended calls do their work."""
    really = concurrent.futures.wait

    def wait(futures: Sequence[Future[Any]], **how: Any) -> Any:
        for future in futures:
            if isinstance(future, Waited):
                future.work()
        return really(futures, **how)

    monkeypatch.setattr("weightsync.sync.wait", wait)


class Source:
    """Packs at once, into slots of a pretended ring."""

    def __init__(self, events: list[str], slots: list[int]):
        self.events, self.slots, self.answers = events, slots, dict[str, Future[Any]]()

    def pack(self, bucket: int) -> Future[int]:
        self.events.append(f"pack {bucket}")
        self.slots[bucket % len(self.slots)] = bucket
        return self.answers.get(f"pack {bucket}", done(1000 + bucket))

    def probe(self, row: list[int]) -> Future[list[float]]:
        assert row == ROW
        return self.answers.get("probe", done(list(SCORES)))


class Sink:
    """Reads a slot only when it is waited for. `answers` replaces the answer to a call."""

    def __init__(self, name: str, events: list[str], slots: list[int]):
        self.name, self.events, self.slots, self.answers = name, events, slots, dict[str, Future[Any]]()

    def _answer(self, call: str, work: Callable[[], Any] = lambda: None) -> Future[Any]:
        self.events.append(f"{self.name} {call}")
        return self.answers.get(call, Waited(work))

    def pause(self) -> Future[Any]:
        return self._answer("pause")

    def begin_update(self) -> Future[Any]:
        return self._answer("begin")

    def load(self, bucket: int, crc: int) -> Future[Any]:
        assert crc == 1000 + bucket

        def read() -> None:
            assert self.slots[bucket % len(self.slots)] == bucket, "the slot was overwritten before it was read"
            self.events.append(f"{self.name} read {bucket}")

        return self._answer(f"load {bucket}", read)

    def finish_update(self, version: int) -> Future[Any]:
        return self._answer(f"finish {version}")

    def probe(self, row: list[int]) -> Future[list[float]]:
        return self._answer("probe", lambda: list(SCORES))

    def resume(self) -> Future[Any]:
        return self._answer("resume")


class Bench:
    """A sync over two pretended engines A and B."""

    def __init__(self, num_buckets: int = 3, num_slots: int = 2, timeout_s: float = 5.0, limit: float = 1e-3):
        self.events: list[str] = []
        slots = [-1] * num_slots
        self.source = Source(self.events, slots)
        self.sinks = [Sink(name, self.events, slots) for name in "AB"]
        self.sync = WeightSync(self.source, self.sinks, num_buckets, 77, ROW, limit, timeout_s)

    @property
    def resumed(self) -> bool:
        return any(event.endswith("resume") for event in self.events)


def test_push_phases_come_in_order_on_every_engine() -> None:
    bench = Bench(num_buckets=2)
    metrics = bench.sync.push(version=7)
    for name in "AB":
        own = [event.removeprefix(f"{name} ") for event in bench.events if event.startswith(name)]
        assert own == [
            "pause", "begin", "load 0", "read 0", "load 1", "read 1", "finish 7", "probe", "resume",
        ]  # fmt: skip
    for earlier, later in (("pause", "begin"), ("begin", "pack 0"), ("read 1", "finish 7"), ("probe", "resume")):
        last = max(i for i, event in enumerate(bench.events) if event.endswith(earlier))
        assert last < min(i for i, event in enumerate(bench.events) if event.endswith(later))
    assert metrics["sync/bytes"] == 77
    assert metrics["sync/probe_max"] == 0


@pytest.mark.parametrize("num_slots", [2, 3])
def test_push_packs_ahead_of_the_slowest_reader_without_overwriting(num_slots: int) -> None:
    bench = Bench(num_buckets=7, num_slots=num_slots)
    bench.sync.push(0)
    assert [event for event in bench.events if "read" in event and "A" in event] == [f"A read {k}" for k in range(7)]
    for bucket in range(6):
        assert bench.events.index(f"pack {bucket + 1}") < bench.events.index(f"A read {bucket}")


PHASES = [
    ("pause", "pause"),
    ("begin", "begin"),
    ("load 1", "load bucket 1"),
    ("finish 4", "finish"),
    ("probe", "probe"),
]


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize(("call", "phase"), PHASES)
def test_push_failing_phase_names_engine_and_phase_and_resumes_nobody(call: str, phase: str, engine: int) -> None:
    bench = Bench()
    bench.sinks[engine].answers[call] = broken(RuntimeError("out of memory"))
    with pytest.raises(SyncError) as caught:
        bench.sync.push(4)
    assert f"push of version 4, phase {phase}: {'AB'[engine]} failed: out of memory" in str(caught.value)
    assert not bench.resumed


@pytest.mark.parametrize(
    ("call", "phase"), [("pack 0", "pack bucket 0"), ("pack 2", "pack bucket 2"), ("probe", "probe")]
)
def test_push_failing_trainer_is_named_and_resumes_nobody(call: str, phase: str) -> None:
    bench = Bench()
    bench.source.answers[call] = broken(RuntimeError("gone"))
    with pytest.raises(SyncError, match=f"phase {phase}: policy rank 0 failed: gone"):
        bench.sync.push(4)
    assert not bench.resumed


def test_push_failing_resume_is_named() -> None:
    bench = Bench()
    bench.sinks[1].answers["resume"] = broken(RuntimeError("gone"))
    with pytest.raises(SyncError, match="phase resume: B failed"):
        bench.sync.push(4)


@pytest.mark.parametrize(("call", "phase"), PHASES)
def test_push_silent_engine_times_out_with_its_name_and_the_key(call: str, phase: str) -> None:
    bench = Bench(timeout_s=0.02)
    bench.sinks[1].answers[call] = Future()
    with pytest.raises(SyncError, match=rf"phase {phase}: B did not answer in 0.02 s \(sync.timeout_s\)"):
        bench.sync.push(4)
    assert not bench.resumed


def test_push_failed_engine_is_named_though_another_is_silent() -> None:
    bench = Bench(timeout_s=0.05)
    bench.sinks[0].answers["load 0"] = Future()
    bench.sinks[1].answers["load 0"] = broken(RuntimeError("crc"))
    with pytest.raises(SyncError, match="B failed: crc"):
        bench.sync.push(4)
    assert not bench.resumed


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -2.0011, 0.0])
def test_push_probe_beyond_the_limit_names_the_engine_and_resumes_nobody(bad: float, place: int, engine: int) -> None:
    bench = Bench()
    scores = list(SCORES)
    scores[place] = bad if bad != -2.0011 else scores[place] - 1.1e-3
    bench.sinks[engine].answers["probe"] = done(scores)
    with pytest.raises(SyncError, match=f"{'AB'[engine]} does not hold the trainer's weights of version 4"):
        bench.sync.push(4)
    assert not bench.resumed


@pytest.mark.parametrize("place", [0, 1, 2])
def test_push_trainer_probe_with_nan_is_refused(place: int) -> None:
    bench = Bench()
    scores = list(SCORES)
    scores[place] = math.nan
    bench.source.answers["probe"] = done(scores)
    with pytest.raises(SyncError):
        bench.sync.push(4)
    assert not bench.resumed


def test_push_probe_within_the_limit_reports_the_worst_gap() -> None:
    bench = Bench()
    bench.sinks[0].answers["probe"] = done([-1.0, -2.0005, -3.0])
    bench.sinks[1].answers["probe"] = done([-1.0002, -2.0, -3.0])
    assert bench.sync.push(0)["sync/probe_max"] == pytest.approx(5e-4)
    assert bench.resumed


def test_push_probe_of_another_length_is_a_sync_error() -> None:
    bench = Bench()
    bench.sinks[0].answers["probe"] = done(SCORES[:2])
    with pytest.raises(SyncError):
        bench.sync.push(0)
    assert not bench.resumed


# -- the same with real memory and real weights --


def make_sync() -> tuple[WeightSync, TinySource, list[TinyEngine]]:
    source = TinySource(TinyLm(seed=1))
    engines = [TinyEngine(f"engine {i}", source, seed=50 + i) for i in range(2)]
    return WeightSync(source, engines, len(source.manifest.buckets), 0, ROW, 1e-6, 5.0), source, engines


def test_push_real_ring_brings_every_weight_bit_for_bit() -> None:
    sync, source, engines = make_sync()
    assert len(source.manifest.buckets) > 1
    for version in (0, 1):
        with torch.no_grad():
            source.lm.head.add_(0.5)
        sync.push(version)
        for engine in engines:
            assert all(torch.equal(v, source.lm.state_dict()[n]) for n, v in engine.lm.state_dict().items())
            assert (engine.version, engine.paused) == (version, False)


def test_push_byte_flipped_on_the_way_leaves_every_engine_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, source, engines = make_sync()
    sync.push(0)
    pack = source.pack

    def flip(bucket: int) -> Future[int]:
        crc = pack(bucket)
        if bucket == 1:
            source.sender.ring.slot(1)[13] ^= 1
        return crc

    monkeypatch.setattr(source, "pack", flip)
    with pytest.raises(SyncError, match="phase load bucket 1: engine 0 failed: crc of bucket 1"):
        sync.push(1)
    assert all(engine.paused and engine.version == 0 for engine in engines)


def test_push_engine_that_keeps_one_old_tensor_is_found_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, source, engines = make_sync()
    sync.push(0)
    load = engines[1].load
    monkeypatch.setattr(engines[1], "load", lambda bucket, crc: done() if bucket == 1 else load(bucket, crc))
    with torch.no_grad():
        source.lm.head.add_(torch.randn(source.lm.head.shape, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(SyncError, match="engine 1 does not hold the trainer's weights of version 1"):
        sync.push(1)
    assert all(engine.paused for engine in engines)


def test_push_after_a_failed_one_repairs_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, source, engines = make_sync()
    with monkeypatch.context() as patch:
        patch.setattr(engines[0], "load", lambda bucket, crc: broken(RuntimeError("once")))
        with pytest.raises(SyncError):
            sync.push(0)
    sync.push(0)
    assert all(torch.equal(engine.lm.head, source.lm.head) and not engine.paused for engine in engines)


def test_push_tells_which_rank_lacks_memory_and_not_another() -> None:
    bench = Bench()
    said = "phase policy.pack: policy rank 1: out of memory"
    bench.source.answers["pack 1"] = broken(RoleOutOfMemory(said))
    with pytest.raises(SyncError, match=f"phase pack bucket 1: {said}"):
        bench.sync.push(3)


def test_push_says_what_to_change_when_an_engine_lacks_memory() -> None:
    bench = Bench()
    bench.sinks[1].answers["load 1"] = broken(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(SyncError, match=r"B failed: out of memory \(CUDA out of memory.\); lower"):
        bench.sync.push(3)
    assert not bench.resumed
