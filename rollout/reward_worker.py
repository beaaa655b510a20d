"""The process that runs a reward function, both ends of it: one request at a time, in its main thread, over a socket.

Imports neither torch nor anything else heavy; what the reward function imports is its own business.
Messages are a length (8 bytes) and that many bytes: pickle to the worker, JSON [kind, value] back.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import math
import numbers
import os
import pickle
import reprlib
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError
from conf.imports import check_arguments, import_function

HEADER = struct.Struct(">Q")
PR_SET_PDEATHSIG = 1
ERROR_CHARS = 4000
START_TIMEOUT_S = 120.0
# The parent's sys.path, so that the worker finds what the parent finds, without running the parent's main script again.
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rollout.reward_worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)

# Kinds of reply. The first two answer the start, the others a request.
READY, REFUSED, REWARD, BAD_VALUE, RAISED = "ready", "refused", "reward", "bad_value", "raised"


def send(channel: socket.socket, payload: bytes, timeout_s: float | None = None) -> None:
    """Sends one message. Raises TimeoutError, or OSError when the other side is gone."""
    channel.settimeout(timeout_s)
    channel.sendall(HEADER.pack(len(payload)) + payload)


def receive(channel: socket.socket, timeout_s: float | None = None) -> bytes:
    """The next message. Raises TimeoutError, EOFError when the other side is gone, or OSError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = HEADER.unpack(_receive_exactly(channel, HEADER.size, deadline))
    return _receive_exactly(channel, length, deadline)


def _receive_exactly(channel: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise TimeoutError
        channel.settimeout(remaining)
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# The parent's end


@dataclass(kw_only=True, eq=False)
class Worker:
    """One process, and our end of the socket to it. `ready` once it has imported the reward function."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    ready: bool = False


def start_worker() -> Worker:
    """Starts a process, without waiting for it. The kernel ends it with the *thread* that called this."""
    ours, theirs = socket.socketpair()
    with theirs:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", BOOTSTRAP, path, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward function prints
            start_new_session=True,  # a group to kill as a whole; the terminal's Ctrl-C is ours to handle
        )
    return Worker(process=process, channel=ours)


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


def kill_worker(worker: Worker) -> None:
    """Kills the process with all of its group and reaps it. May be called again."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()


def describe_death(worker: Worker) -> str:
    """How a process whose socket has closed came to its end."""
    try:
        code = worker.process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "the reward process closed its connection"
    if code < 0:
        return f"the reward process was killed by {signal.Signals(-code).name}"
    return f"the reward process exited with code {code}"


# The worker's end


def serve(fd: int, parent: int) -> None:
    """Answers requests on socket `fd` until its other end closes; dies with process `parent`."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
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
    """A finite float from a bool, an int, a float or a 0-dimensional array or tensor; None from anything else."""
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
