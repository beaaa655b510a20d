"""The benchmark of agents in small: its checks find what is wrong, and its figures come out of real episodes."""

import asyncio
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.choices import Isolation
from rl.types import Sampling, Status, Trajectory
from scripts.benchmarks import agents, agents_exact, agents_overhead, agents_soak, common
from scripts.benchmarks.agents_exact import Noted, NotedPlayer, num_exact_rows, num_trained_once
from scripts.benchmarks.agents_parts import Figure, InstantLane, agent_config, make_episodes, make_prompt, opened_hosts
from tests.unit.rollout.agents import chat_tokenizer

TOKENIZER = chat_tokenizer()
HIGH, END = TOKENIZER.convert_tokens_to_ids(["high", "<|im_end|>"])
SPELT = TOKENIZER("high", add_special_tokens=False)["input_ids"]

MACHINE = {"cpu": "x", "cores": 1, "ram_bytes": 1, "os": "x"}


def noted_episode(say: Callable[[int], list[int] | None], turns: int = 3) -> Noted:
    cfg = agent_config("Talk", Isolation.inline, kwargs={}, max_model_len=4096, max_tokens=8, max_turns=turns)
    with opened_hosts(cfg) as hosts:
        player = NotedPlayer(make_episodes(cfg, hosts, TOKENIZER))
        asyncio.run(player.play(InstantLane(say), make_prompt(0, turns=turns), Sampling(max_tokens=8), 0))
    return player.noted[0]


