"""Sort the letters of a word ("dbca=" -> "abcd"): for a model of 0.1M parameters and a warm start."""

import random
import string
import zlib
from typing import Any

from conf.errors import ConfigError


def held_out(word: str) -> bool:
    """Whether a word is kept for evaluation: one in ten. Anagrams share the verdict, so no answer is in both."""
    return zlib.crc32("".join(sorted(word)).encode()) % 10 == 0


def generate(
    split: str, seed: int, size: int, min_length: int = 4, max_length: int = 6, corrupt: float = 0.7
) -> list[dict[str, Any]]:
    """`size` records {"prompt", "answer"} of split "train", "eval" or "sft"; words have min_length..max_length letters.

    "sft" adds "completion", of which a share `corrupt` went through `spoil`. Raises ConfigError for an unknown split or
    arguments out of range.
    """
    if split not in ("train", "eval", "sft"):
        raise ConfigError(f"split={split!r}: sort makes train, eval and sft")
    if not 2 <= min_length <= max_length:
        raise ConfigError(
            f"min_length={min_length} with max_length={max_length}: 2 <= min_length <= max_length must hold"
        )
    if not 0 <= corrupt <= 1:
        raise ConfigError(f"corrupt={corrupt}: must be >= 0 and <= 1")
    rng = random.Random(f"sort/{split}/{seed}")
    records: list[dict[str, Any]] = []
    while len(records) < size:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_length, max_length)))
        if held_out(word) is not (split == "eval"):
            continue
        answer = "".join(sorted(word))
        record = {"prompt": f"{word}=", "answer": answer}
        if split == "sft":
            record["completion"] = spoil(answer, rng) if rng.random() < corrupt else answer
        records.append(record)
    return records


def spoil(answer: str, rng: random.Random) -> str:
    """The answer after one or two exchanges of neighbours, each with an even chance to leave a random letter behind."""
    letters = list(answer)
    for _ in range(rng.randint(1, 2)):
        j = rng.randrange(len(letters) - 1)
        letters[j], letters[j + 1] = letters[j + 1], letters[j]
        if rng.random() < 0.5:
            letters[j] = rng.choice(string.ascii_lowercase)
    return "".join(letters)


def reward(completion: str, record: dict[str, Any]) -> float:
    """1.0 when the text (without special tokens) is exactly the sorted word, else 0.0."""
    return float(completion == record["answer"])
