"""Which elements of a model folder's tensors lie where in somebody's memory. Pure; arrays throughout, as there are
millions of them in large models.

A region is a set of elements of one tensor of the folder, as `count` runs of `length` neighbours that are `stride`
apart in the flat tensor, and their place in a buffer (a parameter, say): element j of run i lies at
`at + i * row + j * col`. What a trainer's rank holds and what an engine's worker wants are both regions; whoever
intersects them knows what has to move where.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]  # of int64, which the type stubs of numpy lose in divisions


class Columns:
    """What Regions and Moves have in common: dataclasses whose every field is [N] int64."""

    tensor: Ints
    count: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_elements(self) -> Ints:
        return self.count * self.length

    def take(self, index: NDArray[np.generic] | slice) -> Self:
        """Those at `index`: numbers, a mask or a slice."""
        return type(self)(**{name: column[index] for name, column in vars(self).items()})

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        if not parts:
            return cls.of([])
        names = vars(parts[0])
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """From rows of the fields' values, in their order."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # of a subclass, which is a dataclass
        table = np.asarray(rows, np.int64).reshape(-1, len(names))
        return cls(**{name: table[:, k].copy() for k, name in enumerate(names)})


@dataclass(frozen=True, kw_only=True)
class Regions(Columns):
    """N regions; every field is [N] int64. `tensor` and `buffer` are numbers in lists that the owner keeps.

    Runs do not overlap: stride >= length >= 1, count >= 1.
    """

    tensor: Ints
    start: Ints
    count: Ints
    stride: Ints
    length: Ints
    buffer: Ints
    at: Ints
    row: Ints
    col: Ints


@dataclass(frozen=True, kw_only=True)
class Moves(Columns):
    """N copies, of `count` runs of `length` elements each, from one side's buffers to the other's: [N] int64.

    Element j of run i comes from `source_at + i * source_row + j * source_col`, and goes likewise.
    """

    tensor: Ints
    count: Ints
    length: Ints
    source: Ints
    source_at: Ints
    source_row: Ints
    source_col: Ints
    target: Ints
    target_at: Ints
    target_row: Ints
    target_col: Ints


def view_region(tensor: int, buffer: int, ours: Any, theirs: Any) -> list[tuple[int, ...]]:
    """Rows for `Regions.of`: a view of a tensor (of torch), laid into a view of a buffer, of the same shape."""
    shape = tuple(ours.shape)
    if 0 in shape:
        return []
    dims = [(n, a, b) for n, a, b in zip(shape, ours.stride(), theirs.stride(), strict=True) if n > 1]
    dims.sort(key=lambda dim: -dim[1])  # a transposed view: the tensor's own order counts
    joined: list[tuple[int, int, int]] = []
    for n, a, b in dims:
        if joined and joined[-1][1:] == (n * a, n * b):
            joined[-1] = (joined[-1][0] * n, a, b)
        else:
            joined.append((n, a, b))
    if not joined or joined[-1][1] != 1:
        joined.append((1, 1, 1))
    *outer, (length, _, col) = joined
    count, stride, row = outer.pop() if outer else (1, length, length)
    if any(a < 0 for _, a, _ in joined) or stride < length:
        raise ValueError(f"a view of shape {shape} and strides {tuple(ours.stride())} sees elements twice")
    rows: list[tuple[int, ...]] = []
    for steps in product(*(range(n) for n, _, _ in outer)):
        start, at = ours.storage_offset(), theirs.storage_offset()
        for step, (_, a, b) in zip(steps, outer, strict=True):
            start, at = start + step * a, at + step * b
        rows.append((tensor, start, count, stride, length, buffer, at, row, col))
    return rows


