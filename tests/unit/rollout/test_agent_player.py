"""Agents with a loop of their own, in each isolation: what they earn, how they fail, and what is refused beforehand."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from conf.choices import Context, Isolation
from conf.errors import ConfigError
from conf.schema import Config
from rl.types import Prompt, Sampling, Status, Trajectory
from rollout.agents.player import Agents, add_up
from rollout.attempts import EpisodeFailed
from rollout.chat import ChatBridge
from rollout.environment import Agent, EnvironmentFailure, Task
from rollout.isolation import Hosts, check_environment
from rollout.preflight.environment import require_agent_settings
from rollout.processes.env_worker import optional_methods
from tests.unit.rollout.agents import ScriptedLane, chat_tokenizer
from tests.unit.rollout.sessions import TOOLING, WAIT_S, make_config
from tests.unit.rollout.test_episode import actions

TOKENIZER = chat_tokenizer(TOOLING)


class Asking:
    """Asks `turns` times; what it returns, or does instead, is `result`."""

    tries = 0

    def __init__(self, turns: int = 2, result: Any = 1.5):
        self.turns, self.result = turns, result

    def run(self, task: Task, base_url: str, model: str) -> Any:
        type(self).tries += 1
        messages: list[Any] = [{"role": "user", "content": task.data["prompt"]}]
        with OpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=WAIT_S) as client:
            for turn in range(self.turns):
                name = model if turn % 2 == 0 or not isinstance(self.result, dict) else f"{model}:other"
                reply = client.chat.completions.create(model=name, messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
        if self.result == "boom":
            raise KeyError("a bug")
        if self.result == "down" and type(self).tries == 1:
            raise EnvironmentFailure("the service is down")
        return 1.0 if self.result == "down" else self.result


class Scoring(Asking):
    def score(self) -> float:
        return 10.0


class Asynchronous(Asking):
    async def run(self, task: Task, base_url: str, model: str) -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=WAIT_S) as client:
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
        return self.result


class Sleeping(Asking):
    async def run(self, task: Task, base_url: str, model: str) -> Any:
        await asyncio.Event().wait()


class Runner:
    """An environment with a method called run."""

    def reset(self, task: Task) -> str:
        return ""

    def step(self, action: Any) -> None: ...

    def run(self) -> None: ...

    def close(self) -> None: ...


def config(target: str, isolation: Isolation, **env: Any) -> Config:
    return make_config(_target_=target, isolation=isolation, **env)


def play(lane: ScriptedLane, target: str = "Asking", isolation: Isolation = Isolation.thread, **env: Any) -> Trajectory:
    Asking.tries = 0
    path = target if "." in target else f"{__name__}.{target}"
    cfg = config(path, isolation, **env)
    hosts = Hosts(path, cfg.env.kwargs, isolation, cfg.env.max_concurrent)
    methods = ["score"] if target == "Scoring" else []
    agents = Agents(cfg, ChatBridge(TOKENIZER), hosts, TOKENIZER, "hermes", [*methods, "run"])
    prompt = Prompt(index=4, token_ids=[], record={"prompt": "hello", "a": 6, "b": 7})
    try:
        return asyncio.run(agents.play(lane, prompt, Sampling(max_tokens=120), seed=5))
    finally:
        agents.close()
        agents.close()
        hosts.close()


def said(*texts: str) -> ScriptedLane:
    return ScriptedLane(TOKENIZER, texts or ["a", "b", "c"])


def test_agent_earns_what_run_returns() -> None:
    lane = said()
    trajectory = play(lane)
    assert (trajectory.status, trajectory.error, trajectory.reward) == (Status.ok, "", 1.5)
    assert actions(trajectory) == lane.sampled
    assert trajectory.token_ids == lane.seen[1] + lane.sampled[1]
    assert (trajectory.truncated, trajectory.metrics["turns"]) == (False, 2)


@pytest.mark.parametrize("isolation", [Isolation.inline, Isolation.thread])
def test_async_agent_runs_beside_the_engines(isolation: Isolation) -> None:
    assert play(said(), "Asynchronous", isolation).reward == 1.5


def test_agents_by_name_earn_their_own() -> None:
    trajectory = play(said(), kwargs={"result": {"main": 1.0, "other": -1.0}})
    assert [(row.agent, row.reward) for row in trajectory.rows] == [("main", 1.0), ("other", -1.0)]


def test_score_is_added_to_what_run_returns() -> None:
    assert play(said(), "Scoring").reward == 11.5
    assert play(said(), "Scoring", kwargs={"result": None}).reward == 10.0


@pytest.mark.parametrize(
    ("env", "status", "message"),
    [
        ({"kwargs": {"result": "boom"}}, Status.env_failed, "KeyError: 'a bug'"),
        ({"kwargs": {"result": None}}, Status.env_bad_value, "run returned None, and there is no score"),
        ({"kwargs": {"result": float("nan")}}, Status.env_bad_value, "run must be a finite number, found nan"),
        ({"kwargs": {"turns": 0}}, Status.env_failed, "without an answer of the model"),
        ({"max_turns": 1}, Status.env_failed, r"had its 1 turns (env.max_turns); catch openai.BadRequestError"),
    ],
)
def test_failure_of_the_agents_own_is_kept_and_not_played_again(
    env: dict[str, Any], status: Status, message: str
) -> None:
    trajectory = play(said(), **env)
    assert (trajectory.status, message in trajectory.error) == (status, True), trajectory.error
    assert Asking.tries == 1


def test_agent_that_runs_into_a_limit_is_scored_as_it_stands() -> None:
    trajectory = play(said(), "Scoring", max_turns=1)
    assert (trajectory.status, trajectory.truncated, trajectory.reward) == (Status.ok, True, 10.0)


def test_agent_whose_service_is_down_once_is_played_again_with_the_same_seeds() -> None:
    lane = said("a", "b", "a", "b")
    trajectory = play(lane, kwargs={"result": "down"})
    assert (trajectory.status, trajectory.reward) == (Status.ok, 1.0)
    seeds = [sampling.seed for sampling in lane.samplings]
    assert seeds[:2] == seeds[2:]
    assert trajectory.metrics["turns"] == 2


def test_engine_that_is_gone_is_not_the_agents_failure() -> None:
    lane = ScriptedLane(TOKENIZER, lambda _ids, _call: RuntimeError("engine gone"))
    trajectory = play(lane)
    assert (trajectory.status, trajectory.error, len(lane.seen)) == (Status.engine_failed, "engine gone", 2)


def test_agent_that_does_not_end_is_stopped_and_not_played_again() -> None:
    trajectory = play(said(), "Sleeping", episode_s=0.3)
    assert (trajectory.status, trajectory.token_ids) == (Status.episode_timeout, [])
    assert "env.episode_s" in trajectory.error


def test_example_multiplies_with_its_tool() -> None:
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    lane = said(call, "It is\n42")
    trajectory = play(lane, "examples.agent_openai.CalculatorAgent", Isolation.process)
    assert (trajectory.status, trajectory.error, trajectory.reward) == (Status.ok, "", 1.0)
    assert "tool\n42<|im_end|>" in TOKENIZER.decode(trajectory.token_ids)
    assert actions(trajectory) == lane.sampled


def test_rewards_must_name_everyone_who_acted() -> None:
    assert add_up([{"a": 1.0, "b": 2.0}, 10.0], {"a"}) == {"a": 11.0, "b": 12.0}
    with pytest.raises(EpisodeFailed, match="rewards were given for a, and none for main, who acted"):
        add_up([{"a": 1.0}], {"a", "main"})
    with pytest.raises(EpisodeFailed, match="given for nobody, and none for main"):
        add_up([{}], {"main"})


# -- beforehand --


def test_check_tells_an_agent_by_its_run() -> None:
    assert isinstance(Asking(), Agent)
    assert check_environment("examples.agent_openai.CalculatorAgent", {}, Isolation.process) == ["make_task", "run"]
    assert (optional_methods(Scoring), optional_methods(Runner)) == (["score", "run"], [])


def test_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout import isolation

    monkeypatch.setattr(isolation, "sandbox_support", lambda: "")
    monkeypatch.setattr(isolation, "start_sandboxed", lambda module, _target, _limits: isolation.start_process(module))
    with pytest.raises(ConfigError, match=r"env\.isolation=sandbox: .* asks the model over the network"):
        check_environment("examples.agent_openai.CalculatorAgent", {}, Isolation.sandbox)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"isolation": Isolation.inline}, r"env\.isolation=inline: .*Asking\.run is not async"),
        ({"context": Context.window}, r"env\.context=window"),
        ({"observation_tokens": 9}, r"env\.observation_tokens=9"),
    ],
)
def test_settings_that_an_agent_cannot_have_are_refused(env: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_agent_settings(make_config(**{"_target_": f"{__name__}.Asking"} | env))
    require_agent_settings(config(f"{__name__}.Asynchronous", Isolation.inline))
