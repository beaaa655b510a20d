"""The pool over scripted engines: prompt order, lag as a number, seeds, and failures that stay where they belong."""

import asyncio
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from conf.schema import Config
from rl.faults import RoleDied, RoleTimeout
from rl.prompts import PromptStream
from rl.types import Completion, Prompt, Sampling, Status
from rollout import pool as pool_module
from rollout import router as router_module
from rollout.engine import Outcome, Request
from rollout.pool import RolloutPool, shuffle_rewards
from rollout.rewards import Scored
from rollout.seeds import derive_seed
from rollout.single_turn import SingleTurn, as_trajectory
from tests.unit.stand_ins import FunctionScorer, make_cfg, make_group, make_prompts


class ScriptedEngine:
    """Keeps requests until the test says how they end."""

    def __init__(self, name: str = "engine 0"):
        self.name, self.requests, self.generation = name, list[Request](), 1
        self.aborted: list[str] = []
        self.submit_error: Exception | None = None
        self._events: asyncio.Queue[Outcome | Exception] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._collecting = threading.Event()
        self.submitted = threading.Event()

    async def submit(self, requests: list[Request]) -> None:
        self.requests += requests
        self.submitted.set()
        if self.submit_error:
            raise self.submit_error

    async def collect(self, timeout_s: float) -> list[Outcome]:
        self._loop = asyncio.get_running_loop()
        self._collecting.set()
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return [event]

    def finish(self, request: Request, ids: list[int] | None = None, reason: str = "stop") -> None:
        """Ends a request; by default its only token is its own seed, so that a mix-up shows."""
        token_ids = ids or [request.sampling.seed or 0]
        completion = Completion(
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            logprobs=[-1.0] * len(token_ids),
            finish_reason=reason,
            versions=[3] * len(token_ids),
            ttft_s=0.0,
            decode_s=0.0,
        )
        self.tell(Outcome(request_id=request.request_id, completion=completion))

    def tell(self, event: Outcome | Exception) -> None:
        assert self._collecting.wait(10) and self._loop is not None
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


MakePool = Callable[..., RolloutPool]


