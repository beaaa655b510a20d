"""Tasks of an environment that brings its own: seeded, and those for evaluation kept apart."""

import random
import zlib
from collections.abc import Callable
from typing import TypeVar

from conf.errors import ConfigError

Item = TypeVar("Item")
SPLITS = ("train", "eval", "sft")
MAX_DRAWS = 1000


def generator(name: str, split: str, seed: int, index: int) -> random.Random:
    """The source of task `index`. Raises ConfigError for an unknown split."""
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: {name} makes train, eval and sft")
    return random.Random(f"{name}/{split}/{seed}/{index}")


def held_out(key: str) -> bool:
    """Whether what is known as `key` is kept for evaluation: one in ten, the same for all seeds."""
    return zlib.crc32(key.encode()) % 10 == 0


def draw(
    rng: random.Random, split: str, make: Callable[[random.Random], Item], key: Callable[[Item], str] = repr
) -> Item:
    """The first item from `make` that belongs to the split. Raises ConfigError where there seems to be none."""
    for _ in range(MAX_DRAWS):
        item = make(rng)
        if held_out(key(item)) is (split == "eval"):
            return item
    raise ConfigError(f"split={split!r}: none of {MAX_DRAWS} tasks belongs to it; give env.kwargs that allow for more")
