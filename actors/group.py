"""Groups of training ranks as Ray actors, and the Policy and Reference roles on top of them."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch

from actors.cluster import Cluster
from actors.engine import OptimizerSpec
from actors.policy import Micro, TrainRank, Update
from conf.schema import Config
from rl.batching import MicroBatch, plan_micro_batches, split_mini_batches
from rl.faults import RoleDied, RoleTimeout
from rl.loop import scores_before_update
from rl.metrics import merge_sums, per_token
from rl.roles import Metrics
from rl.schedule import learning_rate, warmup_steps
from rl.types import Batch


def wait_all(refs: Sequence[Any], names: Sequence[str], phase: str, timeout_s: float) -> list[Any]:
    """Results of Ray calls, in order. The first failure ends the wait: its peers may be stuck in a collective.

    Raises RoleDied or RoleTimeout naming who and in which phase; an actor's own exception passes as its own type.
    """
    left = {ref: i for i, ref in enumerate(refs)}
    results: list[Any] = [None] * len(refs)
    deadline = time.monotonic() + timeout_s
    while left:
        done, _ = ray.wait(list(left), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            waiting = ", ".join(names[i] for i in left.values())
            raise RoleTimeout(f"phase {phase}: no answer in {timeout_s:g} s from {waiting}")
        index = left.pop(done[0])
        try:
            results[index] = ray.get(done[0])
        except ray.exceptions.RayActorError as error:
            raise RoleDied(f"phase {phase}: the process of {names[index]} is gone: {error}") from error
        except (
            ray.exceptions.RayTaskError
        ) as error:  # its text is the actor's traceback; the cause's is what went wrong
            raise error.cause from error
    return results


class RankGroup:
    """`world` training ranks of one role. Calls go to all ranks; every wait has a deadline."""

    def __init__(self, cfg: Config, cluster: Cluster, role: str, model_path: str, spec: OptimizerSpec | None):
        self.cfg, self.cluster, self.role, self.world = cfg, cluster, role, cfg.cluster.train_ranks
        device = cluster.device
        threads = cfg.trainer.num_threads or max(1, cluster.cores // self.world)
        env = cluster.actor_env(threads) | {
            "DS_ACCELERATOR": device,
            "DEEPSPEED_LOG_LEVEL": "error",
            "TANDEM_ROLE": role,
        }
        remote = ray.remote(TrainRank)
        gpus = cfg.cluster.gpus_per_rank if device == "cuda" else 0.0
        place = cluster.reserve(role, [(cfg.cluster.cpus_per_rank, gpus)] * self.world)
        self.actors = [
            remote.options(
                name=f"{role}-{rank}",
                num_cpus=cfg.cluster.cpus_per_rank,
                num_gpus=gpus,
                runtime_env={"env_vars": env},
                scheduling_strategy=place(rank),
            ).remote(cfg, rank, self.world, device)
            for rank in range(self.world)
        ]
        self.names = [f"{role} rank {rank}" for rank in range(self.world)]
        self._args = (model_path, spec, threads)

    def start(self) -> Future[None]:
        """Loads the model on every rank; the future ends when all have, or raises."""

        def begin() -> None:
            model_path, spec, threads = self._args
            limit = self.cfg.cluster.start_timeout_s
            (port,) = wait_all([self.actors[0].free_port.remote()], self.names[:1], "start", limit)
            host = self.cluster.host_of(self.actors[0])
            refs = [actor.start.remote(model_path, host, port, spec, threads) for actor in self.actors]
            wait_all(refs, self.names, "start", limit)

        return in_thread(begin)

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None, *args: Any) -> list[Any]:
        """Calls `method` on every rank with its own arguments (or the same `args`); returns the ranks' results."""
        arguments = per_rank if per_rank is not None else [args] * self.world
        refs = [getattr(actor, method).remote(*a) for actor, a in zip(self.actors, arguments, strict=True)]
        return wait_all(refs, self.names, f"{self.role}.{method}", self.cfg.trainer.timeout_s)

    def stop(self) -> None:
        """Ends the processes."""
        for actor in self.actors:
            ray.kill(actor)


