"""What the engines compute with is what the trainer holds: after a push, after the next one, and after a failed one.

Each push carries *different random* weights: with the same weights, or with small changes, a push that does nothing
looks right. Compared with plain transformers in fp32.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import ray
import torch

from actors.group import in_thread
from actors.roles import ActorPolicy, ActorReference
from conf.choices import Channel
from rl.batching import collate
from rl.faults import SyncError
from rl.types import Batch
from rollout.engine import engine_config
from rollout.engines import EngineHandle
from tests.faults.test_sync import kill_rank, kill_worker, strike_and_mend
from tests.integration.pushes import (
    BLOCK,
    CHANNELS,
    LARGEST,
    LONG,
    MEAN,
    PROBE,
    Around,
    World,
    assert_close,
    assert_holds,
    config,
    distance,
    hf_answer,
    make_world,
    random_folders,
    train,
    wait_until_sampling,
)
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
    random_ids,
    restart,
    started_cluster,
    submit,
)
from tests.unit.stand_ins import broken, done
from weightsync.channels.shm import RingReader
from weightsync.places import worker_wants
from weightsync.plan import Item, Turn
from weightsync.record import Folder
from weightsync.sender import NUM_SLOTS

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return random_folders(tiny_folder, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def world(folders: dict[str, Path]) -> Iterator[World]:
    with started_cluster() as cluster:
        yield make_world(cluster, folders)


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


@pytest.mark.parametrize("channel", CHANNELS)
def test_pushes_of_several_buckets_whole_and_of_what_has_changed(
    world: World, tmp_path: Path, channel: Channel
) -> None:
    cfg = config(mismatch_limit=1e9)
    folder = str(tmp_path / "versions") if channel is Channel.disk else None
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 18, channel=channel, folder=folder, delta=True))
    policy, handles = restart(world.groups[1], cfg, world.folders["tied-1"]), world.handles("tied")
    sync = connect(policy, handles, PROBE)
    assert max(len(stream.buckets) for link in sync.links for stream in link.streams) > NUM_SLOTS
    assert sync.push(5)["sync/bytes"] == sync.num_bytes
    assert_holds(handles, world.folders["tied-1"], 5)
    assert sync.push(6)["sync/bytes"] == 0
    train(policy)
    assert 0 < sync.push(7)["sync/bytes"] <= sync.num_bytes
    assert_holds(handles, export(policy, world.folders["tied-1"], tmp_path / "hf"), 7)


def scale(name: str, host: Any) -> None:
    """Doubles one tensor of a rank's live weights."""
    parameters = dict(host.roles["policy"].engine.module.named_parameters())
    parameters[f"lm.{name}"].data.mul_(2.0)
    host.roles["policy"]._probe_logprobs = None


@pytest.mark.parametrize("channel", CHANNELS)
def test_delta_of_one_tensor_sends_its_module_alone_and_needs_no_repair(
    world: World, tmp_path: Path, channel: Channel
) -> None:
    folder = str(tmp_path / "versions") if channel is Channel.disk else None
    cfg = config()
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 20, channel=channel, folder=folder, delta=True))
    policy, handles = restart(world.groups[1], cfg, world.folders["tied-2"]), world.handles("tied")
    sync = connect(policy, handles, PROBE)
    said: list[str] = []
    sync.say = said.append
    sync.push(1)
    held = scores(handles)
    for version, name in enumerate(
        ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"), 2
    ):
        ray.get([a.__ray_call__.remote(partial(scale, name)) for a in policy.group.actors], timeout=60)
        metrics = sync.push(version)
        assert not said and metrics["sync/num_verified"] == 2
        assert 0 < metrics["sync/bytes"] < sync.num_bytes / 2 and metrics["sync/changed"] < 0.2
        assert (scores(handles) - held).abs().max() > 0.01
        assert_holds(handles, export(policy, world.folders["tied-2"], tmp_path / str(version)), version)


def scores(handles: Sequence[EngineHandle]) -> torch.Tensor:
    """[engines, tokens] log-probabilities of a row."""
    return torch.tensor([ray.get(handle.actor.probe.remote(random_ids(77, 30)), timeout=60) for handle in handles])


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
    other.plan = lambda *args: [replace(link, signed=("0" * 16,)) for link in policy.plan(*args)]
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

    def pack(self, name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        (item,) = items = self.inner.pack(name, turns).result(timeout=60)
        if item.number == self.number and self.times:
            self.times -= 1
            bucket = self.link.streams[0].buckets[self.number]
            RingReader(self.link.address).receive(item.slot, bucket)[100] ^= 0x10
        return done(items)


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
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 18))
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
    found = rf"push of version 6, phase load round \d+: .*bucket {bucket} of policy rank 0, model\..*: digest"
    mended(Flipped(policy, bucket, times=1), handles, world.folders[f"{kind}-1"], found)


class Deaf(Around):
    """An engine that hears nothing of the second round."""

    rounds = 0

    def load(self, name: str, items: Any) -> Future[Any]:
        self.rounds += 1
        return done(None) if self.rounds == 2 else self.inner.load(name, items)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_missing_bucket_is_named_and_sent_again(world: World, kind: str) -> None:
    policy, handles = bucketed(world, kind, 2), [Deaf(handle) for handle in world.handles(kind)]
    why = r"phase finish: rollout engine \d failed: never arrived whole: model\..*; the engine must stay paused"
    mended(policy, handles, world.folders[f"{kind}-2"], why)


