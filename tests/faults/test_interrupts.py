"""However a run is ended, nothing of it stays, and its records are whole.

Cases B35 (left-overs), B42 (half-written checkpoints), B48 (last points lost).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import ENDLESS, WANDB, Launch, Run, checkpoints, command, patience
from tests.unit.rl.test_tracking import offline_folders, read_offline

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600, method="signal")]

STOP_S = 10.0  # Ctrl-C and SIGTERM
KILL_S = 30.0


def require_recorded(run: Run, code: int) -> None:
    """The records of an interrupted run: summary, metrics.jsonl and W&B agree to the last step."""
    summary, steps = run.summary(), run.steps()
    assert summary["status"] == "interrupted" and summary["steps"] == steps[-1] == len(steps)
    assert "Traceback" not in run.err, run.err
    (folder,) = offline_folders(run.folder)
    stored = read_offline(folder)
    assert [row["train/step"] for row in stored["rows"]] == steps and stored["exit_code"] == code
    assert {"reward/mean", "policy/lr", "sync/probe_max"} <= stored["rows"][-1].keys()


def require_ended(run: Run, code: int, since: float) -> None:
    """It has the exit code, and nothing of it is left, within STOP_S of the signal."""
    assert run.wait(STOP_S) == code, run.err
    run.wait_clean(since, STOP_S)


def test_two_runs_at_once_ended_by_ctrl_c_and_sigterm_do_not_disturb_each_other(launch: Launch) -> None:
    first, second = launch(ENDLESS, WANDB, name="first"), launch(ENDLESS, WANDB, name="second")
    first.wait_step(2)
    second.wait_step(2)
    assert first.run_id != second.run_id and first.sockets and second.sockets
    since = first.send(signal.SIGINT, group=True)
    require_ended(first, 130, since)
    require_recorded(first, 130)
    second.wait_step(second.last_step() + 2)  # it goes on, with all that it had
    since = second.send(signal.SIGTERM)
    require_ended(second, 143, since)
    require_recorded(second, 143)


def test_sigkill_in_a_save_then_the_same_command_resumes_from_the_last_whole_checkpoint(launch: Launch) -> None:
    """SIGKILL cleans up; the command starts again at once, behind a half-written and a truncated checkpoint."""
    overrides = (ENDLESS, WANDB, "checkpoint.every=1", "checkpoint.keep=3")
    killed = launch(*overrides)
    killed.wait_for("two checkpoints", lambda: len(checkpoints(killed)) >= 2)
    killed.observe()
    stop_in_a_save(killed)
    agents = [pid for pid in killed.pids() if "Agent" in command(pid)]
    assert agents, "Ray's agents carry other names now"
    for pid in agents:  # so that they cannot follow their raylet: the run's own reaper has to find them
        os.kill(pid, signal.SIGSTOP)
    since = killed.send(signal.SIGKILL)
    assert killed.wait(KILL_S) == -signal.SIGKILL
    killed.wait_clean(since, KILL_S)
    root = killed.folder / "checkpoints"
    assert list(root.glob(".writing-*")), "the kill did not hit a save"
    assert killed.status() is None  # no summary: a run that was killed cannot say so
    *_, whole, newest = checkpoints(killed)
    shard = next(newest.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)
    step = int(whole.name.removeprefix("step_"))

    again = launch(*overrides)
    again.wait_for("the resume", lambda: f"resuming at step {step}" in again.out)
    again.wait_for("the cut of what came later", lambda: again.last_step() <= step)
    again.wait_step(step + 1)
    since = again.send(signal.SIGINT)  # to the driver alone
    require_ended(again, 130, since)
    warnings = [line for line in again.out.splitlines() if "is broken" in line]
    assert len(warnings) == 1 and str(newest) in warnings[0] and shard.name in warnings[0]
    assert again.steps() == list(range(1, again.last_step() + 1))
    assert again.summary()["status"] == "interrupted"
    # W&B: the same run, one more file, whose steps follow the checkpoint's
    before, after = (read_offline(folder) for folder in sorted(offline_folders(again.folder), key=os.path.getmtime))
    assert before["id"] == after["id"]
    logged = [row["train/step"] for row in after["rows"]]
    wanted = list(range(step + 1, again.last_step() + 1))
    assert logged in (wanted, wanted[:-1])  # the interrupt may hit between metrics.jsonl and W&B
    # the interrupt may have hit a save too, which removes its own half; those of the killed run went with the next save
    if len(checkpoints(again)) and checkpoints(again)[-1].name > newest.name:
        assert not list(root.glob(".writing-*"))


def stop_in_a_save(run: Run) -> None:
    """Stops the driver (SIGSTOP) while a checkpoint is being written."""
    root = run.folder / "checkpoints"
    deadline = time.monotonic() + patience(60)
    while time.monotonic() < deadline:
        if writing := list(root.glob(".writing-*")):
            run.send(signal.SIGSTOP)
            if writing[0].exists():  # it was not published between the look and the signal
                return
            run.send(signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError("never seen while saving")


def test_ctrl_c_during_the_start(launch: Launch) -> None:
    run = launch(ENDLESS)
    run.wait_for("an actor", lambda: run.pids("policy") or run.pids("rollout"))
    run.observe()
    since = run.send(signal.SIGINT, group=True)
    require_ended(run, 130, since)
    assert run.summary()["status"] == "interrupted" and run.summary()["steps"] == 0
    assert "Traceback" not in run.err, run.err


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, {130}), (signal.SIGTERM, {143, -signal.SIGTERM})])
def test_signal_before_anything_is_started(launch: Launch, number: signal.Signals, codes: set[int]) -> None:
    """While it still checks model, data and reward."""
    run = launch(ENDLESS)
    run.wait_for("the process that tries the reward", lambda: len(run.pids()) > 1)
    since = run.send(number, group=True)
    assert run.wait(STOP_S) in codes
    run.wait_clean(since, STOP_S)
    assert "Traceback" not in run.err, run.err


CLUSTER = """
import json, sys
import ray
context = ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[1], object_store_memory=100_000_000,
                   log_to_driver=False, logging_level="error")
