"""The data that flows through the loop. Lengths: B rows, T tokens, N tokens of one sequence.

Per-token arrays are token-aligned: entry t is about token t (its log-probability given tokens < t); entry 0 is never
trained.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

# Sums over action tokens by name: scalars, and histograms (rl.quantiles) under names that end in `_hist`.
Sums = dict[str, torch.Tensor]

MAIN_AGENT = "main"


class Status(Enum):
    """How an episode ended. Only `ok` enters group statistics and the batch; the rest is counted and shown."""

    ok = "ok"
    reward_failed = "reward_failed"
    reward_timeout = "reward_timeout"
    env_failed = "env_failed"
    env_timeout = "env_timeout"
    env_died = "env_died"
    env_bad_value = "env_bad_value"
    tokens_mismatch = "tokens_mismatch"
    episode_timeout = "episode_timeout"
    episode_failed = "episode_failed"
    engine_failed = "engine_failed"
    engine_timeout = "engine_timeout"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Every knob of the sampling distribution: read by the engine, and by whoever scores what was sampled.

    temperature 0 is greedy decoding (evaluation only). top_p 1 and top_k -1 are off. seed is that of one request.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Prompt:
    """One prompt: `index` in its dataset, token ids [N], and the data record that the reward function reads."""

    index: int
    token_ids: list[int]
    record: dict[str, Any]


@dataclass(kw_only=True)
class Completion:
    """One engine call. token_ids, logprobs, versions: [N]. Times in seconds."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[int]
    ttft_s: float
    decode_s: float


@dataclass(kw_only=True)
class Trajectory:
    """The record of one episode: what the engine saw and made, id for id. A row of a batch.

    token_ids, action_mask (True where the policy sampled the token), logprobs (0.0 where it did not),
    versions (-1 where it did not): [N], token-aligned. The first `prompt_len` tokens are the prompt.
    `reward` is the outcome: the weighted sum of the named `rewards`, where there are several. `token_rewards` [N],
    where given, are further rewards of single tokens (turns). truncated: ended by a limit, not by the policy.

    An episode whose conversation forks has further rows (`more`), each with what it can still earn: `reward` is then
    the outcome and the rewards of all later turns that are in other rows. `agent`: who acts in this row.
    `metrics` are averaged over a step's episodes; `transcript` is for people to read.
    """

    token_ids: list[int]
    prompt_len: int
    action_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] | None = None
    status: Status = Status.ok
    error: str = ""
    truncated: bool = False
    text: str = ""
    agent: str = MAIN_AGENT
    more: list["Trajectory"] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    transcript: list[dict[str, Any]] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        return self.status is Status.ok

    @property
    def rows(self) -> list["Trajectory"]:
        """All rows of the episode."""
        return [self, *self.more]

    @property
    def total(self) -> float:
        """All that the episode earned its first agent: the outcome and the rewards of turns."""
        return self.reward + sum(self.token_rewards or ())

    @property
    def num_action_tokens(self) -> int:
        return sum(sum(row.action_mask) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(kw_only=True)
class Group:
    """The trajectories of one prompt. `position` counts prompts drawn since the start of training.

    `baseline` is the greedy answer, where the estimator compares with one; it is not trained on.
    """

    position: int
    prompt: Prompt
    trajectories: list[Trajectory]
    version: int
    baseline: Trajectory | None = None

    @property
    def valid(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.valid]


@dataclass(kw_only=True)
class Batch:
    """Rows of one step, right-padded. Float arrays are float32.

    tokens [B, T] int64; attention_mask, action_mask [B, T] bool; rollout_logprobs, train_logprobs, ref_logprobs,
    teacher_logprobs, values, advantages, returns, token_rewards [B, T]; reward_parts [B, K]; rewards, baseline [B],
    outcomes (rewards before shaping) and shaping (what it added, KL included) [B];
    truncated [B] bool; group_index, episode_index, prefix_index, prompt_len, version [B] int64.
    group_index: rows that are compared, those of one prompt and agent; episode_index: rows of one episode and agent,
    which count once in statistics; prefix_index: rows with the same prompt tokens.
    `version` is the oldest weight version that sampled a token of the row. values: of the state before each token;
    bootstrap [B]: of the state after the row's last one. teacher_ids [B, T, k] int64 and teacher_topk [B, T, k]: the
    teacher's k likeliest tokens at each place and their log-probabilities. loss_weight [B] float64: see rl.aggregation.
    routes [B, T, layers, k] int16: the experts that a forward of this batch takes, where they are given.
    """

    tokens: torch.Tensor
    attention_mask: torch.Tensor
    action_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    rewards: torch.Tensor
    group_index: torch.Tensor
    episode_index: torch.Tensor
    prefix_index: torch.Tensor
    prompt_len: torch.Tensor
    version: torch.Tensor
    truncated: torch.Tensor
    train_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    baseline: torch.Tensor | None = None
    outcomes: torch.Tensor | None = None
    shaping: torch.Tensor | None = None
    reward_parts: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_topk: torch.Tensor | None = None
    loss_weight: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    kl_coef: float = 0.0

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_action_tokens(self) -> int:
        """The global divisor of a token mean over this batch."""
        return int(self.action_mask.sum())

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, padding left out."""
        return [int(n) for n in self.attention_mask.sum(-1)]

    def select(self, rows: list[int]) -> "Batch":
        """The given rows, in that order, cut to the longest. Copies: a pickled view ships its whole storage."""
        index = torch.tensor(rows, dtype=torch.long)
        width = int(self.attention_mask[index].sum(-1).max()) if rows else 0

        per_token = self.tokens.shape[1]

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            rows_of = value[index]
            along = rows_of.dim() > 1 and rows_of.shape[1] == per_token
            return (rows_of[:, :width] if along else rows_of).clone()

        picked: dict[str, Any] = {name: cut(getattr(self, name)) for name in self.__dataclass_fields__}
        return Batch(**picked)


@dataclass(kw_only=True)
class Scores:
    """What a forward of the policy gives for each action token, [B, T] float32, 0 elsewhere.

    divergence: reverse KL to the teacher's distribution, where the batch holds one.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor | None = None


@dataclass(kw_only=True)
class RunState:
    """What a run must remember. `step` == finished steps == weight version.

    prompts_consumed: the position of the next prompt. pass_rates: rolling pass rate of each prompt, by its index in the
    data. kl_coef: the coefficient in force, once a controller has moved it. reference_step: the version that the
    reference holds, 0 for the model that training started from.
    """

    step: int = 0
    optimizer_step: int = 0
    prompts_consumed: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    trajectories_failed: int = 0
    wall_s: float = 0.0
    kl_coef: float | None = None
    reference_step: int = 0
    pass_rates: dict[str, float] = field(default_factory=dict)
    tracking_ids: dict[str, str] = field(default_factory=dict)

    def advance(self, groups: list[Group], optimizer_steps: int) -> None:
        """Counts one finished step that drew `groups` and made `optimizer_steps` optimizer steps."""
        trajectories = [t for g in groups for t in g.trajectories]
        self.step += 1
        self.optimizer_step += optimizer_steps
        self.prompts_consumed = max(g.position for g in groups) + 1
        self.tokens_sampled += sum(t.num_action_tokens for t in trajectories)
        self.tokens_trained += sum(t.num_tokens for t in trajectories if t.valid)
        self.trajectories_failed += sum(not t.valid for t in trajectories)
