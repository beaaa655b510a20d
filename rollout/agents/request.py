"""What the request for a chat completion asks, checked: whatever the run cannot give is refused by its name.

Of sampling a request decides how many tokens at most, and a `seed`, which makes it another request; temperature and
top_p are the run's, since what is sampled is trained. tool_choice is auto, or none: the tools are shown, but the answer
is not searched for calls. The role developer is read as system. Contents may be lists of texts, which are joined.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from conf.imports import nearest
from rl.types import MAIN_AGENT, Sampling
from rollout.environment import Message, Tool

MODEL = "policy"
ROLES = ("system", "user", "assistant", "tool")
# What else may be said, as long as it changes nothing.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "response_format": {"type": "text"},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "store": False,
}
KNOWN = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "user",
    "logprobs",
    "stream",
    "stream_options",
)
ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
Types = tuple[type, ...]
NUMBER: Types = (int, float)
INTEGER: Types = (int,)
FLAG: Types = (bool,)
TEXT: Types = (str,)
OBJECT: Types = (dict,)
NAMES = {NUMBER: "a number", INTEGER: "an integer", FLAG: "true or false", TEXT: "a string", OBJECT: "an object"}


class Refused(Exception):
    """An answer that is an error, as OpenAI's clients read it. `retry`: whether asking again may help."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry: bool = False
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request. `messages` are as chat templates take them. keys[i] names its tools and first i messages."""

    agent: str
    messages: list[Message]
    keys: list[bytes]
    tools: list[Tool]
    calls_tools: bool
    max_tokens: int
    logprobs: bool
    stream: bool
    include_usage: bool


def read(body: bytes, sampling: Sampling) -> Asked:
    """The request in `body`, of a run that samples so. Raises Refused."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, found {shown(found)}")
    given = {name: value for name, value in found.items() if value is not None}
    for name, value in given.items():
        require_known(name, value)
    require_same("temperature", given, sampling.temperature)
    require_same("top_p", given, sampling.top_p)
    for name, kinds in (("seed", INTEGER), ("user", TEXT)):
        take(given, name, kinds, None)
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise Refused(
            400, f"tool_choice={shown(choice)}: must be auto or none, as nothing forces a call", "tool_choice"
        )
    tools = [as_tool(tool, index) for index, tool in enumerate(as_list(given.get("tools", []), "tools"))]
    messages = [as_message(message, index) for index, message in enumerate(as_list(given.get("messages"), "messages"))]
    if not messages:
        raise Refused(400, "messages must hold at least one message, found none", "messages")
    agent = as_agent(given.get("model"))
    options = take(given, "stream_options", OBJECT, {})
    if unknown := [name for name in options if name != "include_usage"]:
        raise Refused(
            400, f"stream_options.{unknown[0]} is not known; include_usage is", f"stream_options.{unknown[0]}"
        )
    try:
        keys = [digest(b"", [agent, tools])]
        for message in messages:
            keys.append(next_key(keys[-1], message))
    except UnicodeEncodeError as error:
        raise Refused(400, f"messages hold half of a surrogate pair: {error}", "messages") from error
    return Asked(
        agent=agent,
        messages=messages,
        keys=keys,
        tools=tools,
        calls_tools=bool(tools) and choice == "auto",
        max_tokens=min(
            read_limit(given, name, sampling.max_tokens) for name in ("max_tokens", "max_completion_tokens")
        ),
        logprobs=take(given, "logprobs", FLAG, False),
        stream=take(given, "stream", FLAG, False),
        include_usage=take(options, "include_usage", FLAG, False),
    )


def next_key(key: bytes, message: Message) -> bytes:
    """The key of a conversation with one more message. Two ways of writing the same arguments of a call are one."""
    return digest(key, message)


def digest(key: bytes, value: Any) -> bytes:
    return hashlib.blake2b(key + ENCODER.encode(value).encode(), digest_size=16).digest()


def require_known(name: str, value: Any) -> None:
    if name in NEUTRAL:
        if value != NEUTRAL[name] or isinstance(value, bool) != isinstance(NEUTRAL[name], bool):
            raise Refused(
                400, f"{name}={shown(value)}: this endpoint takes only {shown(NEUTRAL[name])}; leave it out", name
            )
    elif name not in KNOWN:
        raise Refused(400, f"unknown parameter {name!r}{nearest(name, [*KNOWN, *NEUTRAL])}; leave it out", name)


def require_same(name: str, given: dict[str, Any], own: float) -> None:
    value = take(given, name, NUMBER, own)
    if value != own:
        raise Refused(
            400,
            f"{name}={shown(value)}, but this run samples with {name}={own:g}, and trains on what it samples; "
            "leave it out",
            name,
        )


def read_limit(given: dict[str, Any], name: str, most: int) -> int:
    value: int = take(given, name, INTEGER, most)
    if not 1 <= value <= most:
        raise Refused(400, f"{name}={value}: must be from 1 to {most}, the run's rollout.max_tokens", name)
    return value


def take(given: dict[str, Any], name: str, kinds: Types, default: Any) -> Any:
    """The value of that name, which must be of one of these types; null is the default."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not FLAG):
        raise Refused(400, f"{name} must be {NAMES[kinds]}, found {shown(value)}", name)
    return value


def as_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(400, f"{name} must be a list, found {shown(value)}", name)
    return value


def as_agent(model: Any) -> str:
    """Who asks: "policy" is the main agent, "policy:NAME" the agent NAME."""
    name, _, agent = model.partition(":") if isinstance(model, str) else ("", "", "")
    if name != MODEL:
        what = f"model={shown(model)}: the model here is {MODEL!r} (or '{MODEL}:NAME' for the agent NAME)"
        raise Refused(404, what, "model", "model_not_found")
    return agent or MAIN_AGENT


def as_tool(tool: Any, index: int) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        what = f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, found {shown(tool)}'
        raise Refused(400, what, "tools")
    return {"type": "function", "function": function}


def as_message(value: Any, index: int) -> Message:
    """A message with its role and text, and what belongs to calls; parts that are null or empty are left out."""
    where = f"messages[{index}]"
    if not isinstance(value, dict):
        raise Refused(400, f"{where} must be an object with role and content, found {shown(value)}", where)
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        raise Refused(400, f"{where}.role must be one of {', '.join(ROLES)}, found {shown(role)}", f"{where}.role")
    message: Message = {"role": role, "content": as_text(value.get("content"), role, where)}
    for name, part in value.items():
        if name in ("role", "content") or part is None or part == []:
            continue
        if name == "tool_calls" and role == "assistant":
            message[name] = [as_call(call, f"{where}.{name}[{n}]") for n, call in enumerate(as_list(part, where))]
        elif name in ("name", "tool_call_id") and isinstance(part, str):
            message[name] = part
        else:
            raise Refused(400, f"{where}.{name}={shown(part)} is not taken; leave it out", f"{where}.{name}")
    return message


def as_text(value: Any, role: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if bad := [part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)]:
        what = f"{where}.content must be a string or a list of texts, found {shown(bad[0])}"
        raise Refused(400, what, f"{where}.content")
    return "".join(str(text) for text in texts)


def as_call(call: Any, where: str) -> dict[str, Any]:
    """As chat templates take it: arguments as the object that they are, where they can be read."""
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(call.get("id"), str)
    ):
        raise Refused(
            400, f"{where} must have an id and a function with name and arguments, found {shown(call)}", where
        )
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            read_arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            read_arguments = None
        arguments = read_arguments if isinstance(read_arguments, dict) else arguments
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def shown(value: Any) -> str:
    """A value as JSON, its beginning."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
