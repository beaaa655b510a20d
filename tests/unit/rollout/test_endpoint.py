"""The endpoint as OpenAI's own client sees it: exact ids, streams, retries, forks, tools, and every refusal."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from conf.choices import Rewrite
from rl.types import Completion, Sampling, Status
from rollout.agents.request import Refused
from rollout.agents.session import Session
from rollout.attempts import EpisodeFailed
from rollout.engine import Outcome
from rollout.played import as_trajectory
from tests.unit.rollout.agents import ScriptedLane, encode
from tests.unit.rollout.sessions import TOOL, TOOLING, WAIT_S, Desk, HeldLane, desk, receive, send
from tests.unit.rollout.test_episode import actions

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 1, "a": "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def plain() -> Iterator[Desk]:
    with desk() as made:
        yield made


@pytest.fixture
def lively() -> Iterator[Desk]:
    """Its streams are soon kept alive."""
    with desk(keepalive_s=0.02) as made:
        yield made


@pytest.fixture(scope="module")
def tooling() -> Iterator[Desk]:
    with desk(template=TOOLING) as made:
        yield made


def ask(client: OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **more)


def talk(client: OpenAI, turns: int, messages: list[Any] | None = None, **more: Any) -> list[Any]:
    """A conversation of so many turns, as agents hold one: the client's own message objects go back to the endpoint."""
    messages = messages or [*HELLO]
    for turn in range(turns):
        messages += [
            ask(client, messages, **more).choices[0].message,
            {"role": "user", "content": f"higher {turn}"},
        ]
    return messages


def spelled(lane: ScriptedLane, call: int) -> list[int]:
    """A word as its characters in one call and as one token in the next: a text does not say which it was."""
    word = "high" if call % 2 else None
    ids = (
        [lane.tokenizer.convert_tokens_to_ids(word)]
        if word
        else [lane.tokenizer.convert_tokens_to_ids(c) for c in "high"]
    )
    return [*ids, lane.tokenizer.eos_token_id]


def test_conversation_of_many_turns_is_one_row_with_every_id_as_sampled(plain: Desk) -> None:
    client, lane, session = plain.client(lambda _ids, call: spelled(lane, call))
    talk(client, 30)
    trajectory = as_trajectory(session.played)
    assert actions(trajectory) == lane.sampled
    assert len({tuple(ids) for ids in lane.sampled}) == 2
    for seen, sampled in zip(lane.seen, lane.sampled, strict=True):
        assert trajectory.token_ids[: len(seen) + len(sampled)] == seen + sampled
    assert (trajectory.more, trajectory.metrics["turns"], trajectory.metrics["forks"]) == ([], 30, 0)
    assert len({sampling.seed for sampling in lane.samplings}) == 30


def test_turn_cut_by_its_limit_is_continued_behind_an_end_that_is_not_trained(plain: Desk) -> None:
    client, lane, session = plain.client(["abcdefgh", "stop"])
    first = ask(client, HELLO, max_tokens=5).choices[0]
    assert (first.finish_reason, first.message.content) == ("length", "abcde")
    ask(client, [*HELLO, first.message, *HELLO])
    trajectory = as_trajectory(session.played)
    end = len(lane.seen[0]) + 5
    assert lane.seen[1][: end + 1] == lane.seen[0] + lane.sampled[0] + [plain.tokenizer.eos_token_id]
    assert not trajectory.action_mask[end]
    assert len(trajectory.rows) == 1


@pytest.mark.parametrize("said", ["", "short", "long " * 15])
def test_stream_says_what_an_answer_in_one_piece_says(plain: Desk, said: str) -> None:
    whole = ask(plain.client([said])[0], HELLO)
    client, lane, session = plain.client([said, "next"])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, HELLO, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text, chunks[0].choices[0].delta.role) == (whole.choices[0].message.content, "assistant")
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    ask(client, [*HELLO, {"role": "assistant", "content": text}, *HELLO])
    assert lane.seen[1][: len(lane.seen[0] + lane.sampled[0])] == lane.seen[0] + lane.sampled[0]
    assert session.played.tree.num_forks == 0


