"""What the engines compute with is what the trainer holds: after a push, after the next one, and after a failed one.

Each push carries *different random* weights: with the same weights, or with small changes, a push that does nothing
looks right. Compared with plain transformers in fp32.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.cluster import Cluster
from actors.group import RankGroup
from actors.roles import ActorPolicy, ActorReference
from conf.choices import Channel
from conf.schema import ClusterConfig, Config
from rl.batching import collate
from rl.faults import SyncError
from rl.types import Batch, Completion
from rollout.engines import EngineHandle
from tests.integration.real import (
    as_groups,
    ask,
    completions,
    connect,
    export,
    hf_greedy,
    hf_logprobs,
    is_silent,
    load_hf,
    make_request,
    random_folder,
    random_ids,
    restart,
    start_engines,
    start_ranks,
    started_cluster,
    submit,
)
from tests.unit.stand_ins import done, make_cfg
from weightsync.channels.shm import RingReader
from weightsync.sender import NUM_SLOTS

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(180)]

LARGEST, MEAN = 1e-4, 1e-5
BLOCK = 32  # tokens in a block of the prefix cache
CONTEXT, LONG = 1024, 600
PROBE = random_ids(99, 16)


def config(stage: int = 1, ranks: int = 1, tp: Sequence[int] = (1,), **rollout: Any) -> Config:
    return make_cfg(
        trainer={"zero_stage": stage, "lr": 0.05, "grad_clip": 0.0, "num_threads": 1},
        rollout={"max_model_len": CONTEXT, "kv_cache_bytes": 64 << 20, "num_threads": 1, "tp": list(tp)} | rollout,
        cluster=ClusterConfig(train_ranks=ranks, rollout_engines=len(tp)),
    )


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models: tied-0 and untied-0 are what the engines start with; -1 and -2 are pushed."""
    root = tmp_path_factory.mktemp("weights")
    names = [(kind, number) for kind in ("tied", "untied") for number in range(3)]
    return {
        f"{kind}-{number}": random_folder(tiny_folder, root / f"{kind}-{number}", seed=10 + index, tied=kind == "tied")
        for index, (kind, number) in enumerate(names)
    }


@dataclass
class World:
    """The processes of this module."""

    groups: dict[int, RankGroup]
    engines: dict[str, list[EngineHandle]]
    folders: dict[str, Path]

    def policy(self, name: str, stage: int = 1, ranks: int = 1, **rollout: Any) -> ActorPolicy:
        """A trainer that holds the weights of folder `name`."""
        return restart(self.groups[ranks], config(stage, ranks, **rollout), self.folders[name])

    def handles(self, kind: str) -> list[EngineHandle]:
        return self.engines[kind]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def world(cluster: Cluster, folders: dict[str, Path]) -> World:
    """Trainers of one and of two ranks; for tied models an engine and one of two tensor-parallel members; an untied."""
    tied, untied = folders["tied-0"], folders["untied-0"]
    groups = start_ranks(cluster, [config(ranks=ranks) for ranks in (1, 2)], tied)
    one, two, three = start_engines(cluster, config(tp=(1, 2, 1)), tied, tied, untied).handles
    return World(groups, {"tied": [one, two], "untied": [three]}, folders)


def assert_close(found: Sequence[float], wanted: torch.Tensor) -> None:
    gaps = (torch.tensor(found) - wanted).abs()
    assert gaps.shape == wanted.shape
    assert float(gaps.max()) <= LARGEST and float(gaps.mean()) <= MEAN, gaps


def assert_holds(handles: Sequence[EngineHandle], folder: Path, version: int, temperature: float = 1.0) -> None:
    """Each engine scores a given row, and records what it samples, as plain transformers with the folder's weights."""
    lm = load_hf(folder)
    for number, handle in enumerate(handles):
        row = random_ids(1000 * version + number, 40)
        assert_close(ray.get(handle.actor.probe.remote(row), timeout=60), hf_logprobs(lm, row))
        requests = [make_request(random_ids(k, 3 + 7 * k), seed=k, temperature=temperature) for k in range(8)]
        for answer in ask(handle, requests):
            assert answer.versions == [version] * 24
            assert_close(answer.logprobs, hf_answer(lm, answer, temperature))


