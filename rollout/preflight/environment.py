"""What is wrong with an environment, before a process of the run starts; and what its episodes are made of."""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from conf.choices import Context, Isolation, Rewrite, Template
from conf.errors import ConfigError
from conf.imports import check_arguments, describe, import_function, nearest
from conf.schema import Config
from rl.types import Prompt
from rollout.agents.player import Agents
from rollout.chat import Bridge, ChatBridge, PlainBridge, TemplateError, require_append_only
from rollout.conversation import clip
from rollout.data import check_template, load_records
from rollout.environment import Observation, Tool, ToolCall
from rollout.episode import Episodes
from rollout.isolation import Hosts, check_environment
from rollout.played import task_of
from rollout.processes.env_faults import EnvFault
from rollout.processes.env_worker import RUN
from rollout.tool_calls import VLLM, check_format, detect_format, render

KEY = "env._target_"
HELD_OUT = 1 << 30  # number of the first held-out task: seeds derive from it, and none is that of a training task


@dataclass(kw_only=True)
class PreparedEnv:
    """Everything that episodes need but the processes of their environments."""

    bridge: Bridge
    tool_format: str
    methods: list[str]  # the environment's optional ones; `run` makes it an agent
    stop_token_id: int  # ends a turn

    def hosts(self, cfg: Config) -> Hosts:
        """Where environments run; to be closed."""
        return Hosts(str(cfg.env._target_), cfg.env.kwargs, cfg.env.isolation, cfg.env.max_concurrent)

    @property
    def is_agent(self) -> bool:
        return RUN in self.methods

    def player(self, cfg: Config, hosts: Hosts, tokenizer: Any) -> Episodes | Agents:
        """Who plays its episodes; Agents are to be closed."""
        made = Agents if self.is_agent else Episodes
        return made(cfg, self.bridge, hosts, tokenizer, self.tool_format, self.methods)


def prepare_env(cfg: Config, tokenizer: Any) -> PreparedEnv:
    """Checks the environment's class, the chat template, and both together. Raises ConfigError."""
    env = cfg.env
    methods = check_environment(str(env._target_), env.kwargs, env.isolation)
    if RUN in methods:
        require_agent_settings(cfg)
    tool_format = env.tool_format
    if tool_format == "auto":
        plain = cfg.data.template is Template.plain
        tool_format = "none" if plain else detect_format(tokenizer.chat_template)
    check_format(tool_format)
    bridge = make_bridge(cfg, tokenizer, tool_format)
    if tool_format.startswith(VLLM):
        from rollout.vllm_parsers import parser_names

        name, known = tool_format.removeprefix(VLLM), parser_names()
        if name not in known:
            raise ConfigError(f"env.tool_format={tool_format}: vLLM has no such parser{nearest(name, known)}")
    return PreparedEnv(bridge=bridge, tool_format=tool_format, methods=methods, stop_token_id=bridge.end_of_turn)


def require_agent_settings(cfg: Config) -> None:
    """Raises ConfigError for what an agent, with a loop of its own, does itself or cannot do."""
    env = cfg.env
    if env.context is not Context.stop or env.observation_tokens:
        raise ConfigError(
            f"env.context={env.context.value}, env.observation_tokens={env.observation_tokens}: {env._target_} is an "
            "agent, and what is in its messages is its own business; use env.context=stop env.observation_tokens=0"
        )
    if env.isolation is Isolation.inline:
        run = getattr(import_function(str(env._target_), KEY), RUN)
        if not inspect.iscoroutinefunction(run):
            raise ConfigError(
                f"env.isolation=inline: {env._target_}.run is not async, so it would hold up the engines that it waits "
                "for; use env.isolation=process or thread"
            )


def make_bridge(cfg: Config, tokenizer: Any, tool_format: str) -> ChatBridge | PlainBridge:
    """How messages become ids, by data.template. Raises ConfigError."""
    check_template(cfg.data, tokenizer)
    if cfg.data.template is Template.plain:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"data.template=plain: the tokenizer of {cfg.model.path} has no eos token to end a turn")
        return PlainBridge(tokenizer)
    try:
        bridge = ChatBridge(tokenizer, tool_format)
        if cfg.env.on_rewrite is Rewrite.refuse:
            require_append_only(bridge, f"model.path={cfg.model.path}")
    except TemplateError as error:
        raise ConfigError(f"model.path={cfg.model.path}: {error}") from error
    return bridge


def make_tasks(cfg: Config) -> tuple[list[Prompt], list[Prompt]]:
    """(training tasks, held-out tasks): records of the data, or what the environment makes. Raises ConfigError."""
    if not cfg.data.from_env:
        train, held_out = load_records(cfg.data, cfg.seed, with_prompts=False)
        return as_prompts(train), as_prompts(held_out, HELD_OUT)
    make = task_maker(cfg)
    return as_prompts(make("train", cfg.data.size)), as_prompts(make("eval", cfg.data.eval_size), HELD_OUT)


