"""TextGame: maps that can always be solved, and commands as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.envs.textgame import TextGame
from tests.unit.rollout.envs.playing import act, begin, play, total

# The red key lies here; behind the red door to the north is the treasure.
DATA = {"rooms": ["hall", "cellar"], "ways": [[0, "north", 1, "red"]], "keys": {"red": 0}, "treasure": 1}
START = "You are in the hall. You see a red key. Exits: north (red door, locked). You carry nothing."


def replies(*texts: str) -> list[str]:
    return [result.messages[0]["content"] for result in play(TextGame(turns=50), DATA, list(texts))]


def test_a_game_from_start_to_end() -> None:
    assert begin(TextGame(), DATA).messages[0]["content"].endswith("\n" + START)
    assert replies("look", "take red key", "unlock north", "go north", "inventory", "take treasure") == [
        START,
        "Done: take red key.",
        "Done: unlock north.",
        "You are in the cellar. You see the treasure. Exits: south. You carry a red key.",
        "You carry a red key.",
        "You win!",
    ]


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("go north", "The red door is locked."),
        ("go east", "There is no way there."),
        ("go", "There is no way there."),
        ("unlock north", "You lack the key."),
        ("take blue key", "You see no such thing here."),
        ("take treasure", "You see no such thing here."),
        ("dance", "That is no command. Commands: go DIRECTION, take THING, unlock DIRECTION, look, inventory."),
        ("", "That is no command. Commands: go DIRECTION, take THING, unlock DIRECTION, look, inventory."),
    ],
)
def test_what_cannot_be_done_is_said(text, reply) -> None:
    assert replies(text) == [reply]


@pytest.mark.parametrize(
    "unlock", ["unlock north", "unlock door", "unlock red door", "I unlock the red door!", "UNLOCK NORTH DOOR"]
)
@pytest.mark.parametrize("take", ["take key", "> Take the red key.", "hm</think>take red key\ngo north"])
def test_commands_may_be_written_in_several_ways(take, unlock) -> None:
    assert replies(take, unlock, "go north")[-1].startswith("You are in the cellar.")
    assert replies(take, "unlock blue door") == ["Done: take red key.", "You lack the key."]


def test_running_out_of_commands_ends_without_reward() -> None:
    results = play(TextGame(turns=3), DATA, ["look"] * 5)
    assert len(results) == 3 and results[-1].terminated and total(results) == 0.0
    assert results[-1].info == {"won": 0.0, "commands": 3}


@given(st.integers(2, 12), st.data(), st.integers(0, 10**6))
def test_every_map_can_be_solved(rooms, data, index) -> None:
    doors = data.draw(st.integers(0, min(4, rooms - 1)))
    task = TextGame.make_task("train", 0, index, rooms=rooms, doors=doors)
    assert len({cell for way in task["ways"] for cell in (way[0], way[2])}) == rooms
    assert sum(bool(way[3]) for way in task["ways"]) == len(task["keys"]) == doors
    assert begin(TextGame(rooms=rooms, doors=doors), task)


def test_oracle_takes_over_anywhere() -> None:
    env = TextGame(turns=50)
    begin(env, DATA)
    for text in ("take key", "unlock door", "go north", "go south"):
        act(env, text)
    assert env.oracle() == "go north"
