"""Files of one layout copied into another's: every element where it belongs, and nothing damaged goes unnoticed."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.faults import SyncError
from weightsync import reshard
from weightsync.files import Mapped, create, header_of, read_entries
from weightsync.plan import Buffer, PlanError, Wanted
from weightsync.regions import Regions
from weightsync.reshard import Held, Place, Target, folder_target, write_index, write_target
from weightsync.sender import plain, spread

SHAPES = {"a": (6, 4), "b": (7,), "c": (3, 2, 2)}


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def held(tensors: dict[str, torch.Tensor]) -> Held:
    sizes = [tensor.numel() for tensor in tensors.values()]
    rows = [(k, 0, 1, n, n, k, 0, n, 1) for k, n in enumerate(sizes)]
    reads = tuple(plain(tensor.flatten()) for tensor in tensors.values())
    return Held(names=tuple(tensors), regions=Regions.of(rows), reads=reads)


def write(folder: Path, source: Held, target: Target, bucket_bytes: int = 64) -> list[int]:
    """Bytes copied and read again."""
    done = [0, 0]

    def tick(which: int) -> Any:
        return lambda nbytes: done.__setitem__(which, done[which] + nbytes)

    write_target(folder, source, target, bucket_bytes, tick(0), tick(1))
    return done


# -- files --


def test_header_of_tensors_in_two_dtypes_is_read_by_safetensors_and_back(tmp_path: Path) -> None:
    live = weights() | {"half": torch.randn(3).bfloat16(), "one": torch.tensor(2.0)}
    save_file(live, tmp_path / "theirs")
    header, placed = header_of(read_entries(tmp_path / "theirs"))
    create(tmp_path / "ours", header, max(entry.offset + entry.nbytes for entry in placed))
    file = Mapped(tmp_path / "ours", writable=True)
    for entry in placed:
        file.flat(entry).copy_(live[entry.name].flatten())
    file.flush()
    found = load_file(tmp_path / "ours")
    assert found.keys() == live.keys() and all(torch.equal(found[name], live[name]) for name in live)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:-4], "cut off or damaged"),
        (lambda data: data[:6], "its header cannot be read"),
        (lambda data: b"\xff" * 8 + data[8:], "its header cannot be read"),
        (lambda data: data[:8] + b"x" + data[9:], "its header cannot be read"),
        (lambda data: data.replace(b'"F32"', b'"I32"'), "dtype I32"),
        (lambda data: data.replace(b"[7]", b"[8]"), "cut off or damaged"),
        (lambda data: data + b"left over", "its header is damaged"),
    ],
)
def test_read_entries_of_a_damaged_file_names_it(tmp_path: Path, change: Any, told: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=told) as error:
        read_entries(path)
    assert str(path) in str(error.value)


def test_read_entries_of_overlapping_tensors_refuses_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, path)
    path.write_bytes(path.read_bytes().replace(b"[8,16]", b"[0, 8]"))
    with pytest.raises(ValueError, match="its header is damaged"):
        read_entries(path)


def test_create_on_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as error:
        create(tmp_path / "new", b"", 10)
    assert error.value.filename == str(tmp_path / "new") and error.value.errno == errno.ENOSPC


# -- copying --


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folder_in_any_buckets_holds_every_tensor_rounded(tmp_path: Path, bucket_bytes: int, dtype: str) -> None:
    live = weights()
    target = folder_target(SHAPES, dict.fromkeys(SHAPES, dtype))
    copied, checked = write(tmp_path, held(live), target, bucket_bytes)
    write_index(tmp_path, target)
    found = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert copied == checked >= target.num_bytes
    assert list(found) == sorted(SHAPES)
    assert all(torch.equal(found[name], live[name].to(getattr(torch, dtype))) for name in SHAPES)


def parts(dtype: str) -> Target:
    """Columns 1 and 2 of a, below two rows that nothing fills; a buffer that nothing fills, and a fixed number."""
    rows = [(0, 1, 6, 4, 2, 0, 4, 2, 1)]
    buffers = (Buffer(module="m", name="x", dtype=dtype), Buffer(module="m", name="y", dtype="float32"))
    wanted = Wanted(names=tuple(SHAPES), regions=Regions.of(rows), buffers=buffers)
    places = (Place(file="p", name="x", shape=(8, 2)), Place(file="q", name="y", shape=(7,)))
    return Target(wanted=wanted, places=places, fixed=((Place(file="q", name="z", shape=()), torch.tensor(3.0)),))


def test_parts_of_tensors_lie_where_they_are_wanted_and_the_rest_is_zero(tmp_path: Path) -> None:
    live = weights()
    write(tmp_path, held(live), parts("bfloat16"))
    x = load_file(tmp_path / "p")["x"]
    assert torch.equal(x, torch.cat([torch.zeros(2, 2), live["a"][:, 1:3]]).bfloat16())
    rest = load_file(tmp_path / "q")
    assert torch.equal(rest["y"], torch.zeros(7)) and torch.equal(rest["z"], torch.tensor(3.0))


def test_a_byte_that_is_written_wrong_is_found_and_its_file_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def flipped(memory: torch.Tensor, bucket: Any, *rest: Any) -> None:
        memory[bucket.nbytes // 2] ^= 1
        spread(memory, bucket, *rest)

    monkeypatch.setattr(reshard, "spread", flipped)
    with pytest.raises(SyncError, match=r"model-00001-of-00001\.safetensors: not what was written"):
        write(tmp_path, held(weights()), folder_target(SHAPES, dict.fromkeys(SHAPES, "float32")))


def test_what_is_not_held_is_named(tmp_path: Path) -> None:
    live = weights()
    source = held(live)
    short = Held(names=source.names, regions=source.regions.take(torch.tensor([0, 2]).numpy()), reads=source.reads)
    with pytest.raises(PlanError, match=r"b \(0 of 7 elements\)"):
        write(tmp_path, short, folder_target(SHAPES, dict.fromkeys(SHAPES, "float32")))


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path, held(weights()), parts("float32"))
    assert (tmp_path / "p").read_text() == "mine"
