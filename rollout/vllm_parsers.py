"""vLLM's own parsers of tool calls, by the names of its registry. Importing this imports vllm, which takes seconds."""

import json
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from conf.errors import ConfigError
from conf.imports import nearest
from rollout.environment import Tool, ToolCall


def parser_names() -> list[str]:
    return list(ToolParserManager.list_registered())


def parse(text: str, name: str, tokenizer: Any, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:
    """The content and the calls that vLLM's parser `name` finds in a turn.

    Where it fails on a text there is one call with an error; where it gives up on one, as most do when a single call is
    malformed, all of the text is content. Raises ConfigError when there is no such parser, or the tokenizer lacks what
    it needs.
    """
    if name not in parser_names():
        raise ConfigError(f"tool format vllm:{name}: vLLM has no parser {name!r}{nearest(name, parser_names())}")
    if tokenizer is None:
        raise ConfigError(f"tool format vllm:{name}: needs the model's tokenizer")
    request = ChatCompletionRequest(model="", messages=[], tools=list(tools) or None)
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    except Exception as error:
        raise ConfigError(
            f"tool format vllm:{name}: its parser does not fit {type(tokenizer).__name__}: {error}"
        ) from error
    try:
        found = parser.extract_tool_calls(text, request)
    except Exception as error:  # of many authors; none says what it may raise
        return text, [ToolCall(name="", error=f"vLLM's parser {name} failed: {type(error).__name__}: {error}")]
    return found.content or "", [_take(call.function.name, call.function.arguments) for call in found.tool_calls]


def _take(name: str, arguments: str) -> ToolCall:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, error=f"bad JSON: {error}")
    if not isinstance(value, dict):
        return ToolCall(name=name, error='"arguments" must be an object with a value for each argument')
    return ToolCall(name=name, arguments=value)
