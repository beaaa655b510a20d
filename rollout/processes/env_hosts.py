"""The hosts of one episode: in this process, on the event loop or in a thread, and in a process of its own."""

import asyncio
import copy
import inspect
import json
import pickle
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any

from conf.errors import ConfigError
from conf.imports import describe
from rollout.environment import EnvironmentFailure
from rollout.processes.env_faults import EnvBadValue, EnvDied, EnvFault, EnvRaised, EnvTimeout
from rollout.processes.env_values import CHECKS, revive
from rollout.processes.env_worker import BAD_VALUE, FAILED, RAISED, REFUSED, VALUE, trace
from rollout.processes.worker import (
    ERROR_CHARS,
    NUMBER,
    START_TIMEOUT_S,
    MessageTooLong,
    Worker,
    close_worker,
    describe_death,
    receive,
    send,
)

# What it is called where its end is described.
PROCESS = "environment's process"
CLOSED = "the episode was closed"


async def within(awaitable: Awaitable[Any], stage: str, seconds: float, deadline_s: float) -> Any:
    """Its result. Raises EnvTimeout after `seconds`, without waiting for one that does not let itself be cancelled."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=max(seconds, 0))
        if not task.done():
            raise EnvTimeout(stage, deadline_s)
        if task.cancelled():  # from within: whoever waits here was not
            raise EnvRaised(f"{stage} was cancelled by the environment itself: asyncio.CancelledError", False)
        return task.result()
    finally:
        if not task.done():
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # looked at, so not logged
            task.cancel()


class DaemonThread:
    """A thread for the calls of one episode, which need not end: an interpreter that exits does not wait for it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """A future of (value, None) or (None, what was raised)."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def stop(self) -> None:
        """It ends once its calls have."""
        self._calls.put(None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                outcome: tuple[Any, BaseException | None]
                try:
                    outcome = (call(), None)
                except BaseException as error:
                    outcome = (None, error)
                future.set_result(outcome)
                del outcome


class LocalHost:
    """An environment in this process: on the event loop, or with `threaded` its sync methods in a thread."""

    def __init__(
        self,
        environment: Callable[[], Any],
        threaded: bool,
        abandon: Callable[[DaemonThread], None],
        give_back: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._thread = DaemonThread() if threaded else None
        self._abandon = abandon
        self._give_back = give_back
        self._current: Any = None
        self._ended = ""
        self._closed = False

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        if self._ended:
            raise EnvDied(self._ended)
        return await self._call(method, copy.deepcopy(args), deadline_s)  # a task is that of other episodes too

    async def close(self, deadline_s: float) -> None:
        if self._closed:
            return
        self._closed, self._ended = True, self._ended or CLOSED
        try:
            if self._current is not None and hasattr(self._current, "close"):
                await self._call("close", (), deadline_s)
        except EnvTimeout:
            if self._thread:  # a call before it hangs: close may be what sets it free
                self._thread.submit(lambda: self._invoke("close", ()))
            raise
        finally:
            if self._thread:
                self._thread.stop()
            self._give_back()

    async def _call(self, method: str, args: tuple[Any, ...], deadline_s: float) -> Any:
        began = time.monotonic()

        def remaining() -> float:
            return deadline_s - (time.monotonic() - began)

        try:
            if self._thread and not inspect.iscoroutinefunction(getattr(self._current, method, None)):
                future = asyncio.wrap_future(self._thread.submit(lambda: self._invoke(method, args)))
                try:
                    value, error = await within(future, method, remaining(), deadline_s)
                except EnvTimeout as timeout:
                    self._replace_thread(str(timeout))
                    raise
                if error is not None:
                    raise raised(error)
            else:
                value = self._invoke(method, args)
            if inspect.isawaitable(value):
                value = await within(value, method, remaining(), deadline_s)
            if remaining() < 0:
                raise EnvTimeout(method, deadline_s)
            return CHECKS[method](value)
        except EnvFault:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
            raise raised(error) from None

    def _invoke(self, method: str, args: tuple[Any, ...]) -> Any:
        if self._current is None:
            self._current = self._environment()
        bound = getattr(self._current, method, None)
        if bound is None:
            raise AttributeError(f"{type(self._current).__name__} has no method {method}")
        return bound(*args)

    def _replace_thread(self, ended: str) -> None:
        """The old one hangs; the new one is there for close, which may even set the old one free."""
        assert self._thread
        self._ended = self._ended or ended
        self._thread.stop()
        self._abandon(self._thread)
        self._thread = DaemonThread()


def raised(error: BaseException) -> EnvRaised:
    return EnvRaised(trace(error), isinstance(error, EnvironmentFailure))


class ProcessHost:
    """An environment in a process, which is killed when it does not answer, else given back for the next episode."""

    def __init__(
        self,
        take: Callable[[], Worker],
        give_back: Callable[[Worker | None], None],
        executor: Executor,
        start: Callable[[Worker], None],
        max_message_bytes: int,
    ) -> None:
        self._take = take
        self._start = start
        self._give_back = give_back
        self._executor = executor
        self._max_message_bytes = max_message_bytes
        self._worker: Worker | None = None
        self._ended = ""
        self._closed = False
        self._one_call = threading.Lock()

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._executor, self._call, method, args, deadline_s)
        except RuntimeError:  # all hosts were closed, and this one with them
            raise EnvDied(CLOSED) from None
        return await answer

    async def close(self, deadline_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._close, deadline_s)
        except RuntimeError:  # all hosts were closed, and this one with them
            self._give_back(None)

    def _call(self, method: str, args: tuple[Any, ...], deadline_s: float) -> Any:
        """One call, in a thread of the executor."""
        with self._one_call:
            if self._closed or self._ended:
                raise EnvDied(self._ended or CLOSED)
            try:
                request = pickle.dumps((method, args))
            except Exception as error:
                raise EnvBadValue(f"{method}: cannot be sent to the {PROCESS}: {describe(error)}") from error
            try:
                if self._worker is None:
                    self._worker = self._take()
                self._start(self._worker)
            except Exception as error:
                self._drop(str(error))
                raise
            return self._exchange(self._worker, method, request, deadline_s)

    def _close(self, deadline_s: float) -> None:
        began = time.monotonic()
        free = self._one_call.acquire(timeout=deadline_s)  # taken only while a call is cut off that nobody awaits
        try:
            if not free:
                self._drop(CLOSED)
            elif self._worker and not self._ended:
                remaining = max(deadline_s - (time.monotonic() - began), 1e-3)
                self._exchange(self._worker, "close", pickle.dumps(("close", ())), remaining)
        finally:
            if free:
                self._one_call.release()
            worker, self._worker = self._worker, None
            self._give_back(worker)

    def _exchange(self, worker: Worker, method: str, request: bytes, deadline_s: float) -> Any:
        """The checked answer to one request. The process is gone after any failure but the environment's own."""
        began = time.monotonic()
        worker.num_calls += 1
        number = NUMBER.pack(worker.num_calls)
        try:
            send(worker.channel, number + request, deadline_s)
            remaining = max(deadline_s - (time.monotonic() - began), 1e-3)
            reply = receive(worker.channel, remaining, self._max_message_bytes)
            if reply.startswith(number):
                return answer(method, reply.removeprefix(number))
            fault: EnvFault = EnvDied(f"the {PROCESS} answered another call than {method}: was it forked? It was ended")
        except MessageTooLong as error:
            fault = EnvBadValue(f"{method}: returned {error}")
        except TimeoutError:
            fault = EnvTimeout(method, deadline_s)
        except (EOFError, OSError):
            fault = EnvDied(CLOSED if self._closed and method != "close" else describe_death(worker, PROCESS))
        self._drop(str(fault))
        raise fault

    def _drop(self, ended: str) -> None:
        self._ended = self._ended or ended
        if self._worker:
            close_worker(self._worker)


