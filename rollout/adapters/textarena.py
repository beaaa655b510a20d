"""Games of textarena: alone, or the policy against itself."""

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

from conf.errors import ConfigError
from conf.imports import nearest
from rollout.adapters.extras import import_extra
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.envs.splits import draw, generator
from rollout.tool_calls import without_thinking

NAME = "textarena"
MAX_FAULTS = 2  # turns in a row that the game itself fails on


class Offline(Exception):
    """A game wants the network."""


class TextArena:
    """Games for one player, or for two, "player0" and "player1", each in a conversation of its own.

    id: of textarena's registry. kwargs: arguments of that game, in place of those in the registry. turns: of all
    players together, after which the episode is truncated without a score.

    The score is textarena's, mostly from -1 (lost) over 0 (drawn) to 1 (won, solved); games for one player pay for
    progress too. Whoever loses by moves that are none scores -1, where textarena would pay for what was there before
    (0.25 in RushHour). The first of these in a row is answered, as textarena does (info: invalid).

    Games that would download words or ask another model are refused. Evaluation has other seeds than training.
    """

    def __init__(self, id: str = "TicTacToe-v0", kwargs: dict[str, Any] | None = None, turns: int = 200):
        if turns < 1:
            raise ConfigError(f"env.kwargs.turns={turns}: must be >= 1")
        self.id, self.kwargs, self.turns = id, dict(kwargs or {}), turns
        self.rng_state = random.Random(0).getstate()
        self.game: Any = None
        self._start(0)

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        if index == 0:
            TextArena(**kwargs).close()
        rng = generator(NAME, split, seed, index)
        return {"seed": draw(rng, split, lambda rng: rng.randrange(2**31))}

    def _start(self, seed: int) -> None:
        """A new game, by the seed alone. Raises ConfigError."""
        registry, make = package()
        if self.id not in registry:
            raise ConfigError(f"env.kwargs.id={self.id}: no such game{nearest(self.id, list(registry))}")
        reasons = []
        for self.players in (1, 2):
            try:
                with self._own_random(random.Random(seed).getstate()):
                    self.game, self.formats = unwrap(make(self.id, **self.kwargs))
                    self.game.reset(num_players=self.players, seed=seed)
            except (Exception, SystemExit) as error:
                if (
                    isinstance(error, Offline) or type(error) is LookupError
                ):  # as nltk raises for words that are not there
                    what = str(error) if isinstance(error, Offline) else "word lists of nltk"
                    raise ConfigError(f"env.kwargs.id={self.id}: needs the network, for {what}") from error
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if self.players == 2 or type(self.game.state).__name__ == "SinglePlayerState":
                return
        raise ConfigError(
            f"env.kwargs.id={self.id} with kwargs={self.kwargs}: cannot be played by one or two: {reasons[-1]}"
        )

    @contextlib.contextmanager
    def _own_random(self, state: Any = None) -> Iterator[None]:
        """Within it the generator of `random`, which the games draw from, is this game's, from where it was left."""
        before = random.getstate()
        random.setstate(state or self.rng_state)
        try:
            yield
        finally:
            self.rng_state = random.getstate()
            random.setstate(before)

    def reset(self, task: Task) -> Observation:
        self._start(int(task.data["seed"]))
        self.played, self.faults, self.scores = 0, 0, dict.fromkeys(range(self.players), 0.0)
        player = self._next()
        return Observation(messages=[self._told(player)], agent=self._agent(player))

    def step(self, action: Action) -> StepResult:
        self.played += 1
        out = self.played >= self.turns
        player, state = self._next(), self.game.state
        text = without_thinking(action.content).strip()
        for wrapper in self.formats:
            text = wrapper.action(text)
        try:
            with self._own_random():
                done, _ = self.game.step(action=text)
        except Exception as error:  # games fail on what they do not foresee, which is an answer all the same
            return self._failed(player, error, out)
        self.faults = 0
        lost = bool(state.game_info[player].get("invalid_move"))
        invalid = lost or (self._next() == player and getattr(state, "error_count", 0) > 0)
        info: dict[str, Any] = {"invalid": float(invalid)}
        if done:
            self._settle()
            told = state.game_info[player].get("reason") or "The game is over."
            return StepResult(messages=[user(str(told))], terminated=True, info=info)
        following = self._next()
        return StepResult(messages=[self._told(following)], agent=self._agent(following), truncated=out, info=info)

    def score(self) -> float | dict[str, float]:
        if self.players == 1:
            return self.scores[0]
        return {self._agent(player): score for player, score in self.scores.items()}

    def close(self) -> None:
        self.game = None

    def _next(self) -> int:
        return int(self.game.state.current_player_id)

    def _agent(self, player: int) -> str:
        return "main" if self.players == 1 else f"player{player}"

    def _told(self, player: int) -> Message:
        """What `player` has not been told yet, but for its own moves, which are its turns."""
        texts = []
        with self._own_random():
            _, news = self.game.get_observation()
        for note in news:
            # Sender, text and kind; a few games give them in another order.
            sender = next((part for part in note if type(part) is int), -1)
            text = next((part for part in note if isinstance(part, str)), "")
            kind = next((part.name for part in note if hasattr(part, "name")), "")
            if kind == "PLAYER_ACTION" and (sender == player or self.players == 1):
                continue
            texts.append(f"[Player {sender}] {text}" if sender >= 0 else text)
        return user("\n".join(texts) or "It is your turn.")

    def _failed(self, player: int, error: Exception, out: bool) -> StepResult:
        self.faults += 1
        if over := self.faults >= MAX_FAULTS:
            self.scores[player] = -1.0
        text = f"This could not be played ({type(error).__name__}: {error}). Write a move as the rules have it."
        return StepResult(
            messages=[user(text)], terminated=over, truncated=out and not over, info={"invalid": 1.0, "fault": 1.0}
        )

    def _settle(self) -> None:
        state = self.game.state
        for player in self.scores:
            score = (state.rewards or {}).get(player, 0.0)
            is_number = isinstance(score, int | float) and math.isfinite(score)
            self.scores[player] = float(score) if is_number else 0.0
            if state.game_info[player].get("invalid_move"):
                self.scores[player] = -1.0


def package() -> tuple[dict[str, Any], Any]:
    """textarena's registry and its make, cut off from the network: games download words when they are imported."""
    nltk = import_extra("nltk", NAME)
    nltk.download = lambda *args, **kwargs: False  # what is there is found all the same
    textarena = import_extra("textarena", NAME)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise Offline("another model, which plays or judges in it")

    textarena.agents.OpenRouterAgent.__init__ = refuse
    return import_extra("textarena.envs.registration", NAME).ENV_REGISTRY, textarena.make


def unwrap(game: Any) -> tuple[Any, list[Any]]:
    """The game itself, and its wrappers that change actions, the outermost first.

    Those of observations are left out: they repeat all that was said before.
    """
    formats = []
    while hasattr(game, "is_wrapped_with"):
        if callable(getattr(type(game), "action", None)):
            formats.append(game)
        game = game.env
    return game, formats


def user(text: str) -> Message:
    return {"role": "user", "content": text}
