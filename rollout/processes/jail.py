"""Runs one program inside namespaces of its own: the trusted process around it, and the first process within.

Started by `rollout.sandbox`, with the standard library alone. There are three processes: this one stays outside,
watches memory and reports one line of JSON; its child is number 1 of the new process namespace, so that its end is the
end of every process within; that one's child becomes the program. Anything that cannot be set up is reported, and the
program is not run.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

from rollout.processes.syscall_filter import install_filter

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
NOBODY = 65534
# As root each jail has a user of its own, which nothing else belongs to: limits on processes count by user.
FIRST_UID = 0x70000000
# Where the new root is put together: a directory that every system has and that holds nothing to be shown inside.
NEW_ROOT = "/proc"
WATCH_S = 0.05
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


class SetUpError(Exception):
    """A protection that this system does not give."""


def check(result: int, step: str) -> None:
    """Raises SetUpError when a call of libc failed."""
    if result < 0:
        raise SetUpError(f"{step}: {os.strerror(ctypes.get_errno())}")


def main(config_fd: int, report_fd: int) -> NoReturn:
    """Reads what to run from one descriptor, and says on the other how it ended."""
    parent = os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    with open(config_fd, encoding="utf-8") as file:
        file.seek(0)
        config = json.load(file)
    os.set_inheritable(report_fd, False)
    try:
        report = supervise(config)
    except Exception as error:
        report = {"end": "setup", "error": str(error) or repr(error)}
    os.write(report_fd, json.dumps(report).encode() + b"\n")
    os._exit(0)


def supervise(config: dict[str, Any]) -> dict[str, Any]:
    """Runs the program and says how it ended. Ends it when its processes hold more than `memory_bytes` together."""
    as_root = os.geteuid() == 0
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | (0 if as_root else CLONE_NEWUSER)
    check(libc.unshare(flags), "unshare(pid, net, ipc, uts)" + ("" if as_root else ", as no superuser, with user"))
    if not as_root:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/gid_map", f"{NOBODY} {gid} 1")
        write("/proc/self/uid_map", f"{NOBODY} {uid} 1")
    if not Path("/proc/self/task", str(os.getpid()), "children").exists():
        raise SetUpError("memory cannot be watched: the kernel has no /proc/PID/task/TID/children")
    told, tell = os.pipe()
    said, say = os.pipe()
    jail_uid = FIRST_UID + os.getpid()
    first = os.fork()
    if first == 0:
        os.close(told)
        os.close(said)
        be_first(config, tell, say, as_root, jail_uid)
    os.close(tell)
    os.close(say)
    for fd in (0, *config["pass_fds"]):
        os.close(fd)
    try:
        return watch(first, told, said, config)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def watch(first: int, told: int, said: int, config: dict[str, Any]) -> dict[str, Any]:
    """What the first process reports, or {"end": "memory"}. Copies what the program prints on `said` to our stderr."""
    left = int(config["forward_bytes"])
    sources = [told, said]
    while True:
        began = time.monotonic()
        ready, _, _ = select.select(sources, [], [], WATCH_S)
        if said in ready and select.select([], [2], [], 0)[1]:  # a reader of ours that waits must not stop the watch
            part = os.read(said, select.PIPE_BUF if left else 1 << 16)
            if not part:
                sources.remove(said)
            os.write(2, part[:left])
            left -= len(part[:left])
        if told in ready:
            line = os.read(told, 1 << 16).split(b"\n")[0]
            return json.loads(line) if line else {"end": "setup", "error": "the first process of the sandbox died"}
        held = sum(memory_bytes(pid) for pid in descendants(first))
        if held > config["limits"]["memory_bytes"]:
            return {"end": "memory", "held_bytes": held}
        if said in ready and (pause := WATCH_S / 10 - (time.monotonic() - began)) > 0:
            select.select([told], [], [], pause)  # a flood must not keep this process busy


def descendants(first: int) -> list[int]:
    """Every process below the first one: orphans are its children too."""
    found: list[int] = []
    todo = [first]
    while todo:
        pid = todo.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except OSError:  # it has ended
            continue
        if pid != first:
            found.append(pid)
    return found


def memory_bytes(pid: int) -> int:
    """Memory of its own that a process holds, swapped out or not: files that are mapped are left out."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().split(b"\n")  # a process may be called anything
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")))


