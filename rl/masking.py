"""Masks: what is not an action token must not reach a sum, a gradient or a metric."""

import torch


def masked_fill_zero(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """values where mask, 0 elsewhere; gradients of masked places are exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
