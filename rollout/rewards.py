"""Reward functions in processes of their own: whatever they do, a call ends by its deadline and harms no other call."""

import asyncio
import pickle
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from conf.errors import ConfigError
from conf.imports import describe
from conf.schema import RewardConfig
from rl.types import Status
from rollout.processes.reward_worker import BAD_VALUE, REWARD, await_ready, call, start_worker
from rollout.processes.worker import START_TIMEOUT_S, Worker, close_worker, describe_death, kill_worker

# What it is called where its end is described.
PROCESS = "reward process"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The outcome of one call. `reward` is None unless status is ok; `seconds` leave out the wait in line.

    rewards: the named rewards that `reward` is the weighted sum of, where the function returns several.
    """

    reward: float | None
    status: Status
    rewards: dict[str, float] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


class RewardPool:
    """`cfg.num_workers` processes that run the reward function, each one call at a time; further calls wait in line.

    A call past `cfg.deadline_s` is ended by killing its process; the next call starts a new one. Any event loop may
    await `score`.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._cfg = cfg
        self._lock = threading.Lock()
        self._closed = False
        self._workers: set[Worker] = set()
        # One slot per thread, so a thread that runs a call always finds a slot. None: no process yet.
        self._slots: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(cfg.num_workers, thread_name_prefix="reward")
        for _ in range(cfg.num_workers):
            self._slots.put(None)
            self._executor.submit(self._warm)

    async def score(self, completion: str, record: dict[str, Any]) -> Scored:
        """The reward of one completion. Failures are data (`status`, `error`). Raises RuntimeError after `close`."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._score, completion, record)

    def close(self) -> None:
        """Ends every process and thread. Calls that run return reward_failed, those in line are cancelled."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            kill_worker(worker)
        self._executor.shutdown(wait=True)
        for worker in workers:
            self._drop(worker)

    def _warm(self) -> None:
        """Starts a process ahead of the first call."""
        worker = self._slots.get()
        try:
            worker = worker or self._start()
        finally:
            self._slots.put(worker)

    def _start(self) -> Worker:
        with self._lock:
            if self._closed:
                raise EOFError
            worker = start_worker()
            self._workers.add(worker)
            return worker

    def _drop(self, worker: Worker) -> None:
        close_worker(worker)
        with self._lock:
            self._workers.discard(worker)

    def _score(self, completion: str, record: dict[str, Any]) -> Scored:
        """One call, in a thread of the executor."""
        try:
            request = pickle.dumps((completion, record))
        except Exception as error:
            return _failed(f"the record cannot be sent to the reward process: {type(error).__name__}: {error}")
        worker = self._slots.get()
        began = time.monotonic()
        try:
            if worker is not None and worker.process.poll() is not None:  # died between calls: not this sample's fault
                self._drop(worker)
                worker = None
            worker = worker or self._start()
            await_ready(worker, self._cfg._target_, self._cfg.kwargs)
            began = time.monotonic()
            kind, value = call(worker, request, self._cfg.deadline_s)
            seconds = time.monotonic() - began
            wrong = value if kind != REWARD else wrong_names(value, self._cfg.weights)
            if wrong:
                return _failed(wrong, seconds)
            rewards = value if isinstance(value, dict) else {}
            return Scored(reward=total(value, self._cfg.weights), status=Status.ok, rewards=rewards, seconds=seconds)
        except Exception as error:
            seconds = time.monotonic() - began
            ready = worker is not None and worker.ready
            message = self._explain(error, worker)
            if worker is not None:
                self._drop(worker)
                worker = None
            if ready and isinstance(error, TimeoutError):
                return Scored(reward=None, status=Status.reward_timeout, error=message, seconds=seconds)
            return _failed(message, seconds)
        finally:
            self._slots.put(worker)

    def _explain(self, error: Exception, worker: Worker | None) -> str:
        if self._closed:
            return "the reward pool was closed"
        if isinstance(error, TimeoutError):
            if worker is not None and not worker.ready:
                return f"the reward process did not start within {START_TIMEOUT_S:g} s"
            return f"no reward within reward.deadline_s={self._cfg.deadline_s:g}; its process was killed"
        if isinstance(error, EOFError | ConnectionError) and worker is not None:
            return describe_death(worker, PROCESS)
        return f"{type(error).__name__}: {error}"


def _failed(error: str, seconds: float = 0.0) -> Scored:
    return Scored(reward=None, status=Status.reward_failed, error=error, seconds=seconds)


def wrong_names(value: float | dict[str, float], weights: dict[str, float]) -> str:
    """Why a returned reward does not fit `reward.weights`, or "". Several rewards need a weight each."""
    found = sorted(value) if isinstance(value, dict) else []
    if found == sorted(weights):
        return ""
    given = f"rewards named {', '.join(found)}" if found else "one number"
    wanted = ", ".join(sorted(weights)) or "none: set it to {name: weight, ...}"
    return f"the reward function returned {given}, but reward.weights names {wanted}"


def total(value: float | dict[str, float], weights: dict[str, float]) -> float:
    """The weighted sum of named rewards, or the one reward."""
    return sum(weights[name] * part for name, part in value.items()) if isinstance(value, dict) else value


def check_reward(cfg: RewardConfig, record: dict[str, Any]) -> str:
    """Imports the reward function in a process and calls it once, with an empty completion. Returns a warning, or "".

    Raises ConfigError when it cannot be imported, does not take its arguments, or returns no finite number. A probe
    that raises, dies or takes too long is only a warning: the function may not be made for empty completions.
    """
    key = f"reward._target_={cfg._target_}"
    try:
        request = pickle.dumps(("", record))
    except Exception as error:
        raise ConfigError(f"{key}: a data record cannot be sent to the reward process: {describe(error)}") from error
    worker = start_worker()
    try:
        try:
            await_ready(worker, cfg._target_, cfg.kwargs)
        except TimeoutError as error:
            raise ConfigError(f"{key}: importing it took longer than {START_TIMEOUT_S:g} s") from error
        except (EOFError, OSError) as error:
            raise ConfigError(f"{key}: importing it ended its process: {describe_death(worker, PROCESS)}") from error
        try:
            kind, value = call(worker, request, cfg.deadline_s)
        except TimeoutError:
            return f"{key}: an empty completion had no reward within reward.deadline_s={cfg.deadline_s:g}"
        except (EOFError, OSError):
            return f"{key}: an empty completion: {describe_death(worker, PROCESS)}"
        wrong = value if kind == BAD_VALUE else wrong_names(value, cfg.weights) if kind == REWARD else ""
        if wrong:
            raise ConfigError(f"{key}: for an empty completion {wrong}")
        return "" if kind == REWARD else f"{key}: an empty completion raised\n{value}"
    finally:
        close_worker(worker)
