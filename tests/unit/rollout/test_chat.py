"""Messages to ids: what follows a turn is what the template puts there, whatever ids the turn is made of."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from rollout.chat import ChatBridge, PlainBridge, TemplateError, require_append_only
from rollout.environment import Message
from rollout.tool_calls import parse
from tests.unit.rollout.agents import CHATML, FORGETFUL, chat_tokenizer, encode

TOKENIZER = chat_tokenizer()
BRIDGE = ChatBridge(TOKENIZER)
USER_SAYS: list[Message] = [{"role": "user", "content": "a"}]
texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
turns = st.lists(
    st.tuples(texts, st.lists(st.tuples(st.sampled_from(["user", "tool"]), texts), min_size=1, max_size=3))
)


@given(texts, turns)
def test_extend_after_each_turn_equals_one_render_of_all(
    first: str, rest: list[tuple[str, list[tuple[str, str]]]]
) -> None:
    messages: list[Message] = [{"role": "user", "content": first}]
    ids = BRIDGE.first(messages)
    for said, heard in rest:  # parallel results are one extension, slime#2263; newlines stay, verl#6501
        turn = [*encode(TOKENIZER, said), BRIDGE.end_of_turn]
        new: list[Message] = [{"role": role, "content": content} for role, content in heard]
        following = BRIDGE.extend(turn, new)
        assert following.close == []
        ids += turn + following.observation
        messages += [{"role": "assistant", "content": said}, *new]
    assert ids == BRIDGE.first(messages)


def test_extend_after_a_turn_that_was_cut_off_closes_it() -> None:
    following = BRIDGE.extend(encode(TOKENIZER, "cut"), [{"role": "user", "content": "a"}])
    assert following.close == [BRIDGE.end_of_turn]


def test_extend_keeps_ids_that_encoding_would_not_give() -> None:
    word = TOKENIZER.convert_tokens_to_ids("high")
    assert encode(TOKENIZER, "high") != [word]
    following = BRIDGE.extend([word, BRIDGE.end_of_turn], [{"role": "user", "content": "a"}])
    assert TOKENIZER.decode(following.observation).startswith("\n<|im_start|>user\na")


def test_template_that_strips_thinking_is_refused_by_name_of_the_choices() -> None:
    bridge = ChatBridge(chat_tokenizer(FORGETFUL))
    with pytest.raises(ConfigError, match=r"rewrites history.*env\.on_rewrite=keep.*env\.on_rewrite=fork"):
        require_append_only(bridge, "model.path=m")


def test_template_that_only_appends_passes() -> None:
    require_append_only(BRIDGE, "model.path=m")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "no special token behind"),
        ("{{ raise_exception('no') }}", "refuses the messages"),
    ],
)
def test_template_that_cannot_be_used_is_refused(template: str | None, complaint: str) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=complaint):
        ChatBridge(tokenizer)


def test_template_that_wants_calls_before_results_is_given_them() -> None:
    wants_calls = (
        "{% for m in messages %}{% if m['role'] == 'tool' and not messages[loop.index0 - 1].get('tool_calls') and "
        "messages[loop.index0 - 1]['role'] != 'tool' %}{{ raise_exception('no call') }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% if m.get('tool_calls') %}(calls){% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    bridge = ChatBridge(chat_tokenizer(wants_calls))
    results: list[Message] = [{"role": "tool", "content": "1", "tool_call_id": "a"}]
    following = bridge.extend([bridge.end_of_turn], results)
    assert bridge.tokenizer.decode(following.observation) == "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"


def test_plain_bridge_joins_contents_and_closes_turns_with_eos() -> None:
    bridge = PlainBridge(TOKENIZER)
    first = bridge.first([{"role": "user", "content": "1-5?"}])
    following = bridge.extend(encode(TOKENIZER, "3"), [{"role": "user", "content": "low"}])
    assert (TOKENIZER.decode(first), following.close) == ("1-5?", [TOKENIZER.eos_token_id])
    assert TOKENIZER.decode(following.observation) == "low"
    with pytest.raises(TemplateError, match="no place for tools"):
        bridge.first([{"role": "user", "content": "a"}], [{"type": "function"}])


def test_chat_tokenizer_has_the_template_it_was_given() -> None:
    tokenizer: Any = chat_tokenizer(CHATML)
    assert tokenizer.chat_template == CHATML


TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def test_template_without_a_place_for_tools_has_the_system_message_tell_of_them() -> None:
    bridge = ChatBridge(TOKENIZER, "hermes")
    call = {"id": "0", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    asked: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "now", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "0"},
    ]
    text = TOKENIZER.decode(bridge.first(asked, [TOOL]))
    system, user, turn = text.split("<|im_end|>\n")[:3]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n") and '"name": "look"' in system
    assert user == "<|im_start|>user\ngo"
    written = turn.removeprefix("<|im_start|>assistant\n")
    assert (parse(written, "hermes").content, parse(written, "hermes").tool_calls[0].arguments) == ("now", {"at": "it"})
    assert TOKENIZER.decode(bridge.first(asked[1:2], [TOOL])).startswith("<|im_start|>system\nYou can call")


def test_template_with_a_place_for_tools_is_left_to_show_them_itself() -> None:
    shows = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
    tokenizer = chat_tokenizer(shows)
    asked: list[Message] = [{"role": "user", "content": "go"}]
    wanted = tokenizer.apply_chat_template(asked, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ChatBridge(tokenizer, "hermes").first(asked, [TOOL])) == wanted


@pytest.mark.parametrize("format", ["none", "vllm:hermes"])
def test_tools_that_nothing_can_show_are_refused(format: str) -> None:
    with pytest.raises(TemplateError, match="no place for tools"):
        ChatBridge(TOKENIZER, format).first([{"role": "user", "content": "go"}], [TOOL])


def test_call_whose_arguments_are_no_object_is_refused() -> None:
    call = {"id": "0", "type": "function", "function": {"name": "look", "arguments": "[1]"}}
    with pytest.raises(TemplateError, match=r"arguments of a tool call are '\[1\]'"):
        ChatBridge(TOKENIZER, "hermes").first([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("end", ["<|end_of_text|>", "<|im_end|>"])
def test_end_of_turn_is_found_whatever_letters_it_has(end: str) -> None:
    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>", end))
    tokenizer.add_special_tokens({"eos_token": end})
    assert ChatBridge(tokenizer).end_of_turn == tokenizer.eos_token_id


def test_template_that_refuses_a_system_message_is_taken() -> None:
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    bridge = ChatBridge(chat_tokenizer(refusal + CHATML))
    require_append_only(bridge, "model.path=m")
    assert bridge.extend([1], USER_SAYS) == BRIDGE.extend([1], USER_SAYS)
    with pytest.raises(TemplateError, match="no system"):
        bridge.first([{"role": "system", "content": "s"}])


def test_template_that_leaves_turns_out_is_refused() -> None:
    with pytest.raises(TemplateError, match="does not render what an assistant's turn says"):
        ChatBridge(chat_tokenizer(CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")))


def test_calls_that_are_none_are_a_template_error() -> None:
    message: Message = {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}
    with pytest.raises(TemplateError, match="without one: KeyError: 'function'"):
        ChatBridge(TOKENIZER, "hermes").first([message])
