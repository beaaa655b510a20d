"""What an environment may return: good values pass as they are, bad ones are refused in words, from whichever side."""

import json
from typing import Any

import numpy as np
import pytest

from rollout.environment import Observation, StepResult
from rollout.processes.env_faults import EnvBadValue
from rollout.processes.env_hosts import answer
from rollout.processes.env_values import CHECKS, as_observation, as_score, as_step_result, plain, revive

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_reset_may_give_an_observation_its_messages_or_a_text() -> None:
    wanted = Observation(messages=[USER])
    assert as_observation("hello") == as_observation([USER]) == as_observation(Observation(messages=[USER])) == wanted


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, r"an Observation, a list of messages or a str, found None \(NoneType\)"),
        ({"messages": []}, r"found \{'messages': \[\]\} \(dict\)"),
        ([], "at least one message"),
        (["hello"], r"messages\[0\] must be a dict with role and content, found 'hello' \(str\)"),
        ([USER, {"role": "user"}], r"messages\[1\]\['content'\] must be a str, found no such key"),
        ([{"role": 1, "content": ""}], r"\['role'\] must be a str, found 1 \(int\)"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "a list of parts is not taken: join"),
        (
            [{"role": "user", "content": "", "tool_calls": {1, 2}}],
            r"\['tool_calls'\] must hold only .*\(set\)",
        ),
        (Observation(messages=[USER], tools={}), "tools must be a list of dicts"),  # type: ignore[arg-type]
        (Observation(messages=[USER], tools=["f"]), "tools must be a list of dicts"),  # type: ignore[list-item]
        (Observation(messages=[USER], tools=[{"name": "f"}]), r'tools\[0\] must be \{"type": "function"'),
        ([{"role": "user", "content": "\ud800"}], "messages must hold no half of a surrogate pair"),
        (Observation(messages=[USER], info={"n": 10**400}), r"info\['n'\] is an integer beyond all floats"),
        (Observation(messages=[USER], agent=""), "agent must name who acts first"),
        (Observation(messages=[USER], info={"x": object()}), r"info\['x'\] must hold .*\(object\)"),
        (Observation(messages=[USER], info={1: 2}), r"info must have str keys, found 1"),  # type: ignore[dict-item]
    ],
)
def test_a_bad_observation_is_refused_in_words(value: Any, said: str) -> None:
    with pytest.raises(EnvBadValue, match=f"^reset.*{said}"):
        as_observation(value)


def test_large_integers_of_json_stay_as_they_are() -> None:
    info = {"clock_ns": 1_764_550_000_000_000_000, "huge": -(10**300)}
    assert as_observation(Observation(messages=[USER], info=info)).info == info


@pytest.mark.parametrize("reward", [True, 1, 0.5, np.float32(0.5), np.array(2), np.bool_(1)])
def test_numbers_of_any_kind_are_rewards(reward: Any) -> None:
    result = as_step_result(StepResult(reward=reward))
    assert type(result.reward) is float and result.reward == float(reward)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "0.5", [1.0], np.ones(1), 1j, 10**400, 1e300])
def test_what_is_no_finite_number_is_refused_with_the_value(reward: Any) -> None:
    with pytest.raises(EnvBadValue, match=r"step: reward must be a finite number, found .*\("):
        as_step_result(StepResult(reward=reward))
    with pytest.raises(EnvBadValue, match=r"score\['main'\] must be a finite number"):
        as_score({"main": reward})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.0, r"must return a StepResult, found 1.0 \(float\)"),
        (StepResult(terminated=1), r"terminated must be True or False, found 1 \(int\)"),  # type: ignore[arg-type]
        (StepResult(truncated=None), "truncated must be True or False"),  # type: ignore[arg-type]
        (StepResult(agent=None), "agent must be a str"),  # type: ignore[arg-type]
        (StepResult(messages="hello"), "messages must be a list of messages"),  # type: ignore[arg-type]
        (StepResult(info=[]), "info must be a dict"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_step_is_refused_in_words(value: Any, said: str) -> None:
    with pytest.raises(EnvBadValue, match=f"^step.*{said}"):
        as_step_result(value)


def test_arrays_in_info_become_numbers_and_lists() -> None:
    info = as_step_result(StepResult(info={"a": np.float32(0.5), "b": np.arange(2), "c": (1, None)})).info
    assert info == {"a": 0.5, "b": [0, 1], "c": [1, None]} and type(info["a"]) is float


def test_other_methods_return_what_they_say() -> None:
    assert (CHECKS["oracle"]("a"), CHECKS["snapshot"](bytearray(b"a")), CHECKS["restore"](3)) == ("a", b"a", None)
    for method, value in (("oracle", None), ("snapshot", "a"), ("score", {1: 1.0})):
        with pytest.raises(EnvBadValue):
            CHECKS[method](value)


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("reset", Observation(messages=[USER], tools=[TOOL], agent="a", info={"n": 1})),
        ("step", StepResult(messages=[USER], reward=-1.0, terminated=True, info={"text": "\ud800"})),
        ("score", {"a": 1.0}),
        ("snapshot", bytes(range(256))),
    ],
)
def test_a_checked_value_survives_json(method: str, value: Any) -> None:
    assert revive(method, json.loads(json.dumps(plain(value)))) == value


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        ("step", b"not JSON"),
        ("step", b"\xff\xff"),
        ("step", b"[1]"),
        ("step", b'"ab"'),
        ("step", b"[" * 100_000),
        ("step", b'["value", {"messages": ' + b"[" * 600 + b"]" * 600 + b"}]"),
        ("step", b'["value", null]'),
        ("step", b'["value", {"reward": NaN}]'),
        ("step", b'["value", {"reward": 1e999}]'),
        ("step", b'["value", {"reward": ' + b"9" * 5000 + b"}]"),
        ("step", b'["value", {"no_such_field": 1}]'),
        ("reset", b'["value", {"messages": [{"role": "user"}]}]'),
        ("snapshot", b'["value", "***"]'),
        ("snapshot", b'["value", 3]'),
        ("oracle", b'["ready", "text"]'),
        ("oracle", b'[["value"], "text"]'),
        ("oracle", b'["bad_value", {}]'),
    ],
)
def test_no_reply_of_a_process_that_lies_passes(method: str, reply: bytes) -> None:
    with pytest.raises(EnvBadValue):
        answer(method, reply)
