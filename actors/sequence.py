"""Sequence parallelism: the ranks of a replica each hold a part of every row, and meet in the attention.

Ulysses (Jacobs et al. 2023): an all-to-all turns parts of all heads into whole rows of some heads, and back.
"""

from dataclasses import dataclass
from typing import Any

import torch

from conf.layout import TrainLayout


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The ranks that share this rank's rows: `group` of torch.distributed, and this rank's place in it."""

    group: Any
    rank: int
    size: int


def join_sequence(layout: TrainLayout, rank: int) -> SequenceGroup | None:
    """This rank's group, or None without sequence parallelism. Collective over all ranks."""
    if layout.sp == 1:
        return None
    mine = None
    for first in range(0, layout.ranks, layout.sp):
        members = list(range(first, first + layout.sp))
        group = torch.distributed.new_group(members)
        if rank in members:
            mine = SequenceGroup(group=group, rank=rank - first, size=layout.sp)
    return mine


class SumAcross(torch.autograd.Function):
    """Sum of [B, T] over the group. Every rank computes the same loss from it, so gradients pass as they are: each rank
    keeps the part that came from its own share, and the shares' gradients are summed where parameters' are."""

    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        total = values.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def sum_across(values: torch.Tensor, sequence: SequenceGroup | None) -> torch.Tensor:
    """[B, T] of the whole row, from values that are 0 outside this rank's share of it."""
    if sequence is None:
        return values
    total: torch.Tensor = SumAcross.apply(values, sequence.group)
    return total
