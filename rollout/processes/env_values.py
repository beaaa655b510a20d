"""What an environment may return, checked: the same functions in its own process and in ours.

Imports nothing heavy. Each check returns a copy, or raises EnvBadValue. `plain` and `revive` carry a checked value
through JSON.
"""

import base64
import binascii
import dataclasses
import json
import reprlib
import sys
from collections.abc import Callable
from typing import Any

from rollout.environment import Message, Observation, StepResult, Tool
from rollout.processes.env_faults import EnvBadValue
from rollout.processes.reward_worker import as_number


def shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def as_reward(value: Any, what: str) -> float:
    """A finite number as a float: bool, int, float, or an array without dimensions."""
    number = as_number(value)
    if number is None:
        raise EnvBadValue(f"{what} must be a finite number, found {shown(value)}")
    return number


def as_json(value: Any, what: str) -> Any:
    """A copy of a value that JSON can hold; arrays become lists, their scalars numbers."""
    if isinstance(value, int) and not -sys.float_info.max <= value <= sys.float_info.max:
        raise EnvBadValue(f"{what} is an integer beyond all floats")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise EnvBadValue(f"{what} must have str keys, found {shown(key)}")
        return {key: as_json(part, f"{what}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part, f"{what}[{i}]") for i, part in enumerate(value)]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return as_json(value.tolist(), what)
    raise EnvBadValue(
        f"{what} must hold only what JSON can (numbers, str, bool, None, list, dict), found {shown(value)}"
    )


def as_rendered(value: Any, what: str) -> Any:
    """A copy of what a chat template will render: its texts must be such as UTF-8 can hold."""
    copy = as_json(value, what)
    try:
        json.dumps(copy, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise EnvBadValue(f"{what} must hold no half of a surrogate pair, found {shown(copy)}") from None
    return copy


def as_messages(value: Any, what: str) -> list[Message]:
    """Messages with the str `role` and `content`, and what else a chat template takes."""
    if not isinstance(value, list | tuple):
        raise EnvBadValue(f"{what} must be a list of messages, found {shown(value)}")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise EnvBadValue(f"{what}[{i}] must be a dict with role and content, found {shown(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = shown(message[key]) if key in message else f"no such key in {shown(message)}"
                parts = "; a list of parts is not taken: join their text" if isinstance(message.get(key), list) else ""
                raise EnvBadValue(f"{what}[{i}][{key!r}] must be a str, found {found}{parts}")
    messages: list[Message] = as_rendered(value, what)
    return messages


def as_tools(value: Any, what: str) -> list[Tool]:
    if not isinstance(value, list | tuple) or not all(isinstance(tool, dict) for tool in value):
        raise EnvBadValue(f"{what} must be a list of dicts, found {shown(value)}")
    for i, tool in enumerate(value):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wanted = '{"type": "function", "function": {"name": ...}}'
            raise EnvBadValue(f"{what}[{i}] must be {wanted}, found {shown(tool)}")
    tools: list[Tool] = as_rendered(value, what)
    return tools


def as_agent(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EnvBadValue(f"{what} must be a str, found {shown(value)}")
    return value


def as_flag(value: Any, what: str) -> bool:
    """A bool, also that of an array library, and not just something that is true or false in Python's eyes."""
    flag = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if not isinstance(flag, bool):
        raise EnvBadValue(f"{what} must be True or False, found {shown(value)}")
    return flag


def as_info(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvBadValue(f"{what} must be a dict, found {shown(value)}")
    info: dict[str, Any] = as_json(value, what)
    return info


def as_observation(value: Any) -> Observation:
    """What reset returned: an Observation, or only its messages, or only the text of one from the user."""
    if isinstance(value, str):
        value = Observation(messages=[{"role": "user", "content": value}])
    elif isinstance(value, list):
        value = Observation(messages=value)
    if not isinstance(value, Observation):
        raise EnvBadValue(f"reset must return an Observation, a list of messages or a str, found {shown(value)}")
    messages = as_messages(value.messages, "reset: messages")
    if not messages:
        raise EnvBadValue("reset: messages must hold at least one message, found none")
    if not as_agent(value.agent, "reset: agent"):
        raise EnvBadValue("reset: agent must name who acts first, found ''")
    return Observation(
        messages=messages,
        tools=as_tools(value.tools, "reset: tools"),
        agent=value.agent,
        info=as_info(value.info, "reset: info"),
    )


def as_step_result(value: Any) -> StepResult:
    if not isinstance(value, StepResult):
        raise EnvBadValue(f"step must return a StepResult, found {shown(value)}")
    return StepResult(
        messages=as_messages(value.messages, "step: messages"),
        reward=as_reward(value.reward, "step: reward"),
        agent=as_agent(value.agent, "step: agent"),
        terminated=as_flag(value.terminated, "step: terminated"),
        truncated=as_flag(value.truncated, "step: truncated"),
        info=as_info(value.info, "step: info"),
    )


def as_score(value: Any, what: str = "score") -> float | dict[str, float]:
    """The score of all agents, or of each by its name."""
    if not isinstance(value, dict):
        return as_reward(value, what)
    return {as_agent(name, f"{what}: a name"): as_reward(part, f"{what}[{name!r}]") for name, part in value.items()}


def as_result(value: Any) -> float | dict[str, float] | None:
    """What an agent's run returned."""
    return None if value is None else as_score(value, "run")


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise EnvBadValue(f"oracle must return a str, found {shown(value)}")
    return value


def as_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray):
        raise EnvBadValue(f"snapshot must return bytes, found {shown(value)}")
    return bytes(value)


def as_nothing(value: Any) -> None:
    """What restore and close return does not matter."""


CHECKS: dict[str, Callable[[Any], Any]] = {
    "reset": as_observation,
    "step": as_step_result,
    "score": as_score,
    "run": as_result,
    "oracle": as_text,
    "snapshot": as_bytes,
    "restore": as_nothing,
    "close": as_nothing,
}


def plain(value: Any) -> Any:
    """A checked value as JSON holds it."""
    if isinstance(value, Observation | StepResult):
        return dataclasses.asdict(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def revive(method: str, value: Any) -> Any:
    """The checked value of `plain`, from a process that need not be honest: checked again. Raises EnvBadValue."""
    kind = {"reset": Observation, "step": StepResult}.get(method)
    if kind:
        try:
            value = kind(**value)
        except TypeError as error:
            raise EnvBadValue(f"{method}: {error}") from None
    if method == "snapshot":
        try:
            value = base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise EnvBadValue(f"snapshot must return bytes, found {shown(value)}") from None
    return CHECKS[method](value)
