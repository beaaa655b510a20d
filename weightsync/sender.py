"""The trainer's end of a push: one rank's planned buckets, copied from its live weights into a channel, and signed."""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
import xxhash

from weightsync.channels.channel import Outlet
from weightsync.plan import Bucket, Stream, Wanted, aligned, narrowed

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

    def __init__(self, stream: Stream, readers: Sequence[Wanted], outlet: Outlet):
        self.stream, self.readers, self.outlet = stream, readers, outlet
        self.pushed: dict[tuple[int, str], Any] = {}
        self.begin((), ())

    def begin(self, sources: Sequence[Read], modules: Collection[str] | None) -> None:
        """A push of these modules (None: all) from these sources, one for each buffer of the plan."""
        self.sources = sources
        self.current = self.stream if modules is None else narrowed(self.stream, modules)
        self._sending: dict[tuple[int, str], Any] = {}

    def pack(self, number: int, slot: int) -> tuple[int, ...]:
        """Fills a slot with bucket `number` and sends it; gives the digest of each of its segments."""
        bucket, memory = self.current.buckets[number], self.outlet.slot(slot)
        fill(memory, bucket, self.sources, self.readers[bucket.reader])
        pieces = piece_digests(memory, bucket)
        remember(self._sending, bucket, pieces)
        self.pushed |= {key: self._sending[key] for key in ((bucket.reader, s.module) for s in bucket.segments)}
        signed = segment_digests(bucket, pieces)
        self.outlet.send(slot, bucket.nbytes, bucket.reader)
        return signed

    def changed(self, sources: Sequence[Read]) -> list[str]:
        """The modules of which this rank's bytes are not those that it last sent."""
        found: dict[tuple[int, str], Any] = {}
        for bucket in self.stream.buckets:
            memory = self.outlet.slot(0)
            fill(memory, bucket, sources, self.readers[bucket.reader])
            remember(found, bucket, piece_digests(memory, bucket))
        before = {key: digest.intdigest() for key, digest in self.pushed.items()}
        now = {key: digest.intdigest() for key, digest in found.items()}
        return sorted({module for (reader, module), value in now.items() if before.get((reader, module)) != value})


def remember(into: dict[tuple[int, str], Any], bucket: Bucket, pieces: Sequence[bytes]) -> None:
    """Adds a bucket's pieces to the digests of their modules, which so do not depend on where buckets are cut."""
    for s in bucket.segments:
        into.setdefault((bucket.reader, s.module), xxhash.xxh3_128()).update(b"".join(pieces[s.first : s.last]))


def fill(memory: torch.Tensor, bucket: Bucket, sources: Sequence[Read], wanted: Wanted) -> None:
    """Copies the moves of a bucket to their places in its bytes, in the dtypes that the reader wants."""
    m = bucket.moves
    source, at, row, col = (x.tolist() for x in (m.source, m.source_at, m.source_row, m.source_col))
    count, length, target = m.count.tolist(), m.length.tolist(), m.target.tolist()
    for k, offset in enumerate(bucket.offset.tolist()):
        piece = piece_of(memory, wanted, target[k], offset, count[k], length[k])
        piece.copy_(sources[source[k]](at[k], row[k], col[k], count[k], length[k]))
        end = offset + piece.nbytes
        memory[end : aligned(end)].zero_()  # what is there by chance must not change a digest


def piece_of(memory: torch.Tensor, wanted: Wanted, buffer: int, offset: int, count: int, length: int) -> torch.Tensor:
    """[count, length] of a move's elements in a bucket's bytes."""
    dtype: torch.dtype = getattr(torch, wanted.buffers[buffer].dtype)
    return memory[offset : offset + count * length * dtype.itemsize].view(dtype).view(count, length)


def piece_digests(memory: torch.Tensor, bucket: Bucket) -> list[bytes]:
    """xxh3 (64 bits) of each move's bytes: finds what crc32 finds, at several times its speed."""
    data: Any = memory.numpy()  # a buffer
    stops = [*bucket.offset.tolist(), bucket.nbytes]
    return [xxhash.xxh3_64_digest(data[a:b]) for a, b in pairwise(stops)]


def segment_digests(bucket: Bucket, pieces: Sequence[bytes]) -> tuple[int, ...]:
    """What signs the segments of a bucket."""
    return tuple(xxhash.xxh3_64_intdigest(b"".join(pieces[s.first : s.last])) for s in bucket.segments)


def digests(memory: torch.Tensor, bucket: Bucket) -> tuple[int, ...]:
    """The digest of each segment in a bucket's bytes."""
    return segment_digests(bucket, piece_digests(memory, bucket))
