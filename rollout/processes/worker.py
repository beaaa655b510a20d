"""A process of ours that runs somebody else's code: how it starts, how messages reach it, how it ends.

Imports neither torch nor anything else heavy. Messages are a length (8 bytes) and that many bytes. What they hold is up
to `reward_worker.py` and `env_worker.py`: pickle to the worker, JSON [kind, value] back.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollout.sandbox import END_TIMEOUT_S, Jailed, Limits, python, start_jailed

HEADER = struct.Struct(">Q")
NUMBER = struct.Struct(">Q")  # of a call of an environment: its answer begins with the same
PR_SET_PDEATHSIG = 1
MARK = "TANDEM_WORKER"  # in the environment of a worker and of all that it starts
ERROR_CHARS = 4000
START_TIMEOUT_S = 120.0
# The parent's sys.path, so that the worker finds what the parent finds, without running the parent's main script again.
BOOTSTRAP = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).serve(int(sys.argv[3]), int(sys.argv[4]))"
)


class MessageTooLong(Exception):
    """A message whose header announces more than may be received; none of it was read."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"a message of {num_bytes} bytes, more than the {max_bytes} allowed")


def send(channel: socket.socket, payload: bytes, timeout_s: float | None = None) -> None:
    """Sends one message. Raises TimeoutError, or OSError when the other side is gone."""
    channel.settimeout(timeout_s)
    channel.sendall(HEADER.pack(len(payload)) + payload)


def receive(channel: socket.socket, timeout_s: float | None = None, max_bytes: int | None = None) -> bytes:
    """The next message. Raises TimeoutError, EOFError when the other side is gone, MessageTooLong, or OSError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = HEADER.unpack(_receive_exactly(channel, HEADER.size, deadline))
    if max_bytes is not None and length > max_bytes:
        raise MessageTooLong(length, max_bytes)
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


@dataclass(kw_only=True, eq=False)
class Worker:
    """One process, and our end of the socket to it. `ready` once it has imported the code that it runs. num_calls: of
    its environments."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    ready: bool = False
    num_calls: int = 0
    jailed: Jailed | None = None
    mark: str = ""  # the value of MARK; a sandbox needs none


def start_process(module: str) -> Worker:
    """Starts a process that runs `module.serve(fd, parent)`, without waiting for it. The kernel ends it with the
    *thread* that called this.
    """
    ours, theirs = socket.socketpair()
    mark = uuid.uuid4().hex
    with theirs:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", BOOTSTRAP, path, module, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward function or an environment prints
            start_new_session=True,  # a group to kill as a whole; the terminal's Ctrl-C is ours to handle
            env={**os.environ, MARK: mark},
        )
    return Worker(process=process, channel=ours, mark=mark)


def start_sandboxed(module: str, target: str, limits: Limits) -> Worker:
    """As `start_process`, in a sandbox that holds the code which `target` may import.

    Where that cannot be set up the worker dies, and `describe_death` says why: ask `sandbox_support` before.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        path = code_path(target)
        argv = [python(), "-I", "-S", "-u", "-c", BOOTSTRAP, json.dumps(path), module, str(theirs.fileno()), "0"]
        jailed = start_jailed(
            argv,
            limits=limits,
            binds=[part for entry in path for part in code_in(entry)],
            pass_fds=[theirs.fileno()],
            forward_bytes=limits.output_bytes,
        )
    return Worker(process=jailed.process, channel=ours, jailed=jailed)


def code_path(target: str) -> list[str]:
    """Our sys.path, with the current directory and the places of this project and of import path `target`."""
    entries = [*sys.path, os.getcwd(), str(Path(__file__).parents[2])]
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(target.partition(".")[0])  # it finds and does not import
        places = [spec.origin] if spec and spec.has_location else []
        packages = list(spec.submodule_search_locations or []) if spec else []
        entries += [os.path.dirname(place) for place in (packages or places) if place]
    return list(dict.fromkeys(os.path.realpath(entry or os.getcwd()) for entry in entries))


def code_in(entry: str) -> list[str]:
    """What a sandbox holds of an entry of sys.path: all of an installed one, else its Python files and packages.

    Not what else lies in a working directory: data, keys, the history of a repository.
    """
    installed = (os.path.realpath(sys.prefix) + os.sep, os.path.realpath(sys.base_prefix) + os.sep)
    if entry.startswith(installed) or os.path.basename(entry) in ("site-packages", "dist-packages"):
        return [entry] if os.path.exists(entry) else []
    if not os.path.isdir(entry):
        return []
    with os.scandir(entry) as found:
        return [
            part.path
            for part in found
            if (part.name.endswith((".py", ".so")) and part.is_file())
            or (part.name.isidentifier() and os.path.exists(os.path.join(part.path, "__init__.py")))
        ]


def kill_worker(worker: Worker) -> None:
    """Kills the process with all of its group and whatever it started in other groups, and reaps it. May be called
    again."""
    started: list[psutil.Process] = []  # what it has started without our variables among those of the environment
    with contextlib.suppress(psutil.Error):
        if worker.mark and worker.process.poll() is None:
            started = psutil.Process(worker.process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    for process in started:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + END_TIMEOUT_S
    while (found := left_behind(worker.mark)) and time.monotonic() < deadline:  # what they start meanwhile, too
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=END_TIMEOUT_S)


def left_behind(mark: str) -> list[psutil.Process]:
    """The processes with this mark that are still running."""
    found = []
    for process in psutil.process_iter() if mark else ():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def close_worker(worker: Worker) -> None:
    """Kills it and closes our ends of what leads to it. May be called again."""
    kill_worker(worker)
    worker.channel.close()
    if worker.jailed:
        worker.jailed.close()


def describe_death(worker: Worker, who: str) -> str:
    """How a process whose socket has closed came to its end; `who` is what it is called."""
    try:
        if worker.jailed:
            return _describe_report(worker.jailed, who)
        code = worker.process.wait(timeout=1)
    except (subprocess.TimeoutExpired, TimeoutError):
        return f"the {who} closed its connection"
    if code < 0:
        return f"the {who} was killed by {signal_name(-code)}"
    return f"the {who} exited with code {code}"


def _describe_report(jailed: Jailed, who: str) -> str:
    report = jailed.report(END_TIMEOUT_S)
    if report["end"] == "setup":
        return f"the sandbox of the {who} could not be set up: {report['error']}"
    if report["end"] == "killed":
        return f"the process around the sandbox of the {who} ended without a report"
    if report["end"] == "memory":
        return f"the {who} was killed for holding {report['held_bytes']} bytes of memory, more than its sandbox allows"
    if report["end"] == "signal":
        return f"the {who} was killed by {signal_name(report['number'])}"
    return f"the {who} exited with code {report['code']}"


def signal_name(number: int) -> str:
    known = {known.value: known.name for known in signal.Signals}
    return known.get(number, f"signal {number}")  # most of those for real time have no name


def die_with_parent(parent: int) -> None:
    """Of the worker's end: the kernel kills this process with the thread that started it. 0: a sandbox sees to that."""
    if not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
