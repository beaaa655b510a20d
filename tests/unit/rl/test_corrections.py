"""Engine corrections, aggregation, the KL controller, and quantiles that no cut can change."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.choices import Aggregation, Correction
from conf.schema import AlgoConfig
from rl.aggregation import loss_weights
from rl.correction import correction_weights
from rl.kl import adapt
from rl.losses import weighed
from rl.quantiles import histogram, quantile

WEIGHTS = torch.tensor([[0.4, 0.9, 1.5, 2.5], [1.0, 1.1, 1.2, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])


def weights_of(correction: Correction, low: float = 0.5, high: float = 2.0, decay: float = 1.0) -> list[list[float]]:
    algo = AlgoConfig(correction=correction, correction_low=low, correction_high=high, staleness_decay=decay)
    train = torch.where(MASK, WEIGHTS.log() - 3, math.nan)
    rollout = torch.where(MASK, torch.tensor(-3.0, dtype=torch.float64), math.nan)
    found, sums = correction_weights(algo, train, rollout, MASK, torch.tensor([0, 2]))
    assert (found[~MASK] == 0).all() and not found.requires_grad
    assert float(sums["correction_weight"]) == pytest.approx(float(found.sum()))
    return found.tolist()


@pytest.mark.parametrize(
    ("correction", "first", "second"),
    [
        (Correction.none, [1, 1, 1, 1], [1, 1, 1, 0]),
        (Correction.truncate, [0.4, 0.9, 1.5, 2.0], [1.0, 1.1, 1.2, 0]),
        (Correction.band, [0, 0.9, 1.5, 0], [1.0, 1.1, 1.2, 0]),
        (Correction.mask_token, [0, 1, 1, 0], [1, 1, 1, 0]),
        (Correction.mask_sequence, [1, 1, 1, 1], [1, 1, 1, 0]),  # products 1.35 and 1.32
        (Correction.mask_geometric, [1, 1, 1, 1], [1, 1, 1, 0]),
    ],
)
def test_correction_each_kind_has_its_weights(correction: Correction, first: list[float], second: list[float]) -> None:
    assert weights_of(correction) == [pytest.approx(first), pytest.approx(second)]


def test_correction_whole_rows_by_product_or_geometric_mean() -> None:
    assert weights_of(Correction.mask_sequence, high=1.34) == [[0] * 4, [1, 1, 1, 0]]
    mean = 1.35**0.25  # 1.078; the second row's is 1.097
    assert weights_of(Correction.mask_geometric, high=mean + 0.01) == [[1] * 4, [0] * 4]


def test_correction_stale_rows_count_less() -> None:
    assert weights_of(Correction.none, decay=0.5) == [[1, 1, 1, 1], [0.25, 0.25, 0.25, 0]]


def test_correction_impossible_tokens_stay_finite() -> None:
    algo = AlgoConfig(correction=Correction.truncate)
    far = torch.tensor([[500.0, -500.0]])
    found, _ = correction_weights(algo, far, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1))
    assert found[0, 0] == 2.0 and torch.isfinite(found).all()


# -- aggregation --

LOSS = torch.tensor([[4.0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
TOKENS = torch.tensor([[True, False, False, False], [False, True, True, True]])


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [(Aggregation.token_mean, 1.0), (Aggregation.sequence_mean, 2.0), (Aggregation.sequence_sum, 0.5)],
)
@pytest.mark.parametrize("cut", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_aggregation_known_values_in_any_cut(aggregation: Aggregation, wanted: float, cut: list[list[int]]) -> None:
    """One token of loss 4 and three of loss 0; the constant is 4."""
    weight = loss_weights(aggregation, TOKENS, constant_tokens=4)
    total = sum(float(weighed(LOSS[rows], None if weight is None else weight[rows])) for rows in cut)
    assert total / int(TOKENS.sum()) == pytest.approx(wanted)


def test_aggregation_rows_without_action_tokens_count_nowhere() -> None:
    more = torch.cat([TOKENS, torch.zeros(3, 4, dtype=torch.bool)])
    for aggregation in (Aggregation.sequence_mean, Aggregation.sequence_sum):
        weight, alone = (loss_weights(aggregation, mask, 4) for mask in (more, TOKENS))
        assert weight is not None and alone is not None
        assert weight[:2].tolist() == alone.tolist() and torch.isfinite(weight).all()


# -- the KL coefficient --


@pytest.mark.parametrize(("kl", "wanted"), [(0.1, 0.2), (0.2, 0.2 * 1.1), (0.11, 0.2 * 1.05), (0.0, 0.2 * 0.9)])
def test_adapt_moves_towards_the_target_by_a_bounded_share(kl: float, wanted: float) -> None:
    assert adapt(0.2, kl, target=0.1, horizon=128, samples=64) == pytest.approx(wanted)


# -- quantiles --


@given(st.lists(st.floats(-19, 19), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_quantile_is_the_exact_one_to_the_width_of_a_bin(values: list[float], share: float) -> None:
    found = quantile(histogram(torch.tensor(values, dtype=torch.float64)), share)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert found == pytest.approx(exact, rel=0.03, abs=1e-5)


@given(st.lists(st.floats(-30, 30), max_size=50), st.integers(0, 50))
def test_histogram_any_cut_adds_up(values: list[float], cut: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(histogram(whole), histogram(whole[:cut]) + histogram(whole[cut:]))


def test_histogram_leaves_out_what_is_not_finite() -> None:
    assert int(histogram(torch.tensor([math.nan, math.inf, 1.0])).sum()) == 1
    assert math.isnan(quantile(histogram(torch.zeros(0)), 0.5))
