"""A reward with a signal from the first step on, also for a model that has learnt next to nothing."""

from typing import Any


def closeness(completion: str, record: dict[str, Any]) -> float:
    """The share of places at which the completion has the answer's letter."""
    answer = record["answer"]
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(len(completion), len(answer))


def letters(completion: str, record: dict[str, Any]) -> float:
    """The share of letters among eight characters: a random model has some."""
    return sum(character.isalpha() for character in completion) / 8
