"""The learning rate, counted in optimizer steps (never in rollout steps, prompts or samples)."""

import math

from conf.choices import Schedule


def learning_rate(
    optimizer_step: int, total: int, peak: float, schedule: Schedule, warmup_steps: int = 0, final_ratio: float = 0.0
) -> float:
    """Learning rate of update number `optimizer_step` (0-based) out of `total`.

    Linear rise over the first `warmup_steps` updates (the first of them already moves), then constant, or linear or
    cosine decay that would reach `final_ratio * peak` at update `total`. Never negative; stays there after the end.
    """
    if optimizer_step < warmup_steps:
        return peak * (optimizer_step + 1) / warmup_steps
    if schedule is Schedule.constant:
        return peak
    done = min(1.0, (optimizer_step - warmup_steps) / max(1, total - warmup_steps))
    left = 1 - done if schedule is Schedule.linear else (1 + math.cos(math.pi * done)) / 2
    return peak * (final_ratio + (1 - final_ratio) * left)


def warmup_steps(total: int, ratio: float) -> int:
    """Updates in the warm-up: ratio of the total, rounded to the nearest whole update."""
    return round(total * ratio)