def test_stream_is_kept_alive_while_an_answer_is_sampled(lively: Desk) -> None:
    lane = lively.lane(["high"], HeldLane)
    _, base_url = lively.open(lane)
    connection = send(base_url, {"model": "policy", "messages": HELLO, "stream": True})
    with connection, connection.makefile("rb") as stream:
        while stream.readline() != b": waiting\n":
            pass
        lane.let_go()
        assert stream.read().rstrip(b"\r\n0").endswith(b"data: [DONE]")


def test_thirty_two_sessions_side_by_side_keep_their_own_ids(plain: Desk) -> None:
    opened = [plain.open(plain.lane(lambda _ids, call, n=n: f"{n} says {call}")) for n in range(32)]

    async def converse(client: AsyncOpenAI, number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"you are {number}"}]
        for turn in range(4):
            stream = bool(turn % 2)
            reply: Any = await client.chat.completions.create(model="policy", messages=messages, stream=stream)
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
            else:
                text = reply.choices[0].message.content
            assert text == f"{number} says {turn}"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]

    async def converse_all() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            AsyncOpenAI(base_url="http://127.0.0.1", api_key="any", timeout=WAIT_S, max_retries=0) as client,
        ):
            clients = [client.with_options(base_url=base_url) for _, base_url in opened]
            await asyncio.gather(*(converse(client, number) for number, client in enumerate(clients)))

    asyncio.run(converse_all())
    for session, _ in opened:
        trajectory, lane = as_trajectory(session.played), session.lane
        assert isinstance(lane, ScriptedLane)
        assert actions(trajectory) == lane.sampled
        assert trajectory.token_ids == lane.seen[-1] + lane.sampled[-1]


# -- clients that hang up, and ask again --


def test_client_that_hangs_up_ends_the_sampling(plain: Desk) -> None:
    for stream in (False, True):
        lane = plain.lane(["high"], HeldLane)
        session, base_url = plain.open(lane)
        connection = send(base_url, {"model": "policy", "messages": HELLO, "stream": stream})
        assert lane.asked.wait(WAIT_S)
        connection.close()
        assert lane.cancelled.wait(WAIT_S)
        assert as_trajectory(session.played).token_ids == []


def test_client_that_asks_again_in_time_gets_the_answer_that_was_being_sampled(plain: Desk) -> None:
    lane = plain.lane(["high"], HeldLane)
    session, base_url = plain.open(lane, abandon_s=WAIT_S)
    body = {"model": "policy", "messages": HELLO}
    first = send(base_url, body)
    assert lane.asked.wait(WAIT_S)
    first.close()
    second, third = send(base_url, body), send(base_url, body)
    lane.let_go()
    answers = [receive(second), receive(third)]
    assert answers[0] == answers[1]
    assert json.loads(answers[0][1])["choices"][0]["message"]["content"] == "high"
    assert (lane.num_asked, session.played.tree.num_turns) == (1, 1)


