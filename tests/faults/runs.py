"""Real runs as subprocesses, found again by a mark in their environment, and what they leave behind."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from actors.reaper import marked, writers
from rl.memory import RUN_MARK
from rl.run_folder import status

ROOT = Path(__file__).parents[2]
TEST_MARK = "TANDEM_TEST_MARK"
START_S = 90.0
POLL_S = 0.05
# The tiny model, as it is, on 4 prompts x 4 samples: a step takes a fraction of a second.
SMALL = (
    "experiment=tiny_sort",
    "sft.num_steps=0",
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "algo.num_mini_batches=1",
    "evaluation.every=0",
    "data.size=64",
    "data.eval_size=0",
    "checkpoint=none",
    "tracking=none",
)
ENDLESS = "num_steps=100000"
WANDB = "tracking=offline"


class Run:
    """One `python scripts/train.py` in `cwd`, in a session of its own (so that its group can get a Ctrl-C).

    TMPDIR is its own too: whatever is left in it was left by this run.
    """

    def __init__(self, cwd: Path, name: str, overrides: tuple[str, ...], env: dict[str, str]):
        self.folder = cwd / name
        self.mark = f"{TEST_MARK}={uuid.uuid4().hex}"
        self.temp = Path("/tmp", f"t{secrets.token_hex(2)}")  # short: Ray puts sockets in it, whose paths are limited
        self.temp.mkdir()
        self.sockets: dict[str, int] = {}  # of the listening ones: inode, port
        self.shared: set[str] = set()
        self.run_id: str | None = None
        self.outputs = cwd.parent / f"{name}-{self.mark[-6:]}.out", cwd.parent / f"{name}-{self.mark[-6:]}.err"
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TANDEM_", "RAY_"))}
        with self.outputs[0].open("wb") as out, self.outputs[1].open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "scripts" / "train.py"), *overrides],
                cwd=cwd,
                env=keep | dict([self.mark.split("=")]) | {"TMPDIR": str(self.temp), "COLUMNS": "200"} | env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self.outputs[0].read_text()

    @property
    def err(self) -> str:
        return self.outputs[1].read_text()

    # -- while it runs --

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl, whole lines only."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows()]

    def last_step(self) -> int:
        return max(self.steps(), default=0)

    def pids(self, role: str | None = None, rank: int | None = None) -> list[int]:
        """Living processes of this run, the driver among them; with `role`, its actors, or only that of one rank."""
        found = {*marked(self.mark.encode()), *writers(str(self.temp.resolve()))}
        if self.run_id is not None:  # on a cluster that was joined, workers carry only the mark that the run gave them
            found |= set(marked(f"{RUN_MARK}={self.run_id}".encode()))
        if role is None:
            return sorted(found)
        wanted = set(marked(f"TANDEM_ROLE={role}".encode()))
        if rank is not None:
            wanted &= set(marked(f"TANDEM_RANK={rank}".encode()))
        return [pid for pid in sorted(found & wanted) if "ray::" in command(pid)]

    def wait_for(self, what: str, condition: Callable[[], Any], timeout_s: float = START_S) -> Any:
        """The first true value of `condition`; fails when the run ends before, or after `timeout_s`."""
        deadline = time.monotonic() + patience(timeout_s)
        while not (value := condition()):
            ended = self.process.poll()
            assert ended is None, f"{what}: the run ended with code {ended}\n{self.out[-3000:]}\n{self.err[-3000:]}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.out[-3000:]}"
            time.sleep(POLL_S)
        return value

    def wait_step(self, step: int) -> None:
        """Waits until `step` has been logged, then remembers what the run owns (`observe`)."""
        self.wait_for(f"step {step}", lambda: self.last_step() >= step)
        self.observe()

    def observe(self) -> None:
        """Remembers run id, listening ports and shared-memory files of the run, for `leftovers`."""
        folders = list(self.temp.glob("tandem-*"))
        self.run_id = folders[0].name.split("-")[1] if folders else None
        open_ports = listening()
        for pid in self.pids():
            with contextlib.suppress(psutil.Error, OSError):
                maps = psutil.Process(pid).memory_maps()
                self.shared |= {entry.path for entry in maps if entry.path.startswith("/dev/shm/")}
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
                        self.sockets |= {inode: open_ports[inode]} if inode in open_ports else {}

    # -- its end --

    def send(self, number: signal.Signals, group: bool = False) -> float:
        """Sends a signal to the driver, or to its process group as a terminal does; gives the time."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return time.monotonic()

    def wait(self, timeout_s: float) -> int:
        """The exit code. Fails, with what it printed, unless the run ends in time."""
        try:
            return self.process.wait(patience(timeout_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s\n{self.out[-3000:]}{self.err[-3000:]}") from None

    def wait_clean(self, since: float, limit_s: float) -> None:
        """Waits until nothing of the run is left, at most `limit_s` after `since`."""
        while left := self.leftovers():
            assert time.monotonic() < since + patience(limit_s), f"left after {limit_s:g} s:\n  " + "\n  ".join(left)
            time.sleep(POLL_S)

    def leftovers(self) -> list[str]:
        """What the ended run has left behind: processes, temporary files, shared memory, listening ports."""
        left = [f"process {pid}: {command(pid)}" for pid in self.pids()]
        left += [f"file {path}" for path in (self.temp.iterdir() if self.temp.exists() else ())]
        left += [f"shared memory {path}" for path in self.shared if os.path.exists(path)]
        left += [f"port {self.sockets[inode]}" for inode in self.sockets.keys() & listening().keys()]
        return left

    def summary(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return result

    def status(self) -> str | None:
        return status(self.folder)

    def remove(self) -> None:
        """Kills what is left and removes the temporary folder: the test's own cleaning up."""
        for _ in range(100):
            pids = self.pids()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            if not pids:
                break
            time.sleep(POLL_S)
        shutil.rmtree(self.temp, ignore_errors=True)


Launch = Callable[..., Run]


def patience(seconds: float) -> float:
    """A limit that holds on an idle machine, longer where more wants to run than there are cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextlib.contextmanager
def launcher(cwd: Path, model: Path) -> Iterator[Launch]:
    """`launch(*overrides, name="run", env={...})` starts a small run in the folder `cwd / name`; all end with this."""
    runs: list[Run] = []

    def launch(*overrides: str, name: str = "run", env: dict[str, str] | None = None) -> Run:
        own = (*SMALL, f"model.path={model}", f"run_dir={cwd / name}")
        run = Run(cwd, name, (*own, *overrides), env or {})
        runs.append(run)
        return run

    try:
        yield launch
    finally:
        for run in runs:
            run.remove()


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return ""


def listening() -> dict[str, int]:
    """Inode and port of every listening TCP socket of this machine (state 0A in the kernel's table)."""
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return ports


def checkpoints(run: Run) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted((run.folder / "checkpoints").glob("step_*"))