def hf_answer(lm: Any, answer: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the completion's tokens."""
    return hf_logprobs(lm, answer.prompt_ids + answer.token_ids, temperature)[len(answer.prompt_ids) - 1 :]


def distance(one: Path, other: Path) -> float:
    """Mean gap between two models' log-probabilities: large when a mistake would show."""
    row = random_ids(5, 60)
    return float((hf_logprobs(load_hf(one), row) - hf_logprobs(load_hf(other), row)).abs().mean())


def train_batch() -> Batch:
    """Something to learn that moves the weights far: the log-probabilities are recorded as 0, whatever they are."""
    answers = [
        Completion(
            prompt_ids=random_ids(k, 4),
            token_ids=random_ids(100 + k, 12),
            logprobs=[0.0] * 12,
            finish_reason="length",
            versions=[0] * 12,
            ttft_s=0.0,
            decode_s=0.0,
        )
        for k in range(4)
    ]
    batch = collate(as_groups(answers))
    batch.advantages = batch.action_mask * 4.0
    return batch


def train(policy: ActorPolicy) -> None:
    """Moves the weights by two large steps of SGD."""
    for number in range(2):
        policy.update(train_batch(), number, number)


# -- pushes --


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_two_pushes_in_a_row_of_different_weights(
    world: World, tmp_path: Path, kind: str, stage: int, ranks: int
) -> None:
    handles, source = world.handles(kind), world.folders[f"{kind}-1"]
    assert len(handles) == (2 if kind == "tied" else 1)
    policy = world.policy(f"{kind}-1", stage, ranks, mismatch_limit=1e9)
    sync = connect(policy, handles, PROBE)
    assert sync.push(1)["sync/probe_max"] <= LARGEST
    assert_holds(handles, source, 1)
    train(policy)
    assert sync.push(2)["sync/probe_max"] <= LARGEST
    trained = export(policy, source, tmp_path / "hf")
    assert distance(source, trained) > 0.05
    assert_holds(handles, trained, 2)


@pytest.mark.parametrize("channel", list(Channel))
def test_pushes_of_several_buckets_whole_and_of_what_has_changed(
    world: World, tmp_path: Path, channel: Channel
) -> None:
    cfg = config(mismatch_limit=1e9)
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 17, channel=channel, delta=True))
    policy, handles = restart(world.groups[1], cfg, world.folders["tied-1"]), world.handles("tied")
    sync = connect(policy, handles, PROBE)
    assert max(len(link.stream.buckets) for link in sync.links) > NUM_SLOTS
    assert sync.push(5)["sync/bytes"] == sync.num_bytes
    assert_holds(handles, world.folders["tied-1"], 5)
    assert sync.push(6)["sync/bytes"] == 0
    train(policy)
    assert 0 < sync.push(7)["sync/bytes"] <= sync.num_bytes
    assert_holds(handles, export(policy, world.folders["tied-1"], tmp_path / "hf"), 7)


# -- caches --


def test_prefix_cache_does_not_outlive_a_push(world: World) -> None:
    handles, prompt = world.handles("tied"), random_ids(7, 2 * BLOCK + 6)
    shared = prompt[: 2 * BLOCK + 2]
    for version, name in enumerate(("tied-1", "tied-2", "tied-1"), start=1):
        lm = load_hf(world.folders[name])
        connect(world.policy(name), handles, PROBE).push(version)
        for handle in handles:
            for _ in range(2):  # the second time from the cache
                (answer,) = ask(handle, [make_request(prompt, max_tokens=8, temperature=0.0)])
                assert answer.token_ids == hf_greedy(lm, prompt, 8)
                assert_close(answer.logprobs, hf_answer(lm, answer))
            (sibling,) = ask(handle, [make_request([*shared, 3, 4], seed=version)])
            assert_close(sibling.logprobs, hf_answer(lm, sibling))


