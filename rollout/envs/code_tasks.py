"""Small programming tasks, generated: what a function must do in words, a solution, and arguments to try it on.

Each template makes, from a seeded generator, a `Problem`. Arguments and results are what JSON holds, without floats.
"""

import random
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError

SPLITS = ("train", "eval", "sft")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """function: its name and parameters, as in `total(numbers)`. body: of a solution, one line for each entry."""

    function: str
    text: str
    body: list[str]
    arguments: Callable[[random.Random], list[Any]]

    @property
    def name(self) -> str:
        return self.function.partition("(")[0]

    @property
    def solution(self) -> str:
        return "\n".join([f"def {self.function}:", *(f"    {line}" for line in self.body)])


def numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 20) for _ in range(rng.randint(0, 8))]


def words(rng: random.Random) -> list[str]:
    return ["".join(rng.choices("abcdeimnort", k=rng.randint(1, 7))) for _ in range(rng.randint(0, 7))]


def letters(rng: random.Random) -> str:
    return "".join(rng.choices("aaabbcdxyz ", k=rng.randint(0, 12)))


def multiples(rng: random.Random) -> Problem:
    k = rng.randint(2, 9)
    r = rng.randrange(k)
    return Problem(
        function="total(numbers)",
        text=f"returns the sum of those integers in the list `numbers` that leave the remainder {r} when divided by {k}"
        " (the remainder as Python's % gives it), and 0 when there are none",
        body=[f"return sum(n for n in numbers if n % {k} == {r})"],
        arguments=lambda rng: [numbers(rng)],
    )


def rotation(rng: random.Random) -> Problem:
    k, side = rng.randint(1, 6), rng.choice(["left", "right"])
    return Problem(
        function="rotate(items)",
        text=f"returns a new list with the entries of the list `items` moved {k} places to the {side}, those that fall "
        "off one end coming back at the other",
        body=["if not items:", "    return []", f"k = {k if side == 'left' else -k} % len(items)"]
        + ["return items[k:] + items[:k]"],
        arguments=lambda rng: [numbers(rng)],
    )


def long_words(rng: random.Random) -> Problem:
    k, letter = rng.randint(2, 5), rng.choice("aeioumnrt")
    return Problem(
        function="count_words(words)",
        text=f"returns how many strings in the list `words` have more than {k} letters or begin with {letter!r}",
        body=[f"return sum(len(word) > {k} or word.startswith({letter!r}) for word in words)"],
        arguments=lambda rng: [words(rng)],
    )


def shift(rng: random.Random) -> Problem:
    k = rng.randint(1, 25)
    return Problem(
        function="encode(text)",
        text=f"replaces each lower-case letter of the string `text` by the one {k} places later in the alphabet, going "
        "on at 'a' after 'z', leaves all other characters alone, and returns the new string",
        body=[
            f"abc = {string.ascii_lowercase!r}",
            f"return ''.join(abc[(abc.index(c) + {k}) % 26] if c in abc else c for c in text)",
        ],
        arguments=lambda rng: [letters(rng)],
    )


def window(rng: random.Random) -> Problem:
    k, name = rng.randint(2, 5), rng.choice(["max", "min"])
    return Problem(
        function="best_window(numbers)",
        text=f"returns the {'largest' if name == 'max' else 'smallest'} sum of {k} neighbouring integers in the list "
        f"`numbers`, and None when there are fewer than {k}",
        body=[
            f"sums = [sum(numbers[i:i + {k}]) for i in range(len(numbers) - {k - 1})]",
            f"return {name}(sums) if sums else None",
        ],
        arguments=lambda rng: [numbers(rng)],
    )


def runs(rng: random.Random) -> Problem:
    k = rng.randint(1, 3)
    return Problem(
        function="runs(text)",
        text="returns a list with one pair [character, length] for each run of equal neighbouring characters in the "
        f"string `text`, in order, leaving out the runs shorter than {k}",
        body=[
            "found = []",
            "for c in text:",
            "    if found and found[-1][0] == c:",
            "        found[-1][1] += 1",
            "    else:",
            "        found.append([c, 1])",
            f"return [pair for pair in found if pair[1] >= {k}]",
        ],
        arguments=lambda rng: [letters(rng)],
    )


def pairs(rng: random.Random) -> Problem:
    p, q = rng.randint(2, 9), rng.randint(2, 9)
    return Problem(
        function="combine(a, b)",
        text=f"returns {p} * a - b when the integer `a` is greater than the integer `b`, and a + {q} * b otherwise",
        body=[f"return {p} * a - b if a > b else a + {q} * b"],
        arguments=lambda rng: [rng.randint(-50, 50), rng.randint(-50, 50)],
    )


TEMPLATES = (multiples, rotation, long_words, shift, window, runs, pairs)


def held_out(problem: Problem) -> bool:
    """Whether a problem is kept for evaluation: one in five, by its text."""
    return zlib.crc32(problem.text.encode()) % 5 == 0


def generate(split: str, seed: int, index: int, num_tests: int, num_examples: int) -> dict[str, Any]:
    """One task: {"name", "function", "text", "solution", "examples", "tests"}, the last two of {"args", "expected"}.

    "eval" has problems that "train" and "sft" never have. Raises ConfigError for another split.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: code_sandbox makes {', '.join(SPLITS)}")
    rng = random.Random(f"code_sandbox/{split}/{seed}/{index}")
    while held_out(problem := rng.choice(TEMPLATES)(rng)) is not (split == "eval"):
        pass
    scope: dict[str, Any] = {}
    exec(problem.solution, scope)  # a template of ours
    wanted, cases = num_tests + num_examples, {}
    for _ in range(50 * wanted):
        args = problem.arguments(rng)
        cases[repr(args)] = {"args": args, "expected": scope[problem.name](*args)}
        if len(cases) == wanted:
            break
    chosen = list(cases.values())
    return {
        "name": problem.name,
        "function": problem.function,
        "text": problem.text,
        "solution": problem.solution,
        "examples": chosen[:num_examples],
        "tests": chosen[num_examples:],
    }
