"""Hosts of environments: the same to their caller wherever the code runs; failures are typed; nothing stays behind."""

import asyncio
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conf.choices import Isolation
from conf.errors import ConfigError
from rollout.environment import Action, Observation, StepResult, Task
from rollout.isolation import EnvBadValue, EnvDied, EnvRaised, EnvTimeout, Host, Hosts, check_environment

ENVIRONMENTS = '''
import asyncio, os, signal, subprocess, sys, threading, time
from rollout.environment import EnvironmentFailure, Observation, StepResult

GATE = threading.Event()

class Acting:
    """Does what the action says."""
    def __init__(self, greeting="hello"):
        self.greeting, self.turns = greeting, 0
    def reset(self, task):
        self.turns = task.seed
        return f"{self.greeting} {task.data.get('name', 'you')}"
    def step(self, action):
        self.turns += 1
        return getattr(self, "do_" + action.text)()
    def score(self):
        return {"main": self.turns}
    def oracle(self):
        return "done"
    def snapshot(self):
        return bytes([0, 255, self.turns])
    def restore(self, state):
        self.turns = state[2]
    def close(self):
        if os.environ.get("CLOSED"):
            with open(os.environ["CLOSED"], "a") as file:
                file.write("closed ")
    def do_ok(self):
        return StepResult(reward=1, messages=[{"role": "user", "content": "on"}], info={"turns": self.turns})
    def do_done(self):
        return StepResult(terminated=True)
    def do_pid(self):
        return StepResult(info={"pid": os.getpid(), "main": threading.current_thread() is threading.main_thread()})
    def do_raise(self):
        raise ValueError("no such move")
    def do_fail(self):
        raise EnvironmentFailure("the service is down")
    def do_exit(self):
        sys.exit(3)
    def do_die(self):
        os._exit(5)
    def do_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def do_hang(self):
        print("hanging", os.getpid(), flush=True)
        time.sleep(3600)
    def do_wait(self):
        GATE.wait(30)
        return StepResult()
    def do_none(self):
        return None
    def do_nan(self):
        return StepResult(reward=float("nan"))
    def do_big(self):
        return StepResult(messages=[{"role": "user", "content": "x" * 50_000_000}])
    def do_print(self):
        print("noise", sys.stdin.read())
        return StepResult()
    def do_alarm(self):
        class Rang(Exception):
            pass
        def ring(*_):
            raise Rang
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            while True:
                pass
        except Rang:
            return StepResult(reward=0.25)
    def do_child(self):
        return StepResult(info={"pid": subprocess.Popen(["sleep", "3600"]).pid})
    def do_daemon(self):
        return StepResult(info={"pid": subprocess.Popen(["sleep", "3600"], start_new_session=True).pid})
    def do_bare(self):
        return StepResult(info={"pid": subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True, env={}).pid})
    def do_twin(self):
        os.fork()
        return StepResult(info={"pid": os.getpid()})
    def do_signal(self):
        os.kill(os.getpid(), 40)
    def do_orphan(self):
        lives, begins = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                sys.stderr.write("orphan\\n")
                os.write(begins, b"1")
                time.sleep(3600)
            os._exit(0)
        os.wait()
        os.close(begins)
        os.read(lives, 1)
        return StepResult()
    def do_look(self):
        import socket
        def attempt(act):
            try:
                return str(act())
            except Exception as error:
                return type(error).__name__
        return StepResult(info={
            "net": attempt(lambda: socket.socket(socket.AF_INET)),
            "secret": attempt(lambda: open(self.greeting).read()),
            "uid": os.getuid(),
            "env": "SECRET" in os.environ,
        })

class Waiting:
    """All its methods are async."""
    async def reset(self, task):
        await asyncio.sleep(0)
        return [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    async def step(self, action):
        if action.text == "hang":
            await asyncio.Event().wait()
        if action.text == "late":
            time.sleep(0.2)
        return StepResult(reward=0.5)
    async def close(self):
        GATE.set()

class Slow:
    def reset(self, task):
        time.sleep(0.2)
        return "late"
    def step(self, action):
        return StepResult()

class NoStep:
    def reset(self, task):
        return ""

class BadScore(Slow):
    score = 3.0

def function():
    pass
'''
IN_PROCESS = [Isolation.inline, Isolation.thread]
APART = [Isolation.process, Isolation.sandbox]
EVERYWHERE = [*IN_PROCESS, *APART]
TASK = Task(index=0, seed=3, data={})


