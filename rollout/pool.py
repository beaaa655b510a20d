"""The pool of rollout engines: asynchronous inside, in prompt order outside.

A loop in a thread of its own sends prompts as far ahead as `max_lag` allows, routes requests to engines, awaits
completions and rewards. Lag is a number here, not a second trainer.
"""

import asyncio
import dataclasses
import hashlib
import math
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from conf.choices import Advantage
from conf.schema import Config
from rl.faults import RoleDied, RoleTimeout, reason_of
from rl.prompts import PromptStream
from rl.types import Completion, Group, Prompt, Sampling, Status, Trajectory
from rollout.engine import Outcome, Request
from rollout.rewards import Scored

# How long the pool lets an engine overrun a request's own deadline before it is given up.
GRACE_S = 30.0
COLLECT_S = 5.0


class EngineClient(Protocol):
    """What the pool needs of an engine."""

    name: str
    generation: int  # grows with each restart

    async def submit(self, requests: list[Request]) -> None: ...

    async def collect(self, timeout_s: float) -> list[Outcome]: ...


class Scorer(Protocol):
    """Scores one completion; see rollout.rewards.RewardPool."""

    async def score(self, completion: str, record: dict[str, Any]) -> Scored: ...


class RolloutPool:
    """Implements rl.roles.Rollouts over engines and a reward function."""

    def __init__(
        self,
        cfg: Config,
        engines: Sequence[EngineClient],
        stream: PromptStream,
        scorer: Scorer,
        decode: Callable[[list[int]], str],
        stop_token_ids: tuple[int, ...],
        is_settled: Callable[[int, int], bool] = lambda _index, _epoch: False,
    ):
        self.cfg, self.engines, self.stream, self.scorer, self.decode = cfg, list(engines), stream, scorer, decode
        self.stop_token_ids, self.is_settled = stop_token_ids, is_settled
        self.sampling = Sampling(
            max_tokens=cfg.rollout.max_tokens, temperature=cfg.rollout.temperature, stop_token_ids=stop_token_ids
        )
        self._groups: deque[asyncio.Task[Group]] = deque()
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._owner: dict[str, int] = {}
        self._load = [0] * len(self.engines)
        self._dead: dict[int, str] = {}
        self._generation = [engine.generation for engine in self.engines]
        self._version = self._position = 0
        self._serial = 0
        self._aborted: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-pool", daemon=True)
        self._thread.start()
        for index in range(len(self.engines)):
            self._spawn(self._collect(index))

    # -- rl.roles.Rollouts --

    def start(self, first_position: int, version: int) -> None:
        """As rl.roles.Rollouts."""
        self._position = first_position
        self.set_version(version)

    def set_version(self, version: int) -> None:
        """As rl.roles.Rollouts."""
        self._wait(self._advance(version), self.cfg.rollout.deadline_s + GRACE_S)

    def next_groups(self, count: int) -> list[Group]:
        """As rl.roles.Rollouts. Raises RoleTimeout when they do not come, RoleDied when every engine is gone."""
        greedy = self.cfg.algo.advantage is Advantage.remax
        open_groups = max(count, len(self._groups))  # those of later steps queue for the same reward processes
        groups = self._wait(self._take(count), self._limit_s(open_groups * (self.cfg.samples_per_prompt + greedy)))
        if self.cfg.reward.shuffle:
            shuffle_rewards(groups, seed=self.cfg.seed * 1_000_003 + groups[0].position)
        return groups

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> list[list[Trajectory]]:
        """As rl.roles.Rollouts; request seeds derive from `sampling.seed`, the prompt and the sample."""
        return self._wait(self._sample(prompts, sampling, samples), self._limit_s(len(prompts) * samples))

    def abort(self, error: BaseException) -> None:
        """Has whoever waits for the pool, now or later, raise `error`: no engine will answer any more."""
        if not self._aborted.done():
            self._aborted.set_exception(error)

    def close(self) -> None:
        """Ends the loop's thread; idempotent."""
        if not self._loop.is_closed():
            self._spawn(self._cancel_all())
            self._thread.join(timeout=10)
            if not self._thread.is_alive():
                self._loop.close()

    # -- inside the loop --

    async def _advance(self, version: int) -> None:
        """Starts every group that `version` allows."""
        self._version = version
        steps = min(self.cfg.num_steps - version, 1 + self.cfg.max_lag)
        await self._start_groups(steps * self.cfg.prompts_per_step - len(self._groups))

    async def _start_groups(self, count: int) -> None:
        """Starts `count` groups at the next positions, all requests of an engine in one call."""
        self._revive()
        batches: list[list[Request]] = [[] for _ in self.engines]
        for _ in range(count):
            position = self._position = self._unsettled(self._position)
            self._position += 1
            prompt = self.stream.at(position)
            pending = []
            for sample in range(self.cfg.samples_per_prompt):
                seed = derive_seed("train", self.cfg.seed, position, sample)
                pending.append(self._prepare(prompt, self.sampling, seed, batches))
            if self.cfg.algo.advantage is Advantage.remax:
                greedy = dataclasses.replace(self.sampling, temperature=0.0)
                pending.append(self._prepare(prompt, greedy, 0, batches))
            self._groups.append(asyncio.create_task(self._gather(position, prompt, pending, self._version)))
        await self._send(batches)

    def _unsettled(self, position: int) -> int:
        """The first position from `position` on whose prompt can teach something; after a whole epoch of others, the
        given one."""
        for later in range(position, position + len(self.stream.prompts)):
            if not self.is_settled(self.stream.at(later).index, self.stream.epoch(later)):
                return later
        return position

    async def _take(self, count: int) -> list[Group]:
        """The next `count` groups; starts those that a step needs beyond its batch (dynamic sampling)."""
        await self._start_groups(count - len(self._groups))
        taken = [self._groups.popleft() for _ in range(count)]
        groups = list(await asyncio.gather(*taken))
        self._require_living()
        return groups

    def _require_living(self) -> None:
        if len(self._dead) == len(self.engines):
            raise RoleDied("phase rollout: every rollout engine is gone:\n  " + "\n  ".join(self._dead.values()))

    async def _sample(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> list[list[Trajectory]]:
        self._revive()
        batches: list[list[Request]] = [[] for _ in self.engines]
        pending = [
            [
                self._prepare(prompt, sampling, derive_seed("evaluate", sampling.seed or 0, prompt.index, k), batches)
                for k in range(samples)
            ]
            for prompt in prompts
        ]
        await self._send(batches)
        rows = await asyncio.gather(
            *(
                asyncio.gather(*(self._finish(prompt, *item) for item in row))
                for prompt, row in zip(prompts, pending, strict=True)
            )
        )
        self._require_living()
        return [list(row) for row in rows]

    async def _gather(self, position: int, prompt: Prompt, pending: list[tuple[str, int]], version: int) -> Group:
        trajectories = list(await asyncio.gather(*(self._finish(prompt, *item) for item in pending)))
        baseline = trajectories.pop() if len(trajectories) > self.cfg.samples_per_prompt else None
        if baseline is not None and not baseline.valid:  # without it the others have no advantage
            for trajectory in trajectories:
                trajectory.status, trajectory.error = baseline.status, f"the greedy baseline failed: {baseline.error}"
        return Group(position=position, prompt=prompt, trajectories=trajectories, version=version, baseline=baseline)

    def _prepare(self, prompt: Prompt, sampling: Sampling, seed: int, batches: list[list[Request]]) -> tuple[str, int]:
        """Adds one request to the batch of the least loaded living engine; gives its id and engine."""
        alive = [i for i in range(len(self.engines)) if i not in self._dead]
        engine = min(alive, key=lambda i: (self._load[i], i), default=0)
        self._load[engine] += 1
        self._serial += 1
        room = self.cfg.rollout.max_model_len - len(prompt.token_ids)
        request = Request(
            request_id=f"r{self._serial}",
            prompt_ids=prompt.token_ids,
            sampling=Sampling(
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seed,
                stop_token_ids=sampling.stop_token_ids,
            ),
            deadline_s=self.cfg.rollout.deadline_s,
        )
        batches[engine].append(request)
        self._waiting[request.request_id] = self._loop.create_future()
        self._owner[request.request_id] = engine
        return request.request_id, engine

    async def _send(self, batches: list[list[Request]]) -> None:
        for index, requests in enumerate(batches):
            if requests:
                try:
                    await self.engines[index].submit(requests)
                except Exception as error:
                    self._bury(index, error)

    async def _collect(self, index: int) -> None:
        """Brings finished requests of one engine in, until the engine fails."""
        generation = self._generation[index]
        while generation == self._generation[index]:
            try:
                outcomes = await self.engines[index].collect(COLLECT_S)
            except Exception as error:
                if self.engines[index].generation == generation:  # else it is being restarted, or was
                    self._bury(index, error)
                return
            for outcome in outcomes:
                self._resolve(outcome)

    def _resolve(self, outcome: Outcome) -> None:
        future = self._waiting.get(outcome.request_id)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _revive(self) -> None:
        """Takes engines back that were restarted; what they had been asked before is lost."""
        for index, engine in enumerate(self.engines):
            if engine.generation > self._generation[index]:
                self._bury(index, RuntimeError("it was restarted"))
                del self._dead[index]
                self._generation[index] = engine.generation
                self._spawn(self._collect(index))

    def _bury(self, index: int, error: Exception) -> None:
        """Marks an engine dead; requests that wait for it end with its error."""
        name = self.engines[index].name
        self._dead[index] = f"{name}: {reason_of(error, name)}"
        for request_id, engine in self._owner.items():
            if engine == index:
                self._resolve(Outcome(request_id=request_id, error=self._dead[index]))

    async def _finish(self, prompt: Prompt, request_id: str, engine: int) -> Trajectory:
        """The trajectory of one request: completion, then reward. Never raises: failure is a status."""
        outcome = await self._outcome(request_id, engine)
        self._load[engine] -= 1
        if outcome.completion is None:
            status = Status.engine_timeout if outcome.timed_out else Status.engine_failed
            return failed(prompt, status, outcome.error)
        trajectory = as_trajectory(outcome.completion)
        try:
            trajectory.text = self.decode(outcome.completion.token_ids)
            scored = await self.scorer.score(trajectory.text, prompt.record)
        except Exception:
            scored = Scored(reward=None, status=Status.reward_failed, error=traceback.format_exc(), seconds=0.0)
        trajectory.status, trajectory.error = scored.status, scored.error
        trajectory.reward = scored.reward if scored.reward is not None else 0.0
        trajectory.rewards = scored.rewards
        return trajectory

    async def _outcome(self, request_id: str, engine: int) -> Outcome:
        if engine in self._dead:
            self._resolve(Outcome(request_id=request_id, error=self._dead[engine]))
        try:
            return await asyncio.wait_for(self._waiting[request_id], self.cfg.rollout.deadline_s + GRACE_S)
        except TimeoutError:
            error = f"{self.engines[engine].name} does not answer ({GRACE_S:g} s beyond rollout.deadline_s)"
            return Outcome(request_id=request_id, error=error, timed_out=True)
        finally:
            del self._waiting[request_id], self._owner[request_id]

    async def _cancel_all(self) -> None:
        """Ends every task of the loop, then the loop."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    # -- from outside the loop --

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _limit_s(self, samples: int) -> float:
        """How long the completions and, one after another in each reward process, the rewards of `samples` may take."""
        in_line = math.ceil(samples / self.cfg.reward.num_workers)
        return self.cfg.rollout.deadline_s + self.cfg.reward.deadline_s * in_line + 2 * GRACE_S

    def _wait(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        future = self._spawn(work)
        done, _ = wait([future, self._aborted], timeout_s, FIRST_COMPLETED)
        if future in done:
            return future.result()
        future.cancel()
        if self._aborted in done:
            self._aborted.result()
        raise RoleTimeout(
            f"phase rollout: engines and reward processes were not done in {timeout_s:g} s; "
            f"{len(self._waiting)} requests to the engines are open"
        )


def derive_seed(*parts: object) -> int:
    """A 31-bit seed from what names a sample uniquely, such as (purpose, run seed, position, sample)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def as_trajectory(completion: Completion) -> Trajectory:
    """One engine call as a trajectory: the prompt, then what was sampled."""
    prompt = len(completion.prompt_ids)
    return Trajectory(
        token_ids=completion.prompt_ids + completion.token_ids,
        prompt_len=prompt,
        action_mask=[False] * prompt + [True] * len(completion.token_ids),
        logprobs=[0.0] * prompt + completion.logprobs,
        versions=[-1] * prompt + completion.versions,
        truncated=completion.finish_reason == "length",
    )


def failed(prompt: Prompt, status: Status, error: str) -> Trajectory:
    """An episode without a completion: only its prompt, its status and its error."""
    count = len(prompt.token_ids)
    return Trajectory(
        token_ids=list(prompt.token_ids),
        prompt_len=count,
        action_mask=[False] * count,
        logprobs=[0.0] * count,
        versions=[-1] * count,
        status=status,
        error=error,
    )


def shuffle_rewards(groups: Sequence[Group], seed: int) -> None:
    """Permutes rewards over all valid trajectories, in place: the control in which nothing can be learnt."""
    valid = [t for g in groups for t in g.valid]
    rewards = [(t.reward, t.rewards) for t in valid]
    random.Random(seed).shuffle(rewards)
    for trajectory, (reward, named) in zip(valid, rewards, strict=True):
        trajectory.reward, trajectory.rewards = reward, named
