"""Runs code that nobody trusts: no network, no files of the host, bounded in everything, and gone without a trace.

What keeps each promise, in `processes/jail.py`: namespaces (network, processes, files, IPC), a root of its own that
holds Python read-only and /tmp in memory, no rights and a user that owns nothing, limits (`Limits`) kept by the kernel
and a watch over the memory of all processes together, and a filter of system calls. When one of these cannot be had
here, nothing runs: ConfigError says what is missing.
"""

import contextlib
import functools
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from conf.errors import ConfigError

ROOT = str(Path(__file__).parents[1])
START_JAIL = (
    "import sys; sys.path.append(sys.argv[1]); from rollout.processes.jail import main; main(*map(int, sys.argv[2:]))"
)
END_TIMEOUT_S = 10.0
CODE_PATH = "/tmp/main.py"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one run, over all processes that the code starts; file_bytes, cpu_s and num_open_files hold for each of them.

    memory_bytes bounds each process by its addresses, and all together by what they hold, looked at 20 times a second.
    num_processes counts threads too. Files lie in memory, disk_bytes of it on top of memory_bytes. cpu_s=0: no limit.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 << 20
    num_processes: int = 32
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    num_files: int = 4096
    num_open_files: int = 64
    output_bytes: int = 1 << 20  # of stdout and of stderr

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0 and name != "cpu_s":
                raise ConfigError(f"{name}={value}: a limit of the sandbox must be > 0")


class Reason(Enum):
    """Why a run ended: by itself, by a signal, or by one of its limits."""

    exited = "exited"
    signal = "signal"
    wall_s = "wall_s"
    cpu_s = "cpu_s"
    memory_bytes = "memory_bytes"
    output_bytes = "output_bytes"


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """exit_code: None unless it exited, or the negative number of the signal. The outputs are cut at output_bytes."""

    stdout: str
    stderr: str
    exit_code: int | None
    reason: Reason
    seconds: float


DEFAULT_LIMITS = Limits()


