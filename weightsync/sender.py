"""The trainer's end of a push: one rank's planned buckets, copied from its live weights into a channel, and signed."""

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

import torch
import xxhash

from weightsync.channels.channel import Outlet
from weightsync.plan import Bucket, Item, Segment, Stream, Turn, Wanted, aligned, narrowed

# Elements of a source: (at, row, col, count, length) -> [count, length], as in weightsync.regions.
Read = Callable[[int, int, int, int, int], torch.Tensor]
Part = TypeVar("Part")
Result = TypeVar("Result")
START_S = 60.0  # longest wait for threads to start
NUM_SLOTS = 2  # one is filled while the other is read


def plain(flat: torch.Tensor) -> Read:
    """Reads a flat tensor."""

    def read(at: int, row: int, col: int, count: int, length: int) -> torch.Tensor:
        return flat.as_strided((count, length), (row, col), flat.storage_offset() + at)

    return read


class Sender:
    """One rank of the trainer. `pushed` remembers the digest of each segment as it was last sent."""

    def __init__(self, rank: int, streams: Sequence[Stream], readers: Sequence[Wanted], outlet: Outlet):
        self.rank, self.readers, self.outlet = rank, readers, outlet
        self.streams = {stream.reader: stream for stream in streams}
        self.pushed: dict[tuple[Turn, Segment], int] = {}

    def begin(self, sources: Sequence[Read], version: int, modules: Collection[str] | None) -> None:
        """A push of these modules (None: all) from these sources, one for each buffer of the plan."""
        self.sources = sources
        self.outlet.begin(version, modules)
        self.current = {reader: narrowed(stream, modules) for reader, stream in self.streams.items()}
        self._slot = 0

    def pack(self, turn: Turn) -> Item:
        """Fills a slot with a bucket and sends it."""
        reader, number = turn
        bucket, slot = self.current[reader].buckets[number], self._slot
        self._slot = (slot + 1) % NUM_SLOTS
        signed = fill(self.outlet.slot(slot), bucket, self.sources, self.readers[reader])
        self.pushed |= {(turn, s): digest for s, digest in zip(bucket.segments, signed, strict=True)}
        self.outlet.send(slot, reader, bucket)
        return Item(rank=self.rank, reader=reader, number=number, slot=slot, digests=signed)

    def changed(self, sources: Sequence[Read]) -> list[str]:
        """The modules of which this rank's bytes are not those that it last sent."""
        found: set[str] = set()
        for reader, stream in self.streams.items():
            for number, bucket in stream.buckets.items():
                now = fill(self.outlet.slot(0), bucket, sources, self.readers[reader])
                before = [self.pushed.get(((reader, number), s)) for s in bucket.segments]
                changes = zip(bucket.segments, now, before, strict=True)
                found |= {s.module for s, new, old in changes if new != old}
        return sorted(found)


def fill(
    memory: torch.Tensor, bucket: Bucket, sources: Sequence[Read], wanted: Wanted, at_once: bool = True
) -> tuple[int, ...]:
    """Copies what is sent of a bucket to its places in its bytes, in the dtypes that the reader wants; the digest of
    each segment. `at_once`: several segments at a time, for which sources must be safe to be read by threads."""
    m = bucket.moves
    source, at, row, col = (x.tolist() for x in (m.source, m.source_at, m.source_row, m.source_col))
    count, length, target, offset = (x.tolist() for x in (m.count, m.length, m.target, bucket.offset))

    @torch.no_grad()
    def fill_segment(s: Segment) -> int:
        for k in range(s.first, s.last):
            piece = piece_of(memory, wanted, target[k], offset[k], count[k] * length[k]).view(count[k], length[k])
            piece.copy_(sources[source[k]](at[k], row[k], col[k], count[k], length[k]))
            end = offset[k] + piece.nbytes
            memory[end : aligned(end)].zero_()  # what is there by chance must not change a digest
        return digest_of(memory[s.begin : s.end])  # while it is in the cache

    return tuple(each_of(memory, fill_segment, bucket.segments) if at_once else map(fill_segment, bucket.segments))


def spread(memory: torch.Tensor, bucket: Bucket, targets: Sequence[Read], wanted: Wanted) -> None:
    """The inverse of `fill`: copies what is sent of a bucket from its bytes to where it belongs in the targets."""
    m = bucket.moves
    target, at, row, col = (x.tolist() for x in (m.target, m.target_at, m.target_row, m.target_col))
    count, length, offset = m.count.tolist(), m.length.tolist(), bucket.offset.tolist()
    for k in bucket.sent:
        piece = piece_of(memory, wanted, target[k], offset[k], count[k] * length[k]).view(count[k], length[k])
        targets[target[k]](at[k], row[k], col[k], count[k], length[k]).copy_(piece)


def piece_of(memory: torch.Tensor, wanted: Wanted, buffer: int, offset: int, num_elements: int) -> torch.Tensor:
    """[num_elements] of a move's elements in a bucket's bytes."""
    dtype: torch.dtype = getattr(torch, wanted.buffers[buffer].dtype)
    return memory[offset : offset + num_elements * dtype.itemsize].view(dtype)


def digests(memory: torch.Tensor, bucket: Bucket) -> tuple[int, ...]:
    """The digest of each segment in a bucket's bytes."""
    return tuple(each_of(memory, digest_of, [memory[s.begin : s.end] for s in bucket.segments]))


def each_of(memory: torch.Tensor, work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Results of work on parts of `memory`: several at a time where this is the host's. Raises what one of them raises,
    when all have ended."""
    if memory.is_cuda or len(parts) == 1:  # torch's own threads share the copying of a single one
        return [work(part) for part in parts]
    futures = [threads().submit(work, part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


@cache
def threads() -> ThreadPoolExecutor:
    """As many threads as torch uses, in each of which torch works alone; copying and signing let go of the
    interpreter's lock. Cutting every single copy up among torch's own threads costs 80 us to wake them."""
    count = torch.get_num_threads()
    started = threading.Barrier(count + 1, timeout=START_S)

    def start() -> None:
        torch.get_num_threads()  # a thread that has not asked takes, at its first work, what was set last anywhere
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="bucket", initializer=start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(count)  # what was set last is what threads that are still to come begin with
    return pool


def digest_of(data: torch.Tensor) -> int:
    """64 bits that sign bytes: xxh3, which finds what crc32 finds at several times its speed; on a GPU a weighted sum,
    mod 2^64, of their 64-bit words by odd weights, so that no change of one word goes unnoticed."""
    if data.is_cuda:
        words = data.view(torch.int64)  # segments are multiples of ALIGN_BYTES
        weights = torch.arange(1, 2 * len(words), 2, device=data.device)
        return int((words * weights).sum()) % 2**64
    buffer: Any = data.numpy()
    return xxhash.xxh3_64_intdigest(buffer)
