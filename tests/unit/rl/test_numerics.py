"""The gap between engine and trainer: its value, and that no junk hides or makes one."""

import math

import pytest
import torch

from rl.numerics import MismatchError, mismatch_sums, require_match

MASK = torch.tensor([[False, True, True], [False, True, False]])


def test_mismatch_known_gaps_sum_over_action_tokens() -> None:
    rollout = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]])
    train = rollout + torch.tensor([[9.0, 0.1, -0.2], [9.0, 0.0, 9.0]])
    sums = mismatch_sums(train, rollout, MASK)
    assert float(sums["mismatch"]) == pytest.approx(0.3)
    assert float(sums["mismatch_max"]) == pytest.approx(0.2)
    expected = sum(math.exp(gap) - 1 - gap for gap in (0.1, -0.2))
    assert float(sums["mismatch_kl"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf, 1e30])
def test_mismatch_junk_at_masked_places_changes_nothing(junk: float) -> None:
    clean = torch.zeros(2, 3)
    dirty = torch.where(MASK, clean, torch.tensor(junk))
    for sums in (mismatch_sums(dirty, clean, MASK), mismatch_sums(clean, dirty, MASK)):
        assert int(sums.pop("mismatch_hist").sum()) == int(MASK.sum())
        assert all(float(value) == 0 for value in sums.values())


def test_mismatch_nan_at_an_action_token_is_seen_everywhere() -> None:
    train = torch.zeros(2, 3)
    train[0, 2] = math.nan
    sums = mismatch_sums(train, torch.zeros(2, 3), MASK)
    assert int(sums.pop("mismatch_hist").sum()) == int(MASK.sum()) - 1
    assert all(math.isnan(float(value)) for value in sums.values())


def test_mismatch_gap_of_eighty_stays_finite() -> None:
    sums = mismatch_sums(torch.full((2, 3), 80.0), torch.zeros(2, 3), MASK)
    assert all(torch.isfinite(value).all() for value in sums.values())


def test_mismatch_no_rows_is_zero() -> None:
    empty = torch.zeros(0, 0)
    assert all((v == 0).all() for v in mismatch_sums(empty, empty, empty.bool()).values())


def test_require_match_at_the_limit_passes() -> None:
    require_match(1e-3, 1e-3, 4)


@pytest.mark.parametrize("mismatch", [1.001e-3, math.inf, math.nan])
def test_require_match_above_the_limit_raises_with_version_and_key(mismatch: float) -> None:
    with pytest.raises(MismatchError, match=r"version 17, limit 0.001 \(rollout.mismatch_limit\)"):
        require_match(mismatch, 1e-3, 17)