def answer(method: str, reply: bytes) -> Any:
    """The value in a reply. Raises EnvBadValue or EnvRaised. The reply may hold anything: its sender is not trusted."""
    try:
        kind, value = json.loads(reply)
        if kind == VALUE:
            return revive(method, value)
    except (ValueError, TypeError, RecursionError) as error:
        raise EnvBadValue(f"{method}: an answer that is none: {error}") from None
    text = str(value)[-ERROR_CHARS:]
    if kind in (RAISED, FAILED):
        raise EnvRaised(text, kind == FAILED)
    raise EnvBadValue(text if kind == BAD_VALUE else f"{method}: an answer of unknown kind {kind!r}")


def await_ready(worker: Worker, target: str, kwargs: dict[str, Any]) -> list[str]:
    """Waits until the class is imported; its optional methods, or [] when it was before.

    Raises ConfigError, EnvTimeout, EnvDied or EnvBadValue.
    """
    if worker.ready:
        return []
    try:
        send(worker.channel, pickle.dumps((target, kwargs)), START_TIMEOUT_S)
        kind, value = json.loads(receive(worker.channel, START_TIMEOUT_S, 1 << 20))
    except TimeoutError:
        raise EnvTimeout("start", START_TIMEOUT_S) from None
    except (EOFError, OSError):
        raise EnvDied(describe_death(worker, PROCESS)) from None
    except (ValueError, TypeError, RecursionError, MessageTooLong) as error:
        raise EnvBadValue(f"start: an answer that is none: {error}") from None
    if kind == REFUSED:
        raise ConfigError(str(value))
    worker.ready = True
    return [str(name) for name in value]
