"""The short way to an environment: what the model is told of a tool, what it may get wrong, and what it gets back."""

import asyncio
import enum
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.demonstrations import in_format
from rollout.environment import Action, Environment, Observation, StepResult, Task, ToolCall
from rollout.parameters import WrongValue, coerce, schema
from rollout.tool_calls import parse, render
from rollout.tools import ToolEnv, ToolError, tool


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass
class Point:
    x: int
    y: int = 0

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x must not be negative")


class Room(ToolEnv):
    def reset(self, task: Task) -> str:
        self.seen: list[Any] = []
        return "Look around."

    @tool
    def look(self, where: Side, times: int = 1, note: str | None = None) -> str:
        """Looks to one side,
        and says what is there.

        where: the side to look to,
            from where you stand
        times: how often
        """
        self.seen.append((where, times, note))
        return f"{where.value} {times}"

    @tool
    async def wait(self, seconds: float) -> dict:
        """Waits.

        Args:
            seconds (float): how long:
                no less

        Returns:
            seconds: nothing of interest
        """
        self.reward(0.25)
        return {"waited": seconds}

    @tool
    def leave(self, right: bool) -> None:
        """Ends the episode."""
        self.finish(1.0 if right else -1.0)

    @tool
    def fail(self, mine: bool) -> str:
        """Fails."""
        if mine:
            raise ToolError("try the other")
        raise ZeroDivisionError

    def answer(self, text: str) -> float:
        return float(text.strip() == "42")


def begin(env: ToolEnv) -> Observation:
    return env.reset(Task(index=0, seed=0, data={}))


def call(env: ToolEnv, *calls: ToolCall) -> StepResult:
    return asyncio.run(env.step(Action(text="", content="", tool_calls=list(calls))))


def say(env: ToolEnv, text: str) -> StepResult:
    return asyncio.run(env.step(Action(text=text, content=text)))


def one(name: str, /, **arguments: Any) -> tuple[str, int]:
    env = Room()
    begin(env)
    result = call(env, ToolCall(name=name, arguments=arguments, id="a"))
    (message,) = result.messages
    assert (message["role"], message["name"], message["tool_call_id"]) == ("tool", name, "a")
    assert result.info["tool_calls"] == 1
    return message["content"], result.info["tool_errors"]


def test_schema_is_made_of_hints_and_docstring() -> None:
    observation = begin(Room())
    assert isinstance(Room(), Environment)
    assert observation.messages == [{"role": "user", "content": "Look around."}]
    look, wait, *_ = [entry["function"] for entry in observation.tools]
    assert look == {
        "name": "look",
        "description": "Looks to one side, and says what is there.",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {
                    "type": "string",
                    "enum": ["left", "right"],
                    "description": "the side to look to, from where you stand",
                },
                "times": {"type": "integer", "description": "how often", "default": 1},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["where"],
        },
    }
    assert wait["description"] == "Waits."
    assert wait["parameters"]["properties"]["seconds"]["description"] == "how long: no less"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b"], {"enum": [1, "b"]}),
        (list, {"type": "array"}),
        (Any, {}),
        (
            Point,
            {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_schema_of_a_type(hint, expected) -> None:
    assert schema(hint) == expected


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("3", int, 3),
        (" -3 ", int, -3),
        (3.0, int, 3),
        (3, float, 3.0),
        ("2.5e1", float, 25.0),
        (3, str, "3"),
        ("True", bool, True),
        ("[1, 2]", list[int], [1, 2]),
        (["1", 2.0], list[int], [1, 2]),
        ('{"a": 1}', dict[str, float], {"a": 1.0}),
        ("null", int | None, None),
        ("null", str | None, "null"),
        ("3", int | str, "3"),
        ("3", Literal[1, 3], 3),
        ("left", Side, Side.LEFT),
        ({"x": "1"}, Point, Point(1, 0)),
    ],
)
def test_coerce_what_loses_nothing(value, hint, expected) -> None:
    result = coerce(value, hint, "a")
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("abc", int),
        (3.5, int),
        (float("inf"), int),
        (True, int),
        ("1_000", int),
        ("9" * 5000, int),
        (2**53 + 1, float),
        (10**400, float),
        ("nan", float),
        (1.5, str),
        (None, str),
        (1, bool),
        ("yes", bool),
        ("[1", list[int]),
        ([1, "x"], list[int]),
        ({"a": "x"}, dict[str, int]),
        ("up", Side),
        (True, Literal[1]),
        ({"y": 1}, Point),
        ({"x": 1, "z": 1}, Point),
        ({"x": -1}, Point),
        ("x", int | None),
    ],
)
def test_coerce_what_would_lose_something_is_refused(value, hint) -> None:
    with pytest.raises(WrongValue, match=r"^a"):
        coerce(value, hint, "a")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(JSON, st.sampled_from([str, int, float, bool, list[int], dict[str, Any], Side, Point, int | None, Literal[1]]))
