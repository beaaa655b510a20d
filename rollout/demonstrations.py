"""What a perfect player would do: an environment's oracle, turn by turn, for the supervised warm start."""

import asyncio
from typing import Any

from conf.errors import ConfigError
from conf.schema import Config
from rollout.chat import TemplateError
from rollout.conversation import Conversation, add_messages, add_turn, begin, clip
from rollout.environment import Observation, StepResult, Task
from rollout.isolation import Hosts
from rollout.preflight.environment import KEY, PreparedEnv, task_maker
from rollout.processes.env_faults import EnvFault
from rollout.seeds import derive_seed
from rollout.single_turn import demonstrated
from rollout.tool_calls import parse, render
from rollout.tools import CALLS_AS
from rollout.trajectory import Tree

Pair = tuple[list[int], list[int]]  # what the policy sees, and what it should say, its end included


def oracle_turns(cfg: Config, prepared: PreparedEnv, tokenizer: Any, num_tasks: int) -> list[Pair]:
    """All turns of the oracle in so many tasks of the split "sft". Environments get sft.kwargs besides their own.

    Raises ConfigError when the environment has no oracle, or fails.
    """
    if prepared.is_agent:
        raise ConfigError(
            f"sft.num_steps={cfg.sft.num_steps} with {KEY}={cfg.env._target_}: it is an agent, which has no oracle's "
            "turns to learn from; use sft.num_steps=0"
        )
    if "oracle" not in prepared.methods:
        raise ConfigError(
            f"sft.num_steps={cfg.sft.num_steps} with {KEY}={cfg.env._target_}: it has no oracle() to learn from; add "
            "one that gives the text of a perfect turn, or use sft.num_steps=0"
        )
    hosts = Hosts(str(cfg.env._target_), cfg.env.kwargs | cfg.sft.kwargs, cfg.env.isolation, cfg.env.max_concurrent)
    tasks = [
        Task(index=index, seed=derive_seed("sft", cfg.seed, index), data=data)
        for index, data in enumerate(task_maker(cfg)("sft", num_tasks))
    ]

    async def play_all() -> list[list[Pair]]:
        return await asyncio.gather(*(_play(cfg, prepared, tokenizer, hosts, task) for task in tasks))

    try:
        played = asyncio.run(play_all())
    except (EnvFault, TemplateError) as error:
        raise ConfigError(f"{KEY}={cfg.env._target_}: its oracle's episodes: {error}") from error
    finally:
        hosts.close()
    return [pair for pairs in played for pair in pairs]


def in_format(text: str, format: str) -> str:
    """An oracle's turn with its calls, written as ToolEnv.call_text does, in another format. Raises ConfigError."""
    if format == CALLS_AS:
        return text
    action = parse(text, CALLS_AS)
    if not action.tool_calls or any(call.error for call in action.tool_calls):
        return text  # it calls nothing, or is in the model's own format already
    return render(action.tool_calls, format, action.content)


async def _play(cfg: Config, prepared: PreparedEnv, tokenizer: Any, hosts: Hosts, task: Task) -> list[Pair]:
    env, bridge, tree = cfg.env, prepared.bridge, Tree()
    pairs: list[Pair] = []
    talks: dict[str, Conversation] = {}
    host = await hosts.open()
    try:
        observation: Observation = await host.call("reset", task, deadline_s=env.reset_s)
        agent, messages = observation.agent, observation.messages
        while len(pairs) < env.max_turns:
            messages = clip(messages, env.observation_tokens, tokenizer)
            if agent in talks:
                add_messages(talks[agent], bridge, tree, messages, env.on_rewrite)
            else:
                talks[agent] = begin(bridge, tree, agent, messages, observation.tools)
            text = in_format(await host.call("oracle", deadline_s=env.step_s), prepared.tool_format)
            ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]] + [prepared.stop_token_id]
            pairs.append((list(talks[agent].ids), ids))
            add_turn(talks[agent], tree, demonstrated(talks[agent].ids, ids), text)
            result: StepResult = await host.call("step", parse(text, prepared.tool_format), deadline_s=env.step_s)
            if result.terminated or result.truncated:
                break
            agent, messages = result.agent or agent, result.messages
    finally:
        await host.close(env.close_s)
    return pairs
