"""Statistics of an evaluation: mean reward and pass@k with 95 % confidence intervals over prompts."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


def summarize(rewards: Sequence[Sequence[float | None]], threshold: float = 0.5) -> dict[str, Any]:
    """Mean reward and pass@k of an evaluation, ready for JSON.

    `rewards[p]` holds one reward for each sample of prompt p; None stands for a sample that failed (its engine or
    reward function did). Failed samples are counted and otherwise left out: they are never a reward of 0. A sample
    passes when its reward is at least `threshold`. Keys:

    - mean, mean_low, mean_high, standard_error: the mean over prompts of the mean of their rewards: `clustered_mean`.
    - pass_at: {k: {value, low, high, num_prompts}} for k = 1, 2, 4, ... up to the most samples of any prompt; a prompt
      with fewer than k samples is left out of that k, so num_prompts may fall. See `pass_at_k`.
    - num_prompts (given), num_prompts_scored (with at least one sample), num_samples (scored), num_failed, threshold.

    Bounds are null with fewer than two scored prompts: one prompt says nothing about the spread between prompts.
    """
    scored = [[float(r) for r in row if r is not None] for row in rewards]
    if not all(math.isfinite(r) for row in scored for r in row):
        raise ValueError("a reward is not finite; mark a failed sample with None")
    passes = [sum(r >= threshold for r in row) for row in scored]
    largest = max(map(len, scored), default=0)
    pass_at = {}
    for k in (2**i for i in range(largest.bit_length())):
        values = [pass_at_k(len(row), c, k) for row, c in zip(scored, passes, strict=True) if len(row) >= k]
        value, _, low, high = clustered_mean(values)
        # all equal gives no spread; P(every one of C prompts shows 1) <= E^C bounds the mean exactly (Clopper-Pearson)
        edge = 0.025 ** (1 / len(values))
        if len(values) > 1 and min(values) == max(values) == 1.0:
            low = edge
        if len(values) > 1 and min(values) == max(values) == 0.0:
            high = 1 - edge
        pass_at[str(k)] = {
            "value": value,
            "low": None if low is None else max(0.0, low),
            "high": None if high is None else min(1.0, high),
            "num_prompts": len(values),
        }
    mean, standard_error, low, high = clustered_mean([fmean(row) for row in scored if row])
    return {
        "mean": mean,
        "mean_low": low,
        "mean_high": high,
        "standard_error": standard_error,
        "pass_at": pass_at,
        "threshold": threshold,
        "num_prompts": len(scored),
        "num_prompts_scored": sum(bool(row) for row in scored),
        "num_samples": sum(map(len, scored)),
        "num_failed": sum(r is None for row in rewards for r in row),
    }


def clustered_mean(values: Sequence[float]) -> tuple[float | None, float | None, float | None, float | None]:
    """Mean, standard error, and the 95 % interval (low, high) of one value for each prompt.

    With C prompts and m_c the mean of prompt c: mean = sum(m_c) / C, SE = sqrt(sum((m_c - mean)^2) / (C - 1) / C),
    interval mean +- 1.96 SE. Samples of one prompt are not independent, so the prompt is the unit; for equal sample
    counts this is the cluster-robust error of the mean over samples, times sqrt(C / (C - 1)). Source: E. Miller,
    "Adding Error Bars to Evals", 2024, arXiv:2411.00640 (clustered standard errors; resampling).
    """
    if not values:
        return None, None, None, None
    mean = fmean(values)
    if len(values) == 1:
        return mean, None, None, None
    standard_error = stdev(values) / math.sqrt(len(values))
    return mean, standard_error, mean - Z95 * standard_error, mean + Z95 * standard_error


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from n of which c pass, passes.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of M. Chen et al., "Evaluating Large Language Models Trained on
    Code", 2021, arXiv:2107.03374, equation 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} passes in {n} samples: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