def values(figures: list[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


class Bigrams(torch.nn.Module):
    """A language model whose next token depends on the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(len(TOKENIZER), len(TOKENIZER))
        torch.nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, ids: torch.Tensor, logits_to_keep: Any = slice(None), use_cache: bool = False) -> Any:
        class Output:
            logits = self.table(ids)[:, logits_to_keep]

        return Output


# -- exactness --


def test_num_exact_rows_of_an_episode_counts_all_of_its_rows() -> None:
    episode = noted_episode(lambda turn: [HIGH, *SPELT][: turn + 2] + [END] * (turn < 2))
    assert episode.trajectory.status is Status.ok
    assert (num_exact_rows(episode), num_trained_once(episode), len(episode.calls)) == (1, 3, 3)


def spell_anew(row: Trajectory) -> None:
    place = row.token_ids.index(HIGH)
    row.token_ids[place : place + 1] = SPELT
    columns: list[list[Any]] = [row.action_mask, row.logprobs, row.versions]
    for column in columns:
        column[place : place + 1] = [column[place]] * len(SPELT)


def change_observation(row: Trajectory) -> None:
    row.token_ids[row.action_mask.index(True) - 1] += 1


def leave_first_token_out(row: Trajectory) -> None:
    row.action_mask[row.action_mask.index(True)] = False


def shift_logprobs(row: Trajectory) -> None:
    row.logprobs[row.action_mask.index(True)] -= 1e-5


@pytest.mark.parametrize("spoil", [spell_anew, change_observation, leave_first_token_out, shift_logprobs])
def test_num_exact_rows_of_a_row_that_differs_is_zero(spoil: Callable[[Trajectory], None]) -> None:
    episode = noted_episode(lambda _turn: [HIGH, END])
    spoil(episode.trajectory)
    assert num_exact_rows(episode) == 0
    assert num_trained_once(episode) < 3


def test_num_trained_once_with_a_turn_trained_twice_leaves_it_out() -> None:
    episode = noted_episode(lambda _turn: [HIGH, END])
    episode.trajectory.more.append(noted_episode(lambda _turn: [HIGH, END]).trajectory)
    assert (num_exact_rows(episode), num_trained_once(episode)) == (2, 0)


def test_resampled_differently_counts_completions_that_no_tokenizer_would_write() -> None:
    episode = noted_episode(lambda turn: [[HIGH, END], [*SPELT, END], [HIGH]][turn])
    made = [call.completion for call in episode.calls]
    expected = sum(
        TOKENIZER(TOKENIZER.decode(c.token_ids), add_special_tokens=False)["input_ids"] != c.token_ids for c in made
    )
    assert 0 < expected < 3
    assert agents_exact.resampled_differently(made, TOKENIZER) == expected / 3


def test_exact_figures_of_a_known_model_find_its_gap_and_no_gradient_at_observations() -> None:
    episode, lm, temperature = noted_episode(lambda _turn: [HIGH, END]), Bigrams(), 1.3
    row = episode.trajectory
    logprobs = (lm.table.weight.detach() / temperature).log_softmax(-1)
    for place, acts in enumerate(row.action_mask):
        if acts:
            row.logprobs[place] = float(logprobs[row.token_ids[place - 1], row.token_ids[place]])
    row.logprobs[row.action_mask.index(True)] += 0.25
    found = values(agents_exact.exact_figures([episode], TOKENIZER, lm, temperature))
    assert found["max_logprob_diff"] == pytest.approx(0.25, abs=1e-5)
    assert found["observation_gradient"] == 0.0
    assert found["action_gradient"] > 0.0


def test_exact_config_has_a_task_for_each_episode_and_is_hot() -> None:
    cfg = agents_exact.exact_config(Namespace(model="m", threads=1, episodes=3))
    assert (cfg.data.size, cfg.rollout.temperature, cfg.rollout.max_tokens) == (3, 1.3, 24)
    assert (cfg.env.kwargs["style"], cfg.evaluation.every) == ("chat", 0)


# -- overhead --


@pytest.mark.parametrize("isolation", [Isolation.inline, Isolation.process])
def test_time_turns_in_small_gives_a_time(isolation: Isolation) -> None:
    assert agents_overhead.time_turns(TOKENIZER, isolation, concurrent=2, turns=3) > 0


def test_measure_long_in_small_plays_all_turns_and_tokens() -> None:
    found = values(agents_overhead.measure_long(TOKENIZER, turns=4, tokens=2000))
    assert found["long_turns"] == 4
    assert found["long_tokens"] > 1000
    assert found["long_peak_bytes"] > 0


# -- soak --


@pytest.mark.timeout(60)
def test_measure_soak_with_every_fault_accounts_for_all_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = agents_soak.draw_task

    def one_of_each(index: int, seed: int, folder: Path) -> Any:
        task = drawn(index, seed, folder)
        task.record["fault"] = fault = list(agents_soak.EXPECTED)[index % len(agents_soak.EXPECTED)]
        task.record["turn"] = agents_soak.stages(fault, task.record["turns"])[0]
        return task

    monkeypatch.setattr(agents_soak, "draw_task", one_of_each)
    monkeypatch.setattr(agents_soak, "CONCURRENT", 4)
    found = values(agents_soak.measure_soak(TOKENIZER, len(agents_soak.EXPECTED)))
    assert found["soak_unaccounted"] == found["children_left"] == 0
    assert found["fds_growth"] == found["threads_growth"] == 0


def test_mismatch_of_another_status_or_reward_says_so(tmp_path: Path) -> None:
    task = make_prompt(0, fault="killed", turns=2, turn=0)
    trajectory = noted_episode(lambda _turn: [HIGH, END], turns=2).trajectory
    assert agents_soak.mismatch(task, trajectory).startswith("ok instead of env_died")
    task.record["fault"] = ""
    assert agents_soak.mismatch(task, trajectory) == "2 turns with reward 3.0, wanted 2"


def test_slope_is_that_of_the_second_half() -> None:
    points = [(n, 1000 * n) for n in range(10)] + [(n, 5 * n) for n in range(10, 20)]
    assert agents_soak.slope(points) == pytest.approx(5.0)
    assert agents_soak.slope([]) == 0.0


# -- the result --


def test_figures_as_rows_are_written_and_shown_with_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [agents.as_row(Figure("long_seconds", 2.5, "s"), 0), agents.as_row(Figure("long_turns", 4, "turns"), 0)]
    assert rows[0] == {"variant": "long_seconds", "repeat": 0, "name": "long_seconds", "value": 2.5, "unit": "s"}
    result = {"name": "agents", "machine": MACHINE, "versions": {}, "config": {}, "rows": rows}
    common.validate(result | {"ratios": {}, "took_s": 1.0})
    common.print_result(result | {"ratios": {}})
    shown = capsys.readouterr().out
    assert "long_seconds" in shown
    assert "2.500" in shown
    assert "turns" in shown


def test_broken_promises_name_what_was_wanted() -> None:
    kept = {"rows_total": 3, "rows_exact": 3, "max_logprob_diff": 1e-5, "framework_ms_per_turn": 99.0}
    assert agents.broken_promises(kept) == []
    found = agents.broken_promises(kept | {"rows_exact": 2, "max_logprob_diff": float("nan"), "children_left": 1})
    assert [text.split("=")[0] for text in found] == ["rows_exact", "children_left", "max_logprob_diff"]
    assert found[0] == "rows_exact=2, wanted 3"
