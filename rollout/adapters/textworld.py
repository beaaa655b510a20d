"""Text adventures of textworld, made from a seed: each task is a game of its own, compiled for the episode."""

import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.imports import nearest
from rollout.adapters.extras import import_extra
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.envs.splits import draw, generator
from rollout.tool_calls import without_thinking

NAME = "textworld"
MAX_COMMAND = 200  # characters; the interpreter of the games cannot take much more
CUSTOM = "custom"
# Settings of each kind of game, with their defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    CUSTOM: {"rooms": 4, "objects": 5, "quest_length": 4},
    "coin_collector": {"level": 5},
    "treasure_hunter": {"level": 5},
    "simple": {"rewards": "dense", "goal": "detailed", "test": False},
    "cooking": {
        "recipe": 1, "take": 1, "go": 1, "open": False, "cook": False, "cut": False, "drop": False, "recipe_seed": 0,
        "split": "train",
    },
}  # fmt: skip
CHOICES = {
    "rewards": ("dense", "balanced", "sparse"), "goal": ("detailed", "brief", "none"),
    "split": ("train", "valid", "test"),
}  # fmt: skip
# What the interpreter prints for a screen: the logo, the prompt with the status line behind it, indents, its own menu.
SCREEN = re.compile(
    r"\A(?:[ \t$\\/_|>]*\n)+|\n?>\s*-= [^\n]*? =-\s*-?\d+/\d+\s*\Z|^[ \t]+|\s*Would you like to RESTART.*\Z",
    re.DOTALL | re.MULTILINE,
)
# Commands that the interpreter takes itself, and that would end a game or undo it outside of its rules.
OWN = re.compile(r"(?:quit|q|restart|restore|save|undo|script|transcript|verify|again|g|oops)\b", re.IGNORECASE)
# How the game begins its answer to what it does not understand.
REFUSED = re.compile(
    r"That's not a verb|You can't see any such|I beg your pardon|You have to be more specific|I only understood|"
    r"I didn't understand|You seem to have|You can't use multiple|What do you want|Which do you mean|You excepted"
)
WANTED = ("feedback", "score", "max_score", "won", "admissible_commands", "policy_commands")


