"""Ledger: hundreds of turns that stay consistent, each paid by itself."""

import re

import pytest

from rollout.environment import Action, ToolCall
from rollout.envs.ledger import Ledger
from tests.unit.rollout.envs.playing import act, awaited, begin, play, total


def test_three_hundred_turns_are_played_to_the_end() -> None:
    results = play(Ledger(), Ledger.make_task("train", 0, 0))
    assert len(results) == 300 and results[-1].terminated
    assert total(results) == pytest.approx(1.0)
    assert all(result.info["correct"] == 1.0 for result in results)


def test_the_events_alone_tell_every_balance() -> None:
    env = Ledger(turns=200)
    text = begin(env, Ledger.make_task("train", 0, 1)).messages[0]["content"]
    balances = {name: int(amount) for name, amount in re.findall(r"(\w+) (\d+)[,.]", text.split("are:")[1])}
    right = 0
    for _ in range(200):
        event = text.splitlines()[-1]
        if found := re.search(r": (\w+) pays (\w+) (\d+)\.", event):
            balances[found[1]] -= int(found[3])
            balances[found[2]] += int(found[3])
        elif found := re.search(r": (\w+) (spends|earns) (\d+)\.", event):
            balances[found[1]] += int(found[3]) * (1 if found[2] == "earns" else -1)
        assert min(balances.values()) >= 0
        asked = re.search(r"balance of (\w+)\?", event)
        result = act(env, f"That makes {balances[asked[1]]}." if asked else "")
        right += int(result.reward > 0)
        text = result.messages[0]["content"]
    assert (right, result.terminated) == (200, True)


@pytest.mark.parametrize("tell", [True, False])
def test_a_wrong_report_costs_its_own_turn_only(tell) -> None:
    env = Ledger(turns=10, tell=tell)
    begin(env, Ledger.make_task("train", 0, 2))
    wrong = act(env, "no idea")
    assert (wrong.reward, wrong.terminated, wrong.info["correct"]) == (0.0, False, 0.0)
    assert ("Wrong" in wrong.messages[0]["content"]) is tell
    rest = [act(env, env.oracle()) for _ in range(9)]
    assert rest[-1].terminated and total(rest) == pytest.approx(0.9)


def test_several_reports_in_a_turn_are_taken_in_order() -> None:
    env = Ledger(turns=2)
    begin(env, Ledger.make_task("train", 0, 3))
    first = env.balances[env.asked]
    calls = [ToolCall(name="report", arguments={"balance": value}) for value in (first, -1, 5)]
    result = awaited(env.step(Action(text="", content="", tool_calls=calls)))
    assert (result.reward, result.terminated) == (0.5, True)
    assert len(result.messages) == 3 and "Not run" in result.messages[2]["content"]
