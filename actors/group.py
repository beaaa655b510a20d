"""Groups of training ranks as Ray actors: starting them, calling them, and dealing a batch out to them."""

import dataclasses
import json
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from actors.cluster import Cluster
from actors.compiled import machine_folder
from actors.engine import OptimizerSpec
from actors.host import BESIDE, Host
from actors.rank import Micro
from conf.choices import Layout, Optimizer
from conf.layout import TrainLayout
from conf.schema import Config
from rl.batching import MicroBatch, plan_micro_batches
from rl.faults import RoleDied, RoleError, RoleOutOfMemory, RoleTimeout, is_out_of_memory, reason_of
from rl.types import Batch

# How long the peers of a rank that has failed are waited for: what it says may follow from what befell one of them.
PEERS_S = 5.0


def wait_all(refs: Sequence[Any], names: Sequence[str], phase: str, timeout_s: float) -> list[Any]:
    """Results of Ray calls, in order. A failure ends the wait: its peers may be stuck in a collective.

    Raises RoleDied, RoleOutOfMemory or RoleTimeout naming who and in which phase; any other exception of an actor
    passes as its own type, with a note of who and where. When a rank dies or runs out of memory its peers' collectives
    break, often sooner than its own end is known, so of several failures those two are told first.
    """
    left = {ref: i for i, ref in enumerate(refs)}
    results: list[Any] = [None] * len(refs)
    failures: list[Exception] = []
    deadline = time.monotonic() + timeout_s
    while left:
        done, _ = ray.wait(list(left), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done and failures:
            break
        if not done:
            waiting = ", ".join(names[i] for i in left.values())
            raise RoleTimeout(f"phase {phase}: no answer in {timeout_s:g} s from {waiting}")
        index = left.pop(done[0])
        try:
            results[index] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            failure = failure_of(error, names[index], phase)
            if isinstance(failure, RoleError):
                raise failure from error
            failure.__cause__ = error
            failures.append(failure)
            deadline = min(deadline, time.monotonic() + PEERS_S)
    if failures:
        raise failures[0]
    return results


def failure_of(error: Exception, name: str, phase: str) -> Exception:
    """What Ray raises for a call to the actor `name`, as the project's own error, or as the actor's exception."""
    reason = reason_of(error, name)
    if is_out_of_memory(getattr(error, "cause", None) or error):
        return RoleOutOfMemory(f"phase {phase}: {name}: {reason}")
    if not isinstance(error, ray.exceptions.RayTaskError):
        return RoleDied(f"phase {phase}: the process of {name} is gone: {reason}")
    cause: Exception = error.cause  # the text of `error` is a traceback
    cause.add_note(f"phase {phase}: raised in {name}")
    return cause


class RankGroup:
    """`world` training ranks of one role: processes of their own, or those of the group `beside`.

    Calls go to all ranks; every wait has a deadline. Rows are dealt out to `replicas`, each of one rank or several.
    """

    def __init__(
        self,
        cfg: Config,
        cluster: Cluster,
        role: str,
        model_path: str,
        spec: OptimizerSpec | None,
        beside: "RankGroup | None" = None,
    ):
        self.cfg, self.cluster, self.role, self.world = cfg, cluster, role, cfg.cluster.train_ranks
        self.layout = layout_of(cfg, role, trained=spec is not None)
        self.threads = cfg.trainer.num_threads or max(1, cluster.cores // self.world)
        self.owned = beside is None
        # Two threads may call; every rank must get their calls in the same order.
        self._submitting: threading.Lock = threading.Lock() if beside is None else beside._submitting
        self.actors: list[Any] = beside.actors if beside is not None else self._make_actors()
        self.names = [f"{role} rank {rank}" for rank in range(self.world)]
        self._args = (model_path, spec)
        self.quadratic_tokens = quadratic_tokens(model_path)

    @property
    def model_path(self) -> str:
        """The folder from which the ranks load."""
        return self._args[0]

    @property
    def replicas(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.layout.replicas

    def _make_actors(self) -> list[Any]:
        cfg, device = self.cfg, self.cluster.device
        env = self.cluster.actor_env(self.threads) | {
            "DS_ACCELERATOR": device,
            "DEEPSPEED_LOG_LEVEL": "error",
            "TANDEM_ROLE": self.role,
        }
        if cfg.trainer.fused_logprobs:
            env |= {
                "TORCHDYNAMO_DISABLE": "0",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # two kernels do not need a pool of processes
                # Not from this process' environment: importing torch's compiler sets it there, to a temporary folder.
                "TORCHINDUCTOR_CACHE_DIR": str(machine_folder() / "inductor"),
                "TORCHINDUCTOR_FILE_LOCK_TIMEOUT": str(math.ceil(cfg.trainer.timeout_s)),
            }
        gpus = cfg.cluster.gpus_per_rank if device == "cuda" else 0.0
        place = self.cluster.reserve(self.role, [(cfg.cluster.cpus_per_rank, gpus)] * self.world)
        return [
            ray.remote(concurrency_groups={BESIDE: 1})(Host)
            .options(
                num_cpus=cfg.cluster.cpus_per_rank,
                num_gpus=gpus,
                runtime_env={"env_vars": env | {"TANDEM_RANK": str(rank)}},
                scheduling_strategy=place(rank),
            )
            .remote(cfg, rank, self.world, device)
            for rank in range(self.world)
        ]

    def start(self) -> Future[None]:
        """Loads the model on every rank; the future ends when all have, or raises."""

        def begin() -> None:
            limit = self.cfg.cluster.start_timeout_s
            wait_all([actor.add.remote(self.role) for actor in self.actors], self.names, "start", limit)
            (port,) = wait_all([self.actors[0].free_port.remote()], self.names[:1], "start", limit)
            host = self.cluster.host_of(self.actors[0])
            model_path, spec = self._args
            if spec is not None and spec.kind is Optimizer.cpu_adam:
                limit += spec.compile_timeout_s  # the first start on a machine compiles it
            wait_all(self.refs("start", model_path, host, port, spec, self.threads), self.names, "start", limit)

        return in_thread(begin)

    def restart(self, cfg: Config, model_path: str, spec: OptimizerSpec | None) -> Future[None]:
        """As `start`, in the same processes under another configuration; what the role held there is let go of."""
        assert cfg.cluster.train_ranks == self.world
        adopt = partial(adopt_config, cfg)
        wait_all(
            [actor.__ray_call__.remote(adopt) for actor in self.actors],
            self.names,
            "restart",
            cfg.cluster.start_timeout_s,
        )
        self.cfg, self._args = cfg, (model_path, spec)
        self.layout = layout_of(cfg, self.role, trained=spec is not None)
        self.quadratic_tokens = quadratic_tokens(model_path)
        return self.start()

    def refs(self, method: str, *args: Any, beside: bool = False) -> list[Any]:
        """Starts `method` on every rank with the same arguments; gives Ray's references.

        `beside`: in a thread of its own, while the rank does something else.
        """
        group = BESIDE if beside else None
        with self._submitting:
            return [a.call.options(concurrency_group=group).remote(self.role, method, *args) for a in self.actors]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `method` on every rank with the same arguments; returns the ranks' results."""
        return self._wait(method, self.refs(method, *args))

    def begin(self, method: str, *args: Any, beside: bool = False) -> Future[list[Any]]:
        """As `call`, without waiting for it; `beside` as `refs`."""
        refs = self.refs(method, *args, beside=beside)
        return in_thread(lambda: self._wait(method, refs))

    def call_each(self, method: str, per_replica: Sequence[Any], *args: Any) -> list[Any]:
        """As `call`, with a first argument of its own for each replica; returns the result of each one's first rank."""
        own = [ray.put(argument) for argument in per_replica]
        mine = [self.layout.replica_of(rank) for rank in range(self.world)]
        with self._submitting:
            refs = [a.call.remote(self.role, method, own[r], *args) for a, r in zip(self.actors, mine, strict=True)]
        found = self._wait(method, refs)
        return [found[mine.index(replica)] for replica in range(self.replicas)]

    def _wait(self, method: str, refs: list[Any]) -> list[Any]:
        return wait_all(refs, self.names, f"{self.role}.{method}", self.cfg.trainer.timeout_s)

    def rest(self) -> None:
        """Has every role of these processes sleep."""
        self._wait("rest", [actor.rest.remote() for actor in self.actors])

    def measure(self, on: bool) -> None:
        """As actors.host.Host."""
        self._wait("measure", [actor.measure.remote(on) for actor in self.actors])

    def memory(self) -> dict[str, int]:
        """As actors.host.Host: of each figure the largest of any rank."""
        found = self._wait("memory", [actor.memory.remote(self.role) for actor in self.actors])
        return {name: max(rank[name] for rank in found) for name in found[0]}

    def stop(self) -> None:
        """Ends the processes, unless another group owns them."""
        if not self.owned:
            return
        for actor in self.actors:
            ray.kill(actor)
        self.cluster.release(self.role)


def adopt_config(cfg: Config, host: Any) -> None:
    """Runs in the process of a rank: roles that are added from now on are configured by `cfg`."""
    host.cfg = cfg


def in_thread(work: Any) -> Future[Any]:
    """Runs `work` in a thread of its own and gives its future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def quadratic_tokens(model_path: str) -> float:
    """Tokens before a token at which its attention costs as much as its matrix products: 6 x hidden size."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    return 6.0 * config.get("hidden_size", math.inf)


def layout_of(cfg: Config, role: str, trained: bool) -> TrainLayout:
    """How a role's weights and rows are spread: the trainer's layout, or whole copies of a frozen model."""
    if trained:
        return cfg.train_layout
    frozen = cfg.train_layout.frozen()
    return dataclasses.replace(frozen, sp=1) if role == "reward_model" else frozen  # it reads whole rows


def cut(group: RankGroup, cfg: Config, batch: Batch) -> list[list[Micro]]:
    """Micro-batches [replica][k] with their rows."""
    return [[as_micro(batch, micro) for micro in plan] for plan in plan_ranks(group, cfg, batch)]


def plan_ranks(group: RankGroup, cfg: Config, batch: Batch) -> list[list[MicroBatch]]:
    """Micro-batches [replica][k] as row numbers. The reward model has one way to run rows."""
    trainer = cfg.trainer
    return plan_micro_batches(
        batch,
        Layout.padded if group.role == "reward_model" else trainer.layout,
        group.replicas,
        trainer.micro_batch_tokens,
        trainer.logprob_chunk_tokens,
        group.quadratic_tokens,
    )


def as_micro(batch: Batch, micro: MicroBatch) -> Micro:
    return Micro(batch=batch.select(micro.rows) if micro.rows else None, num_chunks=micro.num_chunks)


def score_rows(group: RankGroup, cfg: Config, batch: Batch, method: str, *args: Any) -> list[tuple[list[int], Any]]:
    """Has all replicas call `method` on their micro-batches; gives (row numbers, result) of each micro-batch."""
    plans = plan_ranks(group, cfg, batch)
    results = group.call_each(method, [[as_micro(batch, micro) for micro in plan] for plan in plans], *args)
    pairs = []
    for plan, values in zip(plans, results, strict=True):
        pairs += [(m.rows, v) for m, v in zip([m for m in plan if m.rows], values, strict=True)]
    return pairs


def score_tokens(group: RankGroup, cfg: Config, batch: Batch, method: str) -> torch.Tensor:
    """A method's per-token result as [B, T] float32 of the whole batch."""
    out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    for rows, part in score_rows(group, cfg, batch, method):
        out[torch.tensor(rows), : part.shape[1]] = part
    return out
