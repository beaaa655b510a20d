"""Scripts as their users start them: processes of their own in a folder of their own, watched for what they leave."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from actors.reaper import marked

ROOT = Path(__file__).parents[2]
POLL_S = 0.1


@dataclass
class Job:
    """A script that runs in `folder`, or ran there. Its output goes to a file in `folder`."""

    script: str
    folder: Path
    process: "subprocess.Popen[bytes]"
    output: Path
    mark: str = ""
    temporary: Path | None = None
    code: int | None = None
    seconds: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def watch(self) -> None:
        """Learns the run's mark and temporary folder from the process that will clean up after it."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                line = child.cmdline()
                if not self.mark and any(part.endswith("reaper.py") for part in line):
                    self.mark, self.temporary = line[-2], Path(line[-1])

    def wait(self, timeout_s: float) -> "Job":
        """Waits for the end. Raises AssertionError when it does not come."""
        try:
            while self.process.poll() is None:
                self.watch()
                assert time.monotonic() - self.begun < timeout_s, f"{self.script} still runs:\n{self.text[-3000:]}"
                time.sleep(POLL_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        self.code, self.seconds = self.process.returncode, time.monotonic() - self.begun
        return self

    def check(self) -> "Job":
        """Raises AssertionError unless it ended well and left neither a process nor a temporary folder."""
        assert self.code == 0, f"{self.script} ended with {self.code}:\n{self.text[-3000:]}"
        assert self.mark and self.temporary is not None, "it started no cluster"
        assert not marked(self.mark.encode()), [psutil.Process(p).cmdline() for p in marked(self.mark.encode())]
        assert not self.temporary.exists()
        return self


def wait_all(jobs: Collection[Job], timeout_s: float) -> None:
    """Waits for all of them at once."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: job.wait(timeout_s), jobs))


def start(script: str, folder: Path, *overrides: str, env: dict[str, str] | None = None) -> Job:
    """Starts scripts/`script` with these overrides in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{script}-{len(list(folder.glob('*.out')))}.out"
    hidden = ("WANDB_", "RAY_", "TANDEM_", "OMP_", "PYTEST_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / script), *overrides],
            cwd=folder,
            env=inherited | {"PYTHONPATH": str(ROOT)} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Job(script, folder, process, output)


def run_folder(folder: Path) -> Path:
    """The only run folder under `folder`/runs."""
    (found,) = sorted((folder / "runs").iterdir())
    return found


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def training_state(run: Path, step: int, role: str = "policy") -> tuple[dict[str, Any], dict[str, Any]]:
    """(every tensor of a role in a checkpoint by "<name>|<kind>", its manifest)."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob(f"{role}-*.safetensors")):
        tensors |= load_file(path)
    return tensors, read_json(folder / "manifest.json")
