"""Whose turn it is with the memory of the devices, when training ranks and engines share them (`cluster.sleep`)."""

from collections.abc import Sequence
from typing import Protocol


class Ranks(Protocol):
    """The processes of a training role. They wake by themselves, part by part, when they are called."""

    def rest(self) -> None:
        """Puts everything in these processes to sleep."""
        ...


class Engines(Protocol):
    """All engines: awake they hold weights and cache, asleep nothing, and keep requests until they wake."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


SAMPLING = ("rollout", "evaluate")  # phases of the engines alone
PUSH = "sync"  # both hold weights; of the ranks only what they pack and probe with


class Turns:
    """Says before each phase of a run who sleeps in it. All other phases belong to the training ranks."""

    def __init__(self, ranks: Sequence[Ranks], engines: Engines):
        self.ranks, self.engines = ranks, engines
        self.resting, self.sampling = False, True

    def begin(self, phase: str) -> None:
        """Called before every phase. Whoever gives memory back does so before another takes it."""
        sampling = phase in SAMPLING or phase == PUSH
        if sampling and not self.resting:
            for group in self.ranks:
                group.rest()
        if sampling != self.sampling:
            (self.engines.wake if sampling else self.engines.sleep)()
        self.resting, self.sampling = phase in SAMPLING, sampling
