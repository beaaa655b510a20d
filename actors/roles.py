"""The training roles of the loop (rl.roles) on groups of ranks: each cuts a batch, and puts results together."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.group import RankGroup, cut, in_thread, score_rows, score_tokens
from actors.rank import Update
from conf.choices import Channel
from conf.schema import Config
from rl.aggregation import loss_weights
from rl.batching import imbalance, row_work, split_mini_batches
from rl.loop import scores_before_update
from rl.metrics import critic_metrics, merge_sums, policy_metrics
from rl.roles import Metrics
from rl.schedule import learning_rate, warmup_steps
from rl.types import Batch
from weightsync.plan import Item, Link, Turn, Wanted


class ActorPolicy:
    """The Policy role, and the sync's Source."""

    def __init__(self, cfg: Config, group: RankGroup):
        self.cfg, self.group = cfg, group

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """As rl.roles.Policy. With trainer.replay_routing the batch keeps the experts that its tokens took."""
        if not self.cfg.trainer.replay_routing:
            return score_tokens(self.group, self.cfg, batch, "logprobs")
        parts = score_rows(self.group, self.cfg, batch, "logprobs_and_routes")
        logprobs = torch.zeros(batch.tokens.shape)
        batch.routes = torch.zeros(*batch.tokens.shape, *parts[0][1][1].shape[2:], dtype=torch.int16)
        for rows, (part, routes) in parts:
            logprobs[torch.tensor(rows), : part.shape[1]] = part
            batch.routes[torch.tensor(rows), : part.shape[1]] = routes
        return logprobs

    def update(self, batch: Batch, optimizer_step: int, version: int) -> Metrics:
        """As rl.roles.Policy: epochs x mini-batches optimizer steps; metrics are means over all of them."""
        cfg, started = self.cfg, time.monotonic()
        fused = not scores_before_update(cfg)
        limit = cfg.rollout.mismatch_bound if fused else None
        schedule = partial(scheduled_lr, cfg, cfg.trainer.lr, cfg.num_optimizer_steps)
        updates = plan_updates(self.group, cfg, batch, optimizer_step, schedule, version, limit)
        results = self.group.call_each("update", updates)
        divisor = sum(update.num_action_tokens for update in updates[0])
        metrics = policy_metrics(merge_sums(step for rank in results for step in rank.sums), divisor)
        steps = results[0].steps
        return metrics | {
            "policy/grad_norm": mean_of(steps, "grad_norm"),
            "policy/skipped_steps": sum(s["skipped_steps"] for s in steps),
            "policy/backward_s": mean_of(steps, "backward_s"),
            "policy/optimizer_s": mean_of(steps, "optimizer_s"),
            "policy/lr": updates[0][-1].lr,
            "train/imbalance": imbalance([self._work(mine) for mine in updates]),
            "train/straggler_s": straggling_s([mean_of(rank.steps, "backward_s") for rank in results]),
            "train/tok_s": sum(batch.lengths) * cfg.algo.num_epochs / (time.monotonic() - started),
        }

    def _work(self, updates: list[Update]) -> float:
        """What one replica computes, in tokens (see rl.batching.row_work)."""
        batches = [micro.batch for update in updates for micro in update.micros if micro.batch is not None]
        layout, quadratic = self.cfg.trainer.layout, self.group.quadratic_tokens
        return sum(sum(row_work(batch, layout, quadratic)) for batch in batches)

    # -- the sync's Source --

    @property
    def dtype(self) -> str:
        """As weightsync.sides.Source."""
        return self.cfg.trainer.dtype.value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As weightsync.sides.Source."""
        found: dict[str, tuple[int, ...]] = self.group.call("shapes")[0]
        return found

    def plan(self, readers: list[Wanted], sizes: list[int], name: str) -> list[Link]:
        """As weightsync.sides.Source."""
        host, port = "", 0
        if self.cfg.sync.channel is Channel.collective:
            host = self.group.cluster.host_of(self.group.actors[0])
            port = self.group.call("serve_sync", host)[0]
        return self.group.call("plan_sync", readers, sizes, host, port, name)

    def connect(self) -> Future[Any]:
        """As weightsync.sides.Source."""
        return self.group.begin("connect_sync")

    def take(self, version: int) -> Future[Any]:
        """As weightsync.sides.Source."""
        return self.group.begin("take_snapshot", version)

    def changed(self, version: int) -> Future[list[list[str]]]:
        """As weightsync.sides.Source."""
        return self.group.begin("changed_modules", version)

    def begin_push(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        """As weightsync.sides.Source."""
        return self.group.begin("begin_push", name, version, modules)

    def pack(self, name: str, turns: list[Turn | None]) -> Future[list[Item | None]]:
        """As weightsync.sides.Source."""
        return self.group.begin("pack", name, turns, beside=self.cfg.sync.snapshot)

    def end_push(self, version: int) -> Future[Any]:
        """As weightsync.sides.Source."""
        return self.group.begin("end_push", version, beside=self.cfg.sync.snapshot)

    def probe(self, row: list[int]) -> Future[list[float]]:
        """As weightsync.sides.Source."""
        scored = self.group.begin("probe", row)
        return in_thread(lambda: scored.result()[0])


class ActorCritic:
    """The Critic role."""

    def __init__(self, cfg: Config, group: RankGroup):
        self.cfg, self.group = cfg, group

    def values(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As rl.roles.Critic. The state after the last token is asked for as that of one more token."""
        longer = with_next_token(batch)
        values = score_tokens(self.group, self.cfg, longer, "values")
        after = values.gather(1, batch.attention_mask.sum(-1, keepdim=True))[:, 0]
        return values[:, :-1] * batch.action_mask, after

    def update(self, batch: Batch, version: int) -> Metrics:
        """As rl.roles.Critic: as many optimizer steps as the policy, on the same mini-batches."""
        cfg = self.cfg
        schedule = partial(scheduled_lr, cfg, cfg.critic.lr, cfg.num_steps * cfg.algo.steps_per_batch)
        done = version * cfg.algo.steps_per_batch
        updates = plan_updates(self.group, cfg, batch, done, schedule, version)
        results = self.group.call_each("update", updates)
        divisor = sum(update.num_action_tokens for update in updates[0])
        metrics = critic_metrics(merge_sums(step for rank in results for step in rank.sums), divisor)
        steps = results[0].steps
        return metrics | {
            "critic/grad_norm": mean_of(steps, "grad_norm"),
            "critic/skipped_steps": sum(s["skipped_steps"] for s in steps),
            "critic/lr": updates[0][-1].lr,
        }


