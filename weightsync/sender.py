"""The trainer's end of a push: one rank's planned buckets, copied from its live weights into a channel, and signed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import xxhash

from weightsync.channels.channel import Outlet
from weightsync.plan import Bucket, Item, Stream, Turn, Wanted, aligned, narrowed

# Elements of a source: (at, row, col, count, length) -> [count, length], as in weightsync.regions.
Read = Callable[[int, int, int, int, int], torch.Tensor]
NUM_SLOTS = 2  # one is filled while the other is read


def plain(flat: torch.Tensor) -> Read:
    """Reads a flat tensor."""

    def read(at: int, row: int, col: int, count: int, length: int) -> torch.Tensor:
        return flat.as_strided((count, length), (row, col), flat.storage_offset() + at)

    return read


class Sender:
    """One rank of the trainer. `pushed` remembers a digest of every module's bytes as they were last sent."""

    def __init__(self, rank: int, streams: Sequence[Stream], readers: Sequence[Wanted], outlet: Outlet):
        self.rank, self.readers, self.outlet = rank, readers, outlet
        self.streams = {stream.reader: stream for stream in streams}
        self.pushed: dict[tuple[int, str], Any] = {}

    def begin(self, sources: Sequence[Read], version: int, modules: Collection[str] | None) -> None:
        """A push of these modules (None: all) from these sources, one for each buffer of the plan."""
        self.sources = sources
        self.outlet.begin(version, modules)
        self.current = {reader: narrowed(stream, modules) for reader, stream in self.streams.items()}
        self._sending: dict[tuple[int, str], Any] = {}
        self._slot = 0

    def pack(self, turn: Turn) -> Item:
        """Fills a slot with a bucket and sends it."""
        reader, number = turn
        bucket, slot = self.current[reader].buckets[number], self._slot
        self._slot = (slot + 1) % NUM_SLOTS
        memory = self.outlet.slot(slot)
        pieces = fill(memory, bucket, self.sources, self.readers[reader])
        remember(self._sending, reader, bucket, pieces)
        self.pushed |= {(reader, s.module): self._sending[reader, s.module] for s in bucket.segments}
        self.outlet.send(slot, reader, bucket)
        digests = segment_digests(bucket, pieces)
        return Item(rank=self.rank, reader=reader, number=number, slot=slot, digests=digests)

    def changed(self, sources: Sequence[Read]) -> list[str]:
        """The modules of which this rank's bytes are not those that it last sent."""
        found: dict[tuple[int, str], Any] = {}
        for reader, stream in self.streams.items():
            for bucket in stream.buckets.values():
                memory = self.outlet.slot(0)
                remember(found, reader, bucket, fill(memory, bucket, sources, self.readers[reader]))
        before = {key: digest.intdigest() for key, digest in self.pushed.items()}
        now = {key: digest.intdigest() for key, digest in found.items()}
        return sorted({module for (reader, module), value in now.items() if before.get((reader, module)) != value})


def remember(into: dict[tuple[int, str], Any], reader: int, bucket: Bucket, pieces: Mapping[int, bytes]) -> None:
    """Adds a bucket's pieces to the digests of their modules."""
    for s in bucket.segments:
        data = b"".join(pieces[k] for k in range(s.first, s.last))
        into.setdefault((reader, s.module), xxhash.xxh3_128()).update(data)


def fill(memory: torch.Tensor, bucket: Bucket, sources: Sequence[Read], wanted: Wanted) -> dict[int, bytes]:
    """Copies what is sent of a bucket to its places in its bytes, in the dtypes that the reader wants; their digests,
    as `piece_digests`."""
    m = bucket.moves
    source, at, row, col = (x.tolist() for x in (m.source, m.source_at, m.source_row, m.source_col))
    count, length, target = m.count.tolist(), m.length.tolist(), m.target.tolist()
    stops = [*bucket.offset.tolist(), bucket.nbytes]
    data: Any = memory.numpy()  # a buffer
    found = {}
    for k in (k for s in bucket.segments for k in range(s.first, s.last)):
        piece = piece_of(memory, wanted, target[k], stops[k], count[k] * length[k]).view(count[k], length[k])
        piece.copy_(sources[source[k]](at[k], row[k], col[k], count[k], length[k]))
        end = stops[k] + piece.nbytes
        memory[end : aligned(end)].zero_()  # what is there by chance must not change a digest
        found[k] = xxhash.xxh3_64_digest(data[stops[k] : stops[k + 1]])  # while it is in the cache
    return found


def spread(memory: torch.Tensor, bucket: Bucket, targets: Sequence[Read], wanted: Wanted) -> None:
    """The inverse of `fill`: copies what is sent of a bucket from its bytes to where it belongs in the targets."""
    m = bucket.moves
    target, at, row, col = (x.tolist() for x in (m.target, m.target_at, m.target_row, m.target_col))
    count, length, offset = m.count.tolist(), m.length.tolist(), bucket.offset.tolist()
    for k in (k for s in bucket.segments for k in range(s.first, s.last)):
        piece = piece_of(memory, wanted, target[k], offset[k], count[k] * length[k]).view(count[k], length[k])
        targets[target[k]](at[k], row[k], col[k], count[k], length[k]).copy_(piece)


def piece_of(memory: torch.Tensor, wanted: Wanted, buffer: int, offset: int, num_elements: int) -> torch.Tensor:
    """[num_elements] of a move's elements in a bucket's bytes."""
    dtype: torch.dtype = getattr(torch, wanted.buffers[buffer].dtype)
    return memory[offset : offset + num_elements * dtype.itemsize].view(dtype)


def piece_digests(memory: torch.Tensor, bucket: Bucket) -> dict[int, bytes]:
    """xxh3 (64 bits) of the bytes of each move that is sent: finds what crc32 finds, at several times its speed."""
    data: Any = memory.numpy()  # a buffer
    stops = [*bucket.offset.tolist(), bucket.nbytes]
    moves = (k for s in bucket.segments for k in range(s.first, s.last))
    return {k: xxhash.xxh3_64_digest(data[stops[k] : stops[k + 1]]) for k in moves}


def segment_digests(bucket: Bucket, pieces: Mapping[int, bytes]) -> tuple[int, ...]:
    """What signs the segments of a bucket."""
    joined = (b"".join(pieces[k] for k in range(s.first, s.last)) for s in bucket.segments)
    return tuple(xxhash.xxh3_64_intdigest(data) for data in joined)


def digests(memory: torch.Tensor, bucket: Bucket) -> tuple[int, ...]:
    """The digest of each segment in a bucket's bytes."""
    return segment_digests(bucket, piece_digests(memory, bucket))
