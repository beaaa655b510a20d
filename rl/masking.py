"""Arithmetic over action tokens only: what stands at masked places must never enter it, NaN included."""

import torch


def masked_fill_zero(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask`, else 0; gradients of masked places are exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def row_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B]: sum over a row's action tokens."""
    return masked_fill_zero(values, mask).sum(-1)


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B]: mean over a row's action tokens; 0 in a row without any."""
    return row_sum(values, mask) / mask.sum(-1).clamp(min=1)
