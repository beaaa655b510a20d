"""What all built-in environments keep: pure tasks, splits apart, perfect oracles, episodes that no text breaks."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from rollout.environment import Environment
from rollout.envs.calculator import Calculator
from rollout.envs.guess import Guess
from rollout.envs.ledger import Ledger
from rollout.envs.sqlite_qa import SqliteQa
from rollout.envs.textgame import TextGame
from rollout.envs.tictactoe import TicTacToe
from tests.unit.rollout.envs.playing import play, total

ENVS: list[tuple[Any, dict[str, Any]]] = [
    (Guess, {}),
    (Guess, {"low": 1, "high": 5, "turns": 4, "style": "plain"}),
    (Calculator, {}),
    (Calculator, {"terms": 2, "largest": 9}),
    (SqliteQa, {}),
    (TextGame, {}),
    (TextGame, {"rooms": 9, "doors": 4}),
    (Ledger, {"turns": 12}),
    (TicTacToe, {}),
    (TicTacToe, {"opening": 3, "style": "plain"}),
]
PARTS = [
    "<tool_call>", "</tool_call>", '{"name": "query", "arguments": {"sql": "select 1"}}', '{"name": "submit"}',
    '{"name": "calculate", "arguments": {"expression": "1/0"}}', '{"name": "report", "arguments": {"balance": "x"}}',
    "go ", "take ", "unlock ", "north", "key", "look", "1", "7", "-3", "9" * 30, "```sql\n", "```", "select", "\n",
    "\0",
]  # fmt: skip


@pytest.mark.parametrize(("env", "kwargs"), ENVS)
def test_make_task_is_pure_and_plain(env, kwargs) -> None:
    for split in ("train", "eval", "sft"):
        tasks = [env.make_task(split, 3, i, **kwargs) for i in range(5)]
        assert tasks == [env.make_task(split, 3, i, **kwargs) for i in range(5)]
        assert json.loads(json.dumps(tasks)) == tasks
    with pytest.raises(ConfigError, match="'test'"):
        env.make_task("test", 0, 0, **kwargs)
    with pytest.raises(TypeError):
        env.make_task("train", 0, 0, nothing=1)


@pytest.mark.parametrize(
    ("env", "kwargs", "keys"),
    [
        (Calculator, {}, ["expression"]),
        (Calculator, {"terms": 2, "largest": 9}, ["expression"]),
        (SqliteQa, {}, ["text"]),
        (TextGame, {"rooms": 3, "doors": 1}, ["ways", "keys"]),
        (Ledger, {"turns": 1, "accounts": 2}, ["opening"]),
        (TicTacToe, {"opening": 2}, ["board"]),
    ],
)
def test_tasks_of_evaluation_are_never_trained_on(env, kwargs, keys) -> None:
    def drawn(split: str, count: int) -> set[str]:
        tasks = [env.make_task(split, i % 2, i, **kwargs) for i in range(count)]
        return {json.dumps([task[key] for key in keys]) for task in tasks}

    assert drawn("eval", 20).isdisjoint(drawn("train", 60) | drawn("sft", 60))


@pytest.mark.parametrize(("env", "kwargs"), ENVS)
def test_oracle_reaches_the_full_reward(env, kwargs) -> None:
    for split in ("train", "eval", "sft"):
        for index in range(8):
            player = env(**kwargs)
            assert isinstance(player, Environment)
            results = play(player, env.make_task(split, 1, index, **kwargs))
            assert results[-1].terminated
            if env is TicTacToe:
                assert all(result.info["legal"] for result in results)
            else:
                assert total(results) == pytest.approx(1.0)
            player.close()
            player.close()


@pytest.mark.parametrize(("env", "kwargs"), ENVS)
@settings(max_examples=12)
@given(texts=st.lists(st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=6).map("".join), max_size=6))
def test_no_text_breaks_an_episode_and_the_same_texts_give_the_same(env, kwargs, texts) -> None:
    data = env.make_task("train", 0, 1, **kwargs)
    one, other = env(**kwargs), env(**kwargs)
    assert play(one, data, texts) == play(other, data, texts) == play(one, data, texts)
    one.close()
    one.close()
    other.close()


@pytest.mark.parametrize(("env", "kwargs"), ENVS)
def test_close_before_reset_is_allowed(env, kwargs) -> None:
    env(**kwargs).close()


@pytest.mark.parametrize(
    ("env", "kwargs", "key"),
    [
        (Guess, {"low": 5, "high": 5}, "low"),
        (Guess, {"style": "loud"}, "style"),
        (Guess, {"discount": 0}, "discount"),
        (Guess, {"turns": -1}, "turns"),
        (Calculator, {"terms": 1}, "terms"),
        (SqliteQa, {"max_rows": 0}, "max_rows"),
        (TextGame, {"rooms": 1}, "rooms"),
        (TextGame, {"rooms": 3, "doors": 3}, "doors"),
        (TextGame, {"turns": -1}, "turns"),
        (Ledger, {"accounts": 1}, "accounts"),
        (Ledger, {"turns": 0}, "turns"),
        (TicTacToe, {"opening": 5}, "opening"),
        (TicTacToe, {"style": "loud"}, "style"),
    ],
)
def test_impossible_arguments_are_refused(env, kwargs, key) -> None:
    with pytest.raises(ConfigError, match=rf"env\.kwargs\.{key}="):
        env(**kwargs)


def test_a_space_without_tasks_of_a_split_is_refused() -> None:
    from rollout.envs.splits import draw, generator

    with pytest.raises(ConfigError, match="belongs"):
        draw(generator("x", "train", 0, 0), "eval", lambda rng: "always", lambda item: "a")


def test_environments_import_nothing_heavy() -> None:
    modules = ["calculator", "guess", "ledger", "sqlite_qa", "textgame", "tictactoe"]
    code = f"import sys; {'; '.join(f'import rollout.envs.{m}' for m in modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "ray", "vllm", "transformers", "numpy", "jinja2", "omegaconf"} & set(loaded.split())
