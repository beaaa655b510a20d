"""TicTacToe: two agents in turn, their scores, and a perfect player."""

import random

import pytest

from rollout.envs.tictactoe import EMPTY, TicTacToe, best_move, mover, winner
from tests.unit.rollout.envs.playing import act, begin, play


def test_agents_move_in_turn_and_are_told_in_their_own_conversations() -> None:
    env = TicTacToe()
    start = begin(env, {"board": EMPTY})
    assert start.agent == "X" and "You are X" in start.messages[0]["content"]
    first = act(env, "5")
    assert first.agent == "O" and "You are O" in first.messages[0]["content"]
    assert "1 2 3\n4 X 6\n7 8 9" in first.messages[0]["content"]
    second = act(env, "1")
    assert second.agent == "X" and "You are" not in second.messages[0]["content"]


def test_plain_style_shows_the_board_alone() -> None:
    env = TicTacToe(style="plain")
    begin(env, {"board": EMPTY})
    assert act(env, "2").messages[0]["content"] == ".X.\n...\n..."


@pytest.mark.parametrize(
    ("moves", "scores"),
    [
        (["1", "4", "2", "5", "3"], {"X": 1.0, "O": -1.0}),
        (["1", "4", "2", "5", "9", "6"], {"X": -1.0, "O": 1.0}),
        (["5", "1", "2", "8", "3", "7", "4", "6", "9"], {"X": 0.0, "O": 0.0}),
        (["0"], {"X": -1.0, "O": 1.0}),
        (["hm"], {"X": -1.0, "O": 1.0}),
        (["5", "5"], {"X": 1.0, "O": -1.0}),
    ],
)
def test_score_of_a_game(moves, scores) -> None:
    env = TicTacToe()
    results = play(env, {"board": EMPTY}, moves)
    assert len(results) == len(moves) and results[-1].terminated
    assert [result.reward for result in results] == [0.0] * len(moves)
    assert env.score() == scores


def test_oracle_against_itself_draws() -> None:
    env = TicTacToe()
    assert len(play(env, {"board": EMPTY})) == 9
    assert env.score() == {"X": 0.0, "O": 0.0}


@pytest.mark.parametrize("perfect", ["X", "O"])
def test_oracle_never_loses(perfect) -> None:
    rng = random.Random(perfect)
    env = TicTacToe()
    for _ in range(60):
        begin(env, {"board": EMPTY})
        while True:
            agent = mover(env.board)
            free = [str(cell + 1) for cell in range(9) if env.board[cell] == "."]
            if act(env, env.oracle() if agent == perfect else rng.choice(free)).terminated:
                break
        assert env.score()[perfect] >= 0.0


def test_best_move_wins_or_defends_at_once() -> None:
    assert best_move("XX.OO....") == 2
    assert best_move("XX..O....") == 2


def test_openings_are_played_by_the_rules() -> None:
    for opening in range(5):
        board = TicTacToe.make_task("train", 0, 0, opening=opening)["board"]
        assert 9 - board.count(".") == opening and not winner(board)
        assert begin(TicTacToe(opening=opening), {"board": board}).agent == ("X" if opening % 2 == 0 else "O")
