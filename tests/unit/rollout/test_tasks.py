"""The built-in tasks: disjoint splits, repeatable, and verifiers that cannot be fooled by format."""

import pytest

from conf.errors import ConfigError
from rollout.tasks import arithmetic, sort


@pytest.mark.parametrize("task", [arithmetic, sort])
@pytest.mark.parametrize("split", ["train", "eval", "sft"])
def test_generators_are_deterministic_and_seeded(task, split) -> None:
    assert task.generate(split, 3, 40) == task.generate(split, 3, 40)
    assert task.generate(split, 3, 40) != task.generate(split, 4, 40)


@pytest.mark.parametrize("task", [arithmetic, sort])
def test_unknown_split(task) -> None:
    with pytest.raises(ConfigError, match="'test'"):
        task.generate("test", 0, 1)


@pytest.mark.parametrize("task", [arithmetic, sort])
def test_held_out_prompts_are_never_trained_on(task) -> None:
    held_out = {record["prompt"] for seed in range(3) for record in task.generate("eval", seed, 200)}
    for split in ("train", "sft"):
        assert held_out.isdisjoint(record["prompt"] for seed in range(3) for record in task.generate(split, seed, 3000))


def test_arithmetic_covers_all_pairs_and_size_only_caps() -> None:
    train, held_out = arithmetic.generate("train", 0, 4096), arithmetic.generate("eval", 0, 4096)
    assert (len(train), len(held_out)) == (65, 16)
    assert len({record["prompt"] for record in train + held_out}) == 81
    assert len(arithmetic.generate("train", 0, 5)) == 5
    record = next(r for r in train + held_out if r["prompt"] == "What is 3 + 4? Answer with just the number.")
    assert record["answer"] == "7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 1.0),
        ("The answer is 7.", 1.0),
        ("3 + 4 = 7", 1.0),
        ("3+4=7", 1.0),
        ("10-7", 1.0),
        ("7.0", 1.0),
        ("", 0.0),
        ("seven", 0.0),
        ("7 or 8", 0.0),
        ("17", 0.0),
        ("-7", 0.0),
        ("7.5", 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_arithmetic_reward(text: str, expected: float) -> None:
    assert arithmetic.reward(text, {"answer": "7"}) == expected


def test_sort_records() -> None:
    for record in sort.generate("train", 0, 300):
        word = record["prompt"].removesuffix("=")
        assert 4 <= len(word) <= 6 and record["answer"] == "".join(sorted(word)) and set(record) == {"prompt", "answer"}
    assert {len(r["answer"]) for r in sort.generate("train", 0, 100, min_length=2, max_length=3)} == {2, 3}


def test_sort_demonstrations_are_spoilt_as_often_as_asked() -> None:
    def share_right(corrupt: float) -> float:
        records = sort.generate("sft", 0, 2000, corrupt=corrupt)
        return sum(r["completion"] == r["answer"] for r in records) / len(records)

    assert share_right(0.0) == 1.0
    # A spoilt one is right by chance when the exchanges cancel out or exchange equal letters.
    assert 0.28 < share_right(0.7) < 0.42
    assert all(len(r["completion"]) == len(r["answer"]) for r in sort.generate("sft", 0, 200))


def test_sort_reward_is_exact() -> None:
    assert sort.reward("abcd", {"answer": "abcd"}) == 1.0
    for text in ("", "abc", "abcd ", "abcde", "dcba", "ABCD"):
        assert sort.reward(text, {"answer": "abcd"}) == 0.0


@pytest.mark.parametrize(
    "kwargs", [{"min_length": 1}, {"min_length": 5, "max_length": 4}, {"corrupt": 1.5}, {"corrupt": -0.1}]
)
def test_sort_arguments_out_of_range(kwargs) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        sort.generate("train", 0, 1, **kwargs)
