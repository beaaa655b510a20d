"""Peak memory of a whole run: the driver and every process that it caused, on this machine."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped, unused-ignore]

RUN_MARK = "TANDEM_RUN_ID"  # the environment variable that marks the processes of a run
SETTLE_S = 30.0  # a process older than this has done its exec and keeps its environment


@dataclass(kw_only=True)
class PeakMemory:
    """A thread that samples `tree_bytes` and keeps the largest. Made by `start_peak`."""

    run_id: str
    interval_s: float = 1.0
    peak_bytes: int = 0
    known: dict[tuple[int, float], bool] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def sample(self) -> int:
        """Takes one sample now; returns its bytes."""
        total = tree_bytes(self.run_id, self.known)
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def stop(self) -> int:
        """Ends the thread; returns the peak in bytes. May be called twice."""
        self.stopping.set()
        if self.thread is not None:
            self.thread.join(timeout=10)
            self.thread = None
        return self.peak_bytes


def start_peak(run_id: str, interval_s: float = 1.0) -> PeakMemory:
    """Starts sampling, with a first sample before it returns. A peak shorter than the interval may be missed.

    Reading set sizes walks page tables (about 10 ms a GB): the interval stretches to keep that under 3 % of a core.
    """
    peak = PeakMemory(run_id=run_id, interval_s=interval_s)
    peak.sample()

    def watch() -> None:
        took_s = 0.0
        while not peak.stopping.wait(max(peak.interval_s, 33 * took_s)):
            started = time.monotonic()
            with contextlib.suppress(Exception):  # a figure in the summary is not worth a run
                peak.sample()
            took_s = time.monotonic() - started

    peak.thread = threading.Thread(target=watch, name="peak-memory", daemon=True)
    peak.thread.start()
    return peak


def tree_bytes(run_id: str, known: dict[tuple[int, float], bool] | None = None) -> int:
    """Bytes of memory held now by this process and all whose environment holds TANDEM_RUN_ID=run_id.

    Sums the proportional set size (PSS): a page mapped by n processes counts 1/n in each, so shared libraries and
    shared memory count once in the sum (a plain sum of resident sizes would count a weight buffer once for every
    reader). Where the kernel does not give it (no Linux, another user's process), the resident size stands in. Shared
    memory that no process maps is not seen, and neither are other machines. `known` remembers between calls which
    processes are ours.
    """
    known = {} if known is None else known
    seen: dict[tuple[int, float], bool] = {}
    total = 0
    for process in psutil.process_iter():
        try:
            key = (process.pid, process.create_time())
            mine = known.get(key)
            if mine is None:
                mine = process.pid == os.getpid() or process.environ().get(RUN_MARK) == run_id
            # a young process may still exec into one of ours, under the same pid: ask again next time
            if mine or time.time() - key[1] > SETTLE_S:
                seen[key] = mine
            if mine:
                total += _process_bytes(process)
        except psutil.AccessDenied:
            seen[key] = False
        except (psutil.Error, OSError):
            continue
    known.clear()
    known.update(seen)
    return total


def _process_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.AccessDenied, AttributeError, OSError):
        return int(process.memory_info().rss)
