"""What each rank of the trainer sends to whom, in which buckets: regions held, met with regions wanted. Pure.

A *reader* is a set of workers that want the same bytes, such as the first worker of every engine: what is sent to it is
sent once. Every rank plans its own sending from what all readers want; nobody needs to know what the others hold, as
what they hold of each tensor does not overlap.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from weightsync.regions import Ints, Moves, Regions, intersect

# Alignment of a piece inside a bucket, bytes: enough for any dtype view.
ALIGN_BYTES = 16
TWO_DRIVERS = "two drivers must not push at once"
Turn = tuple[int, int]  # a bucket of a rank: (reader, its number in the stream to that reader)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class PlanError(ValueError):
    """The two sides do not fit: raised before any weight changes."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A parameter of an engine's model: what is loaded is one *module*, whole. `dtype` is that of the bytes sent."""

    module: str
    name: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a reader wants: regions of the folder's tensors in `names`, to be laid into `buffers`."""

    names: tuple[str, ...]
    regions: Regions
    buffers: tuple[Buffer, ...]

    @property
    def modules(self) -> list[str]:
        """In the order of loading."""
        return list(dict.fromkeys(buffer.module for buffer in self.buffers))

    def module_of(self, buffer: Ints) -> Ints:
        """[N] numbers in `modules` of these buffers."""
        number = {module: k for k, module in enumerate(self.modules)}
        return np.array([number[b.module] for b in self.buffers], np.int64)[buffer]

    def item_bytes(self, buffer: Ints) -> Ints:
        return np.array([ITEM_BYTES[b.dtype] for b in self.buffers], np.int64)[buffer]

    def num_bytes(self) -> int:
        """Bytes of everything wanted: nobody can send less."""
        return int((self.regions.num_elements * self.item_bytes(self.regions.buffer)).sum())

    def fingerprint(self) -> str:
        """Workers with equal fingerprints are one reader."""
        digest = hashlib.sha256(repr((self.names, self.buffers)).encode())
        for field in fields(self.regions):
            digest.update(getattr(self.regions, field.name).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The moves [first, last) of a bucket, which are all of one module, and their bytes [begin, end)."""

    module: str
    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Moves that travel together; move k lies at byte offset[k], run after run.

    `segments` are those that are sent: all of them, or in a push of what has changed only some.
    """

    moves: Moves
    offset: Ints
    segments: tuple[Segment, ...]
    nbytes: int  # of all its moves

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The bytes [begin, end) that are sent."""
        found: list[tuple[int, int]] = []
        for segment in self.segments:
            if found and found[-1][1] == segment.begin:
                found[-1] = (found[-1][0], segment.end)
            else:
                found.append((segment.begin, segment.end))
        return found

    @property
    def num_sent(self) -> int:
        """Bytes that are sent."""
        return sum(segment.end - segment.begin for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one rank sends to one reader, in sending order: buckets by their number."""

    reader: int
    buckets: dict[int, Bucket]

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return sum(bucket.num_sent for bucket in self.buckets.values())

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets.values()), default=0)

    def fingerprint(self) -> str:
        """Sender and reader must agree on it."""
        digest = hashlib.sha256(repr(self.reader).encode())
        for number, bucket in self.buckets.items():
            digest.update(repr((number, bucket.segments, bucket.nbytes)).encode())
            for field in fields(bucket.moves):
                digest.update(getattr(bucket.moves, field.name).tobytes())
        return digest.hexdigest()[:16]


def plan_stream(held: Regions, wanted: Wanted, reader: int, slot_bytes: int) -> Stream:
    """What a rank that holds `held` sends to a reader, in buckets of at most `slot_bytes`."""
    moves = in_load_order(intersect(held, wanted.regions), wanted)
    moves = split_large(moves, wanted.item_bytes(moves.target), slot_bytes)
    sizes = aligned(moves.num_elements * wanted.item_bytes(moves.target))
    modules = [wanted.buffers[buffer].module for buffer in moves.target.tolist()]
    return Stream(reader=reader, buckets=dict(enumerate(cut_buckets(moves, sizes, modules, slot_bytes))))


def plan_streams(held: Regions, readers: Sequence[Wanted], slot_bytes: int) -> tuple[Stream, ...]:
    """What a rank sends, to each reader that it has anything for."""
    streams = (plan_stream(held, wanted, number, slot_bytes) for number, wanted in enumerate(readers))
    return tuple(stream for stream in streams if stream.buckets)


def turns_of(streams: Sequence[Stream], rank: int) -> list[Turn]:
    """The order in which a rank sends its buckets.

    The readers' buckets take turns, and each rank begins with another one, so that all of them load at the same time.
    """
    if not streams:
        return []
    first = rank % len(streams)
    numbers = [
        [(stream.reader, number) for number in stream.buckets] for stream in (*streams[first:], *streams[:first])
    ]
    return [turn for turns in zip_longest(*numbers) for turn in turns if turn is not None]


def narrowed(stream: Stream, modules: Collection[str] | None) -> Stream:
    """What is left of a stream when only these modules (None: all) are sent."""
    if modules is None:
        return stream
    chosen = set(modules)
    left = {
        number: replace(bucket, segments=tuple(s for s in bucket.segments if s.module in chosen))
        for number, bucket in stream.buckets.items()
    }
    return replace(stream, buckets={number: bucket for number, bucket in left.items() if bucket.segments})


