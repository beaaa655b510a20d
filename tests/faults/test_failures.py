"""Parts that fail while a run goes on: rewards, ranks, engines, resources, the disk, a stale build lock.

Cases B33 (bad episodes), B37 (resources that are not there), B42 (full disk), B60 (build lock).
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.faults.runs import ENDLESS, WANDB, Launch, Run, checkpoints, launcher, patience
from tests.unit.rl.test_tracking import offline_folders, read_offline

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600, method="signal")]

NOTICED_S = 60.0
CLEAN_S = 10.0

# Of eight calls one raises, one returns NaN, one hangs; the others give 1.0. Empty completions are the launch's probe.
REWARDS = '''
import os, time

def flaky(completion, record):
    """Counts its calls in a file, as its process is killed when it hangs."""
    if not completion:
        return 1.0
    with open("calls", "a+") as file:
        file.write("x")
        file.flush()
        number = os.fstat(file.fileno()).st_size % 8
    if number == 3:
        raise ValueError(f"no verdict on {record['prompt']}")
    if number == 5:
        return float("nan")
    if number == 7:
        time.sleep(3600)
    return 1.0

def broken(completion, record):
    raise ValueError("the grader is out of order")

def held(completion, record):
    """No verdict, and so no update, before there is a file `go`."""
    if completion:
        open("asked", "w").close()
    while completion and not os.path.exists("go"):
        time.sleep(0.05)
    return float(len(set(completion)))

def late(completion, record):
    """As `held`, and then it takes its time: by then it is known what has died meanwhile."""
    score = held(completion, record)
    time.sleep(2.0 if completion else 0.0)
    return score
'''


def reward(name: str) -> tuple[str, ...]:
    return ("reward=function", f"reward._target_=verdicts.{name}", "reward.deadline_s=1.0")


# Two runs at once: one with flaky rewards and stale build locks in its way, one whose rewards all fail.


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "work").mkdir()
    (folder / "work" / "verdicts.py").write_text(REWARDS)
    locks = stale_locks(folder / "extensions")
    with launcher(folder / "work", tiny_folder) as launch:
        env = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
        runs = {
            "flaky": launch("num_steps=2", *reward("flaky"), name="flaky", env=env),
            "broken": launch(ENDLESS, *reward("broken"), name="broken"),
        }
        for run in runs.values():
            run.wait(150)
            run.wait_clean(time.monotonic(), CLEAN_S)
        assert all(path.exists() for path in locks), "the locks were not in the way until the end"
        yield runs


@pytest.fixture
def flaky(ended: dict[str, Run]) -> Run:
    return ended["flaky"]


def stale_locks(root: Path) -> list[Path]:
    """The lock that a killed compilation leaves behind, for everything that DeepSpeed or torch might compile."""
    names = ["deepspeed_shm_comm", "deepspeed_ccl_comm", "shm_comm", "cpu_adam", "fused_adam", "cpu_adagrad", "utils",
             "cpu_lion", "async_io", "pin_memory", "quantizer", "dc", "not_implemented", "deepspeed_not_implemented",
             "inline_extension"]  # fmt: skip
    paths = [root / version / name / "lock" for version in ("", "py311_cpu") for name in names] + [root / "lock"]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


def test_stale_build_locks_do_not_hold_up_a_start(flaky: Run) -> None:  # B60
    assert flaky.process.returncode == 0, flaky.err
    assert flaky.status() == "finished"


def test_rewards_that_fail_now_and_then_are_counted_and_left_out(flaky: Run) -> None:  # B33
    assert flaky.process.returncode == 0, flaky.err
    rows = flaky.rows()
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:  # 16 calls in a step: two of each kind of failure
        assert row["rollout/num_failed"] == 6
        assert row["rollout/num_reward_failed"] == 4 and row["rollout/num_reward_timeout"] == 2
        assert row["reward/mean"] == 1.0, "a failure has become a reward"
    assert flaky.summary()["reward_last"] == 1.0


def test_rewards_that_fail_leave_their_traceback_in_rollouts_jsonl(flaky: Run) -> None:  # B33
    samples = [json.loads(line) for line in (flaky.folder / "rollouts.jsonl").read_text().splitlines()]
    failed = [row for row in samples if row["error"]]
    assert {row["status"] for row in failed} == {"reward_failed", "reward_timeout"}
    assert all(row["reward"] is None for row in failed)
    errors = "\n".join(row["error"] for row in failed)
    for piece in ["verdicts.py", "ValueError: no verdict on ", "not a finite number", "reward.deadline_s=1"]:
        assert piece in errors
    assert all(row["error"] == "" and row["reward"] == 1.0 for row in samples if row["status"] == "ok")


def test_rewards_that_all_fail_stop_the_run_with_the_users_exception(ended: dict[str, Run]) -> None:
    run = ended["broken"]
    assert run.process.returncode == 1
    assert run.err.count("error: ") == 1 and "all 16 trajectories" in run.err
    assert "ValueError: the grader is out of order" in run.err
    assert "Traceback" not in run.err and len(run.err.splitlines()) < 10, run.err
    assert (run.status(), run.steps()) == ("failed", [])
    assert "the grader is out of order" in run.summary()["error"]
    assert re.search(r"ValueError: the grader is out of order \(.*:\d+ in \w+\)", run.err)
    kept = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    assert kept and "Traceback" in kept[0]["error"]


# Dead processes


def test_dead_rank_and_dead_engine_end_their_runs_by_name(launch: Launch, work: Path) -> None:
    """Two runs at once: in one the training rank is killed, in the other the only engine, before a step's groups are
    whole. (An engine that is found dead by a push is started again.)
    """
    (work / "verdicts.py").write_text(REWARDS)
    few = ("prompts_per_step=1", "samples_per_prompt=2")
    waiting = ("reward=function", "reward._target_=verdicts.late", "reward.deadline_s=600")
    victims = {
        "policy": launch(ENDLESS, WANDB, name="rank"),
        "rollout": launch(ENDLESS, WANDB, *few, *waiting, name="engine"),
    }
    since: dict[str, float] = {}
    victims["policy"].wait_step(1)
    victims["rollout"].wait_for("the first completion", (work / "asked").exists)
    for role, run in victims.items():
        (pid,) = run.pids(role)
        os.kill(pid, signal.SIGKILL)
        since[role] = time.monotonic()
    (work / "go").touch()
    for role, name in {"policy": "policy rank 0", "rollout": "rollout engine 0"}.items():
        run = victims[role]
        assert run.wait(NOTICED_S) == 1, run.err
        run.wait_clean(time.monotonic(), CLEAN_S)
        assert time.monotonic() < since[role] + patience(NOTICED_S)
        assert run.err.count("error: ") == 1 and name in run.err and "phase " in run.err, run.err
        assert "Traceback" not in run.err and "logs of the actors" in run.err
        summary, steps = run.summary(), run.steps()
        assert summary["status"] == "failed" and name in summary["error"]
        assert summary["steps"] == (steps[-1] if role == "policy" else 0)
        (folder,) = offline_folders(run.folder)
        stored = read_offline(folder)
        assert [row["train/step"] for row in stored["rows"]] == steps and stored["exit_code"] == 1


def test_rank_without_memory_ends_the_run_by_name(launch: Launch, work: Path) -> None:
    """The address space of one rank of two is limited before the first update, which needs a gigabyte: its peer is
    left alone in a collective.
    """
    (work / "verdicts.py").write_text(REWARDS)
    run = launch(
        ENDLESS,
        *("cluster.train_ranks=2", "trainer.zero_stage=1", "prompts_per_step=64", "samples_per_prompt=16"),
        *("trainer.micro_batch_tokens=1000000", "trainer.layout=padded", "rollout.max_tokens=40"),
        *("reward=function", "reward._target_=verdicts.held", "reward.deadline_s=600"),
    )
    run.wait_for("the first completion", (work / "asked").exists)
    (pid,) = run.pids("policy", rank=1)
    assert run.pids("policy", rank=0) != [pid]
    run.observe()
    limit = psutil.Process(pid).memory_info().vms + 1_000_000
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    (work / "go").touch()
    began = time.monotonic()
    assert run.wait(NOTICED_S) == 1, run.err
    run.wait_clean(time.monotonic(), CLEAN_S)
    assert time.monotonic() < began + patience(NOTICED_S)
    message = run.summary()["error"]
    assert "policy rank 1: out of memory" in message and "policy rank 0" not in message, message
    for piece in ["phase policy.", "trainer.micro_batch_tokens", "trainer.zero_stage", "trainer.offload_optimizer"]:
        assert piece in message and piece in run.err, run.err
    assert run.err.count("error: ") == 1 and "Traceback" not in run.err, run.err
    assert (run.status(), run.steps()) == ("failed", [])


# Resources


def test_resources_that_the_cluster_lacks_are_listed_with_what_is_there(launch: Launch) -> None:  # B37
    """Exit code 1: what a cluster has is known only once it is there, so this is no error of the configuration.

    Three at once: too many CPUs, too many GPUs, and no cluster at all.
    """
    began = time.monotonic()
    cases = {
        launch("cluster.cpus_per_rank=4096", name="cpus"): ("CPU: wanted 4096, available ", "cpus_per_rank"),
        launch("cluster.device=cuda", "cluster.gpus_per_rank=64", name="gpus"): ("GPU: wanted 65, ", "gpus_per_rank"),
        launch("cluster.address=127.0.0.1:1", name="nobody"): ("cluster.address=127.0.0.1:1", "no Ray cluster"),
    }
    for run, pieces in cases.items():
        assert run.wait(NOTICED_S) == 1, run.err
        run.wait_clean(time.monotonic(), CLEAN_S)
        for piece in [*pieces, "cluster.address"]:
            assert piece in run.err, run.err
        assert "Traceback" not in run.err and run.status() == "failed"
    assert time.monotonic() < began + patience(NOTICED_S)


# The disk


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """Mounts a file system of this size on `folder`; gives whether that was allowed."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    allowed = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield allowed
    finally:
        if allowed:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_disk_that_fills_up_stops_the_run_and_keeps_the_older_checkpoint(launch: Launch, tmp_path: Path) -> None:  # B42
    with small_disk(tmp_path / "disk", "16m") as mounted:
        run_dir = tmp_path / "disk" / "run"
        run = launch(ENDLESS, "checkpoint.every=1", f"run_dir={run_dir}")
        run.folder = run_dir
        run.wait_for("two checkpoints", lambda: len(checkpoints(run)) >= 2)
        if mounted:
            fill_up(tmp_path / "disk", leave=300_000)
        else:  # no more than 300 kB in one file of the rank that writes the shards
            resource.prlimit(run.pids("policy")[0], resource.RLIMIT_FSIZE, (300_000, 300_000))
        assert run.wait(NOTICED_S) == 1, run.out
        run.wait_clean(time.monotonic(), CLEAN_S)
        reason = "No space left on device" if mounted else "File too large"
        assert reason in run.err and "checkpoint" in run.err, run.err
        assert "Traceback" not in run.err, run.err
        assert run.status() == "failed" and reason in run.summary()["error"]
        root = run_dir / "checkpoints"
        assert not list(root.glob(".*")), "the half-written checkpoint is still there"
        from actors.checkpoint import find_whole

        newest, warnings = find_whole(root)
        assert newest == checkpoints(run)[-1] and warnings == []
        assert int(newest.name.removeprefix("step_")) >= run.last_step() - 1