def test_coerce_is_idempotent_and_raises_only_wrong_value(value, hint) -> None:
    try:
        result = coerce(value, hint, "a")
    except WrongValue:
        return
    if not isinstance(result, Side | Point):
        assert coerce(result, hint, "a") == result


def test_tools_get_typed_arguments_and_give_text() -> None:
    assert one("look", where="left", times="2") == ("left 2", 0)
    assert one("wait", seconds=2) == ('{"waited": 2.0}', 0)
    assert one("leave", right=True) == ("done", 0)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("lok", {}, ["no tool 'lok'", "did you mean 'look'"]),
        ("", {}, ["no tool ''"]),
        ("__class__", {}, ["no tool"]),
        ("answer", {"text": "42"}, ["no tool 'answer'"]),
        ("look", {}, ["lacks the argument 'where'", 'where: "left" or "right"', "times: integer (optional)"]),
        ("look", {"where": "left", "time": 1}, ["no argument 'time'", "did you mean 'times'"]),
        ("look", {"where": "up"}, ["where must be one of", '"up"']),
        ("look", {"where": "left", "times": "abc"}, ["times must be an integer", '"abc"']),
        ("fail", {"mine": True}, ["try the other"]),
    ],
)
def test_mistakes_in_a_call_are_told_to_the_model(name, arguments, words) -> None:
    text, errors = one(name, **arguments)
    assert errors == 1 and text.startswith("Error: ")
    for word in words:
        assert word in text


def test_malformed_call_is_told_with_how_the_tool_is_called() -> None:
    env = Room()
    begin(env)
    result = asyncio.run(env.step(parse('<tool_call>{"name": "look", "arguments": {', "hermes")))
    assert "bad JSON" in result.messages[0]["content"] and "It is look(where: " in result.messages[0]["content"]
    assert not result.terminated and result.info == {"tool_calls": 1, "tool_errors": 1}


def test_arguments_nested_too_deeply_are_told_to_the_model() -> None:
    deep: list = []
    for _ in range(2000):
        deep = [deep]
    text, errors = one("look", where=deep)
    assert errors == 1 and "nested too deeply" in text


def test_other_exceptions_of_a_tool_propagate() -> None:
    with pytest.raises(ZeroDivisionError):
        one("fail", mine=False)


def test_several_calls_run_in_order_until_the_episode_ends() -> None:
    env = Room()
    begin(env)
    calls = [
        ToolCall(name="wait", arguments={"seconds": 1}, id="a"),
        ToolCall(name="look", arguments={"where": "right"}, id="b"),
        ToolCall(name="leave", arguments={"right": True}, id="c"),
        ToolCall(name="look", arguments={"where": "left"}, id="d"),
    ]
    result = call(env, *calls)
    assert [message["tool_call_id"] for message in result.messages] == ["a", "b", "c", "d"]
    assert result.messages[3]["content"].startswith("Not run")
    assert (result.reward, result.terminated) == (1.25, True)
    assert env.seen == [(Side.RIGHT, 1, None)]
    assert call(env, calls[1]).reward == 0.0


