"""A turn's text taken apart into what it says and the tools that it calls, and calls written as such a text."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from conf.errors import ConfigError
from conf.imports import nearest
from rollout.environment import Action, Message, Tool, ToolCall

VLLM = "vllm:"
THINKING_ENDS = "</think>"
MAX_DEPTH = 64  # of arguments: what is nested much deeper cannot be sent to the environment's process
CUT_OFF = "the turn reached its limit on tokens before the call was complete"

CALL, CALL_ENDS = "<tool_call>", "</tool_call>"
FUNCTION_ENDS, PARAMETER_ENDS = "</function>", "</parameter>"
PYTHON_TAG = "<|python_tag|>"
HERMES_EDGE = re.compile(r"</?tool_call>")
XML_OPEN = re.compile(r"<tool_call>|<function=")
XML_EDGE = re.compile(r"</tool_call>|<tool_call>|<function=")
XML_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
XML_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
XML_NAME = re.compile(r"<function=([^<>\n]*)")
JSON_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)')
JSON_CALL = re.compile(r'\{\s*"(?:name|type|arguments|parameters)"\s*:')
ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:')
SPACE = re.compile(r"\s*")


class Span(NamedTuple):
    """A call and where it stands: text[start:end]."""

    start: int
    end: int
    call: ToolCall


def parse(
    text: str, format: str, truncated: bool = False, *, tokenizer: Any = None, tools: Sequence[Tool] = ()
) -> Action:
    """Takes a turn apart. Raises for no text: a call that cannot be read has `error`, and of its name what is there.

    format: hermes, llama, xml, none, or vllm:NAME, which needs the tokenizer, and may need `tools` for the types of
    arguments. xml gives every argument as text. What stands before </think> holds no calls. Calls are numbered call_0,
    call_1, ... within the turn.
    """
    check_format(format)
    if format.startswith(VLLM):
        from rollout import vllm_parsers

        content, calls = vllm_parsers.parse(text, format.removeprefix(VLLM), tokenizer, tools)
        return Action(text=text, content=content, tool_calls=_number(calls), truncated=truncated)
    reply_start = _thinking_end(text)
    spans = READERS[format](text[reply_start:])
    if not spans:
        return Action(text=text, content=text, truncated=truncated)
    last = spans[-1]
    if truncated and last.call.error and reply_start + last.end == len(text):
        last.call.error = CUT_OFF
    pieces, position = [text[:reply_start]], reply_start
    for span in spans:
        pieces.append(text[position : reply_start + span.start])
        position = reply_start + span.end
    content = "".join([*pieces, text[position:]]).strip()
    return Action(text=text, content=content, tool_calls=_number([s.call for s in spans]), truncated=truncated)


def decode(tokenizer: Any, token_ids: Sequence[int], format: str) -> str:
    """Text of a turn. Special tokens are left out; where tool calls may be made of them, only one at the end is."""
    ids, keep = list(token_ids), format == "llama" or format.startswith(VLLM)
    if keep and ids and getattr(tokenizer.added_tokens_decoder.get(ids[-1]), "special", False):
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=not keep)
    return text


def check_format(format: str) -> None:
    """Raises ConfigError for an unknown format. The NAME of vllm:NAME is checked where it is used."""
    if format not in READERS and not (format.startswith(VLLM) and len(format) > len(VLLM)):
        known = [*READERS, "vllm:NAME"]
        raise ConfigError(f"tool format {format!r} is unknown{nearest(format, known)} (one of {', '.join(known)})")


def without_thinking(text: str) -> str:
    """What follows </think>, or all of a text that has none."""
    return text[_thinking_end(text) :]


def render(calls: Sequence[ToolCall], format: str, content: str = "") -> str:
    """The text of a turn that says `content` and makes `calls`, for demonstrations. xml writes text as it is.

    Raises ConfigError for a format that has no calls, or that only vLLM knows.
    """
    if format == "hermes":
        blocks = [f"{CALL}\n{_dump({'name': c.name, 'arguments': c.arguments})}\n{CALL_ENDS}" for c in calls]
        return "\n".join([content] * bool(content) + blocks)
    if format == "llama":
        body = "; ".join(_dump({"name": c.name, "parameters": c.arguments}) for c in calls)
        return f"{content}\n{body}" if content else body
    if format == "xml":
        return "\n".join([content] * bool(content) + [_render_xml(call) for call in calls])
    raise ConfigError(f"tool format {format!r}: calls can be written as hermes, llama or xml")


def detect_format(chat_template: str | None) -> str:
    """The format in which a chat template shows the model its own calls: hermes, llama or xml; none for any other."""
    if not chat_template:
        return "none"
    for arguments in ({"probe_key": "probe_value"}, '{"probe_key": "probe_value"}'):
        rendered = _render_template(chat_template, arguments)
        if "<function=probe_name>" in rendered and "<parameter=probe_key>" in rendered:
            return "xml"
        if re.search(r'<tool_call>\s*\{[^<]*"probe_name"', rendered):
            return "hermes"
        if re.search(r'\{\s*"name":\s*"probe_name",\s*"parameters":\s*"?\{', rendered):
            return "llama"
    return "none"


def _render_template(chat_template: str, arguments: Any) -> str:
    """A conversation with one call by that template; "" when it cannot be rendered."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(reason: str) -> None:
        raise ValueError(reason)

    function = {"name": "probe_name", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call0call", "type": "function", "function": {"name": "probe_name", "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "name": "probe_name", "tool_call_id": "call0call"},
    ]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: _dump(value, options.get("indent"))
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda format: format}
    # A statement of transformers' own, which marks what the model writes.
    source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", chat_template)
    try:
        return environment.from_string(source).render(
            messages=messages,
            tools=[{"type": "function", "function": function}],
            add_generation_prompt=False,
            bos_token="",
            eos_token="",
        )
    except Exception:  # templates refuse what they do not know by raising
        return ""