def test_folder_of_versions_that_fills_up_stops_the_run_and_holds_whole_versions_only(
    launch: Launch, tiny_folder: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "16m") as mounted:
        if not mounted:
            pytest.skip("no file system can be mounted here")
        root = tmp_path / "disk" / "versions"
        run = launch(ENDLESS, "sync.channel=disk", f"sync.folder={root}")
        run.wait_for("two versions", lambda: len(list(root.glob("version-*"))) >= 2)
        ends = time.monotonic() + NOTICED_S
        while run.process.poll() is None and time.monotonic() < ends:  # a version that goes makes room again
            with suppress(OSError):  # the run itself takes what was left
                fill_up(tmp_path / "disk", leave=100_000)
            time.sleep(0.2)
        assert run.wait(NOTICED_S) == 1, run.out
        run.wait_clean(time.monotonic(), CLEAN_S)
        for piece in (f"sync.folder={root}: No space left on device: version ", " takes 0.4 MB", "make room, or give"):
            assert piece in run.err, run.err
        assert "Traceback" not in run.err, run.err
        assert not list(root.glob(".writing-*")), "what was begun is still there"
        kept, wanted = sorted(root.glob("version-*")), load_file(tiny_folder / "model.safetensors").keys()
        assert len(kept) == 2
        assert all(load_file(path / "model-00001-of-00001.safetensors").keys() == wanted for path in kept)


def fill_up(folder: Path, leave: int) -> None:
    """Writes a file until only `leave` bytes are free in the file system of `folder`."""
    with (folder / "ballast").open("ab") as file:
        while (free := shutil.disk_usage(folder).free) > leave:
            file.write(b"\0" * min(1 << 16, free - leave))
            file.flush()
