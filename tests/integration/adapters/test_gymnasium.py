"""Environments of gymnasium and minigrid, against the packages themselves."""

from typing import Any

import gymnasium
import pytest

from conf.errors import ConfigError
from rollout.adapters.gymnasium import Gymnasium
from rollout.environment import StepResult
from tests.integration.adapters.hosting import play_hosted
from tests.unit.rollout.envs.playing import act, begin, play, total

TARGET = "rollout.adapters.gymnasium.Gymnasium"
LAKE: dict[str, Any] = {"kwargs": {"is_slippery": False}}
ACROSS = ["down", "down", "right", "right", "down", "right"]
EMPTY: dict[str, Any] = {"id": "MiniGrid-Empty-5x5-v0"}
TO_GOAL = ["forward", "forward", "right", "forward", "forward"]


def text_of(result: StepResult) -> str:
    return result.messages[0]["content"]


def test_episode_by_known_way_is_rewarded_as_gymnasium_does() -> None:
    results = play(Gymnasium(**LAKE), {"seed": 5}, ACROSS)
    assert [result.reward for result in results] == [0.0] * 5 + [1.0]
    assert results[-1].terminated and not results[-1].truncated
    lost = play(Gymnasium(**LAKE), {"seed": 5}, ["right", "down"])
    assert total(lost) == 0.0 and lost[-1].terminated and "F[H]FH" in text_of(lost[-1])


@pytest.mark.parametrize("id", ["Taxi-v4", "Blackjack-v1", "CartPole-v1", "CliffWalking-v1", "MiniGrid-DoorKey-5x5-v0"])
def test_rewards_and_ends_are_those_of_the_package(id) -> None:
    env, real = Gymnasium(id), gymnasium.make(id)
    begin(env, {"seed": 11})
    real.reset(seed=11)
    for i in range(20):
        number = i % 2
        result = act(env, env.names[number])
        _, reward, terminated, truncated, _ = real.step(number)
        assert (result.reward, result.terminated, result.truncated) == (reward, terminated, truncated)
        if terminated or truncated:
            break
    real.close()


def test_minigrid_is_shown_and_solved() -> None:
    env = Gymnasium(**EMPTY)
    begun = begin(env, {"seed": 0}).messages[0]["content"]
    assert "#  @  .  .  #" in begun and "get to the green goal square" in begun and "You face right" in begun
    results = play(env, {"seed": 0}, TO_GOAL)
    assert total(results) == pytest.approx(0.955) and results[-1].terminated
    assert total(play(env, {"seed": 0}, ["left"] * 5)) == 0.0
    env.close()
    env.close()


def test_minigrid_by_the_eyes_of_the_agent_hides_the_rest() -> None:
    key: dict[str, Any] = {"id": "MiniGrid-DoorKey-6x6-v0"}
    assert "?" not in begin(Gymnasium(**key), {"seed": 3}).messages[0]["content"].split("you.")[1]
    partial = begin(Gymnasium(**key, view="agent"), {"seed": 3}).messages[0]["content"].split("you.")[1]
    assert partial.count("?") > 20 and partial.count("@") == 1


def test_time_limits_of_gymnasium_and_of_turns_truncate() -> None:
    results = play(Gymnasium(turns=1000, **LAKE), {"seed": 0}, ["left"] * 200)
    assert len(results) == 100 and results[-1].truncated and not results[-1].terminated
    results = play(Gymnasium(**EMPTY, kwargs={"max_steps": 3}), {"seed": 0}, ["left"] * 9)
    assert len(results) == 3 and results[-1].truncated
    results = play(Gymnasium(turns=4, **LAKE), {"seed": 0}, ["hm"] * 9)
    assert len(results) == 4 and results[-1].truncated and results[-1].info["invalid"] == 1.0


