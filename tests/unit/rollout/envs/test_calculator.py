"""Calculator: right values, nothing but arithmetic, and no expression that takes long."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.envs.calculator import Calculator, evaluate
from rollout.tools import ToolError
from tests.unit.rollout.envs.playing import act, begin, play, total


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 + 4 * 5", 23),
        ("(3 + 4) * -5", -35),
        ("7 / 2", 3.5),
        ("6 / 2", 3),
        ("7 // 2 + 7 % 4", 6),
        ("2 ** 10", 1024),
        ("0.1 + 0.2", 0.3),
        (" 1e3 ", 1000),
    ],
)
def test_evaluate_gives_the_value(expression, value) -> None:
    assert evaluate(expression) == value and type(evaluate(expression)) is type(value)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("2 ^ 3", "write \\*\\*"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "exponent"),
        ("10 ** 31", "too large"),
        ("1e999", "too large"),
        ("(-8) ** 0.5", "not a real"),
        ("x + 1", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("[1] * 3", "only numbers"),
        ("1 +", "not an arithmetic"),
        ("", "not an arithmetic"),
        ("\0", "not an arithmetic"),
        ("(" * 190, "not an arithmetic"),
        ("1" * 201, "201 characters"),
    ],
)
def test_evaluate_refuses_the_rest(expression, words) -> None:
    with pytest.raises(ToolError, match=words):
        evaluate(expression)


@given(st.text("0123456789.+-*/% ()e", max_size=30))
def test_evaluate_raises_only_tool_errors(expression) -> None:
    with contextlib.suppress(ToolError):
        evaluate(expression)


def test_answer_is_the_last_number() -> None:
    data = {"expression": "30 * 41 - 26", "answer": "1204"}
    for text, right in (("1204", 1.0), ("30 * 41 - 26 = 1,204.", 1.0), ("1204.0", 1.0), ("-1204", 0.0), ("?", 0.0)):
        assert total(play(Calculator(), data, [text])) == right


def test_calculate_gives_the_result_and_the_episode_goes_on() -> None:
    env = Calculator()
    begin(env, {"expression": "2 + 3", "answer": "5"})
    result = act(env, env.call_text("calculate", expression="2 + 3"))
    assert (result.messages[0]["content"], result.terminated) == ("5", False)
    assert act(env, env.call_text("calculate", expression="two")).info["tool_errors"] == 1
