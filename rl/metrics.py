"""Metrics of a step, all by global divisors; names end in their unit. Documented in docs/metrics.md."""

import math
import statistics
from collections.abc import Iterable, Mapping

import torch

from rl.numerics import mismatch_sums
from rl.types import Batch, Group, Status

SumMetrics = Mapping[str, float]


def merge_sums(parts: Iterable[SumMetrics]) -> dict[str, float]:
    """Adds sums over micro-batches and ranks; a name that ends in `_max` keeps the largest (NaN wins)."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in out:
                out[name] = float(value)
            elif name.endswith("_max"):
                out[name] = max(out[name], value) if value == value and out[name] == out[name] else math.nan
            else:
                out[name] += float(value)
    return out


MISMATCH_NAMES = {"mismatch": "mismatch/mean", "mismatch_kl": "mismatch/kl", "mismatch_max": "mismatch/max"}


def per_token(sums: SumMetrics, num_tokens: int) -> dict[str, float]:
    """Sums over action tokens as metrics, under logged names: divided by their global number (`_max` stays)."""
    return {
        MISMATCH_NAMES.get(name, f"policy/{name}"): value if name.endswith("_max") else value / num_tokens
        for name, value in sums.items()
    }


def batch_metrics(batch: Batch, groups: list[Group], version: int) -> dict[str, float]:
    """What is known of a step's trajectories; `version` is the weight version that the step starts from."""
    trajectories = [t for g in groups for t in g.trajectories]
    valid = [t for t in trajectories if t.valid]
    spread = [statistics.pstdev([t.reward for t in g.valid]) for g in groups if len(g.valid) > 1]
    lengths = [t.num_action_tokens for t in valid]
    out = {
        "reward/mean": statistics.fmean(t.reward for t in valid),
        "reward/std": statistics.pstdev([t.reward for t in valid]),
        "reward/groups_with_signal": sum(s > 0 for s in spread) / max(1, len(groups)),
        "rollout/completion_tokens_mean": statistics.fmean(lengths),
        "rollout/completion_tokens_max": float(max(lengths)),
        "rollout/truncated": sum(t.truncated for t in valid) / len(valid),
        "rollout/lag_mean": float((version - batch.version).float().mean()),
        "rollout/lag_max": float((version - batch.version).max()),
        "rollout/num_failed": float(len(trajectories) - len(valid)),
        "rollout/num_tokens": float(batch.num_action_tokens),
        "train/num_tokens": float(sum(batch.lengths)),
    }
    for status in Status:
        if status is not Status.ok:
            count = sum(t.status is status for t in trajectories)
            if count:
                out[f"rollout/num_{status.value}"] = float(count)
    if batch.train_logprobs is not None:
        sums = mismatch_sums(batch.train_logprobs, batch.rollout_logprobs, batch.action_mask)
        out |= per_token({k: float(v) for k, v in sums.items()}, batch.num_action_tokens)
    return out


def tensor_sums(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Detached scalars as floats."""
    return {name: float(value.detach()) for name, value in values.items()}