def test_same_request_gets_the_same_answer_and_a_seed_or_key_makes_it_another(plain: Desk) -> None:
    client, lane, _ = plain.client(lambda _ids, call: f"answer {call}")
    answers = [
        ask(client, HELLO),
        ask(client, HELLO),
        ask(client, HELLO, seed=1),
        ask(client, HELLO, user="b"),
        ask(client, HELLO, extra_headers={"Idempotency-Key": "k"}),
        ask(client, HELLO, seed=1),
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == ["answer 0", "answer 0", "answer 1", "answer 2", "answer 3", "answer 1"]
    assert len({sampling.seed for sampling in lane.samplings}) == 4
    assert len({tuple(seen) for seen in lane.seen}) == 1


def test_samples_of_one_state_share_it_and_are_rows_of_their_own(plain: Desk) -> None:
    client, lane, session = plain.client(lambda _ids, call: f"answer {call}")
    messages = talk(client, 1)
    for seed in range(3):
        ask(client, messages, seed=seed)
    trajectory = as_trajectory(session.played)
    assert len(trajectory.rows) == 3
    assert sorted(actions(trajectory)) == sorted(lane.sampled)
    assert sum(len(segment.ids) for segment in session.played.tree.segments) == len(lane.seen[1]) + sum(
        len(ids) for ids in lane.sampled[1:]
    )


def test_failed_engine_is_asked_again_by_the_client_itself(plain: Desk) -> None:
    def say(_ids: list[int], call: int) -> str | Exception:
        return RuntimeError("engine gone") if call == 0 else "high"

    client, lane, session = plain.client(say, max_retries=1)
    assert ask(client, HELLO).choices[0].message.content == "high"
    assert lane.samplings[0].seed == lane.samplings[1].seed
    session.require_sound()
    assert len(as_trajectory(session.played).rows) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_engine_that_stays_down_is_the_episodes_failure(plain: Desk, stream: bool) -> None:
    client, _, session = plain.client(lambda _ids, _call: RuntimeError("engine gone"))
    with pytest.raises(openai.InternalServerError, match="engine gone") as caught:
        list(ask(client, HELLO, stream=stream))
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
    with pytest.raises(EpisodeFailed, match="engine gone") as failed:
        session.require_sound()
    assert (failed.value.status, failed.value.again) == (Status.engine_failed, True)


def test_engine_that_fails_within_a_stream_says_so_there(lively: Desk) -> None:
    lane = lively.lane(lambda _ids, _call: RuntimeError("engine gone"), HeldLane)
    _, base_url = lively.open(lane)
    connection = send(base_url, {"model": "policy", "messages": HELLO, "stream": True})
    with connection, connection.makefile("rb") as stream:
        while stream.readline() != b": waiting\n":
            pass
        lane.let_go()
        assert b"engine gone" in stream.read()


def test_engine_that_saw_other_ids_breaks_the_episode(plain: Desk) -> None:
    class Liar(ScriptedLane):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Outcome:
            outcome = await super().generate(prompt_ids, sampling)
            assert isinstance(outcome.completion, Completion)
            outcome.completion.prompt_ids[3] += 1
            return outcome

    session, base_url = plain.open(plain.lane(["high"], Liar))
    with pytest.raises(openai.InternalServerError, match="from token 3 on"):
        ask(plain.openai.with_options(base_url=base_url), HELLO)
    with pytest.raises(EpisodeFailed) as failed:
        session.require_sound()
    assert failed.value.status is Status.tokens_mismatch


# -- histories --


def test_edited_history_is_a_path_of_its_own_and_counted(plain: Desk) -> None:
    client, lane, session = plain.client(lambda _ids, call: f"answer {call}")
    messages = talk(client, 3)
    edited = [*messages[:3], {"role": "assistant", "content": "what was never said"}, *HELLO]
    ask(client, edited)
    trajectory = as_trajectory(session.played)
    assert (len(trajectory.rows), trajectory.metrics["forks"]) == (2, 1)
    assert sorted(actions(trajectory)) == sorted(lane.sampled)
    assert trajectory.more[0].token_ids == lane.seen[-1] + lane.sampled[-1]
    assert lane.seen[-1] == session.speech.bridge.first([*messages[:1], *as_dicts(edited[1:])], [])


def as_dicts(messages: list[Any]) -> list[dict[str, Any]]:
    found = [m if isinstance(m, dict) else m.model_dump(exclude_unset=True) for m in messages]
    return [{"role": m["role"], "content": m["content"]} for m in found]


def test_sub_agent_and_compaction_have_rows_of_their_own_and_the_main_one_goes_on(plain: Desk) -> None:
    client, lane, session = plain.client(lambda _ids, call: f"answer {call}")
    messages = talk(client, 2)
    client.chat.completions.create(model="policy:critic", messages=[{"role": "user", "content": "is it right?"}])
    ask(client, messages)
    ask(client, [{"role": "user", "content": "so far: nothing"}])
    rows = as_trajectory(session.played).rows
    assert [(row.agent, sum(row.action_mask)) for row in rows] == [("main", 27), ("critic", 9), ("main", 9)]
    assert lane.seen[3][: len(lane.seen[1])] == lane.seen[1]


def test_history_is_the_same_however_its_messages_are_written(plain: Desk) -> None:
    client, lane, session = plain.client(["high", "stop"])
    said = ask(client, HELLO).choices[0].message.model_dump()
    assert said["refusal"] is None
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    ask(client, [{"role": "user", "content": parts}, said, {"role": "developer", "content": "on", "name": None}])
    assert session.played.tree.num_forks == 0
    assert lane.seen[1][: len(lane.seen[0])] == lane.seen[0]
    assert "system\non<|im_end|>" in plain.tokenizer.decode(lane.seen[1])


def test_history_rendered_anew_at_each_turn_where_the_run_says_so() -> None:
    with desk(on_rewrite=Rewrite.fork) as made:
        client, lane, session = made.client(lambda _ids, call: spelled(lane, call))
        talk(client, 3)
    trajectory = as_trajectory(session.played)
    assert sorted(actions(trajectory)) == sorted(lane.sampled)
    assert len(trajectory.rows) > 1


def test_transcript_has_each_message_once(plain: Desk) -> None:
    client, _, session = plain.client(lambda _ids, call: f"answer {call}")
    talk(client, 2)
    told = [(e["kind"], e.get("content", e.get("text"))) for e in session.played.transcript]
    assert told == [("message", "hello"), ("action", "answer 0"), ("message", "higher 0"), ("action", "answer 1")]


def test_long_conversation_is_rendered_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    with desk(max_model_len=1 << 20) as made:
        bridge, rendered = made.speech.bridge, list[int]()
        first, extend = bridge.first, bridge.extend

        def count_first(messages: Any, tools: Any) -> list[int]:
            rendered.append(len(messages))
            return first(messages, tools)

        def count_extend(ids: Any, messages: Any) -> Any:
            rendered.append(len(messages))
            return extend(ids, messages)

        monkeypatch.setattr(bridge, "first", count_first)
        monkeypatch.setattr(bridge, "extend", count_extend)
        session, _ = made.open(made.lane(lambda _ids, _call: "a"))

        async def converse() -> None:
            messages: list[Any] = [*HELLO]
            for turn in range(100):
                _, call = session.begin(json.dumps({"model": "policy", "messages": messages}).encode())
                messages += [(await session.wait(call)).message, {"role": "user", "content": f"b {turn}"}]

        made.run(converse())
    assert rendered == [1] * 100
    assert all(call.work is None for call in session._calls.values())


# -- tools --


def test_calls_of_tools_are_told_apart_and_continued_id_for_id(tooling: Desk) -> None:
    client, lane, session = tooling.client([f"let me see {CALL}", "stop"])
    reply = ask(client, HELLO, tools=[TOOL])
    said = reply.choices[0].message
    (call,) = said.tool_calls
    assert (said.content, reply.choices[0].finish_reason) == ("let me see", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"b": 1, "a": "x"})
    assert len(call.id) == 9
    assert call.id.isalnum()
    again = said.model_dump()
    again["tool_calls"][0]["function"]["arguments"] = '{"a":"x","b":1}'  # as a framework writes it
    answer = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    ask(client, [*HELLO, again, answer], tools=[TOOL])
    assert lane.seen[1][: len(lane.seen[0] + lane.sampled[0])] == lane.seen[0] + lane.sampled[0]
    assert '"name": "add"' in tooling.tokenizer.decode(lane.seen[0])
    assert session.played.tree.num_forks == 0


