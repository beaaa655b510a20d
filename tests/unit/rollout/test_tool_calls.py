"""Turns taken apart: what is written comes back, what is broken is named, and no text raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from rollout.environment import ToolCall
from rollout.tool_calls import CUT_OFF, decode, detect_format, parse, render, without_thinking
from tests.unit.rollout.agents import chat_tokenizer

FORMATS = ["hermes", "llama", "xml", "none"]
PIECES = [
    "<tool_call>", "</tool_call>", "<function=look>", "<function=", "</function>", "<parameter=where>", "</parameter>",
    "<|python_tag|>", "</think>", '{"name": "look", "parameters": {}}', '{"name": "look", "arguments": {"a": 1}}',
    '{"name":', '"parameters":', "{", "}", "[", ";", '"', "\\", "\\ud800", "NaN", " ", "\n", "look",
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)
CALLS = st.lists(
    st.builds(ToolCall, name=st.text(min_size=1), arguments=st.dictionaries(st.text(), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def made(calls: list[ToolCall]) -> list[tuple[str, dict]]:
    assert [call.error for call in calls] == [""] * len(calls)
    return [(call.name, call.arguments) for call in calls]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14), st.sampled_from(FORMATS), st.booleans())
def test_parse_any_text_never_raises(pieces, format, truncated) -> None:
    text = "".join(pieces)
    action = parse(text, format, truncated)
    assert (action.text, action.truncated) == (text, truncated)
    for call in action.tool_calls:
        assert not (call.error and call.arguments)
        json.dumps(call.arguments, ensure_ascii=False).encode()
    assert [call.id for call in action.tool_calls] == [f"call_{i}" for i in range(len(action.tool_calls))]


@pytest.mark.parametrize("format", ["hermes", "llama"])
@given(calls=CALLS)
def test_json_formats_rendered_calls_come_back(calls, format) -> None:
    action = parse(render(calls, format), format)
    assert made(action.tool_calls) == made(calls)
    assert action.content == ""


WORDS = st.text("abcdefghij_", min_size=1)


@given(WORDS, st.dictionaries(WORDS, st.text("ab<>/=\n {}\"'", max_size=20), max_size=3))
def test_xml_rendered_calls_come_back_as_text(name, arguments) -> None:
    call = ToolCall(name=name, arguments=arguments)
    action = parse(render([call, call], "xml", "Now:"), "xml")
    assert made(action.tool_calls) == [(name, arguments)] * 2
    assert action.content == "Now:"


@pytest.mark.parametrize("format", ["hermes", "llama", "xml"])
def test_content_around_calls_is_kept_without_them(format) -> None:
    call = ToolCall(name="look", arguments={"where": "left"})
    action = parse("First.\n" + render([call], format) + "\nThen.", format)
    assert "First." in action.content and "Then." in action.content and "look" not in action.content
    assert made(action.tool_calls) == [("look", {"where": "left"})]


@pytest.mark.parametrize("format", ["hermes", "llama", "xml"])
def test_calls_within_thinking_are_not_made(format) -> None:
    thought, call = ToolCall(name="think"), ToolCall(name="look")
    action = parse(render([thought], format) + "</think>\n" + render([call], format), format)
    assert made(action.tool_calls) == [("look", {})]
    assert without_thinking("so: 3</think>4") == "4"


@pytest.mark.parametrize(
    ("text", "format", "name", "error"),
    [
        ('<tool_call>{"name": "look", "arguments": {</tool_call>', "hermes", "look", "bad JSON"),
        ('<tool_call>{"name": "look", "arguments": {}}}</tool_call>', "hermes", "look", "more than one"),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "hermes", "look", "object"),
        ('<tool_call>{"name": "look", "arguments": "x"}</tool_call>', "hermes", "look", "is text"),
        ('<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>', "hermes", "look", "NaN"),
        ('<tool_call>{"name": "look", "arguments": {"a": "\\ud800"}}</tool_call>', "hermes", "look", "surrogate"),
        ('<tool_call>{"arguments": {}}</tool_call>', "hermes", "", "name"),
        ("<tool_call>[1]</tool_call>", "hermes", "", "found [1]"),
        ("<tool_call>" + "[" * 100_000, "hermes", "", "bad JSON"),
        ("<tool_call>" + "1" * 10_000, "hermes", "", "bad JSON"),
        ('{"name": "look", "parameters": {"a": }}', "llama", "look", "bad JSON"),
        ("<|python_tag|>look.call(1)", "llama", "", "bad JSON"),
        ("<|python_tag|>", "llama", "", "nothing"),
        ("<tool_call><function=look><parameter=a>1</function></tool_call>", "xml", "look", "no </parameter>"),
        ("<tool_call><function=look>a=1</function></tool_call>", "xml", "look", "wanted <parameter"),
        ("<tool_call>look</tool_call>", "xml", "", "<function=NAME>"),
        (
            "<function=look><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "xml",
            "look",
            "given twice",
        ),
    ],
)
def test_malformed_call_has_an_error_and_its_name(text, format, name, error) -> None:
    (call,) = parse(text, format).tool_calls
    assert call.name == name and error in call.error and call.arguments == {}


def test_a_malformed_call_leaves_its_neighbours_alone() -> None:
    good = render([ToolCall(name="look")], "hermes")
    action = parse(good + "<tool_call>{oops</tool_call>" + good, "hermes")
    assert [bool(call.error) for call in action.tool_calls] == [False, True, False]
    good = render([ToolCall(name="look")], "xml")
    action = parse(good + "<tool_call><function=a><parameter=x></tool_call>" + good[11:], "xml")
    assert [call.name for call in action.tool_calls if not call.error] == ["look", "look"]


@pytest.mark.parametrize("format", ["hermes", "llama", "xml"])
def test_truncated_turn_says_that_the_last_call_was_cut_off(format) -> None:
    whole = render([ToolCall(name="look", arguments={"where": "left"})], format)
    action = parse(whole[: whole.index("left")], format, truncated=True)
    assert [(call.name, call.error) for call in action.tool_calls] == [("look", CUT_OFF)]
    assert made(parse(whole, format, truncated=True).tool_calls) == [("look", {"where": "left"})]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', {"a": 1}),  # the end of the turn is the end of the call
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', {"a": "1\n2"}),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', {"a": "</tool_call>"}),
        ('<tool_call>{"name": "f"}</tool_call>', {}),
    ],
)
def test_hermes_takes_what_has_one_meaning(text, arguments) -> None:
    assert made(parse(text, "hermes").tool_calls) == [("f", arguments)]


@pytest.mark.parametrize("text", ['{"name": "Bob", "age": 3}', 'I am {"name": "Bob"', "The set {1, 2}.", '{"x": 1}'])
def test_llama_other_objects_are_content(text) -> None:
    action = parse(text, "llama")
    assert (action.tool_calls, action.content) == ([], text)


def test_llama_tag_and_separators_are_not_content() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"a": {"b": 1}}}; {"name": "g", "parameters": {}}'
    action = parse(text, "llama")
    assert made(action.tool_calls) == [("f", {"a": {"b": 1}}), ("g", {})]
    assert action.content == ""


def test_unknown_format_is_refused_with_the_nearest() -> None:
    for name in ("hermse", "vllm:", ""):
        with pytest.raises(ConfigError, match="one of hermes"):
            parse("x", name)
    with pytest.raises(ConfigError, match="none"):
        render([], "none")


HERMES = """{%- if tools %}<tools>{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}</tools>
{%- endif %}{%- for message in messages %}{{ message.role }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{%- endfor %}{%- endfor %}"""
LLAMA = """{%- for message in messages %}{%- if message.tool_calls %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{ "}" }}{% else %}{{ message.content }}
{%- endif %}{%- endfor %}{{ strftime_now("%d") }}"""
XML = """{%- for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}
{%- for call in message.tool_calls or [] %}<tool_call><function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>{% endfor %}
</function></tool_call>{%- endfor %}{%- endfor %}"""
TEXT_ARGUMENTS = """{% for m in messages %}{% for c in m.tool_calls or [] %}
{{ '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}' }}
{% endfor %}{% endfor %}"""
NAME_FIRST = """<tool_call>{function-name}{% for m in messages %}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}{% for key, value in c.function.arguments | items %}
<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endfor %}"""
PLAIN = "{% for message in messages %}{{ message.role + message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (HERMES, "hermes"),
        (LLAMA, "llama"),
        (XML, "xml"),
        (TEXT_ARGUMENTS, "hermes"),
        (NAME_FIRST, "none"),
        (PLAIN, "none"),
        ("{{ raise_exception('no tools') }}", "none"),
        ("{% if %}", "none"),
        ("", "none"),
        (None, "none"),
    ],
)
def test_detect_format_is_what_the_template_renders(template, format) -> None:
    assert detect_format(template) == format


@pytest.mark.parametrize(
    ("format", "text"),
    [("hermes", "high"), ("none", "high"), ("llama", "<|im_start|>high"), ("vllm:x", "<|im_start|>high")],
)
def test_special_tokens_stay_where_calls_may_be_made_of_them_but_for_the_end(format: str, text: str) -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "high", "<|im_end|>"])
    assert decode(tokenizer, ids, format) == text
    assert decode(tokenizer, ids[:2], format) == text
    assert decode(tokenizer, [], format) == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (r'"{\"a\": \"\\ud800\"}"', "half of a surrogate pair"),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", "nested deeper than 64 levels"),
    ],
)
def test_arguments_that_no_environment_could_be_given_are_an_error(arguments: str, error: str) -> None:
    (call,) = parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', "hermes").tool_calls
    assert (call.name, call.arguments) == ("f", {})
    assert error in call.error
