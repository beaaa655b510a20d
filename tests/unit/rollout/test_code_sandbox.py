"""Programming tasks: solutions pass, tampering does not, and nothing that is hidden shows."""

import asyncio
import json
from typing import Any

import pytest

from conf.choices import Isolation
from conf.errors import ConfigError
from rollout import sandbox
from rollout.environment import Action, EnvironmentFailure, StepResult, Task
from rollout.envs.code_sandbox import CodeSandbox, same
from rollout.envs.code_tasks import SPLITS, TEMPLATES, generate
from rollout.isolation import EnvRaised, Hosts

TARGET = "rollout.envs.code_sandbox.CodeSandbox"


def answer(code: str) -> Action:
    text = f"Here it is.\n```python\n{code}\n```\n"
    return Action(text=text, content=text)


def begun(**kwargs: Any) -> CodeSandbox:
    environment = CodeSandbox(**kwargs)
    environment.reset(Task(index=0, seed=0, data=CodeSandbox.make_task("train", 0, 0)))
    return environment


def data_of(template: str) -> dict:
    return next(
        data for data in (generate("train", 1, index, 8, 2) for index in range(200)) if data["name"] == template
    )


def attempt(code: str) -> StepResult:
    """One turn, the only one, on a task to combine two integers."""
    environment = CodeSandbox(max_turns=1)
    environment.reset(Task(index=0, seed=0, data=data_of("combine")))
    return environment.step(answer(code))


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_solution_of_every_template_passes(template: object) -> None:
    names = {"multiples": "total", "rotation": "rotate", "long_words": "count_words", "shift": "encode"}
    names |= {"window": "best_window", "runs": "runs", "pairs": "combine"}
    environment = CodeSandbox()
    environment.reset(Task(index=0, seed=0, data=data_of(names[template.__name__])))  # type: ignore[attr-defined]
    text = environment.oracle()
    result = environment.step(Action(text=text, content=text))
    assert result.reward == 1.0 and result.terminated and result.messages == []
    assert result.info == {"tests_passed": 1.0, "solved": 1.0, "answered": 1.0}


def test_tasks_are_pure_json_and_differ_between_seeds_and_splits() -> None:
    kwargs = {"num_tests": 5, "num_examples": 1, "max_turns": 2, "all_or_nothing": True}
    task = CodeSandbox.make_task("train", 3, 4, **kwargs)
    assert task == CodeSandbox.make_task("train", 3, 4, **kwargs) == json.loads(json.dumps(task))
    assert len(task["tests"]) == 5 and len(task["examples"]) == 1
    texts = {split: {generate(split, seed, i, 1, 0)["text"] for seed in (0, 1) for i in range(100)} for split in SPLITS}
    assert not texts["eval"] & (texts["train"] | texts["sft"]) and len(texts["train"]) > 50
    with pytest.raises(ConfigError, match="split='test'"):
        CodeSandbox.make_task("test", 0, 0)


def test_a_wrong_answer_gets_feedback_without_what_is_hidden_and_another_turn() -> None:
    data = data_of("combine")
    data["tests"] = [{"args": [70001, 70002], "expected": 123454321}, {"args": [0, 0], "expected": 0}]
    environment = CodeSandbox(max_turns=3)
    first = environment.reset(Task(index=0, seed=0, data=data)).messages[0]["content"]
    assert "123454321" not in first and "combine(a, b)" in first and repr(data["examples"][0]["expected"]) in first
    step = environment.step(answer("def combine(a, b):\n    return 0"))
    said = step.messages[0]["content"]
    assert not step.terminated and step.reward == 0.0 and step.info["tests_passed"] == 0.5
    assert said.startswith("1 of 2 hidden tests passed.") and "123454321" not in said and "7000" not in said
    assert "returned 0 (int), not" in said
    step = environment.step(answer("def combine(a, b):\n    raise KeyError('gone')"))
    assert "Error: KeyError: 'gone'" in step.messages[0]["content"] and step.reward == 0.0
    step = environment.step(answer("def combine(a, b):\n    return 0"))
    assert step.terminated and step.reward == 0.5 and step.messages == []