@pytest.fixture(autouse=True)
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "some_environments.py").write_text(ENVIRONMENTS)
    (tmp_path / "env_broken.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("some_environments", None)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    marks = ("env_worker", "rollout.processes.jail")
    assert not [c for c in psutil.Process().children(recursive=True) if any(m in " ".join(c.cmdline()) for m in marks)]


def act(text: str) -> Action:
    return Action(text=text, content=text)


def play(
    scenario: Callable[[Hosts], Coroutine[Any, Any, Any]],
    isolation: Isolation,
    name: str = "Acting",
    at_once: int = 1,
    **options: Any,
) -> Any:
    """What `scenario` returns, given the hosts; they are closed after it."""
    kwargs = options.pop("kwargs", {})
    hosts = Hosts(f"some_environments.{name}", kwargs, isolation, 1, **options)
    try:
        return asyncio.run(asyncio.wait_for(scenario(hosts), 60))
    finally:
        hosts.close()


def episode(
    *texts: str, isolation: Isolation, deadline_s: float = 20, name: str = "Acting", **options: Any
) -> list[Any]:
    """The results of reset and of the steps, or what they raised. The deadline is of those that do not meet it."""

    async def scenario(hosts: Hosts) -> list[Any]:
        host = await hosts.open()
        results: list[Any] = [await host.call("reset", TASK, deadline_s=20)]
        for text in texts:
            try:
                limit_s = deadline_s if text in ("hang", "late") else 20
                results.append(await host.call("step", act(text), deadline_s=limit_s))
            except Exception as error:
                results.append(error)
        await host.close(5)
        await host.close(5)
        return results

    result: list[Any] = play(scenario, isolation, name, **options)
    return result


def has_ended(pid: int, timeout_s: float = 10) -> bool:
    """Whether a process, ours or not, ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("isolation", EVERYWHERE)
def test_an_episode_anywhere_is_the_same(isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))

    async def scenario(hosts: Hosts) -> None:
        host = await hosts.open()
        first = await host.call("reset", Task(index=0, seed=3, data={"name": "Ann"}), deadline_s=20)
        assert first == Observation(messages=[{"role": "user", "content": "good day Ann"}])
        step = await host.call("step", act("ok"), deadline_s=20)
        message = {"role": "user", "content": "on"}
        assert step == StepResult(reward=1.0, messages=[message], info={"turns": 4}) and type(step.reward) is float
        state = await host.call("snapshot", deadline_s=20)
        assert state == bytes([0, 255, 4])
        await host.call("step", act("ok"), deadline_s=20)
        assert await host.call("score", deadline_s=20) == {"main": 5.0}
        await host.call("restore", state, deadline_s=20)
        assert await host.call("score", deadline_s=20) == {"main": 4.0}
        assert await host.call("oracle", deadline_s=20) == "done"
        await host.close(5)
        with pytest.raises(EnvDied):
            await host.call("oracle", deadline_s=20)
        if isolation is not Isolation.sandbox:  # whose environment sees no variables of ours, and no such file
            assert (tmp_path / "closed").read_text() == "closed "

    play(scenario, isolation, kwargs={"greeting": "good day"})


@pytest.mark.parametrize("isolation", EVERYWHERE)
def test_what_an_environment_raises_and_returns_wrongly_is_typed(isolation: Isolation) -> None:
    _, raised, failed, left, none, nan, ok = episode("raise", "fail", "exit", "none", "nan", "ok", isolation=isolation)
    assert isinstance(raised, EnvRaised) and not raised.is_infrastructure
    assert raised.traceback.startswith("Traceback") and raised.traceback.rstrip().endswith("ValueError: no such move")
    assert "some_environments.py" in raised.traceback and "env_hosts.py" not in raised.traceback
    assert isinstance(failed, EnvRaised) and failed.is_infrastructure and "the service is down" in str(failed)
    assert isinstance(left, EnvRaised) and "SystemExit: 3" in str(left)
    assert isinstance(none, EnvBadValue) and str(none) == "step must return a StepResult, found None (NoneType)"
    assert isinstance(nan, EnvBadValue) and str(nan) == "step: reward must be a finite number, found nan (float)"
    assert ok.info["turns"] == 9
    again = pickle.loads(pickle.dumps(failed))
    assert isinstance(again, EnvRaised) and again.is_infrastructure


@pytest.mark.parametrize("isolation", EVERYWHERE)
def test_async_methods_anywhere(isolation: Isolation) -> None:
    first, step, hung = episode("ok", "hang", isolation=isolation, name="Waiting", deadline_s=0.4)
    assert [message["role"] for message in first.messages] == ["system", "user"] and step.reward == 0.5
    assert isinstance(hung, EnvTimeout) and (hung.stage, hung.deadline_s) == ("step", 0.4)


def test_a_late_inline_call_is_reported_after_the_fact() -> None:
    async def scenario(hosts: Hosts) -> None:
        host = await hosts.open()
        with pytest.raises(EnvTimeout, match=r"did not answer reset within 0\.05 s"):
            await host.call("reset", TASK, deadline_s=0.05)
        await host.close(5)

    play(scenario, Isolation.inline, "Slow")
    _, late = episode("late", isolation=Isolation.inline, name="Waiting", deadline_s=0.05)
    assert isinstance(late, EnvTimeout)


@pytest.mark.parametrize("isolation", APART)
def test_a_process_that_hangs_or_dies_is_replaced(isolation: Isolation) -> None:
    async def scenario(hosts: Hosts) -> None:
        seen = set()
        for text, fault in (("hang", EnvTimeout), ("die", EnvDied), ("ok", None), ("ok", None)):
            host = await hosts.open()
            await host.call("reset", TASK, deadline_s=20)
            seen.add((await host.call("step", act("pid"), deadline_s=20)).info["pid"])
            if fault:
                began = time.monotonic()
                with pytest.raises(fault) as caught:
                    await host.call("step", act(text), deadline_s=0.4 if text == "hang" else 20)
                assert time.monotonic() - began < 15
                assert fault is not EnvDied or str(caught.value) == "the environment's process exited with code 5"
                with pytest.raises(EnvDied):
                    await host.call("step", act("ok"), deadline_s=20)
            await host.close(5)
        assert len(seen) == 3 or isolation is Isolation.sandbox  # where each counts its processes from 1

    play(scenario, isolation)


@pytest.mark.parametrize("isolation", APART)
@pytest.mark.parametrize(("by", "name"), [("killed", "SIGKILL"), ("signal", "signal 40")])
def test_a_process_killed_by_a_signal_says_which(isolation: Isolation, by: str, name: str) -> None:
    *_, killed = episode(by, isolation=isolation)
    assert isinstance(killed, EnvDied) and killed.how == f"the environment's process was killed by {name}"


@pytest.mark.parametrize("isolation", APART)
def test_no_answer_is_taken_for_that_of_another_call(isolation: Isolation) -> None:
    async def scenario(hosts: Hosts) -> None:
        host = await hosts.open()
        await host.call("reset", TASK, deadline_s=20)
        await host.call("step", act("twin"), deadline_s=20)  # two processes answer now
        with pytest.raises(EnvDied, match=r"answered another call than (step|oracle)"):
            while True:  # until the second one has
                assert isinstance(await host.call("step", act("ok"), deadline_s=20), StepResult)
                assert await host.call("oracle", deadline_s=20) == "done"
        await host.close(5)
        host = await hosts.open()
        assert isinstance(await host.call("reset", TASK, deadline_s=20), Observation)
        await host.close(5)

    play(scenario, isolation)


@pytest.mark.parametrize("isolation", APART)
def test_a_huge_answer_is_refused_by_its_header(isolation: Isolation) -> None:
    before = psutil.Process().memory_info().rss
    *_, big = episode("big", isolation=isolation, max_message_bytes=1 << 20)
    assert isinstance(big, EnvBadValue) and "more than the 1048576 allowed" in str(big)
    assert psutil.Process().memory_info().rss - before < 30 << 20


def test_a_process_runs_methods_in_its_main_thread_where_alarms_work(capfd: pytest.CaptureFixture[str]) -> None:
    _, where, alarm, printed = episode("pid", "alarm", "print", isolation=Isolation.process)
    assert where.info["main"] is True and where.info["pid"] != os.getpid()
    assert alarm.reward == 0.25 and isinstance(printed, StepResult)
    assert capfd.readouterr() == ("", "noise \n")


def test_children_end_with_the_process() -> None:
    _, child, hung = episode("child", "hang", isolation=Isolation.process, deadline_s=0.4)
    assert isinstance(hung, EnvTimeout) and has_ended(child.info["pid"])


@pytest.mark.parametrize("end", ["hang", "exit"])
@pytest.mark.parametrize("started", ["daemon", "bare"])
def test_children_in_a_session_of_their_own_end_with_the_process(started: str, end: str) -> None:
    _, child, _ = episode(started, end, isolation=Isolation.process, deadline_s=0.4)
    assert has_ended(child.info["pid"])


def test_a_sandboxed_environment_sees_neither_network_nor_files_and_leaves_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "notes.txt").write_text("for me alone")
    before = set(psutil.pids())
    _, look, _ = episode(
        "look", "orphan", isolation=Isolation.sandbox, kwargs={"greeting": str(tmp_path / "notes.txt")}
    )
    uid = look.info.pop("uid")
    assert look.info == {"net": "PermissionError", "secret": "FileNotFoundError", "env": False} and uid not in (0, None)
    assert "orphan" in capfd.readouterr().err
    for pid in set(psutil.pids()) - before:
        try:
            assert psutil.Process(pid).uids().real != uid or has_ended(pid)
        except psutil.NoSuchProcess:
            continue


def test_open_waits_in_line_and_a_cancelled_wait_takes_no_place() -> None:
    async def scenario(hosts: Hosts) -> None:
        host = await hosts.open()
        waiting = [asyncio.create_task(hosts.open()) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not done
        waiting[0].cancel()
        await host.close(5)
        second = await waiting[1]
        assert not waiting[2].done()
        await second.close(5)
        await (await waiting[2]).close(5)
        await (await hosts.open()).close(5)

    play(scenario, Isolation.inline)


def test_hosts_serve_several_event_loops_at_once() -> None:
    hosts = Hosts("some_environments.Acting", {}, Isolation.thread, 1)

    async def one() -> Any:
        host = await hosts.open()
        step = (await host.call("reset", TASK, deadline_s=20), await host.call("step", act("ok"), deadline_s=20))[1]
        await host.close(5)
        return step.info["turns"]

    async def several() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, one()) for _ in range(6)))

    assert asyncio.run(asyncio.wait_for(several(), 30)) == [4] * 6
    hosts.close()


def test_hung_threads_are_counted_and_too_many_are_refused() -> None:
    async def scenario(hosts: Hosts) -> None:
        import some_environments  # type: ignore[import-not-found]

        async def hang() -> None:
            host = await hosts.open()
            await host.call("reset", TASK, deadline_s=20)
            with pytest.raises(EnvTimeout):
                await host.call("step", act("wait"), deadline_s=0.05)
            await host.close(5)

        await hang()
        await hang()
        assert hosts.num_abandoned == 2
        with pytest.raises(RuntimeError, match=r"2 calls passed their deadlines .* set env.isolation=process"):
            await hosts.open()
        some_environments.GATE.set()
        deadline = time.monotonic() + 10
        while hosts.num_abandoned:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await (await hosts.open()).close(5)

    play(scenario, Isolation.thread, max_abandoned=1)


def test_a_cancelled_call_is_cut_off_by_close() -> None:
    async def scenario(hosts: Hosts) -> None:
        host = await hosts.open()
        await host.call("reset", TASK, deadline_s=20)
        call = asyncio.create_task(host.call("step", act("hang"), deadline_s=600))
        await asyncio.wait({call}, timeout=0.2)
        call.cancel()
        await host.close(0.1)
        await (await hosts.open()).close(5)

    play(scenario, Isolation.process)


def test_closing_the_hosts_ends_calls_and_waits() -> None:
    async def scenario(hosts: Hosts) -> None:
        host = await hosts.open()
        await host.call("reset", TASK, deadline_s=20)
        hanging = asyncio.create_task(host.call("step", act("hang"), deadline_s=600))
        waiting = asyncio.create_task(hosts.open())
        await asyncio.wait({hanging, waiting}, timeout=0.2)
        await asyncio.to_thread(hosts.close)
        with pytest.raises(EnvDied):
            await hanging
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(EnvDied):
            await host.call("step", act("ok"), deadline_s=5)
        await host.close(5)
        with pytest.raises(RuntimeError, match="closed"):
            await hosts.open()

    play(scenario, Isolation.process)


@pytest.mark.parametrize("isolation", APART)
def test_processes_die_with_their_parent(isolation: Isolation, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import asyncio\n"
        "from conf.choices import Isolation\n"
        "from rollout.environment import Action\n"
        "from rollout.isolation import Hosts\n"
        "async def main():\n"
        f"    host = await Hosts('some_environments.Acting', {{}}, Isolation.{isolation.name}, 1).open()\n"
        "    await host.call('step', Action(text='hang', content=''), deadline_s=600)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "parent.py"], stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    ) as parent:
        assert parent.stderr
        assert any(line.startswith("hanging") for line in parent.stderr)
        below = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(signal.SIGKILL)
    assert len(below) == (1 if isolation is Isolation.process else 3)
    assert all(has_ended(process.pid) for process in below)


@pytest.mark.parametrize("isolation", EVERYWHERE)
def test_check_names_the_optional_methods(isolation: Isolation) -> None:
    found = check_environment("some_environments.Acting", {"greeting": "hi"}, isolation)
    assert found == ["score", "oracle", "snapshot", "restore"]
    assert "some_environments" not in sys.modules


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("some_environments.Actin", "no 'Actin'; did you mean 'Acting'"),
        ("some_environments.NoStep", "a class without the method step"),
        ("some_environments.function", "a function without the methods reset and step"),
        ("some_environments.BadScore", r"score must be a method, found 3.0 \(float\)"),
        ("env_broken.Env", "No module named 'no_such_package_at_all'"),
        ("nowhere_at_all.Env", "no module 'nowhere_at_all'"),
    ],
)
def test_check_refuses_what_is_no_environment(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_environment(target, {}, Isolation.process)
    assert str(caught.value).startswith(f"env._target_={target}")


def test_check_refuses_unknown_arguments() -> None:
    with pytest.raises(ConfigError, match=r"env.kwargs=\{'greting': 1\}.*unexpected keyword argument 'greting'"):
        check_environment("some_environments.Acting", {"greting": 1}, Isolation.process)


def test_a_host_is_what_the_protocol_says() -> None:
    async def scenario(hosts: Hosts) -> None:
        host: Host = await hosts.open()
        await host.close(1)

    play(scenario, Isolation.process)
