"""A push is all or nothing: the right order, no slot overwritten unread, and any failure leaves engines paused."""

import concurrent.futures
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from conf.choices import Channel
from conf.schema import SyncConfig
from rl.faults import RoleOutOfMemory, SyncError
from tests.unit.stand_ins import TinyEngine, TinyLm, TinySource, broken, done
from weightsync.plan import Bucket, Buffer, Item, Link, Seat, Segment, Stream, Turn, Wanted, fingerprint
from weightsync.regions import Moves, Regions
from weightsync.sender import NUM_SLOTS
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


def stream(num_buckets: int) -> Stream:
    """Buckets of one module each, of 11 bytes."""
    buckets = [
        Bucket(
            moves=Moves.of([(0, 1, 2, 0, 0, 2, 1, 0, 0, 2, 1)]),
            offset=np.zeros(1, np.int64),
            segments=(Segment(module=f"m{k}", first=0, last=1, begin=0, end=11),),
            nbytes=11,
        )
        for k in range(num_buckets)
    ]
    return Stream(reader=0, buckets=dict(enumerate(buckets)))


def wanted(num_buckets: int, ranks: int) -> Wanted:
    """What those buckets bring."""
    rows = [(0, 2 * k, 1, 2, 2, 0, 0, 2, 1) for k in range(num_buckets * ranks)]
    return Wanted(
        names=("w",),
        regions=Regions.of(rows),
        buffers=tuple(Buffer(module=f"m{k}", name="w", dtype="float32") for k in range(num_buckets)),
    )


