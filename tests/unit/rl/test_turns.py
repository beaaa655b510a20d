"""Credit over turns and forks: what each turn earns, and that an episode counts once however many rows it has."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.choices import Advantage
from conf.schema import AlgoConfig, RewardConfig
from rl.advantages import estimate, group_advantages, turn_advantages, turn_returns
from rl.batching import collate
from rl.types import Batch, Group, Prompt, Trajectory


def row(mask: str, reward: float, per_token: dict[int, float] | None = None, **more: object) -> Trajectory:
    """A trajectory of `mask` ("." prompt or observation, "x" action)."""
    acts = [c == "x" for c in mask]
    given = [(per_token or {}).get(t, 0.0) for t in range(len(mask))]
    return Trajectory(
        token_ids=list(range(len(mask))),
        prompt_len=mask.index("x"),
        action_mask=acts,
        logprobs=[-1.0 if a else 0.0 for a in acts],
        versions=[0 if a else -1 for a in acts],
        reward=reward,
        token_rewards=given,
        **more,  # type: ignore[arg-type]
    )


def as_batch(*members: Trajectory) -> Batch:
    prompt = Prompt(index=0, token_ids=[], record={})
    batch = collate([Group(position=0, prompt=prompt, trajectories=list(members), version=0)])
    batch.shaping = torch.zeros(batch.num_rows)
    return batch


def test_turn_returns_discount_by_turn_and_not_by_token() -> None:
    mask = torch.tensor([[False, True, True, False, True, False, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0, 8.0, 0.0, 4.0]])  # 8 stands on an observation of the second turn
    expected = torch.tensor([[0.0, 7.0, 7.0, 0.0, 12.0, 0.0, 0.0, 4.0]])
    assert torch.equal(turn_returns(rewards, mask, 0.5), expected)


def two_turn_gradients(p: float, q: float) -> tuple[float, float]:
    """(true, estimated) derivative of the expected return of a bandit with one or two turns by the logit of p.

    Turn 1 stops (reward 0.3) or, with probability p, goes on (reward 0.1); turn 2 then wins 1 with probability q.
    """
    episodes = [
        (1 - p, row(".x", 0.3), -p),
        (p * q, row(".x.x", 1.0, {1: 0.1}), 1 - p),
        (p * (1 - q), row(".x.x", 0.0, {1: 0.1}), 1 - p),
    ]
    true = p * (1 - p) * (0.1 + q - 0.3)  # d/dp of p (0.1 + q) + (1 - p) 0.3, times dp/dlogit
    estimated = 0.0
    for (w1, e1, s1), (w2, e2, s2) in itertools.product(episodes, repeat=2):
        batch = as_batch(e1, e2)
        estimate(AlgoConfig(advantage=Advantage.turns, normalize_std=False), RewardConfig(), batch)
        assert batch.advantages is not None
        estimated += w1 * w2 * float(batch.advantages[0, 1] * s1 + batch.advantages[1, 1] * s2) / 2
    return true, estimated


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.5), (0.9, 0.2), (0.2, 0.7)])
def test_turn_advantages_of_every_pair_of_episodes_sum_to_the_true_gradient(p: float, q: float) -> None:  # verl#7244
    true, estimated = two_turn_gradients(p, q)
    assert estimated == pytest.approx(true, abs=1e-6)


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(1, 3)), min_size=2, max_size=5))
def test_forked_episodes_have_the_advantages_of_episodes_that_did_not_fork(members: list[tuple[float, int]]) -> None:
    forked = [row(".xx", reward, more=[row("..x", reward) for _ in range(rows - 1)]) for reward, rows in members]
    batch = as_batch(*forked)
    rewards = torch.tensor([reward for reward, _ in members])
    expected = group_advantages(rewards, torch.zeros(len(members), dtype=torch.long), normalize_std=True)
    estimate(AlgoConfig(), RewardConfig(), batch)
    assert batch.advantages is not None
    found = batch.advantages.amax(-1) + batch.advantages.amin(-1)
    owner = [n for n, (_, rows) in enumerate(members) for _ in range(rows)]
    assert torch.allclose(found, expected[owner])
    assert torch.equal(batch.advantages == 0, ~batch.action_mask | (found == 0)[:, None])


def test_agents_of_an_episode_are_compared_with_their_like_alone() -> None:
    players = [row(".x", 1.0, agent="main", more=[row(".x", -1.0, agent="O")]), row(".x", -1.0, more=[])]
    players[1].more = [row(".x", 1.0, agent="O")]
    batch = as_batch(*players)
    estimate(AlgoConfig(normalize_std=False), RewardConfig(), batch)
    assert batch.advantages is not None
    assert batch.advantages[:, 1].tolist() == [1.0, -1.0, -1.0, 1.0]
    assert len(set(batch.group_index.tolist())) == 2


def test_rows_share_a_prefix_only_with_the_same_prompt_tokens() -> None:
    other = row("...x", 1.0)
    other.token_ids = [7, 8, 9, 10]
    batch = as_batch(row(".x", 0.0), row(".xx", 0.0, more=[other]))
    assert batch.prefix_index.tolist() == [0, 0, 1]


def test_turn_advantages_of_a_group_of_one_are_zero() -> None:
    mask = torch.tensor([[False, True, True]])
    zero = torch.zeros(1, dtype=torch.long)
    assert not turn_advantages(torch.ones(1, 3), mask, zero, zero, 1.0, normalize_std=True).any()
