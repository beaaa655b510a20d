"""Who sleeps in which phase: never two with memory for one, and nobody asleep who is needed."""

from hypothesis import given
from hypothesis import strategies as st

from rollout.turns import Turns

PHASES = ["rollout", "evaluate", "sync", "score", "update", "save", "export", "refresh reference", "load checkpoint"]


class Side:
    """Ranks and engines at once, noting what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def rest(self) -> None:
        self.events.append("rest")

    def sleep(self) -> None:
        self.events.append("sleep")

    def wake(self) -> None:
        self.events.append("wake")


def test_a_step_turns_twice() -> None:
    side = Side()
    turns = Turns([side], side)
    for phase in ("sync", "rollout"):
        turns.begin(phase)
    side.events.clear()
    turns.begin("score")
    assert side.events == ["sleep"]
    turns.begin("update")
    assert side.events == ["sleep"]
    turns.begin("sync")  # of the ranks, the push wakes what it needs
    assert side.events == ["sleep", "rest", "wake"]
    turns.begin("rollout")
    assert side.events == ["sleep", "rest", "wake", "rest"]


@given(st.lists(st.sampled_from(PHASES)))
def test_engines_are_awake_exactly_when_they_are_needed(phases: list[str]) -> None:
    side = Side()
    turns, awake = Turns([side, side], side), True
    for phase in phases:
        side.events.clear()
        turns.begin(phase)
        awake = {"sleep": False, "wake": True}.get(side.events[-1], awake) if side.events else awake
        assert awake == (phase in ("rollout", "evaluate", "sync"))
        if "wake" in side.events:
            assert side.events == ["rest", "rest", "wake"], "ranks must give back before engines take"
        assert side.events.count("sleep") + side.events.count("wake") <= 1
