"""The pool of rollout engines: asynchronous inside, in prompt order outside.

A loop in a thread of its own plays the episodes of prompts as far ahead as `max_lag` allows. Lag is a number here, not
a second trainer.
"""

import asyncio
import dataclasses
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from conf.choices import Advantage
from conf.schema import Config
from rl.faults import RoleTimeout
from rl.prompts import PromptStream
from rl.types import Group, Prompt, Sampling, Trajectory
from rollout.router import GRACE_S, EngineClient, Router
from rollout.seeds import derive_seed
from rollout.single_turn import Player


class RolloutPool:
    """Implements rl.roles.Rollouts over engines and a player of episodes."""

    def __init__(
        self,
        cfg: Config,
        engines: Sequence[EngineClient],
        stream: PromptStream,
        player: Player,
        stop_token_ids: tuple[int, ...],
        is_settled: Callable[[int, int], bool] = lambda _index, _epoch: False,
    ):
        self.cfg, self.stream, self.player = cfg, stream, player
        self.is_settled = is_settled
        self.sampling = Sampling(
            max_tokens=cfg.rollout.max_tokens, temperature=cfg.rollout.temperature, stop_token_ids=stop_token_ids
        )
        self._groups: deque[asyncio.Task[Group]] = deque()
        self._version = self._position = 0
        self._aborted: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self.router = Router(cfg.rollout, engines, self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-pool", daemon=True)
        self._thread.start()

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
        episodes = open_groups * (self.cfg.samples_per_prompt + greedy)
        groups = self._wait(self._take(count), self.player.limit_s(episodes) + 2 * GRACE_S)
        if self.cfg.reward.shuffle:
            shuffle_rewards(groups, seed=self.cfg.seed * 1_000_003 + groups[0].position)
        return groups

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> list[list[Trajectory]]:
        """As rl.roles.Rollouts; request seeds derive from `sampling.seed`, the prompt and the sample."""
        return self._wait(
            self._sample(prompts, sampling, samples), self.player.limit_s(len(prompts) * samples) + 2 * GRACE_S
        )

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
        self.router.revive()
        for _ in range(count):
            position = self._position = self._unsettled(self._position)
            self._position += 1
            self._groups.append(asyncio.create_task(self._group(position, self._version)))
        await self.router.flush()

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
        self.router.require_living()
        return groups

    async def _sample(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> list[list[Trajectory]]:
        self.router.revive()
        seeds = [
            [derive_seed("evaluate", sampling.seed or 0, prompt.index, k) for k in range(samples)] for prompt in prompts
        ]
        rows = await asyncio.gather(
            *(
                asyncio.gather(*(self._play(prompt, sampling, seed) for seed in row))
                for prompt, row in zip(prompts, seeds, strict=True)
            )
        )
        self.router.require_living()
        return [list(row) for row in rows]

    async def _group(self, position: int, version: int) -> Group:
        prompt, samples = self.stream.at(position), self.cfg.samples_per_prompt
        seeds = [derive_seed("train", self.cfg.seed, position, sample) for sample in range(samples)]
        plays = [self._play(prompt, self.sampling, seed) for seed in seeds]
        if self.cfg.algo.advantage is Advantage.remax:
            plays.append(self._play(prompt, dataclasses.replace(self.sampling, temperature=0.0), 0))
        trajectories = list(await asyncio.gather(*plays))
        baseline = trajectories.pop() if len(trajectories) > samples else None
        if baseline is not None and not baseline.valid:  # without it the others have no advantage
            for trajectory in trajectories:
                trajectory.status, trajectory.error = baseline.status, f"the greedy baseline failed: {baseline.error}"
        return Group(position=position, prompt=prompt, trajectories=trajectories, version=version, baseline=baseline)

    async def _play(self, prompt: Prompt, sampling: Sampling, seed: int) -> Trajectory:
        lane = self.router.lane()
        try:
            return await self.player.play(lane, prompt, sampling, seed)
        finally:
            lane.close()

    async def _cancel_all(self) -> None:
        """Ends every task of the loop, then the loop."""
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # those that end may have begun others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    # -- from outside the loop --

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        future = self._spawn(work)
        done, _ = wait([future, self._aborted], timeout_s, FIRST_COMPLETED)
        if future in done:
            return future.result()
        future.cancel()
        if self._aborted in done:
            self._aborted.result()
        raise RoleTimeout(
            f"phase rollout: the episodes were not done in {timeout_s:g} s; "
            f"{self.router.num_open} requests to the engines are open"
        )


def shuffle_rewards(groups: Sequence[Group], seed: int) -> None:
    """Permutes what valid episodes earned, in place: the control in which nothing can be learnt. What was earned at
    turns is earned at the end then, and agents exchange with those of their name."""
    earned: dict[str, list[list[Trajectory]]] = {}  # the rows of each episode, by agent
    for trajectory in (t for g in groups for t in g.valid):
        rows: dict[str, list[Trajectory]] = {}
        for row in trajectory.rows:
            rows.setdefault(row.agent, []).append(row)
        for agent, own in rows.items():
            earned.setdefault(agent, []).append(own)
    draw = random.Random(seed)
    for episodes in earned.values():
        rewards = [(own[0].total, own[0].rewards) for own in episodes]
        draw.shuffle(rewards)
        for own, (reward, named) in zip(episodes, rewards, strict=True):
            for row in own:
                row.reward, row.rewards, row.token_rewards = reward, named, None
