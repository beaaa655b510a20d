"""What ranks hold, by arithmetic: every element of every tensor once, and where it lies in the rank's memory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.held import Parameter, Share, held_regions, whole_regions
from weightsync.regions import Regions

PARAMETERS = [
    Parameter(name="embed", shape=(12, 6), pieces=((0, ()),)),
    Parameter(name="norm", shape=(6,), pieces=((1, ()),)),
    Parameter(
        name="gate_up",
        shape=(4, 8, 3),
        pieces=tuple((2 + n, (n // 2, slice(n % 2 * 4, n % 2 * 4 + 4))) for n in range(8)),
    ),
    Parameter(name="adapter", shape=(2, 6), pieces=()),
    Parameter(name="down", shape=(4, 3, 4), pieces=tuple((10 + n, (n,)) for n in range(4))),
    Parameter(name="o", shape=(6, 4), pieces=((14, ()),)),
]
TENSORS = [(12, 6), (6,), *[(4, 3)] * 8, *[(3, 4)] * 4, (6, 4)]


def filled(tensor: int) -> torch.Tensor:
    """Element e of tensor t is 1000 t + e."""
    shape = TENSORS[tensor]
    return 1000 * tensor + torch.arange(math.prod(shape)).view(shape)


def memory(parameter: Parameter, share: Share) -> torch.Tensor:
    """What a rank has of a parameter, flat, cut as its share says."""
    whole = torch.full(parameter.shape, -1)
    for tensor, index in parameter.pieces:
        whole[index] = filled(tensor)
    flat = whole.chunk(share.parts, share.dim)[share.part].flatten()
    if share.numel is None:
        return flat
    padded = torch.nn.functional.pad(flat, (0, share.numel * 16), value=-1)
    return padded[share.partition * share.numel : (share.partition + 1) * share.numel]


def shares(rank: int, ranks: int, cut: int, stage: int, dims: dict[int, int]) -> list[Share]:
    found = []
    for n, parameter in enumerate(PARAMETERS):
        parts = cut if n in dims else 1
        count, number = ranks // parts, rank // parts
        spread = {"dim": dims.get(n, 0), "part": rank % parts, "parts": parts}
        if stage == 3:
            found.append(Share(**spread, numel=-(-parameter.numel // parts // count), partition=number))
        else:
            found.append(Share(**spread, replica=number, replicas=count))
    return found


@given(
    ranks=st.sampled_from([1, 2, 4, 8]),
    cut=st.sampled_from([1, 2]),
    layout=st.sampled_from([(3, {2: 0, 4: 0}), (0, {2: 0, 4: 0}), (1, {0: 0, 5: 1}), (3, {})]),
)
def test_ranks_of_any_layout_hold_every_element_once_and_where_it_lies(
    ranks: int, cut: int, layout: tuple[int, dict[int, int]]
) -> None:
    cut = min(cut, ranks)
    seen = {tensor: torch.zeros(math.prod(shape), dtype=torch.int) for tensor, shape in enumerate(TENSORS)}
    for rank in range(ranks):
        own = shares(rank, ranks, cut, *layout)
        regions = held_regions(PARAMETERS, own, whole_regions(PARAMETERS))
        for n in range(len(regions)):
            r = {name: int(column[n]) for name, column in vars(regions).items()}
            held = memory(PARAMETERS[r["buffer"]], own[r["buffer"]])
            for i in range(r["count"]):
                for j in range(r["length"]):
                    element = r["start"] + i * r["stride"] + j
                    seen[r["tensor"]][element] += 1
                    assert held[r["at"] + i * r["row"] + j * r["col"]] == 1000 * r["tensor"] + element
    assert all((count == 1).all() for count in seen.values())


def test_whole_regions_are_one_run_for_each_tensor() -> None:
    whole = whole_regions(PARAMETERS)
    assert isinstance(whole, Regions) and whole.tensor.tolist() == list(range(len(TENSORS)))
    np.testing.assert_array_equal(whole.length, [math.prod(shape) for shape in TENSORS])


def test_tensor_that_is_not_in_one_piece_is_refused() -> None:
    split = Parameter(name="split", shape=(4, 6), pieces=((0, (slice(None), slice(0, 3))),))
    with pytest.raises(ValueError, match=r"split of shape .* is not in one piece"):
        whole_regions([split])


def test_columns_of_a_parameter_of_several_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="down: one of several tensors in it is cut by columns"):
        held_regions([PARAMETERS[4]], [Share(dim=1, part=0, parts=3)])


def test_columns_in_a_partition_are_refused() -> None:
    with pytest.raises(ValueError, match="not lie in one piece"):
        held_regions([PARAMETERS[5]], [Share(dim=1, part=0, parts=2, numel=6)])