def _read_hermes(text: str) -> list[Span]:
    spans: list[Span] = []
    start = text.find(CALL)
    while start >= 0:
        body = _skip_space(text, start + len(CALL))
        call, end = _read_json(text, body)
        after = _skip_space(text, end)
        if text.startswith(CALL_ENDS, after):
            after += len(CALL_ENDS)
        elif after < len(text):
            edge = HERMES_EDGE.search(text, body)
            stop = edge.start() if edge else len(text)
            after = edge.end() if edge and edge[0] == CALL_ENDS else stop
            error = call.error or f"there is more than one JSON object before {CALL_ENDS}"
            call = ToolCall(name=_first(JSON_NAME, text[body:stop]), error=error)
        spans.append(Span(start, after, call))
        start = text.find(CALL, after)
    return spans


def _read_llama(text: str) -> list[Span]:
    """Objects with a name and parameters (or arguments), anywhere; after the tag, all there is."""
    spans: list[Span] = []
    tag = text.find(PYTHON_TAG)
    start = tag if tag >= 0 else _skip_space(text, 0)
    position = _skip_space(text, tag + len(PYTHON_TAG)) if tag >= 0 else _next_call(text, start)
    last_arguments = max((found.start() for found in ARGUMENTS.finditer(text)), default=-1)
    while position < len(text):
        call, end = _read_json(text, position)
        broken = end == position
        if tag < 0:
            # A broken object is a call where the turn begins with it, or where there are arguments in it.
            meant = position == start or last_arguments > position
            if not (meant if broken else ARGUMENTS.search(text, position, end)):
                position = _next_call(text, max(end, position + 1))
                continue
        if broken:
            end = len(text)
        separator = _skip_space(text, end)
        if text.startswith(";", separator):
            end = separator + 1
        spans.append(Span(tag if tag >= 0 and not spans else position, end, call))
        position = _skip_space(text, end) if tag >= 0 else _next_call(text, end)
    if tag >= 0 and not spans:
        spans.append(Span(tag, len(text), ToolCall(name="", error=f"nothing follows {PYTHON_TAG}")))
    return spans


def _next_call(text: str, start: int) -> int:
    found = JSON_CALL.search(text, start)
    return found.start() if found else len(text)


