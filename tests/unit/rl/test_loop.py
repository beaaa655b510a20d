"""The loop with stand-ins: what is called when, what is counted, and that an interruption changes nothing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.forward import Scorer
from actors.roles import ActorPolicy
from conf.choices import Layout
from conf.schema import Config, SyncConfig
from rl.advantages import broadcast_to_tokens, group_advantages
from rl.batching import NoValidTrajectories
from rl.loop import run, scores_before_update
from rl.numerics import MismatchError
from rl.prompts import PromptStream
from rl.roles import Metrics, Roles
from rl.timing import make_timer
from rl.types import Batch, Group, RunState
from rollout.pool import RolloutPool
from rollout.single_turn import SingleTurn
from tests.unit.stand_ins import (
    CopySync,
    DirectRollouts,
    FunctionScorer,
    LocalGroup,
    SgdPolicy,
    TinyEngine,
    TinyLm,
    TinySource,
    decode,
    make_cfg,
    make_prompts,
    ragged_batch,
    tiny_qwen3,
    twin,
)
from weightsync.sync import WeightSync

TWO_MINI_BATCHES = {"num_mini_batches": 2}


def make_stream(cfg: Config, count: int = 10) -> PromptStream:
    return PromptStream(prompts=make_prompts(count), seed=cfg.seed)


def make_roles(cfg: Config, lm: TinyLm, **more: Any) -> Roles:
    """Policy, rollouts and sync around one model; the engine starts with other weights than the policy's."""
    engine = TinyLm(seed=99)
    return Roles(
        policy=SgdPolicy(cfg, lm),
        rollouts=DirectRollouts(cfg, engine, make_stream(cfg)),
        sync=CopySync(lm, engine),
        **more,
    )


def train(cfg: Config, roles: Roles, state: RunState | None = None, stop_at: int | None = None) -> list[Metrics]:
    """Runs the loop; gives the metrics of each step. `stop_at` interrupts it after that step."""
    history: list[Metrics] = []

    def after_step(state: RunState, groups: list[Group], metrics: Metrics) -> None:
        history.append(metrics)
        if state.step == stop_at:
            raise KeyboardInterrupt

    run(cfg, roles, state or RunState(), make_timer({}), lambda: None, after_step)
    return history


class Recorder:
    """Wraps a role; notes each call as `role.method` with what the loop passed."""

    def __init__(self, name: str, role: Any, calls: list[tuple[Any, ...]]):
        self._name, self._role, self._calls = name, role, calls

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            plain = [a for a in (*args, *kwargs.values()) if isinstance(a, int)]
            self._calls.append((f"{self._name}.{method}", *plain))
            return getattr(self._role, method)(*args, **kwargs)

        return call


