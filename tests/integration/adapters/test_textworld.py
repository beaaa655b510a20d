"""Text adventures of textworld, played with the interpreter."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from rollout.adapters.textworld import TextWorld
from rollout.environment import StepResult
from tests.integration.adapters.hosting import play_hosted
from tests.unit.rollout.envs.playing import act, begin, total

pytest.importorskip("jericho", reason="scripts/setup --envs found no make to build it with")

TARGET = "rollout.adapters.textworld.TextWorld"
COIN: dict[str, Any] = {"game": "coin_collector", "settings": {"level": 2}}


@functools.cache
def opening(seed: int) -> str:
    """How a game begins, made in this process."""
    env = TextWorld(**COIN)
    text: str = begin(env, {"seed": seed}).messages[0]["content"]
    env.close()
    return text


def until_end(env: TextWorld) -> list[StepResult]:
    results = [act(env, env.oracle())]
    while not (results[-1].terminated or results[-1].truncated):
        results.append(act(env, env.oracle()))
    return results


def test_game_by_its_walkthrough_gets_full_reward_in_steps(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = TextWorld("simple")
    begin(env, {"seed": 5})
    assert list(tmp_path.iterdir()) == []  # whatever ends the process now, no folder is left
    results = until_end(env)
    assert total(results) == pytest.approx(1.0) and results[-1].terminated
    most = env.state.max_score
    points = [result.reward * most for result in results]
    assert points == pytest.approx([round(point) for point in points]) and sum(point > 0.5 for point in points) > 3
    assert f"You scored {most} out of a possible {most}" in results[-1].messages[0]["content"]  # the game's own count
    assert (results[-1].info["won"], results[-1].info["invalid"]) == (1.0, 0.0)
    env.close()
    env.close()
    assert list(tmp_path.iterdir()) == []


def test_bad_commands_are_answered_and_cannot_leave_the_game() -> None:
    env = TextWorld(hints=True, **COIN)
    begun = begin(env, {"seed": 7}).messages[0]["content"]
    assert "You can: " in begun and "inventory, look" in begun
    assert "$$" not in begun and "\n>" not in begun and "-= " in begun and "RESTART" not in begun
    bad = ["dance", "", "take the moon", "quit", "RESTART", "undo", "save", "\0", "é", "x" * 3000]
    for text in bad:
        result = act(env, text)
        assert (result.info["invalid"], result.reward, result.terminated) == (1.0, 0.0, False), text
        assert result.messages[0]["content"]
    assert env.limit == 14  # twice a walkthrough of two, and ten
    for text in ("look", "hm</think>> INVENTORY\nthen something else"):
        assert act(env, text).info["invalid"] == 0.0
    act(env, "look")
    last = act(env, "look")
    assert last.truncated and not last.terminated and last.info["won"] == 0.0
    env.limit = 100
    assert total(until_end(env)) == 1.0
    env.close()


def test_another_task_is_another_game() -> None:
    assert opening(5) != opening(6)
    tasks = [TextWorld.make_task("train", 1, i, **COIN) for i in range(3)]
    assert tasks == [TextWorld.make_task("train", 1, i, **COIN) for i in range(3)]
    train = {TextWorld.make_task("train", 0, i)["seed"] for i in range(1, 200)}
    assert train.isdisjoint(TextWorld.make_task("eval", 0, i)["seed"] for i in range(1, 200))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"game": "simpel"}, r"env\.kwargs\.game=simpel: .*did you mean 'simple'"),
        ({"settings": {"room": 3}}, r"env\.kwargs\.settings\.room=3: .*did you mean 'rooms'"),
        ({"settings": {"rooms": "3"}}, r"env\.kwargs\.settings\.rooms='3': must be int"),
        ({"settings": {"objects": -1}}, r"env\.kwargs\.settings\.objects=-1: must be >= 0"),
        ({"game": "simple", "settings": {"goal": "x"}}, r"env\.kwargs\.settings\.goal=x: must be one of detailed"),
        ({"turns": -1}, r"env\.kwargs\.turns=-1"),
    ],
)
def test_impossible_arguments_are_refused(kwargs, words) -> None:
    with pytest.raises(ConfigError, match=words):
        TextWorld(**kwargs)


@pytest.mark.parametrize(("game", "settings"), [("coin_collector", {"level": 999}), ("custom", {"rooms": 0})])
def test_settings_of_which_no_game_can_be_made_are_found_by_the_first_task(game, settings) -> None:
    with pytest.raises(ConfigError, match=rf"env\.kwargs\.settings=.*{game} cannot be made"):
        TextWorld.make_task("train", 0, 0, game=game, settings=settings)


def test_episode_in_a_process_is_the_same_gets_full_reward_and_leaves_no_folder() -> None:
    def folders() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("tandem-textworld-*"))

    before = folders()
    begun, steps, _ = play_hosted(TARGET, COIN, {"seed": 5})
    assert begun.messages[0]["content"] == opening(5)
    assert sum(step.reward for step in steps) == 1.0 and steps[-1].terminated
    assert folders() <= before
