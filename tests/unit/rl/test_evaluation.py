import itertools
import json
import math
import random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.evaluation import clustered_mean, pass_at_k, summarize


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_subsets_that_pass(samples: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


@given(st.lists(st.lists(st.none() | st.floats(-2, 2), max_size=6), max_size=6), st.randoms(use_true_random=False))
def test_order_never_matters_and_counts_add_up(rewards: list[list[float | None]], rng: random.Random) -> None:
    result = summarize(rewards)
    shuffled = [rng.sample(row, len(row)) for row in rewards]
    rng.shuffle(shuffled)
    other = summarize(shuffled)
    assert result["pass_at"].keys() == other["pass_at"].keys()
    assert result["mean"] == pytest.approx(other["mean"], abs=1e-9)
    assert result["num_samples"] + result["num_failed"] == sum(map(len, rewards))
    json.dumps(result, allow_nan=False)
    values = [entry["value"] for entry in result["pass_at"].values()]
    assert all(0 <= value <= 1 for value in values)
    for entry in result["pass_at"].values():
        if entry["low"] is not None:
            assert 0 <= entry["low"] <= entry["value"] + 1e-12 and entry["value"] <= entry["high"] + 1e-12 <= 1 + 1e-9


def test_failed_samples_are_counted_and_never_zero() -> None:
    result = summarize([[1.0, None], [None, None], [1.0, 0.0]])
    assert result["mean"] == pytest.approx(0.75)
    assert (result["num_prompts"], result["num_prompts_scored"]) == (3, 2)
    assert (result["num_samples"], result["num_failed"]) == (3, 3)
    assert result["pass_at"]["1"]["num_prompts"] == 2
    assert result["pass_at"]["2"] == {"value": 1.0, "low": None, "high": None, "num_prompts": 1}


def test_the_interval_is_clustered_by_prompt() -> None:
    rewards = [[0.0] * 8, [1.0] * 8, [1.0] * 8, [0.0] * 8]
    result = summarize(rewards)
    error = stdev([0, 1, 1, 0]) / 2
    assert result["standard_error"] == pytest.approx(error)
    assert result["mean_high"] - result["mean"] == pytest.approx(1.96 * error, rel=1e-4)
    # 32 independent samples would look far more certain than 4 prompts are
    assert error > 2 * math.sqrt(0.25 / 32)


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(300):
        rates = [rng.random() for _ in range(40)]  # expected reward: 0.5
        result = summarize([[float(rng.random() < rate) for _ in range(4)] for rate in rates])
        covered += result["mean_low"] <= 0.5 <= result["mean_high"]
    assert 0.92 <= covered / 300 <= 0.98


def test_all_equal_prompts_do_not_look_certain() -> None:
    assert summarize([[1.0]] * 20)["pass_at"]["1"]["low"] == pytest.approx(0.025 ** (1 / 20))
    assert summarize([[0.0]] * 20)["pass_at"]["1"]["high"] == pytest.approx(1 - 0.025 ** (1 / 20))


def test_small_and_empty_inputs() -> None:
    assert summarize([])["mean"] is None and summarize([])["pass_at"] == {}
    assert summarize([[None]])["mean"] is None
    assert clustered_mean([0.5]) == (0.5, None, None, None)
    assert list(summarize([[1.0] * 5])["pass_at"]) == ["1", "2", "4"]
    assert summarize([[0.3, 0.8]], threshold=0.3)["pass_at"]["1"]["value"] == 1.0
    assert fmean([0.3, 0.8]) == summarize([[0.3, 0.8]])["mean"]
    with pytest.raises(ValueError, match="not finite"):
        summarize([[math.nan]])
