"""Environments of gymnasium and minigrid with a few named actions, and observations that can be put into text."""

import re
from collections.abc import Sequence
from typing import Any

from conf.errors import ConfigError
from conf.imports import nearest
from rollout.adapters.extras import import_extra
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.envs.splits import draw, generator
from rollout.tool_calls import without_thinking

NAME = "gymnasium"
MAX_NUMBERS = 32  # of a Box that is shown
ANSI = re.compile(r"\x1b\[([0-9;]*)m")
# What gymnasium says of the actions of its own environments only in their documentation.
ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "stay", "right"),
    "Acrobot": ("negative", "none", "positive"),
}
LABELS = {
    "Blackjack": ("your sum", "dealer's card", "usable ace"),
    "CartPole": ("position", "velocity", "angle", "angular velocity"),
    "MountainCar": ("position", "velocity"),
}
SIGNS = {"unseen": "?", "empty": ".", "floor": ".", "wall": "#", "goal": "G", "lava": "~", "key": "K", "ball": "O"}
SIGNS |= {"box": "B", "agent": "@"}
DOORS = ("|", "D", "L")  # open, closed, locked
HEADINGS = "right", "down", "left", "up"
LEGEND = (
    "Grid: . empty, # wall, ? not seen, G goal, ~ lava, K key, O ball, B box, | open door, D closed door, L locked "
    "door; the letter behind is the colour (r red, g green, b blue, p purple, y yellow, e grey). @ is you."
)


