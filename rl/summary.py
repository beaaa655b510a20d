"""The end of a run in figures: `summary.json`, `reward.png`, the final table; and the names of the metrics read."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

History = Sequence[Mapping[str, float]]

STEP = "step"
REWARD = "reward/mean"
ENTROPY = "policy/entropy"
KL = "policy/kl"
GRAD_NORM = "policy/grad_norm"
LR = "policy/lr"
MISMATCH = "mismatch/mean"  # mean |rollout_logprobs - train_logprobs| over the step's action tokens
NUM_FAILED = "rollout/num_failed"
ROLLOUT_TOK_S = "rollout/tok_s"
TRAIN_TOK_S = "train/tok_s"
EVAL = "eval/mean"  # sampled completions
EVAL_GREEDY = "eval/greedy_mean"
TIME = "time/"  # time/<phase>_s, and time/step_s for the whole step
STEP_S = "time/step_s"
SYNC_S = "time/sync_s"

WINDOW = 3  # most steps in reward_first and reward_last


def build_summary(
    history: History, *, status: str, wall_s: float, peak_rss_bytes: int | None = None, error: str | None = None
) -> dict[str, Any]:
    """The content of `summary.json`: one flat object; null where a figure was never measured.

    status: finished, interrupted or failed. steps: the last finished step. reward_first, reward_last: mean reward over
    the first and the last 3 steps (one step is 64 samples or so: too noisy alone); of a run of fewer than 6 steps, over
    the first and the last half of them. eval_*: the first and the last evaluation. mismatch_max: largest step mean,
    null if any was not finite. *_tok_s, *_s_median and phases (seconds by phase): medians over steps, so the slow first
    step does not count. peak_rss_bytes: see rl/memory.py. wall_s: seconds from the start of the cluster, with earlier
    parts of a resumed run if the caller adds them.
    """
    rewards = series(history, REWARD)
    window = max(1, min(WINDOW, len(rewards) // 2))
    mismatches = [row[MISMATCH] for row in history if MISMATCH in row]
    summary: dict[str, Any] = {
        "status": status,
        "steps": max((int(row[STEP]) for row in history), default=0),
        "reward_first": fmean(rewards[:window]) if rewards else None,
        "reward_last": fmean(rewards[-window:]) if rewards else None,
        **_first_last("eval", series(history, EVAL)),
        **_first_last("eval_greedy", series(history, EVAL_GREEDY)),
        "mismatch_max": max(mismatches) if mismatches and all(map(math.isfinite, mismatches)) else None,
        "rollout_tok_s": _median(series(history, ROLLOUT_TOK_S)),
        "train_tok_s": _median(series(history, TRAIN_TOK_S)),
        "sync_s_median": _median(series(history, SYNC_S)),
        "step_s_median": _median(series(history, STEP_S)),
        "phases": {name: _median(series(history, key)) for name, key in phase_keys(history).items()},
        "peak_rss_bytes": peak_rss_bytes,
        "wall_s": wall_s,
    }
    return summary if error is None else {**summary, "error": error}


def series(history: History, key: str) -> list[float]:
    """The finite values of `key`, in step order."""
    return [row[key] for row in history if key in row and math.isfinite(row[key])]


def phase_keys(history: History) -> dict[str, str]:
    """Name of each phase to its metric, in order of first appearance: {"rollout": "time/rollout_s", ...}."""
    keys = dict.fromkeys(key for row in history for key in row)
    return {key[len(TIME) : -2]: key for key in keys if key.startswith(TIME) and key.endswith("_s") and key != STEP_S}


def plot_reward(history: History, path: Path) -> bool:
    """Draws the mean reward by step, with the evaluations as points, to a PNG. False if there was nothing to draw."""
    drawn = {
        key: [(row[STEP], row[key]) for row in history if key in row and math.isfinite(row[key])]
        for key in (REWARD, EVAL, EVAL_GREEDY)
    }
    if not any(drawn.values()):
        return False

    from matplotlib.backends.backend_agg import FigureCanvasAgg  # lazily: slow to import, needed once
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # not pyplot: it keeps figures and a backend in the process
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, style, color, label in (
        (REWARD, ".-", "tab:blue", "rollouts of the step, mean"),
        (EVAL, "o:", "tab:orange", "held-out, sampled"),
        (EVAL_GREEDY, "^:", "tab:green", "held-out, greedy"),
    ):
        if drawn[key]:
            axes.plot(*zip(*drawn[key], strict=True), style, color=color, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, format="png")
    return True


def final_table(summary: Mapping[str, Any]) -> RenderableType:
    """The table that ends a run on the terminal."""
    table = Table(title=f"{summary['status']} after {summary['steps']} steps", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = [
        ("reward, first -> last steps", _change(summary, "reward")),
        ("held-out reward, sampled", _change(summary, "eval")),
        ("held-out reward, greedy", _change(summary, "eval_greedy")),
        ("largest engine/trainer mismatch", _number(summary["mismatch_max"], "{:.2e}")),
        ("rollout", _number(summary["rollout_tok_s"], "{:,.0f} tok/s")),
        ("training", _number(summary["train_tok_s"], "{:,.0f} tok/s")),
        ("step, median", _number(summary["step_s_median"], "{:.2f} s")),
        *((f"  {name}", _number(value, "{:.2f} s")) for name, value in summary["phases"].items()),
        ("peak memory, all processes", _number(summary["peak_rss_bytes"], "{:.2f} GB", 1e-9)),
        ("wall clock", duration(summary["wall_s"])),
    ]
    for name, value in rows:
        if value is not None:
            table.add_row(name, value)
    if summary.get("error"):
        table.add_row("error", Text(str(summary["error"]).strip().splitlines()[-1]), style="red")
    return table


def duration(seconds: float) -> str:
    """Seconds as people read them: 42 s, 3 min 07 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _first_last(name: str, values: list[float]) -> dict[str, float | None]:
    return {f"{name}_first": values[0] if values else None, f"{name}_last": values[-1] if values else None}


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _number(value: float | None, form: str, scale: float = 1.0) -> str | None:
    return None if value is None else form.format(value * scale)


def _change(summary: Mapping[str, Any], name: str) -> str | None:
    first, last = summary[f"{name}_first"], summary[f"{name}_last"]
    return None if first is None or last is None else f"{first:.3f} -> {last:.3f}"