class ActorReference:
    """The Reference role: a frozen model, or the policy without its adapters (`method` base_logprobs)."""

    def __init__(self, cfg: Config, group: RankGroup, method: str = "logprobs"):
        self.cfg, self.group, self.method = cfg, group, method

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """As rl.roles.Reference."""
        return score_tokens(self.group, self.cfg, batch, self.method)

    def reload(self, model_path: Path) -> None:
        """Takes the weights of a Hugging Face folder."""
        self.group.call("reload", str(model_path))


class ActorTeacher:
    """The Teacher role: a frozen model, and its likeliest tokens at each place."""

    def __init__(self, cfg: Config, group: RankGroup):
        self.cfg, self.group = cfg, group

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """As rl.roles.Teacher."""
        return score_tokens(self.group, self.cfg, batch, "logprobs")

    def top_logprobs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As rl.roles.Teacher."""
        parts = score_rows(self.group, self.cfg, batch, "top_logprobs", self.cfg.teacher.top_k)
        shape = (*batch.tokens.shape, parts[0][1][0].shape[-1])
        ids, logprobs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        for rows, (part_ids, part_logprobs) in parts:
            ids[torch.tensor(rows), : part_ids.shape[1]] = part_ids
            logprobs[torch.tensor(rows), : part_ids.shape[1]] = part_logprobs
        return ids, logprobs


class ActorRewardModel:
    """The RewardModel role."""

    def __init__(self, cfg: Config, group: RankGroup):
        self.cfg, self.group = cfg, group

    def scores(self, batch: Batch) -> torch.Tensor:
        """As rl.roles.RewardModel."""
        out = torch.zeros(batch.num_rows)
        for rows, part in score_rows(self.group, self.cfg, batch, "scores"):
            out[torch.tensor(rows)] = part
        return out


def plan_updates(
    group: RankGroup,
    cfg: Config,
    batch: Batch,
    optimizer_step: int,
    schedule: Callable[[int], float],
    version: int,
    mismatch_limit: float | None = None,
) -> list[list[Update]]:
    """Updates [replica][k] of one step: epochs x mini-batches, each with its global divisor and learning rate."""
    per_replica = [list[Update]() for _ in range(group.replicas)]
    constant = cfg.algo.aggregation_tokens or cfg.rollout.max_tokens
    for epoch in range(cfg.algo.num_epochs):
        seed = (cfg.seed, version * cfg.algo.steps_per_batch, epoch)
        for rows in split_mini_batches(batch.group_index, cfg.algo.num_mini_batches, seed):
            part = batch.select(rows)
            part.loss_weight = loss_weights(cfg.algo.aggregation, part.action_mask, constant)
            lr = schedule(optimizer_step + len(per_replica[0]))
            for replica, micros in enumerate(cut(group, cfg, part)):
                per_replica[replica].append(
                    Update(
                        micros=micros,
                        num_action_tokens=max(1, part.num_action_tokens),  # all masked: the loss is 0 all the same
                        lr=lr,
                        version=version,
                        mismatch_limit=mismatch_limit,
                    )
                )
    return per_replica


def scheduled_lr(cfg: Config, peak: float, total: int, optimizer_step: int) -> float:
    """The learning rate of one optimizer step out of `total`, by the trainer's schedule."""
    warmup = warmup_steps(total, cfg.trainer.warmup_ratio)
    return learning_rate(optimizer_step, total, peak, cfg.trainer.schedule, warmup)


def with_next_token(batch: Batch) -> Batch:
    """The batch with one action token more at the end of each row: its place asks for the state after the last one."""
    pad = torch.nn.functional.pad
    index = batch.attention_mask.sum(-1, keepdim=True)
    return dataclasses.replace(
        batch,
        tokens=pad(batch.tokens, (0, 1)),
        attention_mask=pad(batch.attention_mask, (0, 1)).scatter(1, index, True),
        action_mask=pad(batch.action_mask, (0, 1)).scatter(1, index, True),
    )


def straggling_s(seconds: Sequence[float]) -> float:
    """What the slowest replica took longer than the mean."""
    return max(seconds) - sum(seconds) / len(seconds)


def mean_of(steps: Sequence[dict[str, float]], name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)
