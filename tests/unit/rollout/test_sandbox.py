"""The sandbox keeps each of its promises against code that tries; each test is one attempt."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from conf.errors import ConfigError
from rollout import sandbox
from rollout.processes.syscall_filter import CALLS, filter_program
from rollout.sandbox import CodeResult, Limits, Reason, python, run_code, sandbox_support, start_jailed

SMALL = Limits(wall_s=20, memory_bytes=128 << 20, num_processes=8, disk_bytes=8 << 20, file_bytes=4 << 20)


def attempt(code: str, stdin: str = "", limits: Limits = SMALL) -> CodeResult:
    before = set(psutil.pids())
    result = run_code(code, stdin, limits)
    left = [pid for pid in set(psutil.pids()) - before if in_a_sandbox(pid)]
    deadline = time.monotonic() + 10
    while any(in_a_sandbox(pid) for pid in left):
        assert time.monotonic() < deadline, "a process of the sandbox outlived it"
    return result


def in_a_sandbox(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.uids().real >= 0x70000000 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def printed(code: str, stdin: str = "", limits: Limits = SMALL) -> str:
    result = attempt(code, stdin, limits)
    assert result.reason is Reason.exited and result.exit_code == 0, result
    return result.stdout


def test_code_runs_with_its_input_and_the_standard_library() -> None:
    assert sandbox_support() == ""
    result = attempt(
        "import sys, json, decimal, hashlib, subprocess, threading, tempfile\n"
        "open('notes', 'w').write(sys.stdin.read())\n"
        "print(open('/tmp/notes').read()); print('é', file=sys.stderr); sys.exit(3)",
        "ünput",
    )
    assert result == CodeResult(
        stdout="ünput\n", stderr="é\n", exit_code=3, reason=Reason.exited, seconds=result.seconds
    )


@pytest.mark.parametrize(("code", "exit_code"), [("import os; os._exit(0)", 0), ("import sys; sys.exit(0)", 0)])
def test_an_early_exit_is_an_exit(code: str, exit_code: int) -> None:
    result = attempt(code + "\nprint('on')")
    assert (result.reason, result.exit_code, result.stdout) == (Reason.exited, exit_code, "")


def test_a_process_that_kills_itself_says_by_which_signal() -> None:
    result = attempt("import os; os.kill(os.getpid(), 9)")
    assert (result.reason, result.exit_code) == (Reason.signal, -9)


def test_the_network_is_refused() -> None:
    names = ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"]
    code = f"""
import socket
for name in {names}:
    try:
        socket.socket(getattr(socket, name), socket.SOCK_STREAM).connect(("127.0.0.1", 22))
        print(name, "open")
    except OSError as error:
        print(name, type(error).__name__)
socket.socketpair()
"""
    assert printed(code).splitlines() == [f"{name} PermissionError" for name in names]


def test_every_namespace_is_one_of_its_own() -> None:
    jailed = start_jailed([python(), "-I", "-S", "-c", "import time; time.sleep(3600)"], limits=SMALL)
    try:
        deadline = time.monotonic() + 20
        while len(below := psutil.Process(jailed.process.pid).children(recursive=True)) < 2:
            assert time.monotonic() < deadline
        program = next(process for process in below if process.ppid() != jailed.process.pid)
        for name in ("net", "pid", "mnt", "ipc", "uts"):
            assert os.readlink(f"/proc/{program.pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"), name
    finally:
        jailed.kill()
        jailed.close()


def test_files_of_the_host_are_not_there(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("secret")
    own.chmod(0o600)
    shared = tmp_path / "shared"
    shared.write_text("secret")
    shared.chmod(0o644)
    paths = [str(own), str(shared), "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/self/status", __file__]
    code = f"""
import os
for path in {paths}:
    print(os.path.exists(path), end=" ")
print(sorted(os.listdir("/")), os.listdir("/tmp"), os.getcwd())
for path in ("/root", "/home", "/dev"):
    try:
        print(os.listdir(path), end="")
    except FileNotFoundError:
        pass
