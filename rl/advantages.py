"""Advantages: how much better an action was than what was expected of it. One function for each estimator.

Rows are trajectories, groups are the rows of one prompt, found by id and never by position. Statistics are taken in
float64 and results are float32. Token rewards (see rl.rewards) hold the outcome on the last action token.
"""

import torch

from conf.choices import Advantage
from conf.schema import AlgoConfig, RewardConfig
from rl.masking import masked_fill_zero
from rl.numerics import require_finite
from rl.rewards import row_rewards, token_rewards
from rl.types import Batch

# Below this share of the largest reward a group's spread is rounding residue, not signal.
RELATIVE_FLOOR = 1e-5


def group_statistics(
    rewards: torch.Tensor, group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row of [B]: reward minus its group's mean; the group's sample standard deviation (divisor n - 1); the
    group's size; whether the group has signal (more than one member, and rewards that differ beyond rounding)."""
    values = rewards.double()
    _, member = torch.unique(group_index, return_inverse=True)
    num_groups = int(member.max()) + 1 if len(member) else 0
    size = torch.bincount(member, minlength=num_groups).double()
    centred = values - (torch.zeros(num_groups, dtype=torch.float64).index_add_(0, member, values) / size)[member]
    squares = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, member, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    largest = torch.zeros(num_groups, dtype=torch.float64).scatter_reduce_(0, member, values.abs(), "amax")
    signal = (size > 1) & (std > RELATIVE_FLOOR * largest)
    return centred, std[member], size[member], signal[member]


def first_rows(episode_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(number [E] of the first row of each episode, the episode [B] of each row): an episode that has forked into
    several rows counts once, by its first, which can still earn all that the episode has earned."""
    _, episode = torch.unique(episode_index, return_inverse=True)
    rows = torch.arange(len(episode))
    num_episodes = int(episode.max()) + 1 if len(episode) else 0
    first = torch.full((num_episodes,), len(rows)).scatter_reduce(0, episode, rows, "amin")
    return first, episode


def group_advantages(rewards: torch.Tensor, group_index: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """Reward minus the mean of its group, optionally over the group's sample standard deviation (divisor n - 1).

    Shao et al. 2024 (GRPO), section 4.1.2: A_i = (r_i - mean(r)) / std(r); without the division it is the estimate of
    Liu et al. 2025 (Dr.GRPO). rewards [B] float, group_index [B] int. A group of one, or one whose rewards are equal up
    to rounding, gets exactly 0. Returns [B] float32.
    """
    centred, std, _, signal = group_statistics(rewards, group_index)
    scaled = centred / std.clamp(min=1e-300) if normalize_std else centred
    return masked_fill_zero(scaled, signal).float()


def leave_one_out(rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean of the *other* members: Ahmadian et al. 2024 (RLOO), equation 8. [B] float32.

    A group of one, or one whose rewards are equal up to rounding, gets exactly 0.
    """
    centred, _, size, signal = group_statistics(rewards, group_index)
    return masked_fill_zero(centred * size / (size - 1).clamp(min=1), signal).float()


def returns_to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum [B, T] of the rewards from each action token on; an observation token costs no decay.

    A reward on a masked token belongs, undiminished, to the last action token before it.
    """
    returns, _ = generalized_advantages(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns


def turn_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """[B, T] float32: on every token of a turn its rewards and, discounted by gamma for each turn, those of later ones;
    0 where masked. A turn is a run of action tokens; what stands behind it until the next belongs to it."""
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turn = starts.cumsum(-1)
    count = int(turn.max()) + 1 if turn.numel() else 1
    returns = torch.zeros(len(mask), count, dtype=torch.float64).scatter_add(1, turn, rewards.double())
    for k in reversed(range(count - 1)):
        returns[:, k] += gamma * returns[:, k + 1]
    return masked_fill_zero(returns.gather(1, turn), mask).float()


def turn_advantages(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    group_index: torch.Tensor,
    episode_index: torch.Tensor,
    gamma: float,
    normalize_std: bool,
) -> torch.Tensor:
    """[B, T] float32: the return from each turn on, minus the mean return of the group's *other* episodes from their
    start on, optionally over the group's standard deviation.

    The baseline depends on nothing that the episode did, so the gradient is unbiased; a baseline for each number of a
    turn would not be, where the policy chooses how many there are.
    Ahmadian et al. 2024 (RLOO), equation 8, for returns to go.
    """
    returns = turn_returns(rewards, mask, gamma).double()
    first, episode = first_rows(episode_index)
    acts = mask.any(-1)
    whole = returns.gather(1, mask.float().argmax(-1, keepdim=True))[:, 0] * acts
    centred, std, size, _ = group_statistics(whole[first], group_index[first])
    baseline = whole[first] - centred * size / (size - 1).clamp(min=1)
    advantages = returns - baseline[episode][:, None]
    if normalize_std:
        advantages = advantages / std[episode][:, None].clamp(min=1e-6)
    return masked_fill_zero(advantages, mask & (size[episode] > 1)[:, None]).float()


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T], 0 where masked: Schulman et al. 2016 (GAE), equations 11 and 16.

    The recursion runs over action tokens only: delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lambda A_next,
    where `next` is the following action token. values [B, T]: V of the state before token t. bootstrap [B]: V of the
    state after the row's last token, for truncated rows; 0 (the default) says that the row has terminated.
    A reward on a masked token belongs, undiminished, to the last action token before it.
    """
    advantages, advantage = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(advantage) if bootstrap is None else bootstrap.to(values.dtype)
    late = torch.zeros_like(advantage)
    for t in reversed(range(values.shape[1])):
        acts = mask[:, t]
        reward = rewards[:, t] + late
        late = torch.where(acts, 0.0, reward)
        delta = reward + gamma * next_value - values[:, t]
        advantage = torch.where(acts, delta + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(acts, values[:, t], next_value)
        advantages[:, t] = torch.where(acts, advantage, 0.0)
    return advantages, masked_fill_zero(advantages + values, mask)


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Zero mean and unit variance over all action tokens of the batch (divisor n - 1); 0 where masked.

    Values that are equal up to rounding become exactly 0.
    """
    picked = values[mask].double()
    if len(picked) < 2:
        return torch.zeros_like(values)
    centred, std = picked - picked.mean(), picked.std()
    scaled = centred / std if std > RELATIVE_FLOOR * picked.abs().max() else torch.zeros_like(centred)
    return torch.zeros_like(values).masked_scatter(mask, scaled.to(values.dtype))


def broadcast_to_tokens(per_row: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """[B] and [B, T] bool -> [B, T] float32: the row's value on every action token, 0 elsewhere."""
    return torch.where(action_mask, per_row[:, None].float(), torch.zeros((), dtype=torch.float32))


def part_advantages(batch: Batch, weights: dict[str, float], normalize_std: bool) -> torch.Tensor:
    """Each named reward against its own group statistics, then their weighted sum: Liu et al. 2026 (GDPO), equation 4.

    What shaping has added (`batch.shaping`) counts as one more part, of weight 1. The paper whitens the result over the
    batch: `algo.whiten=true`. Returns [B] float32.
    """
    assert batch.reward_parts is not None and batch.shaping is not None
    scales = torch.tensor([weights[name] for name in sorted(weights)], dtype=batch.reward_parts.dtype)
    columns = [*batch.reward_parts.unbind(-1), batch.shaping]
    first, episode = first_rows(batch.episode_index)
    parts = [group_advantages(column[first], batch.group_index[first], normalize_std)[episode] for column in columns]
    return torch.stack(parts, -1) @ torch.cat([scales, torch.ones(1)]).float()


def estimate(algo: AlgoConfig, reward: RewardConfig, batch: Batch) -> None:
    """Fills `batch.advantages` (and, with a critic, `returns`) by the estimator that `algo.advantage` names.

    Rewards must have been shaped (rl.rewards.shape). reinforce_pp: Hu et al. 2025 (REINFORCE++), the returns of each
    token; reinforce_pp_baseline: its variant with the group mean as baseline; remax: Li et al. 2023 (ReMax),
    equation 3, the outcome minus that of the greedy answer; turns: see turn_advantages; teacher: log teacher - log
    policy of each token, the reverse KL of Lu 2025 (on-policy distillation). `algo.whiten` then whitens over the batch.
    """
    mask = batch.action_mask
    first, episode = first_rows(batch.episode_index)
    groups = batch.group_index[first]
    match algo.advantage:
        case Advantage.group if reward.separate:
            batch.advantages = broadcast_to_tokens(part_advantages(batch, reward.weights, algo.normalize_std), mask)
        case Advantage.group:
            found = group_advantages(row_rewards(batch)[first], groups, algo.normalize_std)
            batch.advantages = broadcast_to_tokens(found[episode], mask)
        case Advantage.rloo:
            found = leave_one_out(row_rewards(batch)[first], groups)
            batch.advantages = broadcast_to_tokens(found[episode], mask)
        case Advantage.reinforce_pp_baseline:
            found = group_advantages(row_rewards(batch)[first], groups, normalize_std=False)
            batch.advantages = broadcast_to_tokens(found[episode], mask)
        case Advantage.remax:
            assert batch.baseline is not None
            batch.advantages = broadcast_to_tokens(row_rewards(batch) - batch.baseline, mask)
        case Advantage.reinforce_pp:
            batch.advantages = returns_to_go(token_rewards(batch), mask, algo.gamma)
        case Advantage.turns:
            batch.advantages = turn_advantages(
                token_rewards(batch), mask, batch.group_index, batch.episode_index, algo.gamma, algo.normalize_std
            )
        case Advantage.gae:
            assert batch.values is not None and batch.bootstrap is not None
            goes_on = batch.truncated & algo.bootstrap_truncated
            batch.advantages, batch.returns = generalized_advantages(
                token_rewards(batch),
                batch.values,
                mask,
                algo.gamma,
                algo.gae_lambda,
                masked_fill_zero(batch.bootstrap, goes_on),
            )
        case Advantage.teacher if algo.has_divergence:
            batch.advantages = torch.zeros(mask.shape)  # the loss is the divergence itself
        case Advantage.teacher:
            assert batch.teacher_logprobs is not None and batch.train_logprobs is not None
            teacher = masked_fill_zero(batch.teacher_logprobs, mask)
            batch.advantages = teacher - masked_fill_zero(batch.train_logprobs, mask)
    require_finite("advantages", batch.advantages[mask], "a critic, a teacher or token rewards that are not finite")
    if algo.whiten:
        batch.advantages = whiten(batch.advantages, mask)