def test_calls_in_a_stream_come_together_as_in_one_piece(tooling: Desk) -> None:
    whole = ask(tooling.client([CALL])[0], HELLO, tools=[TOOL]).choices[0].message
    chunks = list(ask(tooling.client([CALL])[0], HELLO, tools=[TOOL], stream=True))
    pieces = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert "".join(part.function.arguments for part in pieces) == whole.tool_calls[0].function.arguments
    assert [(part.index, part.function.name) for part in pieces] == [(0, "add"), *[(0, None)] * (len(pieces) - 1)]
    assert pieces[0].id
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_calls_that_were_not_offered_are_text(tooling: Desk, more: dict[str, Any]) -> None:
    choice = ask(tooling.client([CALL])[0], HELLO, **more).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_call_that_cannot_be_read_is_text(tooling: Desk) -> None:
    said = CALL.replace("}}", "}")
    choice = ask(tooling.client([said])[0], HELLO, tools=[TOOL]).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (said, None)


def test_edited_history_with_calls_is_rendered_with_their_arguments(tooling: Desk) -> None:
    client, lane, _ = tooling.client(["high"])
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ask(client, [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}], tools=[TOOL])
    assert '"arguments": {"a": 1}}' in tooling.tokenizer.decode(lane.seen[0])


# -- what else is told --