def wait_until_sampling(handle: EngineHandle, num_requests: int) -> None:
    """Waits until all requests of the engine have their first token."""

    def started(engine: Any) -> int:
        return sum(running.first_token > 0 for running in engine._running.values())

    deadline = time.monotonic() + 30
    while ray.get(handle.actor.__ray_call__.remote(started), timeout=60) < num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_requests_in_flight_split_at_the_push(world: World) -> None:
    handles = world.handles("tied")
    old, new = load_hf(world.folders["tied-1"]), load_hf(world.folders["tied-2"])
    connect(world.policy("tied-1"), handles, PROBE).push(1)
    sync = connect(world.policy("tied-2", 3, 2), handles, PROBE)
    prompt = random_ids(8, 2 * BLOCK + 6)  # all share two blocks of cache
    sent = {handle.name: [make_request([*prompt, k], max_tokens=LONG, seed=k) for k in range(4)] for handle in handles}
    for handle in reversed(handles):  # the slower one first, so that neither is done before the push
        submit(handle, sent[handle.name])
        wait_until_sampling(handle, 4)
    sync.push(2)
    for handle in handles:
        late = make_request([*prompt, 60], seed=60)  # arrives after the push, with a prefix that was cached before it
        submit(handle, [late])
        *answers, fresh = completions(handle, [*sent[handle.name], late])
        assert fresh.versions == [2] * 24
        assert_close(fresh.logprobs, hf_answer(new, fresh))
        for answer in answers:
            cut = answer.versions.index(2)
            assert 0 < cut < len(answer.versions) == LONG
            assert answer.versions == [1] * cut + [2] * (len(answer.versions) - cut)
            assert_close(answer.logprobs[:cut], hf_answer(old, answer)[:cut])
            assert_close(answer.logprobs[cut:], hf_answer(new, answer)[cut:])


# -- pushes that go wrong --


class Around:
    """A source or an engine that does what `inner` does, but for what a subclass says."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


NORM = "model.norm.weight"
Shapes = dict[str, tuple[int, ...]]


def drop(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name != NORM}


def rename(shapes: Shapes) -> Shapes:
    return {"model.norm.wait" if name == NORM else name: shape for name, shape in shapes.items()}


def misshape(shapes: Shapes) -> Shapes:
    return {name: (8, 8) if name == NORM else shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"model\.norm\.weight: missing from the update"),
        (rename, r"model\.norm\.wait: the engine's model has no such tensor"),
        (misshape, r"model\.norm\.weight: shape \(8, 8\) sent, \(64,\) expected"),
    ],
)
def test_update_that_does_not_fit_is_refused_before_it_starts(
    world: World, change: Callable[[Shapes], Shapes], message: str
) -> None:
    handles = world.handles("tied")
    policy = world.policy("tied-2")
    ray.get([handle.actor.pause.remote() for handle in handles], timeout=60)
    other: Any = Around(policy)
    other.shapes = lambda: change(policy.shapes())
    for handle in handles:
        with pytest.raises(SyncError, match=f"weight sync, phase plan: {handle.name} failed: (.|\n)*{message}"):
            connect(other, [handle], PROBE)
    repaired(handles, policy, world.folders["tied-2"])


def test_plan_that_arrives_damaged_is_refused(world: World) -> None:
    handles = world.handles("untied")
    policy = world.policy("untied-2")
    ray.get([handle.actor.pause.remote() for handle in handles], timeout=60)
    other: Any = Around(policy)
    other.plan = lambda *args: [replace(link, signed="0" * 16) for link in policy.plan(*args)]
    with pytest.raises(SyncError, match="the plan of policy rank 0 arrived damaged"):
        connect(other, handles, PROBE)
    repaired(handles, policy, world.folders["untied-2"])


def repaired(handles: Sequence[EngineHandle], policy: ActorPolicy, folder: Path) -> None:
    """The engines are paused: they take a request and give no answer. A full push brings the right one."""
    waiting = {handle.name: make_request(random_ids(3, 9), seed=3) for handle in handles}
    for handle in handles:
        assert is_silent(handle, [waiting[handle.name]])
    connect(policy, handles, PROBE).push(7)
    lm = load_hf(folder)
    for handle in handles:
        (answer,) = completions(handle, [waiting[handle.name]])
        assert answer.versions == [7] * 24
        assert_close(answer.logprobs, hf_answer(lm, answer))
    assert_holds(handles, folder, 7)


class Flipped(Around):
    """A source that damages one byte of a round's bucket after signing it."""

    def __init__(self, policy: ActorPolicy, number: int, times: int):
        super().__init__(policy)
        self.number, self.times = number, times

    def plan(self, *args: Any) -> Any:
        (self.link,) = links = self.inner.plan(*args)
        return links

    def pack(self, numbers: list[int | None], slot: int) -> Future[Any]:
        digests: Future[Any] = Future()
        digests.set_result(self.inner.pack(numbers, slot).result(timeout=60))
        if numbers == [self.number] and self.times:
            self.times -= 1
            RingReader(self.link.address).receive(slot, 200)[100] ^= 0x10
        return digests


