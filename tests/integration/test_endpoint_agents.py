"""Agents that ask a real engine over HTTP: 32 at a time, every token as the engine sampled it, and none without end."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import APIConnectionError, AsyncOpenAI, BadRequestError

from conf.choices import Isolation
from conf.schema import NO_REWARD, ClusterConfig, Config, DataConfig, EnvConfig
from rl.batching import collate
from rl.prompts import PromptStream
from rl.types import Status, Trajectory
from rollout import router as router_module
from rollout.agents.player import Agents
from rollout.chat import ChatBridge
from rollout.data import load_tokenizer
from rollout.engines import EngineGroup
from rollout.environment import Task
from rollout.isolation import Hosts
from rollout.pool import RolloutPool
from rollout.preflight.environment import as_prompts
from tests.integration.real import hf_logprobs, load_hf, random_folder, start_engines, started_cluster
from tests.unit.stand_ins import make_cfg

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TURNS = 4
ANSWER_S = 60.0
COLLECT_S = 0.2


class Talking:
    """Four turns, of which every other is streamed. With `hasty` it also hangs up in the middle of an answer, and asks
    again."""

    def __init__(self, hasty: bool = False):
        self.hasty = hasty

    async def run(self, task: Task, base_url: str, model: str) -> float:
        messages: list[Any] = [{"role": "user", "content": task.data["prompt"]}]
        async with AsyncOpenAI(base_url=base_url, api_key="any", timeout=ANSWER_S) as client:
            for turn in range(TURNS):
                if self.hasty:
                    with pytest.raises(APIConnectionError):
                        hasty = client.with_options(timeout=0.001, max_retries=0)
                        await hasty.chat.completions.create(model=model, messages=messages)
                if turn % 2:
                    stream = await client.chat.completions.create(model=model, messages=messages, stream=True)
                    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                else:
                    reply = await client.chat.completions.create(model=model, messages=messages)
                    text = reply.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
            await self.ask_beyond(client, model, messages)
        return float(len(messages))

    async def ask_beyond(self, client: AsyncOpenAI, model: str, messages: list[Any]) -> None:
        with pytest.raises(BadRequestError, match=r"env\.max_turns"):
            await client.chat.completions.create(model=model, messages=messages)


def config(folder: Path, **kwargs: Any) -> Config:
    return make_cfg(
        rollout={"max_tokens": 8, "max_model_len": 256, "kv_cache_bytes": 64 << 20, "num_threads": 1},
        reward={"_target_": NO_REWARD},
        cluster=ClusterConfig(rollout_engines=1),
        data=DataConfig(from_env=True),
        env=EnvConfig(_target_=f"{__name__}.Talking", kwargs=kwargs, isolation=Isolation.inline, max_turns=TURNS),
        prompts_per_step=8,
        samples_per_prompt=4,
    )


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tiny_folder, tmp_path_factory.mktemp("agents") / "model", seed=1, spread=0.05)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[EngineGroup]:
    with started_cluster() as cluster:
        group = start_engines(cluster, config(folder), folder)
        group.accept_loaded(version=0)
        yield group
        group.stop()


def play(cfg: Config, folder: Path, engines: EngineGroup) -> list[Trajectory]:
    """32 episodes at a time; afterwards no request is left at the engines."""
    tokenizer = load_tokenizer(str(folder))
    bridge = ChatBridge(tokenizer)
    hosts = Hosts(str(cfg.env._target_), cfg.env.kwargs, cfg.env.isolation, cfg.env.max_concurrent)
    agents = Agents(cfg, bridge, hosts, tokenizer, "none", ["run"])
    prompts = as_prompts([{"prompt": f"hello {index}"} for index in range(8)])
    stream = PromptStream(prompts=prompts, seed=0, shuffle=False)
    pool = RolloutPool(cfg, engines.handles, stream, agents, (bridge.end_of_turn,))
    try:
        pool.start(0, version=0)
        groups = pool.next_groups(8)
        assert collate(groups).num_rows == sum(len(t.rows) for group in groups for t in group.valid)
        return [trajectory for group in groups for trajectory in group.trajectories]
    finally:
        pool.close()
        agents.close()
        hosts.close()
        time.sleep(2 * COLLECT_S)  # the last question of a closed pool is still open at the engines


@pytest.mark.parametrize("hasty", [False, True])
def test_agents_of_thirty_two_sessions_are_trained_on_what_the_engine_sampled(
    folder: Path, engines: EngineGroup, monkeypatch: pytest.MonkeyPatch, hasty: bool
) -> None:
    monkeypatch.setattr(router_module, "COLLECT_S", COLLECT_S)
    played = play(config(folder, hasty=hasty), folder, engines)
    assert [(t.status, t.error) for t in played] == [(Status.ok, "")] * 32
    for trajectory in played:
        assert (trajectory.metrics["turns"], trajectory.metrics["forks"], trajectory.more) == (TURNS, 0, [])
        assert (trajectory.reward, trajectory.truncated) == (1 + 2 * TURNS, True)
        assert {v for v, acts in zip(trajectory.versions, trajectory.action_mask, strict=True) if acts} == {0}
    assert len({tuple(t.token_ids) for t in played}) == 32
    lm = load_hf(folder)
    for trajectory in played[::4]:  # the engine's numbers are those of these very rows
        acts = torch.tensor(trajectory.action_mask[1:])
        expected = hf_logprobs(lm, trajectory.token_ids)[acts]
        torch.testing.assert_close(torch.tensor(trajectory.logprobs[1:])[acts], expected, atol=2e-3, rtol=0)


def test_agents_play_the_same_episodes_again(
    folder: Path, engines: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "COLLECT_S", COLLECT_S)
    first, second = (play(config(folder), folder, engines) for _ in range(2))
    assert [t.token_ids for t in first] == [t.token_ids for t in second]
