"""Where the code of an environment runs: one host for each episode, on the event loop, in a thread, a process or a
sandbox, the same to its caller. Failures are typed: `rollout/processes/env_faults.py`.
"""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from conf.choices import Isolation
from conf.errors import ConfigError
from rollout.processes.env_faults import EnvBadValue, EnvDied, EnvFault, EnvRaised, EnvTimeout
from rollout.processes.env_hosts import DaemonThread, LocalHost, ProcessHost, await_ready
from rollout.processes.env_worker import KEY, RUN, import_environment
from rollout.processes.worker import Worker, close_worker, kill_worker, start_process, start_sandboxed
from rollout.sandbox import Limits, sandbox_support

__all__ = ["EnvBadValue", "EnvDied", "EnvFault", "EnvRaised", "EnvTimeout", "Host", "Hosts", "check_environment"]

MODULE = "rollout.processes.env_worker"
MAX_MESSAGE_BYTES = 16 << 20
MAX_ABANDONED = 8
# Of an environment in a sandbox. Its deadlines are those of the calls.
ENV_LIMITS = Limits(
    cpu_s=0,
    memory_bytes=2 << 30,
    num_processes=128,
    file_bytes=64 << 20,
    disk_bytes=256 << 20,
    num_files=1 << 14,
    num_open_files=256,
)


class Host(Protocol):
    """Where one episode is played. The environment is constructed by the first call, within its deadline."""

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The checked result of reset, step, run, score, oracle, snapshot or restore. Raises one of EnvFault; the
        episode is over after EnvTimeout and EnvDied. Raises ConfigError when the class cannot be imported.
        """
        ...

    async def close(self, deadline_s: float) -> None:
        """Calls the environment's close and gives the host back. May be called again. Raises what close does, one of
        EnvFault, after the host was given back.
        """
        ...


class Line:
    """At most `free` inside, first come first served, from any event loop."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()
        self._closed = False

    async def enter(self) -> None:
        """Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the hosts of the environment were closed")
            if self._free:
                self._free -= 1
                return
            turn: Future[None] = Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it came at the same moment
                self.leave()
            raise

    def leave(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiting, self._waiting = list(self._waiting), deque()
        for turn in waiting:
            if turn.set_running_or_notify_cancel():
                turn.set_exception(RuntimeError("the hosts of the environment were closed"))


class Hosts:
    """The hosts of one environment class, at most `max_concurrent` open; processes are used again between episodes.

    Any event loop may use them, and nothing blocks it but the methods of an inline environment. max_message_bytes: of
    one answer from a process. max_abandoned: hung threads, above which `open` raises. limits: of a sandbox.
    """

    def __init__(
        self,
        target: str,
        kwargs: dict[str, Any],
        isolation: Isolation,
        max_concurrent: int,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_abandoned: int = MAX_ABANDONED,
        limits: Limits = ENV_LIMITS,
    ) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent}: must be >= 1")
        self._target = target
        self._kwargs = kwargs
        self._isolation = isolation
        self._max_message_bytes = max_message_bytes
        self._max_abandoned = max_abandoned
        self._limits = limits
        self._line = Line(max_concurrent)
        self._lock = threading.Lock()
        self._closed = False
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._abandoned: list[DaemonThread] = []
        self._executor: ThreadPoolExecutor | None = None
        if isolation in (Isolation.inline, Isolation.thread):
            self._environment = import_environment(target, kwargs)
        else:
            # The kernel ends a process with the thread that started it: these live until `close`. Twice as many as
            # hosts, so that one can be closed while a call of it is cut off.
            self._executor = ThreadPoolExecutor(2 * max_concurrent, thread_name_prefix="environment")
        if isolation is Isolation.sandbox and (missing := sandbox_support()):
            raise ConfigError(f"env.isolation=sandbox: {missing}")

    async def open(self) -> Host:
        """A host for one episode, which its caller must close. Waits in line. Raises RuntimeError after `close`."""
        self._refuse_hung_threads()
        await self._line.enter()
        if self._executor:
            return ProcessHost(self._take, self._give_back, self._executor, self._ready, self._max_message_bytes)
        return LocalHost(
            lambda: self._environment(**self._kwargs),
            self._isolation is Isolation.thread,
            self._abandoned.append,
            self._line.leave,
        )

    @property
    def num_abandoned(self) -> int:
        """Threads that still hang in a call which passed its deadline."""
        self._abandoned[:] = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned)

    def close(self) -> None:
        """Ends every process; their calls raise EnvDied. An environment in this process ends with its host's close.

        May be called again.
        """
        self._line.close()
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:  # before the threads end, and their processes with them, but not what those started
            kill_worker(worker)
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            close_worker(worker)

    def _refuse_hung_threads(self) -> None:
        if (found := self.num_abandoned) > self._max_abandoned:
            raise RuntimeError(
                f"{KEY}={self._target}: {found} calls passed their deadlines and hang in threads, which cannot be "
                f"ended (at most {self._max_abandoned} may): set env.isolation=process"
            )

    def _take(self) -> Worker:
        """A process that waits for its next episode, or a new one."""
        with self._lock:
            if self._closed:
                raise EnvDied("the hosts of the environment were closed")
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                close_worker(worker)
                self._workers.discard(worker)
            if self._isolation is Isolation.sandbox:
                worker = start_sandboxed(MODULE, self._target, self._limits)
            else:
                worker = start_process(MODULE)
            self._workers.add(worker)
            return worker

    def _ready(self, worker: Worker) -> None:
        await_ready(worker, self._target, self._kwargs)

    def _give_back(self, worker: Worker | None) -> None:
        """At the end of an episode. A process that is alive waits for the next one."""
        if worker:
            with self._lock:
                if worker.process.poll() is None and worker.ready and not self._closed:
                    self._idle.append(worker)
                else:
                    close_worker(worker)
                    self._workers.discard(worker)
        self._line.leave()


def check_environment(target: str, kwargs: dict[str, Any], isolation: Isolation) -> list[str]:
    """Imports the class in a process as `isolation` has it; the names of its optional methods, "run" if it is an agent.

    Raises ConfigError, naming env._target_, when it cannot be imported, lacks reset or step, does not take `kwargs`, or
    is an agent and would be cut off from the model.
    """
    sandboxed = isolation is Isolation.sandbox
    if sandboxed and (missing := sandbox_support()):
        raise ConfigError(f"env.isolation=sandbox: {missing}")
    worker = start_sandboxed(MODULE, target, ENV_LIMITS) if sandboxed else start_process(MODULE)
    try:
        methods = await_ready(worker, target, kwargs)
        if RUN in methods and sandboxed:
            raise ConfigError(
                f"env.isolation=sandbox: {target} is an agent, which asks the model over the network, and a sandbox "
                "has none; use env.isolation=process"
            )
        return methods
    except EnvFault as error:
        raise ConfigError(f"{KEY}={target}: importing it: {error}") from error
    finally:
        close_worker(worker)