class Gymnasium:
    """An action is named by its name, in a turn that names no other. Rewards, terminated and truncated are gymnasium's.

    id: of the registry, MiniGrid's and BabyAI's included. kwargs: arguments of that environment; FrozenLake with
    map_name=null has a map of its own for each task. actions: names of the actions, in their order; without them, those
    that are known, or numbers. turns: after so many turns of any kind the episode is truncated.
    view: what is seen of MiniGrid: "full", the whole grid, or "agent", what the agent faces (upwards).

    A turn that names no action is answered, and not played (info: invalid). Evaluation has other seeds than training;
    in environments that always begin alike these differ only in their later chances.
    """

    def __init__(
        self,
        id: str = "FrozenLake-v1",
        kwargs: dict[str, Any] | None = None,
        actions: Sequence[str] = (),
        turns: int = 100,
        view: str = "full",
    ):
        if turns < 1:
            raise ConfigError(f"env.kwargs.turns={turns}: must be >= 1")
        if view not in ("full", "agent"):
            raise ConfigError(f"env.kwargs.view={view!r}: must be full or agent")
        self.id, self.kwargs, self.turns, self.view = id, dict(kwargs or {}), turns, view
        self.family = id.rpartition("-v")[0] or id
        self.env: Any = None
        self.env = self._make(0)
        try:
            self._check_observations()
            self.names = self._action_names(actions)
        except ConfigError:
            self.close()
            raise

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        if index == 0:
            Gymnasium(**kwargs).close()
        rng = generator(NAME, split, seed, index)
        return {"seed": draw(rng, split, lambda rng: rng.randrange(2**31))}

    def _make(self, seed: int) -> Any:
        """Raises ConfigError."""
        gym = import_extra("gymnasium", NAME)
        if self.family.startswith(("MiniGrid-", "BabyAI-")):
            import_extra("minigrid", NAME)
        if ":" not in self.id and self.id not in gym.registry:
            raise ConfigError(f"env.kwargs.id={self.id}: no such environment{nearest(self.id, list(gym.registry))}")
        if "render_mode" in self.kwargs:
            raise ConfigError("env.kwargs.kwargs.render_mode: leave it out; text is rendered where there is any")
        given = dict(self.kwargs)
        if self.family == "FrozenLake" and given.get("map_name", "") is None and not given.get("desc"):
            # The package would draw the map without a seed.
            given["desc"] = import_extra("gymnasium.envs.toy_text.frozen_lake", NAME).generate_random_map(seed=seed)
        try:
            env = gym.make(self.id, disable_env_checker=True, **given)
            if "ansi" in (env.metadata.get("render_modes") or ()):
                env.close()
                env = gym.make(self.id, disable_env_checker=True, render_mode="ansi", **given)
            return env
        except Exception as error:
            raise ConfigError(f"env.kwargs.id={self.id} with kwargs={self.kwargs}: {error}") from error

    def _check_observations(self) -> None:
        if not self._is_grid() and (reason := unfit(self.env.observation_space)):
            raise ConfigError(f"env.kwargs.id={self.id}: its observations cannot be shown as text: {reason}")

    def _action_names(self, given: Sequence[str]) -> list[str]:
        space = self.env.action_space
        if type(space).__name__ != "Discrete":
            raise ConfigError(f"env.kwargs.id={self.id}: its actions are {space}; only a Discrete space can be named")
        count = int(space.n)
        names = list(given)
        if not names and self._is_grid():
            names = [action.name for action in self.env.unwrapped.actions]
        names = names or list(ACTIONS.get(self.family, ())) or [str(int(space.start) + i) for i in range(count)]
        if len(names) != count or len({name.lower() for name in names}) != count or not all(names):
            raise ConfigError(f"env.kwargs.actions={names}: {self.id} has {count} actions; give each a name of its own")
        return names

    def _is_grid(self) -> bool:
        return hasattr(self.env.unwrapped, "agent_view_size")

    def reset(self, task: Task) -> Observation:
        seed = int(task.data["seed"])
        self.close()
        self.env, self.played = self._make(seed), 0
        seen, _ = self.env.reset(seed=seed)
        about = f"You act in {self.id}, step by step. Actions: {', '.join(self.names)}. Reply with one action."
        return Observation(messages=[user("\n".join([about, *[LEGEND] * self._is_grid(), self._show(seen)]))])

    def step(self, action: Action) -> StepResult:
        self.played += 1
        out = self.played >= self.turns
        chosen = self._chosen(without_thinking(action.content))
        if chosen is None:
            text = f"Not played: name one of {', '.join(self.names)}, and no other."
            return StepResult(messages=[user(text)], truncated=out, info={"invalid": 1.0})
        seen, reward, terminated, truncated, _ = self.env.step(int(self.env.action_space.start) + chosen)
        return StepResult(
            messages=[user(self._show(seen))],
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) or (out and not terminated),
            info={"invalid": 0.0},
        )

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
        self.env = None

    def _chosen(self, text: str) -> int | None:
        """The number of the action that is named, counted from 0; None where there is none, or more than one."""
        lower = [name.lower() for name in self.names]
        if (whole := text.strip().strip(".!'\"`*").lower()) in lower:
            return lower.index(whole)
        # The longest first, so that none is found within another.
        pattern = "|".join(re.escape(name) for name in sorted(lower, key=len, reverse=True))
        found = set(re.findall(rf"(?<![\w-])(?:{pattern})(?!\w)", text.lower()))
        return lower.index(found.pop()) if len(found) == 1 else None

    def _show(self, seen: Any) -> str:
        if self._is_grid():
            return self._show_grid(seen)
        if self.family == "Taxi":
            return self._show_taxi(int(seen))
        if self.env.render_mode == "ansi":
            return without_colours(self.env.render())
        return show(self.env.observation_space, seen, LABELS.get(self.family, ()))

    def _show_taxi(self, state: int) -> str:
        row, column, passenger, destination = self.env.unwrapped.decode(state)
        where = f"waits at {'RGYB'[passenger]}" if passenger < 4 else "is in the taxi"
        board = "\n".join(ANSI.sub("", self.env.render()).split("\n")[:7])  # without the action below it
        return (
            f"{board}\nThe taxi is in row {row}, column {column}, counted from 0. The passenger {where}. "
            f"The destination is {'RGYB'[destination]}."
        )

    def _show_grid(self, seen: dict[str, Any]) -> str:
        env = self.env.unwrapped
        cells = seen["image"] if self.view == "agent" else env.grid.encode()
        width, height = int(cells.shape[0]), int(cells.shape[1])
        agent = (width // 2, height - 1) if self.view == "agent" else tuple(int(part) for part in env.agent_pos)
        rows = [
            " ".join("@ " if (x, y) == agent else sign(cells[x, y]) for x in range(width)).rstrip()
            for y in range(height)
        ]
        carried = f"{env.carrying.color} {env.carrying.type}" if env.carrying else "nothing"
        facing = "" if self.view == "agent" else f" You face {HEADINGS[int(env.agent_dir)]}."
        return "\n".join([*rows, f"Mission: {seen['mission']}.{facing} You carry {carried}."])


def sign(cell: Any) -> str:
    """Two characters for a cell of MiniGrid: what lies there, and its colour. cell: its type, colour and state, [3]."""
    constants = import_extra("minigrid.core.constants", NAME)
    kind, colour = constants.IDX_TO_OBJECT[int(cell[0])], constants.IDX_TO_COLOR.get(int(cell[1]), "")
    mark = DOORS[int(cell[2])] if kind == "door" else SIGNS[kind]
    coloured = kind in ("door", "key", "ball", "box")
    return mark + ({"grey": "e"}.get(colour, colour[:1]) if coloured else " ")


def unfit(space: Any) -> str:
    """Why observations of a space cannot be shown; "" when they can."""
    kind = type(space).__name__
    if kind in ("Text", "Discrete", "MultiDiscrete", "MultiBinary"):
        return ""
    if kind == "Box":
        size = 1
        for part in space.shape:
            size *= part
        return "" if size <= MAX_NUMBERS else f"{space.shape} is {size} numbers, more than {MAX_NUMBERS}"
    if kind in ("Tuple", "Dict"):
        parts = space.spaces.values() if kind == "Dict" else space.spaces
        return next((reason for part in parts if (reason := unfit(part))), "")
    return f"{kind} is not known"


def show(space: Any, value: Any, labels: Sequence[str] = ()) -> str:
    """An observation as text: texts as they are, numbers to four digits, with names where there are any."""
    kind = type(space).__name__
    if kind == "Text":
        return str(value)
    if kind == "Dict":
        return "\n".join(f"{key}: {show(part, value[key])}" for key, part in space.spaces.items())
    if kind == "Tuple":
        parts = [show(part, one) for part, one in zip(space.spaces, value, strict=True)]
    elif kind == "Discrete":
        return str(int(value))
    else:
        parts = [f"{float(number):.4g}" for number in value.reshape(-1)]
    if len(labels) == len(parts):
        return ", ".join(f"{label} {part}" for label, part in zip(labels, parts, strict=True))
    return " ".join(parts)


def without_colours(text: str) -> str:
    """A rendered text without its colours; what had a background of its own stands in [ ]."""
    marked = re.sub(r"\x1b\[[0-9;]*4[0-9]m(.*?)\x1b\[0m", r"[\1]", text)
    return ANSI.sub("", marked).strip("\n")


def user(text: str) -> Message:
    return {"role": "user", "content": text}
