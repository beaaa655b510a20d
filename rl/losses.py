"""Losses: one function each, with its metrics beside it. All return per-token values or sums, never means.

The caller divides by global token counts, so that a batch may be cut in any way (micro-batches, ranks) without
changing loss, gradient or metrics. Masked places may hold anything, NaN and -inf too: they are replaced before
any arithmetic, because 0 * NaN is NaN.
"""

import torch

from conf.schema import AlgoConfig, KlEstimator
from rl.masking import masked_fill_zero
from rl.numerics import mismatch_sums
from rl.types import Batch

# exp of larger log-ratios would overflow; no update is meant to reach a ratio of exp(20).
LOG_RATIO_BOUND = 20.0


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
    gap = masked_fill_zero(logprobs, mask) - masked_fill_zero(old_logprobs, mask)
    log_ratio = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)  # exp must not overflow: inf * 0 is NaN
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
    k3 = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() - 1 - gap
    if estimator is KlEstimator.k3:
        return k3
    itself = masked_fill_zero(logprobs, mask)
    return k3 * (itself - itself.detach()).exp()


def grpo(algo: AlgoConfig, batch: Batch, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of GRPO summed over the batch's action tokens, and its metrics as sums over them.

    Clipped ratio plus `kl_coef` times the KL estimate (Shao et al. 2024, equation 3, with a token mean over the global
    batch). Without `batch.train_logprobs` these `logprobs` are at the old weights themselves: the ratio is 1.
    """
    mask = batch.action_mask
    old = batch.train_logprobs if batch.train_logprobs is not None else logprobs.detach()
    assert batch.advantages is not None
    loss, sums = clipped_ratio(logprobs, old, batch.advantages, mask, algo.clip_low, algo.clip_high)
    sums["policy_loss"] = loss.detach().sum()
    sums["approx_kl"] = kl_penalty(logprobs.detach(), old, mask, KlEstimator.k3).sum()
    if batch.train_logprobs is None:
        sums |= mismatch_sums(logprobs.detach(), batch.rollout_logprobs, mask)
    if algo.kl_coef > 0:
        assert batch.ref_logprobs is not None
        kl = kl_penalty(logprobs, batch.ref_logprobs, mask, algo.kl_estimator)
        sums["kl"] = kl.detach().sum()
        loss = loss + algo.kl_coef * kl
    return loss.sum(), sums
