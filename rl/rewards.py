"""Rewards of a batch: shaping for length and truncation, the KL to the reference, and where on a row they stand."""

import torch

from conf.choices import KlEstimator, KlPlace, Truncated
from conf.schema import AlgoConfig, RolloutConfig
from rl.losses import kl_penalty
from rl.masking import masked_fill_zero, row_sum
from rl.types import Batch


def overlong_penalty(lengths: torch.Tensor, max_tokens: torch.Tensor, buffer_tokens: int) -> torch.Tensor:
    """[B]: 0 up to max - buffer tokens, then linearly down to -1 at max. Yu et al. 2025 (DAPO), equation 13.

    max_tokens [B]: where each row is cut off.
    """
    return ((max_tokens - buffer_tokens - lengths).float() / buffer_tokens).clamp(-1, 0)


def shape(algo: AlgoConfig, batch: Batch, rollout: RolloutConfig) -> dict[str, float]:
    """Changes rewards and masks of `batch` before advantages are estimated: length, truncation, KL. Returns metrics.

    truncated=punish replaces the reward of a truncated row by `truncated_reward`; mask takes its tokens out of the loss
    (its reward stays in the group's statistics). With kl_in=reward each action token is charged kl_coef times its
    log-ratio to the reference (k1, the unbiased estimate of the KL).
    """
    metrics = {}
    if algo.truncated is Truncated.punish:
        batch.rewards = torch.where(batch.truncated, algo.truncated_reward, batch.rewards)
    if algo.overlong_buffer_tokens > 0:
        room = (rollout.max_model_len - batch.prompt_len).clamp(max=rollout.max_tokens)
        penalty = overlong_penalty(batch.action_mask.sum(-1), room, algo.overlong_buffer_tokens)
        batch.rewards = batch.rewards + algo.overlong_penalty * penalty
        metrics["reward/overlong_penalty"] = float(algo.overlong_penalty * penalty.mean())
    if batch.ref_logprobs is not None and algo.kl_in is KlPlace.reward:
        assert batch.train_logprobs is not None
        kl = kl_penalty(batch.train_logprobs, batch.ref_logprobs, batch.action_mask, KlEstimator.k1)
        given = batch.token_rewards if batch.token_rewards is not None else torch.zeros_like(kl)
        batch.token_rewards = given - batch.kl_coef * kl
        metrics["reward/kl"] = float(kl.double().sum()) / max(1, batch.num_action_tokens)
    if algo.truncated is Truncated.mask:
        batch.action_mask = batch.action_mask & ~batch.truncated[:, None]
    return metrics


def row_rewards(batch: Batch) -> torch.Tensor:
    """[B]: the outcome plus everything that stands on single tokens."""
    if batch.token_rewards is None:
        return batch.rewards
    return batch.rewards + row_sum(batch.token_rewards, batch.attention_mask)


def token_rewards(batch: Batch) -> torch.Tensor:
    """[B, T] float32: rewards of single tokens, and the outcome on the row's last token.

    The last token may be an observation: estimators carry its reward to the last action token.
    """
    last = batch.attention_mask.sum(-1) - 1
    out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    if batch.token_rewards is not None:
        out += masked_fill_zero(batch.token_rewards, batch.attention_mask)
    return out.index_put((torch.arange(len(last)), last), batch.rewards.float(), accumulate=True)
