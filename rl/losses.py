"""Losses: one function each, with its metrics beside it. All return per-token values or sums, never means.

The caller divides by global token counts, so that a batch may be cut in any way (micro-batches, ranks) without
changing loss, gradient or metrics. Masked places may hold anything, NaN and -inf too: they are replaced before
any arithmetic, because 0 * NaN is NaN.
"""

import torch

from conf.schema import KlEstimator


def masked_fill_zero(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """values where mask, 0 elsewhere; gradients of masked places are exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def clipped_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate per token, as a loss: max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(new - old).

    Schulman et al. 2017, equation 7, with separate bounds as in Yu et al. 2025 (DAPO), equation 10. All arguments
    [B, T]; `old_logprobs` are those of the trainer before the first update on this batch and carry no gradient.
    Returns the loss [B, T] (0 where masked) and sums over the action tokens: ratio, low and high side clipped.
    """
    log_ratio = masked_fill_zero(logprobs, mask) - masked_fill_zero(old_logprobs, mask)
    advantages = masked_fill_zero(advantages, mask)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    active = (clipped > plain) & mask
    sums = {
        "ratio": masked_fill_zero(ratio.detach(), mask).sum(),
        "clip_low": (active & (advantages < 0)).sum(),
        "clip_high": (active & (advantages > 0)).sum(),
    }
    return masked_fill_zero(torch.maximum(plain, clipped), mask), sums


def kl_penalty(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Per-token estimate [B, T] of KL(policy || reference) from samples of the policy; 0 where masked.

    Schulman 2020, "Approximating KL divergence", with d = reference - policy:
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, and k3_ratio = k3 times the policy's ratio to itself (value 1).
    As a loss term only k2 and k3_ratio have the gradient of the KL in expectation: k1's is 0 and k3's is that of
    the forward KL. d is clamped to [-20, 20] in exp, so that an impossible token does not overflow.
    """
    gap = masked_fill_zero(ref_logprobs, mask) - masked_fill_zero(logprobs, mask)
    if estimator is KlEstimator.k1:
        return -gap
    if estimator is KlEstimator.k2:
        return gap.square() / 2
    k3 = gap.clamp(-20, 20).exp() - 1 - gap
    if estimator is KlEstimator.k3:
        return k3
    itself = masked_fill_zero(logprobs, mask)
    return k3 * (itself - itself.detach()).exp()