class OtherProbe(Around):
    """A source whose log-probabilities are once those of other weights: what an engine with old weights looks like."""

    def __init__(self, policy: ActorPolicy, lm: Any):
        super().__init__(policy)
        self.lm, self.lies = lm, 1

    def probe(self, row: list[int]) -> Future[list[float]]:
        if not self.lies:
            return self.inner.probe(row)
        self.lies -= 1
        return done(hf_logprobs(self.lm, row).tolist())


def bucketed(world: World, kind: str, number: int) -> ActorPolicy:
    """A policy that pushes several buckets."""
    cfg = config()
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 17))
    return restart(world.groups[1], cfg, world.folders[f"{kind}-{number}"])


def mended(source: Any, handles: Sequence[Any], folder: Path, why: str) -> None:
    """A push that fails once, for this reason, ends well: the engine gets another."""
    sync = connect(source, handles, PROBE)
    said: list[str] = []
    sync.say = said.append
    metrics = sync.push(6)
    assert len(said) == metrics["sync/num_resent"] > 0
    assert all(re.search(why + "(.|\n)*; resend$", line) for line in said), said
    assert_holds(handles, folder, 6)


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("bucket", [0, 1])
def test_flipped_bit_is_named_and_sent_again(world: World, kind: str, bucket: int) -> None:
    policy, handles = bucketed(world, kind, 1), world.handles(kind)
    found = rf"push of version 6, phase load round {bucket}: .*bucket {bucket} of policy rank 0, model\..*: digest"
    mended(Flipped(policy, bucket, times=1), handles, world.folders[f"{kind}-1"], found)


class Deaf(Around):
    """An engine that hears nothing of the second round."""

    rounds = 0

    def load(self, items: Any) -> Future[Any]:
        self.rounds += 1
        return done(None) if self.rounds == 2 else self.inner.load(items)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_missing_bucket_is_named_and_sent_again(world: World, kind: str) -> None:
    policy, handles = bucketed(world, kind, 2), [Deaf(handle) for handle in world.handles(kind)]
    why = r"phase finish: rollout engine \d failed: never arrived whole: model\..*; the engine must stay paused"
    mended(policy, handles, world.folders[f"{kind}-2"], why)


class Failing(Around):
    """A source that cannot pack bucket 1."""

    def pack(self, numbers: list[int | None], slot: int) -> Future[Any]:
        if numbers == [0]:
            return self.inner.pack(numbers, slot)
        failed: Future[int] = Future()
        failed.set_exception(RuntimeError("the trainer is gone"))
        return failed


def test_update_left_half_done_is_given_up_by_the_next_push(world: World) -> None:
    policy, handles = bucketed(world, "tied", 1), world.handles("tied")
    with pytest.raises(SyncError, match="phase pack round 1: the policy's ranks failed: the trainer is gone"):
        connect(Failing(policy), handles, PROBE).push(6)
    repaired(handles, policy, world.folders["tied-1"])


def test_engine_with_other_weights_than_the_trainer_gets_them(world: World) -> None:
    policy, handles = bucketed(world, "tied", 1), world.handles("tied")
    source = OtherProbe(policy, load_hf(world.folders["tied-2"]))
    why = r"rollout engine \d does not hold the trainer's weights of version 6"
    mended(source, handles, world.folders["tied-1"], why)


