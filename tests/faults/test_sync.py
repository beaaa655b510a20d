"""Pushes in which something dies or stalls: found in time, mended, and no token is sampled with unknown weights.

Every test has requests under way: what they sampled before the push must be of the version before, what comes after of
the new one, by plain transformers with the weights of each.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.roles import ActorPolicy
from conf.choices import Channel
from conf.schema import Config
from rl.faults import SyncError
from rl.roles import Metrics
from rollout.engine import Request
from rollout.engines import EngineHandle
from tests.integration.pushes import (
    CHANNELS,
    LONG,
    PROBE,
    Around,
    World,
    assert_close,
    assert_holds,
    config,
    hf_answer,
    make_world,
    random_folders,
    wait_until_sampling,
)
from tests.integration.real import (
    START_S,
    collect,
    is_silent,
    load_hf,
    make_request,
    one_thread,
    random_ids,
    restart,
    start_engines,
    start_ranks,
    started_cluster,
    submit,
)
from weightsync.plan import Item, Turn
from weightsync.sender import NUM_SLOTS
from weightsync.sync import WeightSync

# Slow: half a minute each, beside the start of the engines. tests/numerics/test_sync.py does two of them with its own.
pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

STALL_S = 10.0  # sync.timeout_s where something stalls
PATIENT_S = 240.0  # requests wait while an engine starts again


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return random_folders(tiny_folder, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def world(folders: dict[str, Path]) -> Iterator[World]:
    with one_thread(), started_cluster() as cluster:
        yield make_world(cluster, folders)


def pushing(channel: Channel, tmp_path: Path, timeout_s: float = 60.0) -> Config:
    """Two ranks at ZeRO-3 that push several buckets."""
    cfg = config(3, 2, mismatch_limit=1e9)
    folder = str(tmp_path / "versions") if channel is Channel.disk else None
    sync = replace(cfg.sync, channel=channel, folder=folder, bucket_bytes=1 << 17, timeout_s=timeout_s)
    return replace(cfg, sync=sync)


class Struck(Around):
    """An engine in which `strike` happens once, just as its second bucket is on the way."""

    def __init__(self, inner: EngineHandle, strike: Callable[[EngineHandle], None]):
        super().__init__(inner)
        self.strike, self.rounds = strike, 0

    def load(self, name: str, items: list[Item]) -> Future[Any]:
        self.rounds += 1
        if self.rounds == 2:
            self.strike(self.inner)
        return self.inner.load(name, items)


def process_of(engine: Any) -> int:
    return os.getpid()


def workers_of(engine: Any) -> list[int]:
    """Process ids of an engine's workers, where these are processes of their own."""
    return [worker.proc.pid for worker in engine._llm.engine_core.engine_core.model_executor.workers]


def ask_actor(handle: EngineHandle, function: Callable[[Any], Any]) -> Any:
    return ray.get(handle.actor.__ray_call__.remote(function), timeout=60)


def kill_engine(handle: EngineHandle) -> None:
    os.kill(ask_actor(handle, process_of), signal.SIGKILL)


def kill_worker(handle: EngineHandle) -> None:
    os.kill(ask_actor(handle, workers_of)[-1], signal.SIGKILL)


def stop_engine(handle: EngineHandle) -> None:
    """Stalls the link: the process lives and answers nothing."""
    os.kill(ask_actor(handle, process_of), signal.SIGSTOP)


def restart_engine(handle: EngineHandle) -> None:
    """Somebody else starts it again: it has its folder's weights, and knows of no push."""
    handle.restart().result(timeout=120)


def connected(policy: Any, sinks: Sequence[Any], cfg: Config) -> WeightSync:
    return WeightSync(policy, sinks, PROBE, cfg.probe_bound, cfg.sync, START_S)


def under_way(handles: Sequence[EngineHandle], seed: int) -> dict[str, list[Request]]:
    """Long requests of each engine that have begun."""
    sent = {
        handle.name: [make_request(random_ids(seed + k, 20), PATIENT_S, max_tokens=LONG, seed=k) for k in range(3)]
        for handle in handles
    }
    for handle in handles:
        submit(handle, sent[handle.name])
        wait_until_sampling(handle, 3)
    return sent


def assert_versions(
    handle: EngineHandle, requests: Sequence[Request], old: tuple[int, Path], new: tuple[int, Path]
) -> int:
    """Each answer's tokens are of the old version, then of the new one; how many answers there are."""
    before, after = load_hf(old[1]), load_hf(new[1])
    answers = [outcome.completion for outcome in collect(handle, requests) if outcome.completion is not None]
    for answer in answers:
        cut = answer.versions.count(old[0])
        assert answer.versions == [old[0]] * cut + [new[0]] * (len(answer.versions) - cut)
        assert 0 < cut < LONG
        assert_close(answer.logprobs[:cut], hf_answer(before, answer)[:cut])
        assert_close(answer.logprobs[cut:], hf_answer(after, answer)[cut:])
    return len(answers)


# Each with the engine that it strikes: engine 0 has one process, engine 1 two workers.
STRIKES = [(kill_engine, 0), (kill_worker, 1), (stop_engine, 0), (restart_engine, 0)]


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(("strike", "engine"), STRIKES)
def test_sync_mends_an_engine_that_is_struck_in_a_push_and_the_other_goes_on(
    world: World, tmp_path: Path, strike: Callable[[EngineHandle], None], engine: int, channel: Channel
) -> None:
    strike_and_mend(world, tmp_path, strike, engine, channel)