def be_first(config: dict[str, Any], tell: int, say: int, as_root: bool, uid: int) -> NoReturn:
    """The first process within: gives up all that it may do, starts the program, and waits for it."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only one that Python handles; others do not reach number 1
        write("/proc/self/oom_score_adj", "1000")
        socket.sethostname("sandbox")
        make_root(config)
        drop_rights(as_root, uid)
        if config["forward_bytes"]:
            os.dup2(say, 1)
            os.dup2(say, 2)
        set_limits(config["limits"])
        install_filter(libc)
        program = os.fork()
        if program == 0:
            become(config, tell)
        for fd in (0, 1, 2, say, *config["pass_fds"]):
            os.close(fd)
        while True:
            pid, status = os.wait()
            if pid == program:
                break
        code = os.waitstatus_to_exitcode(status)
        report = {"end": "exit", "code": code} if code >= 0 else {"end": "signal", "number": -code}
    except Exception as error:
        report = {"end": "setup", "error": str(error) or repr(error)}
    finally:
        os.write(tell, json.dumps(report).encode() + b"\n")
        os._exit(0)


def become(config: dict[str, Any], tell: int) -> NoReturn:
    """Turns into the program."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(config["argv"][0], config["argv"], config["env"])
    except OSError as error:
        os.write(tell, json.dumps({"end": "setup", "error": f"{config['argv'][0]}: {error}"}).encode() + b"\n")
    finally:
        os._exit(127)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(result, f"mount {source} at {target}")


def set_attributes(path: str, attributes: int) -> None:
    """Of a mount and those below it. Linux 5.12 or later."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    result = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, wanted, ctypes.sizeof(wanted))
    check(result, f"mount_setattr {path} (Linux 5.12 or later)")


def make_root(config: dict[str, Any]) -> None:
    """A root that holds the given paths, read-only, some devices, and /tmp in memory; the old root is taken away."""
    limits = config["limits"]
    check(libc.unshare(CLONE_NEWNS), "unshare(mount)")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.makedirs(NEW_ROOT + "/tmp")
    options = f"size={limits['disk_bytes']},nr_inodes={limits['num_files']},mode=1777"
    mount("tmpfs", NEW_ROOT + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path, link in config["links"].items():
        os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
        os.symlink(link, NEW_ROOT + path)
    for path in (*config["binds"], *DEVICES):
        target = NEW_ROOT + path
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(path):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(path, target, "", MS_BIND | MS_REC)
        shut = 0 if path in DEVICES else MOUNT_ATTR_NODEV
        set_attributes(target, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | shut)
    os.symlink("/tmp", NEW_ROOT + "/dev/shm")
    for path, text in config["files"].items():
        Path(NEW_ROOT + path).write_text(text, encoding="utf-8", errors="surrogatepass")
    os.chdir(NEW_ROOT)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount the old root")
    mounts = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    check(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", 0, mounts, ctypes.sizeof(mounts)), "mount_setattr /")
    os.chdir("/tmp")


def drop_rights(as_root: bool, uid: int) -> None:
    """Leaves no capability and, as root, becomes a user that owns nothing. In a user namespace we are nobody already,
    and lose the capabilities over it with the program's execve."""
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if as_root:
        os.setgroups([])
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # ids that a container does not have
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user clears it
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def set_limits(limits: dict[str, Any]) -> None:
    cpu_s = limits["cpu_s"]
    for name, soft, hard in (
        ("AS", limits["memory_bytes"], limits["memory_bytes"]),
        ("NPROC", limits["num_processes"] + 1, limits["num_processes"] + 1),  # the first process is one more
        ("FSIZE", limits["file_bytes"], limits["file_bytes"]),
        ("NOFILE", limits["num_open_files"], limits["num_open_files"]),
        ("CORE", 0, 0),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
        ("CPU", cpu_s or resource.RLIM_INFINITY, cpu_s + 1 if cpu_s else resource.RLIM_INFINITY),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))
