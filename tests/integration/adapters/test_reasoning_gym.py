"""Questions of reasoning_gym, against the package itself."""

import time
from typing import Any

import pytest

from conf.choices import Isolation
from conf.errors import ConfigError
from rollout.adapters.reasoning_gym import REFUSED, ReasoningGym, dataset_of, entry_of
from tests.integration.adapters.hosting import play_hosted
from tests.unit.rollout.envs.playing import act, begin, play, total

TARGET = "rollout.adapters.reasoning_gym.ReasoningGym"
WITHOUT_ANSWERS = {"boxnet", "rush_hour"}
# The board of rush_hour's item 1 among those of at most five moves, solved by hand.
RUSH: dict[str, Any] = {"dataset": "rush_hour", "config": {"min_moves": 1, "max_moves": 5}}
RUSH_ITEM, RUSH_BOARD, RUSH_ANSWER = 1, "EoooooEBBBooEAAGoooFoGoooFCCDDoFoooo", "E+3 B-1 G-2 A+3"


def generators() -> list[str]:
    dataset_of("chain_sum", "{}")
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - set(REFUSED))


def test_own_answer_of_every_generator_gets_full_reward_and_nonsense_none(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # as if it were set: within one process it does not matter
    names = generators()
    assert len(names) >= 104
    for name in names:
        env = ReasoningGym(name)
        begin(env, {"dataset": name, "item": 3})
        for text in ("<answer>nothing of the kind</answer>", "no tags", "<answer></answer>"):
            assert act(env, text).reward == 0.0, name
        if name not in WITHOUT_ANSWERS:
            own = entry_of(name, "{}", 3)
            assert act(env, env.oracle()).reward == 1.0, name
            if own["answer"] is not None:  # what the package itself says of the same answer
                assert dataset_of(name, "{}", 3).score_answer(own["answer"], own) == 1.0, name
        env.close()
        env.close()


def test_puzzle_without_own_answer_is_judged_by_its_moves() -> None:
    env = ReasoningGym(**RUSH)
    begin(env, {"dataset": "rush_hour", "item": RUSH_ITEM})
    assert env.entry["metadata"]["board_config"] == RUSH_BOARD
    with pytest.raises(ConfigError, match="rush_hour: judges answers and has none"):
        env.oracle()
    assert act(env, f"<answer>{RUSH_ANSWER}</answer>").reward == 1.0
    assert act(env, "<answer>E+3 B-1</answer>").reward == 0.0


def test_task_is_pure_and_gives_the_same_question() -> None:
    kwargs: dict[str, Any] = {"dataset": ["chain_sum", "word_sorting"], "config": {"chain_sum": {"max_terms": 3}}}
    tasks = [ReasoningGym.make_task("train", 1, i, **kwargs) for i in range(6)]
    assert tasks == [ReasoningGym.make_task("train", 1, i, **kwargs) for i in range(6)]
    assert [task["dataset"] for task in tasks] == ["chain_sum", "word_sorting"] * 3
    first = [begin(ReasoningGym(**kwargs), task) for task in tasks]
    assert first == [begin(ReasoningGym(**kwargs), task) for task in tasks]
    assert len({message.messages[0]["content"] for message in first}) == 6


def test_questions_of_evaluation_are_never_trained_on() -> None:
    def questions(split: str, count: int) -> set[str]:
        return {
            begin(ReasoningGym("coin_flip"), ReasoningGym.make_task(split, 0, i, dataset="coin_flip")).messages[0][
                "content"
            ]
            for i in range(count)
        }

    assert questions("eval", 30).isdisjoint(questions("train", 150))


@pytest.mark.parametrize(
    ("tag", "text", "reward", "invalid"),
    [
        ("answer", "It is <answer>1</answer> or <answer> {} </answer>.", 1.0, 0.0),
        ("answer", "<answer>{}</answer></think>I do not know.", 0.0, 1.0),
        ("answer", "{}", 0.0, 1.0),
        ("answer", "<answer>99999</answer>", 0.0, 0.0),
        ("final", "<final>{}</final>", 1.0, 0.0),
        ("", "hm</think>\n{}\n", 1.0, 0.0),
        ("", "", 0.0, 1.0),
    ],
)
def test_answer_is_found_by_its_tag(tag, text, reward, invalid) -> None:
    own = entry_of("chain_sum", "{}", 7)["answer"]
    results = play(ReasoningGym("chain_sum", tag=tag), {"dataset": "chain_sum", "item": 7}, [text.format(own)])
    assert (total(results), results[-1].terminated, results[-1].info["invalid"]) == (reward, True, invalid)
    assert bool(results[-1].messages) == bool(invalid)


def test_partial_credit_is_paid_only_when_asked_for_and_never_for_nonsense() -> None:
    task = {"dataset": "spell_backward", "item": 5}
    own = entry_of("spell_backward", "{}", 5)["answer"]
    near = f"<answer>{own[:-1]}x</answer>"
    assert 0.0 < total(play(ReasoningGym("spell_backward", full_credit_only=False), task, [near])) < 1.0
    results = play(ReasoningGym("spell_backward"), task, [near])
    assert total(results) == 0.0 and results[0].info["score"] > 0.0
    # Its own score is 1.0 for every text that is not empty.
    halting = {"dataset": "game_of_life_halting", "item": 0}
    own = entry_of("game_of_life_halting", "{}", 0)["answer"]
    for answer, reward in ((own.lower(), 1.0), ("whatever", 0.0), (str(own != "True"), 0.0)):
        assert total(play(ReasoningGym("game_of_life_halting"), halting, [f"<answer>{answer}</answer>"])) == reward


def test_answer_that_takes_long_or_raises_is_worth_nothing(monkeypatch) -> None:
    monkeypatch.setattr("rollout.adapters.reasoning_gym.SCORE_S", 0.2)
    task = {"dataset": "spiral_matrix", "item": 1}
    began = time.monotonic()  # the generator reads answers with eval
    hang = "<answer>[0 for i in iter(int, 1)]</answer>"
    assert total(play(ReasoningGym("spiral_matrix"), task, [hang])) == 0.0
    assert 0.1 < time.monotonic() - began < 5
    assert (
        total(play(ReasoningGym("prime_factorization"), {"dataset": "prime_factorization", "item": 1}, [hang])) == 0.0
    )


def test_generator_whose_questions_differ_between_processes_is_refused(monkeypatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    dataset_of.cache_clear()
    with pytest.raises(ConfigError, match=r"env\.kwargs\.dataset=ransom_note: .* set PYTHONHASHSEED=0"):
        ReasoningGym("ransom_note")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"dataset": "chain_sums"}, r"env\.kwargs\.dataset=chain_sums: .*did you mean 'chain_sum'"),
        ({"dataset": []}, r"env\.kwargs\.dataset=\[\]"),
        ({"dataset": "composite"}, r"env\.kwargs\.dataset=composite: is not taken"),
        ({"config": {"min_term": 1}}, r"env\.kwargs\.config\.min_term=1: .*did you mean 'min_terms'"),
        ({"config": {"seed": 1}}, r"env\.kwargs\.config\.seed=1"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "does not take it: max_terms must be"),
        ({"dataset": ["gcd", "lcm"], "config": {"gdc": {}}}, r"env\.kwargs\.config\.gdc: .*did you mean 'gcd'"),
        ({"tag": "<a>"}, r"env\.kwargs\.tag='<a>'"),
    ],
)
def test_impossible_arguments_are_refused(kwargs, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ReasoningGym(**kwargs)


def test_episode_in_a_sandbox_gets_full_reward() -> None:
    data = ReasoningGym.make_task("train", 0, 0, dataset="binary_matrix")
    _, steps, _ = play_hosted(TARGET, {"dataset": "binary_matrix"}, data, isolation=Isolation.sandbox)
    assert [step.reward for step in steps] == [1.0] and steps[0].terminated
