"""Whether what is trained is what the engine saw and sampled, id for id, in episodes of several turns."""

import argparse
import copy
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from conf.launch import compose
from conf.schema import AlgoConfig, Config
from rl.batching import collate
from rl.faults import RoleDied
from rl.losses import policy_objective
from rl.prompts import PromptStream
from rl.types import Batch, Completion, Group, Prompt, Sampling, Scores, Trajectory
from rollout.engine import Outcome
from rollout.pool import RolloutPool
from rollout.preflight.launch import Prepared, prepare
from rollout.single_turn import Generator, Player
from scripts.benchmarks.agents_parts import Figure
from scripts.benchmarks.common import base_overrides, say

TEMPERATURE, MAX_TOKENS = 1.3, 24
GRADIENT_EPISODES = 2  # logits of all their tokens are held at once


@dataclass(kw_only=True)
class Call:
    """One request to an engine: the ids that it was sent, and its completion as it came back."""

    sent: list[int]
    completion: Completion


@dataclass(kw_only=True)
class Noted:
    """An episode and every engine call of it."""

    trajectory: Trajectory
    calls: list[Call]


@dataclass
class NotedLane:
    """A lane that keeps a copy of what goes through it."""

    lane: Generator
    calls: list[Call] = field(default_factory=list)

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Outcome:
        sent = list(prompt_ids)
        outcome = await self.lane.generate(prompt_ids, sampling)
        if outcome.completion is not None:
            self.calls.append(Call(sent=sent, completion=copy.deepcopy(outcome.completion)))
        return outcome


@dataclass
class NotedPlayer:
    """A Player that keeps every episode with its engine calls."""

    player: Player
    noted: list[Noted] = field(default_factory=list)

    def limit_s(self, episodes: int) -> float:
        return self.player.limit_s(episodes)

    async def play(self, lane: Generator, prompt: Prompt, sampling: Sampling, seed: int) -> Trajectory:
        noted = NotedLane(lane)
        trajectory = await self.player.play(noted, prompt, sampling, seed)
        self.noted.append(Noted(trajectory=trajectory, calls=noted.calls))
        return trajectory


def measure_exact(args: argparse.Namespace) -> list[Figure]:
    """All of this with a real engine and, as the yardstick, the same folder in plain transformers."""
    from transformers import AutoModelForCausalLM

    cfg = exact_config(args)
    prepared = prepare(cfg)
    with started_engines(cfg) as handles:
        say(f"{args.episodes} episodes")
        noted = note_episodes(cfg, prepared, handles, args.episodes)
    torch.set_num_threads(args.threads)
    lm = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32).eval()
    say("scoring them again")
    return exact_figures(noted, prepared.tokenizer, lm, cfg.rollout.temperature)


def exact_config(args: argparse.Namespace) -> Config:
    """Guesses from 1 to 5 in sentences, hot enough that the model samples what no tokenizer would write."""
    return compose(
        [
            *(item for item in base_overrides(args) if not item.startswith("experiment=")),
            "experiment=smollm2_guess",
            "env.kwargs.style=chat",
            "env.kwargs.example=false",
            "prompts_per_step=1",
            f"data.size={args.episodes}",
            "data.eval_size=0",
            f"rollout.temperature={TEMPERATURE}",
            f"rollout.max_tokens={MAX_TOKENS}",
        ]
    )


@contextmanager
def started_engines(cfg: Config) -> Iterator[list[Any]]:
    """Engines that serve the model folder's own weights, without a trainer; ended at the end."""
    from actors.cluster import Cluster
    from rollout.engines import EngineGroup

    with ExitStack() as stack:
        say("starting the engine")
        cluster = Cluster(cfg.cluster)
        stack.callback(cluster.stop)
        engines = EngineGroup(cfg, cluster, cfg.model.path)
        stack.callback(engines.stop)
        engines.start().result()
        engines.accept_loaded(version=0)
        yield engines.handles


def note_episodes(cfg: Config, prepared: Prepared, handles: Sequence[Any], count: int) -> list[Noted]:
    """Plays so many episodes, each of a task of its own, as a run plays them."""
    from scripts.wiring import make_player

    with ExitStack() as stack:
        player = NotedPlayer(make_player(cfg, prepared, stack))
        stream = PromptStream(prompts=prepared.train, seed=cfg.seed, shuffle=False)
        pool = RolloutPool(cfg, handles, stream, player, prepared.stop_token_ids)
        stack.callback(pool.close)
        pool.sample([stream.at(position) for position in range(count)], pool.sampling, 1)
    return player.noted


def exact_figures(noted: Sequence[Noted], tokenizer: Any, lm: Any, temperature: float) -> list[Figure]:
    """Raises RoleDied when no episode came to its end."""
    valid = [episode for episode in noted if episode.trajectory.valid]
    if not valid:
        raise RoleDied(f"none of {len(noted)} episodes is valid, the first: {noted[0].trajectory.error}")
    rows = [row for episode in valid for row in episode.trajectory.rows]
    completions = [call.completion for episode in valid for call in episode.calls]
    observation, action = loss_gradients(lm, several_turns(valid), temperature)
    return [
        Figure("exact_episodes", len(noted), "episodes"),
        Figure("exact_episodes_failed", len(noted) - len(valid), "episodes"),
        Figure("rows_total", len(rows), "rows"),
        Figure("rows_exact", sum(num_exact_rows(episode) for episode in valid), "rows"),
        Figure("completions_total", len(completions), "completions"),
        Figure("completions_trained_once", sum(num_trained_once(episode) for episode in valid), "completions"),
        Figure("resampled_differently", resampled_differently(completions, tokenizer), "share"),
        Figure("max_logprob_diff", largest(logprob_diff(lm, row, temperature) for row in rows), "nats"),
        Figure("observation_gradient", observation, "1"),
        Figure("action_gradient", action, "1"),
    ]


