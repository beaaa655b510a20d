"""Benchmarks: Tandem and its yardstick, measured in turn in one run, several times; medians and their ratio.

    python scripts/bench.py rollout --json runs/bench/rollout.json   against raw vllm.LLM.generate
    python scripts/bench.py train --json runs/bench/train.json       against a plain torch loop
    python scripts/bench.py sync --json runs/bench/sync.json         against the engine's own load plus one memcpy
    python scripts/bench.py step --json runs/bench/step.json         against TRL's GRPOTrainer
    python scripts/bench.py logprobs --json runs/bench/logprobs.json        against logits of all tokens at once
    python scripts/bench.py algorithms --json runs/bench/algorithms.json    every algorithm on one task
    python scripts/bench.py layouts --json runs/bench/layouts.json          every layout of two training ranks
    python scripts/bench.py agents --json runs/bench/agents.json            episodes of several turns

docs/performance.md says what each one measures and how to read it. Use an idle machine.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

NAMES = {
    "rollout": "sampling: engine actor and pool, against raw vllm.LLM.generate",
    "train": "one update at ZeRO-1 on one rank, against a plain torch loop",
    "sync": "a push of all weights, against the engine's own load from warm memory plus one memcpy",
    "step": "a whole step of the quickstart, against TRL's GRPOTrainer",
    "logprobs": "log-probabilities and entropies over a large vocabulary with their gradients, against the naive way",
    "algorithms": "every algorithm on the tiny task from one warm start; also writes a table (.md) and curves (.png)",
    "layouts": "every layout of two training ranks: against one process of plain torch, and against DDP",
    "agents": "episodes of several turns: exact ids, time beside engine and environment, one long, many faulty",
}
REPEATS = {"rollout": 5, "train": 5, "sync": 9, "step": 2, "logprobs": 3, "algorithms": 1, "layouts": 5, "agents": 1}
AGENTS = ("exact", "overhead", "long", "soak")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = parser.add_subparsers(dest="name", required=True, metavar="{" + ",".join(NAMES) + "}")
    for name, about in NAMES.items():
        sub = benchmarks.add_parser(name, help=about, description=about, allow_abbrev=False)
        sub.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the result is written")
        sub.add_argument(
            "--repeats", type=positive, default=REPEATS[name], help="measurements of each side [%(default)s]"
        )
        if name == "logprobs":
            sizes = {"tokens": 8192, "vocabulary": 50_000, "width": 576, "chunk-tokens": 256}
            for key, size in sizes.items():
                sub.add_argument(f"--{key}", type=positive, default=size, help="size of the work [%(default)s]")
            sub.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="CPU threads [all cores]")
            continue
        if name == "layouts":
            sub.add_argument("--long-tokens", type=positive, default=32768, help="tokens of the long row [%(default)s]")
            sub.add_argument("--all", action="store_true", help="recomputation with every other choice too")
            sub.add_argument("--only", nargs="+", metavar="LAYOUT", help='these, as in "zero3 dp2 hpz2" [all legal]')
            continue
        if name == "algorithms":
            sub.add_argument("--prompts", type=positive, default=32, help="prompts of a batch [%(default)s]")
            sub.add_argument("--samples", type=group_size, default=16, help="samples of each prompt [%(default)s]")
            sub.add_argument("--steps", type=positive, default=80, help="steps of each run [%(default)s]")
            sub.add_argument("--jobs", type=positive, default=2, help="runs at a time [%(default)s]")
            sub.add_argument("--only", nargs="+", metavar="NAME", help="these algorithms [all]")
            continue
        sub.add_argument("--model", default="models/smollm2", help="Hugging Face model folder [%(default)s]")
        sub.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="CPU threads [all cores]")
        if name == "agents":
            sub.add_argument("--only", nargs="+", choices=AGENTS, default=AGENTS, help="these measurements [all]")
            sub.add_argument("--episodes", type=positive, default=200, help="episodes of exact [%(default)s]")
            sub.add_argument("--soak", type=positive, default=2000, help="episodes of soak [%(default)s]")
            continue
        if name != "sync":
            sub.add_argument("--prompts", type=positive, default=8, help="prompts of a batch [%(default)s]")
            sub.add_argument("--samples", type=group_size, default=8, help="samples of each prompt [%(default)s]")
            sub.add_argument("--max-tokens", type=positive, default=16, help="tokens of a completion [%(default)s]")
        if name == "sync":
            sub.add_argument("--skip-matrix", action="store_true", help="measure speed alone, without all the layouts")
            sub.add_argument("--skip-speed", action="store_true", help="check the layouts alone")
            sub.add_argument("--only", nargs="+", metavar="MODEL", help='layouts of these, as in "untied" [all five]')
        if name == "train":
            sub.add_argument(
                "--prompt-tokens", type=positive, default=0, help="tokens of each prompt, completions full [the task's]"
            )
        if name == "step":
            sub.add_argument("--steps", type=positive, default=4, help="steps counted in each run [%(default)s]")
            sub.add_argument("--skip-yardstick", action="store_true", help="measure Tandem alone, without TRL")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def group_size(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{value}: a group needs at least 2 samples")
    return value


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The arguments; exits with code 2, before anything starts, when something is wrong with them."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if "model" in args and not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; a Hugging Face model folder is needed")
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--json {args.json}: {error.strerror}")
    if args.json.is_dir() or not os.access(args.json.parent, os.W_OK):
        parser.error(f"--json {args.json}: cannot be written")
    if "model" in args:
        args.model = str(Path(args.model).absolute())
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    from conf.errors import ConfigError
    from scripts.benchmarks.common import print_result, write_result
    from scripts.session import PLAIN_ERRORS, terminated_as_exit

    started = time.monotonic()
    try:
        with terminated_as_exit():
            result = importlib.import_module(f"scripts.benchmarks.{args.name}").measure(args)
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return 2
    except PLAIN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    wrong = result.pop("wrong", "")
    write_result(result | {"took_s": time.monotonic() - started}, args.json)
    print_result(result)
    print(f"wrote {args.json}")
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