def in_thread(work: Any) -> Future[Any]:
    """Runs `work` in a daemon-like thread of its own and gives its future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


class ActorPolicy:
    """The Policy role: cuts a batch, sends each rank its share, puts results and metrics together."""

    def __init__(self, cfg: Config, group: RankGroup):
        self.cfg, self.group = cfg, group

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """As rl.roles.Policy."""
        return group_logprobs(self.group, self.cfg, batch)

    def update(self, batch: Batch, optimizer_step: int) -> Metrics:
        """As rl.roles.Policy: epochs x mini-batches optimizer steps; metrics are means over all of them."""
        cfg, started = self.cfg, time.monotonic()
        fused = not scores_before_update(cfg)
        total = cfg.num_optimizer_steps
        per_rank: list[list[Update]] = [[] for _ in range(self.group.world)]
        divisors: list[int] = []
        for epoch in range(cfg.algo.num_epochs):
            for rows in split_mini_batches(
                batch.group_index, cfg.algo.num_mini_batches, (cfg.seed, optimizer_step, epoch)
            ):
                part = batch.select(rows)
                lr = learning_rate(
                    optimizer_step + len(divisors),
                    total,
                    cfg.trainer.lr,
                    cfg.trainer.schedule,
                    warmup_steps(total, cfg.trainer.warmup_ratio),
                )
                divisors.append(part.num_action_tokens)
                for rank, micros in enumerate(cut(self.group, cfg, part)):
                    per_rank[rank].append(
                        Update(
                            micros=micros,
                            num_action_tokens=part.num_action_tokens,
                            lr=lr,
                            version=int(batch.version.max()),
                            # samples of older weights differ because the policy has moved since
                            mismatch_limit=cfg.rollout.mismatch_bound if fused and cfg.max_lag == 0 else None,
                        )
                    )
        results = self.group.call("update", [(updates,) for updates in per_rank])
        whole = {"grad_norm", "skipped_steps", "backward_s", "optimizer_s"}
        sums = merge_sums({k: v for k, v in step.items() if k not in whole} for rank in results for step in rank)
        metrics = per_token(sums, sum(divisors))
        steps = results[0]
        metrics |= {
            "policy/grad_norm": sum(s["grad_norm"] for s in steps) / len(steps),
            "policy/skipped_steps": sum(s["skipped_steps"] for s in steps),
            "policy/backward_s": sum(s["backward_s"] for s in steps),
            "policy/optimizer_s": sum(s["optimizer_s"] for s in steps),
            "policy/lr": per_rank[0][-1].lr,
            "train/tok_s": sum(batch.lengths) * cfg.algo.num_epochs / (time.monotonic() - started),
        }
        return metrics

    # -- the sync's Source --

    def pack(self, bucket: int) -> Future[int]:
        """As weightsync.sync.Source."""
        refs = [actor.pack.remote(bucket) for actor in self.group.actors]
        future: Future[int] = refs[0].future()
        return future

    def probe(self, row: list[int]) -> Future[list[float]]:
        """As weightsync.sync.Source."""
        refs = [actor.probe.remote(row) for actor in self.group.actors]
        future: Future[list[float]] = refs[0].future()
        return future

    def manifest(self) -> dict[str, Any]:
        """What each push will carry, for the engines' init phase."""
        found: dict[str, Any] = self.group.call("manifest")[0]
        return found

    # -- checkpoints --

    def save(self, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Has the ranks write their shards into `folder`; gives manifest entries and further manifest fields."""
        entries = [entry for rank in self.group.call("save", None, str(folder)) for entry in rank]
        states = self.group.call("state")
        return entries, {"moments_step": states[0]["optimizer_step"], "torch_rng": states[0]["torch_rng"]}

    def load(self, folder: Path) -> None:
        """Loads a checkpoint on every rank."""
        self.group.call("load", None, str(folder))


class ActorReference:
    """The Reference role: a frozen model on ranks of its own."""

    def __init__(self, cfg: Config, group: RankGroup):
        self.cfg, self.group = cfg, group

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """As rl.roles.Reference."""
        return group_logprobs(self.group, self.cfg, batch)


def cut(group: RankGroup, cfg: Config, batch: Batch) -> list[list[Micro]]:
    """Micro-batches [rank][k] with their rows."""
    plans = plan_micro_batches(
        batch, cfg.trainer.layout, group.world, cfg.trainer.micro_batch_tokens, cfg.trainer.logprob_chunk_tokens
    )
    return [[as_micro(batch, micro) for micro in plan] for plan in plans]


def as_micro(batch: Batch, micro: MicroBatch) -> Micro:
    return Micro(batch=batch.select(micro.rows) if micro.rows else None, num_chunks=micro.num_chunks)


def group_logprobs(group: RankGroup, cfg: Config, batch: Batch) -> torch.Tensor:
    """Log-probabilities [B, T] of a batch, scored by all ranks."""
    plans = plan_micro_batches(
        batch, cfg.trainer.layout, group.world, cfg.trainer.micro_batch_tokens, cfg.trainer.logprob_chunk_tokens
    )
    results = group.call("logprobs", [([as_micro(batch, micro) for micro in plan],) for plan in plans])
    out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    for plan, values in zip(plans, results, strict=True):
        for micro, part in zip([m for m in plan if m.rows], values, strict=True):
            out[torch.tensor(micro.rows), : part.shape[1]] = part
    return out
