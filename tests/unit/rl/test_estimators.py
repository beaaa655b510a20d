"""GAE, returns, whitening and the other estimators: hand-computed values, and laws over ragged rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.choices import Advantage, KlPlace, Truncated
from conf.schema import AlgoConfig, RewardConfig, RolloutConfig
from rl import rewards
from rl.advantages import estimate, generalized_advantages, leave_one_out, returns_to_go, whiten
from rl.batching import collate
from rl.types import Batch
from tests.unit.stand_ins import make_group

VALUES, REWARDS = [0.5, 0.6, 0.7], [0.0, 0.0, 1.0]


def gae(
    values: list[float], given_rewards: list[float], mask: list[bool], bootstrap: float = 0.0
) -> tuple[list[float], list[float]]:
    on, now = (torch.tensor([row], dtype=torch.float64) for row in (given_rewards, values))
    found = generalized_advantages(on, now, torch.tensor([mask]), 1.0, 0.95, torch.tensor([bootstrap]))
    return found[0][0].tolist(), found[1][0].tolist()


def test_gae_terminal_row_has_the_known_values() -> None:  # B25
    advantages, returns = gae(VALUES, REWARDS, [True] * 3)
    assert advantages == pytest.approx([0.46575, 0.385, 0.3])
    assert returns == pytest.approx([0.96575, 0.985, 1.0])


def test_gae_padding_with_values_in_it_changes_nothing() -> None:
    advantages, returns = gae([*VALUES, 9.9, 9.9], [*REWARDS, 0, 0], [True] * 3 + [False] * 2)
    assert advantages == pytest.approx([0.46575, 0.385, 0.3, 0, 0])
    assert returns == pytest.approx([0.96575, 0.985, 1.0, 0, 0])


def test_gae_observation_between_actions_changes_nothing() -> None:
    advantages, _ = gae([0.5, 9.9, 0.6, 0.7], [0, 0, 0, 1], [True, False, True, True])
    assert advantages == pytest.approx([0.46575, 0, 0.385, 0.3])


def test_gae_truncated_row_counts_on_the_state_after_it() -> None:  # B25
    advantages, _ = gae(VALUES, [0.0] * 3, [True] * 3, bootstrap=0.8)
    assert advantages == pytest.approx([0.28525, 0.195, 0.1])


def test_returns_observations_cost_no_decay_and_late_rewards_come_back() -> None:  # B24
    def of(given_rewards: list[float], mask: list[bool]) -> list[float]:
        return returns_to_go(torch.tensor([given_rewards], dtype=torch.float32), torch.tensor([mask]), 0.5)[0].tolist()

    assert of([0, 0, 1], [True, False, True]) == [0.5, 0, 1]
    assert of([0, 1], [True, True]) == [0.5, 1]
    assert of([0, 0, 1], [True, True, False]) == [0.5, 1, 0]  # a reward on an observation reaches the last action
    assert of([0, 2, 0, 1], [True, False, False, True]) == [2.5, 0, 0, 1]


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_gae_any_ragged_batch_equals_each_row_alone_by_the_sum(seed: int, gamma: float, lam: float) -> None:
    """A_t = sum over k of (gamma lambda)^k delta_(t+k), over the row's action tokens only."""
    random = np.random.default_rng(seed)
    mask = torch.tensor(random.random((4, 7)) < 0.6)
    values, given_rewards = (torch.tensor(random.normal(size=(4, 7))) for _ in range(2))
    given_rewards = torch.where(mask, given_rewards, 0.0)
    bootstrap = torch.tensor(random.normal(size=4))
    dirty = torch.where(mask, values, math.nan)
    found, returns = generalized_advantages(given_rewards, dirty, mask, gamma, lam, bootstrap)
    for row in range(4):
        places = mask[row].nonzero()[:, 0].tolist()
        v = [*values[row][mask[row]].tolist(), float(bootstrap[row])]
        deltas = [float(given_rewards[row, t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(places)]
        for i, t in enumerate(places):
            wanted = sum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(places)))
            assert float(found[row, t]) == pytest.approx(wanted, abs=1e-9)
            assert float(returns[row, t]) == pytest.approx(wanted + v[i], abs=1e-9)
    assert (found[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_leave_one_out_seven_equal_rewards_and_one_odd() -> None:
    found = leave_one_out(torch.tensor([0.35] * 7 + [0.0]), torch.zeros(8, dtype=torch.long))
    assert found.tolist() == pytest.approx([0.05] * 7 + [-0.35], abs=1e-6)
    assert leave_one_out(torch.tensor([3.0]), torch.zeros(1, dtype=torch.long)).tolist() == [0.0]


def test_whiten_has_mean_zero_and_variance_one_over_action_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    values = torch.tensor([[1.0, 2.0, math.nan], [5.0, math.nan, -3.0]])
    found = whiten(values, mask)
    assert float(found[mask].mean()) == pytest.approx(0, abs=1e-7)
    assert float(found[mask].std()) == pytest.approx(1)
    assert found[~mask].tolist() == [0, 0]
    assert whiten(torch.full((2, 3), 0.1), mask).abs().max() == 0
    assert whiten(values, torch.zeros_like(mask)).abs().max() == 0


# -- from a batch to its advantages --


def batch_of(outcomes: list[float], **per_row: list[object]) -> Batch:
    return collate([make_group(0, [1, 2], [[3] * (n + 1) for n in range(len(outcomes))], reward=outcomes, **per_row)])


def advantages_of(batch: Batch, reward: RewardConfig | None = None, **algo: object) -> list[list[float]]:
    estimate(AlgoConfig(**algo), reward or RewardConfig(), batch)  # type: ignore[arg-type]
    assert batch.advantages is not None
    return [row[mask].tolist() for row, mask in zip(batch.advantages, batch.action_mask, strict=True)]


def test_estimate_remax_subtracts_the_greedy_answer() -> None:
    batch = batch_of([1.0, 0.0])
    batch.baseline = torch.tensor([0.25, 0.25])
    assert advantages_of(batch, advantage=Advantage.remax) == [[0.75], [-0.25, -0.25]]


def test_estimate_reinforce_pp_is_whitened_returns_of_token_rewards() -> None:
    batch = batch_of([1.0, 0.0])
    batch.token_rewards = torch.tensor([[0, 0, 0.5, 0.0], [0, 0, 0, 0.25]])
    plain = advantages_of(batch, advantage=Advantage.reinforce_pp)
    assert plain == [[1.5], [0.25, 0.25]]
    numbers = np.array([1.5, 0.25, 0.25])
    (a,), b = advantages_of(batch, advantage=Advantage.reinforce_pp, whiten=True)
    assert [a, *b] == pytest.approx((numbers - numbers.mean()) / numbers.std(ddof=1))


def test_estimate_gae_bootstraps_truncated_rows_only_when_asked() -> None:
    for asked, wanted in ((False, 1 - 0.5), (True, 1 + 2.0 - 0.5)):
        batch = batch_of([1.0, 1.0], truncated=[True, False])
        batch.values, batch.bootstrap = 0.5 * batch.action_mask, torch.tensor([2.0, 2.0])
        rows = advantages_of(batch, advantage=Advantage.gae, bootstrap_truncated=asked)
        assert rows == [[wanted], [0.5, 0.5]]


def test_estimate_separate_rewards_have_their_own_statistics() -> None:
    """One large reward would drown a small one in a common deviation."""
    parts: list[object] = [{"big": 100.0, "small": 0.0}, {"big": 0.0, "small": 1.0}]
    group = make_group(0, [1], [[2], [3]], reward=[100.0, 1.0], rewards=parts)
    batch = collate([group], ["big", "small"])
    batch.shaping = torch.zeros(2)
    reward = RewardConfig(weights={"big": 1.0, "small": 1.0}, separate=True)
    assert advantages_of(batch, reward) == [[pytest.approx(0, abs=1e-6)], [pytest.approx(0, abs=1e-6)]]
    assert advantages_of(batch)[0][0] == pytest.approx(math.sqrt(0.5))


def test_estimate_rewards_all_equal_is_exactly_zero_for_every_estimator() -> None:
    for advantage in (Advantage.group, Advantage.rloo, Advantage.reinforce_pp_baseline):
        assert advantages_of(batch_of([0.3] * 3), advantage=advantage) == [[0.0], [0.0] * 2, [0.0] * 3]


# -- shaping --


def test_overlong_penalty_starts_in_the_buffer_and_ends_at_minus_one() -> None:
    found = rewards.overlong_penalty(
        torch.tensor([0, 12, 13, 14, 16, 20]), max_tokens=torch.tensor(16), buffer_tokens=4
    )
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1]


def test_shape_overlong_charges_a_row_by_where_its_own_room_ends() -> None:
    """Rows of 1 and 2 tokens: one prompt leaves room for 1, the other for 16."""
    batch = batch_of([0.0, 0.0])
    batch.prompt_len = torch.tensor([19, 2])
    rollout = RolloutConfig(max_tokens=16, max_model_len=20)
    rewards.shape(AlgoConfig(overlong_buffer_tokens=4), batch, rollout)
    assert batch.rewards.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("truncated", "outcomes", "trained"),
    [(Truncated.keep, [1, 1], [1, 2]), (Truncated.punish, [-2, 1], [1, 2]), (Truncated.mask, [1, 1], [0, 2])],
)
def test_shape_truncated_rows(truncated: Truncated, outcomes: list[float], trained: list[int]) -> None:
    batch = batch_of([1.0, 1.0], truncated=[True, False])
    rewards.shape(AlgoConfig(truncated=truncated, truncated_reward=-2.0), batch, RolloutConfig(max_tokens=16))
    assert batch.rewards.tolist() == outcomes
    assert batch.action_mask.sum(-1).tolist() == trained


def test_shape_kl_in_the_reward_charges_each_action_token_its_log_ratio() -> None:
    batch = batch_of([1.0, 0.0])
    batch.kl_coef = 0.5
    batch.train_logprobs = torch.where(batch.action_mask, -1.0, math.nan)
    batch.ref_logprobs = torch.where(batch.action_mask, -1.5, math.nan)
    metrics = rewards.shape(AlgoConfig(kl_coef=0.5, kl_in=KlPlace.reward), batch, RolloutConfig(max_tokens=16))
    assert metrics == {"reward/kl": pytest.approx(0.5)}
    assert rewards.row_rewards(batch).tolist() == [0.75, -0.5]
    assert rewards.token_rewards(batch)[1].tolist() == [0, 0, -0.25, -0.25]
    assert rewards.token_rewards(batch)[0].tolist() == [0, 0, 0.75, 0]