def run_code(code: str, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> CodeResult:
    """Runs Python code as a script, with the standard library, in /tmp. Blocks until all its processes are gone.

    Raises ConfigError where the sandbox cannot be set up, OSError when it cannot be started or is killed from outside.
    """
    began = time.monotonic()
    jailed = start_jailed([python(), "-I", "-S", "-u", CODE_PATH], limits=limits, files={CODE_PATH: code}, piped=True)
    try:
        outputs, cut = _exchange(jailed.process, stdin.encode(errors="surrogatepass"), limits, began + limits.wall_s)
        report = {} if cut else jailed.report(END_TIMEOUT_S)  # it is there: both outputs were closed at its end
    finally:
        jailed.kill()
        jailed.close()
    reason, exit_code = (cut, None) if cut else _ending(report)
    stdout, stderr = (output.decode(errors="replace") for output in outputs)
    return CodeResult(
        stdout=stdout, stderr=stderr, exit_code=exit_code, reason=reason, seconds=time.monotonic() - began
    )


def _ending(report: dict[str, Any]) -> tuple[Reason, int | None]:
    if report["end"] == "killed":
        raise ChildProcessError("the process around the sandbox ended without a report")
    if report["end"] == "setup":
        raise _unavailable(report["error"])
    if report["end"] == "memory":
        return Reason.memory_bytes, None
    if report["end"] == "signal":
        number = int(report["number"])
        return (Reason.cpu_s, None) if number == signal.SIGXCPU else (Reason.signal, -number)
    return Reason.exited, int(report["code"])


def _exchange(
    process: subprocess.Popen[bytes], stdin: bytes, limits: Limits, deadline: float
) -> tuple[tuple[bytes, bytes], Reason | None]:
    """Feeds stdin and collects stdout and stderr until both are closed, or a limit is met."""
    assert process.stdin and process.stdout and process.stderr
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    left = memoryview(stdin)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for output in outputs:
            selector.register(output, selectors.EVENT_READ)
        reason: Reason | None = None
        while reason is None and any(output in selector.get_map() for output in outputs):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                reason = Reason.wall_s
                break
            for key, _ in selector.select(remaining):
                if key.fileobj is process.stdin:
                    try:
                        left = left[os.write(key.fd, left[: 1 << 16]) :] if left else left
                    except OSError:  # the code has closed it, or ended
                        left = left[:0]
                    if not left:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                part = os.read(key.fd, 1 << 16)
                collected = outputs[key.fileobj]  # type: ignore[index]  # it was registered as one of them
                collected += part
                if not part:
                    selector.unregister(key.fileobj)
                if len(collected) > limits.output_bytes:
                    del collected[limits.output_bytes :]
                    reason = Reason.output_bytes
    stdout, stderr = outputs.values()
    return (bytes(stdout), bytes(stderr)), reason


@dataclass(kw_only=True, eq=False)
class Jailed:
    """The process around a sandbox, and the pipe on which it says how the program within ended."""

    process: subprocess.Popen[bytes]
    reports: int

    def report(self, timeout_s: float) -> dict[str, Any]:
        """How the program ended. Raises TimeoutError while it runs."""
        os.set_blocking(self.reports, True)
        with selectors.DefaultSelector() as selector:
            selector.register(self.reports, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError
        line = os.read(self.reports, 1 << 16)
        return json.loads(line) if line else {"end": "killed"}

    def kill(self) -> None:
        """Kills the first process of the sandbox, and so all of them, and the one around it. May be called again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Closes our ends of all pipes. May be called again."""
        if self.reports >= 0:
            os.close(self.reports)
            self.reports = -1
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


def start_jailed(
    argv: list[str],
    *,
    limits: Limits,
    binds: Sequence[str] = (),
    files: dict[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    piped: bool = False,
    forward_bytes: int = 0,
) -> Jailed:
    """Starts a program in a sandbox without waiting for it; the kernel ends it with the *thread* that called this.

    binds: further paths of the host that it may read. files: path and text of what lies there at the start, under /tmp.
    piped: its stdin, stdout and stderr are pipes to us; else the first is empty and `forward_bytes` of the others go to
    our stderr.
    """
    config = {
        "argv": argv,
        "env": environment_variables(),
        "binds": without_nested([*python_paths(), *binds]),
        "links": system_links(),
        "files": files or {},
        "pass_fds": list(pass_fds),
        "forward_bytes": forward_bytes,
        "limits": asdict(limits),
    }
    config_fd = os.memfd_create("sandbox")
    reports, report = os.pipe()
    try:
        with open(os.dup(config_fd), "w", encoding="utf-8") as file:
            json.dump(config, file)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START_JAIL, ROOT, str(config_fd), str(report)],
            pass_fds=[config_fd, report, *pass_fds],
            stdin=pipe if piped else subprocess.DEVNULL,
            stdout=pipe if piped else 2,
            stderr=pipe if piped else None,
            start_new_session=True,
        )
    except BaseException:
        os.close(reports)
        raise
    finally:
        os.close(config_fd)
        os.close(report)
    return Jailed(process=process, reports=reports)


def python() -> str:
    """The interpreter itself, not the link to it of a virtual environment."""
    return os.path.realpath(sys.executable)


def environment_variables() -> dict[str, str]:
    """All that a program in the sandbox sees of them: none of ours, which hold secrets."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    library = {"LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR") or ""}
    return {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"} | threads | library


def python_paths() -> list[str]:
    """What Python needs to run: itself, its libraries, and the system's shared libraries."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [python(), f"{prefix}/lib", f"{prefix}/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
    return [path for path in [*wanted, "/etc/ld.so.cache"] if os.path.exists(path) and not os.path.islink(path)]


def system_links() -> dict[str, str]:
    return {path: os.readlink(path) for path in ("/lib", "/lib64") if os.path.islink(path)}


def without_nested(paths: Sequence[str]) -> list[str]:
    """Real paths, each once, without those that lie in another one."""
    kept: list[str] = []
    for path in sorted({os.path.realpath(path) for path in paths}):
        if not any(path.startswith(other + os.sep) for other in kept):
            kept.append(path)
    return kept


def _unavailable(error: str) -> ConfigError:
    return ConfigError(
        f"the sandbox cannot be set up on {platform.system()} {platform.release()}: {error}. It needs Linux 5.12 on "
        "x86_64 or aarch64, and either the superuser's right to administer the system (CAP_SYS_ADMIN) or namespaces "
        "for all users (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone; in Docker "
        "--security-opt seccomp=unconfined). Nothing is run without it: use env.isolation=process for code you trust"
    )


@functools.cache
def sandbox_support() -> str:
    """What is missing here for a sandbox, or "" when one could be set up. Tries it once per process."""
    if sys.platform != "linux":
        return str(_unavailable("it is not Linux"))
    try:
        result = run_code("print(6 * 7)")
    except ConfigError as error:
        return str(error)
    if result.stdout != "42\n":
        return str(_unavailable(f"Python does not run in it ({result.reason.value}): {result.stderr[-500:]}"))
    return ""
