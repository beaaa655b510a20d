"""In-process stand-ins for everything the loop talks to: real torch, real numbers, no other process.

One tiny model is the policy (trained by SGD) and, as a copy that only a push refreshes, the engine. So a test sees the
same faults as a run: an engine with old weights, a gradient scaled wrongly, a prompt drawn twice.
"""

import asyncio
import copy
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from actors.engine import StepResult
from actors.host import KINDS
from conf.choices import Optimizer
from conf.schema import (
    AlgoConfig,
    Config,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)
from rl.aggregation import loss_weights
from rl.batching import collate, split_mini_batches
from rl.losses import policy_objective
from rl.masking import masked_fill_zero
from rl.metrics import merge_sums, on_cpu, policy_metrics
from rl.prompts import PromptStream
from rl.roles import Metrics
from rl.schedule import learning_rate, warmup_steps
from rl.types import Batch, Completion, Group, Prompt, Sampling, Scores, Status, Trajectory
from rollout.engine import Outcome, Request
from rollout.rewards import Scored
from rollout.seeds import derive_seed
from rollout.single_turn import as_trajectory
from weightsync.channels.shm import Ring, RingReader
from weightsync.plan import Buffer, Item, Link, Seat, Turn, Wanted, fingerprint, narrowed
from weightsync.planner import plan_streams
from weightsync.regions import Regions
from weightsync.sender import NUM_SLOTS, Read, Sender, digests, piece_of, plain

VOCAB = 12
LIKED = 3  # the token that the reward counts


