"""The roles that the loop talks to. Real ones are Ray actors (actors/, rollout/); unit tests use stand-ins."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rl.types import Batch, Group, Prompt, Sampling, Trajectory

Metrics = dict[str, float]


class Policy(Protocol):
    """The trained model: its logprobs under the current weights, and its updates."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities [B, T] float32 of `batch.tokens`, zero where `action_mask` is False."""
        ...

    def update(self, batch: Batch, optimizer_step: int, version: int) -> Metrics:
        """All mini-batches and epochs over `batch`, sampled for step `version`.

        `optimizer_step` counts the policy's optimizer steps before this call.
        """
        ...


class Reference(Protocol):
    """A frozen model that scores what the policy sampled."""

    def logprobs(self, batch: Batch) -> torch.Tensor: ...

    def reload(self, model_path: Path) -> None:
        """Takes the weights of a Hugging Face folder."""
        ...


class Teacher(Protocol):
    """A frozen model whose distribution the policy learns."""

    def logprobs(self, batch: Batch) -> torch.Tensor: ...

    def top_logprobs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probabilities [B, T, k] of its likeliest tokens at each action token's place."""
        ...


class RewardModel(Protocol):
    """A frozen model that scores whole trajectories."""

    def scores(self, batch: Batch) -> torch.Tensor:
        """[B] float32."""
        ...


class Critic(Protocol):
    """A model of the value of each token."""

    def values(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """V of the state before each action token [B, T], 0 elsewhere; and after each row's last token [B]."""
        ...

    def update(self, batch: Batch, version: int) -> Metrics:
        """All mini-batches and epochs over `batch`, the same as the policy's of this step."""
        ...


class Rollouts(Protocol):
    """The pool of rollout engines: asynchronous inside, in prompt order outside."""

    def start(self, first_position: int, version: int) -> None:
        """Begins sampling groups from prompt position `first_position` on, for weight version `version`."""
        ...

    def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups in prompt order; waits for them until the deadline."""
        ...

    def set_version(self, version: int) -> None:
        """Tells the pool that the engines hold weight version `version`: more groups may start."""
        ...

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> list[list[Trajectory]]:
        """Samples and scores outside training (evaluation): for each prompt `samples` trajectories."""
        ...


class Sync(Protocol):
    """Weight sync from the policy to every engine."""

    def push(self, version: int) -> Metrics:
        """Pushes the policy's weights as `version`; returns once no engine samples with others any more.

        With sync.snapshot engines may still be loading them then, while the policy trains on.
        """
        ...

    def settle(self) -> Metrics:
        """Waits until every engine holds and has proven what was last pushed. Raises what `push` raises."""
        ...


@dataclass(kw_only=True)
class Roles:
    """Everything that acts in one run. The last four are there when the algorithm asks for them."""

    policy: Policy
    rollouts: Rollouts
    sync: Sync
    reference: Reference | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None
    reward_model: RewardModel | None = None
