"""Guess: what it says, what counts as a guess, and what it pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.envs.guess import Guess
from rollout.envs.numbers import first_integer, last_integer
from tests.unit.rollout.envs.playing import act, begin, play, total


def test_plain_style_is_a_few_characters() -> None:
    env = Guess(low=1, high=15, style="plain")
    assert begin(env, {"number": 9}).messages == [{"role": "user", "content": "1-15?"}]
    replies = [act(env, text).messages[0]["content"] for text in ("4", "12", "none")]
    assert replies == ["higher", "lower", "?"]
    result = act(env, "9")
    assert (result.messages[0]["content"], result.reward, result.terminated) == ("correct", 1.0, True)


def test_chat_style_says_what_is_left() -> None:
    env = Guess(low=1, high=5, turns=4)
    assert "from 1 to 5" in begin(env, {"number": 3}).messages[0]["content"]
    assert "higher than 1. You have 3 guesses left" in act(env, "I guess 1!").messages[0]["content"]
    act(env, "maybe 4")
    assert "no number" in act(env, "hm").messages[0]["content"]
    result = act(env, "2")
    assert "No guesses are left" in result.messages[0]["content"]
    assert (result.reward, result.terminated, result.info) == (0.0, True, {"correct": 0.0, "guesses": 4})


def test_the_first_integer_after_thinking_is_the_guess() -> None:
    for text, right in (("5</think>3 or 5", 1.0), ("5 or 3", 0.0)):
        env = Guess(low=1, high=5)
        begin(env, {"number": 3})
        assert act(env, text).reward == right


def test_discount_is_paid_for_each_guess_before() -> None:
    assert total(play(Guess(discount=0.5), {"number": 1}, ["3", "2", "1"])) == 0.25


@given(st.integers(0, 40), st.integers(1, 200), st.data())
def test_oracle_needs_no_more_guesses_than_there_are(low, width, data) -> None:
    number = data.draw(st.integers(low, low + width))
    assert total(play(Guess(low=low, high=low + width), {"number": number})) == 1.0


def test_oracle_takes_over_after_other_guesses() -> None:
    env = Guess(low=1, high=15, turns=9)
    begin(env, {"number": 9})
    for text in ("2", "14", "20", "-5"):
        act(env, text)
    assert env.oracle() == "8"


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("", None, None),
        ("3-4", 3, 4),
        ("is -4.", -4, -4),
        ("1,204 and 7", 1, 7),
        ("it is 1,204", 1, 1204),
        ("9" * 5000, 10**18 - 1, int("9" * 14)),
    ],
)
def test_integers_in_a_text(text, first, last) -> None:
    assert (first_integer(text), last_integer(text)) == (first, last)


def test_example_stands_before_the_opening_and_is_the_same_for_every_task() -> None:
    begun = [begin(Guess(low=1, high=5, style="short", example=True), {"number": number}).messages for number in (1, 5)]
    assert begun[0] == begun[1]
    assert [(m["role"], m["content"]) for m in begun[0]] == [
        ("user", "Guess a number from 1 to 5."),
        ("assistant", "3"),
        ("user", "Higher."),
        ("assistant", "4"),
        ("user", "Correct! Guess a number from 1 to 5."),
    ]
