"""Starting rollout engines as Ray actors, and talking to them: the pool's EngineClient and the sync's Sink in one."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from actors.cluster import Cluster
from actors.group import in_thread, wait_all
from conf.schema import Config
from rl.faults import RoleDied, RoleError
from rollout.engine import Outcome, Request, RolloutEngine
from weightsync.plan import Item, Link, Seat, Wanted


class EngineHandle:
    """One engine actor. `make` makes it; `generation` counts how often that was."""

    def __init__(self, make: Callable[[], Any], index: int):
        self._make, self.name = make, f"rollout engine {index}"
        self.actor, self.generation, self.stopped = make(), 1, False
        self._start: tuple[str, int] | None = None

    def start(self, model_path: str, num_threads: int) -> Any:
        """Loads a model; Ray's reference."""
        self._start = model_path, num_threads
        return self.actor.start.remote(*self._start)

    def restart(self) -> Future[Any]:
        """As weightsync.sides.Sink. Requests that it had are lost."""
        ray.kill(self.actor)
        self.actor = self._make()
        assert self._start is not None
        started = self._future("start", *self._start)

        def work() -> None:
            started.result()
            self.generation += 1  # not before: nobody should ask it for anything

        return in_thread(work)

    async def submit(self, requests: list[Request]) -> None:
        await self.actor.submit.remote(requests)

    async def abort(self, request_ids: list[str]) -> None:
        await self.actor.abort.remote(request_ids)

    async def collect(self, timeout_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = await self.actor.collect.remote(timeout_s)
        return outcomes

    def pause(self) -> Future[Any]:
        return self._future("pause")

    def wanted(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> Future[list[Wanted]]:
        return self._future("wanted", shapes, dtype)

    def connect(self, name: str, seats: list[Seat], links: list[Link]) -> Future[list[set[tuple[int, int]]]]:
        return self._future("connect", name, seats, links)

    def begin_update(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        return self._future("begin_update", name, version, modules)

    def load(self, name: str, items: list[Item]) -> Future[Any]:
        return self._future("load", name, items)

    def finish_update(self, name: str, version: int) -> Future[list[str]]:
        return self._future("finish_update", name, version)

    def probe(self, row: list[int]) -> Future[list[float]]:
        return self._future("probe", row)

    def resume(self, name: str) -> Future[Any]:
        return self._future("resume", name)

    def stop(self) -> None:
        """Ends the engine and its workers."""
        self.stopped = True
        ray.kill(self.actor)

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
        gpus = [cfg.cluster.gpus_per_engine * cfg.engine_workers(i) if device == "cuda" else 0.0 for i in range(count)]
        place = cluster.reserve("rollout", [(cfg.cluster.cpus_per_engine, gpu) for gpu in gpus])

        def make(index: int) -> Any:
            return remote.options(
                num_cpus=cfg.cluster.cpus_per_engine,
                num_gpus=gpus[index],
                max_concurrency=1000,
                runtime_env={"env_vars": env},
                scheduling_strategy=place(index),
            ).remote(cfg, index, device)

        self.handles = [EngineHandle(partial(make, index), index) for index in range(count)]

    def start(self) -> Future[None]:
        """Loads the model in every engine; the future ends when all have, or raises."""

        def begin() -> None:
            refs = [handle.start(self._model_path, self._threads) for handle in self.handles]
            wait_all(refs, [h.name for h in self.handles], "start", self.cfg.cluster.start_timeout_s)

        return in_thread(begin)

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
        handles = [handle for handle in self.handles if not handle.stopped]
        refs = [getattr(handle.actor, method).remote(*args) for handle in handles]
        try:
            wait_all(refs, [handle.name for handle in handles], phase, self.cfg.sync.timeout_s)
        except RuntimeError as error:
            if isinstance(error, RoleError):
                raise
            raise RoleDied(f"phase {phase}: {error}") from error  # of an engine that died while sampling

    def stop(self) -> None:
        """Ends the engines and their workers."""
        for handle in self.handles:
            handle.stop()
