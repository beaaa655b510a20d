"""Episodes of agents that bring their own loop: run -> score -> close, with the policy behind an HTTP endpoint."""

import asyncio
from collections.abc import Sequence
from typing import Any

from conf.schema import Config
from rl.types import Prompt, Sampling, Status, Trajectory
from rollout.agents.request import MODEL
from rollout.agents.session import Session, Speech
from rollout.attempts import Attempts, EpisodeFailed, Host, Hosts, require_rewards
from rollout.chat import Bridge
from rollout.endpoint import Endpoint
from rollout.played import Played, task_of
from rollout.processes.env_faults import EnvRaised, EnvTimeout
from rollout.single_turn import Generator

Outcome = float | dict[str, float]  # of all agents, or of each by name


class Agents:
    """A rollout.single_turn.Player of a rollout.environment.Agent. Serves the policy until `close`."""

    def __init__(
        self, cfg: Config, bridge: Bridge, hosts: Hosts, tokenizer: Any, tool_format: str, methods: Sequence[str]
    ):
        """`methods`: the optional methods that the agent has."""
        self.cfg, self.scores = cfg, "score" in methods
        self.speech = Speech(cfg=cfg, bridge=bridge, tokenizer=tokenizer, tool_format=tool_format)
        self.attempts = Attempts(cfg.env, hosts)
        self.endpoint = Endpoint()

    def close(self) -> None:
        """May be called again."""
        self.endpoint.close()

    def limit_s(self, episodes: int) -> float:
        """As Player: in as many rounds as the limit on episodes at a time makes of them, each with its retries."""
        return self.attempts.limit_s(episodes)

    async def play(self, lane: Generator, prompt: Prompt, sampling: Sampling, seed: int) -> Trajectory:
        """As Player. Raises RoleDied when env.max_failures episodes in a row have failed for their environment."""
        task = task_of(self.cfg.seed, prompt)
        return await self.attempts.play(task, lambda played, host: self._play(played, host, lane, sampling, seed))

    async def _play(self, played: Played, host: Host, lane: Generator, sampling: Sampling, seed: int) -> None:
        env = self.cfg.env
        session = Session(self.speech, played, lane, asyncio.get_running_loop(), sampling, seed)
        try:
            base_url = await self.endpoint.open(session)
            result = await host.call("run", played.task, base_url, MODEL, deadline_s=env.episode_s)
        except EnvTimeout as fault:
            if fault.stage != "run":
                raise
            raise TimeoutError from fault  # it had the whole episode's time
        except EnvRaised as fault:
            session.require_sound()
            if not session.limit:
                raise
            if not self.scores:
                hint = f"it was told that {session.limit}; catch openai.BadRequestError, or add score() to the agent"
                raise EpisodeFailed(Status.env_failed, f"{fault}\n{hint}", again=False) from fault
            result = None
        finally:
            await self.endpoint.close_session(session)
        session.require_sound()
        if not played.tree.num_turns:
            what = (
                "the agent's run has ended without an answer of the model; it must ask at the base_url that it is given"
            )
            raise EpisodeFailed(Status.env_failed, what, again=False)
        played.truncated = bool(session.limit)
        given = [] if result is None else [result]
        if self.scores:
            given.append(await host.call("score", deadline_s=env.score_s))
        played.outcome = add_up(given, {segment.agent for segment in played.tree.segments if segment.turn >= 0})


def add_up(outcomes: Sequence[Outcome], agents: set[str]) -> Outcome:
    """What run and score gave. Raises EpisodeFailed when that is nothing, or leaves out one of those who acted."""
    if not outcomes:
        what = "run returned None, and there is no score(): one of them must give the reward"
        raise EpisodeFailed(Status.env_bad_value, what, again=False)
    named = set[str]().union(*(outcome for outcome in outcomes if isinstance(outcome, dict)))
    if not any(isinstance(outcome, dict) for outcome in outcomes):
        return sum(outcome for outcome in outcomes if not isinstance(outcome, dict))
    require_rewards(named, agents)
    return {name: sum(part.get(name, 0.0) if isinstance(part, dict) else part for part in outcomes) for name in named}
