"""Policy and value losses: one function each, with its metrics beside it. All give per-token values, never means.

`policy_objective` puts them together and weighs rows so that the caller divides by one global token count: a batch may
be cut in any way (micro-batches, ranks) without changing loss, gradient or metrics. Masked places may hold anything,
NaN and -inf too: they are replaced before any arithmetic, because 0 * NaN is NaN.

Everywhere: logprobs (new, with gradient), old_logprobs, advantages [B, T] float; mask [B, T] bool, True on actions.
Every loss gives ([B, T], sums over action tokens of its metrics); the loss is 0 where masked.
"""

import torch

from conf.choices import KlEstimator, KlPlace, PolicyLoss
from conf.schema import AlgoConfig
from rl.correction import correction_weights, corrects
from rl.masking import masked_fill_zero, row_mean
from rl.numerics import mismatch_sums
from rl.quantiles import histogram
from rl.types import Batch, Scores, Sums

# exp of larger log-ratios would overflow; no update is meant to reach a ratio of exp(20).
LOG_RATIO_BOUND = 20.0


def log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """new - old [B, T], 0 where masked, clamped to [-20, 20] so that exp cannot overflow (inf * 0 is NaN)."""
    gap = masked_fill_zero(logprobs, mask) - masked_fill_zero(old_logprobs, mask)
    return gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Sums]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)): Schulman et al. 2017 (PPO), equation 7, for any ratio [B, T].

    Separate bounds as in Yu et al. 2025 (DAPO), equation 10. `dual_clip` c > 1 also bounds the loss of negative
    advantages by -A c (Ye et al. 2020, equation 5); 0 turns that off.
    """
    advantages = masked_fill_zero(advantages, mask)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    active = (clipped > plain) & mask
    sums = {
        "ratio": masked_fill_zero(ratio.detach(), mask).sum(),
        "clip_low": (active & (advantages < 0)).sum(),
        "clip_high": (active & (advantages > 0)).sum(),
    }
    if dual_clip > 0:
        bounded = (advantages < 0) & mask & (loss > -advantages * dual_clip)
        loss = torch.where(bounded, -advantages * dual_clip, loss)
        sums["dual_clip"] = bounded.sum()
    return masked_fill_zero(loss, mask), sums


def clipped_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Sums]:
    """PPO's clipped surrogate with r = exp(new - old) of each token."""
    return surrogate(log_ratio(logprobs, old_logprobs, mask).exp(), advantages, mask, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, Sums]:
    """The clipped surrogate with one ratio for the sequence, s = exp(mean over its action tokens of new - old).

    Zheng et al. 2025 (GSPO), equations 5 and 7, in the per-token form of equations 13 and 14 (GSPO-token): the value of
    the ratio is s, its gradient that of the token. With a row's advantages equal it is GSPO itself.
    """
    gap = log_ratio(logprobs, old_logprobs, mask)
    sequence = row_mean(gap.detach(), mask)
    ratio = (sequence[:, None] + gap - gap.detach()).exp()
    return surrogate(ratio, advantages, mask, clip_low, clip_high)


def gmpo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, Sums]:
    """-A times the geometric mean of the row's clipped ratios, the same on each of its action tokens.

    Zhao et al. 2025 (GMPO), equation 4: the log-ratio of each token is clipped to [-low, high] where that lowers the
    objective. One advantage for each row: the mean of its action tokens'.
    """
    gap = log_ratio(logprobs, old_logprobs, mask)
    advantage = row_mean(masked_fill_zero(advantages, mask), mask)[:, None]
    sign = advantage.sign()
    bounded = gap.clamp(-clip_low, clip_high)
    chosen = sign * torch.minimum(sign * gap, sign * bounded)
    ratio = row_mean(chosen, mask).exp()[:, None]
    active = (sign * bounded < sign * gap) & mask
    sums = {
        "ratio": masked_fill_zero(gap.detach().exp(), mask).sum(),
        "clip_low": (active & (sign < 0)).sum(),
        "clip_high": (active & (sign > 0)).sum(),
    }
    return masked_fill_zero((-advantage * ratio).expand_as(gap), mask), sums


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, Sums]:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: MiniMax 2025 (M1), equations 4 and 5. No token loses its gradient."""
    ratio = log_ratio(logprobs.detach(), old_logprobs, mask).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * masked_fill_zero(advantages, mask) * masked_fill_zero(logprobs, mask)
    sums = {
        "ratio": masked_fill_zero(ratio, mask).sum(),
        "clip_low": ((ratio < 1 - clip_low) & mask).sum(),
        "clip_high": ((ratio > 1 + clip_high) & mask).sum(),
    }
    return loss, sums


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    tau_positive: float,
    tau_negative: float,
) -> tuple[torch.Tensor, Sums]:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of the clip. Gao et al. 2025 (SAPO), equations 5 and 6.

    tau is `tau_positive` where A > 0 and `tau_negative` elsewhere. At r = 1 the slope is that of -A r.
    """
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()
    advantages = masked_fill_zero(advantages, mask)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1))
    sums = {"ratio": masked_fill_zero(ratio.detach(), mask).sum(), "gate": masked_fill_zero(gate.detach(), mask).sum()}
    return masked_fill_zero(-advantages * gate * 4 / tau, mask), sums