class TextWorld:
    """The command is the first line of a turn. Rewards add up to score / max_score: 1.0 for a game that is won.

    game: "custom" or one of textworld's challenges: coin_collector, treasure_hunter, simple, cooking. settings: of that
    game, in place of its defaults (SETTINGS); "custom" takes rooms, objects and quest_length, the others what
    textworld takes. turns: commands in a game, after which it is truncated; 0 is twice what its
    walkthrough needs, and ten more. hints: whether the commands that can be given are listed in each turn.

    A game is made for its episode, in two or three seconds. A command that the game does not understand is answered by
    it (info: invalid). Hints and the oracle are textworld's, which loses track after some synonyms ("get" for "take"
    out of something); score and end are not affected. Evaluation has other seeds than
    training; cooking's own split of ingredients is settings.split.
    """

    def __init__(self, game: str = CUSTOM, settings: dict[str, Any] | None = None, turns: int = 0, hints: bool = False):
        import_extra("textworld", NAME)
        if game not in SETTINGS:
            raise ConfigError(f"env.kwargs.game={game}: no such game{nearest(game, list(SETTINGS))}")
        for key, value in (settings or {}).items():
            wanted = SETTINGS[game].get(key)
            if wanted is None:
                raise ConfigError(
                    f"env.kwargs.settings.{key}={value!r}: {game} has no such setting"
                    f"{nearest(key, list(SETTINGS[game]))}"
                )
            if type(value) is not type(wanted):
                raise ConfigError(
                    f"env.kwargs.settings.{key}={value!r}: must be {type(wanted).__name__}, as {wanted!r} is"
                )
            if value not in CHOICES.get(key, (value,)):
                raise ConfigError(f"env.kwargs.settings.{key}={value}: must be one of {', '.join(CHOICES[key])}")
            if type(value) is int and value < 0:
                raise ConfigError(f"env.kwargs.settings.{key}={value}: must be >= 0")
        if turns < 0:
            raise ConfigError(f"env.kwargs.turns={turns}: must be >= 1, or 0 for enough of them")
        self.game, self.settings = game, SETTINGS[game] | (settings or {})
        self.turns, self.hints = turns, hints
        self.env: Any = None

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        """Makes, at index 0, a game without compiling it, so that settings that make none are found at once."""
        env = TextWorld(**kwargs)
        rng = generator(NAME, split, seed, index)
        task = {"seed": draw(rng, split, lambda rng: rng.randrange(2**31))}
        if index == 0:
            env._design(task["seed"])
        return task

    def _design(self, seed: int) -> tuple[Any, Any]:
        """The game and its options. Raises ConfigError for settings of which none can be made."""
        textworld = import_extra("textworld", NAME)
        warnings.filterwarnings("ignore", module="jericho")  # that it does not know games made a moment ago
        options = textworld.GameOptions()
        options.seeds = seed
        try:
            if self.game == CUSTOM:
                options.nb_rooms, options.nb_objects = self.settings["rooms"], self.settings["objects"]
                options.quest_length = self.settings["quest_length"]
                return import_extra("textworld.generator", NAME).make_game(options), options
            make = import_extra("textworld.challenges", NAME).registration.CHALLENGES[f"tw-{self.game}"][1]
            return make(dict(self.settings), options), options
        except Exception as error:
            raise ConfigError(
                f"env.kwargs.settings={self.settings}: {self.game} cannot be made: {type(error).__name__}: {error}"
            ) from error

    def reset(self, task: Task) -> Observation:
        self.close()
        textworld = import_extra("textworld", NAME)
        game, options = self._design(int(task.data["seed"]))
        # The interpreter holds the whole game once it has begun, so no folder is left by a process that is killed.
        with tempfile.TemporaryDirectory(prefix="tandem-textworld-") as folder:
            options.path = str(Path(folder) / "game.z8")
            path = import_extra("textworld.generator", NAME).compile_game(game, options)
            self.env = textworld.start(path, textworld.EnvInfos(**dict.fromkeys(WANTED, True)))
            self.state = self.env.reset()
        self.played, self.paid = 0, 0.0
        self.limit = self.turns or 2 * len(self.state.policy_commands) + 10
        return Observation(
            messages=[
                user(f"{self._told()}\n\nReply with one command, such as: look, inventory, go north, take THING.")
            ]
        )

    def step(self, action: Action) -> StepResult:
        line = without_thinking(action.content).strip().split("\n")[0]
        command = " ".join(line.lstrip("> ").split())[:MAX_COMMAND]
        self.played += 1
        over, told = False, "That is no command of this game."
        if known := command.isascii() and command.isprintable() and not OWN.match(command):
            self.state, _, over = self.env.step(command)
            told = self._told()
        invalid = not known or bool(REFUSED.match(told))
        earned = self.state.score / self.state.max_score if self.state.max_score else 0.0
        reward, self.paid = earned - self.paid, earned
        out = self.played >= self.limit and not over
        info = {"invalid": float(invalid)}
        if over or out:
            info |= {"won": float(bool(self.state.won)), "score": earned}
        return StepResult(messages=[user(told)], reward=reward, terminated=bool(over), truncated=out, info=info)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
        self.env = None

    def oracle(self) -> str:
        """The next command of the shortest way to win that textworld knows from here; "look" where it knows none."""
        return str((self.state.policy_commands or ["look"])[0])

    def _told(self) -> str:
        text = re.sub(r"\n{3,}", "\n\n", SCREEN.sub("", str(self.state.feedback))).strip()
        if self.hints:
            text += f"\nYou can: {', '.join(self.state.admissible_commands)}."
        return text or "Nothing happens."


def user(text: str) -> Message:
    return {"role": "user", "content": text}
