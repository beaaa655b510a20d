"""What each rank of the trainer sends to whom, in which buckets. Pure; weightsync.planner makes it.

A *reader* is a set of workers that want the same bytes, such as the first worker of every engine: what is sent to it is
sent once. Every rank plans its own sending from what all readers want; nobody needs to know what the others hold, as
what they hold of each tensor does not overlap.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from weightsync.regions import Ints, Moves, Regions

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
    def sent(self) -> Iterator[int]:
        """The numbers of the moves that are sent."""
        return (k for segment in self.segments for k in range(segment.first, segment.last))

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


def two_drivers(did: str, now: str, name: str) -> str:
    """What is wrong when the connection is `now` and a push goes by the one of `name`; what the other sync `did`."""
    return f"another weight sync has {did} (connection {now}, this push uses {name}): {TWO_DRIVERS}"


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


def whole_modules(bucket: Bucket, wanted: Wanted, expected: dict[str, int]) -> dict[str, dict[int, int]]:
    """The modules of which a bucket has everything, each buffer's bytes together and in order: where these begin, by
    the buffer's number.

    The bucket was made for this reader; `expected` has the elements of each module.
    """
    m = bucket.moves
    dense = (m.target_col == 1) & ((m.count == 1) | (m.target_row == m.length))
    start = bucket.offset - m.target_at * wanted.item_bytes(m.target)
    found: dict[str, dict[int, int]] = {}
    for s in bucket.segments:
        own = slice(s.first, s.last)
        places = set(zip(m.target[own].tolist(), start[own].tolist(), strict=True))
        starts = dict(places)
        if dense[own].all() and len(starts) == len(places) and m.num_elements[own].sum() == expected[s.module]:
            found[s.module] = starts
    return found


def aligned(nbytes: Any) -> Any:
    """Bytes rounded up to a multiple of ALIGN_BYTES: a number, or many."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


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
