"""An episode as far as it came, and the trajectory that is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.types import Prompt, Trajectory
from rollout.environment import Message, Task
from rollout.seeds import derive_seed
from rollout.trajectory import Row, Tree


@dataclass(kw_only=True)
class Played:
    """outcome: of all agents, or of each by name. infos: one for each step. transcript: for people to read."""

    task: Task
    tree: Tree = field(default_factory=Tree)
    outcome: float | dict[str, float] = 0.0
    truncated: bool = False
    infos: list[dict[str, Any]] = field(default_factory=list)
    transcript: list[dict[str, Any]] = field(default_factory=list)


def task_of(run_seed: int, prompt: Prompt) -> Task:
    """What the episodes of a prompt are about, the same for all members of its group."""
    return Task(index=prompt.index, seed=derive_seed("task", run_seed, prompt.index), data=prompt.record)


def note_messages(played: Played, agent: str, messages: Sequence[Message]) -> None:
    played.transcript += [message | {"kind": "message", "agent": agent} for message in messages]


def note_action(played: Played, agent: str, segment: int, text: str, cut_off: bool) -> None:
    """`cut_off`: the turn ran out of tokens."""
    played.transcript.append({"kind": "action", "agent": agent, "segment": segment, "text": text, "truncated": cut_off})


def as_trajectory(played: Played) -> Trajectory:
    """The episode's rows, each with what it can still earn; an empty trajectory when nothing was sampled."""
    tree, infos = played.tree, played.infos
    rows = tree.rows()
    last = {row.agent: number for number, row in enumerate(rows)}
    made = [as_row(played, row, played.truncated and last[row.agent] == n) for n, row in enumerate(rows)]
    head = made[0] if made else Trajectory(token_ids=[], prompt_len=0, action_mask=[], logprobs=[], versions=[])
    head.more = made[1:]
    head.truncated = head.truncated or played.truncated
    head.transcript = played.transcript
    head.text = "\n".join(entry["text"] for entry in played.transcript if entry["kind"] == "action")
    for name in {name for info in infos for name, value in info.items() if isinstance(value, int | float)}:
        values = [float(info[name]) for info in infos if isinstance(info.get(name), int | float)]
        head.metrics[name] = sum(values) / len(values)
    head.metrics |= {"turns": float(tree.num_turns), "rows": float(len(rows)), "forks": float(tree.num_forks)}
    return head


def as_row(played: Played, row: Row, truncated: bool) -> Trajectory:
    """One row as a trajectory: turn rewards on the last token of each turn, what is still to come as the outcome."""
    outcome = played.outcome if not isinstance(played.outcome, dict) else played.outcome.get(row.agent, 0.0)
    segments, own = played.tree.segments, set(row.segments)
    later = sum(
        s.reward
        for number, s in enumerate(segments)
        if s.turn > row.turns[0][0] and s.agent == row.agent and number not in own
    )
    token_rewards = [0.0] * len(row.token_ids)
    for number, (_, place) in zip(row.segments, row.turns, strict=True):
        token_rewards[place] += segments[number].reward
    return Trajectory(
        token_ids=row.token_ids,
        prompt_len=row.prompt_len,
        action_mask=row.action_mask,
        logprobs=row.logprobs,
        versions=row.versions,
        reward=outcome + later,
        token_rewards=token_rewards,
        truncated=truncated,
        agent=row.agent,
    )
