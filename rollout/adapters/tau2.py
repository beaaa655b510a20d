"""Customer service of tau2-bench: a policy, tools on a database, and a customer who needs no model."""

import functools
import os
import random
from typing import Any

from conf.errors import ConfigError
from conf.imports import nearest
from rollout.adapters.extras import import_extra
from rollout.adapters.foreign_tools import ForeignTools
from rollout.environment import Action, Observation, StepResult, Task
from rollout.tool_calls import without_thinking
from rollout.tools import ToolError

DOMAINS = ("retail", "airline")
SPLITS = {"train": "train", "sft": "train", "eval": "test"}  # ours, and what the package calls them
BASES = ("DB", "COMMUNICATE", "ACTION")
TRANSFER = "transfer_to_human_agents"
AGREES = "Yes, please go ahead with what I asked for."
# All that these tasks change is refused by the tools, so that the database has to stay as it is.
REFUSED = {("retail", "105"), ("retail", "12")}
INSTRUCTION = (
    "You are a customer service agent. Help the customer by the policy below. In each turn either call tools or write "
    "to the customer, not both.\n\n"
)


class Tau2(ForeignTools):
    """Reward 1.0 or 0.0, when the conversation ends: the package's own verdict, without the judgement of a model. A
    conversation that is cut off (env.max_turns) has 0.

    domain: retail (69 tasks for training, 38 for evaluation) or airline (17 and 14), not counting those of `unearned`;
    a larger data.size repeats them. The customer says the parts of the task's instructions one after another, one for
    each text of the agent, then agrees `agreements` times, and leaves at the text after that, or after a transfer.
    basis: what must be right, of DB (the database ends as the task's own actions leave it), COMMUNICATE (what the
    customer must be told was said) and ACTION (each of the task's own actions was made); null is what the task says.
    unearned: whether there are also tasks in which an agent that does nothing is right, as nothing is to be changed or
    said; they would reward anything.
    """

    def __init__(
        self, domain: str = "retail", basis: list[str] | None = None, agreements: int = 2, unearned: bool = False
    ):
        if domain not in DOMAINS:
            raise ConfigError(f"env.kwargs.domain={domain!r}: must be retail or airline{nearest(domain, [*DOMAINS])}")
        for name in basis if basis is not None else BASES:
            if name == "NL_ASSERTION":
                raise ConfigError("env.kwargs.basis: NL_ASSERTION is judged by a model over the network; leave it out")
            if name not in BASES:
                raise ConfigError(f"env.kwargs.basis={basis}: {name!r} is unknown{nearest(name, [*BASES])}")
        if basis == []:
            raise ConfigError(f"env.kwargs.basis=[]: name some of {', '.join(BASES)}, or null for what the task says")
        if agreements < 0:
            raise ConfigError(f"env.kwargs.agreements={agreements}: must be >= 0")
        self._basis, self._agreements = basis, agreements
        self._domain, self._unearned = domain, unearned
        self._made = package(f"tau2.domains.{domain}.environment").get_environment
        self._world: Any = None

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        env = Tau2(**kwargs)
        if split not in SPLITS:
            raise ConfigError(f"split={split!r}: tau2 makes train, eval and sft")
        tasks = load_tasks(env._domain, SPLITS[split], env._unearned)
        order = random.Random(f"tau2/{split}/{seed}").sample(range(len(tasks)), len(tasks))
        return {"task": tasks[order[index % len(tasks)]]}

    def reset(self, task: Task) -> Observation:
        self._task = package("tau2.data_model.tasks").Task.model_validate(task.data["task"])
        self._messages = package("tau2.data_model.message")
        self._world = self._made()
        self._said: list[Any] = []  # the whole conversation, in the package's own messages
        self._parts, self._agreed, self._transferred, self._actions_made = customer_parts(self._task), 0, False, 0
        first = self._from_customer(self._parts.pop(0))
        messages = [{"role": "system", "content": INSTRUCTION + self._world.get_policy()}, first]
        return Observation(messages=messages, tools=self.offer(tool.openai_schema for tool in self._world.get_tools()))

    async def step(self, action: Action) -> StepResult:
        self._turn_start = len(self._said)
        self._calls: list[Any] = []
        self._text = without_thinking(action.content).strip()
        result = await super().step(action)
        if self._calls:
            said = self._messages.AssistantMessage(role="assistant", content=self._text or None, tool_calls=self._calls)
            self._said.insert(self._turn_start, said)
        return result

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        call = self._messages.ToolCall(id=str(len(self._said)), name=name, arguments=arguments)
        answer = self._world.get_response(call)
        self._calls.append(call)
        self._said.append(answer)
        self._actions_made += 1
        self._transferred |= name == TRANSFER
        if answer.error:
            raise ToolError(answer.content.removeprefix("Error: "))
        return str(answer.content)

    def answer(self, text: str) -> StepResult:
        self._said.append(self._messages.AssistantMessage(role="assistant", content=self._text))
        if not self._transferred and (self._parts or self._agreed < self._agreements):
            self._agreed += not self._parts
            return StepResult(messages=[self._from_customer(self._parts.pop(0) if self._parts else AGREES)])
        checks = self.verdict()
        right = min(checks.values())
        return StepResult(reward=right, terminated=True, info=checks | {"correct": right})

    def close(self) -> None:
        self._world = None

    def verdict(self) -> dict[str, float]:
        """1.0 or 0.0 for each of what must be right, in small letters, by the package's evaluators."""
        criteria = self._task.evaluation_criteria
        found = {}
        for name in self._basis or [kind.value for kind in criteria.reward_basis if kind.value in BASES]:
            kind = {"DB": "env", "COMMUNICATE": "communicate", "ACTION": "action"}[name]
            evaluator = getattr(package(f"tau2.evaluator.evaluator_{kind}"), EVALUATORS[kind])
            extra = {"environment_constructor": lambda solo_mode=False: self._made()} if kind == "env" else {}
            judged = evaluator.calculate_reward(task=self._task, full_trajectory=self._said, **extra)
            found[name.lower()] = float(judged.db_check.db_reward if kind == "env" else judged.reward)
        return found

    def oracle(self) -> str:
        """The task's own actions, then all that the customer must be told."""
        criteria = self._task.evaluation_criteria
        actions = criteria.actions or []
        if self._actions_made < len(actions):
            action = actions[self._actions_made]
            return self.call_text(action.name, **action.arguments)
        return " ".join(["That is done.", *(criteria.communicate_info or [])])

    def _from_customer(self, text: str) -> dict[str, Any]:
        self._said.append(self._messages.UserMessage(role="user", content=text))
        return {"role": "user", "content": text}


