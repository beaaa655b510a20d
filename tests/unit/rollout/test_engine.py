"""The thread that owns an engine, around a vLLM that fails."""

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rl.types import Sampling
from rollout import engine as module
from rollout.engine import Request, RolloutEngine
from tests.unit.stand_ins import make_cfg


class Broken:
    """Takes requests, and fails in its first step, while a command waits."""

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self.waiting: Any = None

    def set_weight_version(self, version: str) -> None:
        pass

    def add_request(self, *_: Any) -> None:
        pass

    def step(self) -> None:
        self.waiting = asyncio.run_coroutine_threadsafe(self.engine.pause(), self.engine._loop)
        deadline = time.monotonic() + 10
        while self.engine._commands.empty():
            assert time.monotonic() < deadline
        raise MemoryError("no room")


def test_engine_that_dies_answers_everything_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests, commands in the queue, and calls that come later: each gets the cause, none waits for a deadline."""

    async def live() -> None:
        engine = RolloutEngine(make_cfg(), 0, "cpu")
        llm = Broken(engine)
        monkeypatch.setattr(module, "build_engine", lambda *_: llm)
        monkeypatch.setattr(module, "sampling_params", lambda _: None)
        await engine.start("nowhere", 1)
        await engine.accept_loaded(version=0)
        sampling = Sampling(max_tokens=2, temperature=1.0, stop_token_ids=())
        await engine.submit([Request(request_id="a", prompt_ids=[1], sampling=sampling, deadline_s=60.0)])
        (outcome,) = await engine.collect(10.0)
        assert (outcome.request_id, outcome.completion) == ("a", None) and "no room" in outcome.error
        with pytest.raises(RuntimeError, match=r"engine 0 died while sampling.*no room"):
            await asyncio.wait_for(asyncio.wrap_future(llm.waiting), 10)
        with pytest.raises(RuntimeError, match="no room"):
            await asyncio.wait_for(engine.pause(), 10)

    asyncio.run(live())


class Pushed:
    """Takes pushes; its workers refuse nothing."""

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=[]))

    def set_weight_version(self, version: str) -> None:
        pass

    def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    def collective_rpc(self, *_: Any, **__: Any) -> list[tuple[str, bytes]]:
        return [("", pickle.dumps("print"))]


def with_engine(monkeypatch: pytest.MonkeyPatch, work: Callable[[RolloutEngine], Awaitable[None]]) -> None:
    async def live() -> None:
        monkeypatch.setattr(module, "build_engine", lambda *_: Pushed())
        engine = RolloutEngine(make_cfg(), 0, "cpu")
        await engine.start("nowhere", 1)
        await work(engine)

    asyncio.run(live())


async def push(engine: RolloutEngine, name: str, version: int, connect: bool = True) -> None:
    """All of a push but its end."""
    if connect:
        await engine.connect(name, [], [])
    await engine.pause()
    await engine.begin_update(name, version, None)
    await engine.load(name, [])
    await engine.finish_update(name, version)


def test_engine_is_not_resumed_in_the_middle_of_another_drivers_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first driver verifies its push; before its last call the second begins one, which takes the weights apart."""

    async def work(engine: RolloutEngine) -> None:
        await push(engine, "a", 1)
        await engine.connect("b", [], [])
        await engine.pause()
        with pytest.raises(RuntimeError, match=r"connection b, this push uses a.*two drivers must not push at once"):
            await engine.resume("a")
        await engine.begin_update("b", 2, None)
        for name in ("a", "b"):
            with pytest.raises(RuntimeError, match="two drivers must not push at once"):
                await engine.resume(name)
        assert not engine._can_step() and engine._paused
        await engine.begin_update("a", 1, None)  # workers refuse it
        await engine.finish_update("b", 2)
        await engine.resume("b")
        assert not engine._paused

    with_engine(monkeypatch, work)


def test_engine_that_started_anew_after_its_push_was_verified_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: RolloutEngine) -> None:
        with pytest.raises(RuntimeError, match="no push has reached it since it started; it must stay paused"):
            await engine.resume("a")
        assert engine._paused

    with_engine(monkeypatch, work)


def test_weights_of_an_engine_that_steps_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: RolloutEngine) -> None:
        await push(engine, "a", 1)
        await engine.resume("a")
        for call in (engine.begin_update("a", 2, None), engine.load("a", []), engine.finish_update("a", 2)):
            with pytest.raises(RuntimeError, match="engine 0 was resumed in the middle of a push: two drivers"):
                await call
        assert engine.version == 1
        await push(engine, "a", 2, connect=False)
        await engine.resume("a")

    with_engine(monkeypatch, work)