class Source:
    """Ranks that pack at once, into slots of pretended rings; each has `count` buckets of one module each."""

    dtype = "float32"

    def __init__(self, events: list[str], slots: list[list[str]], ranks: int, count: int):
        self.events, self.slots, self.ranks, self.count = events, slots, ranks, count
        self.answers = dict[str, Future[Any]]()
        self.different: list[list[str]] = []
        self.meets: list[Future[Any]] = []

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"w": (2,)}

    def plan(self, readers: list[Wanted], sizes: list[int], name: str) -> list[Link]:
        assert len(readers) == len(sizes) == 1 and name
        self.events.append(f"plan for {sizes[0]}")
        streams = (stream(self.count),)
        return [Link(rank=rank, streams=streams, signed=("",), address=None) for rank in range(self.ranks)]

    def connect(self) -> Future[Any]:
        return self.meets.pop(0) if self.meets else done()

    def take(self, version: int) -> Future[Any]:
        return done()

    def changed(self, version: int) -> Future[list[list[str]]]:
        return self.answers.get("changed", done(self.different))

    def begin_push(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        self.events.append("take")
        self.packed = 0
        return self.answers.get("take", done())

    def pack(self, name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        ((reader, which),) = {turn for turn in turns if turn is not None}
        module = stream(self.count).buckets[which].segments[0].module
        self.events.append(f"pack {module}")
        slot, self.packed = self.packed % NUM_SLOTS, self.packed + 1
        items: list[Item | None] = []
        for rank in range(self.ranks):
            self.slots[rank][slot] = module
            digest = 1000 * (rank + 1) + which
            items.append(Item(rank=rank, reader=reader, number=which, slot=slot, digests=(digest,)))
        return self.answers.get(f"pack {module}", done(items))

    def end_push(self, version: int) -> Future[Any]:
        self.events.append("end")
        return self.answers.get("end", done())

    def probe(self, row: list[int]) -> Future[list[float]]:
        assert row == ROW
        return self.answers.get("probe", done(list(SCORES)))


class Sink:
    """Reads a slot only when it is waited for. `answers[call]` replaces the next answers to a call."""

    def __init__(self, name: str, events: list[str], slots: list[list[str]], wants: Wanted):
        self.name, self.events, self.slots, self.wants = name, events, slots, wants
        self.answers = dict[str, list[Future[Any]]]()
        self.held: dict[tuple[int, int, int], int] = {}
        self.state = "paused"

    def _answer(self, call: str, work: Callable[[], Any] = lambda: None) -> Future[Any]:
        self.events.append(f"{self.name} {call}")
        given = self.answers.get(call)
        return given.pop(0) if given else Waited(work)

    def wanted(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> Future[list[Wanted]]:
        assert (shapes, dtype) == ({"w": (2,)}, "float32")
        return self._answer("wanted", lambda: [self.wants])

    def connect(self, name: str, seats: list[Seat], links: list[Link]) -> Future[list[set[tuple[int, int]]]]:
        self.connection = name
        (self.seat,) = seats
        reads = {(link.rank, number) for link in links for number in link.streams[0].buckets}
        return self._answer("connect", lambda: [reads])

    def pause(self) -> Future[Any]:
        self.state = "paused"
        return self._answer("pause")

    def begin_update(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        self.held = {}
        return self._answer("begin")

    def load(self, name: str, items: list[Item]) -> Future[Any]:
        (which,) = {stream(item.number + 1).buckets[item.number].segments[0].module for item in items}

        def read() -> None:
            for item in items:
                assert item.digests == (1000 * (item.rank + 1) + item.number,)
                assert self.slots[item.rank][item.slot] == which, "the slot was overwritten before it was read"
                self.held[item.rank, item.number, 0] = item.digests[0]
            self.events.append(f"{self.name} read {which}")

        return self._answer(f"load {which}", read)

    def finish_update(self, name: str, version: int) -> Future[list[str]]:
        return self._answer(f"finish {version}", lambda: [fingerprint(self.held)])

    def probe(self, row: list[int]) -> Future[list[float]]:
        return self._answer("probe", lambda: list(SCORES))

    def resume(self, name: str) -> Future[Any]:
        assert name == self.connection

        def work() -> None:
            self.state = "sampling"

        return self._answer("resume", work)

    def restart(self) -> Future[Any]:
        self.state = "paused"
        return self._answer("restart")

    def stop(self) -> None:
        self.state = "stopped"


class Bench:
    """A sync over pretended ranks and two pretended engines A and B."""

    def __init__(self, ranks: int = 1, count: int = 3, limit: float = 1e-3, **sync: Any):
        self.events: list[str] = []
        slots = [[""] * NUM_SLOTS for _ in range(ranks)]
        self.source = Source(self.events, slots, ranks, count)
        self.sinks = [Sink(name, self.events, slots, wanted(count, ranks)) for name in "AB"]
        self.said: list[str] = []
        cfg = SyncConfig(**{"timeout_s": 5.0} | sync)
        self.sync = WeightSync(self.source, self.sinks, ROW, limit, cfg, 5.0, self.said.append)
        self.events.clear()

    @property
    def states(self) -> list[str]:
        return [sink.state for sink in self.sinks]

    def of(self, name: str) -> list[str]:
        """What one engine was asked, and read."""
        return [event.removeprefix(f"{name} ") for event in self.events if event.startswith(f"{name} ")]


ROUNDS = ["load m0", "load m1", "read m0", "load m2", "read m1", "read m2"]  # told of a round while it reads another
WHOLE = ["pause", "begin", *ROUNDS, "finish 4", "probe", "resume"]


def test_push_phases_come_in_order_on_every_engine() -> None:
    bench = Bench()
    metrics = bench.sync.push(version=4)
    for name in "AB":
        assert bench.of(name) == WHOLE
    for earlier, later in (("pause", "begin"), ("begin", "take"), ("take", "pack m0"), ("probe", "resume")):
        last = max(i for i, event in enumerate(bench.events) if event.endswith(earlier))
        assert last < min(i for i, event in enumerate(bench.events) if event.endswith(later))
    assert metrics["sync/bytes"] == 33 and metrics["sync/probe_max"] == 0 and metrics["sync/changed"] == 1
    assert metrics["sync/stall_s"] == max(metrics[f"sync/engine_{n}_stall_s"] for n in (0, 1)) > 0
    assert bench.states == ["sampling"] * 2 and not bench.said


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_push_packs_ahead_of_the_slowest_reader_without_overwriting(ranks: int) -> None:
    bench = Bench(ranks, count=7)
    bench.sync.push(0)
    assert [event for event in bench.of("A") if "read" in event] == [f"read m{k}" for k in range(7)]
    for bucket in range(6):
        assert bench.events.index(f"pack m{bucket + 1}") < bench.events.index(f"A load m{bucket + 1}")
        assert bench.events.index(f"A load m{bucket + 1}") < bench.events.index(f"A read m{bucket}")
    assert len(bench.sinks[0].held) == len(bench.sinks[1].held) == 7 * ranks


# -- an engine that fails --

CALLS = [
    ("pause", "pause"),
    ("begin", "begin"),
    ("load m1", "load round 1"),
    ("finish 4", "finish"),
    ("probe", "probe"),
    ("resume", "resume"),
]
ANEW = ["wanted", "connect", *WHOLE]


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize(("call", "phase"), CALLS)
def test_engine_that_fails_once_gets_a_push_of_its_own(call: str, phase: str, engine: int) -> None:
    bench = Bench()
    name, other = "AB"[engine], "BA"[engine]
    bench.sinks[engine].answers[call] = [broken(RuntimeError("out of order"))]
    metrics = bench.sync.push(4)
    assert bench.said == [f"push of version 4, phase {phase}: {name} failed: out of order; resend"]
    assert bench.of(other) == WHOLE, "the others go on"
    assert bench.of(name)[-len(ANEW) :] == ANEW and bench.states == ["sampling"] * 2
    last = max(i for i, event in enumerate(bench.events) if event == f"{other} resume")
    assert last < bench.events.index(f"{name} wanted")
    assert (metrics["sync/num_resent"], metrics["sync/num_restarted"], metrics["sync/num_lost"]) == (1, 0, 0)
    bench.events.clear()
    bench.sync.push(5)  # to both again, who are connected anew
    paused = ["A pause", "B pause"]  # an engine that cannot connect must not sample either
    assert bench.events[:5] == [*paused, "A wanted", "B wanted", "plan for 2"] and bench.states == ["sampling"] * 2


@pytest.mark.parametrize(("call", "phase"), CALLS)
def test_engine_that_fails_twice_is_restarted(call: str, phase: str) -> None:
    bench = Bench()
    bench.sinks[1].answers[call] = [broken(RuntimeError("once")), broken(RuntimeError("twice"))]
    metrics = bench.sync.push(4)
    wanted = [f"push of version 4, phase {phase}: B failed: {what}" for what in ("once; resend", "twice; restart")]
    assert bench.said == wanted
    assert bench.of("B")[-len(ANEW) - 1 :] == ["restart", *ANEW] and bench.states == ["sampling"] * 2
    assert (metrics["sync/num_resent"], metrics["sync/num_restarted"], metrics["sync/num_lost"]) == (0, 1, 0)


@pytest.mark.parametrize("call", [call for call, _ in CALLS] + ["restart"])
def test_engine_that_fails_thrice_is_given_up_and_the_others_go_on(call: str) -> None:
    bench = Bench()
    bench.sinks[1].answers[call] = [broken(RuntimeError("gone")) for _ in range(3)]
    if call == "restart":
        bench.sinks[1].answers["pause"] = [broken(RuntimeError("gone")) for _ in range(3)]
    metrics = bench.sync.push(4)
    assert bench.states == ["sampling", "stopped"] and "B failed: gone; the engine is given up" in bench.said[-1]
    assert metrics["sync/num_lost"] == 1
    bench.events.clear()
    bench.sync.push(5)
    assert not bench.of("B") and bench.of("A")[-1] == "resume"


def test_engine_that_cannot_connect_again_does_not_hold_up_another() -> None:
    bench = Bench()
    for sink in bench.sinks:
        sink.answers["begin"] = [broken(RuntimeError("once"))]
    bench.sinks[1].answers["wanted"] = [broken(RuntimeError("still starting"))]
    metrics = bench.sync.push(4)
    assert (metrics["sync/num_resent"], metrics["sync/num_restarted"]) == (1, 1) and bench.states == ["sampling"] * 2
    assert bench.said[-1] == "push of version 4, phase plan: B failed: still starting; restart"


def test_no_engine_left_is_an_error_with_every_reason() -> None:
    bench = Bench()
    for sink in bench.sinks:
        sink.answers["begin"] = [broken(RuntimeError(f"{sink.name} is broken")) for _ in range(3)]
    with pytest.raises(SyncError, match=r"no rollout engine is left:\n.*A is broken\n.*B is broken"):
        bench.sync.push(4)
    assert bench.states == ["stopped", "stopped"]


def test_silent_engine_is_named_with_the_key() -> None:
    bench = Bench(timeout_s=0.02)
    bench.sinks[1].answers["begin"] = [Future()]
    bench.sync.push(4)
    assert bench.said == ["push of version 4, phase begin: B did not answer in 0.02 s (sync.timeout_s); resend"]


def test_engine_that_holds_something_else_is_found_by_its_fingerprint() -> None:
    bench = Bench()
    bench.sinks[1].answers["finish 4"] = [done(["0" * 16])]
    bench.sync.push(4)
    assert "phase finish: B holds ['0000000000000000'], sent were [" in bench.said[0]
    assert bench.states == ["sampling"] * 2


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -2.0011, 0.0])
def test_probe_beyond_the_limit_names_the_engine(bad: float, place: int) -> None:
    bench = Bench()
    scores = list(SCORES)
    scores[place] = bad if bad != -2.0011 else scores[place] - 1.1e-3
    bench.sinks[1].answers["probe"] = [done(scores) for _ in range(3)]
    bench.sync.push(4)
    assert "B does not hold the trainer's weights of version 4" in bench.said[0]
    assert bench.states == ["sampling", "stopped"]


def test_probe_within_the_limit_reports_the_worst_gap() -> None:
    bench = Bench()
    bench.sinks[0].answers["probe"] = [done([-1.0, -2.0005, -3.0])]
    bench.sinks[1].answers["probe"] = [done([-1.0002, -2.0, -3.0])]
    assert bench.sync.push(0)["sync/probe_max"] == pytest.approx(5e-4)


def test_probe_of_another_length_is_a_failure() -> None:
    bench = Bench()
    bench.sinks[0].answers["probe"] = [done(SCORES[:2])]
    bench.sync.push(0)
    assert "are 2, not 3" in bench.said[0]


def test_engine_that_lacks_memory_says_what_to_change() -> None:
    bench = Bench()
    bench.sinks[1].answers["load m1"] = [broken(torch.OutOfMemoryError("CUDA out of memory."))]
    bench.sync.push(3)
    assert "B failed: out of memory (CUDA out of memory.); lower" in bench.said[0]


@pytest.mark.parametrize(("call", "phase"), CALLS[:3])
def test_broadcast_that_loses_a_member_is_made_anew_first_without_it(call: str, phase: str) -> None:
    bench = Bench(channel=Channel.collective)
    bench.sinks[1].answers[call] = [broken(RuntimeError("gone"))]
    metrics = bench.sync.push(4)
    assert bench.said == [
        "A: cut off by the failure of another engine; resend",
        f"push of version 4, phase {phase}: B failed: gone; resend",
    ]
    assert bench.states == ["sampling"] * 2 and bench.of("A")[-len(ANEW) :] == ANEW
    assert metrics["sync/num_resent"] == 2
    assert bench.events.index("B wanted") > max(k for k, event in enumerate(bench.events) if event == "A resume")


@pytest.mark.parametrize(("call", "phase"), CALLS)
def test_engine_that_always_fails_does_not_take_others_of_its_broadcast_along(call: str, phase: str) -> None:
    bench = Bench(channel=Channel.collective)
    bench.sinks[1].answers[call] = [broken(RuntimeError("gone")) for _ in range(3)]
    metrics = bench.sync.push(4)
    assert bench.states == ["sampling", "stopped"] and metrics["sync/num_lost"] == 1
    assert bench.sync.push(5)["sync/num_lost"] == 1 and bench.states[0] == "sampling"


def test_ranks_that_cannot_meet_an_engine_meet_the_others() -> None:
    bench = Bench(channel=Channel.collective)
    bench.sinks[1].answers["begin"] = [broken(RuntimeError("once"))]
    bench.sync.push(4)
    bench.sinks[1].answers["connect"] = [broken(RuntimeError("died"))]
    bench.source.meets = [broken(RuntimeError("nobody came")), done()]
    bench.sync.push(5)
    assert bench.states == ["sampling"] * 2


# -- a trainer that fails --


@pytest.mark.parametrize(
    ("call", "phase"), [("take", "begin"), ("pack m0", "pack round 0"), ("pack m2", "pack round 2"), ("probe", "probe")]
)
def test_failing_trainer_is_named_and_resumes_nobody(call: str, phase: str) -> None:
    bench = Bench()
    bench.source.answers[call] = broken(RuntimeError("gone"))
    with pytest.raises(SyncError, match=f"push of version 4, phase {phase}: the policy's ranks failed: gone"):
        bench.sync.push(4)
    assert bench.states == ["paused", "paused"]


def test_trainer_says_which_rank_lacks_memory_and_not_another() -> None:
    bench = Bench()
    said = "phase policy.pack: policy rank 1: out of memory"
    bench.source.answers["pack m1"] = broken(RoleOutOfMemory(said))
    with pytest.raises(SyncError, match=f"phase pack round 1: {said}"):
        bench.sync.push(3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_probe_of_the_trainer_with_nan_resumes_nobody(place: int) -> None:
    bench = Bench()
    scores = list(SCORES)
    scores[place] = math.nan
    bench.source.answers["probe"] = done(scores)
    with pytest.raises(SyncError, match=r"phase probe: .*nan.*the policy's weights are broken"):
        bench.sync.push(4)
    assert bench.states == ["paused"] * 2 and not bench.said


@pytest.mark.parametrize("call", ["wanted", "connect"])
def test_engine_that_does_not_fit_is_named_before_any_push(call: str) -> None:
    bench = Bench()
    bench.sinks[1].answers[call] = [broken(ValueError("another model"))]
    phase = "plan" if call == "wanted" else call
    with pytest.raises(SyncError, match=f"weight sync, phase {phase}: B failed: another model"):
        WeightSync(bench.source, bench.sinks, ROW, 1e-3, SyncConfig(), 5.0)


# -- only what changed --


def test_delta_sends_what_any_rank_has_changed_and_now_and_then_everything() -> None:
    bench = Bench(ranks=2, delta=True, full_every=3)
    bench.source.different = [["m2"], ["m0", "m2"]]
    bytes_sent = []
    for version in range(5):
        bench.events.clear()
        metrics = bench.sync.push(version)
        bytes_sent.append(metrics["sync/bytes"])
        assert bench.states == ["sampling"] * 2
        if version == 1:
            assert [e for e in bench.of("A") if "read" in e] == ["read m0", "read m2"]
            assert metrics["sync/changed"] == pytest.approx(2 / 3)
    assert bytes_sent == [66, 44, 44, 66, 44]


def test_version_ends_with_those_who_verified_it_whatever_becomes_of_the_others() -> None:
    bench = Bench()
    bench.sinks[1].answers["load m1"] = [broken(RuntimeError("out of order")) for _ in range(3)]
    bench.sync.push(version=4)
    assert bench.states == ["sampling", "stopped"] and bench.events.count("end") == 1
    assert bench.events.index("A probe") < bench.events.index("end") < bench.events.index("A resume")


def test_delta_of_nothing_still_makes_a_version() -> None:
    bench = Bench(delta=True)
    bench.source.different = [[]]
    bench.sync.push(0)
    bench.events.clear()
    metrics = bench.sync.push(1)
    assert bench.of("A") == ["pause", "begin", "finish 1", "probe", "resume"] and metrics["sync/bytes"] == 0


def test_delta_after_a_failure_is_whole() -> None:
    bench = Bench(delta=True)
    bench.source.different = [["m1"]]
    bench.sync.push(0)
    bench.sinks[0].answers["load m1"] = [broken(RuntimeError("once"))]
    assert bench.sync.push(1)["sync/bytes"] == 11 + 33
    assert bench.sync.push(2)["sync/bytes"] == 33
    assert bench.sync.push(3)["sync/bytes"] == 11


def test_engines_one_after_another_are_never_paused_together() -> None:
    bench = Bench(one_by_one=True)
    bench.sync.push(4)
    assert bench.of("A") == bench.of("B") == WHOLE
    assert bench.events.index("A resume") < bench.events.index("B pause")


# -- the same with real memory and real weights --


def make_sync() -> tuple[WeightSync, TinySource, list[TinyEngine]]:
    source = TinySource(TinyLm(seed=1))
    engines = [TinyEngine(f"engine {i}", source, seed=50 + i) for i in range(2)]
    return WeightSync(source, engines, ROW, 1e-6, SyncConfig(timeout_s=5.0), 5.0), source, engines


def test_push_real_ring_brings_every_weight_bit_for_bit() -> None:
    sync, source, engines = make_sync()
    assert len(source.sender.streams[0].buckets) > 1
    for version in (0, 1):
        with torch.no_grad():
            source.lm.head.add_(0.5)
        sync.push(version)
        for engine in engines:
            assert all(torch.equal(v, source.lm.state_dict()[n]) for n, v in engine.lm.state_dict().items())
            assert (engine.version, engine.paused) == (version, False)


def test_byte_flipped_on_the_way_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, source, engines = make_sync()
    sync.push(0)
    pack, left = source.pack, [1]

    def flip(name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        (item,) = items = pack(name, turns).result()
        if turns == [(0, 1)] and left and item:
            source.ring.slot(item.slot)[13] ^= left.pop()
        return done(items)

    monkeypatch.setattr(source, "pack", flip)
    said: list[str] = []
    sync.say = said.append
    sync.push(1)
    assert len(said) == 2 and "phase load round 1: engine 0 failed: digest of bucket 1; resend" in said[0]
    assert all(not engine.paused and engine.version == 1 for engine in engines)


def test_engine_that_keeps_one_old_tensor_is_found_by_the_probe_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, source, engines = make_sync()
    sync.push(0)
    old = engines[1].lm.head.detach().clone()
    finish = engines[1].finish_update

    def forget(name: str, version: int) -> Future[list[str]]:
        engines[1].lm.head.data.copy_(old)
        return finish(name, version)

    monkeypatch.setattr(engines[1], "finish_update", forget)
    with torch.no_grad():
        source.lm.head.add_(torch.randn(source.lm.head.shape, generator=torch.Generator().manual_seed(0)))
    sync.push(1)
    assert "engine 1 does not hold the trainer's weights of version 1" in sync.lost["engine 1"]
    assert engines[1].paused and not engines[0].paused


def test_twenty_deltas_equal_whole_pushes_bit_for_bit() -> None:
    source = TinySource(TinyLm(seed=1))
    engines = [TinyEngine(f"engine {i}", source, seed=50 + i) for i in range(2)]
    sync = WeightSync(source, engines, ROW, 1e-6, SyncConfig(delta=True, full_every=100), 5.0)
    random = torch.Generator().manual_seed(3)
    parameters = list(source.lm.parameters())
    sent = []
    for version in range(20):
        chosen = parameters[version % len(parameters)]
        with torch.no_grad():
            chosen.view(-1)[int(torch.randint(chosen.numel(), (), generator=random))] += 0.01
        sent.append(sync.push(version)["sync/bytes"])
        for engine in engines:
            assert all(torch.equal(v, source.lm.state_dict()[n]) for n, v in engine.lm.state_dict().items())
        if version:
            assert sync.report is not None and sync.report.modules == 1 and sent[-1] <= 1.2 * chosen.nbytes + 16