def make_cfg(
    algo: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    reward: dict[str, Any] | None = None,
    **top: Any,
) -> Config:
    """A small configuration that trains by SGD without clipping; `top` and the sections override it."""
    sgd: dict[str, Any] = {"optimizer": Optimizer.sgd, "lr": 0.5, "grad_clip": 0.0}
    sizes: dict[str, Any] = {"num_steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4}
    small: dict[str, Any] = {"max_tokens": 6, "max_model_len": 32}
    return Config(
        **sizes | top,
        algo=AlgoConfig(**(algo or {})),
        trainer=TrainerConfig(**sgd | (trainer or {})),
        rollout=RolloutConfig(**small | (rollout or {})),
        reward=RewardConfig(**(reward or {})),
    )


def make_prompts(count: int) -> list[Prompt]:
    """Prompts of 1 to 3 tokens, all different in their record."""
    return [
        Prompt(index=i, token_ids=[(i + k) % VOCAB for k in range(1 + i % 3)], record={"id": i}) for i in range(count)
    ]


def make_group(position: int, prompt_ids: list[int], responses: Sequence[list[int]], **per_row: Any) -> Group:
    """A group with these responses. `per_row`: lists for the trajectories' fields, such as reward or status."""
    prompt = Prompt(index=position, token_ids=prompt_ids, record={})
    rows = [
        as_trajectory(
            Completion(
                prompt_ids=prompt_ids,
                token_ids=ids,
                logprobs=[-1.0 - 0.01 * t for t in range(len(ids))],
                finish_reason="stop",
                versions=[0] * len(ids),
                ttft_s=0.0,
                decode_s=0.0,
            )
        )
        for ids in responses
    ]
    for name, values in per_row.items():
        for row, value in zip(rows, values, strict=True):
            setattr(row, name, value)
    return Group(position=position, prompt=prompt, trajectories=rows, version=0)


def ragged_batch(seed: int, vocab: int, prompt_lens: Sequence[int] = (2, 5, 4), samples: int = 3) -> Batch:
    """A scored batch: groups with prompts of other lengths, responses of 1 to 6 tokens, every array filled."""
    random = np.random.default_rng(seed)
    groups = []
    for position, length in enumerate(prompt_lens):
        lengths = [1, *random.integers(1, 7, samples - 1)]
        responses = [random.integers(0, vocab, n).tolist() for n in lengths]
        groups.append(make_group(position, random.integers(0, vocab, length).tolist(), responses))
    batch = collate(groups)
    mask = batch.action_mask

    def filled(low: float, high: float) -> torch.Tensor:
        values = torch.tensor(random.uniform(low, high, mask.shape), dtype=torch.float32)
        return torch.where(mask, values, torch.zeros(()))

    batch.train_logprobs, batch.ref_logprobs = filled(-4, -2.5), filled(-5, -1)
    batch.advantages, batch.kl_coef = filled(-2, 2), 0.3
    return batch


class TinyLm(torch.nn.Module):
    """Logits of the next token from the last one: an embedding and a head."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB, width: int = 8):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Parameter(torch.randn(vocab, width, generator=random))
        self.head = torch.nn.Parameter(torch.randn(vocab, width, generator=random) / width)

    def forward(self, last: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probabilities [..., V] after the tokens `last` [...]."""
        return (self.embed[last] @ self.head.T / temperature).log_softmax(-1)

    def score(self, batch: Batch, temperature: float) -> torch.Tensor:
        """Log-probabilities [B, T] of the action tokens, zero elsewhere."""
        picked = self(batch.tokens[:, :-1], temperature).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        return masked_fill_zero(torch.nn.functional.pad(picked, (1, 0)), batch.action_mask)


@torch.no_grad()
def sample(lm: TinyLm, prompt_ids: list[int], sampling: Sampling, version: int) -> Completion:
    """One completion of `lm`; the same for the same seed and weights."""
    random = torch.Generator().manual_seed(sampling.seed or 0)
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < sampling.max_tokens and not (ids and ids[-1] in sampling.stop_token_ids):
        last = torch.tensor(ids[-1] if ids else prompt_ids[-1])
        scores = lm(last, sampling.temperature or 1.0)
        token = (
            int(torch.multinomial(scores.exp(), 1, generator=random)) if sampling.temperature else int(scores.argmax())
        )
        ids.append(token)
        logprobs.append(float(scores[token]))
    return Completion(
        prompt_ids=prompt_ids,
        token_ids=ids,
        logprobs=logprobs,
        finish_reason="stop" if ids[-1] in sampling.stop_token_ids else "length",
        versions=[version] * len(ids),
        ttft_s=0.0,
        decode_s=0.0,
    )


def decode(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


def liked_share(text: str, record: dict[str, Any]) -> float:
    """Reward: the share of tokens that are LIKED."""
    ids = text.split()
    return sum(token == str(LIKED) for token in ids) / len(ids)


class SgdPolicy:
    """rl.roles.Policy on a TinyLm. `steps` records each optimizer step: ratio sums, old and new log-probabilities."""

    def __init__(self, cfg: Config, lm: TinyLm):
        self.cfg, self.lm = cfg, lm
        self.steps: list[dict[str, Any]] = []

    def logprobs(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return self.lm.score(batch, self.cfg.rollout.temperature)

    def update(self, batch: Batch, optimizer_step: int, version: int) -> Metrics:
        algo, trainer, total = self.cfg.algo, self.cfg.trainer, self.cfg.num_optimizer_steps
        done, sums, tokens = 0, [], 0
        for epoch in range(algo.num_epochs):
            for rows in split_mini_batches(
                batch.group_index, algo.num_mini_batches, (self.cfg.seed, optimizer_step, epoch)
            ):
                part = batch.select(rows)
                part.loss_weight = loss_weights(algo.aggregation, part.action_mask, self.cfg.rollout.max_tokens)
                logprobs = self.lm.score(part, self.cfg.rollout.temperature)
                old = part.train_logprobs if part.train_logprobs is not None else logprobs.detach()
                scores = Scores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
                loss, counts = policy_objective(algo, part, scores, version)
                self.lm.zero_grad()
                (loss / part.num_action_tokens).backward()
                warm = warmup_steps(total, trainer.warmup_ratio)
                lr = learning_rate(optimizer_step + done, total, trainer.lr, trainer.schedule, warm)
                norm = float(torch.nn.utils.get_total_norm(p.grad for p in self.lm.parameters() if p.grad is not None))
                with torch.no_grad():
                    for parameter in self.lm.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=lr)
                self.steps.append({"lr": lr, "rows": rows, "old": old, "new": logprobs.detach(), "grad_norm": norm})
                sums.append(on_cpu(counts))
                tokens += part.num_action_tokens
                done += 1
        return policy_metrics(merge_sums(sums), tokens)


class CopySync:
    """rl.roles.Sync: copies the policy's weights into the engine's model. `pushed` holds the versions."""

    def __init__(self, source: TinyLm, target: TinyLm):
        self.source, self.target, self.pushed = source, target, list[int]()

    def push(self, version: int) -> Metrics:
        self.target.load_state_dict(self.source.state_dict())
        self.pushed.append(version)
        return {"sync/bytes": 0.0}

    def settle(self) -> Metrics:
        return {}


class DirectRollouts:
    """rl.roles.Rollouts that samples when asked. Raises where a real pool would have nothing: beyond `max_lag`."""

    def __init__(self, cfg: Config, lm: TinyLm, stream: PromptStream):
        self.cfg, self.lm, self.stream = cfg, lm, stream
        self.positions: list[int] = []

    def start(self, first_position: int, version: int) -> None:
        self.position, self.version, self.taken = first_position, version, 0

    def set_version(self, version: int) -> None:
        self.version = version
        self.taken = 0

    def next_groups(self, count: int) -> list[Group]:
        if self.taken:
            raise RuntimeError("groups of the next version were asked for before set_version")
        self.taken = count
        groups = [self._group(self.position + k) for k in range(count)]
        self.position += count
        return groups

    def _group(self, position: int) -> Group:
        self.positions.append(position)
        prompt, rollout = self.stream.at(position), self.cfg.rollout
        rows = []
        for k in range(self.cfg.samples_per_prompt):
            sampling = Sampling(
                max_tokens=rollout.max_tokens,
                temperature=rollout.temperature,
                seed=derive_seed("train", self.cfg.seed, position, k),
                stop_token_ids=(0,),
            )
            row = as_trajectory(sample(self.lm, prompt.token_ids, sampling, self.version))
            row.reward = liked_share(decode(row.token_ids[row.prompt_len :]), prompt.record)
            rows.append(row)
        return Group(position=position, prompt=prompt, trajectories=rows, version=self.version)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> list[list[Trajectory]]:
        return [[as_trajectory(sample(self.lm, p.token_ids, sampling, self.version))] * samples for p in prompts]


class FunctionScorer:
    """The pool's Scorer: calls a function in place; what it raises is data, as in rollout.rewards.RewardPool."""

    def __init__(self, function: Callable[[str, dict[str, Any]], float] = liked_share):
        self.function = function

    async def score(self, completion: str, record: dict[str, Any]) -> Scored:
        try:
            return Scored(reward=self.function(completion, record), status=Status.ok)
        except Exception as error:
            return Scored(reward=None, status=Status.reward_failed, error=f"{type(error).__name__}: {error}")


def whole_tensors(shapes: dict[str, tuple[int, ...]]) -> Regions:
    """Each tensor in one piece, in a buffer of its own number."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    return Regions.of([(k, 0, 1, size, size, k, 0, size, 1) for k, size in enumerate(sizes)])


class TinySource:
    """weightsync.sides.Source: packs a TinyLm into a real ring."""

    def __init__(self, lm: TinyLm):
        self.lm, self.dtype = lm, "float32"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.lm.named_parameters()}

    def plan(self, readers: list[Wanted], sizes: list[int], name: str) -> list[Link]:
        (stream,) = streams = plan_streams(whole_tensors(self.shapes()), readers, 256)
        self.ring = Ring(stream.max_bytes, NUM_SLOTS)
        self.sender = Sender(0, streams, readers, self.ring)
        return [Link(rank=0, streams=streams, signed=(stream.fingerprint(),), address=self.ring.address)]

    def connect(self) -> Future[None]:
        return done()

    def sources(self) -> list[Read]:
        return [plain(p.detach().flatten()) for p in self.lm.parameters()]

    def take(self, version: int) -> Future[Any]:
        return done()

    def changed(self, version: int) -> Future[list[list[str]]]:
        return done([self.sender.changed(self.sources())])

    def begin_push(self, name: str, version: int, modules: list[str] | None) -> Future[None]:
        self.sender.begin(self.sources(), version, modules)
        return done()

    def pack(self, name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        (turn,) = turns
        assert turn is not None
        return done([self.sender.pack(turn)])

    def end_push(self, version: int) -> Future[None]:
        return done()

    def probe(self, row: list[int]) -> Future[list[float]]:
        return done(score_row(self.lm, row))


class TinyEngine:
    """An engine around a TinyLm: the pool's EngineClient and the sync's Sink. Requests wait while it is paused."""

    def __init__(self, name: str, source: TinySource, seed: int = 99):
        self.name, self.source, self.lm, self.generation = name, source, TinyLm(seed), 1
        self.version, self.paused, self.waiting = -1, True, list[Request]()
        self.outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def submit(self, requests: list[Request]) -> None:
        self.waiting += requests
        self._work()

    async def abort(self, request_ids: list[str]) -> None:
        self.waiting = [request for request in self.waiting if request.request_id not in request_ids]

    async def collect(self, timeout_s: float) -> list[Outcome]:
        self.loop = asyncio.get_running_loop()
        return [await self.outcomes.get()]

    def _work(self) -> None:
        while self.waiting and not self.paused:
            request = self.waiting.pop(0)
            completion = sample(self.lm, request.prompt_ids, request.sampling, self.version)
            self.outcomes.put_nowait(Outcome(request_id=request.request_id, completion=completion))

    def pause(self) -> Future[Any]:
        self.paused = True
        return done()

    def stop(self) -> None:
        self.stopped = True

    def begin_update(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        self.stream = narrowed(self.link.streams[0], modules)
        self.held: dict[tuple[int, int, int], int] = {}
        return done()

    def wanted(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> Future[list[Wanted]]:
        buffers = tuple(Buffer(module=name, name="weight", dtype=dtype) for name in shapes)
        self.wants = Wanted(names=tuple(shapes), regions=whole_tensors(shapes), buffers=buffers)
        return done([self.wants])

    def connect(self, name: str, seats: list[Seat], links: list[Link]) -> Future[list[set[tuple[int, int]]]]:
        (self.link,) = links
        self.inlet = RingReader(self.link.address)
        return done([{(0, number) for number in self.link.streams[0].buckets}])

    def restart(self) -> Future[Any]:
        self.lm, self.paused, self.generation = TinyLm(seed=7), True, self.generation + 1
        return done()

    def load(self, name: str, items: list[Item]) -> Future[Any]:
        parameters = list(self.lm.parameters())
        for item in items:
            bucket = self.stream.buckets[item.number]
            slot = self.inlet.receive(item.slot, bucket)
            if digests(slot, bucket) != item.digests:
                return broken(RuntimeError(f"digest of bucket {item.number}"))
            m = bucket.moves
            for k in bucket.sent:
                at, size = int(m.target_at[k]), int(m.count[k] * m.length[k])
                piece = piece_of(slot, self.wants, int(m.target[k]), int(bucket.offset[k]), size)
                parameters[int(m.target[k])].data.view(-1)[at : at + size] = piece
            self.held |= {(0, item.number, k): digest for k, digest in enumerate(item.digests)}
        return done()

    def finish_update(self, name: str, version: int) -> Future[list[str]]:
        self.version = version
        return done([fingerprint(self.held)])

    def probe(self, row: list[int]) -> Future[list[float]]:
        return done(score_row(self.lm, row))

    def resume(self, name: str) -> Future[Any]:
        self.paused = False
        if self.loop is not None and self.waiting:
            self.loop.call_soon_threadsafe(self._work)
        return done()


@torch.no_grad()
def score_row(lm: TinyLm, row: list[int]) -> list[float]:
    """Log-probabilities at temperature 1 of each token of `row` but the first."""
    ids = torch.tensor(row)
    return [float(x) for x in lm(ids[:-1], 1.0).gather(-1, ids[1:, None])[:, 0]]


def done(value: Any = None) -> Future[Any]:
    """A future that holds `value`."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def broken(error: Exception) -> Future[Any]:
    """A future that raises `error`."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def tiny_qwen3(seed: int = 0, vocab: int = 32, **settings: Any) -> torch.nn.Module:
    """A Qwen3 of 2 layers and hidden size 32, randomly initialised with weights large enough to matter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    config = Qwen3Config(**shape | heads | {"initializer_range": 0.2, "tie_word_embeddings": False} | settings)
    lm: torch.nn.Module = Qwen3ForCausalLM(config).eval()
    return lm


class LocalEngine:
    """actors.engine.Engine without DeepSpeed: one process, torch's SGD. `scale` stands for the ranks' averaging."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss_sum: torch.Tensor, divisor: int) -> None:
        (loss_sum / divisor).backward()

    def step(self, lr: float) -> StepResult:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=lr)
                    parameter.grad = None
        return StepResult(grad_norm=norm, skipped=False)


class LocalGroup:
    """actors.group.RankGroup of one rank in this process. `calls` records (method, arguments)."""

    world = replicas = 1
    quadratic_tokens = 384.0

    def __init__(self, cfg: Config, module: torch.nn.Module, role: str = "policy", trained: bool = True):
        rank: Any = KINDS[role](cfg, role, 0, 1, "cpu")
        self.rank, self.role = rank, role
        self.rank.engine = self.rank.score = LocalEngine(module) if trained else module
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call_each(self, method: str, per_replica: Iterable[Any], *args: Any) -> list[Any]:
        (own,) = per_replica
        self.calls.append((method, (own, *args)))
        return [getattr(self.rank, method)(own, *args)]


def twin(lm: TinyLm) -> TinyLm:
    """A copy that shares nothing."""
    return copy.deepcopy(lm)
