"""Tic-tac-toe of two agents, "X" and "O", each with a conversation of its own: self-play."""

import functools
import random
from typing import Any

from conf.errors import ConfigError
from rollout.environment import Action, Message, Observation, StepResult, Task
from rollout.envs.numbers import first_integer
from rollout.envs.splits import draw, generator
from rollout.tool_calls import without_thinking

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe:
    """A move is the first integer of a turn, 1 to 9 by rows. Whoever wins scores 1 and the other -1; a draw is 0.

    A turn that is not a move loses the game.
    opening: so many random moves are made before; from 2 on, no opening of evaluation is one of training.
    style: "plain" shows the board alone, "chat" says what to do.
    """

    def __init__(self, opening: int = 0, style: str = "chat"):
        if not 0 <= opening <= 4:
            raise ConfigError(f"env.kwargs.opening={opening}: must be 0 to 4")
        if style not in ("plain", "chat"):
            raise ConfigError(f"env.kwargs.style={style!r}: must be plain or chat")
        self.opening, self.style = opening, style

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        env = TicTacToe(**kwargs)
        rng = generator("tictactoe", split, seed, index)
        return {"board": draw(rng, split, env._open) if env.opening >= 2 else env._open(rng)}

    def _open(self, rng: random.Random) -> str:
        board = EMPTY
        for cell in rng.sample(range(9), self.opening):
            board = _placed(board, cell)
        return board

    def reset(self, task: Task) -> Observation:
        self.board = str(task.data["board"])
        self.scores = {"X": 0.0, "O": 0.0}
        self.seen: set[str] = set()
        agent = mover(self.board)
        return Observation(messages=[self._show(agent)], agent=agent)

    def step(self, action: Action) -> StepResult:
        agent = mover(self.board)
        move = first_integer(without_thinking(action.content))
        if move is None or not 1 <= move <= 9 or self.board[move - 1] != ".":
            return self._end(_other(agent), legal=0.0)
        self.board = _placed(self.board, move - 1)
        if winner(self.board) or "." not in self.board:
            return self._end(winner(self.board), legal=1.0)
        return StepResult(messages=[self._show(_other(agent))], agent=_other(agent), info={"legal": 1.0})

    def close(self) -> None:
        return None

    def score(self) -> dict[str, float]:
        return dict(self.scores)

    def oracle(self) -> str:
        return str(best_move(self.board) + 1)

    def _end(self, won: str, legal: float) -> StepResult:
        if won:
            self.scores = {won: 1.0, _other(won): -1.0}
        return StepResult(terminated=True, info={"legal": legal, "draw": float(not won)})

    def _show(self, agent: str) -> Message:
        """What `agent` reads before its move: the first time, in chat, with the rules."""
        if self.style == "plain":
            return {"role": "user", "content": "\n".join(self.board[i : i + 3] for i in (0, 3, 6))}
        cells = [mark if mark != "." else str(i + 1) for i, mark in enumerate(self.board)]
        board = "\n".join(" ".join(cells[i : i + 3]) for i in (0, 3, 6))
        rules = (
            f"You play tic-tac-toe. You are {agent}; the free squares have numbers.\n" if agent not in self.seen else ""
        )
        self.seen.add(agent)
        return {
            "role": "user",
            "content": f"{rules}{board}\nYour move, {agent}: reply with the number of a free square.",
        }


def mover(board: str) -> str:
    return "X" if board.count("X") == board.count("O") else "O"


def winner(board: str) -> str:
    """ "X", "O", or "" as long as nobody has won."""
    for a, b, c in LINES:
        if board[a] == board[b] == board[c] != ".":
            return board[a]
    return ""


def best_move(board: str) -> int:
    """The free cell, 0 to 8, that is best against the best replies; the first of several."""
    free = [cell for cell in range(9) if board[cell] == "."]
    return max(free, key=lambda cell: -_value(_placed(board, cell)))


@functools.cache
def _value(board: str) -> int:
    """1, 0 or -1: what whoever is to move can reach."""
    if winner(board):
        return -1
    free = [cell for cell in range(9) if board[cell] == "."]
    return max((-_value(_placed(board, cell)) for cell in free), default=0)


def _placed(board: str, cell: int) -> str:
    return board[:cell] + mover(board) + board[cell + 1 :]


def _other(agent: str) -> str:
    return "O" if agent == "X" else "X"
