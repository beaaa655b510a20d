"""The thread that owns an engine, around a vLLM that fails."""

import asyncio
import time
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
