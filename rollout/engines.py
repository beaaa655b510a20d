"""Starting rollout engines as Ray actors, and talking to them: the pool's EngineClient and the sync's Sink in one."""

from concurrent.futures import Future
from typing import Any

import ray

from actors.cluster import Cluster
from actors.group import in_thread, wait_all
from conf.schema import Config
from rl.faults import RoleDied, RoleError
from rollout.engine import Outcome, Request, RolloutEngine


class EngineHandle:
    """One engine actor."""

    def __init__(self, actor: Any, index: int):
        self.actor, self.name = actor, f"rollout engine {index}"

    async def submit(self, requests: list[Request]) -> None:
        await self.actor.submit.remote(requests)

    async def collect(self, timeout_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = await self.actor.collect.remote(timeout_s)
        return outcomes

    def pause(self) -> Future[Any]:
        return self._future("pause")

    def begin_update(self) -> Future[Any]:
        return self._future("begin_update")

    def load(self, bucket: int, checksum: int) -> Future[Any]:
        return self._future("load", bucket, checksum)

    def finish_update(self, version: int) -> Future[Any]:
        return self._future("finish_update", version)

    def probe(self, row: list[int]) -> Future[list[float]]:
        return self._future("probe", row)

    def resume(self) -> Future[Any]:
        return self._future("resume")

    def _future(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = getattr(self.actor, method).remote(*args).future()
        return future


class EngineGroup:
    """All engines of a run."""

    def __init__(self, cfg: Config, cluster: Cluster, model_path: str):
        self.cfg, self._model_path = cfg, model_path
        count, device = cfg.cluster.rollout_engines, cluster.device
        self._threads = cfg.rollout.num_threads or max(1, cluster.cores // count)
        env = cluster.actor_env(self._threads) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins every engine to the first core
            "VLLM_LOGGING_LEVEL": "WARNING",
            "TANDEM_ROLE": "rollout",
        }
        remote = ray.remote(RolloutEngine)
        gpus = [cfg.cluster.gpus_per_engine * cfg.engine_tp(i) if device == "cuda" else 0.0 for i in range(count)]
        place = cluster.reserve("rollout", [(cfg.cluster.cpus_per_engine, gpu) for gpu in gpus])
        self.handles = [
            EngineHandle(
                remote.options(
                    name=f"rollout-{i}",
                    num_cpus=cfg.cluster.cpus_per_engine,
                    num_gpus=gpus[i],
                    max_concurrency=1000,
                    runtime_env={"env_vars": env},
                    scheduling_strategy=place(i),
                ).remote(cfg, i, device),
                i,
            )
            for i in range(count)
        ]

    def start(self) -> Future[None]:
        """Loads the model in every engine; the future ends when all have, or raises."""

        def begin() -> None:
            refs = [handle.actor.start.remote(self._model_path, self._threads) for handle in self.handles]
            wait_all(refs, [h.name for h in self.handles], "start", self.cfg.cluster.start_timeout_s)

        return in_thread(begin)

    def connect(self, info: dict[str, Any]) -> None:
        """The init phase of weight sync: every engine opens the trainer's ring and checks the manifest."""
        self._all("sync init", "init_sync", info)

    def accept_loaded(self, version: int) -> None:
        """Has every engine serve the weights of its model folder, labelled `version`."""
        self._all("accept loaded weights", "accept_loaded", version)

    def sleep(self) -> None:
        """Has every engine give its memory back; requests wait."""
        self._all("sleep", "sleep")

    def wake(self) -> None:
        """Has every engine take its memory again, with the weights that it had."""
        self._all("wake", "wake")

    def _all(self, phase: str, method: str, *args: Any) -> None:
        refs = [getattr(handle.actor, method).remote(*args) for handle in self.handles]
        try:
            wait_all(refs, [h.name for h in self.handles], phase, self.cfg.sync.timeout_s)
        except RuntimeError as error:
            if isinstance(error, RoleError):
                raise
            raise RoleDied(f"phase {phase}: {error}") from error  # of an engine that died while sampling

    def stop(self) -> None:
        """Ends the engines and their workers."""
        for handle in self.handles:
            ray.kill(handle.actor)
