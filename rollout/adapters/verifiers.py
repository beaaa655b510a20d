"""Tasksets of verifiers (its v1 interface): a prompt, one answer, and the task's own rewards for it.

What else a v1 task may ask for (containers, tool servers, judges, a simulated user) belongs to the package's own
harnesses and services, and is refused.
"""

import functools
import json
from typing import Any

from conf.errors import ConfigError
from conf.imports import describe, import_function
from rollout.adapters.extras import import_extra
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.envs.splits import generator, held_out
from rollout.processes.reward_worker import as_number
from rollout.tool_calls import THINKING_ENDS, without_thinking

Record = dict[str, Any]


class Verifiers:
    """Reward: the weighted sum of the task's rewards, as the package computes it, on the taskset's own scale.

    id: an installed taskset, as the package names it, or the import path of a class. config: fields of its config.
    eval_config: fields that differ for evaluation, as in {"split": "test"}; without them one task in ten is held out.
    limit: most tasks that are read (0 is all), which an infinite taskset needs. A larger data.size repeats them.
    Rewards should not draw at random: all members of a group are to be judged alike.
    """

    def __init__(
        self,
        id: str,
        config: Record | None = None,
        eval_config: Record | None = None,
        limit: int = 0,
    ):
        if limit < 0:
            raise ConfigError(f"env.kwargs.limit={limit}: must be >= 1, or 0 for all tasks")
        self._vf = import_extra("verifiers.v1", "verifiers")
        self._taskset = load_taskset(id, config or {})
        if not limit and not self._taskset.bounded:
            raise ConfigError(f"env.kwargs.limit=0: the taskset {id} is infinite; say how many of its tasks there are")
        if eval_config:
            if "task" in eval_config:
                raise ConfigError("env.kwargs.eval_config.task: tasks behave alike in all splits; put it into config")
            load_taskset(id, (config or {}) | eval_config)

    @staticmethod
    def make_task(
        split: str,
        seed: int,
        index: int,
        id: str,
        config: Record | None = None,
        eval_config: Record | None = None,
        limit: int = 0,
    ) -> Record:
        """The task's data, as JSON."""
        generator("verifiers", split, seed, index)  # which refuses an unknown split
        fields = (config or {}) | ((eval_config or {}) if split == "eval" else {})
        records = load_records(id, json.dumps(fields, sort_keys=True), limit)
        if not eval_config:
            records = [record for record in records if held_out(json.dumps(record)) is (split == "eval")]
        if not records:
            raise ConfigError(f"env.kwargs.id={id}: of its tasks none is for {split}; give env.kwargs.eval_config")
        order = list(range(len(records)))
        generator("verifiers", split, seed, -1).shuffle(order)
        return {"task": records[order[index % len(order)]]}

    def reset(self, task: Task) -> Observation:
        kind = self._taskset.task_type()
        data = kind.data_type().model_validate(task.data["task"])
        self._task = kind(data, self._taskset.config.task)
        refuse_beyond_prompts(self._task)
        return Observation(messages=prompt_of(data))

    async def step(self, action: Action) -> StepResult:
        trace = self._trace(action)
        await self._task.score(trace)
        found = {name: part.value for name, part in trace.rewards.items() if part is not None}
        reward = as_number(trace.reward)
        if reward is None:
            raise ValueError(f"the rewards of the task are no finite numbers: {found}")
        metrics = {name: value for name, value in trace.metrics.items() if as_number(value) is not None}
        return StepResult(reward=reward, terminated=True, info=metrics | found)

    def close(self) -> None:
        """Nothing is held."""

    def _trace(self, action: Action) -> Any:
        """The conversation as the package records it."""
        vf, data = self._vf, self._task.data
        thought, ends, _ = action.text.partition(THINKING_ENDS)
        said = vf.AssistantMessage(
            content=without_thinking(action.text),
            reasoning_content=thought.removeprefix("<think>").strip() if ends else None,
        )
        known = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
        asked = [known[message["role"]](content=message["content"]) for message in prompt_of(data)]
        nodes = [
            vf.MessageNode(parent=number - 1 if number else None, message=message, sampled=message is said)
            for number, message in enumerate([*asked, said])
        ]
        ended = "length" if action.truncated else "stop"
        return vf.Trace(
            task=vf.TraceTask(type=type(self._task).__name__, data=data, key=self._task.key, hash=self._task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            state=import_extra("verifiers.v1.state", "verifiers").state_cls(type(self._task))(),
            nodes=nodes,
            calls=[vf.ModelCall(node=len(nodes) - 1, finish_reason=ended)],
            stop_condition="agent_completed",
            is_completed=True,
            ok=True,
        )


def load_taskset(id: str, fields: Record) -> Any:
    """The taskset, with its config. Raises ConfigError for what it is not, and what it asks for beyond prompts."""
    vf = import_extra("verifiers.v1", "verifiers")
    loaders = import_extra("verifiers.v1.utils.loaders", "verifiers")
    where = f"env.kwargs.id={id}"
    try:
        found: Any = import_function(id, "env.kwargs.id") if "." in id else loaders.taskset_class(id)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, vf.Taskset):
        raise ConfigError(f"{where}: is no Taskset of verifiers.v1, but {found!r}")
    if "." not in id and loaders.environment_class(id) is not vf.SingleAgentEnv:
        raise ConfigError(f"{where}: it brings an environment of its own, for agents that only verifiers runs")
    kind: Any = found
    concrete = import_extra("verifiers.v1.utils.generic", "verifiers").concrete_type
    config_type = concrete(found, vf.TasksetConfig) or vf.TasksetConfig
    try:
        config = config_type.model_validate(fields)
        taskset = kind(config)
        tools = [*kind.toolsets(config), *kind.task_type().toolsets(config.task)]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} with env.kwargs.config={fields}: {describe(error)}") from error
    if tools:
        raise ConfigError(f"{where}: it has tool servers, which only verifiers runs; only prompts are supported")
    return taskset


