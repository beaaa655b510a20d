"""Every algorithm on one task from one warm start: how far the held-out reward rises, and along which curve.

The warm start and the teacher of `distill` (the policy that grpo has trained with the first seed) are made once. Then
each algorithm runs `scripts/train.py experiment=tiny_sort algo=NAME` with each seed, `--jobs` programs at a time. All
see the same number of samples, except that PPO's critic has its first steps to itself.
"""

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.launch import compose
from scripts.benchmarks.common import Result, Row, make_result, say
from scripts.benchmarks.programs import read_steps, run_program

# What an algorithm needs beside its name on this task.
OVERRIDES: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": [],
    "dapo": ["algo.overlong_buffer_tokens=2"],
    "gspo": [],
    "gmpo": [],
    "cispo": [],
    "sapo": [],
    "rloo": [],
    "remax": [],
    "reinforce": [],
    "reinforce_pp": [],
    "reinforce_pp_baseline": [],
    "ppo": ["critic.warmup_steps=5"],
    "decoupled_ppo": ["max_lag=1"],
    "distill": ["teacher.top_k=0"],
}
SMOOTHING = 0.8  # share of the past in the drawn curves


def measure(args: argparse.Namespace) -> Result:
    names = args.only or list(OVERRIDES)
    unknown = set(names) - set(OVERRIDES)
    if unknown:
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: no such algorithm here; one of {', '.join(OVERRIDES)}")
    for name in names:  # refuses what cannot run before anything starts
        compose(overrides(args, name, 0, *(["teacher.path=teacher"] if name == "distill" else [])))
    curves: dict[str, list[list[float]]] = {name: [] for name in names}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        root = Path(folder)
        say("warm start")
        run_program([sys.executable, "scripts/sft.py", "experiment=tiny_sort", f'run_dir="{root / "start"}"'])
        teacher = root / "grpo-0" / "hf"
        first = run_one(args, root, "grpo", 0) if "distill" in names else None
        jobs = [(name, seed) for name in names for seed in range(args.repeats)]

        def work(job: tuple[str, int]) -> tuple[dict[str, Any], list[dict[str, float]]]:
            if job == ("grpo", 0) and first is not None:
                return first
            return run_one(args, root, *job, *([f'teacher.path="{teacher}"'] if job[0] == "distill" else []))

        for (name, seed), (summary, steps) in zip(jobs, pool.map(work, jobs), strict=True):
            curves[name].append([step["reward/mean"] for step in steps])
            rows.append({"variant": name, "repeat": seed} | figures(args, summary))
            say(f"{name}, seed {seed}: {rows[-1]['eval_first']:.3f} -> {rows[-1]['eval_last']:.3f}")
    draw(curves, args.json.with_suffix(".png"), args.prompts * args.samples)
    args.json.with_suffix(".md").write_text(table(rows))
    last = {name: statistics.median(row["eval_last"] for row in rows if row["variant"] == name) for name in names}
    ratios: dict[str, float | None] = {f"{n}_vs_grpo": last[n] / last["grpo"] if "grpo" in last else None for n in last}
    return make_result(args, rows, ratios, task="tiny_sort")


def run_one(
    args: argparse.Namespace, root: Path, name: str, seed: int, *more: str
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """One run of scripts/train.py from the common warm start: its summary and its steps."""
    folder = root / f"{name}-{seed}"
    places = [f'model.path="{root / "start" / "sft"}"', f'run_dir="{folder}"']
    run_program([sys.executable, "scripts/train.py", *overrides(args, name, seed, *more), *places])
    return json.loads((folder / "summary.json").read_text()), read_steps(folder / "metrics.jsonl")


def overrides(args: argparse.Namespace, name: str, seed: int, *more: str) -> list[str]:
    """The configuration of one run, without its folders."""
    return [
        *("experiment=tiny_sort", f"algo={name}", *OVERRIDES[name], *more),
        *("sft.num_steps=0", f"num_steps={args.steps}", f"seed={seed}", "evaluation.every=1000"),
        *(f"prompts_per_step={args.prompts}", f"samples_per_prompt={args.samples}"),
        *("tracking=none", "checkpoint.at_end=false", "cluster.colocate=[critic,teacher]"),
    ]


def figures(args: argparse.Namespace, summary: dict[str, Any]) -> dict[str, float]:
    """What a row says of one run. Samples: those trained on; dynamic sampling draws more."""
    names = ("eval_first", "eval_last", "eval_greedy_last", "mismatch_max", "step_s_median", "wall_s")
    return {name: summary[name] for name in names} | {"num_samples": args.steps * args.prompts * args.samples}


def table(rows: list[Row]) -> str:
    """Medians over the seeds, and the lowest of them, as Markdown."""
    lines = ["| algo | seeds | held-out sampled | lowest | greedy | step, s |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name]

        def median(key: str, of: list[Row] = mine) -> float:
            return statistics.median(row[key] for row in of)

        lines.append(
            f"| {name} | {len(mine)} | {median('eval_first'):.3f} -> {median('eval_last'):.3f} | "
            f"{min(row['eval_last'] for row in mine):.3f} | {median('eval_greedy_last'):.3f} | "
            f"{median('step_s_median'):.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(curves: dict[str, list[list[float]]], path: Path, samples_per_step: int) -> None:
    """Mean training reward over samples, smoothed, the mean over the seeds: one line for each algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=110)
    for number, (name, runs) in enumerate(curves.items()):
        mean = [statistics.fmean(step) for step in zip(*runs, strict=False)]
        smooth, value = [], mean[0]
        for reward in mean:
            value = SMOOTHING * value + (1 - SMOOTHING) * reward
            smooth.append(value)
        samples = [samples_per_step * (step + 1) for step in range(len(smooth))]
        style = ("-", "--", ":")[number // 10 % 3]
        axes.plot(samples, smooth, style, label=name, linewidth=1.4)
    axes.set_xlabel("samples trained on")
    axes.set_ylabel("mean reward (smoothed)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