class FixedReference:
    """A reference that finds every token equally likely; `ValueOne`, a critic that values it 1."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return -2.0 * batch.action_mask

    def reload(self, model_path: Path) -> None:
        raise NotImplementedError


class ValueOne:
    def values(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return 1.0 * batch.action_mask, torch.ones(batch.num_rows)

    def update(self, batch: Batch, version: int) -> Metrics:
        assert batch.values is not None
        return {"critic/loss": 0.0}


def recorded(cfg: Config, state: RunState, **roles_given: Any) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    roles = make_roles(cfg, TinyLm(), **roles_given)
    wrapped = {
        field.name: Recorder(field.name, role, calls)
        for field in dataclasses.fields(roles)
        if (role := getattr(roles, field.name)) is not None
    }

    def after_step(state: RunState, _groups: list[Group], _metrics: Metrics) -> None:
        calls.append(("after_step", state.step))

    run(cfg, Roles(**wrapped), state, make_timer({}), lambda: calls.append(("before_first",)), after_step)
    return calls


def test_run_one_optimizer_step_calls_in_order_and_does_not_score() -> None:
    cfg = make_cfg(num_steps=2)
    assert recorded(cfg, RunState()) == [
        ("sync.push", 0),
        ("before_first",),
        ("rollouts.start", 0, 0),
        ("rollouts.next_groups", 4),
        ("policy.update", 0, 0),
        ("sync.push", 1),
        ("after_step", 1),
        ("rollouts.set_version", 1),
        ("rollouts.next_groups", 4),
        ("policy.update", 1, 1),
        ("sync.push", 2),
        ("after_step", 2),
        ("rollouts.set_version", 2),
        ("sync.settle",),
    ]


def test_run_all_roles_score_before_the_critic_and_the_policy_update() -> None:
    cfg = make_cfg(num_steps=1, algo=TWO_MINI_BATCHES | {"kl_coef": 0.1})
    calls = recorded(cfg, RunState(), reference=FixedReference(), critic=ValueOne())
    assert [name for name, *_ in calls[3:-4]] == [
        "rollouts.next_groups",
        "policy.logprobs",
        "reference.logprobs",
        "critic.values",
        "critic.update",
        "policy.update",
    ]


def test_run_resumed_state_continues_its_counters_everywhere() -> None:
    cfg = make_cfg(num_steps=6, algo=TWO_MINI_BATCHES)
    state = RunState(step=5, optimizer_step=10, prompts_consumed=20)
    calls = recorded(cfg, state)
    assert calls[0] == ("sync.push", 5)
    assert ("rollouts.start", 20, 5) in calls
    assert ("policy.update", 10, 5) in calls
    assert (state.step, state.optimizer_step, state.prompts_consumed) == (6, 12, 24)


def test_run_finished_state_takes_no_step() -> None:
    calls = recorded(make_cfg(num_steps=2), RunState(step=2))
    assert [name for name, *_ in calls] == ["sync.push", "before_first", "rollouts.start", "sync.settle"]


def test_run_every_phase_is_timed() -> None:
    phases: dict[str, float] = {}
    cfg = make_cfg(num_steps=1)
    run(cfg, make_roles(cfg, TinyLm()), RunState(), make_timer(phases), lambda: None, lambda *_: None)
    assert set(phases) == {"sync", "rollout", "score", "update"}


def test_run_state_counts_every_step() -> None:
    cfg = make_cfg(num_steps=3, algo={"num_epochs": 2, "num_mini_batches": 2})
    state, roles = RunState(), make_roles(cfg, TinyLm())
    train(cfg, roles, state)
    assert (state.step, state.optimizer_step, state.prompts_consumed) == (3, 12, 12)
    assert roles.sync.pushed == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert state.tokens_sampled > 0 and state.trajectories_failed == 0
    assert roles.rollouts.positions == list(range(12))  # type: ignore[attr-defined]


def test_run_versions_of_sampled_tokens_are_the_finished_steps() -> None:
    cfg = make_cfg(num_steps=3)
    seen: list[set[int]] = []

    def after_step(state: RunState, groups: list[Group], _: Metrics) -> None:
        seen.append({v for g in groups for t in g.trajectories for v in t.versions if v >= 0} | {state.step - 1})

    run(cfg, make_roles(cfg, TinyLm()), RunState(), make_timer({}), lambda: None, after_step)
    assert seen == [{0}, {1}, {2}]


def test_run_liked_token_reward_rises() -> None:
    cfg = make_cfg(num_steps=8, prompts_per_step=4, samples_per_prompt=8, trainer={"lr": 6.0})
    rewards = [metrics["reward/mean"] for metrics in train(cfg, make_roles(cfg, TinyLm()))]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


def test_run_engine_with_other_weights_raises_before_any_update() -> None:
    cfg = make_cfg(algo=TWO_MINI_BATCHES)
    lm = TinyLm()
    roles = make_roles(cfg, lm)
    roles.sync.target = TinyLm(seed=5)  # type: ignore[attr-defined]  # the push reaches another model
    before = twin(lm).state_dict()
    state = RunState()
    with pytest.raises(MismatchError, match="version 0"):
        train(cfg, roles, state)
    assert roles.policy.steps == [] and state == RunState()  # type: ignore[attr-defined]
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())


def test_run_engine_at_another_temperature_raises() -> None:
    cfg = make_cfg(algo=TWO_MINI_BATCHES, rollout={"temperature": 0.5})
    roles = make_roles(cfg, TinyLm())
    roles.rollouts.cfg = make_cfg()  # type: ignore[attr-defined]
    with pytest.raises(MismatchError):
        train(cfg, roles)


@pytest.mark.parametrize("algo", [{}, {"num_epochs": 2, "num_mini_batches": 2}])
def test_run_interrupted_and_resumed_equals_a_straight_run_bit_for_bit(algo: dict[str, Any]) -> None:
    cfg = make_cfg(num_steps=6, algo=algo)
    straight, cut = TinyLm(), TinyLm()
    whole = RunState()
    whole_history = train(cfg, make_roles(cfg, straight), whole)

    first = RunState()
    with pytest.raises(KeyboardInterrupt):
        train(cfg, make_roles(cfg, cut), first, stop_at=2)
    saved_state, saved_weights = json.dumps(dataclasses.asdict(first)), twin(cut).state_dict()

    resumed = TinyLm(seed=77)
    resumed.load_state_dict(saved_weights)
    second = RunState(**json.loads(saved_state))
    history = train(cfg, make_roles(cfg, resumed), second)
    assert second == whole
    assert history == whole_history[2:]
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in straight.state_dict().items())


def test_run_reference_only_where_the_role_exists() -> None:
    cfg = make_cfg(num_steps=1, algo={"kl_coef": 0.5})
    with_kl, without = TinyLm(), TinyLm()
    train(cfg, make_roles(cfg, with_kl, reference=FixedReference()))
    train(make_cfg(num_steps=1), make_roles(make_cfg(num_steps=1), without))
    assert not torch.equal(with_kl.head, without.head)


def test_scores_before_update_only_with_several_optimizer_steps() -> None:
    assert not scores_before_update(make_cfg())
    assert scores_before_update(make_cfg(algo=TWO_MINI_BATCHES))
    assert scores_before_update(make_cfg(algo={"num_epochs": 2}))


# -- the same loop over the real pool and the real weight sync --


def pool_roles(cfg: Config, lm: TinyLm, scorer: FunctionScorer, engines: int = 2) -> Roles:
    source = TinySource(lm)
    sinks = [TinyEngine(f"engine {i}", source) for i in range(engines)]
    sync = WeightSync(source, sinks, [1, 2, 3, 4], 1e-6, SyncConfig(timeout_s=20.0), 20.0)
    pool = RolloutPool(cfg, sinks, make_stream(cfg), SingleTurn(cfg, scorer, decode), stop_token_ids=(0,))
    return Roles(policy=SgdPolicy(cfg, lm), rollouts=pool, sync=sync)


@pytest.mark.parametrize("engines", [1, 2])
def test_run_pool_and_sync_without_lag_equals_direct_sampling(engines: int) -> None:
    cfg = make_cfg(num_steps=3, algo=TWO_MINI_BATCHES)
    direct, pooled = TinyLm(), TinyLm()
    train(cfg, make_roles(cfg, direct))
    roles = pool_roles(cfg, pooled, FunctionScorer(), engines)
    history = train(cfg, roles)
    roles.rollouts.close()  # type: ignore[attr-defined]
    assert torch.equal(direct.head, pooled.head) and torch.equal(direct.embed, pooled.embed)
    assert [metrics["sync/probe_max"] for metrics in history] == [0, 0, 0]


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_run_pool_with_lag_trains_on_tokens_at_most_that_old(max_lag: int) -> None:
    cfg = make_cfg(num_steps=5, max_lag=max_lag, rollout={"mismatch_limit": 100.0})
    roles = pool_roles(cfg, TinyLm(), FunctionScorer())
    state = RunState()
    history = train(cfg, roles, state)
    roles.rollouts.close()  # type: ignore[attr-defined]
    assert [metrics["rollout/lag_max"] for metrics in history] == [min(step, max_lag) for step in range(5)]
    assert state.prompts_consumed == 20


def test_run_failed_episodes_are_counted_and_carry_no_loss() -> None:
    """16 episodes, three of them failing: the survivors train, a lone survivor has no gradient."""
    calls = iter(range(100))

    def fails_three_times(text: str, record: dict[str, Any]) -> float:
        if record["id"] == lonely and next(calls) < 3:
            raise KeyError("answer")
        return len(text)

    cfg = make_cfg(num_steps=1)
    lonely = make_stream(cfg).at(2).record["id"]
    seen: list[Group] = []
    roles = pool_roles(cfg, TinyLm(), FunctionScorer(fails_three_times))
    update = roles.policy.update
    batches: list[Batch] = []
    roles.policy.update = lambda batch, step, version: batches.append(batch) or update(batch, step, version)  # type: ignore[assignment, method-assign, func-returns-value]

    def after_step(state: RunState, groups: list[Group], metrics: Metrics) -> None:
        seen.extend(groups)
        assert metrics["rollout/num_failed"] == metrics["rollout/num_reward_failed"] == 3

    run(cfg, roles, RunState(), make_timer({}), lambda: None, after_step)
    roles.rollouts.close()  # type: ignore[attr-defined]
    (batch,) = batches
    assert batch.num_rows == 13
    assert [len(group.valid) for group in seen] == [4, 4, 1, 4]
    assert batch.advantages is not None
    assert not batch.advantages[batch.group_index == 2].any()
    assert batch.advantages[batch.group_index != 2].any()
    errors = [t.error for t in seen[2].trajectories if not t.valid]
    assert errors == ["KeyError: 'answer'"] * 3


def test_run_all_episodes_failed_stops_with_the_reason() -> None:
    def fails(text: str, record: dict[str, Any]) -> float:
        raise ValueError("no verifier")

    cfg, state = make_cfg(num_steps=1), RunState()
    roles = pool_roles(cfg, TinyLm(), FunctionScorer(fails))
    with pytest.raises(NoValidTrajectories, match=r"all 16 .*\n.*no verifier"):
        train(cfg, roles, state)
    roles.rollouts.close()  # type: ignore[attr-defined]
    assert state.step == 0


# -- old log-probabilities, in the policy that a run uses (its rank in this process, without DeepSpeed) --


def actor_policy(
    algo: dict[str, Any], lr: float, lm: torch.nn.Module, layout: Layout = Layout.shared_prefix
) -> tuple[ActorPolicy, LocalGroup]:
    cfg = make_cfg(algo=algo, trainer={"lr": lr, "micro_batch_tokens": 30, "layout": layout})
    group = LocalGroup(cfg, Scorer(lm, cfg.rollout.temperature, layout))
    return ActorPolicy(cfg, group), group  # type: ignore[arg-type]


def scored_batch(policy: ActorPolicy, score: bool) -> Batch:
    """A batch as the loop hands it over: engine values equal to the trainer's."""
    batch = ragged_batch(3, 32, prompt_lens=(2, 3, 4, 5), samples=2)
    batch.train_logprobs = batch.ref_logprobs = None
    batch.rollout_logprobs = policy.logprobs(batch)
    batch.train_logprobs = policy.logprobs(batch) if score else None
    batch.rewards = torch.tensor([1.0, 0.0] * 4)
    batch.advantages = broadcast_to_tokens(group_advantages(batch.rewards, batch.group_index, True), batch.action_mask)
    return batch