def test_turn_without_call_ends_the_episode_with_the_answers_reward() -> None:
    env = Room()
    begin(env)
    assert (say(env, "41").reward, say(env, "41").terminated) == (0.0, True)
    assert say(env, "6 * 7</think>42").reward == 1.0


def test_answer_may_be_async_and_may_go_on() -> None:
    class Asking(ToolEnv):
        def reset(self, task: Task) -> list:
            return [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

        async def answer(self, text: str) -> StepResult:  # type: ignore[override]
            self.reward(0.5)
            return StepResult(messages=[{"role": "user", "content": "Use a tool."}])

    env = Asking()
    assert len(begin(env).messages) == 2
    result = say(env, "hm")
    assert (result.reward, result.terminated, result.info["tool_calls"]) == (0.5, False, 0)
    assert "nor any other" in call(env, ToolCall(name="x")).messages[0]["content"]


def test_async_reset_and_inherited_tools() -> None:
    class Cellar(Room):
        async def reset(self, task: Task) -> Observation:  # type: ignore[override]
            observation: Any = super().reset(task)
            return Observation(messages=observation.messages, info={"depth": 1})

        @tool
        def dig(self) -> str:
            """Digs."""
            return "a bone"

        def fail(self, mine: bool) -> str:
            """No tool any more."""
            return ""

    observation = asyncio.run(Cellar().reset(Task(index=0, seed=0, data={})))
    assert [entry["function"]["name"] for entry in observation.tools] == ["look", "wait", "leave", "dig"]
    assert "dig" not in Room.tool_schemas


def test_reset_that_gives_nothing_is_refused() -> None:
    class Silent(ToolEnv):
        def reset(self, task: Task) -> None:
            return None

    with pytest.raises(TypeError, match=r"Silent\.reset gave a NoneType"):
        begin(Silent())
    with pytest.raises(NotImplementedError, match="ToolEnv needs a method reset"):
        begin(ToolEnv())


def untyped(self, a):
    """Says."""


def several(self, *a: int):
    """Says."""


def silent(self, a: int):
    pass


def strange(self, a: bytes):
    """Says."""


def unknown(self, a: "Nowhere"):  # type: ignore[name-defined]  # noqa: F821
    """Says."""


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (untyped, "parameter a has no type; write a: T"),
        (several, "given by name"),
        (silent, "needs a docstring"),
        (strange, "a: bytes has no JSON schema; take str"),
        (unknown, "cannot be resolved"),
    ],
)
def test_tool_that_cannot_be_told_about_is_refused_with_its_class(method, words) -> None:
    with pytest.raises(TypeError, match=rf"Bad\.{method.__name__}: .*{words}"):
        type("Bad", (ToolEnv,), {"say": tool(method)})


def test_tool_of_another_kind_or_name_is_refused() -> None:
    def close(self) -> str:
        """Closes."""
        return ""

    with pytest.raises(TypeError, match=r"Bad\.close: ToolEnv has a close"):
        type("Bad", (ToolEnv,), {"close": tool(close)})
    with pytest.raises(TypeError, match=r"Bad\.f: a tool is a plain method; take away @staticmethod"):
        type("Bad", (ToolEnv,), {"f": staticmethod(tool(close))})
    with pytest.raises(TypeError, match="nearest to the def"):
        tool(staticmethod(close))


def test_call_text_comes_back_as_the_call() -> None:
    env = Room()
    for format in ("hermes", "llama", "xml"):
        action = parse(in_format(env.call_text("look", "So:", where="left"), format), format)
        (made,) = action.tool_calls
        assert (action.content, made.name, made.arguments) == ("So:", "look", {"where": "left"})
        assert in_format("no call", format) == "no call"
    written = render([ToolCall(name="look", arguments={"where": "left"})], "xml")
    assert in_format(written, "xml") == written


def test_text_with_half_of_a_surrogate_pair_is_no_list() -> None:
    with pytest.raises(WrongValue, match="must be a list"):
        coerce(r'["\ud800"]', list[str], "names")
