"""Environments for benchmarks: one that answers at once, and one that breaks in every way that a task asks for.

Imports nothing heavy: processes of their own run them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rollout.environment import Action, EnvironmentFailure, Message, Observation, StepResult, Task

HANG_S = 3600.0
LEFT_S = 20.0  # how long threads and processes live that an episode leaves behind
LARGE_BYTES = 50_000_000
FLOOD_LINES = 2000


class Talk:
    """Answers at once, with words that no other turn had, for as many turns as the task says."""

    def __init__(self, words: int = 12):
        self.words = words

    def reset(self, task: Task) -> Observation:
        self.turns, self.played, self.number = int(task.data["turns"]), 0, task.index
        return Observation(messages=[self._say()])

    def step(self, action: Action) -> StepResult:
        self.played += 1
        done = self.played >= self.turns
        return StepResult(messages=[self._say()], reward=1.0, terminated=done, info={"length": len(action.text)})

    def score(self) -> float:
        return 1.0

    def close(self) -> None:
        return None

    def _say(self) -> Message:
        return user(f"{self.number} {self.played}" + " and" * self.words)


class Faulty:
    """Has the fault that its task names ("" for none), in turn `turn`, in `reset` (turn -1) or in `score` (turn -2)."""

    def reset(self, task: Task) -> Any:
        self.task, self.turn = task.data, 0
        if self.task["turn"] == -1:
            return self._break(Observation(messages=[user("go")]))
        return Observation(messages=[user("go")])

    def step(self, action: Action) -> Any:
        self.turn += 1
        if self.task["fault"] == "malformed_call" and not any(call.error for call in action.tool_calls):
            raise AssertionError(f"a call that cannot be read was not told of: {action}")
        done = self.turn >= self.task["turns"]
        result = StepResult(messages=[user(f"turn {self.turn}")], reward=0.5, terminated=done)
        return self._break(result) if self.turn - 1 == self.task["turn"] else result

    def score(self) -> Any:
        return self._break(1.0) if self.task["turn"] == -2 else 1.0

    def close(self) -> None:
        if self.task["fault"] == "close_raises":
            raise RuntimeError("a close that fails")

    def _break(self, value: Any) -> Any:
        """What is returned in place of `value`, if anything is."""
        fault = self.task["fault"]
        match fault:
            case "raises":
                raise KeyError("a bug of the environment")
            case "exits":
                sys.exit(3)
            case "failure":
                raise EnvironmentFailure("the service is down")
            case "failure_once":
                if not already(Path(self.task["mark"])):
                    raise EnvironmentFailure("the service is down for a moment")
            case "dies_once":
                if not already(Path(self.task["mark"])):
                    os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(HANG_S)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "ends":
                os._exit(7)
            case "large":
                return large(value)
            case "prints":
                flood()
            case "leaves_threads":
                for daemon in (True, False):
                    threading.Thread(target=time.sleep, args=(LEFT_S,), daemon=daemon).start()
            case "leaves_process":
                subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({LEFT_S})"])
            case "nan" | "none" | "text":
                return with_reward(value, {"nan": float("nan"), "none": None, "text": "much"}[fault])
            case "nothing":
                return None
        return value


def large(value: Any) -> Any:
    """As `value`, with words that are longer than any answer may be."""
    if isinstance(value, Observation):
        return Observation(messages=[user("x" * LARGE_BYTES)])
    return StepResult(messages=[user("x" * LARGE_BYTES)])


def with_reward(value: Any, reward: Any) -> Any:
    """A score, or a step's result, that is no number."""
    return StepResult(messages=value.messages, reward=reward) if isinstance(value, StepResult) else reward


def flood() -> None:
    for number in range(FLOOD_LINES):
        print(f"line {number} of far too many {'.' * 60}")
        print("\x1b[31m\0\r", end="", file=sys.stderr)


def already(mark: Path) -> bool:
    """Whether this was asked before, of the same file."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def user(text: str) -> Message:
    return {"role": "user", "content": text}
