"""Cleans up after a run, however it ends: `reaper.py MARK FOLDER`, started by the driver with a pipe as standard input.

The pipe closes when the driver closes it or dies (SIGKILL too). Then every process whose environment holds MARK is
killed, and every one that writes a file in FOLDER: Ray's agents write their titles over their environment, so that MARK
cannot be read there, and do not always follow a raylet that was killed. FOLDER is removed, and so are the shared-memory
files of Python's multiprocessing that marked processes had mapped: their owners unlink them on a good day only. They
are looked up now and then while the run lasts, because at its end their owners may be gone. Standard library only; runs
in a session of its own, out of reach of Ctrl-C.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time

ROUNDS = 100
ROUND_S = 0.1
QUIET_ROUNDS = 3
LOOK_S = 3.0
SHARED = ("psm_", "sem.mp-")


def marked(mark: bytes) -> list[int]:
    """Processes with `mark` in their environment, this one left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue  # it ended meanwhile, or belongs to another user
    return found


def writers(folder: str) -> list[int]:
    """Processes that have a file under `folder` open for writing. Not those that only read: somebody follows a log."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                numbers = os.listdir(f"/proc/{name}/fd")
            except OSError:
                continue  # it ended meanwhile, or belongs to another user
            if any(writes(f"/proc/{name}", number, folder) for number in numbers):
                found.append(int(name))
    return found


def writes(process: str, number: str, folder: str) -> bool:
    """Whether file descriptor `number` of the process at `process` in /proc writes a file under `folder`."""
    try:
        if not os.readlink(f"{process}/fd/{number}").startswith(f"{folder}/"):
            return False
        with open(f"{process}/fdinfo/{number}") as file:
            flags = next(line for line in file if line.startswith("flags:")).split()[1]
    except OSError:
        return False  # closed meanwhile
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def shared_files(pids: list[int]) -> set[str]:
    """Files that multiprocessing has made in /dev/shm and that one of the processes has mapped.

    By their inode numbers: a semaphore is mapped under another name, before it gets its own.
    """
    inodes = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                inodes |= {int(line.split(maxsplit=5)[4]) for line in file if b"/dev/shm/" in line}
        except OSError:
            continue
    found = set()
    for entry in os.scandir("/dev/shm") if inodes else ():
        if entry.name.startswith(SHARED) and entry.inode() in inodes:
            found.add(entry.path)
    return found


def look(mark: bytes) -> set[str]:
    """`shared_files` of the marked processes. Whatever goes wrong in it must not keep this process from its work."""
    try:
        return shared_files(marked(mark))
    except Exception as error:
        print(f"reaper: cannot look for shared memory: {error!r}", file=sys.stderr)
        return set()


def main() -> None:
    mark, folder = sys.argv[1].encode(), os.path.realpath(sys.argv[2])
    driver = os.getppid()  # after a gentle end it lives, and Ray's library in it keeps its log in FOLDER open
    shared: set[str] = set()
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
        shared |= look(mark)
    shared |= look(mark)
    quiet = 0
    for _ in range(ROUNDS):
        pids = {*marked(mark), *writers(folder)} - {driver}
        quiet = 0 if pids else quiet + 1
        if quiet == QUIET_ROUNDS:  # one that is just being started shows no environment for a moment
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(ROUND_S)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
