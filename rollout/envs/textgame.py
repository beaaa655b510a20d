"""A text adventure: rooms, locked doors and their keys, and a treasure that can always be reached."""

import json
import random
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from conf.errors import ConfigError
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.envs.splits import draw, generator
from rollout.tool_calls import without_thinking

ROOMS = (
    "hall", "kitchen", "library", "cellar", "attic", "garden", "study", "workshop", "pantry", "bedroom", "chapel",
    "tower",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "white")
STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
COMMANDS = "go DIRECTION, take THING, unlock DIRECTION, look, inventory"
VERBS = re.compile(r"\b(go|take|unlock|look|inventory)\b")


class State(NamedTuple):
    room: int
    keys: frozenset[str]  # carried
    opened: frozenset[str]  # colours of the doors that are unlocked
    won: bool = False


class TextGame:
    """The command is the first line of a turn. Reward 1.0 for taking the treasure.

    rooms: 2 to 12; doors: how many of the ways between them are locked, at most 4 and fewer than rooms.
    turns: how many commands there are; 0 is twice what is needed, and ten more.
    """

    def __init__(self, rooms: int = 6, doors: int = 2, turns: int = 0):
        if not 2 <= rooms <= len(ROOMS):
            raise ConfigError(f"env.kwargs.rooms={rooms}: must be 2 to {len(ROOMS)}")
        if not 0 <= doors <= min(len(COLOURS), rooms - 1):
            raise ConfigError(
                f"env.kwargs.doors={doors} with rooms={rooms}: must be 0 to {min(len(COLOURS), rooms - 1)}"
            )
        if turns < 0:
            raise ConfigError(f"env.kwargs.turns={turns}: must be >= 1, or 0 for enough of them")
        self.rooms, self.doors, self.turns = rooms, doors, turns

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        env = TextGame(**kwargs)
        return draw(generator("textgame", split, seed, index), split, env._map, _plan)

    def _map(self, rng: random.Random) -> dict[str, Any]:
        """A tree of rooms. The key of a door lies in a room made before the one behind it, so it is reached before."""
        cells, ways = [(0, 0)], []
        while len(cells) < self.rooms:
            room, way = rng.randrange(len(cells)), rng.choice(list(STEPS))
            cell = (cells[room][0] + STEPS[way][0], cells[room][1] + STEPS[way][1])
            if cell not in cells:
                ways.append([room, way, len(cells), ""])
                cells.append(cell)
        colours, keys = rng.sample(COLOURS, self.doors), {}
        for colour, i in zip(colours, rng.sample(range(len(ways)), self.doors), strict=True):
            ways[i][3] = colour
            keys[colour] = rng.randrange(i + 1)
        return {"rooms": rng.sample(ROOMS, self.rooms), "ways": ways, "keys": keys, "treasure": self.rooms - 1}

    def reset(self, task: Task) -> Observation:
        data = task.data
        self.names, self.lies, self.treasure = list(data["rooms"]), dict(data["keys"]), int(data["treasure"])
        self.exits: list[dict[str, tuple[int, str]]] = [{} for _ in self.names]  # way -> (room, colour of its door)
        for room, way, behind, colour in data["ways"]:
            self.exits[room][way] = (behind, colour)
            self.exits[behind][BACK[way]] = (room, colour)
        self.state = State(0, frozenset(), frozenset())
        self.played = 0
        self.limit = self.turns or 2 * len(self._solution()) + 10
        start = f"Find the treasure and take it. Commands: {COMMANDS}. Reply with one command.\n{self._look()}"
        return Observation(messages=[_user(start)])

    def step(self, action: Action) -> StepResult:
        self.played += 1
        text = self._act(without_thinking(action.content))
        won = self.state.won
        over = won or self.played >= self.limit
        info = {"won": float(won), "commands": self.played} if over else {}
        return StepResult(messages=[_user(text)], reward=float(won), terminated=over, info=info)

    def close(self) -> None:
        return None

    def oracle(self) -> str:
        return self._solution()[0]

    def _act(self, text: str) -> str:
        """Plays the command and says what came of it."""
        line = text.strip().lower().split("\n")[0]
        verb = VERBS.search(line)
        if not verb:
            return f"That is no command. Commands: {COMMANDS}."
        words = re.findall(r"[a-z]+", line[verb.end() :])
        if verb[1] == "look":
            return self._look()
        if verb[1] == "inventory":
            return self._carried()
        for command, state in self._moves(self.state):
            if self._means(verb[1], words, command):
                self.state = state
                return self._look() if verb[1] == "go" else "You win!" if state.won else f"Done: {command}."
        return self._refusal(verb[1], words)

    def _means(self, verb: str, words: list[str], command: str) -> bool:
        """Whether the words ask for this command. A door may be named by way, colour or neither; a key, by neither."""
        wanted, *rest = command.split()
        if wanted != verb:
            return False
        if verb == "unlock":
            colour = self.exits[self.state.room][rest[0]][1]
            named = [word for word in words if word in STEPS or word in COLOURS]
            return ("door" in words and not named) or (bool(named) and set(named) <= {rest[0], colour})
        if rest[-1] == "key" and not set(words) & set(COLOURS):
            return "key" in words
        return all(word in words for word in rest)

    def _refusal(self, verb: str, words: list[str]) -> str:
        exits = self.exits[self.state.room]
        way = next((word for word in words if word in STEPS), "")
        if verb == "take":
            return "You see no such thing here."
        if verb == "go":
            return f"The {exits[way][1]} door is locked." if way in exits else "There is no way there."
        locked = [colour for _, colour in exits.values() if colour and colour not in self.state.opened]
        return "You lack the key." if locked else "There is no locked door here."

    def _moves(self, state: State) -> Iterator[tuple[str, State]]:
        """All commands that change something in a state, with what they lead to."""
        for way, (room, colour) in self.exits[state.room].items():
            if not colour or colour in state.opened:
                yield f"go {way}", state._replace(room=room)
            elif colour in state.keys:
                yield f"unlock {way}", state._replace(opened=state.opened | {colour})
        for colour, room in self.lies.items():
            if room == state.room and colour not in state.keys:
                yield f"take {colour} key", state._replace(keys=state.keys | {colour})
        if state.room == self.treasure:
            yield "take treasure", state._replace(won=True)

    def _solution(self) -> list[str]:
        """The fewest commands from here to the treasure."""
        came: dict[State, tuple[State, str] | None] = {self.state: None}
        waiting = deque([self.state])
        while waiting:
            state = waiting.popleft()
            if state.won:
                commands: list[str] = []
                while (before := came[state]) is not None:
                    state, command = before
                    commands.append(command)
                return commands[::-1]
            for command, following in self._moves(state):
                if following not in came:
                    came[following] = (state, command)
                    waiting.append(following)
        raise ValueError(f"the treasure in {self.names[self.treasure]} cannot be reached; the task's map is wrong")

    def _look(self) -> str:
        here, parts = self.state.room, []
        for way, (_, colour) in sorted(self.exits[here].items()):
            locked = colour and colour not in self.state.opened
            parts.append(f"{way} ({colour} door, locked)" if locked else way)
        seen = [f"a {c} key" for c, room in sorted(self.lies.items()) if room == here and c not in self.state.keys]
        seen += ["the treasure"] * (here == self.treasure)
        things = f" You see {', '.join(seen)}." if seen else ""
        return f"You are in the {self.names[here]}.{things} Exits: {', '.join(parts)}. {self._carried()}"

    def _carried(self) -> str:
        return f"You carry {', '.join(f'a {colour} key' for colour in sorted(self.state.keys)) or 'nothing'}."


def _plan(made: dict[str, Any]) -> str:
    """What makes two maps the same: all but the names of the rooms."""
    return json.dumps([made["ways"], made["keys"]])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
