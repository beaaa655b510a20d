"""The reward pool: a call ends by its deadline whatever happens, failures are data, and no process stays behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from conf.errors import ConfigError
from conf.schema import RewardConfig
from rl.types import Status
from rollout.rewards import RewardPool, Scored, check_reward

FUNCTIONS = '''
import asyncio, os, signal, sys, threading, time
from fractions import Fraction

def behave(completion, record):
    """Does what the completion says."""
    if completion == "spin":
        print("spinning", os.getpid(), flush=True)
        while True:
            pass
    if completion == "sleep":
        time.sleep(3600)
    if completion == "power":
        base = 7
        return base ** base ** base ** base
    if completion == "raise":
        raise ValueError("no such answer")
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        os._exit(5)
    if completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "print":
        print("noise on standard output")
    if completion == "heavy":
        return float(any(name in sys.modules for name in ("torch", "ray", "vllm", "deepspeed", "hydra", "pytest")))
    if completion == "pid":
        return os.getpid()
    if completion == "alarm":
        assert threading.current_thread() is threading.main_thread()
        def ring(*_):
            raise TimeoutError
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            while True:
                pass
        except TimeoutError:
            return 0.25
    if completion == "leave alarm":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return os.getpid()
    if completion == "child":
        return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "3600")
    return 1.0

VALUES = {
    "true": True, "int": 3, "fraction": Fraction(1, 2), "none": None, "text": "0.5", "nan": float("nan"),
    "inf": float("inf"), "huge": 10 ** 400, "complex": 1j, "list": [1.0],
}

def value(completion, record):
    return VALUES[completion or record["default"]]

def numpy_value(completion, record):
    import numpy as np
    values = {"float32": np.float32(0.5), "bool": np.bool_(1), "0d": np.array(2), "nan": np.float64("nan")}
    return values.get(completion, np.ones(1))

async def slow_echo(completion, record, scale=1.0):
    await asyncio.sleep(0)
    if completion == "hang":
        await asyncio.Event().wait()
    return scale * float(completion or 0)

def raises_on_empty(completion, record):
    return 1 / len(completion)

def hangs(completion, record):
    time.sleep(3600)

def dies(completion, record):
    os._exit(9)

def needs_prompt(completion, record, *, prompt):
    return 1.0

number = 3
'''


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_functions.py").write_text(FUNCTIONS)
    (tmp_path / "reward_broken.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "reward_syntax.py").write_text("def reward(:\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    assert [child for child in psutil.Process().children(recursive=True) if "reward" in " ".join(child.cmdline())] == []


def make_cfg(name: str, deadline_s: float = 20.0, num_workers: int = 1, **kwargs: object) -> RewardConfig:
    target = name if "." in name else f"reward_functions.{name}"
    return RewardConfig(_target_=target, deadline_s=deadline_s, num_workers=num_workers, kwargs=kwargs)


def score_all(cfg: RewardConfig, completions: list[str], record: dict | None = None) -> list[Scored]:
    """All at once, from one event loop."""

    async def gather(pool: RewardPool) -> list[Scored]:
        return await asyncio.gather(*(pool.score(text, record or {}) for text in completions))

    pool = RewardPool(cfg)
    try:
        return asyncio.run(gather(pool))
    finally:
        pool.close()


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or goes within ten seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    return bool(ended)


def test_deadline_kills_the_process_and_harms_no_other_sample() -> None:  # B31
    stuck = ["spin", "sleep", "power"]
    results = score_all(make_cfg("behave", deadline_s=0.5, num_workers=2), ["ok", *stuck, *["ok"] * 8, "alarm"])
    assert [r.status for r in results] == [Status.ok, *[Status.reward_timeout] * 3, *[Status.ok] * 9]
    assert [r.reward for r in results] == [1.0, None, None, None, *[1.0] * 8, 0.25]
    for result in results[1:4]:
        assert 0.5 <= result.seconds < 5 and "reward.deadline_s=0.5" in result.error


def test_failures_are_data_with_their_traceback() -> None:  # B33
    texts = ["ok"] * 13 + ["raise", "exit", "die"]
    results = score_all(make_cfg("behave", num_workers=2), texts)
    assert Counter(r.status for r in results) == {Status.ok: 13, Status.reward_failed: 3}
    raised, exited, died = results[13:]
    assert raised.error.startswith("Traceback") and "reward_functions.py" in raised.error
    assert raised.error.rstrip().endswith("ValueError: no such answer") and "reward_worker.py" not in raised.error
    assert "SystemExit: 3" in exited.error
    assert died.error == "the reward process exited with code 5"
    assert all(r.reward is None for r in results[13:])


def test_every_sample_failing() -> None:
    results = score_all(make_cfg("behave"), ["raise", "segfault", "raise"])
    assert [r.status for r in results] == [Status.reward_failed] * 3
    assert results[1].error == "the reward process was killed by SIGSEGV"


def test_a_worker_that_died_between_calls_is_replaced() -> None:
    async def scenario() -> None:
        pid = (await pool.score("pid", {})).reward
        assert pid
        os.kill(int(pid), signal.SIGKILL)
        assert has_ended(int(pid))
        assert (await pool.score("ok", {})).status is Status.ok

    pool = RewardPool(make_cfg("behave"))
    try:
        asyncio.run(scenario())
    finally:
        pool.close()


def test_worker_is_light_runs_in_its_main_thread_and_may_print() -> None:
    heavy, printed, alarm = score_all(make_cfg("behave"), ["heavy", "print", "alarm"])
    assert (heavy.reward, printed.reward, alarm.reward) == (0.0, 1.0, 0.25)


def test_an_alarm_left_behind_is_cleared() -> None:
    first, second, third = score_all(make_cfg("behave", deadline_s=0.6), ["leave alarm", "sleep", "pid"])
    assert second.status is Status.reward_timeout  # and not killed by SIGALRM after 0.2 s
    assert third.status is Status.ok and third.reward != first.reward


def test_children_of_the_function_are_killed_with_it() -> None:
    child, timed_out = score_all(make_cfg("behave", deadline_s=0.5), ["child", "sleep"])
    assert timed_out.status is Status.reward_timeout and child.reward
    assert has_ended(int(child.reward))


def test_numbers_and_what_is_none() -> None:
    good = {"true": 1.0, "int": 3.0, "fraction": 0.5}
    bad = ["none", "text", "nan", "inf", "huge", "complex", "list"]
    results = score_all(make_cfg("value"), [*good, *bad])
    assert [r.reward for r in results[: len(good)]] == list(good.values())
    assert all(type(r.reward) is float for r in results[: len(good)])
    for name, result in zip(bad, results[len(good) :], strict=True):
        assert result.status is Status.reward_failed and "not a finite number" in result.error, name
    assert "returned None (NoneType)" in results[len(good)].error
    assert "returned '0.5' (str)" in results[len(good) + 1].error


def test_numpy_scalars_are_numbers() -> None:
    results = score_all(make_cfg("numpy_value"), ["float32", "bool", "0d", "nan", "1d"])
    assert [r.reward for r in results] == [0.5, 1.0, 2.0, None, None]


def test_async_functions_and_kwargs() -> None:
    results = score_all(make_cfg("slow_echo", deadline_s=0.5, scale=2.0), ["1", "2", "hang", "3"])
    assert [r.reward for r in results] == [2.0, 4.0, None, 6.0]
    assert results[2].status is Status.reward_timeout


def test_built_in_reward() -> None:
    (result,) = score_all(make_cfg("rollout.tasks.arithmetic.reward"), ["3 + 4 = 7"], {"answer": "7"})
    assert result.reward == 1.0


def test_records_that_cannot_be_sent() -> None:
    (result,) = score_all(make_cfg("behave"), ["ok"], {"f": lambda: 0})
    assert result.status is Status.reward_failed and "cannot be sent" in result.error
    with pytest.raises(ConfigError, match="cannot be sent"):
        check_reward(make_cfg("behave"), {"f": lambda: 0})


def test_large_records_pass() -> None:
    (result,) = score_all(make_cfg("behave"), ["ok"], {"text": "x" * 5_000_000})
    assert result.reward == 1.0


def test_an_import_error_after_launch_is_data() -> None:
    results = score_all(make_cfg("no_such"), ["a", "b"])
    assert all(r.status is Status.reward_failed and "no_such" in r.error for r in results)


def test_close_is_idempotent_and_ends_running_calls() -> None:
    async def scenario() -> list[Scored | BaseException]:
        calls = [asyncio.create_task(pool.score(text, {})) for text in ("spin", "spin")]
        first = await pool.score("ok", {})
        await asyncio.to_thread(pool.close)
        return [first, *await asyncio.gather(*calls, return_exceptions=True)]

    pool = RewardPool(make_cfg("behave", num_workers=3, deadline_s=60))
    first, *ended = asyncio.run(scenario())
    assert isinstance(first, Scored) and first.reward == 1.0
    assert all(isinstance(r, Scored) and r.error == "the reward pool was closed" for r in ended)
    pool.close()
    with pytest.raises(RuntimeError):
        asyncio.run(pool.score("ok", {}))


def test_close_without_a_call() -> None:
    RewardPool(make_cfg("behave", num_workers=2)).close()


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import pickle\n"
        "from rollout.processes.reward_worker import await_ready, call, start_worker\n"
        "worker = start_worker()\n"
        "await_ready(worker, 'reward_functions.behave', {})\n"
        "call(worker, pickle.dumps(('spin', {})), 600.0)\n"
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    ) as parent:
        assert parent.stderr
        line = next(line for line in parent.stderr if line.startswith("spinning"))  # printed by the worker
        parent.kill()
    assert has_ended(int(line.split()[1]))


def test_check_accepts_good_functions() -> None:
    assert check_reward(make_cfg("rollout.tasks.sort.reward"), {"answer": "ab"}) == ""
    assert check_reward(make_cfg("slow_echo", scale=3), {}) == ""


def test_check_only_warns_of_a_probe_that_raises_dies_or_hangs() -> None:
    assert "ZeroDivisionError" in check_reward(make_cfg("raises_on_empty"), {})
    assert "reward.deadline_s=0.3" in check_reward(make_cfg("hangs", deadline_s=0.3), {})
    assert "exited with code 9" in check_reward(make_cfg("dies"), {})


@pytest.mark.parametrize("default", ["none", "nan", "text", "inf"])
def test_check_refuses_what_is_no_number(default: str) -> None:
    with pytest.raises(ConfigError, match=r"reward._target_=reward_functions.value: .* not a finite number"):
        check_reward(make_cfg("value"), {"default": default})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("behav", "module reward_functions has no 'behav'; did you mean 'behave'"),
        ("number", "is a int, not a function"),
        ("nowhere_at_all.reward", "no module 'nowhere_at_all'"),
        ("reward_functions.inner.reward", "no module 'reward_functions.inner'"),
        ("reward_broken.reward", "no_such_package_at_all"),
        ("reward_syntax.reward", "SyntaxError"),
        ("not a path.x", "must be an import path"),
        ("needs_prompt", "missing a required .* 'prompt'"),
    ],
)
def test_check_refuses_what_cannot_be_imported_or_called(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_reward(make_cfg(target), {})
    assert "reward._target_=" in str(caught.value)


def test_check_refuses_unknown_arguments() -> None:
    with pytest.raises(ConfigError, match=r"reward.kwargs=\{'scal': 2\}.*unexpected keyword argument 'scal'"):
        check_reward(make_cfg("slow_echo", scal=2), {})