def test_logprobs_are_those_of_the_engine(plain: Desk) -> None:
    choice = ask(plain.client(["high"])[0], HELLO, logprobs=True).choices[0]
    assert [(t.token, t.logprob) for t in choice.logprobs.content][:2] == [("h", -0.5), ("i", -1.5)]


def test_usage_counts_what_the_engine_saw_and_made(plain: Desk) -> None:
    client, lane, _ = plain.client(["high"])
    usage = ask(client, HELLO).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(lane.seen[0]), len(lane.sampled[0]))


def test_models_are_listed(plain: Desk) -> None:
    client, _, _ = plain.client(["high"])
    assert [model.id for model in client.models.list()] == ["policy"]


# -- refusals --


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"temperature": 0.2}, "temperature", "temperature=0.2, but this run samples with temperature=1,"),
        ({"top_p": 0.9}, "top_p", "top_p=0.9, but this run samples with top_p=1,"),
        ({"max_tokens": 121}, "max_tokens", "max_tokens=121: must be from 1 to 120"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "must be from 1 to 120"),
        ({"max_tokens": "9"}, "max_tokens", 'must be an integer, found "9"'),
        ({"n": 2}, "n", "n=2: this endpoint takes only 1"),
        ({"stop": ["x"]}, "stop", r'stop=\["x"\]: this endpoint takes only \[\]'),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"presence_penalty": 0.5}, "presence_penalty", "takes only 0"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "must be auto or none"),
        ({"tools": [{"type": "web"}]}, "tools", r"tools\[0\] must be"),
        ({"extra_body": {"top_k": 5}}, "top_k", "unknown parameter 'top_k'; did you mean 'top_p'"),
        ({"stream_options": {"speed": 1}}, "stream_options.speed", "include_usage is"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", 'found "robot"'),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a string or a list of texts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood", "mood=1 is not taken"),
    ],
)
def test_request_for_what_the_run_cannot_give_is_refused_by_name(
    plain: Desk, more: dict[str, Any], param: str, message: str
) -> None:
    client, lane, _ = plain.client(["high"])
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(**{"model": "policy", "messages": HELLO} | more)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert lane.seen == []


def test_knobs_that_change_nothing_are_taken(plain: Desk) -> None:
    client, lane, _ = plain.client(["high"])
    ask(
        client,
        HELLO,
        temperature=1,
        top_p=1.0,
        n=1,
        stop=None,
        max_tokens=7,
        response_format={"type": "text"},
        presence_penalty=0.0,
        parallel_tool_calls=True,
        tool_choice="auto",
    )
    assert (lane.samplings[0].temperature, lane.samplings[0].max_tokens) == (1.0, 7)


def test_other_model_is_refused(plain: Desk) -> None:
    client, _, _ = plain.client(["high"])
    with pytest.raises(openai.NotFoundError, match="the model here is 'policy'"):
        client.chat.completions.create(model="other", messages=HELLO)


def test_body_that_is_no_json_or_too_large_is_refused(plain: Desk) -> None:
    client, _, _ = plain.client(["high"])
    with pytest.raises(openai.APIStatusError, match="larger than") as caught:
        ask(client, [{"role": "user", "content": "x" * (1 << 20)}])
    assert caught.value.status_code == 413
    reply = client._client.post(f"{client.base_url}chat/completions", content=b"{")
    assert (reply.status_code, "no JSON" in reply.json()["error"]["message"]) == (400, True)


