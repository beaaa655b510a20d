"""Advantages: how much better a trajectory did than its group."""

import torch

from rl.types import Batch

# Below this share of the largest reward a group's spread is rounding residue, not signal.
RELATIVE_FLOOR = 1e-5


def group_advantages(rewards: torch.Tensor, group_index: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """Reward minus the mean of its group, optionally over the group's sample standard deviation (divisor n - 1).

    Shao et al. 2024 (GRPO), section 4.1.2: A_i = (r_i - mean(r)) / std(r); without the division it is the estimate of
    Liu et al. 2025 (Dr.GRPO). rewards [B] float, group_index [B] int; groups are found by id, never by position.
    A group of one, or one whose rewards are equal up to rounding, gets exactly 0. Returns [B] float32.
    """
    values = rewards.double()
    _, member = torch.unique(group_index, return_inverse=True)
    num_groups = int(member.max()) + 1 if len(member) else 0
    size = torch.bincount(member, minlength=num_groups).double()
    centred = values - (torch.zeros(num_groups, dtype=torch.float64).index_add_(0, member, values) / size)[member]
    squares = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, member, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    largest = torch.zeros(num_groups, dtype=torch.float64).scatter_reduce_(0, member, values.abs(), "amax")
    informative = (size > 1) & (std > RELATIVE_FLOOR * largest)
    scaled = centred / std.clamp(min=1e-300)[member] if normalize_std else centred
    return torch.where(informative[member], scaled, torch.zeros_like(scaled)).float()


def broadcast_to_tokens(per_row: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """[B] and [B, T] bool -> [B, T] float32: the row's value on every action token, 0 elsewhere."""
    return torch.where(action_mask, per_row[:, None].float(), torch.zeros((), dtype=torch.float32))


def grpo(batch: Batch, normalize_std: bool) -> torch.Tensor:
    """Token advantages [B, T] of a batch whose reward is the outcome of the whole trajectory."""
    return broadcast_to_tokens(group_advantages(batch.rewards, batch.group_index, normalize_std), batch.action_mask)
