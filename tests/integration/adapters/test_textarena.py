"""Games of textarena, against the package itself."""

import random
import socket
from typing import Any

import pytest

from conf.errors import ConfigError
from rollout.adapters.textarena import TextArena, package
from rollout.environment import StepResult
from tests.integration.adapters.hosting import play_hosted
from tests.unit.rollout.envs.playing import act, begin, play

TARGET = "rollout.adapters.textarena.TextArena"
HANOI: dict[str, Any] = {"id": "TowerOfHanoi-v0"}
SOLVED = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
X_WINS = ["[0]", "[4]", "[1]", "[2]", "[8]", "[6]"]  # textarena lets O, player 0, begin


def played(kwargs: dict[str, Any], texts: list[str], seed: int = 3) -> tuple[Any, list[StepResult]]:
    env = TextArena(**kwargs)
    results = play(env, {"seed": seed}, texts)
    score = env.score()
    env.close()
    env.close()
    return score, results


def test_puzzle_that_is_solved_gets_full_score_and_one_that_is_not_less() -> None:
    score, results = played(HANOI, SOLVED)
    assert score == 1.0 and results[-1].terminated and len(results) == 7
    assert [result.reward for result in results] == [0.0] * 7
    assert played(HANOI, ["[A B]", "[B A]"] * 7)[0] < 0.5


def test_two_players_act_in_turn_with_scores_of_their_own() -> None:
    env = TextArena()
    begun = begin(env, {"seed": 0})
    assert begun.agent == "player0" and "You are Player 0" in begun.messages[0]["content"]
    first = act(env, "[0]")
    assert first.agent == "player1" and "You are Player 1" in first.messages[0]["content"]
    second = act(env, "[4]")
    assert second.agent == "player0"
    told = second.messages[0]["content"]
    assert "[Player 1] [4]" in told and "[Player 0]" not in told and "You are Player" not in told
    score, results = played({}, X_WINS)
    assert score == {"player0": -1.0, "player1": 1.0} and results[-1].terminated


def test_score_is_that_of_the_package() -> None:
    import textarena

    for id, texts in (("TicTacToe-v0", X_WINS), ("TowerOfHanoi-v0", SOLVED), ("PigDice-v0-50", ["[hold]"] * 60)):
        real = textarena.make(f"{id}-raw" if id != "PigDice-v0-50" else id)
        real.reset(num_players=1 if "Hanoi" in id else 2, seed=5)
        for text in texts:
            real.get_observation()
            if real.step(action=text)[0]:
                break
        rewards, _ = real.close()
        score, _ = played({"id": id}, texts, seed=5)
        rewards = rewards or {0: 0.0, 1: 0.0}
        assert (list(score.values()) if isinstance(score, dict) else [score]) == [rewards[i] for i in sorted(rewards)]


@pytest.mark.parametrize("id", ["TowerOfHanoi-v0", "RushHour-v0", "PegJump-v0", "Countdown-v0", "2048-v0-ultra-easy"])
def test_nonsense_is_answered_once_and_then_loses(id) -> None:
    score, results = played({"id": id}, ["nonsense"] * 9)
    assert score == -1.0 and len(results) == 2 and results[-1].terminated
    assert [result.info["invalid"] for result in results] == [1.0, 1.0]
    assert "invalid move" in results[0].messages[0]["content"]
    assert played({}, ["[0]", "none", "none"])[0] == {"player0": 1.0, "player1": -1.0}


def test_bad_move_is_forgiven_after_a_good_one() -> None:
    score, results = played(HANOI, [text for good in SOLVED for text in ("hm", good)])
    assert score == 1.0
    assert [result.info["invalid"] for result in results] == [1.0, 0.0] * 7


