"""Episodes of several turns: reset -> (generate -> parse -> step)* -> score -> close, each stage with its deadline."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conf.choices import Context
from conf.schema import Config
from rl.types import Prompt, Sampling, Status, Trajectory
from rollout.attempts import (
    Attempts,
    EpisodeFailed,
    Host,
    Hosts,
    engine_failure,
    require_each_named,
    require_same_ids,
)
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
from rollout.environment import Action, Message, Observation, StepResult
from rollout.played import Played, note_action, note_messages, task_of
from rollout.seeds import derive_seed
from rollout.single_turn import Generator
from rollout.tool_calls import decode, parse


class Episodes:
    """A rollout.single_turn.Player of an environment."""

    def __init__(
        self, cfg: Config, bridge: Bridge, hosts: Hosts, tokenizer: Any, tool_format: str, methods: Sequence[str]
    ):
        """`methods`: the optional methods that the environment has."""
        self.cfg, self.bridge, self.tokenizer = cfg, bridge, tokenizer
        self.tool_format, self.scores = tool_format, "score" in methods
        self.attempts = Attempts(cfg.env, hosts)

    def limit_s(self, episodes: int) -> float:
        """As Player: in as many rounds as the limit on episodes at a time makes of them, each with its retries."""
        return self.attempts.limit_s(episodes)

    async def play(self, lane: Generator, prompt: Prompt, sampling: Sampling, seed: int) -> Trajectory:
        """As Player. Raises RoleDied when env.max_failures episodes in a row have failed for their environment."""
        task = task_of(self.cfg.seed, prompt)
        return await self.attempts.play(task, lambda played, host: self._play(played, host, lane, sampling, seed))

    async def _play(self, played: Played, host: Host, lane: Generator, sampling: Sampling, seed: int) -> None:
        env, tree = self.cfg.env, played.tree
        observation: Observation = await host.call("reset", played.task, deadline_s=env.reset_s)
        agent, tools = observation.agent, observation.tools
        messages = clip(observation.messages, env.observation_tokens, self.tokenizer)
        conversations: dict[str, Conversation] = {}
        while True:
            note_messages(played, agent, messages)
            try:
                if agent in conversations:
                    conversation = await self._continue(played, lane, conversations[agent], messages, sampling, seed)
                else:
                    conversation = begin(self.bridge, tree, agent, messages, tools)
            except TemplateError as error:
                raise EpisodeFailed(Status.env_bad_value, str(error), again=False) from error
            conversations[agent] = conversation
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
        if not tree.num_turns:
            what = f"the episode begins with {len(conversation.ids)} tokens, which leaves no room for a turn"
            raise EpisodeFailed(Status.env_bad_value, what, again=False)
        if self.scores:
            played.outcome = await host.call("score", deadline_s=env.score_s)
            require_each_named(played)

    async def _continue(
        self,
        played: Played,
        lane: Generator,
        conversation: Conversation,
        messages: list[Message],
        sampling: Sampling,
        seed: int,
    ) -> Conversation:
        """The agent's conversation with these messages in it, or on a path of its own with room for another turn."""
        env, tree = self.cfg.env, played.tree
        last = tree.num_turns + 1 >= env.max_turns  # then nothing could go on from a summary
        if env.context is Context.compact and not last and self._is_full(conversation, messages, sampling):
            return await self._compact(played, lane, conversation, messages, sampling, seed)
        add_messages(conversation, self.bridge, tree, messages, env.on_rewrite)
        free = room(conversation, env, self.cfg.rollout.max_model_len)
        if env.context is Context.window and wants_room(env, free, sampling.max_tokens):
            slide(conversation, tree, env.window_turns)
        return conversation

    def _is_full(self, conversation: Conversation, messages: list[Message], sampling: Sampling) -> bool:
        """Whether after these messages there is no room for a turn and, after it, a summary."""
        env = self.cfg.env
        following = self.bridge.extend(conversation.last, messages)
        request = self.bridge.extend(conversation.last, [SUMMARY_REQUEST])
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
        add_messages(conversation, self.bridge, tree, [SUMMARY_REQUEST], env.on_rewrite)
        note_messages(played, conversation.agent, [SUMMARY_REQUEST])
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
            raise engine_failure(outcome)
        require_same_ids(completion.prompt_ids, conversation.ids)
        text = decode(self.tokenizer, completion.token_ids, self.tool_format)
        add_turn(conversation, played.tree, completion, text)
        cut_off = completion.finish_reason == "length"
        action = parse(text, self.tool_format, cut_off, tokenizer=self.tokenizer, tools=conversation.tools)
        note_action(played, conversation.agent, conversation.node, text, cut_off)
        return action
