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
    style: "plain" is a few characters ("1-15?", "higher", "lower", "correct", "?" where there was no number), "short" a
    few words, "chat" sentences. example: the conversation begins with a game that was played before, always the same
    one. wobble: how often the oracle guesses at random. Every number from low to high is in every split: one that
    is never the answer would be learnt as such.
    """

    def __init__(
        self,
        low: int = 1,
        high: int = 15,
        turns: int = 0,
        style: str = "chat",
        example: bool = False,
        discount: float = 1.0,
        wobble: float = 0.0,
    ):
        if not 0 <= low < high < 10**18:
            raise ConfigError(f"env.kwargs.low={low} with high={high}: 0 <= low < high must hold")
        if turns < 0:
            raise ConfigError(f"env.kwargs.turns={turns}: must be >= 1, or 0 for as many as halving needs")
        if style not in ("plain", "short", "chat"):
            raise ConfigError(f"env.kwargs.style={style!r}: must be plain, short or chat")
        if not isinstance(example, bool):
            raise ConfigError(f"env.kwargs.example={example!r}: must be true or false")
        if not 0 < discount <= 1:
            raise ConfigError(f"env.kwargs.discount={discount}: must be > 0 and <= 1")
        if not 0 <= wobble <= 1:
            raise ConfigError(f"env.kwargs.wobble={wobble}: must be >= 0 and <= 1")
        self.low, self.high, self.style, self.example = low, high, style, example
        self.discount, self.wobble = discount, wobble
        self.turns = turns or (high - low + 1).bit_length()

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        env = Guess(**kwargs)
        return {"number": generator("guess", split, seed, index).randint(env.low, env.high)}

    def reset(self, task: Task) -> Observation:
        self.number = int(task.data["number"])
        self.guesses, self.draw = 0, random.Random(task.seed)
        self.left, self.right = self.low, self.high  # the number is known to be in [left, right]
        return Observation(messages=self._played_before() if self.example else [_user(self._opening())])

    def step(self, action: Action) -> StepResult:
        guess = first_integer(without_thinking(action.content))
        self.guesses += 1
        info = {"correct": float(guess == self.number), "guesses": self.guesses}
        if guess == self.number:
            reward = self.discount ** (self.guesses - 1)
            return StepResult(messages=[_user(self._praise())], reward=reward, terminated=True, info=info)
        if guess is not None and guess < self.number:
            self.left = max(self.left, guess + 1)
        elif guess is not None:
            self.right = min(self.right, guess - 1)
        left = self.turns - self.guesses
        reply = _user(self._reply(guess, self.number, left))
        return StepResult(messages=[reply], terminated=not left, info={} if left else info)

    def close(self) -> None:
        return None

    def oracle(self) -> str:
        if self.draw.random() < self.wobble:
            return str(self.draw.randint(self.low, self.high))
        return str((self.left + self.right) // 2)

    def _played_before(self) -> list[Message]:
        """The opening, behind a game in which the oracle's second guess was right."""
        guess = (self.low + self.high) // 2
        number = (guess + 1 + self.high) // 2
        return [
            _user(self._opening()),
            {"role": "assistant", "content": str(guess)},
            _user(self._reply(guess, number, self.turns - 1)),
            {"role": "assistant", "content": str(number)},
            _user(f"{self._praise()} {self._opening()}"),
        ]

    def _opening(self) -> str:
        if self.style == "plain":
            return f"{self.low}-{self.high}?"
        if self.style == "short":
            return f"Guess a number from {self.low} to {self.high}."
        return (
            f"I am thinking of a number from {self.low} to {self.high}. Guess it! You have {_guesses(self.turns)}. "
            "After each one I tell you whether my number is higher or lower. Reply with just the number."
        )

    def _praise(self) -> str:
        return "correct" if self.style == "plain" else "Correct!"

    def _reply(self, guess: int | None, number: int, left: int) -> str:
        way = "?" if guess is None else "higher" if guess < number else "lower"
        if self.style == "plain":
            return way
        if self.style == "short":
            return "A number, please." if guess is None else f"{way.capitalize()}."
        said = "There is no number in your reply." if guess is None else f"My number is {way} than {guess}."
        if not left:
            return f"{said} No guesses are left."
        return f"{said} You have {_guesses(left)} left. Reply with just the number."


def _guesses(count: int) -> str:
    return "1 guess" if count == 1 else f"{count} guesses"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
