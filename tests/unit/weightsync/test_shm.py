"""The shared ring: other processes see the very bytes, nothing has a name, and no flipped byte passes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from weightsync.channels.shm import Ring, checksum, open_ring, slot_of, views
from weightsync.manifest import plan_buckets
from weightsync.sender import Sender

SHAPES = {"l.0.a": (3, 5), "l.0.b": (7,), "head": (2, 2)}


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(slot_bytes=1024, num_slots=3)
    yield ring
    ring.close()


def other_process(code: str, *args: str) -> str:
    """Output of a plain Python that knows nothing of torch or of this project."""
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *args], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_ring_other_process_reads_the_same_bytes(ring: Ring) -> None:
    ring.slot(1).copy_(torch.arange(1024) % 251)
    code = (
        "import sys, xxhash; d = open(sys.argv[1], 'rb').read(); "
        "print(len(d), xxhash.xxh3_64_intdigest(d[1024:2048]), sum(d[:1024]))"
    )
    length, crc, first = other_process(code, ring.path).split()
    assert (int(length), int(crc), int(first)) == (3072, checksum(ring.slot(1), 1024), 0)


def test_ring_other_process_writes_are_seen_here(ring: Ring) -> None:
    other_process("import sys; f = open(sys.argv[1], 'r+b'); f.seek(2048); f.write(b'tandem'); f.close()", ring.path)
    assert bytes(ring.slot(2)[:6].numpy()) == b"tandem"
    assert not ring.slot(0).any() and not ring.slot(1).any()


def test_open_ring_second_mapping_shares_memory(ring: Ring) -> None:
    memory = open_ring(ring.path, ring.slot_bytes, ring.num_slots)
    ring.slot(0).fill_(7)
    assert memory.shape == (3072,)
    assert (slot_of(memory, 0, 1024) == 7).all()
    assert not slot_of(memory, 1, 1024).any()


def test_ring_has_no_name_in_any_folder(ring: Ring) -> None:
    assert os.readlink(ring.path).startswith("/memfd:")
    assert os.stat(ring.path).st_nlink == 0
    assert not [name for name in os.listdir("/dev/shm") if "tandem" in name]


def test_close_gives_the_file_up_and_keeps_mappings_valid() -> None:
    ring = Ring(512, 2)
    memory = open_ring(ring.path, 512, 2)
    memory.fill_(5)
    ring.close()
    ring.close()
    assert not Path(ring.path).exists() or not os.readlink(ring.path).startswith("/memfd:tandem")
    assert (memory == 5).all() and (ring.memory == 5).all()


def test_open_ring_gone_file_raises() -> None:
    with pytest.raises(RuntimeError):
        open_ring("/proc/self/fd/987654", 512, 2)


@pytest.mark.parametrize("place", [0, 100, 1023])
@pytest.mark.parametrize("bit", [0, 7])
def test_checksum_one_flipped_bit_is_detected(ring: Ring, place: int, bit: int) -> None:
    ring.slot(0).copy_(torch.arange(1024) % 256)
    before = checksum(ring.slot(0), 1024)
    ring.slot(0)[place] ^= 1 << bit
    assert checksum(ring.slot(0), 1024) != before


def test_checksum_reads_only_the_given_bytes(ring: Ring) -> None:
    ring.slot(0).copy_(torch.arange(1024) % 256)
    before = checksum(ring.slot(0), 512)
    ring.slot(0)[512:] = 0
    assert checksum(ring.slot(0), 512) == before == xxhash.xxh3_64_intdigest(bytes(range(256)) * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pack_every_bucket_arrives_bit_for_bit(dtype: str) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=random).to(getattr(torch, dtype)) for n, s in SHAPES.items()}
    weights["l.0.b"][0] = float("nan")
    manifest = plan_buckets(SHAPES, dtype, 300)
    assert len(manifest.buckets) == 2
    sender = Sender(manifest, 3)
    memory = open_ring(sender.ring.path, sender.ring.slot_bytes, sender.ring.num_slots)
    for index, bucket in enumerate(manifest.buckets):
        crc = sender.pack(index, weights)
        slot = slot_of(memory, index % sender.ring.num_slots, sender.ring.slot_bytes)
        assert checksum(slot, bucket.nbytes) == crc
        for name, view in views(slot, bucket):
            assert view.dtype is weights[name].dtype and view.shape == weights[name].shape
            assert torch.equal(view.contiguous().view(torch.uint8), weights[name].view(torch.uint8))
    sender.ring.close()


def test_pack_strided_and_wider_tensors_are_cast_and_laid_out() -> None:
    weights = {"l.0.a": torch.randn(5, 3).T, "l.0.b": torch.randn(7).double(), "head": torch.randn(2, 2)}
    sender = Sender(plan_buckets(SHAPES, "float32", 10_000), 2)
    sender.pack(0, weights)
    for name, view in views(sender.ring.slot(0), sender.manifest.buckets[0]):
        assert torch.equal(view, weights[name].float())
    sender.ring.close()


def test_pack_wrong_shape_raises() -> None:
    sender = Sender(plan_buckets(SHAPES, "float32", 10_000), 2)
    with pytest.raises(RuntimeError):
        sender.pack(0, {"l.0.a": torch.zeros(4, 5), "l.0.b": torch.zeros(7), "head": torch.zeros(2, 2)})
    sender.ring.close()


@pytest.mark.parametrize(("bucket_bytes", "asked", "slots"), [(10_000, 8, 2), (300, 2, 2), (300, 8, 2), (1, 8, 2)])
def test_sender_holds_no_more_slots_than_buckets_but_at_least_two(bucket_bytes: int, asked: int, slots: int) -> None:
    sender = Sender(plan_buckets(SHAPES, "float32", bucket_bytes), asked)
    assert sender.ring.num_slots == slots
    sender.ring.close()