def task_maker(cfg: Config) -> Callable[[str, int], list[dict[str, Any]]]:
    """(split, count) -> that many tasks of the environment's own. Raises ConfigError."""
    target = str(cfg.env._target_)
    function = getattr(import_function(target, KEY), "make_task", None)
    if function is None:
        raise ConfigError(
            f"data.from_env=true: {target} has no make_task(split, seed, index, **kwargs); add it, or give tasks with "
            "data=file data.path=FILE"
        )
    if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "self":
        raise ConfigError(
            f"{KEY}={target}: make_task must be static, as it is called without an object; put @staticmethod above it"
        )
    kwargs = cfg.env.kwargs | cfg.data.kwargs
    try:
        check_arguments(function, KEY, f"{target}.make_task", "train", cfg.seed, 0, **kwargs)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; it is called as make_task(split, seed, index, **kwargs), with those of env and data"
        ) from error

    def make_one(split: str, index: int, when: str = "") -> dict[str, Any]:
        called = f"{KEY}={target}: make_task({split!r}, {cfg.seed}, {index}){when}"
        try:
            task = function(split, cfg.seed, index, **kwargs)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{called}: {describe(error)}") from error
        if not isinstance(task, dict):
            raise ConfigError(f"{KEY}={target}: make_task gave a {type(task).__name__}, not a dict")
        try:
            json.dumps(task)  # as rollouts.jsonl holds it
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{called}: {error}") from error
        return task

    def make(split: str, count: int) -> list[dict[str, Any]]:
        tasks = [make_one(split, index) for index in range(count)]
        if tasks and json.dumps(make_one(split, 0, " the second time")) != json.dumps(tasks[0]):
            raise ConfigError(
                f"{KEY}={target}: make_task({split!r}, {cfg.seed}, 0) gave another task the second time; a run that "
                "resumes needs the same ones, so draw from random.Random(f'{split}-{seed}-{index}') alone"
            )
        return tasks

    return make


def require_room_for_calls(cfg: Config, tool_format: str, tools: Sequence[Tool], tokenizer: Any) -> None:
    """Raises ConfigError when rollout.max_tokens ends a turn before even a call without arguments is written."""
    if not tools or tool_format.startswith(VLLM):
        return
    calls = [render([ToolCall(name=tool["function"]["name"])], tool_format) for tool in tools]
    least = min(len(tokenizer(call, add_special_tokens=False)["input_ids"]) for call in calls) + 1
    if cfg.rollout.max_tokens < least:
        raise ConfigError(
            f"rollout.max_tokens={cfg.rollout.max_tokens}: the shortest call of a tool of {cfg.env._target_} is "
            f"{least} tokens as the model writes it, before any argument; raise it, to 128 for example"
        )


def as_prompts(records: Sequence[dict[str, Any]], first: int = 0) -> list[Prompt]:
    return [Prompt(index=index, token_ids=[], record=record) for index, record in enumerate(records, first)]


def try_first_task(cfg: Config, prepared: PreparedEnv, tokenizer: Any, prompt: Prompt) -> int:
    """Resets the environment for one task and renders how it begins: the number of its tokens. Raises ConfigError.

    An agent would have to be run, and is not tried: 0.
    """
    if prepared.is_agent:
        return 0
    task = task_of(cfg.seed, prompt)
    hosts = prepared.hosts(cfg)

    async def reset() -> Observation:
        host = await hosts.open()
        try:
            found: Observation = await host.call("reset", task, deadline_s=cfg.env.reset_s)
            return found
        finally:
            await host.close(cfg.env.close_s)

    try:
        observation = asyncio.run(reset())
        if observation.tools and prepared.tool_format == "none":
            raise ConfigError(
                f"{KEY}={cfg.env._target_} has tools, but env.tool_format={cfg.env.tool_format}: the chat template of "
                f"{cfg.model.path} writes no tool calls that are known; say how the model writes them, as in "
                "env.tool_format=hermes"
            )
        require_room_for_calls(cfg, prepared.tool_format, observation.tools, tokenizer)
        messages = clip(observation.messages, cfg.env.observation_tokens, tokenizer)
        count = len(prepared.bridge.first(messages, observation.tools))
    except (EnvFault, TemplateError) as error:
        raise ConfigError(f"{KEY}={cfg.env._target_}: task 0: {error}") from error
    finally:
        hosts.close()
    limit = cfg.env.context_tokens or cfg.rollout.max_model_len
    if count >= limit:
        raise ConfigError(
            f"{KEY}={cfg.env._target_}: task 0 begins with {count} tokens, and the context has room for {limit}; raise "
            "rollout.max_model_len (and env.context_tokens), or set env.observation_tokens"
        )
    return count
