"""Plays an environment in a process of its own, as a run does."""

import asyncio
from collections.abc import Sequence
from typing import Any

from conf.choices import Isolation
from conf.imports import import_function
from rollout.environment import Observation, StepResult, Task
from rollout.isolation import Hosts
from rollout.tool_calls import parse


def play_hosted(
    target: str,
    kwargs: dict[str, Any],
    data: dict[str, Any],
    texts: Sequence[str] | None = None,
    isolation: Isolation = Isolation.process,
) -> tuple[Observation, list[StepResult], Any]:
    """One episode, by texts or else by the oracle: how it began, its steps, and its score where it has the method."""

    async def episode(hosts: Hosts) -> tuple[Observation, list[StepResult], Any]:
        host = await hosts.open()
        try:
            begun = await host.call("reset", Task(index=0, seed=3, data=data), deadline_s=60)
            steps: list[StepResult] = []
            while not (steps and (steps[-1].terminated or steps[-1].truncated)):
                text = texts[len(steps)] if texts is not None else await host.call("oracle", deadline_s=30)
                steps.append(await host.call("step", parse(text, "hermes"), deadline_s=30))
            return begun, steps, await host.call("score", deadline_s=30) if scored else None
        finally:
            await host.close(10)

    scored = hasattr(import_function(target, "target"), "score")
    hosts = Hosts(target, kwargs, isolation, 1)
    try:
        return asyncio.run(episode(hosts))
    finally:
        hosts.close()
