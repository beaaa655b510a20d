"""Requests to the rollout engines: which engine, in one call with what else is asked at that moment, and its answer."""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from conf.schema import RolloutConfig
from rl.faults import RoleDied, reason_of
from rl.types import Sampling
from rollout.engine import Outcome, Request

# How long an engine may overrun a request's own deadline before it is given up.
GRACE_S = 30.0
COLLECT_S = 5.0


class EngineClient(Protocol):
    """What the router needs of an engine."""

    name: str
    generation: int  # grows with each restart

    async def submit(self, requests: list[Request]) -> None: ...

    async def collect(self, timeout_s: float) -> list[Outcome]: ...

    async def abort(self, request_ids: list[str]) -> None: ...


class Lane:
    """The way of one episode to an engine: always the same one, for its cache of prefixes, as long as that lives."""

    def __init__(self, router: "Router"):
        self._router, self._engine = router, router.choose()

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Outcome:
        """A completion, of at most the tokens that the context has room for; or why there is none. Never raises."""
        if self._engine in self._router.dead and len(self._router.dead) < len(self._router.engines):
            self._router.leave(self._engine)
            self._engine = self._router.choose()
        return await self._router.ask(self._engine, prompt_ids, sampling)

    def close(self) -> None:
        """The episode is over."""
        self._router.leave(self._engine)


class Router:
    """All engines of a run, as one. Lives on one event loop."""

    def __init__(self, cfg: RolloutConfig, engines: Sequence[EngineClient], loop: asyncio.AbstractEventLoop):
        self.cfg, self.engines, self._loop = cfg, list(engines), loop
        self.dead: dict[int, str] = {}  # engines that are gone, and why
        self._generation = [engine.generation for engine in self.engines]
        self._episodes = [0] * len(self.engines)
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._owner: dict[str, int] = {}
        self._outbox: dict[int, list[Request]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._serial = 0
        for index in range(len(self.engines)):
            self._spawn(self._collect(index))

    @property
    def num_open(self) -> int:
        """Requests that wait for their answer."""
        return len(self._waiting)

    def lane(self) -> Lane:
        """For one episode, to the engine with the fewest."""
        return Lane(self)

    def choose(self) -> int:
        """The living engine with the fewest episodes, which now has one more."""
        alive = [index for index in range(len(self.engines)) if index not in self.dead]
        engine = min(alive, key=lambda index: (self._episodes[index], index), default=0)
        self._episodes[engine] += 1
        return engine

    def leave(self, engine: int) -> None:
        """An episode no longer uses this engine."""
        self._episodes[engine] -= 1

    async def ask(self, engine: int, prompt_ids: list[int], sampling: Sampling) -> Outcome:
        """As Lane.generate. When whoever waits is cancelled, the engine is told to stop."""
        self._serial += 1
        room = self.cfg.max_model_len - len(prompt_ids)
        request = Request(
            request_id=f"r{self._serial}",
            prompt_ids=prompt_ids,
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            deadline_s=self.cfg.deadline_s,
        )
        future = self._waiting[request.request_id] = self._loop.create_future()
        self._owner[request.request_id] = engine
        if engine in self.dead:
            self._resolve(Outcome(request_id=request.request_id, error=self.dead[engine]))
        else:
            self._post(engine, request)
        try:
            return await asyncio.wait_for(future, self.cfg.deadline_s + GRACE_S)
        except TimeoutError:
            error = f"{self.engines[engine].name} does not answer ({GRACE_S:g} s beyond rollout.deadline_s)"
            return Outcome(request_id=request.request_id, error=error, timed_out=True)
        except asyncio.CancelledError:
            if not self._loop.is_closed() and engine not in self.dead:
                self._keep(self._abort(engine, request.request_id))
            raise
        finally:
            del self._waiting[request.request_id], self._owner[request.request_id]

    async def flush(self) -> None:
        """Lets tasks that were just made ask, and waits until what they asked is with the engines."""
        for _ in range(3):  # a group begins, its episodes begin and ask, all is sent
            await asyncio.sleep(0)
        while self._outbox or self._sending:
            await asyncio.sleep(0)
            await asyncio.gather(*self._sending)

    def revive(self) -> None:
        """Takes engines back that were restarted; what they had been asked before is lost."""
        for index, engine in enumerate(self.engines):
            if engine.generation > self._generation[index]:
                self.bury(index, RuntimeError("it was restarted"))
                del self.dead[index]
                self._generation[index] = engine.generation
                self._spawn(self._collect(index))

    def bury(self, index: int, error: Exception) -> None:
        """Marks an engine dead; requests that wait for it end with its error."""
        name = self.engines[index].name
        self.dead[index] = f"{name}: {reason_of(error, name)}"
        for request_id, engine in self._owner.items():
            if engine == index:
                self._resolve(Outcome(request_id=request_id, error=self.dead[index]))

    def require_living(self) -> None:
        """Raises RoleDied when every engine is gone."""
        if len(self.dead) == len(self.engines):
            raise RoleDied("phase rollout: every rollout engine is gone:\n  " + "\n  ".join(self.dead.values()))

    def _post(self, engine: int, request: Request) -> None:
        """Requests that are made in the same turn of the event loop reach the engine in one call, and one batch."""
        if not self._outbox:
            self._loop.call_soon(self._send_all)
        self._outbox.setdefault(engine, []).append(request)

    def _send_all(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for engine, requests in outbox.items():
            self._keep(self._send(engine, requests))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, engine: int, requests: list[Request]) -> None:
        try:
            await self.engines[engine].submit(requests)
        except Exception as error:
            self.bury(engine, error)

    async def _abort(self, engine: int, request_id: str) -> None:
        try:
            await self.engines[engine].abort([request_id])
        except Exception as error:
            self.bury(engine, error)

    async def _collect(self, index: int) -> None:
        """Brings finished requests of one engine in, until the engine fails."""
        generation = self._generation[index]
        while generation == self._generation[index]:
            try:
                outcomes = await self.engines[index].collect(COLLECT_S)
            except Exception as error:
                if self.engines[index].generation == generation:  # else it is being restarted, or was
                    self.bury(index, error)
                return
            for outcome in outcomes:
                self._resolve(outcome)

    def _resolve(self, outcome: Outcome) -> None:
        future = self._waiting.get(outcome.request_id)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