EVALUATORS = {"env": "EnvironmentEvaluator", "communicate": "CommunicateEvaluator", "action": "ActionEvaluator"}


def package(module: str) -> Any:
    """A module of the package, which would log to the terminal, and take into the environment what it finds in a file
    .env. None of those used here imports a client of models."""
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    import_extra("loguru", "tau2").logger.disable("tau2")
    return import_extra(module, "tau2")


@functools.cache
def load_tasks(domain: str, split: str, unearned: bool) -> list[dict[str, Any]]:
    """The tasks of the package's split, as JSON."""
    made = package(f"tau2.domains.{domain}.environment")
    kit = package(f"tau2.domains.{domain}.tools")
    kinds = getattr(kit, {"retail": "RetailTools", "airline": "AirlineTools"}[domain])(None)
    tasks = []
    for task in made.get_tasks(split):
        criteria = task.evaluation_criteria
        writes = any(kinds.tool_type(action.name).value == "write" for action in criteria.actions or [])
        changes = writes and (domain, task.id) not in REFUSED
        if unearned or changes or criteria.communicate_info:
            tasks.append(task.model_dump(mode="json"))
    return tasks


def customer_parts(task: Any) -> list[str]:
    """What the customer says, in order. Instructions speak to whoever plays the customer, and are quoted as such."""
    told = task.user_scenario.instructions
    if isinstance(told, str):
        return [told]
    first = f"Hello. This is why I call, in the words in which it was given to me: {told.reason_for_call}"
    parts = [first, told.known_info and f"What I know: {told.known_info}"]
    parts += [told.unknown_info and f"What I do not know: {told.unknown_info}"]
    parts += [told.task_instructions and f"Also, I was told this: {told.task_instructions}"]
    return [part for part in parts if part]
