"""Packing: every element bit for bit and where it belongs, and no flipped byte goes unnoticed."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from weightsync.channels.shm import Ring, RingReader
from weightsync.plan import Bucket, Buffer, Wanted
from weightsync.planner import plan_streams
from weightsync.regions import Regions
from weightsync.sender import NUM_SLOTS, Sender, digests, each_of, piece_of, plain

SHAPES = {"a": (6, 4), "b": (7,), "c": (2, 2)}
MODULES = {"a": "first", "b": "first", "c": "second"}


def wanted(dtype: str) -> Wanted:
    """The right half of a, and all of b and c, which are narrower than the trainer's."""
    rows = [(0, 2, 6, 4, 2, 0, 0, 2, 1), (1, 0, 1, 7, 7, 1, 0, 7, 1), (2, 0, 1, 4, 4, 2, 0, 4, 1)]
    kinds = {"a": dtype, "b": dtype, "c": "bfloat16"}
    buffers = tuple(Buffer(module=MODULES[name], name=name, dtype=kind) for name, kind in kinds.items())
    return Wanted(names=tuple(SHAPES), regions=Regions.of(rows), buffers=buffers)


def whole() -> Regions:
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    return Regions.of([(k, 0, 1, n, n, k, 0, n, 1) for k, n in enumerate(sizes)])


def weights(dtype: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=random).to(getattr(torch, dtype)) for name, shape in SHAPES.items()}
    found["b"][0] = float("nan")
    return found


def unpack(sender: Sender, bucket: Bucket, slot: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """The pieces of each buffer in a bucket's bytes."""
    wants = sender.readers[0]
    found: dict[str, list[torch.Tensor]] = {}
    for k in bucket.sent:
        buffer, count, length = (int(x[k]) for x in (bucket.moves.target, bucket.moves.count, bucket.moves.length))
        piece = piece_of(slot, wants, buffer, int(bucket.offset[k]), count * length)
        found.setdefault(wants.buffers[buffer].name, []).append(piece)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bucket_bytes", [64, 10_000])
def test_every_bucket_arrives_bit_for_bit(dtype: str, bucket_bytes: int) -> None:
    live, wants = weights(dtype), wanted(dtype)
    (stream,) = plan_streams(whole(), [wants], bucket_bytes)
    ring = Ring(stream.max_bytes, NUM_SLOTS)
    sender, reader = Sender(3, [stream], [wants], ring), RingReader(ring.address)
    sender.begin([plain(tensor.flatten()) for tensor in live.values()], 0, None)
    found: dict[str, list[torch.Tensor]] = {}
    for number, bucket in stream.buckets.items():
        item = sender.pack((0, number))
        assert (item.rank, item.reader, item.number, item.slot) == (3, 0, number, number % NUM_SLOTS)
        slot = reader.receive(item.slot, bucket)
        assert digests(slot, bucket) == item.digests and 0 not in item.digests
        for name, pieces in unpack(sender, bucket, slot).items():
            found.setdefault(name, []).extend(piece.flatten().clone() for piece in pieces)
    expected = {"a": live["a"][:, 2:], "b": live["b"], "c": live["c"].bfloat16()}
    for name, tensor in expected.items():
        joined = torch.cat(found[name])
        assert joined.dtype == tensor.dtype
        assert torch.equal(joined.view(torch.uint8), tensor.flatten().contiguous().view(torch.uint8))
    ring.close()


@dataclass
class Packed:
    """A sender of one bucket, its ring, and the weights that it sends."""

    sender: Sender
    ring: Ring
    live: list[torch.Tensor]

    @property
    def bucket(self) -> Bucket:
        (bucket,) = self.sender.streams[0].buckets.values()
        return bucket

    def pack(self, modules: set[str] | None = None) -> tuple[int, ...]:
        """Into slot 0."""
        self.sender.begin([plain(tensor) for tensor in self.live], 0, modules)
        return self.sender.pack((0, 0)).digests

    def changed(self) -> list[str]:
        return self.sender.changed([plain(tensor) for tensor in self.live])


@pytest.fixture
def packed() -> Iterator[Packed]:
    wants = wanted("float32")
    (stream,) = streams = plan_streams(whole(), [wants], 10_000)
    ring = Ring(stream.max_bytes, NUM_SLOTS)
    yield Packed(Sender(0, streams, [wants], ring), ring, [t.flatten() for t in weights("float32").values()])
    ring.close()


@pytest.mark.parametrize("bit", [0, 7])
def test_flipped_bit_changes_the_digest_of_its_segment_alone(packed: Packed, bit: int) -> None:
    bucket = packed.bucket
    signed, slot = packed.pack(), packed.ring.slot(0)
    for nth, segment in enumerate(bucket.segments):
        for place in (segment.begin, segment.end - 1):
            slot[place] ^= 1 << bit
            found = digests(slot, bucket)
            assert [a == b for a, b in zip(found, signed, strict=True)] == [k != nth for k in range(len(signed))]
            slot[place] ^= 1 << bit


def test_what_lay_in_a_slot_before_changes_no_digest(packed: Packed) -> None:
    first = packed.pack()
    packed.ring.slot(0).fill_(255)
    assert packed.pack() == first


def test_only_the_named_modules_are_sent(packed: Packed) -> None:
    whole_digests = packed.pack()
    packed.ring.slot(0).fill_(255)
    assert packed.pack({"second"}) == whole_digests[1:]
    (bucket,) = packed.sender.current[0].buckets.values()
    assert [segment.module for segment in bucket.segments] == ["second"] and bucket.num_sent == 16
    ((begin, end),) = bucket.ranges
    assert (packed.ring.slot(0)[:begin] == 255).all() and end == bucket.nbytes
    pieces = unpack(packed.sender, bucket, packed.ring.slot(0))
    assert torch.equal(pieces["c"][0].flatten(), packed.live[2].bfloat16())


def test_modules_with_a_changed_bit_are_found_until_they_are_sent(packed: Packed) -> None:
    assert packed.changed() == ["first", "second"]  # nothing has been sent
    packed.pack()
    assert packed.changed() == []
    packed.live[1][3] += 1
    assert packed.changed() == ["first"]
    packed.pack({"first"})
    assert packed.changed() == []
    packed.live[0][0] += 1  # of the left half, which nobody wants
    assert packed.changed() == []


def test_change_that_the_sent_dtype_does_not_show_is_none(packed: Packed) -> None:
    packed.pack()
    packed.live[2][0] *= 1 + 2**-12  # bfloat16 has 8 bits
    assert packed.changed() == []
    packed.live[2][0] *= 1 + 2**-6
    assert packed.changed() == ["second"]


def test_parts_are_worked_on_by_threads_in_which_torch_works_alone() -> None:
    before, memory = torch.get_num_threads(), torch.zeros(8)

    def work(number: int) -> tuple[int, int, bool]:
        torch.zeros(100_000).add_(1)  # a thread's first work is what sets its number up
        return number, torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    assert each_of(memory, work, range(9)) == [(number, 1, False) for number in range(9)]
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError):
        each_of(memory, lambda number: 1 // number, [1, 0, 2])
