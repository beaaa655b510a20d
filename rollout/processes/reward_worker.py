"""The process that runs a reward function, both ends of it: one request at a time, in its main thread, over a socket.

Imports neither torch nor anything else heavy; what the reward function imports is its own business.
Messages are pickle to the worker, JSON [kind, value] back.
"""

import asyncio
import inspect
import json
import numbers
import os
import pickle
import reprlib
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from conf.errors import ConfigError
from conf.imports import check_arguments, import_function
from rollout.processes.worker import ERROR_CHARS, START_TIMEOUT_S, Worker, die_with_parent, receive, send, start_process

# Kinds of reply. The first two answer the start, the others a request.
MAX_REWARD = 3.4028234e38  # of float32, which batches are made of
READY, REFUSED, REWARD, BAD_VALUE, RAISED = "ready", "refused", "reward", "bad_value", "raised"


# The parent's end


def start_worker() -> Worker:
    """Starts a process, without waiting for it. The kernel ends it with the *thread* that called this."""
    return start_process("rollout.processes.reward_worker")


def await_ready(worker: Worker, target: str, kwargs: dict[str, Any]) -> None:
    """Waits until the reward function is imported. Raises ConfigError, TimeoutError, EOFError or OSError."""
    if worker.ready:
        return
    send(worker.channel, pickle.dumps((target, kwargs)), START_TIMEOUT_S)
    kind, value = json.loads(receive(worker.channel, START_TIMEOUT_S))
    if kind == REFUSED:
        raise ConfigError(value)
    worker.ready = True


def call(worker: Worker, request: bytes, deadline_s: float) -> tuple[str, Any]:
    """The (kind, value) of a pickled request. Raises TimeoutError, EOFError or OSError; kill the worker then."""
    began = time.monotonic()
    send(worker.channel, request, deadline_s)
    kind, value = json.loads(receive(worker.channel, max(deadline_s - (time.monotonic() - began), 1e-3)))
    return kind, value


# The worker's end


def serve(fd: int, parent: int) -> None:
    """Answers requests on socket `fd` until its other end closes; dies with process `parent`."""
    die_with_parent(parent)
    channel = socket.socket(fileno=fd)
    target, kwargs = pickle.loads(receive(channel))
    try:
        function = import_function(target, "reward._target_")
        check_arguments(function, "reward._target_", target, "", {}, **kwargs)
    except ConfigError as error:
        _reply(channel, REFUSED, str(error))
        os._exit(0)
    _reply(channel, READY, None)
    with asyncio.Runner() as runner:  # one loop for the process: an async function may keep a client between calls
        while True:
            try:
                request = receive(channel)
            except (EOFError, OSError):
                os._exit(0)  # not a normal exit, which would wait for threads that the function left behind
            _reply(channel, *_score(function, kwargs, runner, request))


def _reply(channel: socket.socket, kind: str, value: float | dict[str, float] | str | None) -> None:
    send(channel, json.dumps([kind, value]).encode())


def _score(
    function: Callable[..., Any], kwargs: dict[str, Any], runner: asyncio.Runner, request: bytes
) -> tuple[str, float | dict[str, float] | str]:
    """(REWARD, number or {name: number}), (BAD_VALUE, what came back instead) or (RAISED, traceback)."""
    try:
        completion, record = pickle.loads(request)
        value = function(completion, record, **kwargs)
        if inspect.isawaitable(value):
            value = runner.run(_finish(value))
        reward = {str(k): as_number(v) for k, v in value.items()} if isinstance(value, dict) else as_number(value)
        if reward is None or (isinstance(reward, dict) and (not reward or None in reward.values())):
            shown = f"{reprlib.repr(value)} ({type(value).__name__})"
            return BAD_VALUE, f"the reward function returned {shown}, not a finite number"
        return REWARD, reward  # type: ignore[return-value]  # no value of the dict is None
    except BaseException as error:  # SystemExit of a reward function is an answer too, not the end of the worker
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return RAISED, "".join(traceback.format_exception(type(error), error, frames))[-ERROR_CHARS:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function left set must not hit the next sample


async def _finish(value: Any) -> Any:
    return await value


def as_number(value: Any) -> float | None:
    """A float, finite in float32 too, from a bool, an int, a float or a 0-dimensional array or tensor; else None."""
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_REWARD else None