def test_engine_that_is_killed_comes_back_with_the_weights(world: World) -> None:
    policy, handles = world.policy("untied-1"), world.handles("untied")
    sync = connect(policy, handles, PROBE)
    sync.push(6)
    (handle,) = handles
    ray.kill(handle.actor)
    assert sync.push(7)["sync/num_restarted"] == 1
    assert_holds(handles, world.folders["untied-1"], 7)


# -- one distribution --


def sampled_batch(handles: Sequence[EngineHandle], temperature: float) -> Batch:
    """128 completions of 24 tokens, spread over the engines."""
    answers = []
    for number, handle in enumerate(handles):
        seeds = range(number, 128, len(handles))
        requests = [make_request(random_ids(k, 2 + k % 40), seed=k, temperature=temperature) for k in seeds]
        answers += ask(handle, requests)
    batch = collate(as_groups(answers))
    batch.advantages = batch.action_mask * 1.0
    return batch


def mean_gap(ours: torch.Tensor, batch: Batch) -> float:
    return float((ours - batch.rollout_logprobs)[batch.action_mask].abs().mean())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("engine", [0, 1])
def test_trainer_and_reference_score_what_was_sampled_at_any_temperature(
    world: World, engine: int, temperature: float
) -> None:
    """Engine 0 has one process, engine 1 two tensor-parallel ones."""
    handles = world.handles("tied")
    policy = world.policy("tied-2", 3, 2, temperature=temperature)
    connect(policy, handles, PROBE).push(3)
    batch = sampled_batch([handles[engine]], temperature)
    assert mean_gap(policy.logprobs(batch), batch) <= MEAN
    metrics = policy.update(batch, 0, 0)
    assert metrics["mismatch/mean"] <= MEAN and metrics["mismatch/max"] <= LARGEST
    cfg = config(temperature=temperature)
    restart(world.groups[1], cfg, world.folders["tied-2"], frozen=True)
    assert mean_gap(ActorReference(cfg, world.groups[1]).logprobs(batch), batch) <= MEAN
    if temperature != 1.0:  # the comparison would see a temperature that is forgotten
        other = config(temperature=1.0)
        restart(world.groups[1], other, world.folders["tied-2"], frozen=True)
        assert mean_gap(ActorReference(other, world.groups[1]).logprobs(batch), batch) > 0.1


def test_two_engines_one_of_them_tensor_parallel_stay_within_the_mismatch_bound(world: World) -> None:
    handles = world.handles("tied")
    policy = world.policy("tied-1")
    connect(policy, handles, PROBE).push(4)
    assert policy.update(sampled_batch(handles, 1.0), 0, 0)["mismatch/mean"] <= MEAN


def test_generation_config_of_the_model_folder_has_no_effect(world: World) -> None:
    """It asks for top_k=1, a low temperature and a repetition penalty, and names a token to stop at."""
    handles = world.handles("tied")
    connect(world.policy("tied-1"), handles, PROBE).push(4)
    lm = load_hf(world.folders["tied-1"])
    prompt = random_ids(11, 6)
    for handle in handles:
        answers = ask(handle, [make_request(prompt, max_tokens=64, seed=k) for k in range(32)])
        assert len({tuple(answer.token_ids) for answer in answers}) == 32
        assert {len(answer.token_ids) for answer in answers} == {64}
        assert any(1 in answer.token_ids[:-1] for answer in answers)  # the token to stop at
        likeliest = int(lm(torch.tensor([prompt])).logits[0, -1].argmax())
        assert any(answer.token_ids[0] != likeliest for answer in answers)
        for answer in answers[:4]:
            assert_close(answer.logprobs, hf_answer(lm, answer))


def test_greedy_answers_are_finite_and_the_most_likely_tokens(world: World) -> None:
    handles = world.handles("untied")
    connect(world.policy("untied-1"), handles, PROBE).push(4)
    lm = load_hf(world.folders["untied-1"])
    prompts = [random_ids(20 + k, 3 + k) for k in range(4)]
    answers = ask(handles[0], [make_request(prompt, max_tokens=8, temperature=0.0) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == hf_greedy(lm, prompt, 8)
        assert_close(answer.logprobs, hf_answer(lm, answer))
