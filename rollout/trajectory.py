"""What an episode's engine calls saw and made, as a tree of segments of token ids; one training row for each leaf.

A conversation is a path. Whatever does not continue a path id for id (a compaction, a sub-agent, a history that was
edited or rendered anew) forks, and what is common is stored once. A sampled segment is trained once: in the first row
that holds it, and in later ones it is context.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from rl.types import Completion


class Kind(Enum):
    """What a segment is: how a conversation begins, what the environment said, what the policy sampled, or an end of
    turn that it did not sample."""

    prompt = "prompt"
    observation = "observation"
    action = "action"
    close = "close"


@dataclass(slots=True)
class Segment:
    """Ids between two boundaries. logprobs (float32), versions [N]: of an action. `turn` counts actions in time."""

    parent: int
    kind: Kind
    ids: "array[int]"
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    agent: str = "main"
    turn: int = -1
    reward: float = 0.0
    truncated: bool = False
    children: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Row:
    """One path of the tree, from its beginning to a leaf. Arrays are token-aligned, as in rl.types.Trajectory.

    turns: (turn, number of its last token) of the actions that are trained in this row. segments: their numbers.
    """

    agent: str
    token_ids: list[int]
    prompt_len: int
    action_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    turns: list[tuple[int, int]]
    segments: list[int]
    truncated: bool


class Tree:
    """The record of one episode."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.roots: list[int] = []
        self.num_turns = 0
        self.num_forks = 0  # paths that did not continue an earlier one id for id

    def add(self, parent: int, kind: Kind, ids: Iterable[int], agent: str = "main") -> int:
        """A segment behind `parent` (-1: at a beginning); its number. Without ids there is none: `parent`."""
        segment = Segment(parent, kind, array("i", ids), agent=agent)
        if not segment.ids:
            return parent
        self.segments.append(segment)
        number = len(self.segments) - 1
        (self.roots if parent < 0 else self.segments[parent].children).append(number)
        return number

    def add_action(self, parent: int, completion: Completion, agent: str = "main") -> int:
        """What the engine sampled behind `parent`. Raises ValueError unless each token has a logprob and a version."""
        count = len(completion.token_ids)
        if not count == len(completion.logprobs) == len(completion.versions) or count == 0:
            raise ValueError(
                f"a turn of {count} tokens has {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} weight versions; each token needs one of each"
            )
        number = self.add(parent, Kind.action, completion.token_ids, agent)
        segment = self.segments[number]
        segment.logprobs, segment.versions = array("f", completion.logprobs), array("i", completion.versions)
        segment.turn, self.num_turns = self.num_turns, self.num_turns + 1
        segment.truncated = completion.finish_reason == "length"
        return number

    def follow(self, parent: int, kind: Kind, ids: Sequence[int], agent: str = "main") -> int:
        """The segment of these ids behind the segment `parent`: one that is there, or else a new one."""
        wanted = array("i", ids)
        for child in self.segments[parent].children:
            if self.segments[child].kind is kind and self.segments[child].ids == wanted:
                return child
        if wanted and self.segments[parent].children:
            self.num_forks += 1
        return self.add(parent, kind, wanted, agent)

    def attach(self, ids: Sequence[int], agent: str = "main") -> int:
        """The end of a path with exactly these ids: as much of the longest stored path as they begin with, and a new
        segment of the rest. What another agent has sampled is not shared: a row earns for one of them. Costs one walk
        along that path."""
        wanted, place, parent, children = array("i", ids), 0, -1, self.roots
        while True:
            for child in children:
                segment, own = self.segments[child], self.segments[child].ids
                if segment.kind is Kind.action and segment.agent != agent:
                    continue
                if wanted[place : place + len(own)] == own:
                    parent, place, children = child, place + len(own), self.segments[child].children
                    break
            else:
                break
        if place < len(wanted) and children:
            self.num_forks += 1
        return self.add(parent, Kind.prompt if parent < 0 else Kind.observation, wanted[place:], agent)

    def path(self, end: int) -> list[int]:
        """Numbers of the segments from the beginning to `end`."""
        numbers = []
        while end >= 0:
            numbers.append(end)
            end = self.segments[end].parent
        return numbers[::-1]

    def ids(self, end: int) -> list[int]:
        """All token ids up to the end of a segment."""
        return [token for number in self.path(end) for token in self.segments[number].ids]

    def rows(self) -> list[Row]:
        """One row for each leaf with something to train on, in the order of their first trained turn.

        Ids behind a path's last trained action are left out: nothing depends on them.
        """
        trained: set[int] = set()
        rows = []
        for leaf in (number for number, segment in enumerate(self.segments) if not segment.children):
            path = self.path(leaf)
            while path and self.segments[path[-1]].kind is not Kind.action:
                path.pop()
            own = [n for n in path if self.segments[n].kind is Kind.action and n not in trained]
            if own:
                trained.update(own)
                rows.append(self._row(path, set(own)))
        return sorted(rows, key=lambda row: row.turns[0])

    def _row(self, path: list[int], own: set[int]) -> Row:
        last = self.segments[path[-1]]
        row = Row(
            agent=last.agent,
            token_ids=[],
            prompt_len=len(self.segments[path[0]].ids),
            action_mask=[],
            logprobs=[],
            versions=[],
            turns=[],
            segments=[],
            truncated=last.truncated,
        )
        for number in path:
            segment = self.segments[number]
            count = len(segment.ids)
            row.token_ids.extend(segment.ids)
            acts = number in own
            row.action_mask.extend([acts] * count)
            row.logprobs.extend(segment.logprobs if acts else [0.0] * count)
            row.versions.extend(segment.versions if acts else [-1] * count)
            if acts:
                row.turns.append((segment.turn, len(row.token_ids) - 1))
                row.segments.append(number)
        return row
