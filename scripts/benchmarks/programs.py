"""Whole programs as the subject of a benchmark: running one, and reading what it has written."""

import json
import subprocess
from pathlib import Path

from rl.faults import RoleDied, RoleTimeout
from scripts.benchmarks.common import ROOT, TIMEOUT_S


def read_steps(path: Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl, without what was logged before the first one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "time/step_s" in row]


def run_program(command: list[str], env: dict[str, str] | None = None) -> str:
    """Runs a program at the root of the project; its standard output. Raises RoleDied with its last words."""
    with subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            process.terminate()  # train.py cleans up after itself
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RoleTimeout(f"{' '.join(command[:3])} did not end in {TIMEOUT_S:g} s") from error
            raise
    if process.returncode:
        raise RoleDied(f"{' '.join(command[:3])} ended with code {process.returncode}:\n{(out + err)[-3000:]}")
    return out
