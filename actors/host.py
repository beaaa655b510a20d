"""The process of a training rank: a Ray actor that holds one role, or several that live beside each other."""

import socket
from typing import Any

from actors.critic import CriticRank
from actors.policy import PolicyRank
from actors.rank import Rank
from actors.reward_model import RewardModelRank
from conf.schema import Config

KINDS: dict[str, type[Rank]] = {
    "policy": PolicyRank,
    "sft": PolicyRank,
    "reference": PolicyRank,
    "teacher": PolicyRank,
    "critic": CriticRank,
    "reward_model": RewardModelRank,
}


class Host:
    """One rank's process. Calls go to a role in it, one at a time."""

    def __init__(self, cfg: Config, rank: int, world: int, device: str):
        self.cfg, self.rank, self.world, self.device = cfg, rank, world, device
        self.roles: dict[str, Any] = {}

    def free_port(self) -> int:
        """A free port of this rank's host, for the group's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def add(self, role: str) -> None:
        """Makes room for a role; `start` then loads its model. One that was there is let go of."""
        if role in self.roles:
            self.roles[role].close()
        self.roles[role] = KINDS[role](self.cfg, role, self.rank, self.world, self.device)

    def call(self, role: str, method: str, *args: Any) -> Any:
        """Calls a method of one role."""
        return getattr(self.roles[role], method)(*args)
