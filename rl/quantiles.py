"""Quantiles that do not depend on how a batch was cut: counts in fixed bins add up over micro-batches and ranks."""

import math

import torch

# Bins are even in asinh(x / UNIT): about 4 % of the value wide, and 4e-6 around zero.
UNIT, LARGEST, BINS = 1e-4, 20.0, 641
_SPAN = math.asinh(LARGEST / UNIT)


def histogram(values: torch.Tensor) -> torch.Tensor:
    """Counts [BINS] float64 of the finite `values` (any shape); those beyond +-20 are in the outermost bins."""
    place = torch.asinh(values[values.isfinite()].double() / UNIT) / _SPAN  # in [-1, 1]
    index = ((place + 1) / 2 * (BINS - 1)).round().clamp(0, BINS - 1).long()
    return torch.bincount(index, minlength=BINS).double()


def quantile(counts: torch.Tensor, share: float) -> float:
    """The centre of the bin that holds the value below which `share` of them lie; NaN of nothing."""
    total = float(counts.sum())
    if total == 0:
        return math.nan
    index = int(torch.searchsorted(counts.cumsum(0), max(share * total, 1e-9)).clamp(max=BINS - 1))
    return math.sinh((index / (BINS - 1) * 2 - 1) * _SPAN) * UNIT