def reinforce(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, Sums]:
    """-A log pi: Williams 1992. Exact for the policy that sampled; `old_logprobs` only give the metric `ratio`."""
    ratio = log_ratio(logprobs.detach(), old_logprobs, mask).exp()
    loss = -masked_fill_zero(advantages, mask) * masked_fill_zero(logprobs, mask)
    return loss, {"ratio": masked_fill_zero(ratio, mask).sum()}


def decoupled(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    behaviour_logprobs: torch.Tensor,
) -> tuple[torch.Tensor, Sums]:
    """The clipped surrogate around a proximal policy (`old_logprobs`), weighed by proximal / behaviour.

    Hilton et al. 2022, equation 4, as used by Fu et al. 2025 (AReaL), equation 5: clipping is measured from the policy
    at the start of the step, off-policy samples are corrected from the policy that made them.
    """
    weight = log_ratio(old_logprobs, behaviour_logprobs, mask).exp()
    loss, sums = clipped_ratio(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    sums["behaviour_weight"] = masked_fill_zero(weight, mask).sum()
    return masked_fill_zero(weight * loss, mask), sums


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


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float
) -> tuple[torch.Tensor, Sums]:
    """Half the squared error to the returns, [B, T]; 0 where masked.

    With `clip` > 0 the larger of the errors of the value and of the value held within `clip` of its old one (the value
    loss of OpenAI's PPO code; Huang et al. 2022, detail 9). 0 turns that off. The sums give the explained variance of
    the old values.
    """
    values, old_values, returns = (masked_fill_zero(x, mask) for x in (values, old_values, returns))
    error = (values - returns).square()
    sums = {
        "value": old_values.double().sum(),
        "value_error": (old_values - returns).double().sum(),
        "value_error_squared": (old_values - returns).double().square().sum(),
        "return": returns.double().sum(),
        "return_squared": returns.double().square().sum(),
    }
    if clip > 0:
        near = old_values + (values - old_values).clamp(-clip, clip)
        clipped = (near - returns).square()
        sums["value_clip"] = ((clipped > error) & mask).sum()
        error = torch.maximum(error, clipped)
    return error / 2, sums


def policy_loss(algo: AlgoConfig, batch: Batch, scores: Scores, old: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """The loss that `algo.loss` names."""
    assert batch.advantages is not None
    terms = (scores.logprobs, old, batch.advantages, batch.action_mask)
    match algo.loss:
        case PolicyLoss.clip:
            return clipped_ratio(*terms, algo.clip_low, algo.clip_high, algo.dual_clip)
        case PolicyLoss.gspo:
            return gspo(*terms, algo.clip_low, algo.clip_high)
        case PolicyLoss.gmpo:
            return gmpo(*terms, algo.clip_low, algo.clip_high)
        case PolicyLoss.cispo:
            return cispo(*terms, algo.clip_low, algo.clip_high)
        case PolicyLoss.sapo:
            return sapo(*terms, algo.sapo_tau_positive, algo.sapo_tau_negative)
        case PolicyLoss.reinforce:
            return reinforce(*terms)
        case PolicyLoss.decoupled:
            return decoupled(*terms, algo.clip_low, algo.clip_high, batch.rollout_logprobs)
        case PolicyLoss.divergence:
            assert scores.divergence is not None
            return masked_fill_zero(scores.divergence, batch.action_mask), {}


def policy_objective(algo: AlgoConfig, batch: Batch, scores: Scores, version: int) -> tuple[torch.Tensor, Sums]:
    """The whole loss, to be divided by the global number of action tokens; and sums over action tokens for the metrics.

    Policy loss times the engine correction, plus KL to the reference, minus the entropy bonus; each row times its
    `loss_weight`. Without `batch.train_logprobs` the scores are at the old weights themselves: the ratio is 1.
    `version` is the weight version of this step (staleness is counted from it).
    """
    mask, logprobs = batch.action_mask, scores.logprobs
    current = logprobs.detach()
    old = batch.train_logprobs if batch.train_logprobs is not None else current
    loss, sums = policy_loss(algo, batch, scores, old)
    sums["policy_loss"] = weighed(loss.detach(), batch.loss_weight)
    sums["approx_kl"] = kl_penalty(old, current, mask, KlEstimator.k3).sum()  # the samples are of the old policy
    sums["entropy"] = masked_fill_zero(scores.entropy.detach(), mask).double().sum()
    sums["log_ratio_hist"] = histogram(log_ratio(current, old, mask)[mask])
    if batch.train_logprobs is None:
        sums |= mismatch_sums(current, batch.rollout_logprobs, mask)
    if corrects(algo):
        weights, found = correction_weights(algo, old, batch.rollout_logprobs, mask, version - batch.version)
        loss, sums = loss * weights, sums | found
    if batch.ref_logprobs is not None and algo.kl_in is KlPlace.loss:
        kl = kl_penalty(logprobs, batch.ref_logprobs, mask, algo.kl_estimator)
        sums["kl"] = kl.detach().sum()
        loss = loss + batch.kl_coef * kl
    if algo.entropy_coef != 0:
        loss = loss - algo.entropy_coef * masked_fill_zero(scores.entropy, mask)
    return weighed(loss, batch.loss_weight), sums


def weighed(loss: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The sum of per-token losses [B, T], each row times its weight [B] (1 where there is none)."""
    return loss.sum() if weight is None else (loss * weight.to(loss.dtype)[:, None]).sum()
