"""Trainer against engine: importance weights for samples that another distribution made.

The engine's numerics (and, with lag, its older weights) differ from the trainer's. Per token w = exp(trainer - engine).
"""

import torch

from conf.choices import Correction
from conf.schema import AlgoConfig
from rl.masking import masked_fill_zero, row_mean, row_sum

LOG_WEIGHT_BOUND = 20.0


def corrects(algo: AlgoConfig) -> bool:
    """Whether `algo` weighs tokens at all."""
    return algo.correction is not Correction.none or algo.staleness_decay < 1


def correction_weights(
    algo: AlgoConfig, train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, lag: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights [B, T] without gradient, 0 where masked; and sums over action tokens. train, rollout [B, T]; lag [B].

    truncate: min(w, high) (Yao et al. 2025, truncated importance sampling); band: w inside [low, high], else 0 (the
    IcePop of Ling Team 2025); mask_token: 1 inside, else 0; mask_sequence and mask_geometric: the same for whole rows,
    by the product or the geometric mean of their w (Liu et al. 2025, sequence-level masked importance sampling).
    All of them times staleness_decay to the power of the row's lag. Divisors stay: a masked token counts as 0.
    """
    gap = (masked_fill_zero(train, mask) - masked_fill_zero(rollout, mask)).detach()
    token = gap.clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND).exp()
    match algo.correction:
        case Correction.none:
            weights = torch.ones_like(token)
        case Correction.truncate:
            weights = token.clamp(max=algo.correction_high)
        case Correction.band:
            weights = token * inside(token, algo)
        case Correction.mask_token:
            weights = inside(token, algo)
        case Correction.mask_sequence:
            product = row_sum(gap, mask).clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND).exp()
            weights = inside(product, algo)[:, None].expand_as(token)
        case Correction.mask_geometric:
            weights = inside(row_mean(gap, mask).exp(), algo)[:, None].expand_as(token)
    weights = weights * torch.pow(torch.tensor(algo.staleness_decay, dtype=token.dtype), lag.clamp(min=0))[:, None]
    sums = {
        "correction_weight": masked_fill_zero(weights, mask).sum(),
        "correction_masked": ((weights == 0) & mask).sum(),
    }
    return masked_fill_zero(weights, mask), sums


def inside(weight: torch.Tensor, algo: AlgoConfig) -> torch.Tensor:
    """1.0 where correction_low <= weight <= correction_high, else 0.0."""
    return ((weight >= algo.correction_low) & (weight <= algo.correction_high)).to(weight.dtype)