def spell(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Pools over the given engines, closed after the test."""
    pools: list[RolloutPool] = []

    def make(cfg: Config, *engines: ScriptedEngine, scorer: Any = None, prompts: list[Prompt] | None = None) -> Any:
        stream = PromptStream(prompts=prompts or make_prompts(8), seed=cfg.seed, shuffle=False)
        scorer = scorer or FunctionScorer(lambda text, record: float(record.get("id", 0)))
        pools.append(RolloutPool(cfg, engines, stream, SingleTurn(cfg, scorer, spell), (0, 9)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def small(**more: Any) -> Config:
    return make_cfg(**{"prompts_per_step": 2, "samples_per_prompt": 2, "num_steps": 5} | more)


def test_next_groups_completed_in_reverse_come_in_prompt_order(make_pool: MakePool) -> None:
    cfg, engine = small(prompts_per_step=4), ScriptedEngine()
    pool = make_pool(cfg, engine)
    pool.start(0, version=3)
    assert len(engine.requests) == 8
    for request in reversed(engine.requests):
        engine.finish(request)
    groups = pool.next_groups(4)
    assert [g.position for g in groups] == [0, 1, 2, 3]
    assert [g.version for g in groups] == [3] * 4
    for group in groups:
        assert [t.reward for t in group.trajectories] == [group.prompt.record["id"]] * 2
        seeds = [derive_seed("train", cfg.seed, group.position, k) for k in range(2)]
        assert [t.token_ids for t in group.trajectories] == [[*group.prompt.token_ids, seed] for seed in seeds]


def test_start_in_the_middle_begins_at_that_prompt_and_leaves_the_rest(make_pool: MakePool) -> None:
    engine = ScriptedEngine()
    pool = make_pool(small(max_lag=9), engine)
    pool.start(first_position=6, version=3)
    assert len(engine.requests) == 2 * 2 * 2  # two steps are left
    for request in engine.requests:
        engine.finish(request)
    assert [g.position for g in pool.next_groups(4)] == [6, 7, 8, 9]


class AnsweringEngine(ScriptedEngine):
    """Answers each request at once; its only token is its own seed."""

    async def submit(self, requests: list[Request]) -> None:
        await super().submit(requests)
        for request in requests:
            completion = Completion(
                prompt_ids=request.prompt_ids,
                token_ids=[request.sampling.seed or 0],
                logprobs=[-1.0],
                finish_reason="stop",
                versions=[0],
                ttft_s=0.0,
                decode_s=0.0,
            )
            self._events.put_nowait(Outcome(request_id=request.request_id, completion=completion))


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_set_version_groups_started_are_ahead_by_the_lag_and_never_beyond_the_end(
    make_pool: MakePool, max_lag: int
) -> None:
    engine = ScriptedEngine()
    pool = make_pool(small(max_lag=max_lag), engine)
    pool.start(0, version=0)
    for version in range(6):
        if version:
            for request in engine.requests[(version - 1) * 4 : version * 4]:
                engine.finish(request)
            assert [g.position for g in pool.next_groups(2)] == [2 * version - 2, 2 * version - 1]
            pool.set_version(version)
        steps = min(5, version + 1 + max_lag)
        assert len(engine.requests) == steps * 2 * 2
        pool.set_version(version)  # said twice: nothing more starts
        assert len(engine.requests) == steps * 2 * 2
        if version == 5:
            return


def test_next_groups_more_than_were_started_starts_the_rest(make_pool: MakePool) -> None:
    """Dynamic sampling asks for further groups within a step; they have the next positions."""
    engine = AnsweringEngine()
    pool = make_pool(small(), engine)
    pool.start(0, version=0)
    assert [g.position for g in pool.next_groups(5)] == [0, 1, 2, 3, 4]
    pool.set_version(1)
    assert [g.position for g in pool.next_groups(2)] == [5, 6]


def test_start_groups_settled_prompts_are_left_out_until_all_are(make_pool: MakePool) -> None:
    engine = AnsweringEngine()
    pool = make_pool(small(), engine)
    order = [pool.stream.at(position).index for position in range(6)]
    pool.is_settled = lambda index, epoch: index in order[1:3]
    pool.start(0, version=0)
    assert [g.position for g in pool.next_groups(3)] == [0, 3, 4]
    pool.is_settled = lambda index, epoch: True
    pool.set_version(1)
    assert [g.position for g in pool.next_groups(2)] == [5, 6]


# -- seeds --


def all_requests(make_pool: MakePool, cfg: Config, num_engines: int = 1) -> list[Request]:
    engines = [ScriptedEngine(f"engine {i}") for i in range(num_engines)]
    make_pool(cfg, *engines, prompts=make_prompts(3)).start(0, version=0)
    requests = [request for engine in engines for request in engine.requests]
    return sorted(requests, key=lambda r: int(r.request_id[1:]))


def test_seeds_every_sample_of_a_run_has_its_own(make_pool: MakePool) -> None:
    """Three prompts, so that positions come back to the same prompt: it is sampled anew each time."""
    cfg = small(num_steps=20, max_lag=20)
    seeds = [r.sampling.seed for r in all_requests(make_pool, cfg)]
    assert len(seeds) == len(set(seeds)) == 80


def test_seeds_do_not_depend_on_the_number_of_engines(make_pool: MakePool) -> None:
    cfg = small(max_lag=5)
    one, two = (all_requests(make_pool, cfg, count) for count in (1, 2))
    assert [(r.prompt_ids, r.sampling) for r in one] == [(r.prompt_ids, r.sampling) for r in two]


def test_seeds_same_run_seed_repeats_and_another_differs(make_pool: MakePool) -> None:
    first, again, other = ([r.sampling.seed for r in all_requests(make_pool, small(seed=seed))] for seed in (0, 0, 1))
    assert first == again
    assert not set(first) & set(other)


def test_derive_seed_names_are_kept_apart_and_stable() -> None:
    parts = [("train", s, p, k) for s in range(4) for p in range(16) for k in range(8)]
    parts += [("evaluate", s, p, k) for s in range(4) for p in range(16) for k in range(8)]
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed("train", 0, 0, 0) == derive_seed("train", 0, 0, 0) != derive_seed("train", 0, 1, 0)
    assert derive_seed("train", 1, 11) != derive_seed("train", 11, 1)


def test_sample_evaluation_seeds_are_fixed_and_apart_from_training(make_pool: MakePool) -> None:
    engine = ScriptedEngine()
    pool = make_pool(small(), engine)
    prompts, found = make_prompts(2), []
    for _ in range(2):
        engine.requests.clear()
        engine.submitted.clear()
        rows: list[Any] = []
        sampling = Sampling(max_tokens=4, seed=1234, stop_token_ids=(9,))
        caller = threading.Thread(target=lambda out=rows, s=sampling: out.extend(pool.sample(prompts, s, 3)))
        caller.start()
        assert engine.submitted.wait(10) and len(engine.requests) == 6  # all in one call
        for request in engine.requests[::-1]:
            engine.finish(request)
        caller.join(10)
        assert [[t.reward for t in row] for row in rows] == [[0.0] * 3, [1.0] * 3]
        found.append([r.sampling for r in engine.requests])
    assert found[0] == found[1]
    seeds = {s.seed for s in found[0]}
    assert len(seeds) == 6
    assert not seeds & {derive_seed("train", 0, p, k) for p in range(8) for k in range(8)}


# -- what is sent --


def test_request_every_sampling_knob_comes_from_the_configuration(make_pool: MakePool) -> None:
    cfg = small(rollout={"temperature": 0.6, "max_tokens": 5, "deadline_s": 12.5})
    for request in all_requests(make_pool, cfg):
        wanted = Sampling(max_tokens=5, temperature=0.6, seed=request.sampling.seed, stop_token_ids=(0, 9))
        assert request.sampling == wanted
        assert request.deadline_s == 12.5


def test_request_prompt_near_the_context_limit_is_clipped_and_marked_truncated(make_pool: MakePool) -> None:
    prompts = [Prompt(index=i, token_ids=[1] * n, record={"id": i}) for i, n in enumerate((60, 63))]
    engine = ScriptedEngine()
    pool = make_pool(small(rollout={"max_tokens": 16, "max_model_len": 64}), engine, prompts=prompts)
    pool.start(0, version=0)
    assert [r.sampling.max_tokens for r in engine.requests] == [4, 4, 1, 1]
    for request in engine.requests:
        engine.finish(request, [5] * request.sampling.max_tokens, "length")
    for group in pool.next_groups(2):
        assert [(len(t.token_ids), t.truncated, t.status) for t in group.trajectories] == [(64, True, Status.ok)] * 2


@pytest.mark.parametrize("length", [64, 65])
def test_request_prompt_without_room_ends_as_failed_and_the_others_go_on(make_pool: MakePool, length: int) -> None:
    """The engine refuses to sample no token; the pool passes its refusal on for that sample only."""
    prompts = [Prompt(index=i, token_ids=[1] * n, record={"id": i}) for i, n in enumerate((length, 3))]
    engine = ScriptedEngine()
    pool = make_pool(small(rollout={"max_tokens": 16, "max_model_len": 64}), engine, prompts=prompts)
    pool.start(0, version=0)
    for request in engine.requests:
        if request.sampling.max_tokens < 1:
            engine.tell(Outcome(request_id=request.request_id, error="refused"))
        else:
            engine.finish(request)
    long, short = pool.next_groups(2)
    assert [t.status for t in long.trajectories] == [Status.engine_failed] * 2
    assert [t.status for t in short.trajectories] == [Status.ok] * 2


def test_requests_two_engines_share_the_load_evenly(make_pool: MakePool) -> None:
    engines = [ScriptedEngine("a"), ScriptedEngine("b")]
    pool = make_pool(small(prompts_per_step=4), *engines)
    pool.start(0, version=0)
    assert [len(e.requests) for e in engines] == [4, 4]
    for engine in engines:
        for request in engine.requests:
            engine.finish(request)
    pool.next_groups(4)
    pool.set_version(1)
    assert [len(e.requests) for e in engines] == [8, 8]


# -- failures --


def finish_all(*engines: ScriptedEngine) -> None:
    for engine in engines:
        for request in engine.requests:
            engine.finish(request)


def test_engine_that_dies_fails_its_samples_alone_and_gets_no_more(make_pool: MakePool) -> None:
    good, bad = ScriptedEngine("good"), ScriptedEngine("bad")
    pool = make_pool(small(), good, bad)
    pool.start(0, version=0)
    finish_all(good)
    bad.tell(RuntimeError("the process is gone"))
    trajectories = [t for g in pool.next_groups(2) for t in g.trajectories]
    assert Counter(t.status for t in trajectories) == {Status.ok: 2, Status.engine_failed: 2}
    assert {t.error for t in trajectories if not t.valid} == {"bad: the process is gone"}
    for trajectory in trajectories:
        if not trajectory.valid:
            assert trajectory.num_action_tokens == 0
            assert trajectory.token_ids[: trajectory.prompt_len] == trajectory.token_ids
    pool.set_version(1)
    assert (len(good.requests), len(bad.requests)) == (2 + 4, 2)


def test_engine_that_refuses_a_submission_is_dead_too(make_pool: MakePool) -> None:
    good, bad = ScriptedEngine("good"), ScriptedEngine("bad")
    bad.submit_error = RuntimeError("no such actor")
    pool = make_pool(small(), good, bad)
    pool.start(0, version=0)
    finish_all(good)
    statuses = Counter(t.status for g in pool.next_groups(2) for t in g.trajectories)
    assert statuses == {Status.ok: 2, Status.engine_failed: 2}


def test_every_engine_dead_raises_with_each_name(make_pool: MakePool) -> None:
    engines = [ScriptedEngine("a"), ScriptedEngine("b")]
    pool = make_pool(small(), *engines)
    pool.start(0, version=0)
    for engine in engines:
        engine.tell(RuntimeError(f"killed {engine.name}"))
    with pytest.raises(RoleDied, match=r"(?s)every rollout engine is gone.*a: killed a.*b: killed b"):
        pool.next_groups(2)


def test_request_past_its_deadline_is_a_timeout_not_a_reward(make_pool: MakePool) -> None:
    engine = ScriptedEngine()
    pool = make_pool(small(), engine)
    pool.start(0, version=0)
    late, *rest = engine.requests
    engine.tell(Outcome(request_id=late.request_id, timed_out=True, error="nothing in 600 s"))
    for request in rest:
        engine.finish(request)
    first = pool.next_groups(2)[0].trajectories
    assert [(t.status, t.error) for t in first] == [(Status.engine_timeout, "nothing in 600 s"), (Status.ok, "")]


def test_silent_engine_is_given_up_after_the_grace_period(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "GRACE_S", 0.0)
    engine = ScriptedEngine("mute")
    pool = make_pool(small(rollout={"deadline_s": 0.01}), engine)
    pool.start(0, version=0)
    for request in engine.requests[1:]:
        engine.finish(request)
    first = pool.next_groups(2)[0].trajectories[0]
    assert first.status is Status.engine_timeout
    assert "mute does not answer" in first.error


def test_answer_for_an_unknown_request_is_ignored(make_pool: MakePool) -> None:
    engine = ScriptedEngine()
    pool = make_pool(small(), engine)
    pool.start(0, version=0)
    engine.tell(Outcome(request_id="r999", error="late"))
    finish_all(engine, engine)  # every answer twice
    assert all(t.valid for g in pool.next_groups(2) for t in g.trajectories)


def test_reward_that_raises_is_a_status_with_its_error(make_pool: MakePool) -> None:
    def one_bad(text: str, record: dict[str, Any]) -> float:
        if record["id"] == 1:
            raise ValueError("no answer in it")
        return 2.0

    engine = ScriptedEngine()
    pool = make_pool(small(), engine, scorer=FunctionScorer(one_bad))
    pool.start(0, version=0)
    finish_all(engine)
    good, bad = pool.next_groups(2)
    assert [(t.status, t.reward) for t in good.trajectories] == [(Status.ok, 2.0)] * 2
    assert [(t.status, t.reward) for t in bad.trajectories] == [(Status.reward_failed, 0.0)] * 2
    assert {t.error for t in bad.trajectories} == {"ValueError: no answer in it"}
    assert bad.valid == []


class OneAtATime:
    """A slow reward process: calls wait in line."""

    def __init__(self) -> None:
        self.line = asyncio.Lock()

    async def score(self, completion: str, record: dict[str, Any]) -> Scored:
        async with self.line:
            await asyncio.sleep(0.05)
            return Scored(reward=1.0, status=Status.ok)


def test_next_groups_waits_for_rewards_that_stand_in_line(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rewards, each within its deadline, one after another: no reason to give up."""
    monkeypatch.setattr(pool_module, "GRACE_S", 0.0)
    engine = ScriptedEngine()
    cfg = small(rollout={"deadline_s": 0.3}, reward={"deadline_s": 0.1}, prompts_per_step=8)
    pool = make_pool(cfg, engine, scorer=OneAtATime())
    pool.start(0, version=0)
    finish_all(engine)
    assert [len(group.valid) for group in pool.next_groups(8)] == [2] * 8


class StuckScorer:
    async def score(self, completion: str, record: dict[str, Any]) -> Scored:
        await asyncio.Event().wait()
        raise AssertionError


def test_next_groups_that_never_come_time_out(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE_S", 0.0)
    engine = ScriptedEngine()
    cfg = small(rollout={"deadline_s": 0.05}, reward={"deadline_s": 0.01})
    pool = make_pool(cfg, engine, scorer=StuckScorer())
    pool.start(0, version=0)
    finish_all(engine)
    with pytest.raises(RoleTimeout, match="phase rollout: the episodes were not done"):
        pool.next_groups(2)


# -- the rest --


def test_close_leaves_no_thread_and_no_unfinished_task(make_pool: MakePool, caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    engine = ScriptedEngine()
    pool = make_pool(small(max_lag=2), engine)
    pool.start(0, version=0)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        pool.close()
        pool.close()
        gc.collect()
    assert set(threading.enumerate()) == before
    assert [record.getMessage() for record in caplog.records] == []


def test_as_trajectory_arrays_are_token_aligned() -> None:
    completion = Completion(
        prompt_ids=[7, 8], token_ids=[1, 2, 3], logprobs=[-0.1, -0.2, -0.3], finish_reason="length",
        versions=[4, 4, 5], ttft_s=0.0, decode_s=0.0,
    )  # fmt: skip
    row = as_trajectory(completion)
    assert row.token_ids == [7, 8, 1, 2, 3]
    assert row.action_mask == [False, False, True, True, True]
    assert row.logprobs == [0, 0, -0.1, -0.2, -0.3]
    assert row.versions == [-1, -1, 4, 4, 5]
    assert (row.prompt_len, row.truncated, row.valid) == (2, True, True)


def test_shuffle_rewards_keeps_the_multiset_and_moves_rewards() -> None:
    def groups() -> list[Any]:
        status = [Status.ok, Status.ok, Status.reward_failed, Status.ok]
        return [make_group(g, [1], [[2]] * 4, reward=[10.0 * g + k for k in range(4)], status=status) for g in range(4)]

    straight, one, two, other = groups(), groups(), groups(), groups()
    for shuffled, seed in ((one, 1), (two, 1), (other, 2)):
        shuffle_rewards(shuffled, seed)

    def rewards(groups: list[Any]) -> list[float]:
        return [t.reward for g in groups for t in g.valid]

    assert sorted(rewards(one)) == sorted(rewards(straight))
    assert rewards(one) == rewards(two) != rewards(straight)
    assert rewards(other) != rewards(one)
    assert [g.trajectories[2].reward for g in one] == [2.0, 12.0, 22.0, 32.0]


def test_shuffle_rewards_leaves_no_turn_with_what_it_earned() -> None:
    (group,) = [make_group(0, [1], [[2, 2]] * 6)]
    for number, trajectory in enumerate(group.trajectories):
        trajectory.token_rewards = [0.0, 0.5 * number, 0.5 * number]
        fork = replace(trajectory, token_rewards=[0.0, 0.0, 0.5 * number], reward=0.5 * number)
        other = replace(trajectory, agent="o", token_rewards=[0.0, 0.0, -1.0 * number])
        trajectory.more = [fork, other]
    shuffle_rewards([group], seed=1)
    mine = [t.reward for t in group.trajectories]
    theirs = [t.more[1].reward for t in group.trajectories]
    assert sorted(mine) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] != mine
    assert sorted(theirs) == [-5.0, -4.0, -3.0, -2.0, -1.0, 0.0] and theirs != [-one for one in mine]
    assert all(row.token_rewards is None for t in group.trajectories for row in t.rows)
    assert [t.more[0].reward for t in group.trajectories] == mine


def test_next_groups_with_shuffled_rewards_is_reproducible(make_pool: MakePool) -> None:
    found = []
    for _ in range(2):
        engine = ScriptedEngine()
        pool = make_pool(small(prompts_per_step=4, reward={"shuffle": True}), engine)
        pool.start(0, version=0)
        finish_all(engine)
        found.append([t.reward for g in pool.next_groups(4) for t in g.trajectories])
    assert found[0] == found[1] != sorted(found[0])
    assert sorted(found[0]) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
