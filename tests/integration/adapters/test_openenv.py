"""Environments behind OpenEnv servers: a real server of the package, full sessions, and what stays behind."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conf.choices import Isolation
from conf.errors import ConfigError
from rollout.adapters.openenv import OpenEnv, free_port
from rollout.environment import EnvironmentFailure, Task
from rollout.isolation import Hosts
from rollout.tool_calls import parse

SERVER = '''
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    text: str

class Move(Action):
    """Moves the counter."""
    by: int
    twice: bool = False

class Seen(Observation):
    text: str

class Echo(Environment):
    """Says back what it is told; the reward is its length. "bye" ends it, "fail" raises."""
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, hint="none", **kwargs):
        self._state = State(step_count=0)
        return Seen(text=f"seed {seed}, hint {hint}")
    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.text == "fail":
            raise ValueError("no such word")
        return Seen(text=action.text, reward=len(action.text) / 10, done=action.text == "bye")
    @property
    def state(self):
        return self._state

class Counter(Echo):
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.at = 0
        return super().reset(seed)
    def step(self, action, timeout_s=None, **kwargs):
        self.at += action.by * (1 + action.twice)
        return Seen(text=str(self.at), reward=None if self.at < 3 else True, done=self.at >= 3)

kind, port, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
env, action = {"echo": (Echo, Say), "counter": (Counter, Move)}[kind]
uvicorn.run(create_fastapi_app(env, action, Seen, sessions), host="127.0.0.1", port=port, log_level="warning")
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openenv") / "echo_server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def url(program: Path) -> Iterator[str]:
    """A server with one session."""
    port = free_port()
    with subprocess.Popen([sys.executable, str(program), "echo", str(port), "1"]) as server:
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def task(**data: Any) -> Task:
    return Task(index=0, seed=9, data=data)


async def said(env: OpenEnv, text: str, format: str = "none") -> Any:
    return await env.step(parse(text, format))


@pytest.mark.asyncio
async def test_episode_by_text_takes_rewards_and_end_from_the_server(url: str) -> None:
    env = OpenEnv(url, prompt="Say bye.")
    try:
        first = await env.reset(task(seed=4, reset={"hint": "short"}))
        assert [m["content"] for m in first.messages] == ["Say bye.\n\nseed 4, hint short"] and not first.tools
        on = await said(env, "hello")
        assert (on.messages[0], on.reward, on.terminated) == ({"role": "user", "content": "hello"}, 0.5, False)
        assert on.info["invalid"] == 0.0
        failed = await said(env, "fail")
        assert failed.messages[0]["content"] == "Error: no such word" and failed.info["invalid"] == 1.0
        last = await said(env, "bye")
        assert (last.reward, last.terminated) == (0.3, True)
    finally:
        await env.close()
        await env.close()
    again = OpenEnv(url, prompt="Say bye.")
    assert await again.reset(task(seed=4, reset={"hint": "short"})) == first
    await again.close()


@pytest.mark.asyncio
async def test_full_server_is_waited_for_and_then_given_up(url: str) -> None:
    one, two = OpenEnv(url), OpenEnv(url)
    try:
        assert (await one.reset(task())).messages[0]["content"] == "seed 9, hint none"
        with pytest.raises(EnvironmentFailure, match=r"no session .* within 0.6 s: .*capacity"):
            await OpenEnv(url, queue_s=0.6).reset(task())
        waiting = asyncio.create_task(two.reset(task()))
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        await one.close()
        await waiting
    finally:
        await one.close()
        await two.close()


@pytest.mark.asyncio
async def test_fields_become_a_tool_and_the_server_ends_with_its_episode(program: Path) -> None:
    env = OpenEnv(command=[sys.executable, str(program), "counter", "{port}", "4"])
    try:
        first = await env.reset(task(seed=1))
        (tool,) = first.tools
        assert tool["function"]["name"] == "act" and set(tool["function"]["parameters"]["properties"]) == {
            "by",
            "twice",
        }
        assert tool["function"]["description"] == "Moves the counter."
        wrong = await said(env, env.call_text("act", by="far"), "hermes")
        assert "by: 'far' is not of type 'integer'" in wrong.messages[0]["content"] and wrong.info["invalid"] == 1.0
        talk = await said(env, "up!", "hermes")
        assert "calling the tool act" in talk.messages[0]["content"] and talk.info["invalid"] == 1.0
        on = await said(env, env.call_text("act", by=1), "hermes")
        assert (on.messages[0]["content"], on.reward, on.terminated) == ("1", 0.0, False)
        last = await said(env, env.call_text("act", by=1, twice=True), "hermes")
        assert (last.messages[0]["content"], last.reward, last.terminated) == ("3", 1.0, True)
        assert env._process
        server = psutil.Process(env._process.pid)
        server.kill()
        with pytest.raises(EnvironmentFailure, match="did not answer step"):
            await said(env, env.call_text("act", by=1), "hermes")
    finally:
        await env.close()
    assert not server.is_running()


@pytest.mark.asyncio
async def test_server_that_ends_or_is_not_there_is_a_failure_of_the_environment() -> None:
    ends, absent = OpenEnv(command=["false", "{port}"]), OpenEnv(f"http://127.0.0.1:{free_port()}", queue_s=0.3)
    with pytest.raises(EnvironmentFailure, match="ended with code 1"):
        await ends.reset(task())
    await ends.close()
    with pytest.raises(EnvironmentFailure, match=r"no session .* within 0.3 s: ClientConnectorError"):
        await absent.reset(task())
    await absent.close()


@pytest.mark.asyncio
async def test_names_that_the_server_does_not_know_are_the_episodes_own(url: str) -> None:
    for kwargs, message in (
        ({"field": "txt"}, "field=txt: an action has text"),
        ({"show": "txt"}, "show=txt: .* text"),
    ):
        env = OpenEnv(url, **kwargs)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            await env.reset(task())
        await env.close()


def test_episode_in_a_process_plays_to_its_end(url: str) -> None:
    hosts = Hosts("rollout.adapters.openenv.OpenEnv", {"base_url": url}, Isolation.process, 1)

    async def run() -> None:
        for _ in range(2):  # the only session is free again
            host = await hosts.open()
            await host.call("reset", task(), deadline_s=60)
            assert (await host.call("step", parse("bye", "none"), deadline_s=30)).terminated
            await host.close(10)

    try:
        asyncio.run(run())
    finally:
        hosts.close()


def test_tasks_differ_and_those_of_evaluation_are_no_others() -> None:
    made = {split: [OpenEnv.make_task(split, 0, index)["seed"] for index in range(50)] for split in ("train", "eval")}
    assert len({*made["train"], *made["eval"]}) == 100 and made["train"][3] == OpenEnv.make_task("train", 0, 3)["seed"]
    with pytest.raises(ConfigError, match="split='test'"):
        OpenEnv.make_task("test", 0, 0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "give one of them"),
        ({"base_url": "http://x", "command": ["a", "{port}"]}, "give one of them"),
        ({"base_url": "localhost:8000"}, "must begin with http:// or https://"),
        ({"command": ["python", "server.py"]}, "one of which holds {port}"),
        ({"command": ["no-such-program", "{port}"]}, "no program 'no-such-program'"),
        ({"base_url": "http://x", "queue_s": 0}, "env.kwargs.queue_s=0: must be > 0"),
    ],
)
def test_bad_arguments_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        OpenEnv(**kwargs)