def strike_and_mend(
    world: World, tmp_path: Path, strike: Callable[[EngineHandle], None], engine: int, channel: Channel
) -> None:
    """A push in which an engine is struck ends well; its requests under way are lost, the other's are not."""
    handles = world.handles("tied")
    timeout_s = STALL_S if strike is stop_engine else 60.0
    cfg = pushing(channel, tmp_path, timeout_s)
    policy = restart(world.groups[2], cfg, world.folders["tied-1"])
    connected(policy, handles, cfg).push(1)
    policy = restart(world.groups[2], cfg, world.folders["tied-2"])
    sinks: list[Any] = list(handles)
    sinks[engine] = Struck(handles[engine], strike)
    sync = connected(policy, sinks, cfg)
    said: list[str] = []
    sync.say = said.append
    sent = under_way(handles, seed=3)
    metrics = sync.push(2)
    assert (metrics["sync/num_verified"], metrics["sync/num_lost"]) == (2, 0), said
    assert metrics["sync/num_restarted"] == (0 if strike is restart_engine else 1), said
    assert re.search(rf"push of version 2, phase load round \d+: {handles[engine].name} ", "\n".join(said)), said
    other = handles[1 - engine]
    assert assert_versions(other, sent[other.name], (1, world.folders["tied-1"]), (2, world.folders["tied-2"])) == len(
        sent[other.name]
    )
    assert_holds(handles, world.folders["tied-2"], 2)


class Killing(Around):
    """A source of which a rank is killed once engines have loaded the first round."""

    def __init__(self, inner: ActorPolicy):
        super().__init__(inner)
        self.rounds = 0

    def pack(self, name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        self.rounds += 1
        if self.rounds == NUM_SLOTS + 1:
            ray.kill(self.inner.group.actors[1])
        return self.inner.pack(name, turns)


@pytest.mark.parametrize("channel", CHANNELS)
def test_sync_names_a_rank_that_is_killed_in_a_push_and_engines_stay_silent(
    world: World, tmp_path: Path, channel: Channel
) -> None:
    kill_rank(world, tmp_path, channel)


def kill_rank(world: World, tmp_path: Path, channel: Channel) -> None:
    """A push in which a rank dies ends with its name; engines are silent until another push."""
    handles = world.handles("tied")
    usual, cfg = (pushing(channel, tmp_path / name, STALL_S) for name in ("usual", "killed"))
    connected(restart(world.groups[2], usual, world.folders["tied-1"]), handles, usual).push(1)
    (group,) = start_ranks(next(iter(world.groups.values())).cluster, [cfg], world.folders["tied-2"]).values()
    sent = under_way(handles, seed=5)
    sync = connected(Killing(ActorPolicy(cfg, group)), handles, cfg)
    with pytest.raises(SyncError, match=r"push of version 2, phase (pack round 2|probe): .*policy rank 1"):
        sync.push(2)
    group.stop()
    for handle in handles:
        assert is_silent(handle, [])
    policy = restart(world.groups[2], usual, world.folders["tied-2"])
    connected(policy, handles, usual).push(3)
    for handle in handles:
        versions = (1, world.folders["tied-1"]), (3, world.folders["tied-2"])
        assert assert_versions(handle, sent[handle.name], *versions) == len(sent[handle.name])
    assert_holds(handles, world.folders["tied-2"], 3)


class Misled(Around):
    """An engine that is told of digests which its second bucket does not have, once."""

    rounds = 0

    def load(self, name: str, items: list[Item]) -> Future[Any]:
        self.rounds += 1
        if self.rounds == 2:
            items = [replace(item, digests=tuple(digest ^ 1 for digest in item.digests)) for item in items]
        return self.inner.load(name, items)


def push_to_three(
    world: World, folders: dict[str, Path], cfg: Config, struck: Callable[[EngineHandle], Any]
) -> tuple[Metrics, list[str]]:
    """A push to three engines that want the same bytes, the second of which is struck; its metrics, and what was said.

    In the end all hold the weights.
    """
    cluster, tied = next(iter(world.groups.values())).cluster, folders["tied-0"]
    engines = start_engines(cluster, config(tp=(1, 1, 1)), tied, tied, tied)
    try:
        policy = restart(world.groups[2], cfg, folders["tied-1"])
        first, second, third = engines.handles
        sync = connected(policy, [first, struck(second), third], cfg)
        assert [stream.reader for stream in sync.links[0].streams] == [0]  # one broadcast reaches all three
        said: list[str] = []
        sync.say = said.append
        metrics = sync.push(1)
        assert metrics["sync/num_verified"] == 3, said
        assert_holds(engines.handles, folders["tied-1"], 1)
        return metrics, said
    finally:
        engines.stop()


@pytest.mark.parametrize("channel", CHANNELS)
def test_sync_with_one_of_three_readers_of_the_same_bytes_failing_never_waits_for_a_deadline(
    world: World, folders: dict[str, Path], tmp_path: Path, channel: Channel
) -> None:
    metrics, said = push_to_three(world, folders, pushing(channel, tmp_path), Misled)
    assert metrics["sync/num_restarted"] == 0, said
    assert any("rollout engine 1 failed" in line and "digest" in line for line in said), said
    assert not any("did not answer" in line or "imed out" in line for line in said), said


def test_sync_with_one_of_three_readers_of_a_broadcast_stopped_restarts_no_other(
    world: World, folders: dict[str, Path], tmp_path: Path
) -> None:
    cfg = pushing(Channel.collective, tmp_path, STALL_S)
    metrics, said = push_to_three(world, folders, cfg, lambda engine: Struck(engine, stop_engine))
    assert metrics["sync/num_restarted"] == 1, said
    assert any(re.search(r"rollout engine 1 did not answer .*; restart", line) for line in said), said
