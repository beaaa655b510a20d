"""One-digit sums asked in plain words: a task that a small pretrained chat model improves at within a dozen steps."""

import hashlib
import random
import re
from typing import Any

from conf.errors import ConfigError

NUM_HELD_OUT = 16
# A minus sign counts only at the start of a word: "3-4" holds 3 and 4, not -4.
NUMBER = re.compile(r"(?:(?<!\w)-)?\d+(?:\.\d+)?")


def split_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The 81 pairs (a, b) of 1..9 as (train, held out). The same for all seeds, so an evaluation fits every run."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest())
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def generate(split: str, seed: int, size: int) -> list[dict[str, Any]]:
    """At most `size` records {"prompt", "answer"}, in seeded order, of split "train" (65), "eval" (16) or "sft".

    "sft" is "train" with "completion". Raises ConfigError for another split.
    """
    if split not in ("train", "eval", "sft"):
        raise ConfigError(f"split={split!r}: arithmetic makes train, eval and sft")
    train, held_out = split_pairs()
    pairs = held_out if split == "eval" else train
    random.Random(f"arithmetic/{split}/{seed}").shuffle(pairs)
    records: list[dict[str, Any]] = []
    for a, b in pairs[:size]:
        record = {"prompt": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}
        records.append(record | {"completion": record["answer"]} if split == "sft" else record)
    return records


def reward(completion: str, record: dict[str, Any]) -> float:
    """1.0 when the last number in the text equals the answer, else 0.0."""
    numbers = NUMBER.findall(completion)
    return float(bool(numbers) and float(numbers[-1]) == float(record["answer"]))
