"""What a rank of the trainer holds of the model folder's tensors, from a description of its parameters. Pure.

Where tensors lie in *whole* parameters is the same for all ranks (`whole_regions`, computed once); each rank's part of
that is cut out in a few operations on arrays (`held_regions`). So planning for many ranks stays cheap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.regions import Ints, Regions
from weightsync.regions import share as share_of

Index = tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter as the layout found it: its whole shape, and which of the folder's tensors lie at which index in it.

    `pieces` has (number of the tensor in the folder, index in the whole parameter); index () is all of it.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, Index], ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank has of a parameter.

    `part` of `parts` equal ones along dimension `dim`; of that, flat, the elements from `partition` x `numel` on
    (ZeRO-3; `numel` is None where it is all there). `replica` is the rank's number among the `replicas` that hold the
    same, which share the sending.
    """

    dim: int = 0
    part: int = 0
    parts: int = 1
    numel: int | None = None
    partition: int = 0
    replica: int = 0
    replicas: int = 1


def whole_regions(parameters: Sequence[Parameter]) -> Regions:
    """Where each tensor lies in the whole parameters; the buffer of a region is its parameter's number.

    Each region is one run. Raises ValueError when a tensor does not lie in one piece.
    """
    rows = [
        (tensor, 0, 1, length, length, buffer, at, length, 1)
        for buffer, parameter in enumerate(parameters)
        for tensor, index in parameter.pieces
        for at, length in (block(parameter, index),)
        if length
    ]
    return Regions.of(rows)


def block(parameter: Parameter, index: Index) -> tuple[int, int]:
    """(first element, number of elements) of an index in a parameter. Raises ValueError unless they are neighbours."""
    at, length, open_dims = 0, parameter.numel, False
    for dim, place in enumerate(index):
        size = parameter.shape[dim]
        step = math.prod(parameter.shape[dim + 1 :])
        first, last, stride = (place, place + 1, 1) if isinstance(place, int) else place.indices(size)
        if stride != 1 or not 0 <= first <= last <= size or (open_dims and (first, last) != (0, size)):
            raise ValueError(f"{parameter.name} of shape {parameter.shape}: the tensor at {index} is not in one piece")
        open_dims = open_dims or last - first > 1
        at += first * step
        length = length // size * (last - first) if size else 0
    return at, length


def held_regions(parameters: Sequence[Parameter], shares: Sequence[Share], whole: Regions | None = None) -> Regions:
    """What a rank is to send, that has `shares[n]` of parameter n; `whole` is whole_regions(parameters), if at hand.

    The buffer of a region is the number of its parameter, of which the rank has its part, flat. No two ranks' regions
    overlap, and together they are everything. Parameters that are whole come first, as they are shared among others.
    Raises ValueError when a tensor that is one of several in its parameter is cut other than along the first
    dimension, or a partition holds columns.
    """
    whole = whole_regions(parameters) if whole is None else whole
    mine = sliced(whole, parameters, shares)
    is_cut = np.array([share.parts > 1 for share in shares], bool)
    mine = mine.take(np.argsort(is_cut[mine.buffer], kind="stable"))
    if any(share.numel is not None for share in shares):
        if (mine.count > 1).any():
            raise ValueError("a partition of a parameter in which a tensor does not lie in one piece")
        size = np.array([p.numel if s.numel is None else s.numel for p, s in zip(parameters, shares, strict=True)])
        low = (size * np.array([share.partition for share in shares], np.int64))[mine.buffer]
        return runs_inside(mine, low, low + size[mine.buffer])
    keys = np.array([(share.parts > 1, share.replica, share.replicas) for share in shares], np.int64).reshape(-1, 3)
    shared = []
    for key in np.unique(keys, axis=0):
        own = mine.take((keys == key).all(1)[mine.buffer])
        shared.append(share_of(own, int(key[1]), int(key[2])))
    return Regions.concat(shared)


def sliced(whole: Regions, parameters: Sequence[Parameter], shares: Sequence[Share]) -> Regions:
    """Of regions in whole parameters what lies in a rank's parts of these, with places in that, in the same order.

    Of a parameter that is cut along dimension d, each run along dimensions d and further is cut.
    """
    numel = np.array([parameter.numel for parameter in parameters], np.int64)
    dims = [share.dim if share.parts > 1 else 0 for share in shares]
    inner = np.array([math.prod(p.shape[dim:]) for p, dim in zip(parameters, dims, strict=True)], np.int64)
    part, parts = (np.array([getattr(share, key) for share in shares], np.int64) for key in ("part", "parts"))
    wide = inner // parts
    low = wide * part
    columns = ((parts > 1) & (inner < numel))[whole.buffer]
    strided, flat = whole.take(columns), whole.take(~columns)
    for n in np.flatnonzero(strided.length != numel[strided.buffer])[:1]:
        raise ValueError(f"{parameters[strided.buffer[n]].name}: one of several tensors in it is cut by columns")
    n = strided.buffer
    blocks = Regions(
        tensor=strided.tensor,
        start=low[n],
        count=numel[n] // inner[n],
        stride=inner[n],
        length=wide[n],
        buffer=n,
        at=np.zeros_like(n),
        row=wide[n],
        col=np.ones_like(n),
    )
    joined = Regions.concat([blocks, runs_inside(flat, low[flat.buffer], (low + wide)[flat.buffer])])
    return joined.take(np.argsort(joined.buffer, kind="stable"))


def runs_inside(runs: Regions, low: Ints, high: Ints) -> Regions:
    """Of regions of one run each the elements in [low, high) of their buffers, with places counted from low."""
    index = np.flatnonzero((runs.at < high) & (runs.at + runs.length > low))
    runs, low, high = runs.take(index), low[index], high[index]
    first = np.maximum(low - runs.at, 0)
    length = np.minimum(high - runs.at, runs.length) - first
    return Regions(
        tensor=runs.tensor,
        start=runs.start + first,
        count=np.ones_like(length),
        stride=length,
        length=length,
        buffer=runs.buffer,
        at=runs.at + first - low,
        row=length,
        col=np.ones_like(length),
    )
