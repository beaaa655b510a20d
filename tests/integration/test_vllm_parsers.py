"""Our parsers of tool calls and vLLM's give the same for what is well formed, and its others can be named."""

from types import SimpleNamespace

import pytest

from conf.errors import ConfigError
from rollout.environment import ToolCall
from rollout.tool_calls import parse, render

pytestmark = pytest.mark.integration

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "code": {"type": "string"}, "empty": {"type": "string"}},
            },
        },
    }
]
CORPUS = [
    [ToolCall(name="look", arguments={"where": "left"})],
    [ToolCall(name="look", arguments={})],
    [ToolCall(name="look", arguments={"where": "links, ärger ☃", "empty": ""})],
    [ToolCall(name="look", arguments={"code": 'if a < b:\n    print("{}")'})],
    [ToolCall(name="look", arguments={"where": "a"}), ToolCall(name="look", arguments={"where": "b"})],
]
NESTED = [ToolCall(name="look", arguments={"n": 3, "x": 0.5, "deep": {"list": [1, {"a": None}], "flag": True}})]


@pytest.fixture(scope="module")
def tokenizer():
    """What the parsers ask of a tokenizer: ids of the tokens that mark calls."""
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"]
    vocab = {mark: i for i, mark in enumerate(marks)}
    return SimpleNamespace(
        get_vocab=lambda: vocab,
        encode=lambda text, **options: [vocab[text]] if text in vocab else [],
        decode=lambda ids, **options: "".join(marks[i] for i in ids),
        all_special_tokens=[],
        all_special_ids=[],
    )


def compare(text: str, ours: str, theirs: str, tokenizer) -> None:
    mine = parse(text, ours)
    other = parse(text, f"vllm:{theirs}", tokenizer=tokenizer, tools=TOOLS)
    for action in (mine, other):
        assert [call.error for call in action.tool_calls] == [""] * len(action.tool_calls)
    assert [(c.name, c.arguments) for c in mine.tool_calls] == [(c.name, c.arguments) for c in other.tool_calls]
    assert mine.tool_calls or mine.content == other.content


@pytest.mark.parametrize(
    ("ours", "theirs", "corpus"),
    [
        ("hermes", "hermes", [*CORPUS, NESTED]),
        ("llama", "llama3_json", [*CORPUS, NESTED]),
        ("xml", "qwen3_coder", CORPUS),
    ],
)
def test_well_formed_calls_are_read_as_vllm_reads_them(ours, theirs, corpus, tokenizer) -> None:
    for calls in corpus:
        for content in ("", "I look."):
            compare(render(calls, ours, content), ours, theirs, tokenizer)
    compare("No call at all.", ours, theirs, tokenizer)


def test_a_parser_that_vllm_lacks_is_refused_with_the_nearest(tokenizer) -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        parse("x", "vllm:hermess", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="tokenizer"):
        parse("x", "vllm:hermes")
    with pytest.raises(ConfigError, match="does not fit"):
        parse("x", "vllm:llama3_json", tokenizer=SimpleNamespace(get_vocab=dict))