def test_game_that_fails_on_a_text_answers_it(monkeypatch) -> None:
    env = TextArena(**HANOI)
    begin(env, {"seed": 0})

    def fail(action: str) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(env.game, "step", fail)
    first, second = act(env, "[A C]"), act(env, "[A C]")
    assert first.info["fault"] == 1.0 and not first.terminated and "could not be played" in first.messages[0]["content"]
    assert second.terminated and env.score() == -1.0


def test_turns_truncate_without_score() -> None:
    score, results = played({"turns": 3, **HANOI}, SOLVED)
    assert len(results) == 3 and results[-1].truncated and not results[-1].terminated and score == 0.0


def test_task_is_pure_and_plays_the_same_whatever_else_draws() -> None:
    for id, texts in (
        ("2048-v0-ultra-easy", ["[left]", "[up]", "[right]", "[down]"] * 3),
        ("KuhnPoker-v0", ["[check]"] * 4),
    ):
        tasks = [TextArena.make_task("train", 1, i, id=id) for i in range(6)]
        assert tasks == [TextArena.make_task("train", 1, i, id=id) for i in range(6)]

        def story(task: dict[str, Any], id: str = id, texts: list[str] = texts) -> list[str]:
            env = TextArena(id)
            told = [begin(env, task).messages[0]["content"]]
            for text in texts:
                random.random()
                if (result := act(env, text)).terminated:
                    break
                told.append(result.messages[0]["content"])
            return told

        assert [story(task) for task in tasks] == [story(task) for task in tasks]
        assert len({story(task)[0] for task in tasks}) > 1
    train = {TextArena.make_task("train", 0, i)["seed"] for i in range(1, 200)}
    assert train.isdisjoint(TextArena.make_task("eval", 0, i)["seed"] for i in range(1, 200))


def test_games_leave_the_generator_of_others_alone() -> None:
    random.seed(7)
    wanted = [random.random() for _ in range(3)]
    random.seed(7)
    env = TextArena("2048-v0-ultra-easy")
    found = [random.random()]
    begin(env, {"seed": 0})
    found.append(random.random())
    act(env, "[left]")
    assert [*found, random.random()] == wanted


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"id": "TicTacTo-v0"}, r"env\.kwargs\.id=TicTacTo-v0: no such game; did you mean 'TicTacToe-v0'"),
        ({"id": "Wordle-v0"}, r"env\.kwargs\.id=Wordle-v0: needs the network, for word lists"),
        ({"id": "Hangman-v0"}, r"env\.kwargs\.id=Hangman-v0: needs the network, for word lists"),
        ({"id": "GuessWho-v0"}, r"env\.kwargs\.id=GuessWho-v0: needs the network, for another model"),
        ({"id": "Debate-v0"}, r"env\.kwargs\.id=Debate-v0: needs the network, for another model"),
        ({"id": "ThreePlayerGOPS-v0"}, r"env\.kwargs\.id=ThreePlayerGOPS-v0 .*one or two"),
        ({"kwargs": {"board": 3}}, r"env\.kwargs\.id=TicTacToe-v0 with kwargs=.*board"),
        ({"turns": 0}, r"env\.kwargs\.turns=0"),
    ],
)
def test_impossible_arguments_are_refused(kwargs, words, monkeypatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "x")
    with pytest.raises(ConfigError, match=words):
        TextArena(**kwargs)


def test_no_game_asks_the_network(monkeypatch) -> None:
    asked: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", note)
    monkeypatch.setattr(socket, "getaddrinfo", note)
    playable, families = [], set()
    for id in package()[0]:
        family = id.split("-v0")[0]
        if family in families or family in ("Sokoban", "PublicGoodsGame"):  # slow
            continue
        families.add(family)
        try:
            begin(TextArena(id), {"seed": 1})
            playable.append(id)
        except ConfigError:
            continue
    assert not asked and len(playable) > 50


def test_episode_in_a_process_gets_full_score() -> None:
    _, steps, score = play_hosted(TARGET, HANOI, {"seed": 0}, SOLVED)
    assert score == 1.0 and steps[-1].terminated
