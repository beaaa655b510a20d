"""The short way to an environment: a class whose methods, marked with `tool`, are what the model may call."""

import enum
import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from conf.imports import nearest
from rollout.environment import Action, Message, Observation, StepResult, Task, Tool, ToolCall
from rollout.parameters import SUPPORTED, UnknownType, WrongValue, coerce, read_docstring, schema
from rollout.tool_calls import render, without_thinking

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "_is_tool"
CALLS_AS = "hermes"  # how an oracle writes calls (rollout.tool_calls)


class ToolError(Exception):
    """Raise it in a tool for what the model did wrong: it reads the text, and the episode goes on."""


def tool(function: Function) -> Function:
    """Marks a method of a ToolEnv, sync or async, as one that the model may call.

    Every parameter needs a type, and the docstring says what the model is told: first what the tool does, then
    `name: text` for each parameter worth a word.
    """
    if not inspect.isfunction(function):
        raise TypeError(f"@tool marks plain methods, not a {type(function).__name__}; put @tool nearest to the def")
    setattr(function, MARK, True)
    return function


@dataclass(kw_only=True)
class Turn:
    """What the tools of one turn have done so far."""

    reward: float = 0.0
    finished: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class ToolEnv:
    """An environment of tools. Subclasses write `reset` and the tools, and `answer` where a text ends the episode.

    `reset(task)` gives the first user message, or the first messages, or a whole Observation (whose `tools`, when it
    names none, are all of them). What a tool returns is what the model reads: text as it is, anything else as JSON.

    What the model gets wrong in a call is told to it and never raises; info counts `tool_calls` and `tool_errors` of
    each turn. An exception from a tool other than ToolError is the episode's.
    """

    tool_schemas: ClassVar[dict[str, Tool]] = {}
    _hints: ClassVar[dict[str, dict[str, Any]]] = {}
    _turn: Turn

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError for a tool that the model could not be told about."""
        super().__init_subclass__(**kwargs)
        cls.tool_schemas, cls._hints = {}, {}
        for name in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
            method = inspect.getattr_static(cls, name)
            inner = getattr(method, "__func__", None)
            if getattr(inner, MARK, False):
                raise TypeError(f"{cls.__name__}.{name}: a tool is a plain method; take away @{type(method).__name__}")
            if getattr(method, MARK, False):
                if hasattr(ToolEnv, name):
                    raise TypeError(
                        f"{cls.__name__}.{name}: ToolEnv has a {name} of its own; give the tool another name"
                    )
                cls.tool_schemas[name], cls._hints[name] = describe_tool(cls.__name__, method)
        if "reset" in vars(cls):
            cls.reset = _observed(vars(cls)["reset"])  # type: ignore[method-assign]

    def reset(self, task: Task) -> Any:
        raise NotImplementedError(f"{type(self).__name__} needs a method reset(self, task)")

    def answer(self, text: str) -> float | StepResult:
        """Called with a turn that calls no tool (its thinking left out). Gives the reward, and the episode is over.

        May be async. A StepResult is taken as it is: by it the episode may go on.
        """
        return 0.0

    def close(self) -> None:
        return None

    def finish(self, reward: float = 0.0) -> None:
        """Ends the episode with the current turn, for which there is `reward`."""
        self._turn.reward += reward
        self._turn.finished = True

    def reward(self, amount: float) -> None:
        """Adds to the reward of the current turn."""
        self._turn.reward += amount

    def note(self, **info: Any) -> None:
        """Adds to the info of the current turn."""
        self._turn.info |= info

    async def step(self, action: Action) -> StepResult:
        self._turn = turn = Turn()
        info = {"tool_calls": len(action.tool_calls), "tool_errors": 0}
        if not action.tool_calls:
            outcome = await _awaited(self.answer(without_thinking(action.content)))
            if isinstance(outcome, StepResult):
                outcome.reward += turn.reward
                outcome.terminated |= turn.finished
                outcome.info = info | turn.info | outcome.info
                return outcome
            return StepResult(reward=turn.reward + outcome, terminated=True, info=info | turn.info)
        messages: list[Message] = []
        for call in action.tool_calls:
            if turn.finished:
                text = "Not run: the episode has ended."
            else:
                try:
                    text = await self._run(call)
                except ToolError as error:
                    info["tool_errors"] += 1
                    text = f"Error: {error}"
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
        info |= turn.info
        return StepResult(messages=messages, reward=turn.reward, terminated=turn.finished, info=info)

    async def _run(self, call: ToolCall) -> str:
        """Raises ToolError for a call that does not fit."""
        known = call.name in self.tool_schemas
        if call.error:
            raise ToolError(
                f"this call could not be read: {call.error}." + (f" {self._usage(call.name)}" if known else "")
            )
        if not known:
            if not self.tool_schemas:
                raise ToolError(f"there is no tool {call.name[:60]!r}, nor any other")
            raise ToolError(f"there is no tool {call.name[:60]!r}{nearest(call.name[:60], list(self.tool_schemas))}")
        function = self.tool_schemas[call.name]["function"]["parameters"]
        hints = self._hints[call.name]
        for name in call.arguments:
            if name not in hints:
                hint = nearest(name[:60], list(hints)) or "; it takes none"
                raise ToolError(f"{call.name} has no argument {name[:60]!r}{hint}. {self._usage(call.name)}")
        for name in function["required"]:
            if name not in call.arguments:
                raise ToolError(f"{call.name} lacks the argument {name!r}. {self._usage(call.name)}")
        try:
            arguments = {name: coerce(value, hints[name], name) for name, value in call.arguments.items()}
        except WrongValue as error:
            raise ToolError(f"{call.name}: {error}. {self._usage(call.name)}") from None
        except RecursionError:
            raise ToolError(f"{call.name}: the arguments are nested too deeply. {self._usage(call.name)}") from None
        return as_text(await _awaited(getattr(self, call.name)(**arguments)))

    def _usage(self, name: str) -> str:
        return describe_usage(self.tool_schemas[name])

    def call_text(self, name: str, content: str = "", **arguments: Any) -> str:
        """The text of a turn that calls one tool, for `oracle`: as Hermes, whatever the model's format is."""
        return render([ToolCall(name=name, arguments=arguments)], CALLS_AS, content)


