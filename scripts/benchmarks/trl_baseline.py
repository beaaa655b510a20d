"""TRL's GRPOTrainer on one-digit sums: the yardstick of `scripts/bench.py step`.

It runs in a virtual environment of its own (requirements/trl.txt), so it imports nothing of this project:

    .venv-trl/bin/python scripts/benchmarks/trl_baseline.py models/smollm2 --steps 4 --threads 2

The last line of its output is one JSON object: seconds per step and of generation (medians, the first step left out
when there are more), rewards, mean length, peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Sum = dict[str, Any]


def sums(count: int, seed: int) -> list[Sum]:
    """The task: `count` prompts as chat messages, each with its answer."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        text = f"What is {a} + {b}? Answer with just the number."
        rows.append({"prompt": [{"role": "user", "content": text}], "gold": str(a + b)})
    return rows


def last_number_reward(completions: list[list[dict[str, str]]], gold: list[str], **_: Any) -> list[float]:
    """1 when the last number of the completion is the answer, else 0."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) or [""] for completion in completions]
    return [float(numbers[-1] == answer) for numbers, answer in zip(found, gold, strict=True)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face model folder")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens per completion, at most")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_trainer(args: argparse.Namespace, output_dir: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    config = GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=args.prompts * args.samples,
        num_generations=args.samples,
        max_completion_length=args.max_tokens,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        seed=args.seed,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=last_number_reward,
        args=config,
        train_dataset=Dataset.from_list(sums(args.prompts * args.steps * 2, args.seed + 1)),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )


class Clock:
    """Times the steps and the generation of a GRPOTrainer, and keeps what it logs."""

    def __init__(self, trainer: Any) -> None:
        self.step_s: list[float] = []
        self.generation_s: list[float] = []
        self.rewards: list[float] = []
        self.lengths: list[float] = []
        self._last = 0.0
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self._timed_generate
        trainer.add_callback(self._callback())

    def _timed_generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        result = self._generate(*args, **kwargs)
        self.generation_s.append(time.monotonic() - start)
        return result

    def _callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                clock._last = time.monotonic()

            def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **__: Any) -> None:
                if "reward" in (logs or {}):
                    clock._log(logs)

        return Callback()

    def _log(self, logs: dict[str, Any]) -> None:
        now = time.monotonic()
        self.step_s.append(now - self._last)
        self.rewards.append(float(logs["reward"]))
        self.lengths.append(float(logs["completions/mean_length"]))
        self._last = now

    def summary(self) -> dict[str, Any]:
        counted = slice(1, None) if len(self.step_s) > 1 else slice(None)
        return {
            "step_s": statistics.median(self.step_s[counted]),
            "generation_s": statistics.median(self.generation_s[counted]),
            "steps": len(self.step_s),
            "rewards": self.rewards,
            "mean_length": statistics.mean(self.lengths),
        }


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="trl-baseline-") as output_dir:
        trainer = make_trainer(args, output_dir)
        clock = Clock(trainer)
        trainer.train()
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    trajectories = args.prompts * args.samples
    print(
        json.dumps({**clock.summary(), "trajectories_per_step": trajectories, "peak_rss_bytes": peak_rss_bytes}),
        flush=True,
    )


if __name__ == "__main__":
    main()
