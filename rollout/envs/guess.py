"""Guess a number by "higher" and "lower": many turns, no tools, and easy enough for the smallest model."""

import random
from typing import Any

from conf.errors import ConfigError
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.envs.numbers import first_integer
from rollout.envs.splits import generator
from rollout.tool_calls import without_thinking


class Guess:
    """The guess is the first integer of the turn. Reward 1.0 for the number, times `discount` for each guess before it.

    turns: how many guesses there are; 0 is as many as halving the range needs.
    style: "plain" is a few characters ("1-15?", "higher", "lower", "correct", "?" where there was no number); "chat" is
    sentences. wobble: how often the oracle guesses at random. Every number from low to high is in every split: one that
    is never the answer would be learnt as such.
    """

    def __init__(
        self,
        low: int = 1,
        high: int = 15,
        turns: int = 0,
        style: str = "chat",
        discount: float = 1.0,
        wobble: float = 0.0,
    ):
        if not 0 <= low < high < 10**18:
            raise ConfigError(f"env.kwargs.low={low} with high={high}: 0 <= low < high must hold")
        if turns < 0:
            raise ConfigError(f"env.kwargs.turns={turns}: must be >= 1, or 0 for as many as halving needs")
        if style not in ("plain", "chat"):
            raise ConfigError(f"env.kwargs.style={style!r}: must be plain or chat")
        if not 0 < discount <= 1:
            raise ConfigError(f"env.kwargs.discount={discount}: must be > 0 and <= 1")
        if not 0 <= wobble <= 1:
            raise ConfigError(f"env.kwargs.wobble={wobble}: must be >= 0 and <= 1")
        self.low, self.high, self.style, self.discount, self.wobble = low, high, style, discount, wobble
        self.turns = turns or (high - low + 1).bit_length()

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        env = Guess(**kwargs)
        return {"number": generator("guess", split, seed, index).randint(env.low, env.high)}

    def reset(self, task: Task) -> Observation:
        self.number = int(task.data["number"])
        self.guesses, self.draw = 0, random.Random(task.seed)
        self.left, self.right = self.low, self.high  # the number is known to be in [left, right]
        text = f"{self.low}-{self.high}?"
        if self.style == "chat":
            text = (
                f"I am thinking of a number from {self.low} to {self.high}. Guess it! You have {_guesses(self.turns)}. "
                "After each one I tell you whether my number is higher or lower. Reply with just the number."
            )
        return Observation(messages=[_user(text)])

    def step(self, action: Action) -> StepResult:
        guess = first_integer(without_thinking(action.content))
        self.guesses += 1
        info = {"correct": float(guess == self.number), "guesses": self.guesses}
        if guess == self.number:
            reply, reward = "correct" if self.style == "plain" else "Correct!", self.discount ** (self.guesses - 1)
            return StepResult(messages=[_user(reply)], reward=reward, terminated=True, info=info)
        if guess is not None and guess < self.number:
            self.left = max(self.left, guess + 1)
        elif guess is not None:
            self.right = min(self.right, guess - 1)
        out = self.guesses >= self.turns
        return StepResult(messages=[_user(self._reply(guess, out))], terminated=out, info=info if out else {})

    def close(self) -> None:
        return None

    def oracle(self) -> str:
        if self.draw.random() < self.wobble:
            return str(self.draw.randint(self.low, self.high))
        return str((self.left + self.right) // 2)

    def _reply(self, guess: int | None, out: bool) -> str:
        way = "?" if guess is None else "higher" if guess < self.number else "lower"
        if self.style == "plain":
            return way
        said = "There is no number in your reply." if guess is None else f"My number is {way} than {guess}."
        if out:
            return f"{said} No guesses are left."
        return f"{said} You have {_guesses(self.turns - self.guesses)} left. Reply with just the number."


def _guesses(count: int) -> str:
    return "1 guess" if count == 1 else f"{count} guesses"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
