"""Where a step's time goes: a `with timer("rollout"):` for every phase of the loop."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic

Timer = Callable[[str], AbstractContextManager[None]]


def make_timer(phases: dict[str, float], hook: Timer | None = None) -> Timer:
    """A timer that adds the seconds of each `with timer(name):` to `phases[name]`, also when the block raises.

    `hook` is entered around each block; the live view's `phase` shows there what runs now. Its own time is not counted.
    """

    @contextmanager
    def timer(name: str) -> Iterator[None]:
        with hook(name) if hook else nullcontext():
            started = monotonic()
            try:
                yield
            finally:
                phases[name] = phases.get(name, 0.0) + monotonic() - started

    return timer