def test_update_one_mini_batch_has_ratio_one_no_clipping_and_a_gradient() -> None:
    policy, _ = actor_policy({}, 0.1, tiny_qwen3())
    metrics = policy.update(scored_batch(policy, score=False), 0, 0)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == 0
    assert metrics["policy/grad_norm"] > 1e-3
    assert metrics["mismatch/mean"] < 1e-5
    assert metrics["policy/lr"] == 0.1


def test_update_later_mini_batches_and_epochs_compare_with_the_values_before_the_first() -> None:
    lm = tiny_qwen3()
    policy, group = actor_policy({"num_mini_batches": 2, "num_epochs": 2}, 2.0, lm)
    batch = scored_batch(policy, score=True)
    assert batch.train_logprobs is not None
    before = batch.train_logprobs.clone()
    policy.update(batch, 0, 0)
    assert torch.equal(batch.train_logprobs, before)
    (updates,) = next(arguments for method, arguments in reversed(group.calls) if method == "update")
    assert len(updates) == 4
    for epoch in (updates[:2], updates[2:]):
        rows = [part.train_logprobs[i][part.action_mask[i]] for u in epoch for m in u.micros
                if (part := m.batch) is not None for i in range(part.num_rows)]  # fmt: skip
        wanted = [before[i][batch.action_mask[i]] for i in range(batch.num_rows)]
        assert sorted(r.tolist() for r in rows) == sorted(w.tolist() for w in wanted)

    fresh = tiny_qwen3()
    policy, group = actor_policy({"num_mini_batches": 2}, 2.0, fresh)
    first, second = (group.rank.update([update]).sums[0] for update in updates[:2])
    count = [sum(m.batch.num_action_tokens for m in u.micros if m.batch) for u in updates[:2]]
    assert first["ratio"] / count[0] == pytest.approx(1, abs=1e-6)
    assert first["clip_low"] == first["clip_high"] == 0
    assert second["ratio"] / count[1] != pytest.approx(1, abs=1e-2)

    once = tiny_qwen3()
    policy, group = actor_policy({"num_mini_batches": 2}, 2.0, once)
    group.rank.update(updates[:1])
    parts = [m.batch for m in updates[1].micros if m.batch]
    new = [policy.logprobs(dataclasses.replace(part)) for part in parts]
    ratios = sum(float((n - p.train_logprobs)[p.action_mask].exp().sum()) for n, p in zip(new, parts, strict=True))
    assert second["ratio"] == pytest.approx(ratios, rel=1e-5)