def largest(values: Iterable[float]) -> float:
    """NaN when there is one among them."""
    return float(torch.tensor(list(values)).max())


def num_exact_rows(episode: Noted) -> int:
    """Rows whose every run of action tokens, with all that stands before it, is one engine call, id for id."""
    return sum(None not in trained_calls(row, episode.calls) for row in episode.trajectory.rows)


def num_trained_once(episode: Noted) -> int:
    """Engine calls that are trained in exactly one place."""
    trained = Counter(n for row in episode.trajectory.rows for n in trained_calls(row, episode.calls) if n is not None)
    return sum(trained[number] == 1 for number in range(len(episode.calls)))


def trained_calls(row: Trajectory, calls: Sequence[Call]) -> list[int | None]:
    """For each run of action tokens of a row the number of the call that it is, with its log-probabilities too."""
    return [
        next((number for number, call in enumerate(calls) if is_call(row, start, end, call)), None)
        for start, end in action_runs(row)
    ]


def is_call(row: Trajectory, start: int, end: int, call: Call) -> bool:
    made = call.completion
    return (
        call.sent == made.prompt_ids == row.token_ids[:start]
        and made.token_ids == row.token_ids[start:end]
        and array("f", made.logprobs) == array("f", row.logprobs[start:end])
        and made.versions == row.versions[start:end]
    )


def action_runs(row: Trajectory) -> list[tuple[int, int]]:
    """(first token, one behind the last) of each run of action tokens."""
    mask = [False, *row.action_mask, False]
    edges = [n for n in range(len(row.action_mask) + 1) if mask[n] != mask[n + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def resampled_differently(completions: Sequence[Completion], tokenizer: Any) -> float:
    """Share of the completions that would have other ids if their text, special tokens and all, were encoded anew."""
    changed = 0
    for made in completions:
        text = tokenizer.decode(made.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        changed += tokenizer(text, add_special_tokens=False)["input_ids"] != made.token_ids
    return changed / len(completions)


@torch.inference_mode()
def logprob_diff(lm: Any, row: Trajectory, temperature: float) -> float:
    """Largest |engine - recomputed in fp32| log-probability of the row's action tokens, by one forward of it alone."""
    places = torch.tensor([n for n, acts in enumerate(row.action_mask) if acts])
    ids = torch.tensor(row.token_ids)
    logits = lm(ids[None], logits_to_keep=places - 1, use_cache=False).logits[0].float()
    found = (logits / temperature).log_softmax(-1).gather(-1, ids[places][:, None])[:, 0]
    return float((found - torch.tensor(row.logprobs)[places]).abs().max())


def several_turns(valid: Sequence[Noted], count: int = GRADIENT_EPISODES) -> list[Trajectory]:
    """The episodes of the most turns: what the environment said stands between those."""
    return [e.trajectory for e in sorted(valid, key=lambda e: -e.trajectory.metrics["turns"])[:count]]


def loss_gradients(lm: Any, trajectories: Sequence[Trajectory], temperature: float) -> tuple[float, float]:
    """|d loss / d logits| of a whole update's loss on these episodes: the largest at any place that predicts a token of
    a prompt, of an observation or of padding; and of those that predict an action, the smallest of their largest.

    Advantages, old and reference log-probabilities are random, and so are those of tokens that are not trained.
    """
    groups = [Group(position=n, prompt=Prompt(index=n, token_ids=[], record={}), trajectories=[t], version=0)
              for n, t in enumerate(trajectories)]  # fmt: skip
    batch = collate(groups)
    with torch.no_grad():
        logits = lm(batch.tokens, use_cache=False).logits.float()
    logits.requires_grad_()
    scores = token_scores(logits, batch, temperature)
    random = torch.Generator().manual_seed(0)
    shape = batch.tokens.shape
    batch.advantages = torch.randn(shape, generator=random)
    batch.train_logprobs, batch.ref_logprobs = (
        scores.logprobs.detach() + 0.05 * torch.randn(shape, generator=random) for _ in range(2)
    )
    batch.kl_coef = 0.1
    algo = AlgoConfig(kl_coef=0.1, entropy_coef=0.01)
    loss, _ = policy_objective(algo, batch, scores, version=0)
    (loss / batch.num_action_tokens).backward()
    assert logits.grad is not None
    size = logits.grad.abs().amax(-1)
    predicts_action = torch.nn.functional.pad(batch.action_mask[:, 1:], (0, 1))
    return float(size[~predicts_action].max()), float(size[predicts_action].min())


def token_scores(logits: torch.Tensor, batch: Batch, temperature: float) -> Scores:
    """Log-probabilities and entropies of all tokens of a batch, trained or not."""
    logprobs = (logits[:, :-1] / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return Scores(logprobs=torch.nn.functional.pad(chosen, (1, 0)), entropy=torch.nn.functional.pad(entropy, (1, 0)))