def test_all_or_nothing_gives_no_share() -> None:
    code = (
        "def combine(a, b):\n    return 0 if (a, b) == (1, 1) else "
        + data_of("combine")["solution"].split("return ")[1]
    )
    data = data_of("combine") | {"tests": [{"args": [1, 1], "expected": 1}, {"args": [0, 0], "expected": 0}]}
    for all_or_nothing, reward in ((False, 0.5), (True, 0.0)):
        environment = CodeSandbox(max_turns=1, all_or_nothing=all_or_nothing)
        environment.reset(Task(index=0, seed=0, data=data))
        assert environment.step(answer(code)).reward == reward


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def combine(a, b):\n    import os\n    os._exit(0)",
        "def combine(a, b):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
        # an object that equals everything
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def combine(a, b):\n    return Any(7)",
        "class Any:\n    def __eq__(self, other): return True\ndef combine(a, b):\n    return Any()",
        # what judges, as the answer sees it
        "import builtins, json, operator\njson.dumps = lambda *a, **k: '[0, true, \"passed\"]'\n"
        "builtins.all = builtins.any = lambda *a: True\noperator.eq = lambda *a: True\n"
        "def combine(a, b):\n    return None",
        "import sys\nmain = sys.modules['__main__']\nmain.tell = lambda *a: None\n"
        "main.call = lambda number, act: main.tell(number, True, True)\ndef combine(a, b):\n    return True",
        # results that are printed, on every descriptor
        "import os\nfor fd in range(1, 20):\n    for i in range(20):\n"
        "        try: os.write(fd, b'[%d, true, 0]\\n' % i)\n        except OSError: pass\n"
        "print('8 of 8 hidden tests passed')\ndef combine(a, b):\n    return 10**9",
        # what is hidden, wherever the answer can look
        "import gc, sys\ndef combine(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for scope in (frame.f_locals, frame.f_globals):\n            for value in list(scope.values()):\n"
        "                if isinstance(value, dict) and 'tests' in value: return value['tests'][0]['expected']\n"
        "        frame = frame.f_back\n    for value in gc.get_objects():\n"
        "        if isinstance(value, dict) and 'expected' in value: return value['expected']\n    return 'nothing'",
        "def combine(a, b):\n    return float('nan')",
        "def combine(a, b):\n    return '\\ud800' * 10**7",
        "nothing here",
        "def other(a, b):\n    return 0",
    ],
)
def test_tampering_earns_nothing(code: str) -> None:
    data = data_of("combine")
    data["tests"] = [case for case in data["tests"] if case["expected"] != 0]
    environment = CodeSandbox(max_turns=1)
    environment.reset(Task(index=0, seed=0, data=data))
    result = environment.step(answer(code))
    assert result.reward == 0.0 and result.terminated, result


def test_an_endless_loop_costs_its_time_only() -> None:
    for loop, kwargs, said in (
        ("pass", {"cpu_s": 1, "wall_s": 60}, "it computed for longer than 1 s"),
        ("time.sleep(9)", {"wall_s": 0.5}, "it took longer than 0.5 s"),
    ):
        environment = begun(**kwargs)
        name = environment.oracle().split("(")[0].split("def ")[1]
        step = environment.step(answer(f"import time\ndef {name}(*args):\n    while True: {loop}"))
        assert step.reward == 0.0 and not step.terminated and f"Error: {said}" in step.messages[0]["content"]


def test_what_was_right_before_an_exit_counts() -> None:
    body = data_of("combine")["solution"].split("return ")[1]
    code = (
        f"n = 0\ndef combine(a, b):\n    global n\n    n += 1\n    if n > 6: import os; os._exit(0)\n    return {body}"
    )
    assert attempt(code).reward == 0.5


def test_an_answer_without_a_block_is_told_so() -> None:
    step = begun().step(Action(text="I do not know", content="I do not know"))
    assert "no ```python block" in step.messages[0]["content"] and step.info["answered"] == 0.0


def test_no_sandbox_is_a_failure_of_the_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ROOT", "/no/such/folder")
    with pytest.raises(EnvironmentFailure, match="no sandbox: the process around the sandbox ended"):
        begun().step(answer("def f(): pass"))


def test_equality_is_strict() -> None:
    assert same([1, {"a": None}], [1, {"a": None}])
    assert not any([same(True, 1), same(1, 1.0), same([1], [True]), same({"a": 1}, {"a": 1, "b": 2}), same("1", 1)])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.kwargs.num_tests=0: must be >= 1"):
        CodeSandbox(num_tests=0)


@pytest.mark.parametrize("isolation", [Isolation.thread, Isolation.process, Isolation.sandbox])
def test_an_episode_in_isolation(isolation: Isolation) -> None:
    async def scenario(hosts: Hosts) -> StepResult:
        host = await hosts.open()
        data = CodeSandbox.make_task("train", 0, 0)
        await host.call("reset", Task(index=0, seed=0, data=data), deadline_s=20)
        state = await host.call("snapshot", deadline_s=20)
        await host.call("restore", state, deadline_s=20)
        text = await host.call("oracle", deadline_s=20)
        try:
            step: StepResult = await host.call("step", Action(text=text, content=text), deadline_s=20)
        finally:
            await host.close(5)
        return step

    hosts = Hosts(TARGET, {}, isolation, 1)
    try:
        if isolation is Isolation.sandbox:  # there can be none within another, which is nobody's fault in the episode
            with pytest.raises(EnvRaised, match="no sandbox") as caught:
                asyncio.run(asyncio.wait_for(scenario(hosts), 60))
            assert caught.value.is_infrastructure
        else:
            assert asyncio.run(asyncio.wait_for(scenario(hosts), 60)).reward == 1.0
    finally:
        hosts.close()
