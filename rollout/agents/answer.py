"""A finished turn in OpenAI's form: one object, or the same as a stream of events."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl.types import Completion
from rollout.agents.request import MODEL, Asked
from rollout.environment import Message
from rollout.tool_calls import decode, parse

PIECE_CHARS = 64  # of one event of a stream
WAITING = b": waiting\n\n"  # clients pass over it
DONE = b"data: [DONE]\n\n"


@dataclass(kw_only=True)
class Answer:
    """message: what the client is to append to its conversation. text: of the turn, its calls included.

    tokens: (text, log-probability) of each that was sampled, where they were asked for.
    """

    id: str
    created_s: int
    text: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens: list[tuple[str, float]]


def make_answer(
    completion: Completion, asked: Asked, tokenizer: Any, tool_format: str, name: str, created_s: int
) -> Answer:
    """The answer called `name` (letters and digits). A turn with a call that cannot be read is plain text."""
    text = decode(tokenizer, completion.token_ids, tool_format)
    cut_off = completion.finish_reason == "length"
    action = parse(text, tool_format if asked.calls_tools else "none", cut_off, tokenizer=tokenizer, tools=asked.tools)
    readable = not any(call.error for call in action.tool_calls)
    calls = [
        {
            "id": f"{name[:7]}{number:02d}",  # nine letters and digits: some templates take nothing else
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(action.tool_calls)
        if readable
    ]
    content = action.content if calls else text
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    return Answer(
        id=f"chatcmpl-{name}",
        created_s=created_s,
        text=text,
        message=message,
        finish_reason="length" if cut_off else "tool_calls" if calls else "stop",
        prompt_tokens=len(completion.prompt_ids),
        completion_tokens=len(completion.token_ids),
        tokens=[
            (tokenizer.decode([token]), logprob)
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
            if asked.logprobs
        ],
    )


def as_object(answer: Answer, asked: Asked) -> dict[str, Any]:
    """A chat.completion."""
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    choice["logprobs"] = logprobs(answer) if asked.logprobs else None
    return head(answer, "chat.completion") | {"choices": [choice], "usage": usage(answer)}


def as_events(answer: Answer, asked: Asked) -> Iterator[bytes]:
    """The same as chat.completion.chunk events: role, text, calls, how it ended, and where asked for the usage."""
    beginning = head(answer, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], ended: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": ended, "logprobs": None} | more
        return event(beginning | {"choices": [choice]} | ({"usage": None} if asked.include_usage else {}))

    yield chunk({"role": "assistant", "content": ""})
    content = answer.message["content"] or ""
    for start in range(0, len(content), PIECE_CHARS):
        yield chunk({"content": content[start : start + PIECE_CHARS]})
    for number, call in enumerate(answer.message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        opening = {"index": number, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        yield chunk({"tool_calls": [opening]})
        for start in range(0, len(arguments), PIECE_CHARS):
            piece = {"index": number, "function": {"arguments": arguments[start : start + PIECE_CHARS]}}
            yield chunk({"tool_calls": [piece]})
    yield chunk({}, answer.finish_reason, **({"logprobs": logprobs(answer)} if asked.logprobs else {}))
    if asked.include_usage:
        yield event(beginning | {"choices": [], "usage": usage(answer)})
    yield DONE


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created_s, "model": MODEL}


def usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def logprobs(answer: Answer) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in answer.tokens
        ]
    }
