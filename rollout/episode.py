"""Episodes of several turns: reset -> (generate -> parse -> step)* -> score -> close, each stage with its deadline.

What fails is told by the boundary that it crossed. An environment, sandbox or engine that fails is nobody's fault in
the episode: it is played again with the same task and seed, and left out when that fails too. What the episode itself
has caused (an exception of the environment, a value that is no reward) is kept with its traceback and left out as well.
"""

import asyncio
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from conf.choices import Context
from conf.schema import Config
from rl.faults import RoleDied
from rl.types import Completion, Prompt, Sampling, Status, Trajectory
from rollout.chat import Bridge, TemplateError
from rollout.conversation import (
    SUMMARY_REQUEST,
    Conversation,
    add_messages,
    add_turn,
    begin,
    begin_anew,
    clip,
    room,
    slide,
    wants_room,
)
from rollout.env_faults import EnvBadValue, EnvDied, EnvFault, EnvRaised, EnvTimeout
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.seeds import derive_seed
from rollout.single_turn import Generator
from rollout.tool_calls import parse
from rollout.trajectory import Row, Tree


class Host(Protocol):
    """Where the environment of one episode runs; see rollout.isolation."""

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any: ...

    async def close(self, deadline_s: float) -> None: ...


class Hosts(Protocol):
    """Gives hosts; see rollout.isolation."""

    async def open(self) -> Host: ...


class EpisodeFailed(Exception):
    """The episode is over, for a reason that is a status. `again`: whether it is worth playing once more."""

    def __init__(self, status: Status, error: str, again: bool):
        super().__init__(error)
        self.status, self.error, self.again = status, error, again


@dataclass(kw_only=True)
class Played:
    """An episode as far as it came."""

    task: Task
    tree: Tree = field(default_factory=Tree)
    conversations: dict[str, Conversation] = field(default_factory=dict)
    outcome: float | dict[str, float] = 0.0
    truncated: bool = False
    infos: list[dict[str, Any]] = field(default_factory=list)
    transcript: list[dict[str, Any]] = field(default_factory=list)


