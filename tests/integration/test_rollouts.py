"""The pool over real engines: distinct samples, exact counts, limits of length and time, and a killed engine."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from conf.choices import Template
from conf.errors import ConfigError
from conf.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    ModelConfig,
)
from rl.batching import collate
from rl.faults import RoleDied
from rl.metrics import batch_metrics
from rl.prompts import PromptStream
from rl.sampling import Draw
from rl.types import Group, Prompt, Sampling, Status, Trajectory
from rollout import router as router_module
from rollout.engines import EngineGroup
from rollout.pool import RolloutPool
from rollout.preflight.launch import prepare
from rollout.single_turn import SingleTurn
from tests.integration.real import (
    ask,
    collect,
    is_silent,
    make_request,
    random_folder,
    random_ids,
    start_engines,
    started_cluster,
    submit,
)
from tests.unit.stand_ins import FunctionScorer, make_cfg

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CONTEXT = 64
COLLECT_S = 0.2


def config(folder: Path | None = None, **top: Any) -> Config:
    settings = {"prompts_per_step": 1, "samples_per_prompt": 8, "num_steps": 4}
    rollout = {"max_tokens": 16, "max_model_len": CONTEXT, "kv_cache_bytes": 64 << 20, "num_threads": 1}
    return make_cfg(
        rollout=rollout | {"deadline_s": 30},  # a pool gives up before pytest does, which would end every other test
        cluster=ClusterConfig(rollout_engines=2),
        **settings | top,
    )


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tiny_folder, tmp_path_factory.mktemp("rollouts") / "model", seed=1, spread=0.05)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[EngineGroup]:
    """Two engines that serve the folder's weights as version 0: what a learning rate of 0 would leave."""
    with started_cluster() as cluster:
        group = start_engines(cluster, config(), folder, folder)
        group.accept_loaded(version=0)
        yield group
        group.stop()


MakePool = Callable[..., RolloutPool]


