"""Tasksets of verifiers: rewards are the package's own, and what only its harnesses can run is refused."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.choices import Isolation
from conf.errors import ConfigError
from rollout.adapters.verifiers import Verifiers, load_records
from rollout.environment import Task
from rollout.isolation import Hosts
from rollout.tool_calls import parse
from tests.unit.rollout.envs.playing import act, begin

TASKSET = """
import itertools
import verifiers.v1 as vf

__all__ = ["Sums"]

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)
    @vf.reward(weight=0.25)
    async def short(self, task, trace):
        return {"brief": float(len(trace.last_reply) <= 4 and not trace.is_truncated)}
    @vf.metric
    async def thought(self, trace):
        return float(bool(trace.assistant_messages[-1].reasoning_content))

class SumConfig(vf.TasksetConfig):
    size: int = 40
    first: int = 0

class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + self.config.size):
            data = SumData(prompt=f"{n} + 1?", system_prompt="Reply with the number.", answer=str(n + 1))
            yield SumTask(data, self.config.task)

class Endless(Sums):
    INFINITE = True
    def load(self):
        for n in itertools.count():
            parts = [vf.TextContentPart(text=f"{n} + "), vf.TextContentPart(text="1?")]
            yield SumTask(SumData(prompt=[vf.UserMessage(content=parts)], answer=str(n + 1)))

class InBox(SumTask):
    NEEDS_CONTAINER = True
class Prepared(SumTask):
    async def setup(self, trace, runtime):
        pass
class Ran(SumTask):
    @vf.reward
    async def ran(self, trace, runtime):
        return 1.0
class Unjudged(vf.Task[SumData]):
    pass
class Odd(Sums):
    kind, data = SumTask, {"prompt": "?"}
    def load(self):
        yield self.kind(SumData(answer="", **self.data))
class Boxed(Odd):
    kind = InBox
class Setup(Odd):
    kind = Prepared
class Runtime(Odd):
    kind = Ran
class NoReward(Odd):
    kind = Unjudged
class Opened(Odd):
    data = {}
class Pictured(Odd):
    picture = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="data:,"))
    data = {"prompt": [vf.UserMessage(content=[picture])]}
class Served(Sums):
    @classmethod
    def toolsets(cls, config):
        return ["a tool server"]
"""


@pytest.fixture(autouse=True, scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("verifiers")
    (folder / "sums_taskset.py").write_text(TASKSET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def test_reward_and_metrics_are_those_of_the_task() -> None:
    env = Verifiers("sums-taskset")
    data = Verifiers.make_task("train", 0, 0, id="sums-taskset")
    answer = data["task"]["answer"]
    first = begin(env, data)
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert first.messages[1]["content"] == data["task"]["prompt"]
    right = act(env, answer)
    assert (right.reward, right.terminated) == (1.0, True)
    assert right.info == {"right": 0.75, "brief": 0.25, "thought": 0.0}
    for text, reward, thought in (
        (f"<think>\nIt is {answer}.\n</think>\n{answer}", 1.0, 1.0),
        ("nothing of the kind", 0.0, 0.0),
        ("x", 0.25, 0.0),
    ):
        begin(env, data)
        result = act(env, text)
        assert (result.reward, result.info["thought"]) == (reward, thought)
    begin(env, data)
    cut = parse(answer, "none", truncated=True)
    assert asyncio.run(env.step(cut)).reward == 0.75


def test_tasks_are_split_by_what_they_are_or_by_config() -> None:
    def made(split: str, **kwargs: Any) -> set[str]:
        return {Verifiers.make_task(split, 0, i, id="sums-taskset", **kwargs)["task"]["prompt"] for i in range(60)}

    train, held_out = made("train"), made("eval")
    assert train and held_out and not train & held_out and len(train | held_out) == 40
    assert made("eval", eval_config={"first": 100, "size": 3}) == {"100 + 1?", "101 + 1?", "102 + 1?"}
    one, two = (Verifiers.make_task("train", seed, 1, id="sums-taskset") for seed in (0, 1))
    assert one == Verifiers.make_task("train", 0, 1, id="sums-taskset") and one != two


def test_infinite_taskset_needs_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"env.kwargs.limit=0: .* infinite"):
        Verifiers("sums_taskset.Endless")
    env = Verifiers("sums_taskset.Endless", limit=5)
    data = {"task": load_records("sums_taskset.Endless", "{}", 5)[4]}
    assert begin(env, data).messages == [{"role": "user", "content": "4 + \n1?"}]
    assert act(env, "5").reward == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Boxed", "runs in a container"),
        ("Setup", "has a setup of its own"),
        ("Runtime", "its reward ran needs a runtime"),
        ("NoReward", "has no reward"),
        ("Opened", "a simulated user opens it"),
        ("Pictured", "holds images"),
        ("Served", "it has tool servers"),
    ],
)
def test_what_only_the_package_runs_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Verifiers.make_task("train", 0, 0, id=f"sums_taskset.{name}")


def test_judges_are_refused() -> None:
    judges = {"task": {"judges": [{"id": "reference"}]}}
    with pytest.raises(ConfigError, match="judged by a model over the network"):
        Verifiers.make_task("train", 0, 0, id="sums-taskset", config=judges)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"id": "no-such-taskset"}, "env.kwargs.id=no-such-taskset: .* not found"),
        ({"id": "sums_taskset.Sum"}, "no 'Sum'; did you mean 'Sums'"),
        ({"id": "sums_taskset.SumTask"}, "is no Taskset of verifiers.v1"),
        ({"id": "sums-taskset", "config": {"sise": 3}}, "sise"),
        ({"id": "sums-taskset", "eval_config": {"task": {}}}, "env.kwargs.eval_config.task"),
        ({"id": "sums-taskset", "limit": -1}, "env.kwargs.limit=-1: must be >= 1"),
    ],
)
def test_bad_arguments_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Verifiers(**kwargs)


def test_episode_in_a_process_begins_and_is_judged_as_here() -> None:
    data = Verifiers.make_task("train", 0, 2, id="sums-taskset")
    here = begin(Verifiers("sums-taskset"), data)
    hosts = Hosts("rollout.adapters.verifiers.Verifiers", {"id": "sums-taskset"}, Isolation.process, 1)

    async def run() -> None:
        host = await hosts.open()
        assert await host.call("reset", Task(index=0, seed=0, data=data), deadline_s=60) == here
        assert (await host.call("step", parse(data["task"]["answer"], "none"), deadline_s=30)).reward == 1.0
        await host.close(10)

    try:
        asyncio.run(run())
    finally:
        hosts.close()
