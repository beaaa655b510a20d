"""Group advantages: exact values, and nothing that can vanish is divided by."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import AlgoConfig, RewardConfig
from rl.advantages import broadcast_to_tokens, estimate, group_advantages
from rl.batching import collate
from tests.unit.stand_ins import make_group


def advantages(rewards: list[float], groups: list[int] | None = None, normalize_std: bool = True) -> list[float]:
    index = torch.tensor(groups if groups is not None else [0] * len(rewards), dtype=torch.long)
    return group_advantages(torch.tensor(rewards, dtype=torch.float32), index, normalize_std).tolist()


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("value", [1.0, 0.0, -3.0, 0.1, 0.35, 1 / 3, 1e-30, 1e30])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 64])
def test_advantages_identical_rewards_are_exactly_zero(value: float, count: int, normalize_std: bool) -> None:
    assert advantages([value] * count, normalize_std=normalize_std) == [0.0] * count


def test_advantages_one_winner_of_four_uses_the_sample_deviation() -> None:
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert advantages([1, 0, 0, 0], normalize_std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_advantages_seven_equal_rewards_and_one_odd_stay_small() -> None:
    scaled = advantages([0.35] * 7 + [0.0])
    assert scaled[-1] == pytest.approx(-7 / math.sqrt(8), rel=1e-5)
    assert scaled[:7] == pytest.approx([1 / math.sqrt(8)] * 7, rel=1e-5)
    assert advantages([0.35] * 7 + [0.0], normalize_std=False)[-1] == pytest.approx(-0.35 * 7 / 8, rel=1e-6)


def test_advantages_spread_below_rounding_is_zero_not_thousands() -> None:
    value = torch.tensor(0.35)
    nearly = torch.stack([value] * 7 + [torch.nextafter(value, torch.tensor(1.0))])
    for normalize_std in (True, False):
        assert group_advantages(nearly, torch.zeros(8, dtype=torch.long), normalize_std).tolist() == [0.0] * 8


def test_advantages_four_different_rewards_equal_the_formula() -> None:
    rewards = [0.1, 0.2, 0.4, 0.9]
    mean = sum(rewards) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
    assert advantages(rewards) == pytest.approx([(r - mean) / std for r in rewards], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_advantages_scaled_rewards_same_when_normalized(scale: float) -> None:
    assert advantages([1 * scale, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_advantages_group_of_one_is_zero_beside_other_groups() -> None:
    assert advantages([5.0, 1.0, 0.0], [7, 3, 3]) == pytest.approx([0.0, math.sqrt(0.5), -math.sqrt(0.5)])


def test_advantages_no_rows_gives_no_rows() -> None:
    assert advantages([], []) == []


def test_advantages_interleaved_groups_are_found_by_id() -> None:
    together = advantages([1, 0, 0, 0, 2, 4], [10, 10, 10, 10, 2, 2])
    apart = advantages([1, 2, 0, 0, 4, 0], [10, 2, 10, 10, 2, 10])
    assert [apart[i] for i in (0, 2, 3, 5, 1, 4)] == pytest.approx(together)


@given(data=st.data(), normalize_std=st.booleans())
def test_advantages_any_order_follows_the_permutation(data: st.DataObject, normalize_std: bool) -> None:
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.35, 1.0, -2.0]), min_size=1, max_size=20))
    groups = data.draw(st.lists(st.sampled_from([0, 5, 1000]), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    straight = advantages(rewards, groups, normalize_std)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], normalize_std)
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-6)
    assert all(math.isfinite(a) and abs(a) <= 10 for a in straight)


@given(rewards=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=12))
def test_advantages_any_group_sum_is_zero_and_bounded(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert all(math.isfinite(a) for a in found)
    assert sum(found) == pytest.approx(0, abs=1e-4)
    assert max(map(abs, found)) <= (len(found) - 1) / math.sqrt(len(found)) + 1e-4


def test_broadcast_masked_places_are_zero() -> None:
    mask = torch.tensor([[False, True, True], [False, False, True]])
    assert broadcast_to_tokens(torch.tensor([2.0, -1.0]), mask).tolist() == [[0, 2, 2], [0, 0, -1]]


def test_grpo_failed_trajectory_leaves_the_statistics() -> None:
    from rl.types import Status

    status = [Status.ok, Status.reward_failed, Status.ok]
    batch = collate([make_group(0, [1], [[2], [3, 3], [4, 4]], reward=[1.0, 100.0, 0.0], status=status)])
    estimate(AlgoConfig(), RewardConfig(), batch)
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [
        pytest.approx([0, math.sqrt(0.5), 0]),
        pytest.approx([0, -math.sqrt(0.5), -math.sqrt(0.5)]),
    ]
