"""Episodes that are played again when they fail for what is nobody's fault in them, and failures told by their cause.

What fails is told by the boundary that it crossed. An environment, sandbox or engine that fails is nobody's fault in
the episode: it is played again with the same task and seed, and left out when that fails too. What the episode itself
has caused (an exception of the environment, a value that is no reward) is kept with its traceback and left out as well.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from conf.schema import EnvConfig
from rl.faults import RoleDied
from rl.types import Status, Trajectory
from rollout.engine import Outcome
from rollout.environment import Task
from rollout.played import Played, as_trajectory
from rollout.processes.env_faults import EnvBadValue, EnvDied, EnvFault, EnvRaised, EnvTimeout


class Host(Protocol):
    """Where the environment of one episode runs; see rollout.isolation."""

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any: ...

    async def close(self, deadline_s: float) -> None: ...


class Hosts(Protocol):
    """Gives hosts; see rollout.isolation."""

    async def open(self) -> Host: ...


class EpisodeFailed(Exception):
    """The episode is over, for a reason that is a status. `again`: whether it is worth playing once more."""

    def __init__(self, status: Status, error: str, again: bool):
        super().__init__(error)
        self.status, self.error, self.again = status, error, again


class Attempts:
    """All episodes of a run, each in a host of its own, with its deadline and its retries."""

    def __init__(self, env: EnvConfig, hosts: Hosts):
        self.env, self.hosts = env, hosts
        self._failures = 0  # of the environment, in a row

    def limit_s(self, episodes: int) -> float:
        """As rollout.single_turn.Player: in as many rounds as the limit on episodes at a time makes of them."""
        env = self.env
        rounds = -(-episodes // env.max_concurrent)
        return rounds * (1 + env.retries) * (env.episode_s + env.close_s)

    async def play(self, task: Task, act: Callable[[Played, Host], Awaitable[None]]) -> Trajectory:
        """What comes of `act`, in as many attempts as it takes. Raises RoleDied when env.max_failures episodes in a row
        have failed for their environment."""
        env = self.env
        for _attempt in range(1 + env.retries):
            played = Played(task=task)
            try:
                host = await self.hosts.open()
                try:
                    async with asyncio.timeout(env.episode_s):
                        await act(played, host)
                finally:
                    await self._close(played, host)
            except EpisodeFailed as failure:
                failed = failure
            except TimeoutError:
                what = (
                    f"the episode was not over in {env.episode_s:g} s (env.episode_s), at turn {played.tree.num_turns}"
                )
                failed = EpisodeFailed(Status.episode_timeout, what, again=False)
            except EnvFault as fault:
                failed = as_failure(fault)
            except Exception:  # one episode must not take the others with it
                failed = EpisodeFailed(Status.episode_failed, traceback.format_exc(), again=False)
            else:
                self._failures = 0
                return as_trajectory(played)
            self._note(failed)
            if not failed.again:
                break
        trajectory = as_trajectory(played)
        trajectory.status, trajectory.error = failed.status, failed.error
        return trajectory

    def _note(self, failed: EpisodeFailed) -> None:
        """Counts failures that are the environment's; too many in a row end the run."""
        of_environment = failed.again and failed.status.value.startswith("env")
        self._failures = self._failures + 1 if of_environment else 0
        if self._failures >= self.env.max_failures:
            raise RoleDied(
                f"phase rollout: environment {self.env._target_} failed {self._failures} times in a row "
                f"(env.max_failures), the last time: {failed.status.value}: {failed.error}"
            )

    async def _close(self, played: Played, host: Host) -> None:
        """Closes the environment, however the episode has ended. That it fails is noted and spoils nothing."""
        try:
            await host.close(self.env.close_s)
        except EnvFault as fault:
            played.transcript.append({"kind": "note", "text": f"close: {fault}"})


def as_failure(fault: EnvFault) -> EpisodeFailed:
    """The status of a fault, and whether the episode is worth playing again."""
    match fault:
        case EnvRaised():
            return EpisodeFailed(Status.env_failed, fault.traceback, again=fault.is_infrastructure)
        case EnvTimeout():
            return EpisodeFailed(Status.env_timeout, str(fault), again=True)
        case EnvDied():
            return EpisodeFailed(Status.env_died, fault.how, again=True)
        case EnvBadValue():
            return EpisodeFailed(Status.env_bad_value, fault.what, again=False)
    raise fault


def engine_failure(outcome: Outcome) -> EpisodeFailed:
    """Of an outcome without a completion."""
    status = Status.engine_timeout if outcome.timed_out else Status.engine_failed
    return EpisodeFailed(status, outcome.error, again=not outcome.timed_out)


def require_each_named(played: Played) -> None:
    """Raises EpisodeFailed when rewards were given by name, and not to each of those who acted."""
    if isinstance(played.outcome, dict):
        require_rewards(played.outcome, {segment.agent for segment in played.tree.segments if segment.turn >= 0})


def require_rewards(named: Iterable[str], agents: set[str]) -> None:
    """Raises EpisodeFailed when rewards are given for those `named`, and not for each of `agents`, who acted."""
    if missing := agents - set(named):
        given, acted = ", ".join(sorted(named)) or "nobody", ", ".join(sorted(missing))
        what = f"rewards were given for {given}, and none for {acted}, who acted"
        raise EpisodeFailed(Status.env_bad_value, what, again=False)


def require_same_ids(seen: Sequence[int], held: Sequence[int]) -> None:
    """Raises EpisodeFailed unless the engine saw the ids that the episode holds."""
    if seen != held:
        place = next((n for n, (a, b) in enumerate(zip(seen, held, strict=False)) if a != b), min(len(seen), len(held)))
        what = f"the engine saw other ids than the conversation holds, from token {place} on"
        raise EpisodeFailed(Status.tokens_mismatch, what, again=False)