def cut(regions: Regions, low: Ints, high: Ints) -> Regions:
    """The parts of each region n inside elements [low[n], high[n]) of its tensor, in order.

    At most three of each: a piece of a run, whole runs, and a piece of a run.
    """
    r = regions
    first = np.clip(-((r.start - low) // r.stride), 0, r.count)  # the first run that begins inside
    last = np.clip((high - r.length - r.start) // r.stride + 1, 0, r.count)  # after the last that ends inside
    before = r.start + (first - 1) * r.stride
    after = r.start + last * r.stride
    begin = [low, r.start + first * r.stride, after]
    end = [np.minimum(high, before + r.length), None, high]
    exists = [
        (first > 0) & (np.minimum(high, before + r.length) > low),
        last > first,
        (last >= first) & (last < r.count) & (after < high) & (after >= low),
    ]
    parts, order = [], []
    for kind in range(3):
        chosen = np.flatnonzero(exists[kind])
        if not len(chosen):
            continue
        whole, start = r.take(chosen), begin[kind][chosen]
        if (stop := end[kind]) is None:
            count, length = (last - first)[chosen], whole.length
        else:
            count, length = np.ones(len(chosen), np.int64), stop[chosen] - start
        parts.append(part_of(whole, start, count, whole.stride, length))
        order.append(chosen * 3 + kind)
    found = Regions.concat(parts)
    return found.take(np.argsort(np.concatenate(order), kind="stable")) if parts else found


def part_of(whole: Regions, start: Ints, count: Ints, stride: Ints, length: Ints) -> Regions:
    """Parts of regions, one of each, with their places. A stride is a multiple of the whole's unless one is one run."""
    at, row = place(whole, start, stride)
    single = count == 1
    return Regions(
        tensor=whole.tensor,
        start=start,
        count=count,
        stride=np.where(single, length, stride),
        length=length,
        buffer=whole.buffer,
        at=at,
        row=np.where(single, length * whole.col, row),
        col=whole.col,
    )


def place(whole: Regions, start: Ints, stride: Ints) -> tuple[Ints, Ints]:
    """Where elements from `start` on, `stride` apart, lie in the buffer of a region that holds them: (at, row)."""
    run, rest = np.divmod(start - whole.start, whole.stride)
    at = whole.at + run * whole.row + rest * whole.col
    return at, np.where(whole.count > 1, stride // whole.stride * whole.row, stride * whole.col)


def share(regions: Regions, index: int, shares: int) -> Regions:
    """Part `index` of `shares` equal parts of all elements, in the order of the regions: for ranks that hold the same,
    so that each sends as much as the others and nothing is sent twice.

    A region with many runs goes whole to whoever its middle falls to.
    """
    if shares == 1:
        return regions
    sizes = regions.num_elements
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    low, high = total * index // shares, total * (index + 1) // shares
    middle = ends - sizes + sizes // 2
    many = regions.count > 1
    inside = np.where(many, (middle >= low) & (middle < high), (ends > low) & (ends - sizes < high))
    chosen, begin, many = regions.take(inside), (ends - sizes)[inside], many[inside]
    first = chosen.start + np.where(many, 0, np.maximum(low - begin, 0))
    stop = chosen.start + np.where(
        many, (chosen.count - 1) * chosen.stride + chosen.length, np.minimum(high - begin, chosen.length)
    )
    return cut(chosen, first, stop)


def intersect(held: Regions, wanted: Regions) -> Moves:
    """Copies that bring from one side's buffers what the other side wants of it, in the order of `wanted`."""
    by_tensor = np.argsort(wanted.tensor, kind="stable")
    keys = wanted.tensor[by_tensor]
    first, last = np.searchsorted(keys, held.tensor), np.searchsorted(keys, held.tensor, side="right")
    count = last - first
    ours = np.repeat(np.arange(len(held)), count)
    theirs = by_tensor[np.arange(len(ours)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)]
    order = np.argsort(theirs, kind="stable")
    met = pairs(held.take(ours[order]), wanted.take(theirs[order]))
    if not met:
        return Moves.of([])
    joined = Moves.concat([moves for moves, _ in met])
    return joined.take(np.argsort(np.concatenate([nth for _, nth in met]), kind="stable"))


def pairs(held: Regions, wanted: Regions) -> list[tuple[Moves, Ints]]:
    """Copies of what is in both of held[n] and wanted[n], and n of each, by the shapes of the two."""
    run = held.count == 1
    other_run = ~run & (wanted.count == 1)
    alike = ~run & ~other_run & (held.stride == wanted.stride)
    found = []
    for mask, overlap in ((run, within_held), (other_run, within_wanted), (alike, same_stride)):
        index = np.flatnonzero(mask)
        if len(index):
            moves, nth = overlap(held.take(index), wanted.take(index))
            found.append((moves, index[nth]))
    for n in np.flatnonzero(~run & ~other_run & ~alike):  # run by run: rare
        runs = runs_of(wanted.take(np.asarray([n])))
        moves, nth = within_wanted(held.take(np.full(len(runs), n)), runs)
        found.append((moves, np.full(len(nth), n)))
    return found


def numbered(regions: Regions) -> Regions:
    """The regions, with their number in `buffer`."""
    return Regions(**{**vars(regions), "buffer": np.arange(len(regions))})


def within_held(held: Regions, wanted: Regions) -> tuple[Moves, Ints]:
    """The overlaps where held[n] is one run, and n of each."""
    parts = cut(numbered(wanted), held.start, held.start + held.length)
    return moves_of(parts, held, wanted), parts.buffer


def within_wanted(held: Regions, wanted: Regions) -> tuple[Moves, Ints]:
    """The overlaps where wanted[n] is one run, and n of each."""
    parts = cut(numbered(held), wanted.start, wanted.start + wanted.length)
    return moves_of(parts, held, wanted), parts.buffer


def same_stride(held: Regions, wanted: Regions) -> tuple[Moves, Ints]:
    """The overlaps of two blocks of columns of one matrix, and n of each. A run must not wrap around a row's end."""
    low, left = np.divmod(held.start, held.stride)
    other_low, other_left = np.divmod(wanted.start, wanted.stride)
    if ((left + held.length > held.stride) | (other_left + wanted.length > wanted.stride)).any():
        raise ValueError("a run of columns goes beyond the end of its row")
    top = np.maximum(low, other_low)
    bottom = np.minimum(low + held.count, other_low + wanted.count)
    begin = np.maximum(left, other_left)
    end = np.minimum(left + held.length, other_left + wanted.length)
    index = np.flatnonzero((bottom > top) & (end > begin))
    start = (top * held.stride + begin)[index]
    whole = numbered(held).take(index)
    parts = part_of(whole, start, (bottom - top)[index], whole.stride, (end - begin)[index])
    return moves_of(parts, held, wanted), parts.buffer


def moves_of(parts: Regions, held: Regions, wanted: Regions) -> Moves:
    """The copies of `parts`, which lie inside held[n] and wanted[n], n being their `buffer`."""
    ours, theirs = held.take(parts.buffer), wanted.take(parts.buffer)
    source_at, source_row = place(ours, parts.start, parts.stride)
    target_at, target_row = place(theirs, parts.start, parts.stride)
    return Moves(
        tensor=parts.tensor,
        count=parts.count,
        length=parts.length,
        source=ours.buffer,
        source_at=source_at,
        source_row=source_row,
        source_col=ours.col,
        target=theirs.buffer,
        target_at=target_at,
        target_row=target_row,
        target_col=theirs.col,
    )


def runs_of(regions: Regions) -> Regions:
    """Each run as a region of its own."""
    index = np.repeat(np.arange(len(regions)), regions.count)
    whole = regions.take(index)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(regions.count) - regions.count, regions.count)
    ones = np.ones(len(index), np.int64)
    return part_of(whole, whole.start + nth * whole.stride, ones, whole.stride, whole.length)
