"""MCP servers as environments: a real server for each episode, what the model gets wrong, and what stays behind."""

import asyncio
import os
import select
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conf.choices import Isolation
from conf.errors import ConfigError
from rollout.adapters.mcp import Mcp
from rollout.environment import EnvironmentFailure, Task
from rollout.isolation import Hosts
from rollout.tool_calls import parse

SERVER = '''
import json, os, subprocess, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

task = json.loads(os.environ["TANDEM_TASK"])
server = MCPServer("shop")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)

@server.tool()
def price(item: str, count: int = 1) -> str:
    """Tells what things cost together."""
    if item not in task["data"]["prices"]:
        raise ToolError(f"no such item: {item}")
    return str(task["data"]["prices"][item] * count)

@server.tool()
def processes() -> list[int]:
    """Names the processes."""
    return [os.getpid(), child.pid]

@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)

@server.tool()
async def sleep() -> str:
    """Takes long."""
    import asyncio
    await asyncio.sleep(600)

print("a line that is no message", flush=True)
server.run("stdio")
'''
JUDGE = """
def score(answer, record, reward=1.0):
    return reward if answer.strip() == record["answer"] else 0.0

async def score_later(answer, record):
    return float("nan")

def tasks(split, seed, index):
    return {"prompt": f"{split} {seed} {index}", "answer": str(index)}
"""
RECORD = {
    "prompt": "What do 3 pens cost?",
    "prices": {"pen": 2},
    "calls": [{"name": "price", "arguments": {"item": "pen", "count": 3}}],
    "answer": "6",
}