print(json.dumps(context.address_info["gcs_address"]), flush=True)

@ray.remote(num_cpus=1)
def double(x):
    return 2 * x

for line in sys.stdin:
    print(json.dumps({"answer": ray.get(double.remote(int(line)), timeout=60), "free": ray.available_resources(),
                      "nodes": sum(node["Alive"] for node in ray.nodes())}), flush=True)
ray.shutdown()
"""


OPEN = {"RAY_AUTH_MODE": "disabled"}  # no token is handed over


class ForeignCluster:
    """A Ray cluster of somebody else, with two CPUs."""

    def __init__(self, folder: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ) | OPEN,
        )
        self.address = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, number: int) -> dict[str, Any]:
        """Has the cluster compute 2 * number; the answer, free resources, living nodes."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = self._read()
        return answer

    def stop(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=30)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def cluster(launch: Launch) -> Iterator[ForeignCluster]:
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    found = ForeignCluster(folder)
    yield found
    found.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_cluster_that_was_joined_survives(launch: Launch, cluster: ForeignCluster) -> None:
    """Two runs on it at once: one finishes its single step, the other gets a Ctrl-C."""
    before = cluster.ask(20)
    join = f"cluster.address={cluster.address}"
    endless = launch(ENDLESS, WANDB, join, "cluster.cpus_per_engine=0.5", name="endless", env=OPEN)
    single = launch("num_steps=1", join, "cluster.cpus_per_engine=0.5", name="single", env=OPEN)
    assert single.wait(100) == 0, single.err
    since = time.monotonic()
    single.wait_clean(since, STOP_S)
    assert single.summary()["status"] == "finished" and single.steps() == [1]
    endless.wait_step(max(2, endless.last_step() + 1))
    assert cluster.ask(21)["answer"] == 42
    since = endless.send(signal.SIGINT, group=True)
    require_ended(endless, 130, since)
    require_recorded(endless, 130)
    deadline = time.monotonic() + patience(20)
    while (after := cluster.ask(22))["free"] != before["free"]:  # what they reserved is free again
        assert time.monotonic() < deadline, (before, after)
    assert after["answer"] == 44 and after["nodes"] == 1