class Failing(Around):
    """A source that cannot pack a second bucket."""

    packed = 0

    def pack(self, name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        self.packed += 1
        return self.inner.pack(name, turns) if self.packed == 1 else broken(RuntimeError("the trainer is gone"))


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


def test_two_syncs_at_once_are_named_before_weights_change(world: World) -> None:
    policy, handles = world.policy("untied-1"), world.handles("untied")
    first = connect(policy, handles, PROBE)
    first.push(1)
    second = connect(policy, handles, PROBE)
    with pytest.raises(SyncError, match="two drivers must not push at once"):
        first.push(2)
    second.push(3)
    assert_holds(handles, world.folders["untied-1"], 3)


def test_snapshot_lets_the_trainer_go_on_and_gives_the_version_before_back(world: World, tmp_path: Path) -> None:
    cfg = config(3, 2, mismatch_limit=1e9)
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 18, snapshot=True, delta=True), max_lag=1)
    policy, handles = restart(world.groups[2], cfg, world.folders["tied-1"]), world.handles("tied")
    held = Held(handles[1])
    sync = connect(policy, [handles[0], held], PROBE)
    said: list[str] = []
    sync.say = said.append
    assert sync.push(0) == {}
    train(policy)  # while an engine waits for its first bucket
    held.go.set()
    assert sync.settle()["sync/num_verified"] == 2, said
    assert_holds(handles, world.folders["tied-1"], 0)
    first = export(policy, world.folders["tied-1"], tmp_path / "first")
    sync.push(1)
    train(policy)
    sync.settle()
    assert_holds(handles, first, 1)
    second = export(policy, world.folders["tied-1"], tmp_path / "second")
    assert sync.push(2)["sync/num_verified"] == 2  # of the push before
    assert sync.settle()["sync/num_verified"] == 2
    assert_holds(handles, second, 2)
    sync.rollback()
    assert_holds(handles, first, 1)
    with pytest.raises(SyncError, match="no version before 1 is kept"):
        sync.rollback()
    sync.push(3)
    sync.settle()
    assert_holds(handles, second, 3)


class Held(Around):
    """An engine that takes no bucket until `go` is set."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.go = threading.Event()

    def load(self, name: str, items: list[Item]) -> Future[Any]:
        def wait() -> Any:
            assert self.go.wait(60)
            return self.inner.load(name, items).result(60)

        return in_thread(wait)


def keep_what_is_lent(worker: Any) -> None:
    """Has the next weight that vLLM deals with live on, which no method of vLLM does with these."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    usual = UnquantizedLinearMethod.process_weights_after_loading

    def once(method: Any, layer: Any) -> None:
        UnquantizedLinearMethod.process_weights_after_loading = usual
        worker.kept = layer.weight.detach()
        usual(method, layer)

    UnquantizedLinearMethod.process_weights_after_loading = once


def test_bytes_that_vllm_goes_on_using_are_copied_instead(world: World) -> None:
    policy, handles = bucketed(world, "untied", 1), world.handles("untied")
    for handle in handles:
        ray.get(handle.actor._rpc.remote(keep_what_is_lent))
    why = r"push of version 6, phase load .*UnquantizedLinearMethod goes on using bytes of model\..*they are copied"
    mended(policy, handles, world.folders["untied-1"], why)


def test_engine_that_is_killed_comes_back_with_the_weights(world: World) -> None:
    policy, handles = world.policy("untied-1"), world.handles("untied")
    sync = connect(policy, handles, PROBE)
    sync.push(6)
    (handle,) = handles
    ray.kill(handle.actor)
    assert sync.push(7)["sync/num_restarted"] == 1
    assert_holds(handles, world.folders["untied-1"], 7)


def test_engine_that_loses_a_worker_in_a_push_is_mended(world: World, tmp_path: Path) -> None:
    strike_and_mend(world, tmp_path, kill_worker, 1, Channel.disk)


def test_rank_that_dies_in_a_push_is_named(world: World, tmp_path: Path) -> None:
    kill_rank(world, tmp_path, Channel.collective)


def test_wants_of_running_workers_are_those_that_are_planned_without_them(world: World, tmp_path: Path) -> None:
    for kind, cfg in (("tied", config(tp=(1, 2))), ("untied", config(tp=(1,)))):
        copyfile(world.folders[f"{kind}-0"] / "config.json", tmp_path / "config.json")
        shapes = world.policy(f"{kind}-0").shapes()
        for number, handle in enumerate(world.handles(kind)):
            live = handle.wanted(shapes, "float32").result(timeout=60)
            settings = engine_config(cfg, number, str(tmp_path))
            places = range(cfg.engine_workers(number))
            mine = [worker_wants(settings, rank, Folder.of(shapes), "float32") for rank in places]
            assert [wanted.fingerprint() for wanted in mine] == [wanted.fingerprint() for wanted in live]


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
