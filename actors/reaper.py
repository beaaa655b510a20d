"""Cleans up after a run, however it ends: `reaper.py MARK FOLDER`, started by the driver with a pipe as standard input.

The pipe closes when the driver closes it or dies (SIGKILL too). Then every process whose environment holds MARK is
killed, and FOLDER is removed. Standard library only; runs in a session of its own, out of reach of Ctrl-C.
"""

import os
import shutil
import signal
import sys
import time

ROUNDS = 20
ROUND_S = 0.1


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


def main() -> None:
    mark, folder = sys.argv[1].encode(), sys.argv[2]
    while sys.stdin.buffer.read(1):
        pass
    for _ in range(ROUNDS):
        pids = marked(mark)
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(ROUND_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