"""
    lines = printed(code).splitlines()
    assert lines[0].startswith("False " * len(paths)) and lines[0].endswith("['main.py'] /tmp")
    assert set(json.loads(lines[0].split("[")[1].split("]")[0].join("[]").replace("'", '"'))) <= {
        *("dev", "etc", "lib", "lib64", "tmp", "usr"),
        *Path(os.path.realpath(sys.base_prefix)).parts[1:2],
    }


def test_our_variables_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert printed("import os; print('SOME_TOKEN' in os.environ, os.environ['HOME'])") == "False /tmp\n"


def test_python_and_the_root_cannot_be_written() -> None:
    code = """
import os, json
for path in ("/x", json.__file__, os.__file__ + "x", "/dev/x", "/usr/x"):
    try:
        open(path, "a")
        print(path)
    except OSError:
        pass
"""
    assert printed(code) == ""


def test_rights_are_gone() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def errno(name, *args):
    return ctypes.get_errno() if getattr(libc, name)(*args) < 0 else 0
print(os.getuid() != 0, errno("unshare", 0x10000000), errno("mount", b"x", b"/tmp", b"tmpfs", 0, b""),
    errno("chroot", b"/tmp"), errno("ptrace", 0, 0, 0, 0), errno("setuid", 0), errno("syscall", 319, b"x", 0))
"""
    assert printed(code) == "True 1 1 1 1 1 1\n"


def test_other_processes_are_neither_seen_nor_reached() -> None:
    code = f"""
import os, signal
print(os.getpid() < 10)
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, 0)
        print("there")
    except ProcessLookupError:
        print("not there")
os.kill(1, signal.SIGKILL)
os.kill(1, signal.SIGINT)
os.kill(1, signal.SIGTERM)
print("on")
"""
    assert printed(code) == "True\nnot there\nnot there\non\n"


def test_a_fork_bomb_is_contained() -> None:
    began = time.monotonic()
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = attempt(code, limits=Limits(wall_s=1.5, num_processes=8))
    assert result.reason is Reason.wall_s and time.monotonic() - began < 15


def test_processes_and_threads_are_counted() -> None:
    code = """
import os, time
n = 1
try:
    while n < 100:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except BlockingIOError:
    print(n)
"""
    assert printed(code) == "8\n"


def test_memory_of_one_process_is_bounded() -> None:
    result = attempt("x = bytearray(1 << 30)")
    assert result.exit_code == 1 and result.stderr.rstrip().endswith("MemoryError")


def test_memory_of_all_processes_together_is_bounded() -> None:
    code = "import os, time\nfor i in range(2): os.fork()\nx = b'x' * (80 << 20)\ntime.sleep(60)"
    assert attempt(code).reason is Reason.memory_bytes


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\rRssAnon:"])
def test_memory_is_watched_whatever_a_process_calls_itself(name: bytes) -> None:
    call_itself = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); time.sleep(0.3)\n"
    assert printed(call_itself + "print('done')") == "done\n"
    assert attempt(call_itself + "a = bytearray(1 << 30)").exit_code == 1


def test_disk_and_file_size_are_bounded() -> None:
    code = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sizes = []
for i in range(4):
    try:
        with open(f"f{i}", "wb", buffering=0) as file:
            while file.write(b"x" * (1 << 20)): pass
    except OSError as error:
        sizes.append((file.tell() if not file.closed else 0, error.errno))