@functools.cache
def load_records(id: str, fields: str, limit: int) -> list[Record]:
    """The data of its tasks. Raises ConfigError for a task that is more than a prompt."""
    taskset = load_taskset(id, json.loads(fields))
    records = []
    for task in taskset.take(limit) if limit else taskset:
        refuse_beyond_prompts(task)
        records.append(task.data.model_dump(mode="json"))
    return records


def refuse_beyond_prompts(task: Any) -> None:
    """Raises ConfigError for a task that needs what only the package's own harnesses and services give."""
    vf = import_extra("verifiers.v1", "verifiers")
    kind, where = type(task), f"env=verifiers: the task {task.data.idx} ({type(task).__name__})"
    if task.NEEDS_CONTAINER or task.data.image:
        raise ConfigError(f"{where} runs in a container; only prompts are supported")
    if task.config.judges:
        raise ConfigError(f"{where} is judged by a model over the network; leave out config.task.judges")
    for name in ("setup", "finalize"):
        if getattr(kind, name) is not getattr(vf.Task, name):
            raise ConfigError(f"{where} has a {name} of its own, which needs a runtime; only prompts are supported")
    rewards = task.hooks("reward")
    if not rewards:
        raise ConfigError(f"{where} has no reward")
    for function in rewards:
        if "runtime" in function.__code__.co_varnames[: function.__code__.co_argcount] and not function.__defaults__:
            raise ConfigError(f"{where}: its reward {function.__name__} needs a runtime; only prompts are supported")
    if not task.data.prompt:
        raise ConfigError(f"{where} has no prompt: a simulated user opens it, which only verifiers runs")
    prompt_of(task.data)


def prompt_of(data: Any) -> list[Message]:
    """The messages of a task. Raises ConfigError for what is no text."""
    system: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    messages = []
    for message in data.prompt:
        if message.role == "tool" or getattr(message, "tool_calls", None):
            raise ConfigError(f"env=verifiers: the prompt of task {data.idx} holds calls of tools, and not only text")
        content = message.content
        if not isinstance(content, str):
            if any(part.type != "text" for part in content or []):
                raise ConfigError(f"env=verifiers: the prompt of task {data.idx} holds images; only text is supported")
            content = "\n".join(part.text for part in content or [])
        messages.append({"role": message.role, "content": content})
    return [*system, *messages]