def describe_tool(owner: str, method: Callable[..., Any]) -> tuple[Tool, dict[str, Any]]:
    """A method as chat templates take a tool, and the types of its parameters. Raises TypeError: what to write."""
    where = f"{owner}.{method.__name__}"
    if not (method.__doc__ or "").strip():
        raise TypeError(f'{where}: a tool needs a docstring; write """What it does.""" under its def')
    try:
        hints = typing.get_type_hints(method)
    except Exception as error:
        raise TypeError(
            f"{where}: its types cannot be resolved: {error}; define them before, at module level"
        ) from None
    parameters = list(inspect.signature(method).parameters.values())[1:]
    properties: dict[str, Any] = {}
    about, described = read_docstring(method, [parameter.name for parameter in parameters])
    for parameter in parameters:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{where}: {parameter} cannot be given by name; write a parameter for each argument")
        if name not in hints:
            raise TypeError(f"{where}: the parameter {name} has no type; write {name}: T with T {SUPPORTED}")
        try:
            properties[name] = schema(hints[name])
        except UnknownType as error:
            raise TypeError(f"{where}: the parameter {name}: {error}") from None
        if name in described:
            properties[name]["description"] = described[name]
        default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
        if isinstance(default, str | int | float):
            properties[name]["default"] = default
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    function = {
        "name": method.__name__,
        "description": about,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}, {name: hints[name] for name in properties}


def describe_usage(tool: Tool) -> str:
    """The call as one would write it, for messages to the model."""
    function = tool["function"]
    required = function["parameters"].get("required", [])
    shown = [
        f"{key}: {_shown_type(value)}" + ("" if key in required else " (optional)")
        for key, value in function["parameters"].get("properties", {}).items()
    ]
    return f"It is {function['name']}({', '.join(shown)})."


def _shown_type(parameter: dict[str, Any]) -> str:
    if "enum" in parameter:
        return " or ".join(json.dumps(choice, ensure_ascii=False) for choice in parameter["enum"])
    if "anyOf" in parameter:
        return " or ".join(_shown_type(member) for member in parameter["anyOf"])
    return str(parameter.get("type", "any"))


def as_text(value: Any) -> str:
    """What the model reads of a tool's result."""
    if isinstance(value, str):
        return value
    return "done" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _observed(reset: Callable[..., Any]) -> Callable[..., Any]:
    """`reset` of a subclass, whatever it returns, as one that gives an Observation; async where it was so."""

    def observe(env: ToolEnv, begun: Any) -> Observation:
        if isinstance(begun, str):
            begun = [{"role": "user", "content": begun}]
        if isinstance(begun, list):
            begun = Observation(messages=begun)
        if not isinstance(begun, Observation):
            kind = type(begun).__name__
            raise TypeError(
                f"{type(env).__name__}.reset gave a {kind}; wanted text, a list of messages or an Observation"
            )
        begun.tools = begun.tools or list(env.tool_schemas.values())
        return begun

    def begin(self: ToolEnv, task: Task) -> Any:
        self._turn = Turn()
        begun = reset(self, task)
        return wait(self, begun) if inspect.isawaitable(begun) else observe(self, begun)

    async def wait(self: ToolEnv, begun: Any) -> Observation:
        return observe(self, await begun)

    begin.__doc__ = reset.__doc__
    return begin


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
