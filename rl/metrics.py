"""Metrics of a step, all by global divisors; names end in their unit. Documented in docs/metrics.md."""

import math
import statistics
from collections.abc import Iterable, Mapping

import torch

from rl.advantages import first_rows
from rl.numerics import mismatch_sums
from rl.quantiles import quantile
from rl.sampling import Draw
from rl.types import Batch, Status, Sums

MISMATCH_NAMES = {"mismatch": "mismatch/mean", "mismatch_kl": "mismatch/kl", "mismatch_max": "mismatch/max"}


def on_cpu(sums: Mapping[str, torch.Tensor]) -> Sums:
    """Detached, in float64."""
    return {name: value.detach().double().cpu() for name, value in sums.items()}


def merge_sums(parts: Iterable[Mapping[str, torch.Tensor]]) -> Sums:
    """Adds sums over micro-batches, ranks and steps; a name that ends in `_max` keeps the largest (NaN wins)."""
    out: Sums = {}
    for part in parts:
        for name, value in part.items():
            if name not in out:
                out[name] = value
            elif name.endswith("_max"):
                out[name] = torch.maximum(out[name], value)
            else:
                out[name] = out[name] + value
    return out


def per_token(sums: Mapping[str, torch.Tensor], num_tokens: int, prefix: str = "policy/") -> dict[str, float]:
    """Sums as metrics under logged names, divided by the global number of tokens (`_max` stays; no histograms)."""
    return {
        MISMATCH_NAMES.get(name, f"{prefix}{name}"): float(value) / (1 if name.endswith("_max") else num_tokens)
        for name, value in sums.items()
        if not name.endswith("_hist")
    }


def policy_metrics(sums: Mapping[str, torch.Tensor], num_tokens: int) -> dict[str, float]:
    """Metrics of the policy's update: means over action tokens, quantiles of the ratio and of the mismatch."""
    out = per_token(sums, num_tokens)
    if "log_ratio_hist" in sums:
        for share, name in ((0.01, "ratio_p01"), (0.99, "ratio_p99")):
            out[f"policy/{name}"] = math.exp(quantile(sums["log_ratio_hist"], share))
    if "mismatch_hist" in sums:
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            out[f"mismatch/{name}"] = quantile(sums["mismatch_hist"], share)
    return out | router_metrics(sums)


def router_metrics(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """How evenly a mixture of experts is used: means over layers, of [layers, experts] sums; nothing for a dense model.

    load_max: the busiest expert over the mean. entropy: of the shares, 1 when all are equal. aux_loss: experts x sum of
    share x mean probability (Fedus et al. 2021, equation 4), 1 when all are equal.
    """
    if "router_counts_hist" not in sums:
        return {}
    counts, probabilities = sums["router_counts_hist"], sums["router_probs_hist"]
    experts = counts.shape[1]
    shares = counts / counts.sum(1, keepdim=True)
    means = probabilities / probabilities.sum(1, keepdim=True)
    return {
        "router/load_max": float((shares.amax(1) * experts).mean()),
        "router/entropy": float((-torch.special.xlogy(shares, shares).sum(1) / math.log(experts)).mean()),
        "router/num_dead": float((counts == 0).sum()),
        "router/aux_loss": float((experts * (shares * means).sum(1)).mean()),
    }


def critic_metrics(sums: Mapping[str, torch.Tensor], num_tokens: int) -> dict[str, float]:
    """Metrics of the critic's update. Explained variance: 1 - Var(return - value) / Var(return)."""
    mean = {name: float(value) / num_tokens for name, value in sums.items()}
    spread = mean["return_squared"] - mean["return"] ** 2
    residual = mean["value_error_squared"] - mean["value_error"] ** 2
    out = {
        "critic/loss": mean["loss"],
        "critic/value": mean["value"],
        "critic/return": mean["return"],
        "critic/explained_variance": 1 - residual / spread if spread > 1e-12 else 0.0,
    }
    return out | ({"critic/value_clip": mean["value_clip"]} if "value_clip" in mean else {})


def batch_metrics(batch: Batch, draw: Draw, version: int) -> dict[str, float]:
    """What is known of a step's trajectories; `version` is the weight version that the step starts from."""
    groups = draw.kept
    trajectories = [t for g in draw.kept + draw.dropped for t in g.trajectories]
    valid = [t for g in groups for t in g.valid]
    first, _ = first_rows(batch.episode_index)
    outcomes = (batch.outcomes if batch.outcomes is not None else batch.rewards)[first].tolist()
    spread = [statistics.pstdev([t.total for t in g.valid]) for g in groups if len(g.valid) > 1]
    lengths = [t.num_action_tokens for t in valid]
    out = {
        "reward/mean": statistics.fmean(outcomes),
        "reward/std": statistics.pstdev(outcomes),
        "rollout/groups_dropped": float(len(draw.dropped)),
        "rollout/groups_filled": float(draw.filled),
        "reward/groups_with_signal": sum(s > 0 for s in spread) / max(1, len(groups)),
        "rollout/completion_tokens_mean": statistics.fmean(lengths),
        "rollout/completion_tokens_max": float(max(lengths)),
        "rollout/truncated": sum(t.truncated for t in valid) / len(valid),
        "rollout/lag_mean": float((version - batch.version).float().mean()),
        "rollout/lag_max": float((version - batch.version).max()),
        "rollout/num_failed": float(sum(not t.valid for t in trajectories)),
        "rollout/num_tokens": float(sum(t.num_action_tokens for t in trajectories if t.valid)),
        "train/num_tokens": float(sum(batch.lengths)),
    }
    for status in Status:
        if status is not Status.ok:
            count = sum(t.status is status for t in trajectories)
            if count:
                out[f"rollout/num_{status.value}"] = float(count)
    for name in sorted(valid[0].rewards):
        out[f"reward_part/{name}"] = statistics.fmean(t.rewards[name] for t in valid)
    for name in sorted({name for t in valid for name in t.metrics}):
        out[f"env/{name}"] = statistics.fmean(t.metrics[name] for t in valid if name in t.metrics)
    if batch.advantages is not None:
        out["advantage/max"] = float(batch.advantages.abs().max())
    if batch.train_logprobs is not None:
        sums = mismatch_sums(batch.train_logprobs, batch.rollout_logprobs, batch.action_mask)
        out |= policy_metrics(sums, max(1, batch.num_action_tokens))
    return out