def spell(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


@pytest.fixture
def make_pool(engines: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """Pools over the two engines; only one at a time, as two would take each other's answers."""
    monkeypatch.setattr(router_module, "COLLECT_S", COLLECT_S)
    pools: list[RolloutPool] = []

    def close() -> None:
        for pool in pools:
            pool.close()
        time.sleep(2 * COLLECT_S)  # the last question of a closed pool is still open at the engines
        pools.clear()

    def make(cfg: Config, prompts: Sequence[list[int]]) -> RolloutPool:
        close()
        rows = [Prompt(index=i, token_ids=list(ids), record={}) for i, ids in enumerate(prompts)]
        stream = PromptStream(prompts=rows, seed=cfg.seed, shuffle=False)
        scorer = FunctionScorer(lambda text, record: float(len(text) % 2))
        pools.append(RolloutPool(cfg, engines.handles, stream, SingleTurn(cfg, scorer, spell), ()))
        return pools[-1]

    yield make
    close()


def rows(groups: Sequence[Group]) -> list[Trajectory]:
    return [row for group in groups for row in group.trajectories]


def answers(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    return [tuple(row.token_ids[row.prompt_len :]) for row in rows(groups)]


# -- samples, not copies --


def test_eight_answers_of_two_engines_to_one_prompt_are_distinct(make_pool: MakePool) -> None:
    pool = make_pool(config(), [random_ids(1, 5)])
    pool.start(0, version=0)
    found = answers(pool.next_groups(1))
    assert len(set(found)) == len(found) == 8
    assert {len(answer) for answer in found} == {16}


def test_two_prompts_of_equal_text_get_different_answers(make_pool: MakePool) -> None:
    pool = make_pool(config(prompts_per_step=2), [random_ids(1, 5)] * 2)
    pool.start(0, version=0)
    assert len(set(answers(pool.next_groups(2)))) == 16


def test_run_seed_decides_the_rollout_and_each_step_has_its_own(make_pool: MakePool) -> None:
    def two_steps(seed: int) -> list[list[tuple[int, ...]]]:
        pool = make_pool(config(seed=seed), [random_ids(1, 5)])
        pool.start(0, version=0)
        first = pool.next_groups(1)
        pool.set_version(1)
        return [answers(first), answers(pool.next_groups(1))]

    one, again, other = two_steps(1), two_steps(1), two_steps(2)
    assert one == again
    everything = [answer for step in one + other for answer in step]
    assert len(set(everything)) == len(everything) == 32


def test_evaluation_repeats_itself_and_differs_from_training(make_pool: MakePool) -> None:
    pool = make_pool(config(), [random_ids(1, 5)])
    prompts = [Prompt(index=0, token_ids=random_ids(1, 5), record={})]
    sampling = Sampling(max_tokens=16, seed=1234)

    def sample() -> list[list[int]]:
        (found,) = pool.sample(prompts, sampling, 4)
        return [row.token_ids for row in found]

    first = sample()
    pool.start(0, version=0)
    trained = [row.token_ids for row in rows(pool.next_groups(1))]
    assert sample() == first
    assert len({tuple(ids) for ids in first + trained}) == 12


def test_count_of_samples_is_exact(make_pool: MakePool) -> None:
    prompts = [random_ids(k, 1 + 5 * k) for k in range(8)]
    cfg = config(prompts_per_step=8, samples_per_prompt=16)
    pool = make_pool(cfg, prompts)
    pool.start(0, version=0)
    for step in range(2):
        groups = pool.next_groups(8)
        pool.set_version(step + 1)
        assert [group.position for group in groups] == list(range(8 * step, 8 * step + 8))
        for group, prompt in zip(groups, prompts, strict=True):
            assert len(group.valid) == 16
            for row in group.valid:
                assert row.token_ids[: row.prompt_len] == prompt and row.num_action_tokens == 16
                assert len(row.logprobs) == len(row.versions) == len(row.token_ids) == len(prompt) + 16
        assert len(set(answers(groups))) == 128
        assert collate(groups).num_action_tokens == 128 * 16


# -- limits of length --


def test_prompts_near_the_context_are_clipped_or_left_out_one_by_one(make_pool: MakePool) -> None:
    prompts = [random_ids(k, length) for k, length in enumerate((10, 60, 63, 64, 65))]
    cfg = config(prompts_per_step=5, samples_per_prompt=2)
    pool = make_pool(cfg, prompts)
    pool.start(0, version=0)
    groups = pool.next_groups(5)
    lengths = [[row.num_action_tokens for row in group.trajectories] for group in groups]
    assert lengths == [[16, 16], [4, 4], [1, 1], [0, 0], [0, 0]]
    assert all(row.truncated for group in groups[:3] for row in group.trajectories)
    for row in rows(groups[3:]):
        assert row.status is Status.engine_failed and "refused" in row.error
    metrics = batch_metrics(collate(groups), Draw(kept=groups, dropped=[]), 0)
    assert metrics["rollout/num_failed"] == metrics["rollout/num_engine_failed"] == 4
    assert metrics["rollout/truncated"] == 1.0
    pool.set_version(1)
    assert len([row for row in rows(pool.next_groups(5)) if row.valid]) == 6


def overlong(folder: Path, path: Path, drop: bool) -> Config:
    """A data file with prompts of 60, 63, 64 and 65 tokens: the tiny tokenizer makes one of each character."""
    lines = [{"prompt": "a" * length, "answer": "a"} for length in (60, 63, 64, 65)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(path=str(path), template=Template.plain, eval_size=0, drop_overlong=drop)
    cfg = config(model=ModelConfig(path=str(folder)), data=data, reward={"_target_": "rollout.tasks.sort.reward"})
    return cfg


def test_preflight_leaves_out_overlong_prompts_and_counts_them(folder: Path, tmp_path: Path) -> None:
    prepared = prepare(overlong(folder, tmp_path / "data.jsonl", drop=True))
    assert [len(prompt.token_ids) for prompt in prepared.train] == [60, 63]
    assert any("left out 2 training" in warning for warning in prepared.warnings)
    assert any("leaves fewer than rollout.max_tokens=16" in warning for warning in prepared.warnings)


def test_preflight_refuses_an_overlong_prompt_otherwise(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt 2: 64 tokens, and the room for a prompt is 63"):
        prepare(overlong(folder, tmp_path / "data.jsonl", drop=False))


# -- limits of time --


def test_deadline_aborts_one_request_and_no_other(engines: EngineGroup) -> None:
    handle = engines.handles[0]
    patient = [make_request(random_ids(k, 4), max_tokens=50, seed=k) for k in range(6)]
    hasty = make_request(random_ids(9, 4), max_tokens=50, seed=9, deadline_s=1e-3)
    submit(handle, [*patient[:3], hasty, *patient[3:]])
    *found, late = collect(handle, [*patient, hasty])
    assert late.timed_out and late.completion is None and "rollout.deadline_s" in late.error
    assert [len(outcome.completion.token_ids) for outcome in found if outcome.completion] == [50] * 6
    (again,) = ask(handle, [make_request(random_ids(9, 4), max_tokens=50, seed=9)])
    assert len(again.token_ids) == 50


def test_deadline_counts_while_an_engine_is_paused(engines: EngineGroup) -> None:
    handle = engines.handles[0]
    ray.get(handle.actor.pause.remote(), timeout=60)
    hasty, patient = make_request(random_ids(1, 4), deadline_s=0.1), make_request(random_ids(2, 4))
    submit(handle, [hasty, patient])
    (late,) = collect(handle, [hasty], timeout_s=5)
    assert late.timed_out
    ray.get(handle.actor.accept_loaded.remote(0), timeout=60)  # as no push has connected, none can resume it
    (found,) = collect(handle, [patient])
    assert found.completion is not None


def test_sleeping_engine_keeps_requests_until_it_wakes(engines: EngineGroup) -> None:
    engines.sleep()
    request = make_request(random_ids(5, 4), seed=5)
    assert is_silent(engines.handles[1], [request])
    engines.wake()
    (found,) = collect(engines.handles[1], [request])
    assert found.completion is not None and len(found.completion.token_ids) > 0


# -- a killed engine: keep these last in this file, the engines are gone after them --


def process_of(engines: EngineGroup, index: int) -> int:
    actor = engines.handles[index].actor
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)


def test_killed_engine_fails_its_own_samples_only(engines: EngineGroup, make_pool: MakePool) -> None:
    cfg = config(prompts_per_step=4, samples_per_prompt=4)
    pool = make_pool(cfg, [random_ids(k, 5) for k in range(4)])
    ray.get(engines.handles[1].actor.pause.remote(), timeout=60)  # so that its requests are surely in flight
    pool.start(0, version=0)
    os.kill(process_of(engines, 1), signal.SIGKILL)
    groups = pool.next_groups(4)
    for group in groups:
        assert [row.status for row in group.trajectories].count(Status.engine_failed) == 2
        assert all(row.num_action_tokens == 16 for row in group.valid) and len(group.valid) == 2
        assert all("rollout engine 1" in row.error for row in group.trajectories if not row.valid)
    batch = collate(groups)
    assert batch.num_rows == 8
    assert batch_metrics(batch, Draw(kept=groups, dropped=[]), 0)["rollout/num_engine_failed"] == 8
    pool.set_version(1)  # the other engine takes over
    assert all(len(group.valid) == 4 for group in pool.next_groups(4))

    os.kill(process_of(engines, 0), signal.SIGKILL)
    pool.set_version(2)
    with pytest.raises(RoleDied, match=r"every rollout engine is gone:\n  rollout engine 1: .*\n"):
        pool.next_groups(4)