@pytest.fixture
def kwargs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    (tmp_path / "shop_server.py").write_text(SERVER)
    (tmp_path / "shop_judge.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield {"command": [sys.executable, str(tmp_path / "shop_server.py")], "score": "shop_judge.score"}
    sys.modules.pop("shop_judge", None)
    assert not [c for c in psutil.Process().children(recursive=True) if "shop_server" in " ".join(c.cmdline())]


def played(env: Mcp, scenario: Callable[[Any], Coroutine[Any, Any, Any]], record: dict[str, Any] = RECORD) -> Any:
    """What `scenario` returns, given the first observation; the environment is closed after it."""

    async def run() -> Any:
        try:
            return await scenario(await env.reset(Task(index=0, seed=5, data=record)))
        finally:
            await env.close()
            await env.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def has_ended(pid: int) -> bool:
    """Within 10 s, whether or not whoever inherits it waits for it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


def test_oracle_gets_what_the_function_gives_and_the_server_ends_with_its_children(kwargs: dict[str, Any]) -> None:
    env = Mcp(**kwargs, score_kwargs={"reward": 0.5}, system="Be brief.")

    async def scenario(first: Any) -> list[int]:
        assert [message["role"] for message in first.messages] == ["system", "user"]
        tools = {tool["function"]["name"]: tool["function"] for tool in first.tools}
        assert list(tools) == ["price", "processes", "leave", "sleep"]
        assert tools["price"]["description"] == "Tells what things cost together."
        assert tools["price"]["parameters"]["required"] == ["item"]
        called = await env.step(parse(env.oracle(), "hermes"))
        assert [(m["role"], m["content"]) for m in called.messages] == [("tool", "6")] and not called.terminated
        ids = (await env.step(parse(env.call_text("processes"), "hermes"))).messages[0]["content"]
        last = await env.step(parse(env.oracle(), "hermes"))
        assert (last.reward, last.terminated) == (0.5, True)
        return [int(number) for number in ids.split()]

    assert all(has_ended(pid) for pid in played(env, scenario))


def test_what_the_model_gets_wrong_is_answered_and_counted(kwargs: dict[str, Any]) -> None:
    env = Mcp(**kwargs, call_s=2.0)

    async def scenario(first: Any) -> None:
        async def told(name: str, **arguments: Any) -> str:
            result = await env.step(parse(env.call_text(name, **arguments), "hermes"))
            assert (result.info["invalid"], result.info["tool_errors"], result.terminated) == (1.0, 1, False)
            return str(result.messages[0]["content"])

        assert "no tool 'prise'; did you mean 'price'?" in await told("prise", item="pen")
        assert "It is price(item: string, count: integer (optional))." in await told("price")
        assert "count: 'two' is not of type 'integer'" in await told("price", item="pen", count="two")
        assert "no argument 'itm'; did you mean 'item'" in await told("price", itm="pen")
        assert "no such item: cup" in await told("price", item="cup")
        assert "sleep took longer than 2 s" in await told("sleep")
        broken = await env.step(parse('<tool_call>{"name": "price", </tool_call>', "hermes"))
        assert broken.info["invalid"] == 1.0 and "could not be read" in broken.messages[0]["content"]
        text = "<tool_call><function=price><parameter=item>pen</parameter><parameter=count>4</parameter></function>"
        as_text = await env.step(parse(text + "</tool_call>", "xml"))
        assert (as_text.messages[0]["content"], as_text.info["invalid"]) == ("8", 0.0)
        wrong = await env.step(parse("7", "hermes"))
        assert (wrong.reward, wrong.terminated, wrong.info["invalid"]) == (0.0, True, 0.0)

    played(env, scenario)


def test_server_that_ends_or_never_speaks_is_a_failure_of_the_environment(kwargs: dict[str, Any]) -> None:
    env = Mcp(**kwargs)

    async def leave(first: Any) -> None:
        with pytest.raises(EnvironmentFailure, match=r"has ended"):
            await env.step(parse(env.call_text("leave"), "hermes"))

    played(env, leave)
    with pytest.raises(EnvironmentFailure, match="did not get ready"):
        played(Mcp(**kwargs | {"command": ["false"]}), leave)


def test_reset_that_is_cut_off_leaves_no_server(kwargs: dict[str, Any]) -> None:
    async def run() -> list[int]:
        before = set(psutil.Process().children())
        env = Mcp(**kwargs | {"command": ["sleep", "600"]})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.reset(Task(index=0, seed=0, data=RECORD)), 0.3)
        assert len(set(psutil.Process().children()) - before) == 1
        await env.close()
        return [process.pid for process in set(psutil.Process().children()) - before]

    assert asyncio.run(run()) == []


def test_same_task_begins_the_same_in_a_process_and_a_killed_one_takes_its_server_along(kwargs: dict[str, Any]) -> None:
    hosts = Hosts("rollout.adapters.mcp.Mcp", kwargs, Isolation.process, 1)
    task = Task(index=0, seed=5, data=RECORD)

    async def run() -> list[int]:
        host = await hosts.open()
        first = await host.call("reset", task, deadline_s=60)
        call = parse(await host.call("oracle", deadline_s=10), "hermes")
        assert (await host.call("step", call, deadline_s=30)).messages[0]["content"] == "6"
        assert (await host.call("step", parse("6", "hermes"), deadline_s=30)).reward == 1.0
        await host.close(20)
        host = await hosts.open()
        assert await host.call("reset", task, deadline_s=60) == first
        asked = await host.call("step", parse(Mcp(**kwargs).call_text("processes"), "hermes"), deadline_s=30)
        return [int(number) for number in asked.messages[0]["content"].split()]

    try:
        left = asyncio.run(asyncio.wait_for(run(), 90))
    finally:
        hosts.close()
    assert all(has_ended(pid) for pid in left)


def test_make_task_asks_the_function(kwargs: dict[str, Any]) -> None:
    record = Mcp.make_task("eval", 1, 2, tasks="shop_judge.tasks", **kwargs)
    assert record == {"prompt": "eval 1 2", "answer": "2"}
    with pytest.raises(ConfigError, match=r"env.kwargs.tasks=''.*data=file"):
        Mcp.make_task("train", 0, 0, **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": "python server.py"}, "env.kwargs.command='python server.py': must be a list"),
        ({"command": []}, r"env.kwargs.command=\[\]"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"score": "shop_judge.scor"}, "env.kwargs.score=shop_judge.scor: .* did you mean 'score'"),
        ({"score_kwargs": {"rewrd": 1}}, "unexpected keyword argument 'rewrd'"),
        ({"call_s": 0}, "env.kwargs.call_s=0: must be > 0"),
    ],
)
def test_bad_arguments_are_refused(kwargs: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mcp(**kwargs | change)


def test_bad_record_and_bad_score_are_the_episodes_own_and_the_server_sees_few_variables(
    kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(first: Any) -> None:
        await env.step(parse("6", "hermes"))

    env = Mcp(**kwargs)
    with pytest.raises(ValueError, match="needs a `prompt`"):
        played(env, answer, {"question": "?"})
    with pytest.raises(ValueError, match="too long for TANDEM_TASK"):
        played(env, answer, {"prompt": "x" * 200_000})
    monkeypatch.setenv("SECRET", "x")
    env = Mcp(**kwargs | {"score": "shop_judge.score_later"}, env={"SHOP": "1"})

    async def look_and_answer(first: Any) -> None:
        assert env._process
        seen = psutil.Process(env._process.pid).environ()
        assert "SECRET" not in seen and seen["SHOP"] == "1" and seen["PATH"] == os.environ["PATH"]
        await answer(first)

    with pytest.raises(ValueError, match="gave nan, not a finite number"):
        played(env, look_and_answer)