@pytest.mark.parametrize(
    ("text", "invalid"),
    [
        ("down", 0.0),
        ("DOWN.", 0.0),
        ("up or right?</think>I go **down**.", 0.0),
        ("down, down!", 0.0),
        ("down or up", 1.0),
        ("downward", 1.0),
        ("1", 1.0),
        ("", 1.0),
    ],
)
def test_action_is_named_or_answered(text, invalid) -> None:
    env = Gymnasium(**LAKE)
    begin(env, {"seed": 0})
    result = act(env, text)
    assert result.info["invalid"] == invalid and not result.terminated
    assert ("[F]HFH" in text_of(result)) is (not invalid)
    assert not invalid or "name one of left, down, right, up" in text_of(result)


def test_names_may_be_given_and_are_numbers_where_none_is_known() -> None:
    env = Gymnasium(actions=["west", "south", "east", "north"], **LAKE)
    begin(env, {"seed": 0})
    assert "S[F]FF" in text_of(act(env, "east"))
    assert Gymnasium("CliffWalking-v1", actions=["0", "1", "2", "3"]).names == ["0", "1", "2", "3"]


def test_task_is_pure_and_begins_the_same() -> None:
    several: list[dict[str, Any]] = [
        {"id": "MiniGrid-DoorKey-6x6-v0"},
        {"kwargs": {"map_name": None}},
        {"id": "Taxi-v4"},
    ]
    for kwargs in several:
        tasks = [Gymnasium.make_task("train", 1, i, **kwargs) for i in range(5)]
        assert tasks == [Gymnasium.make_task("train", 1, i, **kwargs) for i in range(5)]
        first = [begin(Gymnasium(**kwargs), task).messages[0]["content"] for task in tasks]
        assert first == [begin(Gymnasium(**kwargs), task).messages[0]["content"] for task in tasks]
        assert len(set(first)) > 2
    train = {Gymnasium.make_task("train", 0, i)["seed"] for i in range(200)}
    assert train.isdisjoint(Gymnasium.make_task("eval", 0, i)["seed"] for i in range(200))


def test_slippery_chances_are_those_of_the_task() -> None:
    def way(seed: int) -> list[str]:
        return [text_of(result) for result in play(Gymnasium(), {"seed": seed}, ["right", "down"] * 8)]

    assert way(4) == way(4) and len({tuple(way(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"id": "Taxi-v9"}, r"env\.kwargs\.id=Taxi-v9: no such environment; did you mean 'Taxi-v4'"),
        ({"id": "Pendulum-v1"}, r"env\.kwargs\.id=Pendulum-v1: its actions are Box"),
        ({"id": "Ant-v5"}, r"env\.kwargs\.id=Ant-v5 .*not installed"),
        ({"kwargs": {"nope": 1}}, r"env\.kwargs\.id=FrozenLake-v1 with kwargs=.*nope"),
        ({"kwargs": {"render_mode": "human"}}, r"env\.kwargs\.kwargs\.render_mode"),
        ({"actions": ["a", "b"]}, r"env\.kwargs\.actions=.*has 4 actions"),
        ({"actions": ["a", "b", "c", "A"]}, r"env\.kwargs\.actions="),
        ({"turns": 0}, r"env\.kwargs\.turns=0"),
        ({"view": "top"}, r"env\.kwargs\.view='top'"),
    ],
)
def test_impossible_arguments_are_refused(kwargs, words) -> None:
    with pytest.raises(ConfigError, match=words):
        Gymnasium(**kwargs)


def test_large_observations_are_refused() -> None:
    class Picture(gymnasium.Env):  # type: ignore[misc, unused-ignore]
        observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3))
        action_space = gymnasium.spaces.Discrete(2)

    gymnasium.register("Picture-v0", entry_point=Picture)
    try:
        with pytest.raises(ConfigError, match=r"env\.kwargs\.id=Picture-v0: .*192 numbers, more than 32"):
            Gymnasium("Picture-v0")
    finally:
        gymnasium.registry.pop("Picture-v0")


def test_episode_in_a_process_gets_full_reward() -> None:
    _, steps, _ = play_hosted(TARGET, EMPTY, {"seed": 0}, TO_GOAL)
    assert steps[-1].reward == pytest.approx(0.955) and steps[-1].terminated
