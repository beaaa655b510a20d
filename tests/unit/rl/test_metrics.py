"""Metrics are sums over global divisors: any cut gives the same, and nothing bad gets lost on the way."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.batching import collate
from rl.metrics import batch_metrics, merge_sums, on_cpu, per_token
from rl.sampling import Draw
from rl.types import Status
from tests.unit.stand_ins import make_group


def tensors(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}


def test_merge_sums_adds_and_keeps_the_largest_max() -> None:
    parts = [tensors(a=1.0, gap_max=3.0), tensors(a=2.0, b=5.0, gap_max=1.0)]
    assert merge_sums(parts) == tensors(a=3.0, b=5.0, gap_max=3.0)
    assert merge_sums([]) == {}


@pytest.mark.parametrize("order", list(itertools.permutations([math.nan, 1.0, 2.0])))
def test_merge_sums_nan_maximum_wins_in_any_order(order: tuple[float, ...]) -> None:
    merged = merge_sums(tensors(gap_max=value, sum=value) for value in order)
    assert math.isnan(merged["gap_max"])
    assert math.isnan(merged["sum"])


@given(st.lists(st.fixed_dictionaries({"s": st.integers(-9, 9), "m_max": st.integers(-9, 9)}), min_size=1), st.data())
def test_merge_sums_any_grouping_gives_the_same(numbers: list[dict[str, float]], data: st.DataObject) -> None:
    parts = [tensors(**part) for part in numbers]
    cut = data.draw(st.integers(0, len(parts)))
    halves = [half for half in (parts[:cut], parts[cut:]) if half]
    assert merge_sums(map(merge_sums, halves)) == merge_sums(parts)


def test_per_token_divides_all_but_maxima_and_names_them() -> None:
    sums = tensors(ratio=8.0, clip_high=2.0, mismatch=4.0, mismatch_kl=6.0, mismatch_max=0.5)
    sums["log_ratio_hist"] = torch.ones(3)
    assert per_token(sums, 4) == {
        "policy/ratio": 2.0,
        "policy/clip_high": 0.5,
        "mismatch/mean": 1.0,
        "mismatch/kl": 1.5,
        "mismatch/max": 0.5,
    }


def test_on_cpu_gives_detached_float64() -> None:
    found = on_cpu({"a": torch.tensor(2.0, requires_grad=True), "n": torch.tensor(3)})
    assert found == tensors(a=2.0, n=3.0)
    assert all(value.dtype is torch.float64 and not value.requires_grad for value in found.values())


def test_batch_metrics_failed_rows_are_counted_and_left_out() -> None:
    status = [Status.ok, Status.reward_failed, Status.engine_timeout, Status.ok]
    groups = [
        make_group(0, [1], [[2], [3] * 9, [4] * 9, [5, 5, 5]], reward=[1.0, 7.0, 7.0, 0.0], status=status),
        make_group(1, [1, 1], [[2], [3]], reward=[0.5, 0.5], truncated=[True, False]),
    ]
    metrics = batch_metrics(collate(groups), Draw(kept=groups, dropped=[]), version=2)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/groups_with_signal"] == 0.5
    assert metrics["rollout/num_failed"] == 2
    assert metrics["rollout/num_reward_failed"] == metrics["rollout/num_engine_timeout"] == 1
    assert "rollout/num_engine_failed" not in metrics
    assert metrics["rollout/num_tokens"] == 1 + 3 + 1 + 1
    assert metrics["train/num_tokens"] == 2 + 4 + 3 + 3
    assert metrics["rollout/completion_tokens_mean"] == 1.5
    assert metrics["rollout/completion_tokens_max"] == 3
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["rollout/lag_max"] == metrics["rollout/lag_mean"] == 2


def test_batch_metrics_scored_batch_has_the_mismatch_per_action_token() -> None:
    groups = [make_group(0, [1, 2], [[3], [4, 5, 6]])]
    batch = collate(groups)
    batch.train_logprobs = batch.rollout_logprobs + 0.25 * batch.action_mask
    metrics = batch_metrics(batch, Draw(kept=groups, dropped=[]), 0)
    assert metrics["mismatch/mean"] == metrics["mismatch/max"] == pytest.approx(0.25)
    assert "mismatch/mean" not in batch_metrics(collate(groups), Draw(kept=groups, dropped=[]), 0)


def test_batch_metrics_equal_inexact_rewards_carry_no_signal() -> None:
    groups = [make_group(0, [1], [[2]] * 7, reward=[0.35] * 7)]
    metrics = batch_metrics(collate(groups), Draw(kept=groups, dropped=[]), 0)
    assert metrics["reward/std"] == 0
    assert metrics["reward/groups_with_signal"] == 0