class Episodes:
    """A rollout.single_turn.Player of an environment."""

    def __init__(
        self, cfg: Config, bridge: Bridge, hosts: Hosts, tokenizer: Any, tool_format: str, methods: Sequence[str]
    ):
        """`methods`: the optional methods that the environment has."""
        self.cfg, self.bridge, self.hosts, self.tokenizer = cfg, bridge, hosts, tokenizer
        self.tool_format, self.scores = tool_format, "score" in methods
        self._failures = 0  # of the environment, in a row

    def limit_s(self, episodes: int) -> float:
        """As Player: in as many rounds as the limit on episodes at a time makes of them, each with its retries."""
        env = self.cfg.env
        rounds = -(-episodes // env.max_concurrent)
        return rounds * (1 + env.retries) * (env.episode_s + env.close_s)

    async def play(self, lane: Generator, prompt: Prompt, sampling: Sampling, seed: int) -> Trajectory:
        """As Player. Raises RoleDied when env.max_failures episodes in a row have failed for their environment."""
        env = self.cfg.env
        task = Task(index=prompt.index, seed=derive_seed("task", self.cfg.seed, prompt.index), data=prompt.record)
        for _attempt in range(1 + env.retries):
            played = Played(task=task)
            try:
                host = await self.hosts.open()
                try:
                    async with asyncio.timeout(env.episode_s):
                        await self._play(played, host, lane, sampling, seed)
                finally:
                    await self._close(played, host)
            except EpisodeFailed as failure:
                failed = failure
            except TimeoutError:
                what = (
                    f"the episode was not over in {env.episode_s:g} s (env.episode_s), at turn {played.tree.num_turns}"
                )
                failed = EpisodeFailed(Status.episode_timeout, what, again=False)
            except EnvFault as fault:
                failed = as_failure(fault)
            except Exception:  # one episode must not take the others with it
                failed = EpisodeFailed(Status.episode_failed, traceback.format_exc(), again=False)
            else:
                self._failures = 0
                return as_trajectory(played)
            self._note(failed)
            if not failed.again:
                break
        trajectory = as_trajectory(played)
        trajectory.status, trajectory.error = failed.status, failed.error
        return trajectory

    def _note(self, failed: EpisodeFailed) -> None:
        """Counts failures that are the environment's; too many in a row end the run."""
        of_environment = failed.again and failed.status.value.startswith("env")
        self._failures = self._failures + 1 if of_environment else 0
        if self._failures >= self.cfg.env.max_failures:
            raise RoleDied(
                f"phase rollout: environment {self.cfg.env._target_} failed {self._failures} times in a row "
                f"(env.max_failures), the last time: {failed.status.value}: {failed.error}"
            )

    async def _close(self, played: Played, host: Host) -> None:
        """Closes the environment, however the episode has ended. That it fails is noted and spoils nothing."""
        try:
            await host.close(self.cfg.env.close_s)
        except EnvFault as fault:
            played.transcript.append({"kind": "note", "text": f"close: {fault}"})

    async def _play(self, played: Played, host: Host, lane: Generator, sampling: Sampling, seed: int) -> None:
        env, tree = self.cfg.env, played.tree
        observation: Observation = await host.call("reset", played.task, deadline_s=env.reset_s)
        agent, tools = observation.agent, observation.tools
        messages = clip(observation.messages, env.observation_tokens, self.tokenizer)
        while True:
            note_messages(played, agent, messages)
            try:
                conversation = await self._continue(played, lane, agent, messages, tools, sampling, seed)
            except TemplateError as error:
                raise EpisodeFailed(Status.env_bad_value, str(error), again=False) from error
            free = room(conversation, env, self.cfg.rollout.max_model_len)
            if free < 1 or tree.num_turns >= env.max_turns:
                played.truncated = True
                break
            action = await self._act(played, lane, conversation, sampling, seed, free)
            result: StepResult = await host.call("step", action, deadline_s=env.step_s)
            tree.segments[conversation.node].reward += result.reward
            played.infos.append(result.info)
            played.transcript[-1] |= {"reward": result.reward, "info": result.info}
            messages = clip(result.messages, env.observation_tokens, self.tokenizer)
            if result.terminated or result.truncated:
                note_messages(played, agent, messages)
                played.truncated = result.truncated and not result.terminated
                break
            agent = result.agent or agent
        if self.scores:
            played.outcome = await host.call("score", deadline_s=env.score_s)

    async def _continue(
        self,
        played: Played,
        lane: Generator,
        agent: str,
        messages: list[Message],
        tools: list[dict[str, Any]],
        sampling: Sampling,
        seed: int,
    ) -> Conversation:
        """The agent's conversation with these messages in it, or on a path of its own with room for another turn."""
        env, tree = self.cfg.env, played.tree
        conversation = played.conversations.get(agent)
        if conversation is None:
            conversation = begin(self.bridge, tree, agent, messages, tools)
        elif env.context is Context.compact and self._is_full(conversation, messages, sampling):
            conversation = await self._compact(played, lane, conversation, messages, sampling, seed)
        else:
            add_messages(conversation, self.bridge, tree, messages, env.on_rewrite)
            free = room(conversation, env, self.cfg.rollout.max_model_len)
            if env.context is Context.window and wants_room(env, free, sampling.max_tokens):
                slide(conversation, tree, env.window_turns)
        played.conversations[agent] = conversation
        return conversation

    def _is_full(self, conversation: Conversation, messages: list[Message], sampling: Sampling) -> bool:
        """Whether after these messages there is no room for a turn and, after it, a summary."""
        env = self.cfg.env
        following = self.bridge.extend(conversation.last, messages)
        request = self.bridge.extend(conversation.last, [{"role": "user", "content": SUMMARY_REQUEST}])
        more = len(following.observation) + 2 * len(request.observation) + env.summary_tokens + 2
        free = room(conversation, env, self.cfg.rollout.max_model_len) - more
        return wants_room(env, free, 2 * sampling.max_tokens)

    async def _compact(
        self,
        played: Played,
        lane: Generator,
        conversation: Conversation,
        messages: list[Message],
        sampling: Sampling,
        seed: int,
    ) -> Conversation:
        """Has the model sum its conversation up, as a turn of its own that is trained too, and goes on from that."""
        env, tree = self.cfg.env, played.tree
        request: list[Message] = [{"role": "user", "content": SUMMARY_REQUEST}]
        add_messages(conversation, self.bridge, tree, request, env.on_rewrite)
        note_messages(played, conversation.agent, request)
        free = min(env.summary_tokens, room(conversation, env, self.cfg.rollout.max_model_len))
        if free < 1:
            return conversation
        summary = await self._act(played, lane, conversation, sampling, seed, free)
        return begin_anew(conversation, self.bridge, tree, summary.text, messages)

    async def _act(
        self,
        played: Played,
        lane: Generator,
        conversation: Conversation,
        sampling: Sampling,
        seed: int,
        free: int,
    ) -> Action:
        """One turn of the policy."""
        own = replace(
            sampling, seed=derive_seed(seed, played.tree.num_turns), max_tokens=min(sampling.max_tokens, free)
        )
        outcome = await lane.generate(list(conversation.ids), own)
        completion = outcome.completion
        if completion is None:
            status = Status.engine_timeout if outcome.timed_out else Status.engine_failed
            raise EpisodeFailed(status, outcome.error, again=not outcome.timed_out)
        require_same_ids(conversation, completion)
        text = self.decode(completion.token_ids)
        add_turn(conversation, played.tree, completion, text)
        cut_off = completion.finish_reason == "length"
        action = parse(text, self.tool_format, cut_off, tokenizer=self.tokenizer, tools=conversation.tools)
        played.transcript.append(
            {"kind": "action", "agent": conversation.agent, "segment": conversation.node, "text": text}
        )
        return action

    def decode(self, token_ids: list[int]) -> str:
        """Text of a turn: special tokens left out, where tool calls are not made of them."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=self.tool_format != "llama")
        return text


def require_same_ids(conversation: Conversation, completion: Completion) -> None:
    """Raises EpisodeFailed unless the engine saw the ids of the conversation."""
    if completion.prompt_ids != conversation.ids:
        place = next(
            (n for n, (a, b) in enumerate(zip(completion.prompt_ids, conversation.ids, strict=False)) if a != b),
            min(len(completion.prompt_ids), len(conversation.ids)),
        )
        what = f"the engine saw other ids than the conversation holds, from token {place} on"
        raise EpisodeFailed(Status.tokens_mismatch, what, again=False)


def note_messages(played: Played, agent: str, messages: Sequence[Message]) -> None:
    played.transcript += [{"kind": "message", "agent": agent} | message for message in messages]


def as_failure(fault: EnvFault) -> EpisodeFailed:
    """The status of a fault, and whether the episode is worth playing again."""
    match fault:
        case EnvRaised():
            return EpisodeFailed(Status.env_failed, fault.traceback, again=fault.is_infrastructure)
        case EnvTimeout():
            return EpisodeFailed(Status.env_timeout, str(fault), again=True)
        case EnvDied():
            return EpisodeFailed(Status.env_died, fault.how, again=True)
        case EnvBadValue():
            return EpisodeFailed(Status.env_bad_value, fault.what, again=False)
    raise fault


def as_trajectory(played: Played) -> Trajectory:
    """The episode's rows, each with what it can still earn; an empty trajectory when nothing was sampled."""
    tree, infos = played.tree, played.infos
    rows = tree.rows()
    last = {row.agent: number for number, row in enumerate(rows)}
    made = [as_row(played, row, played.truncated and last[row.agent] == n) for n, row in enumerate(rows)]
    head = made[0] if made else Trajectory(token_ids=[], prompt_len=0, action_mask=[], logprobs=[], versions=[])
    head.more = made[1:]
    head.truncated = head.truncated or played.truncated
    head.transcript = played.transcript
    head.text = "\n".join(entry["text"] for entry in played.transcript if entry["kind"] == "action")
    head.metrics = {"turns": float(tree.num_turns), "rows": float(len(rows)), "forks": float(tree.num_forks)}
    for name in {name for info in infos for name, value in info.items() if isinstance(value, int | float)}:
        values = [float(info[name]) for info in infos if isinstance(info.get(name), int | float)]
        head.metrics[name] = sum(values) / len(values)
    return head


def as_row(played: Played, row: Row, truncated: bool) -> Trajectory:
    """One row as a trajectory: turn rewards on the last token of each turn, what is still to come as the outcome."""
    outcome = played.outcome if not isinstance(played.outcome, dict) else played.outcome.get(row.agent, 0.0)
    segments, own = played.tree.segments, set(row.segments)
    later = sum(
        s.reward
        for number, s in enumerate(segments)
        if s.turn > row.turns[0][0] and s.agent == row.agent and number not in own
    )
    token_rewards = [0.0] * len(row.token_ids)
    for number, (_, place) in zip(row.segments, row.turns, strict=True):
        token_rewards[place] += segments[number].reward
    return Trajectory(
        token_ids=row.token_ids,
        prompt_len=row.prompt_len,
        action_mask=row.action_mask,
        logprobs=row.logprobs,
        versions=row.versions,
        reward=outcome + later,
        token_rewards=token_rewards,
        truncated=truncated,
        agent=row.agent,
    )
