"""Environments, most of which cannot work, in a file that is quick to import: each launch has a process do so."""

from typing import Any

from rollout.environment import Action, StepResult, Task
from rollout.tools import ToolEnv, tool


class Plain:
    """Makes tasks, has no oracle."""

    def __init__(self, length: int = 1):
        self.length = length

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        return {"text": f"{split}{index}" * kwargs.get("length", 1)}

    def reset(self, task: Task) -> Any:
        return task.data["text"]

    def step(self, action: Action) -> StepResult:
        return StepResult(terminated=True, reward=1.0)

    def close(self) -> None:
        return None


class NoTasks:
    def reset(self, task: Task) -> Any:
        return "x"

    def step(self, action: Action) -> StepResult:
        return StepResult(terminated=True)


class NoStep:
    def reset(self, task: Task) -> Any:
        return "x"


class NumberForText(Plain):
    def reset(self, task: Task) -> Any:
        return 7


class SetForTask(Plain):
    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        return {"text": {split}}


class ExitForTask(Plain):
    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        raise SystemExit(3)


class ObjectForTask(Plain):
    def make_task(self, split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"text": "x"}


class ChanceForTask(Plain):
    number = 0

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        ChanceForTask.number += 1
        return {"text": str(ChanceForTask.number)}


class Tools(ToolEnv):
    @staticmethod
    def make_task(split: str, seed: int, index: int) -> dict[str, Any]:
        return {}

    def reset(self, task: Task) -> str:
        return "look"

    @tool
    def look(self, where: str) -> str:
        """Looks somewhere."""
        return where