def _read_xml(text: str) -> list[Span]:
    spans: list[Span] = []
    opening = XML_OPEN.search(text)
    while opening:
        start = opening.start()
        body = _skip_space(text, opening.end()) if opening[0] == CALL else start
        call, end = _read_function(text, body)
        if call.error:
            edge = XML_EDGE.search(text, max(end, body + 1))
            end = len(text) if edge is None else edge.end() if edge[0] == CALL_ENDS else edge.start()
        elif text.startswith(CALL_ENDS, _skip_space(text, end)):
            end = _skip_space(text, end) + len(CALL_ENDS)
        spans.append(Span(start, end, call))
        opening = XML_OPEN.search(text, end)
    return spans


def _read_function(text: str, start: int) -> tuple[ToolCall, int]:
    """The call at text[start:], and where it ends, or where its error lies."""
    opening = XML_FUNCTION.match(text, start)
    if not opening:
        found = XML_NAME.match(text, start)
        name = found[1].strip() if found else ""
        return ToolCall(name=name, error="wanted <function=NAME> at the start of the call"), start
    name, arguments = opening[1].strip(), {}
    position = _skip_space(text, opening.end())
    while parameter := XML_PARAMETER.match(text, position):
        key, end = parameter[1].strip(), text.find(PARAMETER_ENDS, parameter.end())
        if end < 0:
            return ToolCall(name=name, error=f"the parameter {key} has no {PARAMETER_ENDS}"), parameter.end()
        if key in arguments:
            return ToolCall(name=name, error=f"the parameter {key} is given twice"), end
        arguments[key] = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        position = _skip_space(text, end + len(PARAMETER_ENDS))
    if not text.startswith(FUNCTION_ENDS, position):
        return ToolCall(name=name, error=f"wanted <parameter=NAME> or {FUNCTION_ENDS}"), position
    return ToolCall(name=name, arguments=arguments), position + len(FUNCTION_ENDS)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# Line breaks within strings are taken as they are: a model that writes code as an argument often leaves them so.
DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)


def _read_json(text: str, start: int) -> tuple[ToolCall, int]:
    """The call that the JSON at text[start:] is, and where that ends: at `start` when it is no JSON."""
    try:
        value, end = DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        reason = f"bad JSON: {error.msg} at character {error.pos - start}"
        return ToolCall(name=_first(JSON_NAME, text[start:]), error=reason), start
    except (ValueError, RecursionError) as error:
        return ToolCall(name=_first(JSON_NAME, text[start:]), error=f"bad JSON: {error}"), start
    if not isinstance(value, dict):
        return ToolCall(name="", error=f"wanted a JSON object, found {_dump(value)[:40]}"), end
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(name="", error='the call has no "name"'), end
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write JSON within JSON
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return ToolCall(name=name, error='"arguments" is text, not an object'), end
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error='"arguments" must be an object with a value for each argument'), end
    try:
        _dump([name, arguments]).encode()
    except (UnicodeEncodeError, RecursionError):
        return ToolCall(name=name.encode(errors="replace").decode(), error="half of a surrogate pair in a text"), end
    if _is_deeper(arguments, MAX_DEPTH):
        return ToolCall(name=name, error=f"the arguments are nested deeper than {MAX_DEPTH} levels"), end
    return ToolCall(name=name, arguments=arguments), end


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _is_deeper(part, levels - 1) for part in parts)


def _render_xml(call: ToolCall) -> str:
    lines = [CALL, f"<function={call.name}>"]
    for key, value in call.arguments.items():
        lines += [f"<parameter={key}>", value if isinstance(value, str) else _dump(value), PARAMETER_ENDS]
    return "\n".join([*lines, FUNCTION_ENDS, CALL_ENDS])


def _number(calls: list[ToolCall]) -> list[ToolCall]:
    for i, call in enumerate(calls):
        call.id = call.id or f"call_{i}"
    return calls


def _dump(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _skip_space(text: str, start: int) -> int:
    found = SPACE.match(text, start)
    return found.end() if found else start


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _thinking_end(text: str) -> int:
    end = text.find(THINKING_ENDS)
    return end + len(THINKING_ENDS) if end >= 0 else 0


READERS: dict[str, Callable[[str], list[Span]]] = {
    "hermes": _read_hermes,
    "llama": _read_llama,
    "xml": _read_xml,
    "none": lambda text: [],
}