import os
print(max(os.path.getsize(f"f{i}") for i in range(4)) >> 20, sum(os.path.getsize(f"f{i}") for i in range(4)) >> 20)
"""
    largest, total = map(int, printed(code).split())
    assert largest == 4 and total <= 8


def test_the_number_of_files_is_bounded() -> None:
    code = "n = 0\ntry:\n  while n < 10**5:\n    open(str(n), 'w').close(); n += 1\nexcept OSError: print(n < 4096)"
    assert printed(code) == "True\n"


@pytest.mark.parametrize("stream", [1, 2])
def test_an_output_flood_is_cut(stream: int) -> None:
    limits = Limits(wall_s=20, output_bytes=10_000)
    result = attempt(f"import os\nwhile True: os.write({stream}, b'y' * 65536)", limits=limits)
    assert result.reason is Reason.output_bytes and result.exit_code is None
    assert len(result.stdout if stream == 1 else result.stderr) == 10_000


def test_an_orphan_ends_with_the_run_that_left_it() -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(0)
os.wait()
print("left")
"""
    began = time.monotonic()
    assert printed(code) == "left\n" and time.monotonic() - began < 15


def test_a_loop_that_ignores_signals_ends_by_the_deadline() -> None:
    code = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
"""
    result = attempt(code, limits=Limits(wall_s=0.8))
    assert result.reason is Reason.wall_s and 0.8 <= result.seconds < 10


def test_cpu_time_is_bounded() -> None:
    assert attempt("while True: pass", limits=Limits(wall_s=30, cpu_s=1)).reason is Reason.cpu_s


def test_input_that_nobody_reads_blocks_nothing() -> None:
    assert printed("print('done')", "x" * 5_000_000) == "done\n"


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="num_processes=0"):
        Limits(num_processes=0)


def test_without_its_protections_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_sources(tmp_path)
    jail = tmp_path / "rollout" / "processes" / "jail.py"
    jail.write_text(jail.read_text().replace("libc.unshare(flags)", "libc.unshare(1)"))
    monkeypatch.setattr(sandbox, "ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be set up .*: unshare\(pid, net.*Invalid argument"):
        run_code("print(1)")


UNPRIVILEGED = """
import os
from rollout.sandbox import Limits, run_code, sandbox_support
print(sandbox_support())
look = "import os; print(os.getuid(), os.listdir('/tmp'), os.path.exists('/etc/passwd'))"
print(run_code(look).stdout, end="")
rights = "import ctypes; libc = ctypes.CDLL(None); print(libc.sethostname(b'x', 1), libc.setuid(0), libc.setgid(0))"
print(run_code(rights).stdout, end="")
forks = "import os\\nwhile True:\\n  try: os.fork()\\n  except OSError: pass"
print(run_code(forks, limits=Limits(wall_s=0.5)).reason.value)
hold = "import os, time\\nfor i in range(2): os.fork()\\nx = b'x' * (40 << 20)\\ntime.sleep(60)"
print(run_code(hold, limits=Limits(memory_bytes=64 << 20)).reason.value)
"""


def test_without_the_superuser_a_user_namespace_gives_the_same() -> None:
    interpreter = "/usr/bin/python3.11"  # ours may lie where only the superuser gets
    if os.geteuid() != 0 or not os.path.exists(interpreter):
        pytest.skip("the other tests show it, or there is no Python that nobody may run")
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        os.chmod(folder, 0o755)
        result = subprocess.run(
            [interpreter, "-S", "-B", "-c", UNPRIVILEGED],
            cwd=folder,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=60,
        )
    if "unshare" in result.stdout:
        pytest.skip("this system gives user namespaces to the superuser only")
    wanted = ["", "65534 ['main.py'] False", "-1 -1 -1", "wall_s", "memory_bytes"]
    assert result.stdout.splitlines() == wanted, result.stderr


def copy_sources(folder: Path) -> None:
    """What the sandbox is made of, at another place."""
    ours = ("sandbox.py", "processes/jail.py", "processes/syscall_filter.py")
    for name in (*(f"rollout/{part}" for part in ours), "conf/errors.py"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(Path(sandbox.ROOT, name).read_text())
        (folder / name).with_name("__init__.py").touch()


def test_the_filter_is_known_for_two_architectures() -> None:
    assert all(len(filter_program(machine)) % 8 == 0 for machine in CALLS)
    with pytest.raises(ValueError, match="not on riscv64"):
        filter_program("riscv64")
