"""A function's parameters as JSON schema, and values from a model checked against them.

From type hints: str, int, float, bool, None, Any, list, dict, Literal, Enum, unions and dataclasses of these.
"""

import dataclasses
import enum
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
SUPPORTED = "str, int, float, bool, list[T], dict[str, T], Literal, Enum, T | None or a dataclass"


class WrongValue(Exception):
    """A value does not fit its type. The text is for the model: what was wanted and what was found."""


class UnknownType(Exception):
    """No schema is known for a type."""


def schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises UnknownType."""
    if hint is Any:
        return {}
    if hint in NAMES:
        return {"type": NAMES[hint]}
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema(member) for member in arguments]}
    if origin is Literal:
        return _choice(list(arguments))
    if origin is list and len(arguments) <= 1:
        return {"type": "array", "items": schema(arguments[0])} if arguments else {"type": "array"}
    if origin is dict and (not arguments or arguments[0] is str):
        return {"type": "object", "additionalProperties": schema(arguments[1])} if arguments else {"type": "object"}
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint])
    if inspect.isclass(hint) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = [field for field in dataclasses.fields(hint) if field.init]
        return {
            "type": "object",
            "properties": {field.name: schema(hints[field.name]) for field in fields},
            "required": [field.name for field in fields if _required(field)],
            "additionalProperties": False,
        }
    raise UnknownType(f"{describe_hint(hint)} has no JSON schema; take {SUPPORTED}")


def coerce(value: Any, hint: Any, name: str) -> Any:
    """The value as its type has it, changed only where nothing is lost: "3" and 3.0 are the integer 3, "abc" is none.

    Text that holds JSON is taken for a list, an object or a boolean. Raises WrongValue, which calls the value `name`.
    """
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return value
    if hint in NAMES:
        return _scalar(value, hint, name)
    if origin in (Union, types.UnionType):
        return _one_of(value, arguments, hint, name)
    if origin is Literal or (inspect.isclass(hint) and issubclass(hint, enum.Enum)):
        choices = {member.value: member for member in hint} if origin is not Literal else {a: a for a in arguments}
        for choice, member in choices.items():
            if type(value) is type(choice) and value == choice:
                return member
        for choice, member in choices.items():
            if isinstance(value, str) and not isinstance(choice, str) and value.strip() == json.dumps(choice):
                return member
        raise wrong(name, f"one of {', '.join(json.dumps(c, ensure_ascii=False) for c in choices)}", value)
    if isinstance(value, str):
        value = _from_json(value)
    if origin is list:
        if not isinstance(value, list):
            raise wrong(name, "a list", value)
        return [coerce(item, arguments[0] if arguments else Any, f"{name}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    if dataclasses.is_dataclass(hint):
        return _dataclass(value, hint, name)
    return {key: coerce(item, arguments[1] if arguments else Any, f"{name}[{key!r}]") for key, item in value.items()}


def describe_hint(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) and not get_args(hint) else str(hint).replace("typing.", "")


def wrong(name: str, wanted: str, found: Any) -> WrongValue:
    shown = json.dumps(found, ensure_ascii=False, default=str)
    return WrongValue(f"{name} must be {wanted}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _choice(values: list[Any]) -> dict[str, Any]:
    kinds = {type(value) for value in values}
    if not kinds <= NAMES.keys() or float in kinds:
        raise UnknownType(f"the choices {values} must be text, integers, booleans or None")
    return {"type": NAMES[kinds.pop()], "enum": values} if len(kinds) == 1 else {"enum": values}


def _scalar(value: Any, hint: Any, name: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = value.strip() if isinstance(value, str) else ""
    if hint is str:
        if isinstance(value, str):
            return value
        if number and isinstance(value, int):
            return str(value)
        raise wrong(name, "text", value)
    if hint is bool:
        if isinstance(value, bool):
            return value
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise wrong(name, "true or false", value)
    if hint is int:
        if number and isinstance(value, int):
            return value
        if number and math.isfinite(value) and value == int(value):
            return int(value)
        if INTEGER.fullmatch(text):
            return int(text)
        raise wrong(name, "an integer", value)
    if hint is float:
        result = math.nan
        if NUMBER.fullmatch(text):
            result = float(text)
        elif number:
            try:
                result = float(value)
            except OverflowError:
                result = math.inf
        if math.isfinite(result) and (not number or result == value):
            return result
        raise wrong(name, "a number", value)
    if value is None or text == "null":
        return None
    raise wrong(name, "null", value)


def _one_of(value: Any, members: tuple[Any, ...], hint: Any, name: str) -> Any:
    """A member that the value fits as it is comes before one that it can be made to fit."""
    for member in members:
        if type(value) is member:
            return value
    reasons = []
    for member in members:
        try:
            return coerce(value, member, name)
        except WrongValue as error:
            reasons.append(str(error))
    if len(reasons) == 2 and type(None) in members:
        raise WrongValue(reasons[members[0] is type(None)] + " (it may also be null)")
    raise wrong(name, describe_hint(hint), value)


def _dataclass(value: dict[str, Any], hint: Any, name: str) -> Any:
    hints = typing.get_type_hints(hint)
    fields = {field.name: field for field in dataclasses.fields(hint) if field.init}
    for key in value:
        if key not in fields:
            raise WrongValue(f"{name} has no {key!r}; it has {', '.join(fields)}")
    for key, field in fields.items():
        if key not in value and _required(field):
            raise WrongValue(f"{name} lacks {key!r}")
    try:
        return hint(**{key: coerce(item, hints[key], f"{name}.{key}") for key, item in value.items()})
    except (TypeError, ValueError) as error:  # what its own __post_init__ refuses
        raise WrongValue(f"{name}: {error}") from None


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
        return value
    except (ValueError, RecursionError):
        return text


def read_docstring(function: Callable[..., Any], names: list[str]) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each of the parameters `names`.

    Parameters are lines `name: text`, or `name (type): text` under "Args:"; lines indented further go on. What comes
    under another section (Returns:, Raises:, ...) is left out.
    """
    about: list[str] = []
    described: dict[str, str] = {}
    current, current_indent, section = "", 0, ""
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        indent, line = len(line) - len(line.lstrip()), line.strip()
        heading = re.fullmatch(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):", line)
        entry = re.match(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if heading and indent == 0:
            section, current = heading[1], ""
        elif section and section[0] not in "AP":
            continue
        elif entry and entry[1] in names and not (current and indent > current_indent):
            current, current_indent = entry[1], indent
            described[current] = entry[2]
        elif current and line and indent > current_indent:
            described[current] = f"{described[current]} {line}".strip()
        elif not section:
            current = ""
            about.append(line)
    paragraphs = re.split(r"\n\n+", "\n".join(about).strip())
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs), described