def test_update_fused_mismatch_raises_before_the_optimizer_moves() -> None:
    lm = tiny_qwen3()
    policy, _ = actor_policy({}, 0.5, lm)
    batch = scored_batch(policy, score=False)
    batch.rollout_logprobs = batch.rollout_logprobs + 0.01 * batch.action_mask
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    with pytest.raises(MismatchError, match=r"0.01 at weight version 0"):
        policy.update(batch, 0, 0)
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())


@pytest.mark.parametrize("layout", Layout)
def test_update_two_mini_batches_step_by_the_mean_over_their_own_tokens(layout: Layout) -> None:
    """A step by hand: -lr times the gradient of -A * logprob, averaged over the tokens of that mini-batch."""
    lm, by_hand = tiny_qwen3(), tiny_qwen3()
    policy, group = actor_policy({"num_mini_batches": 2}, 1e-3, lm, layout)
    batch = scored_batch(policy, score=True)
    policy.update(batch, 0, 0)
    (updates,) = group.calls[-1][1]
    parts = [[m.batch for m in update.micros if m.batch] for update in updates]
    owners = [{int(g) for part in micros for g in part.group_index} for micros in parts]
    assert [len(owner) for owner in owners] == [2, 2] and not owners[0] & owners[1]
    scorer = Scorer(by_hand, 1.0, Layout.padded)
    for owner in owners:
        rows = [i for i, g in enumerate(batch.group_index.tolist()) if g in owner]
        part = batch.select(rows)
        assert part.train_logprobs is not None and part.advantages is not None
        ratio = (scorer(part, 1)[0] - part.train_logprobs)[part.action_mask].exp()
        by_hand.zero_grad()
        (-(ratio * part.advantages[part.action_mask]).sum() / len(ratio)).backward()
        with torch.no_grad():
            for parameter in by_hand.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)  # type: ignore[arg-type]
    start = tiny_qwen3().state_dict()
    for name, value in by_hand.state_dict().items():
        moved, wanted = lm.state_dict()[name] - start[name], value - start[name]
        torch.testing.assert_close(moved, wanted, atol=1e-6 + 1e-3 * float(wanted.abs().max()), rtol=1e-3, msg=name)
