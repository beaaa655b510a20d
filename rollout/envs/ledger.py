"""Hundreds of turns of bookkeeping: each is easy, and wrong when any before it has been lost."""

import random
from typing import Any

from conf.errors import ConfigError
from rollout.environment import StepResult, Task
from rollout.envs.numbers import last_integer
from rollout.envs.splits import draw, generator
from rollout.tools import ToolEnv, tool

NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


class Ledger(ToolEnv):
    """After each event the balance of one account is asked for. Each right report gives 1/turns, so that all give 1.0.

    The report is made by the tool, or by the last integer of a text; a text without one is a wrong report.
    tell: whether the reply says what was right, so that a mistake need not be carried on.
    """

    def __init__(self, turns: int = 300, accounts: int = 4, tell: bool = True):
        if turns < 1:
            raise ConfigError(f"env.kwargs.turns={turns}: must be >= 1")
        if not 2 <= accounts <= len(NAMES):
            raise ConfigError(f"env.kwargs.accounts={accounts}: must be 2 to {len(NAMES)}")
        self.turns, self.names, self.tell = turns, NAMES[:accounts], tell

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        env = Ledger(**kwargs)
        rng = generator("ledger", split, seed, index)
        opening = draw(rng, split, lambda rng: {name: rng.randint(10, 99) for name in env.names})
        return {"opening": opening, "events": rng.getrandbits(32)}

    def reset(self, task: Task) -> str:
        self.balances = {str(name): int(amount) for name, amount in task.data["opening"].items()}
        self.rng = random.Random(int(task.data["events"]))
        self.done, self.asked = 0, ""
        listed = ", ".join(f"{name} {amount}" for name, amount in self.balances.items())
        return (
            f"You keep a ledger. The balances are: {listed}. There will be {self.turns} events. After each one, report "
            f"the balance that is asked for with the tool report.\n{self._next_event()}"
        )

    @tool
    def report(self, balance: int) -> str:
        """Reports the balance that was asked for, and gives the next event."""
        return self._take(balance)

    def answer(self, text: str) -> StepResult:
        reply = self._take(last_integer(text))
        return StepResult(messages=[{"role": "user", "content": reply}])

    def oracle(self) -> str:
        return self.call_text("report", balance=self.balances[self.asked])

    def _take(self, balance: int | None) -> str:
        right = self.balances[self.asked]
        self.done += 1
        self.note(correct=float(balance == right))
        if balance == right:
            self.reward(1 / self.turns)
        said = ("Right.\n" if balance == right else f"Wrong: {self.asked} has {right}.\n") if self.tell else ""
        if self.done == self.turns:
            self.finish()
            return f"{said}That was the last event."
        return said + self._next_event()

    def _next_event(self) -> str:
        """Changes the balances, none below 0, and says how; asks for one of those that changed."""
        giver, taker = self.rng.sample(list(self.balances), 2)
        kind, amount = self.rng.choice(("pays", "spends", "earns")), self.rng.randint(1, 30)
        if kind == "earns" or not self.balances[giver]:
            self.balances[taker] += amount
            event, changed = f"{taker} earns {amount}", [taker]
        else:
            amount = min(amount, self.balances[giver])
            self.balances[giver] -= amount
            event, changed = f"{giver} spends {amount}", [giver]
            if kind == "pays":
                self.balances[taker] += amount
                event, changed = f"{giver} pays {taker} {amount}", [giver, taker]
        self.asked = self.rng.choice(changed)
        return f"Event {self.done + 1}: {event}. What is the balance of {self.asked}?"