def test_other_path_says_what_there_is(plain: Desk) -> None:
    client, _, _ = plain.client(["high"])
    with pytest.raises(openai.NotFoundError, match="there are POST"):
        client.responses.create(model="policy", input="hello")


def test_messages_without_room_for_an_answer_are_refused_and_remembered() -> None:
    with desk(context_tokens=60) as made:
        client, lane, session = made.client(lambda _ids, _call: "abcdefghijklmnop")
        messages = talk(client, 1)
        assert lane.samplings[0].max_tokens == 60 - len(lane.seen[0])
        with pytest.raises(openai.BadRequestError, match="has room for 60") as caught:
            ask(client, messages)
        assert caught.value.code == "context_length_exceeded"
        assert session.limit
        ask(client, [{"role": "user", "content": "short"}])
        assert not session.limit


def test_turns_beyond_the_limit_are_refused_and_retries_are_not() -> None:
    with desk(max_turns=2) as made:
        client, _, session = made.client(lambda _ids, call: f"answer {call}")
        messages = talk(client, 2)
        ask(client, HELLO)
        with pytest.raises(openai.BadRequestError, match=r"had its 2 turns \(env.max_turns\)"):
            ask(client, messages)
        assert "env.max_turns" in session.limit


def test_tools_without_a_format_for_calls_are_refused() -> None:
    with desk(tool_format="none") as made, pytest.raises(openai.BadRequestError, match=r"see env\.tool_format"):
        ask(made.client(["high"])[0], HELLO, tools=[TOOL])


def test_closed_session_samples_nothing_and_ends_what_is_being_sampled(plain: Desk) -> None:
    lane = plain.lane(["high"], HeldLane)
    session, base_url = plain.open(lane)
    body = {"model": "policy", "messages": HELLO}
    connection = send(base_url, body)
    assert lane.asked.wait(WAIT_S)
    plain.run(plain.endpoint.close_session(session))
    assert lane.cancelled.wait(WAIT_S)
    assert receive(connection)[0] == 404
    assert receive(send(base_url, body))[0] == 404
    assert receive(send(base_url.replace("/v1", "x/v1"), body))[0] == 404
    assert lane.num_asked == 1


def test_closed_endpoint_opens_no_session() -> None:
    with desk() as made:
        made.endpoint.close()
        made.endpoint.close()
        with pytest.raises(RuntimeError, match="was closed"):
            made.open(made.lane(["high"]))


def test_ids_given_to_a_session_are_those_of_its_own_bridge(plain: Desk) -> None:
    client, lane, session = plain.client(["high"])
    assert isinstance(session, Session)
    ask(client, HELLO)
    assert lane.seen[0] == encode(plain.tokenizer, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("head", "knobs", "status"),
    [(b"Idempotency-Key: \xff\r\n", b"", 200), (b"", b',"temperature":1' + b"0" * 400, 400)],
)
def test_odd_key_or_number_is_no_fault_of_the_endpoint(plain: Desk, head: bytes, knobs: bytes, status: int) -> None:
    session, base_url = plain.open(plain.lane(["ok"]))
    body = b'{"model":"policy","messages":[{"role":"user","content":"a"}]' + knobs + b"}"
    url = urlsplit(base_url)
    connection = socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=WAIT_S)
    start = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    connection.sendall(start + head + b"Connection: close\r\n\r\n" + body)
    assert receive(connection)[0] == status
    session.require_sound()


def test_answer_that_comes_as_the_session_closes_is_not_recorded(plain: Desk) -> None:
    session, _ = plain.open(plain.lane(["ok"]))
    body = b'{"model":"policy","messages":[{"role":"user","content":"a"}]}'

    async def close_when_sampled() -> None:
        _, call = session.begin(body)
        waiting = asyncio.ensure_future(session.wait(call))
        await asyncio.sleep(0)
        assert call.work is not None
        while not call.work.sampled.done():
            await asyncio.sleep(0)
        await session.close()
        with pytest.raises(Refused, match="this episode is over"):
            await waiting

    plain.run(plain.endpoint._within(close_when_sampled()))
    assert session.played.tree.num_turns == 0
