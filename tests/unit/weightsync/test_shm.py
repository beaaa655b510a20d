"""The shared ring: other processes see the very bytes, and nothing has a name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightsync.channels.shm import Ring, open_ring, slot_of

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
    code = "import sys; d = open(sys.argv[1], 'rb').read(); print(len(d), sum(d[:1024]), *d[1024:2048])"
    length, first, *middle = map(int, other_process(code, ring.path).split())
    assert (length, first, middle) == (3072, 0, ring.slot(1).tolist())


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
