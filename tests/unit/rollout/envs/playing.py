"""Plays episodes of the built-in environments: with their oracle, or with given texts."""

import asyncio
import inspect
from typing import Any

from rollout.environment import Observation, StepResult, Task
from rollout.tool_calls import parse


def awaited(value: Any) -> Any:
    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def begin(env: Any, data: dict[str, Any], seed: int = 0) -> Observation:
    observation = awaited(env.reset(Task(index=0, seed=seed, data=data)))
    assert observation.messages and all(message["role"] and message["content"] for message in observation.messages)
    return observation


def act(env: Any, text: str, format: str = "hermes") -> StepResult:
    result = awaited(env.step(parse(text, format)))
    assert all(isinstance(message["content"], str) and message["role"] for message in result.messages)
    return result


def play(env: Any, data: dict[str, Any], texts: list[str] | None = None) -> list[StepResult]:
    """Until the episode ends, or the texts do. Without texts the oracle plays."""
    begin(env, data)
    results: list[StepResult] = []
    while not (results and (results[-1].terminated or results[-1].truncated)):
        if texts is not None and len(results) == len(texts):
            break
        results.append(act(env, env.oracle() if texts is None else texts[len(results)]))
    return results


def total(results: list[StepResult]) -> float:
    return sum(result.reward for result in results)
