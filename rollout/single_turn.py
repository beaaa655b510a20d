"""An episode of one turn: a completion of the prompt, then its reward."""

import math
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from conf.schema import Config
from rl.types import Completion, Prompt, Sampling, Status, Trajectory
from rollout.engine import Outcome
from rollout.rewards import Scored


class Generator(Protocol):
    """What an episode needs of the engines; see rollout.router.Lane."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Outcome: ...


class Player(Protocol):
    """Plays one episode. Never raises but when it is cancelled: failure is a status of the trajectory."""

    async def play(self, lane: Generator, prompt: Prompt, sampling: Sampling, seed: int) -> Trajectory: ...

    def limit_s(self, episodes: int) -> float:
        """Longest time that so many episodes, begun together, may take."""
        ...


class Scorer(Protocol):
    """Scores one completion; see rollout.rewards.RewardPool."""

    async def score(self, completion: str, record: dict[str, Any]) -> Scored: ...


class SingleTurn:
    """A Player for data with a reward function."""

    def __init__(self, cfg: Config, scorer: Scorer, decode: Callable[[list[int]], str]):
        self.cfg, self.scorer, self.decode = cfg, scorer, decode

    def limit_s(self, episodes: int) -> float:
        """As Player: the completions, and one after another in each reward process the rewards."""
        in_line = math.ceil(episodes / self.cfg.reward.num_workers)
        return self.cfg.rollout.deadline_s + self.cfg.reward.deadline_s * in_line

    async def play(self, lane: Generator, prompt: Prompt, sampling: Sampling, seed: int) -> Trajectory:
        """As Player."""
        outcome = await lane.generate(prompt.token_ids, replace(sampling, seed=seed))
        if outcome.completion is None:
            status = Status.engine_timeout if outcome.timed_out else Status.engine_failed
            return failed(prompt, status, outcome.error)
        trajectory = as_trajectory(outcome.completion)
        try:
            trajectory.text = self.decode(outcome.completion.token_ids)
            scored = await self.scorer.score(trajectory.text, prompt.record)
        except Exception:
            scored = Scored(reward=None, status=Status.reward_failed, error=traceback.format_exc(), seconds=0.0)
        trajectory.status, trajectory.error = scored.status, scored.error
        trajectory.reward = scored.reward if scored.reward is not None else 0.0
        trajectory.rewards = scored.rewards
        return trajectory


def demonstrated(prompt_ids: list[int], token_ids: list[int]) -> Completion:
    """A turn that no engine has sampled."""
    count = len(token_ids)
    return Completion(
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=[0.0] * count,
        finish_reason="stop",
        versions=[-1] * count,
        ttft_s=0.0,
        decode_s=0.0,
    )


def as_trajectory(completion: Completion) -> Trajectory:
    """One engine call as a trajectory: the prompt, then what was sampled."""
    prompt = len(completion.prompt_ids)
    return Trajectory(
        token_ids=completion.prompt_ids + completion.token_ids,
        prompt_len=prompt,
        action_mask=[False] * prompt + [True] * len(completion.token_ids),
        logprobs=[0.0] * prompt + completion.logprobs,
        versions=[-1] * prompt + completion.versions,
        truncated=completion.finish_reason == "length",
    )


def failed(prompt: Prompt, status: Status, error: str) -> Trajectory:
    """An episode without a completion: only its prompt, its status and its error."""
    count = len(prompt.token_ids)
    return Trajectory(
        token_ids=list(prompt.token_ids),
        prompt_len=count,
        action_mask=[False] * count,
        logprobs=[0.0] * count,
        versions=[-1] * count,
        status=status,
        error=error,
    )
