"""Plans: complete, within their buckets, alike on both sides, and in the order in which an engine can use them."""

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import ITEM_BYTES, Buffer, PlanError, Stream, Wanted, narrowed, turns_of, whole_modules
from weightsync.planner import plan_streams, require_whole
from weightsync.regions import Regions

SHAPES = {"embed": (40, 8), "layers.0.q": (8, 8), "layers.0.k": (4, 8), "layers.0.o": (8, 8), "norm": (8,)}
NAMES = tuple(SHAPES)


def wanted(part: int = 0, parts: int = 1) -> Wanted:
    """What worker `part` of `parts` wants: q and k fused and cut by rows, o by columns, the rest whole."""
    rows: list[tuple[int, ...]] = []
    buffers = [Buffer(module=m, name="weight", dtype=d) for m, d in
               [("embed", "float32"), ("qkv", "float32"), ("o", "float32"), ("norm", "bfloat16")]]  # fmt: skip

    def flat(name: str, first: int, count: int, buffer: int, at: int) -> None:
        rows.append((NAMES.index(name), first, 1, count, count, buffer, at, count, 1))

    flat("embed", 0, 320, 0, 0)
    flat("layers.0.q", 64 // parts * part, 64 // parts, 1, 0)
    flat("layers.0.k", 32 // parts * part, 32 // parts, 1, 64 // parts)
    width = 8 // parts
    rows.append((NAMES.index("layers.0.o"), part * width, 8, 8, width, 2, 0, width, 1))
    flat("norm", 0, 8, 3, 0)
    return Wanted(names=NAMES, regions=Regions.of(rows), buffers=tuple(buffers))


def zero3(ranks: int) -> list[Regions]:
    """What each of some ranks holds at ZeRO-3: an equal part of each flat tensor."""
    held = []
    for rank in range(ranks):
        rows = []
        for tensor, shape in enumerate(SHAPES.values()):
            size = math.prod(shape)
            part = -(-size // ranks)
            count = min(part, max(0, size - rank * part))
            if count:
                rows.append((tensor, rank * part, 1, count, count, tensor, 0, count, 1))
        held.append(Regions.of(rows))
    return held


def deliver(streams: list[list[Stream]], held: list[Regions], want: Wanted) -> dict[int, np.ndarray[Any, Any]]:
    """A reader's buffers, after all moves were made one element at a time; element e of tensor t is 1000 t + e."""
    found = {k: np.full(400, -1) for k in range(len(want.buffers))}
    for own, holds in zip(streams, held, strict=True):
        memory = {int(holds.buffer[n]): 1000 * int(holds.tensor[n]) + int(holds.start[n]) for n in range(len(holds))}
        for bucket in (bucket for stream in own for bucket in stream.buckets.values()):
            m = bucket.moves
            for n in range(len(m)):
                for i in range(m.count[n]):
                    for j in range(m.length[n]):
                        source = int(m.source_at[n] + i * m.source_row[n] + j * m.source_col[n])
                        place = int(m.target_at[n] + i * m.target_row[n] + j * m.target_col[n])
                        assert found[int(m.target[n])][place] == -1
                        found[int(m.target[n])][place] = memory[int(m.source[n])] + source
    return found


@given(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.sampled_from([48, 100, 256, 10_000]))
def test_streams_deliver_what_is_wanted_in_buckets(ranks: int, parts: int, bucket_bytes: int) -> None:
    readers, held = [wanted(part, parts) for part in range(parts)], zero3(ranks)
    streams = [plan_streams(holds, readers, bucket_bytes) for holds in held]
    require_whole(chain(*streams), readers)
    for number, want in enumerate(readers):
        found = deliver([[s for s in own if s.reader == number] for own in streams], held, want)
        for n in range(len(want.regions)):
            r = {name: int(getattr(want.regions, name)[n]) for name in vars(want.regions)}
            for i in range(r["count"]):
                for j in range(r["length"]):
                    place = found[r["buffer"]][r["at"] + i * r["row"] + j * r["col"]]
                    assert place == 1000 * r["tensor"] + r["start"] + i * r["stride"] + j
    for stream in chain(*streams):
        for bucket in stream.buckets.values():
            assert bucket.nbytes == bucket.num_sent <= bucket_bytes and bucket.ranges == [(0, bucket.nbytes)]
            item = np.array([ITEM_BYTES[readers[stream.reader].buffers[b].dtype] for b in bucket.moves.target])
            ends = bucket.offset + bucket.moves.num_elements * item
            assert (bucket.offset[1:] >= ends[:-1]).all() and ends[-1] <= bucket.nbytes
            assert [s.first for s in bucket.segments] == [0, *[s.last for s in bucket.segments[:-1]]]
            assert [s.begin for s in bucket.segments] == [0, *[s.end for s in bucket.segments[:-1]]]
            assert bucket.segments[-1].last == len(bucket.moves) and bucket.segments[-1].end == bucket.nbytes


def test_modules_arrive_one_after_another() -> None:
    (stream,) = plan_streams(zero3(1)[0], [wanted()], 100)
    order = [segment.module for bucket in stream.buckets.values() for segment in bucket.segments]
    assert list(dict.fromkeys(order)) == ["embed", "qkv", "o", "norm"] and order == sorted(
        order, key=["embed", "qkv", "o", "norm"].index
    )


def test_readers_take_turns() -> None:
    streams = plan_streams(zero3(1)[0], [wanted(0, 2), wanted(1, 2)], 200)
    assert turns_of(streams, 0)[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert turns_of(streams, 1)[:4] == [(1, 0), (0, 0), (1, 1), (0, 1)]
    assert sorted(turns_of(streams, 5)) == [(s.reader, number) for s in streams for number in s.buckets]
    assert turns_of((), 3) == []


@given(st.sets(st.sampled_from(["embed", "qkv", "o", "norm"])), st.sampled_from([48, 100, 10_000]))
def test_narrowed_stream_sends_the_named_modules_bytes_alone(modules: set[str], bucket_bytes: int) -> None:
    (stream,) = plan_streams(zero3(2)[1], [wanted()], bucket_bytes)
    left = narrowed(stream, modules)
    sizes = {number: [s for s in bucket.segments if s.module in modules] for number, bucket in stream.buckets.items()}
    assert left.buckets.keys() == {number for number, segments in sizes.items() if segments}
    for number, bucket in left.buckets.items():
        assert bucket.segments == tuple(sizes[number])
        inside = {byte for begin, end in bucket.ranges for byte in range(begin, end)}
        assert inside == {byte for s in bucket.segments for byte in range(s.begin, s.end)}
        assert bucket.num_sent == len(inside) == sum(end - begin for begin, end in bucket.ranges)
    assert narrowed(stream, None) is stream


def test_bytes_are_near_the_least_that_can_be_sent() -> None:
    readers = [wanted(part, 2) for part in range(2)]
    streams = [stream for holds in zero3(2) for stream in plan_streams(holds, readers, 10_000)]
    for number, want in enumerate(readers):
        assert want.num_bytes() == 4 * (320 + 32 + 16 + 32) + 2 * 8
        assert want.num_bytes() <= sum(s.num_bytes for s in streams if s.reader == number) <= want.num_bytes() + 16 * 6


def test_plans_agree_only_when_they_are_equal() -> None:
    first, again = (plan_streams(zero3(2)[0], [wanted()], 100)[0].fingerprint() for _ in range(2))
    assert first == again != plan_streams(zero3(2)[1], [wanted()], 100)[0].fingerprint()
    assert wanted().fingerprint() == wanted().fingerprint() != wanted(0, 2).fingerprint()


def test_tensor_that_nobody_holds_is_named() -> None:
    held = zero3(1)[0]
    some = held.take(held.tensor != NAMES.index("layers.0.k"))
    with pytest.raises(PlanError, match=r"layers\.0\.k \(0 of 32 elements\)$"):
        require_whole(plan_streams(some, [wanted()], 1000), [wanted()])


def test_element_sent_twice_is_named() -> None:
    held = Regions.concat([zero3(1)[0], zero3(1)[0].take(np.array([4]))])
    with pytest.raises(PlanError, match=r"norm \(16 of 8 elements\)"):
        require_whole(plan_streams(held, [wanted()], 1000), [wanted()])


def test_dtypes_have_the_sizes_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


@given(st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([100, 200, 10_000]))
def test_module_that_a_bucket_has_whole_lies_there_as_in_the_worker(ranks: int, parts: int, bucket_bytes: int) -> None:
    want = wanted(parts - 1, parts)
    expected = dict.fromkeys(want.modules, 0)
    for buffer, size in zip(want.regions.buffer.tolist(), want.regions.num_elements.tolist(), strict=True):
        expected[want.buffers[buffer].module] += size
    found = set()
    for holds in zero3(ranks):
        for stream in plan_streams(holds, [want], bucket_bytes):
            for bucket in stream.buckets.values():
                m = bucket.moves
                for module, starts in whole_modules(bucket, want, expected).items():
                    found.add(module)
                    (segment,) = (s for s in bucket.segments if s.module == module)
                    for k in range(segment.first, segment.last):
                        buffer = int(m.target[k])
                        item = int(want.item_bytes(m.target[k : k + 1])[0])
                        for run in range(int(m.count[k])):
                            in_worker = int(m.target_at[k] + run * m.target_row[k])
                            in_bucket = int(bucket.offset[k]) + run * int(m.length[k]) * item
                            assert in_bucket == starts[buffer] + in_worker * item
    if ranks == 1 and bucket_bytes == 10_000:
        assert found == set(want.modules)


@given(st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([48, 100, 150, 200, 300]))
def test_module_that_fits_into_a_bucket_is_not_cut(ranks: int, parts: int, bucket_bytes: int) -> None:
    wants = [wanted(part, parts) for part in range(parts)]
    for holds in zero3(ranks):
        for stream in plan_streams(holds, wants, bucket_bytes):
            sizes: dict[str, list[int]] = {}
            for bucket in stream.buckets.values():
                assert bucket.nbytes <= bucket_bytes
                for segment in bucket.segments:
                    sizes.setdefault(segment.module, []).append(segment.end - segment.begin)
            assert all(len(cuts) == 1 for cuts in sizes.values() if sum(cuts) <= bucket_bytes)
