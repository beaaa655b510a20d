"""Tools that another package or process describes by JSON schemas, offered like those of a ToolEnv."""

import json
from collections.abc import Iterable
from typing import Any

import jsonschema
import referencing

from conf.imports import nearest
from rollout.environment import Action, StepResult, Tool, ToolCall
from rollout.tools import ToolEnv, ToolError, describe_usage

MAX_ERROR_CHARS = 300


class ForeignTools(ToolEnv):
    """A ToolEnv whose tools are found at run time: `offer` them in `reset`, and run them in `call_tool`.

    Arguments are checked against the schemas before `call_tool` sees them. info has `invalid`, 1.0 in a turn with a
    call that was answered with an error.
    """

    _offered: dict[str, Tool]

    def offer(self, tools: Iterable[Tool]) -> list[Tool]:
        """Takes these as the tools of the episode. They are given back as a list, for the Observation."""
        self._offered = {tool["function"]["name"]: tool for tool in tools}
        return list(self._offered.values())

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """What the model reads. Raises ToolError for what the model did wrong."""
        raise NotImplementedError

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        result.info.setdefault("invalid", float(result.info["tool_errors"] > 0))
        return result

    async def _run(self, call: ToolCall) -> str:
        return await self.call_tool(call.name, checked_arguments(call, self._offered))


def as_tool(name: str, description: str, parameters: dict[str, Any]) -> Tool:
    """A tool as chat templates take it; `parameters` is the JSON schema of an object."""
    schema = {"type": "object", "properties": {}} | parameters
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def checked_arguments(call: ToolCall, tools: dict[str, Tool]) -> dict[str, Any]:
    """The arguments of a call, which fit the schema of its tool. Raises ToolError: what would be right.

    Text is read as JSON where the schema wants no text: some formats of calls write every argument as text.
    """
    name = call.name[:60]
    if not call.error and call.name not in tools:
        raise ToolError(f"there is no tool {name!r}{nearest(name, list(tools)) or ', nor any other'}")
    usage = f" {describe_usage(tools[call.name])}" if call.name in tools else ""
    if call.error:
        raise ToolError(f"this call could not be read: {call.error}.{usage}")
    schema = tools[call.name]["function"]["parameters"]
    properties = schema.get("properties", {})
    # Most schemas that list properties leave additionalProperties out, and mean that there are no others.
    if schema.get("additionalProperties") is False or (properties and "additionalProperties" not in schema):
        for key in call.arguments:
            if key not in properties:
                hint = nearest(key[:60], list(properties)) or "; it takes none"
                raise ToolError(f"{name} has no argument {key[:60]!r}{hint}.{usage}")
    arguments = {key: _from_text(value, properties.get(key, {})) for key, value in call.arguments.items()}
    # The registry is given so that references are never looked up on the network.
    wrong = jsonschema.Draft202012Validator(schema, registry=referencing.Registry()).iter_errors(arguments)
    if error := jsonschema.exceptions.best_match(wrong):
        where = ".".join(map(str, error.absolute_path))
        said = f"{where}: {error.message}" if where else error.message
        raise ToolError(f"{name}: {said[:MAX_ERROR_CHARS]}.{usage}")
    return arguments


def _from_text(value: Any, schema: dict[str, Any]) -> Any:
    if not isinstance(value, str) or _takes_text(schema):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _takes_text(schema: dict[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_takes_text(member) for member in schema["anyOf"])
    kinds = schema.get("type", "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds) and "$ref" not in schema
