"""A whole step of the quickstart (rollout, score, update, sync), against TRL's GRPOTrainer on the same work.

Both run as programs of their own, in turn: Tandem through scripts/train.py, TRL through scripts/benchmarks/
trl_baseline.py in `.venv-trl`, which is made when it is missing. Each run gives the median of its steps, the first one
left out, and its peak memory (Tandem's is that of all its processes together).
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from rl.faults import RoleDied
from rollout.preflight.launch import prepare
from scripts.benchmarks.common import (
    ROOT,
    Result,
    Row,
    base_overrides,
    bench_config,
    make_result,
    medians,
    say,
)
from scripts.benchmarks.programs import read_steps, run_program

VENV = ROOT / ".venv-trl"
REQUIREMENTS = ROOT / "requirements" / "trl.txt"


def measure(args: argparse.Namespace) -> Result:
    prepare(bench_config(args, f"num_steps={args.steps + 1}"))
    python = None if args.skip_yardstick else ensure_venv()
    rows: list[Row] = []
    for repeat in range(args.repeats):
        rows.append({"variant": "tandem", "repeat": repeat} | run_tandem(args, repeat))
        say(f"{repeat + 1}/{args.repeats}: tandem {rows[-1]['step_s']:.2f} s a step")
        if python is not None:
            rows.append({"variant": "trl", "repeat": repeat} | run_trl(args, python, repeat))
            say(f"{repeat + 1}/{args.repeats}: trl {rows[-1]['step_s']:.2f} s a step")
    found = medians(rows)
    ratios: dict[str, float | None] = {"step_vs_trl": None, "memory_vs_trl": None}
    if python is not None:
        ratios = {
            "step_vs_trl": found["tandem"]["step_s"] / found["trl"]["step_s"],
            "memory_vs_trl": found["tandem"]["peak_rss_bytes"] / found["trl"]["peak_rss_bytes"],
        }
    result = make_result(args, rows, ratios)
    if python is not None:
        result["versions"]["trl"] = trl_version(python)
    return result


def run_tandem(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Medians over the steps of one run of scripts/train.py, and its peak memory."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        overrides = [
            *base_overrides(args),
            f"prompts_per_step={args.prompts}",
            f"samples_per_prompt={args.samples}",
            f"rollout.max_tokens={args.max_tokens}",
            f"num_steps={args.steps + 1}",
            f"seed={seed}",
            f'run_dir="{folder}"',
        ]
        run_program([sys.executable, "scripts/train.py", *overrides], dict(os.environ))
        summary = json.loads(Path(folder, "summary.json").read_text())
        steps = read_steps(Path(folder, "metrics.jsonl"))
    if summary["status"] != "finished" or len(steps) != args.steps + 1:
        raise RoleDied(f"scripts/train.py ended {summary['status']} after {len(steps)} steps: {summary.get('error')}")
    names = {
        "step_s": "time/step_s",
        "rollout_s": "time/rollout_s",
        "update_s": "time/update_s",
        "sync_s": "time/sync_s",
        "completion_tokens": "rollout/completion_tokens_mean",
    }
    figures = {name: statistics.median(row[key] for row in steps[1:]) for name, key in names.items()}
    return figures | {"peak_rss_bytes": summary["peak_rss_bytes"]}


def run_trl(args: argparse.Namespace, python: Path, seed: int) -> dict[str, float]:
    """The figures of one run of TRL."""
    command = [
        *(str(python), "-P", "scripts/benchmarks/trl_baseline.py", args.model),  # -P: this folder holds no packages
        *("--steps", str(args.steps + 1)),
        *("--prompts", str(args.prompts)),
        *("--samples", str(args.samples)),
        *("--max-tokens", str(args.max_tokens)),
        *("--threads", str(args.threads)),
        *("--seed", str(seed)),
    ]
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    found: dict[str, Any] = json.loads(run_program(command, env).strip().splitlines()[-1])
    return {
        "step_s": found["step_s"],
        "rollout_s": found["generation_s"],
        "completion_tokens": found["mean_length"],
        "peak_rss_bytes": found["peak_rss_bytes"],
    }


def ensure_venv() -> Path:
    """The interpreter of `.venv-trl`, made from requirements/trl.txt unless it is there and current."""
    python, stamp = VENV / "bin" / "python", VENV / "requirements.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"installing TRL into {VENV.name} (a few minutes, once)")
    shutil.rmtree(VENV, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    for command in ([sys.executable, "-m", "venv", str(VENV)], pip):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(
                f"{VENV.name} cannot be made ({' '.join(command[:4])}); --skip-yardstick measures Tandem alone:\n"
                + done.stderr[-2000:]
            )
    stamp.write_text(wanted)
    return python


def trl_version(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('trl'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
