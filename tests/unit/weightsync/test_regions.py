"""Regions against plain indexing: what is cut, shared and intersected arrives once, and where it should."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.regions import Regions, cut, intersect, runs_of, share, view_region


def elements(regions: Regions) -> list[tuple[int, int]]:
    """(element of the flat tensor, element of the buffer) of all regions, in order."""
    found = []
    for n in range(len(regions)):
        r = {name: int(getattr(regions, name)[n]) for name in vars(regions)}
        for i in range(r["count"]):
            for j in range(r["length"]):
                found.append((r["start"] + i * r["stride"] + j, r["at"] + i * r["row"] + j * r["col"]))
    return found


def of_view(view: torch.Tensor, buffer: torch.Tensor, tensor: int = 0, number: int = 0) -> Regions:
    """The region of a view of a numbered tensor that is laid into a view of a buffer."""
    return Regions.of(view_region(tensor, number, view, buffer))


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    found = []
    for n in shape:
        low = draw(st.integers(0, n - 1))
        found.append(slice(low, draw(st.integers(low + 1, n))))
    return tuple(found)


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def cases(draw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor whose elements are their own numbers, a view of it, and a view of a buffer of the same shape."""
    shape = draw(shapes)
    whole = torch.arange(math.prod(shape)).view(shape)
    view = whole[draw(boxes(shape))]
    order = draw(st.permutations(range(len(shape))))
    view = view.permute(order)
    room = [n + draw(st.integers(0, 2)) for n in view.shape]
    back = draw(st.permutations(range(len(shape))))
    buffer = torch.full([room[k] for k in back], -1).permute([back.index(k) for k in range(len(back))])
    return whole, view, buffer[tuple(slice(0, n) for n in view.shape)]


@given(cases())
def test_region_of_a_view_lists_its_elements_and_their_places(case: Any) -> None:
    whole, view, target = case
    found = elements(of_view(view, target))
    wanted = torch.full((target.untyped_storage().nbytes() // 8,), -1)
    torch.as_strided(wanted, target.shape, target.stride(), target.storage_offset()).copy_(view)
    assert len(found) == view.numel() and len({place for _, place in found}) == len(found)
    assert all(wanted[place] == whole.flatten()[element] for element, place in found)


def test_view_that_repeats_elements_is_refused() -> None:
    view = torch.arange(4).expand(3, 4)
    with pytest.raises(ValueError, match="sees elements twice"):
        of_view(view, torch.zeros(3, 4))


@given(cases(), st.data())
def test_cut_keeps_the_elements_inside_in_order(case: Any, data: Any) -> None:
    whole, view, target = case
    regions = of_view(view, target)
    bounds = st.integers(-2, whole.numel() + 2)
    low = np.array([data.draw(bounds) for _ in range(len(regions))], np.int64)
    high = np.array([data.draw(bounds) for _ in range(len(regions))], np.int64)
    parts = cut(regions, low, high)
    inside = []
    for n in range(len(regions)):
        inside += [pair for pair in elements(regions.take(np.array([n]))) if low[n] <= pair[0] < high[n]]
    assert elements(parts) == inside
    assert (parts.count >= 1).all() and (parts.length >= 1).all() and (parts.stride >= parts.length).all()


@given(st.lists(cases(), min_size=1, max_size=4), st.integers(1, 4))
def test_shares_hold_every_element_once(found: list[Any], shares: int) -> None:
    regions = Regions.concat([of_view(view, target, tensor=k) for k, (_, view, target) in enumerate(found)])
    parts = [share(regions, index, shares) for index in range(shares)]
    together = sorted(
        (int(p.tensor[n]), *e) for p in parts for n in range(len(p)) for e in elements(p.take(np.array([n])))
    )
    assert together == sorted(
        (int(regions.tensor[n]), *e) for n in range(len(regions)) for e in elements(regions.take(np.array([n])))
    )


def test_shares_of_whole_tensors_are_equal() -> None:
    regions = Regions.of([(t, 0, 1, n, n, t, 0, n, 1) for t, n in enumerate([1000, 7, 500, 3])])
    assert [int(share(regions, k, 3).num_elements.sum()) for k in range(3)] == [503, 503, 504]


@st.composite
def holders(draw: Any, whole: torch.Tensor) -> list[tuple[Regions, torch.Tensor]]:
    """Ranks that together hold a tensor once: each its regions, and its buffer."""
    kind, size = draw(st.sampled_from(["flat", "dim"])), draw(st.integers(1, 4))
    if kind == "flat":  # ZeRO-3: equal parts of the flat tensor, the last one padded
        part = -(-whole.numel() // size)
        flat = torch.nn.functional.pad(whole.flatten(), (0, part * size - whole.numel()), value=-7)
        kept = [min(part, max(0, whole.numel() - k * part)) for k in range(size)]
        return [
            (Regions.of([(0, k * part, 1, n, n, 0, 0, n, 1)] if n else []), flat[k * part : (k + 1) * part])
            for k, n in enumerate(kept)
        ]
    dim = draw(st.integers(0, whole.dim() - 1))
    return [
        (of_view(part, held := part.clone(memory_format=torch.contiguous_format)), held.flatten())
        for part in whole.chunk(size, dim)
    ]  # fmt: skip


@given(cases(), st.data())
def test_moves_of_all_holders_give_the_view(case: Any, data: Any) -> None:
    """Executed with plain loops, from whatever holds the tensor, they fill the buffer, each element once."""
    whole, view, target = case
    regions = of_view(view, target)
    size = target.untyped_storage().nbytes() // 8
    found, wanted = torch.full((size,), -1), torch.full((size,), -1)
    torch.as_strided(wanted, target.shape, target.stride(), target.storage_offset()).copy_(view)
    for held, memory in data.draw(holders(whole)):
        moves = intersect(held, regions)
        for n in range(len(moves)):
            m = {name: int(getattr(moves, name)[n]) for name in vars(moves)}
            for i in range(m["count"]):
                for j in range(m["length"]):
                    place = m["target_at"] + i * m["target_row"] + j * m["target_col"]
                    assert found[place] == -1, "it arrives twice"
                    found[place] = memory[m["source_at"] + i * m["source_row"] + j * m["source_col"]]
    assert torch.equal(found, wanted)


def test_column_block_of_a_row_block_is_one_move() -> None:
    matrix = torch.arange(48).view(6, 8)
    held, wanted = of_view(matrix[:, 2:6], torch.zeros(6, 4)), of_view(matrix[1:5, 4:8], torch.zeros(4, 4))
    moves = intersect(held, wanted)
    assert (len(moves), int(moves.count[0]), int(moves.length[0])) == (1, 4, 2)


def test_runs_of_a_region_are_its_rows() -> None:
    matrix = torch.arange(12).view(3, 4)
    regions = of_view(matrix[:, 1:3], torch.zeros(3, 2))
    assert elements(runs_of(regions)) == elements(regions) and len(runs_of(regions)) == 3
