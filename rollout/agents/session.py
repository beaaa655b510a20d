"""One episode of a program that asks the policy over HTTP: what a request continues, and which answer it gets.

A request whose messages are those of an earlier one, its answer and new ones is that conversation id for id: sampled
text is never encoded again. Any other is rendered anew, on a path of its own where it differs. An answer belongs to the
episode once somebody has waited for it to the end.
"""

import asyncio
import hashlib
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

from conf.choices import Rewrite
from conf.schema import Config
from rl.types import Completion, Sampling, Status
from rollout.agents.answer import Answer, make_answer
from rollout.agents.request import Asked, Refused, as_message, next_key, read
from rollout.attempts import EpisodeFailed, engine_failure, require_same_ids
from rollout.chat import Bridge, Extension, TemplateError
from rollout.engine import Outcome
from rollout.played import Played, note_action
from rollout.seeds import derive_seed
from rollout.single_turn import Generator
from rollout.trajectory import Kind

# How long an answer is still sampled for whoever has hung up, and may be about to ask again.
ABANDON_S = 2.0
CLOSE_S = 10.0
CLOSED = "this episode is over, or never was: nothing is sampled for it"


@dataclass(frozen=True, kw_only=True)
class Speech:
    """How messages become ids, and ids an answer: the same in all episodes of a run."""

    cfg: Config
    bridge: Bridge
    tokenizer: Any
    tool_format: str


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is being sampled. parent: the action that the request continues, with what follows that; -1: none."""

    asked: Asked
    ids: list[int]
    parent: int
    following: Extension | None
    sampled: asyncio.Task[Outcome]


@dataclass(kw_only=True)
class Call:
    """A request, from its first sending on. `work` is let go once there is an answer: all calls together would hold
    the square of the episode. abandoned: whoever had asked has hung up."""

    identity: str
    work: Work | None
    num_waiting: int = 0
    abandoned: bool = False
    giving_up: asyncio.TimerHandle | None = None
    answer: Answer | None = None


class Session:
    """Lives on the endpoint's event loop; the lane on `lane_loop`.

    limit: why the newest request was refused for want of room or turns, "" if it was not. broken: what ends the
    episode, whatever the program makes of it.
    """

    def __init__(
        self,
        speech: Speech,
        played: Played,
        lane: Generator,
        lane_loop: asyncio.AbstractEventLoop,
        sampling: Sampling,
        seed: int,
        abandon_s: float = ABANDON_S,
    ):
        self.speech, self.played, self.lane, self.lane_loop = speech, played, lane, lane_loop
        self.sampling, self.seed, self.abandon_s = sampling, seed, abandon_s
        self.closed = False
        self.limit = ""
        self.broken: EpisodeFailed | None = None
        self._failures: dict[str, EpisodeFailed] = {}  # requests that the engines have failed, and were not repeated
        self._calls: dict[str, Call] = {}
        self._actions: dict[bytes, int] = {}  # by the key of the conversation up to and with them
        self._noted: set[bytes] = set()

    def begin(self, body: bytes, idempotency_key: str = "") -> tuple[Asked, Call]:
        """The call of this request: one that runs or has run, if it was sent before, else a new one. Raises Refused."""
        if self.closed:
            raise Refused(404, CLOSED, code="session_closed")
        asked = read(body, self.sampling)
        identity = hashlib.blake2b(
            idempotency_key.encode(errors="surrogateescape") + b"\n" + body, digest_size=16
        ).hexdigest()
        call = self._calls.get(identity) or self._start(identity, asked)
        if not call.num_waiting:
            self._give_up_later(call)
        call.abandoned = False
        return asked, call

    async def wait(self, call: Call) -> Answer:
        """Its answer. Raises Refused. When nobody waits for it any more, it is soon no longer sampled."""
        if (work := call.work) is None:
            assert call.answer is not None
            return call.answer
        call.num_waiting += 1
        if call.giving_up:
            call.giving_up.cancel()
        try:
            await asyncio.wait({work.sampled})
        finally:
            call.num_waiting -= 1
            if not call.num_waiting:
                call.abandoned = True
                self._give_up_later(call)
        if work.sampled.cancelled() or (self.closed and call.answer is None):
            raise Refused(404, CLOSED, code="session_closed")
        if call.answer is None:
            call.answer = self._receive(call, work)
            call.work = None
        return call.answer

    async def close(self) -> None:
        """Nothing is sampled after it, and the tree stays as it is."""
        self.closed = True
        running = {call.work.sampled for call in self._calls.values() if call.work and not call.work.sampled.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_S)

    def note_bug(self) -> None:
        """The exception that is being handled is ours: the episode is not what it seems."""
        self.broken = EpisodeFailed(Status.episode_failed, traceback.format_exc(), again=False)

    def require_sound(self) -> None:
        """Raises EpisodeFailed when the episode owes its course to a failure of ours, or of an engine."""
        for failure in (self.broken, *self._failures.values()):
            if failure is not None:
                raise failure

    def _start(self, identity: str, asked: Asked) -> Call:
        cfg = self.speech.cfg
        wanted = sum(call.work is not None and not call.abandoned for call in self._calls.values())
        if self.played.tree.num_turns + wanted >= cfg.env.max_turns:
            self.limit = f"the episode has had its {cfg.env.max_turns} turns (env.max_turns)"
            raise Refused(400, self.limit, code="max_turns_exceeded")
        if asked.tools and self.speech.tool_format == "none":
            what = (
                f"tools: the chat template of {cfg.model.path} writes no tool calls that are known; see env.tool_format"
            )
            raise Refused(400, what, "tools")
        try:
            parent, following, ids = self._find(asked)
        except TemplateError as error:
            raise Refused(400, str(error), "messages") from error
        room = cfg.env.context_tokens or cfg.rollout.max_model_len
        if len(ids) >= room:
            self.limit = f"the messages are {len(ids)} tokens, and the context has room for {room} with their answer"
            raise Refused(400, self.limit, "messages", "context_length_exceeded")
        sampling = replace(
            self.sampling,
            seed=derive_seed(self.seed, identity),  # of the request alone: agents may run side by side
            max_tokens=min(asked.max_tokens, room - len(ids)),
        )
        sampled = asyncio.get_running_loop().create_task(self._sample(ids, sampling))
        work = Work(asked=asked, ids=ids, parent=parent, following=following, sampled=sampled)
        call = self._calls[identity] = Call(identity=identity, work=work)
        return call

    def _find(self, asked: Asked) -> tuple[int, Extension | None, list[int]]:
        """(action that the messages continue or -1, what follows it, all ids up to where the policy acts)."""
        bridge, tree = self.speech.bridge, self.played.tree
        if self.speech.cfg.env.on_rewrite is not Rewrite.fork:
            for count in range(len(asked.messages), 0, -1):
                parent = self._actions.get(asked.keys[count], -1)
                if parent >= 0:
                    following = bridge.extend(tree.segments[parent].ids, asked.messages[count:])
                    return parent, following, tree.ids(parent) + following.close + following.observation
        return -1, None, bridge.first(asked.messages, asked.tools)

    async def _sample(self, ids: list[int], sampling: Sampling) -> Outcome:
        try:
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self.lane.generate(ids, sampling), self.lane_loop)
            )
        except Exception:  # as that of an engine
            return Outcome(request_id="", error=traceback.format_exc())

    def _give_up_later(self, call: Call) -> None:
        if call.giving_up:
            call.giving_up.cancel()
        if call.work and not call.work.sampled.done():
            call.giving_up = asyncio.get_running_loop().call_later(self.abandon_s, self._give_up, call)

    def _give_up(self, call: Call) -> None:
        if not call.num_waiting and call.work and not call.work.sampled.done():
            call.work.sampled.cancel()
            self._forget(call)

    def _forget(self, call: Call) -> None:
        """The same request is then a new one."""
        if self._calls.get(call.identity) is call:
            del self._calls[call.identity]

    def _receive(self, call: Call, work: Work) -> Answer:
        """What is told of a finished call, which becomes part of the episode. Raises Refused."""
        outcome = work.sampled.result()
        if outcome.completion is None:
            self._forget(call)
            self._failures[call.identity] = engine_failure(outcome)
            raise Refused(503, f"the engine failed: {outcome.error}", code="engine", retry=not outcome.timed_out)
        try:
            require_same_ids(outcome.completion.prompt_ids, work.ids)
        except EpisodeFailed as failure:
            self.broken = failure
            raise Refused(500, failure.error, code=failure.status.value) from failure
        self._failures.pop(call.identity, None)
        self.limit = ""
        speech = self.speech
        answer = make_answer(
            outcome.completion, work.asked, speech.tokenizer, speech.tool_format, call.identity, int(time.time())
        )
        node = self._record(work, outcome.completion)
        self._note(work.asked, node, answer)
        return answer

    def _record(self, work: Work, completion: Completion) -> int:
        """Adds a turn, and what it answers, to the tree; its number."""
        tree, agent = self.played.tree, work.asked.agent
        if work.following is None:
            node = tree.attach(work.ids, agent)
        else:
            node = tree.follow(work.parent, Kind.close, work.following.close, agent)
            node = tree.follow(node, Kind.observation, work.following.observation, agent)
        return tree.add_action(node, completion, agent)

    def _note(self, asked: Asked, node: int, answer: Answer) -> None:
        """Makes the answer one that can be continued, and the transcript longer by what is new."""
        transcript = self.played.transcript
        for key, message in zip(asked.keys[1:], asked.messages, strict=True):
            if key not in self._noted:
                transcript.append({"kind": "message", "agent": asked.agent} | message)
        note_action(self.played, asked.agent, node, answer.text, answer.finish_reason == "length")
        key = next_key(asked.keys[-1], as_message(answer.message, len(asked.messages)))
        self._actions[key] = node
        self._noted.update(asked.keys, [key])
