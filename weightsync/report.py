"""What a push did: to which engines, how much of it, and how long each phase took."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rl.roles import Metrics
from weightsync.sides import Sink

PHASES = ("snapshot", "detect", "pause", "begin", "transfer", "finish", "probe", "resume")
COPIED_BYTES = 32 << 20  # beyond the caches of most machines


@dataclass(kw_only=True)
class SyncReport:
    """What one push did. Times are seconds; `modules` counts those sent, of `num_modules`."""

    version: int
    engines: Sequence[str] = ()  # their names, by number
    num_bytes: int = 0
    modules: int = 0
    num_modules: int = 0
    probe_max: float = 0.0
    memcpy_gb_s: float = 0.0  # of this host, for comparison
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    verified: list[str] = field(default_factory=list)
    paused: dict[str, float] = field(default_factory=dict)  # since when, by the monotonic clock
    stall_s: dict[str, float] = field(default_factory=dict)
    resent: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> Metrics:
        """For the logs."""
        rates = {"sync/gb_s": self.gb_s, "sync/memcpy_ratio": self.gb_s / max(1e-9, self.memcpy_gb_s)}
        return {
            "sync/bytes": float(self.num_bytes),
            "sync/changed": self.modules / max(1, self.num_modules),
            **(rates if self.num_bytes else {}),  # a push of nothing has no rate
            "sync/probe_max": self.probe_max,
            "sync/stall_s": max(self.stall_s.values(), default=0.0),
            **{f"sync/engine_{n}_stall_s": self.stall_s[e] for n, e in enumerate(self.engines) if e in self.stall_s},
            "sync/num_verified": float(len(self.verified)),
            "sync/num_resent": float(len(self.resent)),
            "sync/num_restarted": float(len(self.restarted)),
            "sync/num_lost": float(len(self.lost)),
            **{f"sync/{phase}_s": seconds for phase, seconds in self.phase_s.items()},
        }

    @property
    def gb_s(self) -> float:
        return self.num_bytes / 1e9 / max(1e-9, self.phase_s["transfer"] + self.phase_s["finish"])

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds what happens inside to the seconds of a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phase_s[phase] += time.monotonic() - started


@dataclass(kw_only=True)
class Delivery:
    """One push to some engines: who is still in it, who failed and why, and who was cut off by another's failure."""

    left: list[Sink]
    failed: dict[str, str] = field(default_factory=dict)
    cut_off: list[Sink] = field(default_factory=list)

    def drop(self, down: dict[str, str], cuts_off: bool = False) -> None:
        """Some engines have failed. `cuts_off`: no bytes reach the others any more either."""
        self.failed |= down
        rest = [sink for sink in self.left if sink.name not in down]
        if down and cuts_off:
            self.cut_off += rest
            rest = []
        self.left = rest


def memcpy_gb_s() -> float:
    """How fast this process copies memory that is mapped already: the best of three."""
    source, target = torch.ones(COPIED_BYTES, dtype=torch.uint8), torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    best = float("inf")
    for _ in range(3):
        started = time.monotonic()
        target.copy_(source)
        best = min(best, time.monotonic() - started)
    return COPIED_BYTES / 1e9 / max(best, 1e-9)
