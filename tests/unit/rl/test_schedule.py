"""The learning rate counts optimizer steps, and only those."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine import StepResult
from actors.rank import UpdateResult
from actors.roles import ActorPolicy
from conf.choices import Schedule
from rl.advantages import broadcast_to_tokens, group_advantages
from rl.batching import collate
from rl.schedule import learning_rate, warmup_steps
from tests.unit.stand_ins import make_cfg, make_group


def test_linear_forty_updates_halves_at_20_and_is_zero_at_40() -> None:
    rates = [learning_rate(step, 40, 1e-3, Schedule.linear) for step in range(60)]
    assert rates[0] == 1e-3
    assert rates[20] == pytest.approx(5e-4)
    assert rates[39] > 0
    assert rates[40:] == [0.0] * 20


def test_warmup_ratio_a_tenth_of_forty_is_four_updates() -> None:
    assert warmup_steps(40, 0.1) == 4
    rates = [learning_rate(step, 40, 1e-3, Schedule.linear, 4) for step in range(41)]
    assert rates[:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert rates[22] == pytest.approx(5e-4)
    assert rates[40] == 0.0


def test_constant_after_warmup_stays_at_its_peak() -> None:
    assert [learning_rate(s, 10, 2.0, Schedule.constant, 2) for s in (0, 1, 2, 9, 50)] == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_cosine_halfway_is_half_and_the_end_is_the_final_ratio() -> None:
    assert learning_rate(5, 10, 1.0, Schedule.cosine) == pytest.approx(0.5)
    assert learning_rate(10, 10, 1.0, Schedule.cosine, final_ratio=0.1) == pytest.approx(0.1)


@given(
    total=st.integers(1, 200),
    ratio=st.floats(0, 1),
    final=st.floats(0, 1),
    schedule=st.sampled_from(list(Schedule)),
)
def test_learning_rate_any_schedule_rises_then_never_rises_again(
    total: int, ratio: float, final: float, schedule: Schedule
) -> None:
    warm = warmup_steps(total, ratio)
    rates = [learning_rate(s, total, 1.0, schedule, warm, final) for s in range(total + 20)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    assert all(a <= b for a, b in itertools.pairwise(rates[:warm]))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[warm:]))
    if warm < total:
        assert all(rate > 0 for rate in rates[:total])


class RecordingGroup:
    """Ranks that keep what they were told and train nothing."""

    role = "policy"

    def __init__(self, world: int):
        self.replicas, self.rates = world, list[float]()
        self.quadratic_tokens = 100.0

    def call_each(self, method: str, updates: Any) -> list[Any]:
        self.rates += [update.lr for update in updates[0]]
        assert all([u.lr for u in rank] == [u.lr for u in updates[0]] for rank in updates)
        results = [UpdateResult(sums=[], steps=[]) for _ in updates]
        for result, rank in zip(results, updates, strict=True):
            for _ in rank:
                result.add({}, StepResult(grad_norm=1.0, skipped=False), 0.0, 0.0)
        return results


@pytest.mark.parametrize(("world", "samples", "budget"), [(1, 2, 8192), (2, 2, 4), (2, 5, 8192)])
def test_learning_rate_ten_steps_two_epochs_two_mini_batches_makes_40_updates(
    world: int, samples: int, budget: int
) -> None:
    cfg = make_cfg(
        num_steps=10,
        prompts_per_step=8,
        samples_per_prompt=samples,
        algo={"num_epochs": 2, "num_mini_batches": 2},
        trainer={"lr": 1e-3, "schedule": Schedule.linear, "micro_batch_tokens": budget},
    )
    group = RecordingGroup(world)
    batch = collate([make_group(p, [1, 2], [[3, 4]] * samples) for p in range(8)])
    batch.advantages = broadcast_to_tokens(group_advantages(batch.rewards, batch.group_index, True), batch.action_mask)
    policy = ActorPolicy(cfg, group)  # type: ignore[arg-type]
    for step in range(10):
        metrics = policy.update(batch, optimizer_step=4 * step, version=step)
    assert cfg.num_optimizer_steps == len(group.rates) == 40
    assert group.rates == pytest.approx([1e-3 * (1 - i / 40) for i in range(40)])
    assert metrics["policy/lr"] == group.rates[-1] > 0
