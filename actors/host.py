"""The process of a training rank: a Ray actor that holds one role, or several that live beside each other."""

import socket
from collections.abc import Iterable
from functools import partial
from typing import Any

from actors.critic import CriticRank
from actors.policy import PolicyRank
from actors.rank import Rank
from actors.reward_model import RewardModelRank
from actors.sleep import PARTS, Sleeper, state_storages
from actors.tensor_bytes import peak_bytes
from conf.schema import Config

KINDS: dict[str, type[Rank]] = {
    "policy": PolicyRank,
    "sft": PolicyRank,
    "reference": PolicyRank,
    "teacher": PolicyRank,
    "critic": CriticRank,
    "reward_model": RewardModelRank,
}

# The phase of the loop to which a call belongs, and of the role's state what it needs; all others need everything.
SCORING = ("logprobs", "logprobs_and_routes", "base_logprobs", "top_logprobs", "values", "scores")
PHASES = dict.fromkeys(SCORING, "score") | {"update": "update"}
PHASES |= dict.fromkeys(("take_snapshot", "pack", "probe"), "sync")
NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys((*SCORING, "pack", "probe", "export"), ("parameters",))
NEEDS |= dict.fromkeys(("take_snapshot", "changed_modules", "begin_push"), ("parameters",))
NEEDS |= dict.fromkeys(("shapes", "serve_sync", "plan_sync", "connect_sync", "end_push"), ())  # names and shapes


BESIDE = "beside"  # Ray's name for the thread in which a rank sends weights that it has copied, while it trains


class Host:
    """One rank's process. Calls go to a role in it, one at a time, but for those that may run BESIDE others.

    With `cluster.sleep` only the role that is called is awake, with those parts of its state that the call needs.
    """

    def __init__(self, cfg: Config, rank: int, world: int, device: str):
        self.cfg, self.rank, self.world, self.device = cfg, rank, world, device
        self.roles: dict[str, Any] = {}
        self.sleepers: dict[str, Sleeper] = {}
        self.measuring = False
        self.peaks: dict[str, dict[str, int]] = {}  # by role and phase, of this process

    def free_port(self) -> int:
        """A free port of this rank's host, for the group's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def add(self, role: str) -> None:
        """Makes room for a role; `start` then loads its model. One that was there is let go of."""
        if role in self.roles:
            self.sleepers[role].wake(PARTS)
            self.roles[role].close()
        self.sleepers[role], self.peaks[role] = Sleeper(device=self.device), {}
        self.roles[role] = KINDS[role](self.cfg, role, self.rank, self.world, self.device)

    def call(self, role: str, method: str, *args: Any) -> Any:
        """Calls a method of one role."""
        if self.cfg.cluster.sleep:
            self._give_turn(role, NEEDS.get(method, PARTS))
        work = partial(getattr(self.roles[role], method), *args)
        beside = method == "pack" and self.cfg.sync.snapshot  # its peak would be that of two phases at once
        if not self.measuring or method not in PHASES or beside:
            return work()
        result, peak = peak_bytes(work, self.device)
        peaks, phase = self.peaks[role], PHASES[method]
        peaks[phase] = max(peak, peaks.get(phase, 0))
        return result

    def rest(self) -> None:
        """Puts every role of this process to sleep."""
        for role in self.roles:
            self._sleep(role, PARTS)

    def _give_turn(self, role: str, needs: tuple[str, ...]) -> None:
        for other in self.roles:
            self._sleep(other, PARTS if other != role else [part for part in PARTS if part not in needs])
        self.sleepers[role].wake(needs)

    def _sleep(self, role: str, parts: Iterable[str]) -> None:
        model = self.roles[role].model()
        if model is not None:  # it has not started yet
            self.sleepers[role].sleep(model, parts)

    def measure(self, on: bool) -> None:
        """Has calls of the loop's phases note the most bytes that this process holds. Slow on a CPU (see Watch)."""
        self.measuring = on

    def memory(self, role: str) -> dict[str, int]:
        """Bytes of each part of a role's state, awake and asleep, and this process's peak in each phase of the role."""
        awake = state_storages(self.roles[role].model(), self.device)
        asleep = self.sleepers[role].num_bytes()
        held = {part: sum(s.nbytes() for s in awake.get(part, [])) + asleep.get(part, 0) for part in PARTS}
        return (
            {f"{part}_bytes": count for part, count in held.items()}
            | {"asleep_bytes": sum(asleep.values())}
            | {f"{phase}_peak_bytes": peak for phase, peak in self.peaks[role].items()}
        )
