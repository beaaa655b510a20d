"""What a user writes to train an agent: an environment, one object for one episode. Messages only, never tokens.

Imports nothing heavy: environments may run in processes of their own.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

# As chat templates take them: role, content, and where they apply tool_calls (assistant), name or tool_call_id (tool).
Message = dict[str, Any]
# A function that the model may call, as chat templates take it: {"type": "function", "function": {"name": ...}}.
Tool = dict[str, Any]


@dataclass(kw_only=True)
class Task:
    """What an episode is about. `data` is one record of the data, or what the environment's `make_task` gave.

    All members of a group play the same task from the same `seed`, so that only the policy makes them differ.
    """

    index: int
    seed: int
    data: dict[str, Any]


@dataclass(kw_only=True)
class ToolCall:
    """A call that the model wrote. `error` says why it cannot be made: bad JSON, no name, ...; arguments is {} then."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""


@dataclass(kw_only=True)
class Action:
    """One turn of the policy: its whole text (special tokens left out), and the same taken apart."""

    text: str
    content: str  # without the tool calls
    tool_calls: list[ToolCall] = field(default_factory=list)
    truncated: bool = False  # cut off by the limit on tokens: a call may be there in part


@dataclass(kw_only=True)
class Observation:
    """How an episode begins: the first messages, the tools that may be called in it, and the name of who acts first."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    agent: str = "main"
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class StepResult:
    """What an action led to. `messages` are appended to the conversation; `reward` is that of this turn.

    agent: who acts next, in a conversation of its own, which a new name begins; "" is the one who has acted. Agents
    are compared with those of the same name in the other members of their group.
    terminated: the task has come to its end. truncated: the environment gives up before that (a limit of its own).
    info: numbers in it are averaged into metrics (env/NAME); everything in it is shown by the viewer.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    agent: str = ""
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode. Each method may be `async`. Constructed with `env.kwargs`.

    Further methods, each used where it is there:
    `make_task(split, seed, index, **kwargs) -> dict` (static): the tasks of an environment that brings its own; pure.
    `score() -> float | dict[str, float]`: the outcome, once the episode has ended, of all agents or of each by name; it
    is added to the rewards of their turns.
    `oracle() -> str`: the text of a perfect next turn, for demonstrations and tests.
    `snapshot() -> bytes` and `restore(bytes)`: the whole state, for whoever branches an episode; episodes themselves
    use neither.
    """

    def reset(self, task: Task) -> Any:
        """Observation; its messages alone, or the text of one from the user, will do."""
        ...

    def step(self, action: Action) -> Any:
        """StepResult."""
        ...

    def close(self) -> None:
        """Gives back whatever the episode holds. Called once or several times, however the episode ended."""
        ...


@runtime_checkable
class Agent(Protocol):
    """A class in an environment's place: a program with a loop of its own, one object for one episode. It asks the
    policy as any model that is served in OpenAI's way. `make_task`, `score` and `close` as in Environment.
    """

    def run(self, task: Task, base_url: str, model: str) -> Any:
        """The whole episode; may be `async`. Gives what `score` gives, or None where there is a `score`; what both give
        is added up.

        base_url, model: for a client of chat completions, with any key. `model` + ":NAME" is the same policy, acting as
        agent NAME, whose rewards are its own; without a name it is "main". See rollout.agents.request for what may be
        asked. A request that is sent again byte for byte, with the same Idempotency-Key if any, gets the same answer:
        whoever wants several answers to the same messages varies `seed`.
        """
        ...


class EnvironmentFailure(Exception):
    """Raise it, or a subclass, in an environment for what is nobody's fault in the episode: a service that is down.

    The episode is played again from its start, and left out when that fails too. Any other exception is the episode's
    own: it ends there, is shown with its traceback, and is left out of the batch.
    """