def in_load_order(moves: Moves, wanted: Wanted) -> Moves:
    """Module after module, as an engine can only put a module to use once all of it is there."""
    return moves.take(np.argsort(wanted.module_of(moves.target), kind="stable"))


def cut_buckets(moves: Moves, sizes: Ints, modules: Sequence[str], slot_bytes: int) -> list[Bucket]:
    """Moves in order, in buckets that are as full as they can be. No size is above `slot_bytes`."""
    changes = [0, *(k for k in range(1, len(modules)) if modules[k] != modules[k - 1]), len(modules)]
    ends = np.cumsum(sizes)
    buckets, first = [], 0
    while first < len(moves):
        base = int(ends[first] - sizes[first])
        last = int(np.searchsorted(ends, base + slot_bytes, side="right"))
        offset = ends[first:last] - sizes[first:last] - base
        stops = [*offset.tolist(), int(ends[last - 1]) - base]
        inside = changes[bisect_right(changes, first) : bisect_left(changes, last)]
        segments = tuple(
            Segment(module=modules[a], first=a - first, last=b - first, begin=stops[a - first], end=stops[b - first])
            for a, b in pairwise([first, *inside, last])
        )
        chosen = moves.take(np.arange(first, last))
        buckets.append(Bucket(moves=chosen, offset=offset, segments=segments, nbytes=stops[-1]))
        first = last
    return buckets


def split_large(moves: Moves, item_bytes: Ints, slot_bytes: int) -> Moves:
    """Moves of more than a bucket cut into such of whole runs, or of parts of a run."""
    room = (slot_bytes - ALIGN_BYTES) // item_bytes
    large = moves.num_elements > room
    if not large.any():
        return moves
    found, done = [], 0
    for n in np.flatnonzero(large).tolist():
        found.append(moves.take(np.arange(done, n)))
        done = n + 1
        count, length = int(moves.count[n]), int(moves.length[n])
        high, wide = max(1, int(room[n]) // length), min(length, int(room[n]))
        for run in range(0, count, high):
            for begin in range(0, length, wide):
                found.append(submove(moves, n, run, min(high, count - run), begin, min(wide, length - begin)))
    found.append(moves.take(np.arange(done, len(moves))))
    return Moves.concat(found)


def submove(moves: Moves, n: int, run: int, count: int, begin: int, length: int) -> Moves:
    """Runs [run, run + count) of move n, of each the elements [begin, begin + length)."""
    one = moves.take(np.array([n]))
    shifted = {
        f"{side}_at": getattr(one, f"{side}_at")
        + run * getattr(one, f"{side}_row")
        + begin * getattr(one, f"{side}_col")
        for side in ("source", "target")
    }
    return Moves(**{**vars(one), **shifted, "count": np.array([count]), "length": np.array([length])})


def aligned(nbytes: Any) -> Any:
    """Bytes rounded up to a multiple of ALIGN_BYTES: a number, or many."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def require_whole(streams: Iterable[Stream], readers: Sequence[Wanted]) -> None:
    """Raises PlanError, naming tensors, unless every element that a reader wants is sent to it exactly once.

    As what two ranks hold does not overlap, counting is enough.
    """
    sent_to = [np.zeros(len(wanted.names), np.int64) for wanted in readers]
    for stream in streams:
        for bucket in stream.buckets.values():
            np.add.at(sent_to[stream.reader], bucket.moves.tensor, bucket.moves.num_elements)
    for wanted, sent in zip(readers, sent_to, strict=True):
        asked = np.zeros(len(wanted.names), np.int64)
        np.add.at(asked, wanted.regions.tensor, wanted.regions.num_elements)
        wrong = np.flatnonzero(sent != asked)
        if len(wrong):
            shown = ", ".join(f"{wanted.names[t]} ({sent[t]} of {asked[t]} elements)" for t in wrong[:8])
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise PlanError(f"the ranks of the trainer do not hold what an engine wants: {shown}{more}")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A worker's place: which reader it is, and its number among the workers that are this reader."""

    reader: int
    member: int


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a rank of the trainer sends, and by which way it comes: the address of a channel."""

    rank: int
    streams: tuple[Stream, ...]
    signed: tuple[str, ...]  # the streams' fingerprints, as the rank made them
    address: Any

    def to(self, readers: Collection[int]) -> "Link":
        """What of it concerns these readers."""
        kept = [
            (stream, sign) for stream, sign in zip(self.streams, self.signed, strict=True) if stream.reader in readers
        ]
        return replace(self, streams=tuple(stream for stream, _ in kept), signed=tuple(sign for _, sign in kept))


@dataclass(frozen=True, kw_only=True)
class Item:
    """A bucket that a rank has packed: to which reader, its number, in which slot, its segments' digests."""

    rank: int
    reader: int
    number: int
    slot: int
    digests: tuple[int, ...]


def fingerprint(held: dict[tuple[int, int, int], int]) -> str:
    """Hash of the digests of all segments, by (rank, bucket, segment)."""
    return hashlib.sha256(repr(sorted(held.items())).encode()).hexdigest()[:16]
