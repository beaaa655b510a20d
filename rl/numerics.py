"""Engine against trainer: how far apart are two records of the same tokens' log-probabilities?"""

import torch

from rl.masking import masked_fill_zero
from rl.quantiles import histogram
from rl.types import Batch


class MismatchError(RuntimeError):
    """Engine and trainer disagree on the log-probabilities of the sampled tokens by more than the limit."""


class NotFiniteError(RuntimeError):
    """A number that would reach every gradient is NaN or infinite."""


def require_finite(what: str, values: torch.Tensor, source: str) -> None:
    """Raises NotFiniteError, naming `source`, when any of `values` is NaN or infinite."""
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise NotFiniteError(
            f"{bad} of {values.numel()} {what} are NaN or infinite (from {source}); nothing was trained on them"
        )


def mismatch_sums(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over action tokens of |train - rollout| and of the k3 estimate of KL(rollout || train); the largest gap, and
    the histogram (rl.quantiles) of all.

    All [B, T]. Divide `mismatch` and `mismatch_kl` by the number of action tokens.
    """
    gap = masked_fill_zero(train, mask) - masked_fill_zero(rollout, mask)
    return {
        "mismatch": gap.abs().double().sum(),
        "mismatch_kl": (gap.clamp(-20, 20).exp() - 1 - gap).double().sum(),
        "mismatch_max": gap.abs().max() if gap.numel() else torch.zeros(()),
        "mismatch_hist": histogram(gap.abs()[mask]),
    }


def current_tokens(batch: Batch, version: int, max_lag: int) -> torch.Tensor:
    """[B, T] bool: action tokens on which engine and trainer must agree.

    With max_lag > 0 those of rows that weight version `version` sampled whole: since older ones the policy has moved.
    """
    fresh = batch.version == version if max_lag > 0 else torch.ones_like(batch.truncated)
    return torch.logical_and(batch.action_mask, fresh[:, None])


def require_match(mismatch: float, limit: float, version: int) -> None:
    """Raises MismatchError unless `mismatch` (a mean) is at most `limit`. NaN is never at most."""
    if not mismatch <= limit:
        raise MismatchError(
            f"mean |engine - trainer| log-probability is {mismatch:.3g} at weight version {version}, limit {limit:.3g} "
            "(rollout.mismatch_limit). The engine holds other weights, or scores another distribution, than the "
            "trainer: "
            "compare rollout.dtype with trainer.dtype, and look at the sync report of the last push"
        )
