"""Tools and calls in words, for chat templates that have no place for them."""

import json
from collections.abc import Sequence

from conf.errors import ConfigError
from rollout.environment import Message, Tool, ToolCall
from rollout.tool_calls import render

EXAMPLE = ToolCall(name="NAME", arguments={"ARGUMENT": "VALUE"})


def with_tools(messages: Sequence[Message], tools: Sequence[Tool], format: str) -> list[Message]:
    """The messages, the first a system message that ends with the tools and how a call in `format` is written.

    Raises ConfigError for a format that calls cannot be written in (rollout.tool_calls.render).
    """
    told, rest = "", list(messages)
    if rest and rest[0]["role"] == "system":
        told = f"{rest.pop(0)['content']}\n\n"
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told += f"You can call these tools:\n{listed}\nA call is written like this:\n{render([EXAMPLE], format)}"
    return [{"role": "system", "content": told}, *rest]


def with_calls(messages: Sequence[Message], format: str) -> list[Message]:
    """The messages, with the calls of assistants' turns in their text. Raises ConfigError as with_tools."""
    return [_written(message, format) if message.get("tool_calls") else message for message in messages]


def _written(message: Message, format: str) -> Message:
    calls = [
        ToolCall(name=call["function"]["name"], arguments=_arguments(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": render(calls, format, message.get("content") or "")}


def _arguments(given: object) -> dict[str, object]:
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, dict):
        raise ConfigError(f"the arguments of a tool call are {given!r}, not an object")
    return found
