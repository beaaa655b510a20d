from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import rl.timing
from rl.timing import make_timer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(rl.timing, "monotonic", lambda: float(next(ticks)))


def test_phases_add_up_and_survive_exceptions(clock: None) -> None:
    phases: dict[str, float] = {}
    timer = make_timer(phases)
    with timer("rollout"):
        pass
    with timer("rollout"):
        pass
    with pytest.raises(ZeroDivisionError), timer("update"):
        _ = 1 / 0
    assert phases == {"rollout": 2.0, "update": 1.0}


def test_the_hook_wraps_the_block(clock: None) -> None:
    seen = []

    @contextmanager
    def hook(name: str) -> Iterator[None]:
        seen.append(f"enter {name}")
        try:
            yield
        finally:
            seen.append(f"leave {name}")

    phases: dict[str, float] = {}
    with pytest.raises(RuntimeError), make_timer(phases, hook)("sync"):
        seen.append("body")
        raise RuntimeError
    assert seen == ["enter sync", "body", "leave sync"]
    assert phases == {"sync": 1.0}
