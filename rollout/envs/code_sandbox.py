"""Programming tasks with hidden tests: the answer runs in a sandbox, and is judged outside of it.

Into the sandbox go the answer and the arguments of the tests, never the results that are wanted. Out of it come lines
of JSON, which are compared here: whatever the answer does to its process, it can only say what the results shall be.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from conf.errors import ConfigError
from rollout.environment import Action, EnvironmentFailure, Observation, StepResult, Task
from rollout.envs.code_tasks import generate
from rollout.processes.env_values import shown
from rollout.sandbox import Limits, Reason, run_code

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
ERROR_CHARS = 300
# Runs within the sandbox. What the answer prints goes nowhere.
CALLER = """
import json, os, sys
channel, nowhere = os.dup(1), os.open("/dev/null", os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
request = json.loads(sys.stdin.read())
def tell(*line):
    text = json.dumps(line, allow_nan=False).encode() + b"\\n"
    while text:
        text = text[os.write(channel, text):]
def call(number, act):
    try:
        value = act()
        tell(number, True, value)
    except BaseException as error:
        tell(number, False, f"{type(error).__name__}: {error}"[:1000])
scope = {"__name__": "answer"}
try:
    exec(compile(request["code"], "answer.py", "exec"), scope)
    function = scope[request["name"]]
except BaseException as error:
    tell(-1, False, f"{type(error).__name__}: {error}"[:1000])
else:
    for number, args in enumerate(request["calls"]):
        call(number, lambda: function(*args))
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of an answer: for each case whether it passed, and what went wrong in the first of those that did not."""

    passed: list[bool]
    error: str = ""
    values: dict[int, Any] = field(default_factory=dict)  # what came back, by case


class CodeSandbox:
    """Write a function; hidden tests judge it. After an answer that fails some, another may be given.

    The reward comes with the last turn: the share of hidden tests passed, or with all_or_nothing 1 when all are.
    Its steps block for up to wall_s: not for env.isolation=inline. Within a sandbox there can be no other. What an
    answer computes is bounded by cpu_s, so that a busy machine fails none; wall_s is for those that wait.
    """

    def __init__(
        self,
        num_tests: int = 8,
        num_examples: int = 2,
        max_turns: int = 3,
        all_or_nothing: bool = False,
        cpu_s: int = 5,
        wall_s: float = 20.0,
        memory_bytes: int = 256 << 20,
    ) -> None:
        for name, value, least in (
            ("num_tests", num_tests, 1),
            ("num_examples", num_examples, 0),
            ("max_turns", max_turns, 1),
        ):
            if value < least:
                raise ConfigError(f"env.kwargs.{name}={value}: must be >= {least}")
        self._max_turns = max_turns
        self._all_or_nothing = all_or_nothing
        self._limits = Limits(
            wall_s=wall_s, cpu_s=cpu_s, memory_bytes=memory_bytes, num_processes=16, output_bytes=256 << 10
        )
        self._data: dict[str, Any] = {}
        self._turn = 0

    @staticmethod
    def make_task(
        split: str, seed: int, index: int, num_tests: int = 8, num_examples: int = 2, **_: Any
    ) -> dict[str, Any]:
        """The record of one task, the same for the same arguments; others of the environment do not matter to it."""
        return generate(split, seed, index, num_tests, num_examples)

    def reset(self, task: Task) -> Observation:
        self._data, self._turn = task.data, 0
        return Observation(messages=[{"role": "user", "content": prompt(task.data, self._max_turns)}])

    def step(self, action: Action) -> StepResult:
        self._turn += 1
        examples, tests = self._data["examples"], self._data["tests"]
        code = last_block(action.content)
        if code is None:
            passed, feedback = 0, "There is no ```python block in your answer."
        else:
            verdict = judge(code, self._data["name"], [*examples, *tests], self._limits)
            passed = sum(verdict.passed[len(examples) :])
            feedback = explain(verdict, examples, passed, len(tests), self._data["name"])
        share = passed / len(tests)
        solved = passed == len(tests)
        last = solved or self._turn >= self._max_turns
        reward = (float(solved) if self._all_or_nothing else share) if last else 0.0
        return StepResult(
            messages=[] if last else [{"role": "user", "content": feedback}],
            reward=reward,
            terminated=last,
            info={"tests_passed": share, "solved": float(solved), "answered": float(code is not None)},
        )

    def oracle(self) -> str:
        return f"```python\n{self._data['solution']}\n```"

    def snapshot(self) -> bytes:
        return json.dumps([self._data, self._turn]).encode()

    def restore(self, state: bytes) -> None:
        self._data, self._turn = json.loads(state)

    def close(self) -> None:
        """Nothing outlives a step."""


def prompt(data: dict[str, Any], max_turns: int) -> str:
    examples = [f"{show_call(data['name'], case['args'])} == {case['expected']!r}" for case in data["examples"]]
    shown_examples = ["", "Examples:", *examples] if examples else []
    attempts = f" You have {max_turns} attempts." if max_turns > 1 else ""
    return "\n".join(
        [
            f"Write a Python function `{data['function']}` that {data['text']}.",
            *shown_examples,
            "",
            f"Answer with the function in one ```python block. Hidden tests will check it.{attempts}",
        ]
    )


def show_call(name: str, args: list[Any]) -> str:
    return f"{name}({', '.join(map(repr, args))})"


def last_block(text: str) -> str | None:
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else None


def judge(code: str, name: str, cases: list[dict[str, Any]], limits: Limits) -> Verdict:
    """Calls the function `name` of the answer for each case, in one process in the sandbox, and compares here."""
    request = {"code": code, "name": name, "calls": [case["args"] for case in cases]}
    try:
        result = run_code(CALLER, json.dumps(request), limits)
    except (ConfigError, OSError) as error:
        raise EnvironmentFailure(f"no sandbox: {error}") from error
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    for line in result.stdout.splitlines():
        try:
            number, well, value = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if type(number) is int and number not in values and number not in errors:
            if well is True:
                values[number] = value
            else:
                errors[number] = " ".join(str(value)[:ERROR_CHARS].split())
    passed = [i in values and same(values[i], case["expected"]) for i, case in enumerate(cases)]
    wrong = next((errors[i] for i in sorted(errors)), "")
    if not wrong and len(values) < len(cases):
        wrong = {
            Reason.wall_s: f"it took longer than {limits.wall_s:g} s",
            Reason.cpu_s: f"it computed for longer than {limits.cpu_s} s",
            Reason.memory_bytes: f"it took more memory than {limits.memory_bytes} bytes",
            Reason.output_bytes: "its results are too long",
        }.get(result.reason, "it ended its process")
    return Verdict(passed=passed, error=wrong, values=values)


def same(found: Any, expected: Any) -> bool:
    """Equal in value and type, at every depth; both come from JSON or could."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    return bool(found == expected)


def explain(verdict: Verdict, examples: list[dict[str, Any]], passed: int, num_tests: int, name: str) -> str:
    """What the model is told: of the examples all, of the hidden tests how many passed and the kind of error."""
    lines = [f"{passed} of {num_tests} hidden tests passed."]
    for i, case in enumerate(examples):
        if not verdict.passed[i] and i in verdict.values:
            lines.append(
                f"{show_call(name, case['args'])} returned {shown(verdict.values[i])}, not {case['expected']!r}."
            )
    if verdict.error:
        lines.append(f"Error: {verdict.error}")
    lines.append("Correct the function and answer with all of it.")
    return "\n".join(lines)
