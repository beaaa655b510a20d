"""From messages to token ids, without ever encoding anew what the engine has sampled.

A conversation is a row of ids that only grows: a turn's ids as the engine gave them, then what the chat template puts
behind them (end of turn, new messages, the head of the next turn). The template is asked for that alone, over a dummy
conversation, so a turn costs what its new messages cost, however long the conversation.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from conf.errors import ConfigError
from rollout.environment import Message, Tool
from rollout.tool_prompt import with_calls, with_tools

# Contents of an assistant's turn that a template might render otherwise once it is history.
PROBES = ("x", "ok.", " a b\n", "<b>{1}", "7", "<think>\na\n</think>\n\nb")
SAID = "zqj"  # a text that no template has of itself
DUMMY: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
CACHED_CHARS = 2000  # longer messages seldom come again, and thousands of them would fill the memory
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": "probe_name", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class TemplateError(ValueError):
    """A chat template that cannot render what it is asked to, or changes what it has rendered before."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What follows a sampled turn: ids that close it where the policy did not, and the new messages."""

    close: list[int]
    observation: list[int]


class Bridge(Protocol):
    """How messages become ids."""

    def first(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """A conversation up to where the policy acts. Raises TemplateError."""
        ...

    def extend(self, action_ids: Sequence[int], messages: Sequence[Message]) -> Extension:
        """What follows a turn that the policy has sampled, up to its next one. Raises TemplateError."""
        ...


class ChatBridge:
    """By the tokenizer's chat template, all new messages in one go.

    Where the template has no place for tools, the system message tells of them, and how to call them in `tool_format`.
    """

    def __init__(self, tokenizer: Any, tool_format: str = "none"):
        """Raises TemplateError when the template has no end of turn or does not keep what is in front of new messages;
        see `rewrites` for templates that change a turn once it is history."""
        self.tokenizer, self.tool_format = tokenizer, tool_format
        if not tokenizer.chat_template:
            name = getattr(tokenizer, "name_or_path", "") or "the model"
            raise TemplateError(f"{name} has no chat template")
        self._dummy = DUMMY[1:]
        with contextlib.suppress(TemplateError):  # templates may refuse a system message
            self._render(DUMMY)
            self._dummy = DUMMY
        self.end_of_turn, self._behind = self._find_end()
        self._cached = lru_cache(maxsize=4096)(self._render_extension)
        self._shows_tools = "probe_name" in self._render(self._dummy, [PROBE_TOOL])

    def first(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """As Bridge."""
        if not self._shows_tools:
            try:
                messages = with_calls(messages, self.tool_format)
                messages, tools = with_tools(messages, tools, self.tool_format) if tools else messages, ()
            except (ConfigError, ValueError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
                raise TemplateError(f"the chat template has no place for tools, and without one: {why}") from error
        return self._encode(self._render([*messages], tools, generate=True))

    def extend(self, action_ids: Sequence[int], messages: Sequence[Message]) -> Extension:
        """As Bridge."""
        close = [] if len(action_ids) and action_ids[-1] == self.end_of_turn else [self.end_of_turn]
        dumped = json.dumps(list(messages), sort_keys=True)
        found = self._cached(dumped) if len(dumped) <= CACHED_CHARS else self._render_extension(dumped)
        return Extension(close=close, observation=list(found))

    def rewrites(self) -> str:
        """How the template renders a turn otherwise once it is history, as some strip their thinking; "" if not at all.

        Then what follows a turn is exact, but the turn itself stays as it was sampled.
        """
        for probe in PROBES:
            now = self._render([*self._dummy, {"role": "assistant", "content": probe}], generate=False)
            later = [*self._dummy, {"role": "assistant", "content": probe}, {"role": "user", "content": "v"}]
            if probe.strip() not in now:
                return f"of {probe!r} it renders {now[-80:]!r}"
            kept = now[: now.index(probe.strip()) + len(probe.strip())]
            if not self._render(later, generate=True).startswith(kept):
                return f"a turn {probe!r} is rendered otherwise once a message follows it"
        return ""

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raises TemplateError when the template cannot render such messages behind a turn."""
        self._render_extension(json.dumps(list(messages)))

    def _find_end(self) -> tuple[int, str]:
        """(id of the token that ends an assistant's turn, what the template puts behind it when nothing follows)."""
        text = self._render([*self._dummy, {"role": "assistant", "content": SAID}], generate=False)
        if SAID not in text:
            raise TemplateError(f"the chat template does not render what an assistant's turn says, but {text[-80:]!r}")
        tail = text[text.rindex(SAID) + len(SAID) :]
        ids = self._encode(tail)
        special = set(self.tokenizer.all_special_ids)
        found = [(place, token) for place, token in enumerate(ids) if token in special]
        if not found:
            raise TemplateError(f"the chat template puts no special token behind an assistant's turn, but {tail!r}")
        place, token = found[0]
        if place > 0:
            raise TemplateError(f"the chat template puts {tail!r} behind a turn: text before its end-of-turn token")
        return token, tail

    def _render_extension(self, dumped: str) -> tuple[int, ...]:
        messages = json.loads(dumped)
        turn: Message = {"role": "assistant", "content": SAID}
        calls = [
            {"id": m.get("tool_call_id", "0" * 9), "type": "function", "function": {"name": "f", "arguments": {}}}
            for m in messages
            if m["role"] == "tool"
        ]
        attempts = [turn, turn | {"tool_calls": calls}] if calls else [turn]
        for number, attempt in enumerate(attempts):
            try:
                return self._behind_turn(attempt, messages)
            except TemplateError:
                if number + 1 == len(attempts):
                    raise
        raise AssertionError

    def _behind_turn(self, turn: Message, messages: list[Message]) -> tuple[int, ...]:
        before = self._render([*self._dummy, turn], generate=False)
        after = self._render([*self._dummy, turn, *messages], generate=True)
        kept = before[: len(before) - len(self._behind)] if before.endswith(self._behind) else before
        if not after.startswith(kept):
            raise TemplateError(
                "the chat template renders a turn otherwise once messages follow it: "
                f"{before[-60:]!r} becomes {after[len(before) - 60 : len(before) + 60]!r}"
            )
        ids = self._encode(after[len(kept) :])
        if not ids or ids[0] != self.end_of_turn:
            raise TemplateError(f"the chat template puts {after[len(kept) :][:60]!r} behind a turn, not its end")
        return tuple(ids[1:])

    def _render(self, messages: list[Message], tools: Sequence[Tool] = (), generate: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:  # templates are programs: they raise what they like
            raise TemplateError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


class PlainBridge:
    """The messages' contents one after another, for models without a chat template; a turn ends with eos."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.end_of_turn = tokenizer, int(tokenizer.eos_token_id)

    def first(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """As Bridge. Raises TemplateError when there are tools."""
        if tools:
            raise TemplateError("data.template=plain has no place for tools; use a model with a chat template")
        ids = self.tokenizer("".join(m["content"] for m in messages), add_special_tokens=True)["input_ids"]
        return [int(token) for token in ids]

    def extend(self, action_ids: Sequence[int], messages: Sequence[Message]) -> Extension:
        """As Bridge."""
        close = [] if len(action_ids) and action_ids[-1] == self.end_of_turn else [self.end_of_turn]
        ids = self.tokenizer("".join(m["content"] for m in messages), add_special_tokens=False)["input_ids"]
        return Extension(close=close, observation=[int(token) for token in ids])


def require_append_only(bridge: ChatBridge, key: str) -> None:
    """Raises ConfigError, naming `key`, when the template changes turns once they are history."""
    if found := bridge.rewrites():
        raise ConfigError(
            f"{key}: the chat template rewrites history ({found}), so the model would see other turns than it sampled; "
            "use env.on_rewrite=keep (turns stay as they were sampled) or env.on_rewrite=fork (the conversation is "
            "rendered anew after each turn, and trained as a row of its own)"
        )
