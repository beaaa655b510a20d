"""Versions as folders: standard files, of one run at a time, and none left but those that somebody may need."""

import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl.faults import SyncError
from weightsync.channels import disk
from weightsync.channels.disk import (
    FolderAddress,
    FolderReader,
    FolderWriter,
    claim,
    folder_wanted,
    prune,
    remove_left,
    require_whole_version,
)
from weightsync.files import write_at
from weightsync.plan import Buffer, Wanted
from weightsync.planner import plan_streams
from weightsync.regions import Regions
from weightsync.sender import NUM_SLOTS, Sender, digests, plain

SHAPES = {"q": (8, 4), "k": (4, 4), "norm": (5,)}


def worker() -> Wanted:
    """q and k are one module, of which the norm is none."""
    rows = [(0, 0, 1, 32, 32, 0, 0, 32, 1), (1, 0, 1, 16, 16, 0, 32, 16, 1), (2, 0, 1, 5, 5, 1, 0, 5, 1)]
    buffers = (
        Buffer(module="qkv", name="weight", dtype="float32"),
        Buffer(module="norm", name="weight", dtype="bfloat16"),
    )
    return Wanted(names=tuple(SHAPES), regions=Regions.of(rows), buffers=buffers)


def zero3(rank: int) -> Regions:
    """Half of each flat tensor."""
    rows = []
    for tensor, shape in enumerate(SHAPES.values()):
        size = int(np.prod(shape))
        first, last = size * rank // 2, size * (rank + 1) // 2
        rows.append((tensor, first, 1, last - first, last - first, tensor, first, last - first, 1))
    return Regions.of(rows)


class Ranks:
    """Two ranks that write what they hold of `live`."""

    def __init__(self, root: Path, name: str = "first", beside: Sequence[Path] = ()):
        self.folder = folder_wanted(SHAPES, "float32", [worker()])
        self.live = [torch.randn(int(np.prod(shape))) for shape in SHAPES.values()]
        self.address = FolderAddress(
            root=str(root), name=name, slot_bytes=256, buffers=self.folder.buffers, shapes=tuple(SHAPES.values())
        )
        self.streams = [plan_streams(zero3(rank), [self.folder], 64) for rank in range(2)]
        self.writers = [FolderWriter(self.address, rank, NUM_SLOTS, beside) for rank in range(2)]

    def push(self, version: int, modules: list[str] | None = None) -> None:
        reader = FolderReader(self.address)
        reader.begin(version, modules)
        for rank, (streams, writer) in enumerate(zip(self.streams, self.writers, strict=True)):
            sender = Sender(rank, streams, [self.folder], writer)
            sender.begin([plain(tensor) for tensor in self.live], version, modules)
            for number, bucket in sender.current[0].buckets.items():
                item = sender.pack((0, number))
                memory = torch.full((256,), 255, dtype=torch.uint8)
                assert digests(reader.receive(item.slot, bucket, memory), bucket) == item.digests
        for writer in self.writers:
            writer.end(version)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def versions(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("version-")) for path in root.glob("version-*"))


def test_version_is_a_folder_of_standard_files_in_the_dtypes_of_engines(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.push(7)
    folder = tmp_path / "version-000007"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (file,) = set(index["weight_map"].values())
    found = load_file(folder / file)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    for tensor, wanted, dtype in zip(found.values(), ranks.live, ("float32", "float32", "bfloat16"), strict=True):
        assert torch.equal(found["norm"] if tensor is None else tensor.flatten(), wanted.to(getattr(torch, dtype)))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert not list(tmp_path.glob(".writing-*"))
    ranks.close()


def test_tensors_that_meet_in_a_module_go_together(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    assert [buffer.module for buffer in ranks.folder.buffers] == ["q", "q", "norm"]
    ranks.push(0)
    ranks.push(1, ["norm"])
    names = json.loads((tmp_path / "version-000001" / "model.safetensors.index.json").read_text())["weight_map"]
    assert names.keys() == {"norm"}
    assert json.loads((tmp_path / "version-000001" / "sync.json").read_text()) == {"version": 1, "whole": False}
    ranks.close()


def test_part_of_the_weights_has_no_configuration_and_is_refused_as_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    ranks = Ranks(tmp_path / "versions", beside=[config])
    ranks.push(0)
    ranks.push(1, ["norm"])
    whole, part = (tmp_path / "versions" / f"version-{number:06d}" for number in range(2))
    assert (whole / "config.json").exists() and not (part / "config.json").exists()
    require_whole_version(whole)
    require_whole_version(tmp_path)
    with pytest.raises(SyncError, match=r"version-000001 holds only what has changed .*; use a version that is whole"):
        require_whole_version(part)
    ranks.close()


def test_changes_that_are_everything_are_a_whole_version(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.push(0)
    ranks.push(1, ["norm", "q"])
    assert json.loads((tmp_path / "version-000001" / "sync.json").read_text()) == {"version": 1, "whole": True}
    ranks.close()


@pytest.mark.parametrize("place", ["headers", "weights", "configuration", "index"])
def test_full_disk_is_told_with_what_is_wanted_and_free_and_leaves_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    config, root = tmp_path / "config.json", tmp_path / "versions"
    config.write_text("{}")
    ranks = Ranks(root, beside=[config])
    ranks.push(1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_of_weights(file: int, data: Any, offset: int) -> None:
        full() if offset else write_at(file, data, offset)

    with monkeypatch.context() as patch:
        if place in ("headers", "weights"):
            patch.setattr(disk, "write_at", full if place == "headers" else full_of_weights)
        elif place == "configuration":
            patch.setattr(shutil, "copyfile", full)
        else:
            patch.setattr(Path, "write_text", full)
        with pytest.raises(SyncError) as raised:
            ranks.push(2)
    told = str(raised.value)
    assert told.startswith(f"sync.folder={root}: No space left on device: version 2 takes 0.0 MB, of which 0.0 MB are")
    assert "MB are free" in told and told.endswith("start the run again")
    assert versions(root) == [1]
    remove_left(root)
    assert list(root.glob(".writing-*")), "the run is not over"
    os.close(ranks.writers[0]._lock)  # its rank was killed
    remove_left(root)
    assert not list(root.glob(".writing-*")) and versions(root) == [1]


def test_versions_that_nobody_needs_go(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for version, modules in enumerate([None, None, ["norm"], ["norm"], ["norm"]]):
        ranks.push(version, modules)
    assert versions(tmp_path) == [1, 2, 3, 4], "since the last whole one"
    ranks.push(5)
    assert versions(tmp_path) == [1, 2, 3, 4, 5], "what 4, the older of the two that are kept, builds on"
    ranks.push(6)
    assert versions(tmp_path) == [5, 6]
    ranks.push(3)  # of a run that was resumed
    assert versions(tmp_path) == [3]
    ranks.push(3)
    assert versions(tmp_path) == [3]
    ranks.close()


def test_version_that_is_written_again_has_its_name_while_the_old_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for an engine that is mended, or with sync.one_by_one."""
    ranks, rmtree, removed = Ranks(tmp_path), shutil.rmtree, []

    def remove(path: Path, **kwargs: Any) -> None:
        removed.append(versions(tmp_path))
        rmtree(path, **kwargs)

    ranks.push(3)
    monkeypatch.setattr(shutil, "rmtree", remove)
    ranks.push(3)
    assert removed == [[3]]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".writing")] == []
    ranks.close()


def test_folders_that_are_no_versions_stay(tmp_path: Path) -> None:
    for name in ("version-notes", "version-000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "version-000001" / "sync.json").write_text("[")
    ranks = Ranks(tmp_path)
    ranks.push(9)
    prune(tmp_path, 9)
    assert {path.name for path in tmp_path.glob("version-*")} == {"version-notes", "version-000001", "version-000009"}
    ranks.close()


def test_copy_of_a_version_under_another_name_counts_as_none_and_stays(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.push(1)
    ranks.push(2)
    (tmp_path / "version-000002").rename(tmp_path / "version-000002-old")
    ranks.push(3)
    assert {path.name for path in tmp_path.glob("version-*")} == {
        "version-000001",
        "version-000002-old",
        "version-000003",
    }
    ranks.close()


@pytest.mark.parametrize("kind", ["folder", "file", "link", "copy of another version"])
def test_what_is_in_the_place_of_a_version_is_named_before_anything_is_written_and_stays(
    tmp_path: Path, kind: str
) -> None:
    ranks, place = Ranks(tmp_path), tmp_path / "version-000003"
    if kind == "file":
        place.write_text("mine")
    elif kind == "link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        (place / "notes").write_text("mine")
        if kind == "copy of another version":
            (place / "sync.json").write_text('{"version": 1, "whole": true}')
    with pytest.raises(SyncError, match=r"version-000003 is in the way of version 3 .*; move it away"):
        ranks.push(3)
    with pytest.raises(SyncError, match="version-000003 is in the way"):
        claim(tmp_path, tmp_path / "run")
    assert (place.exists() or place.is_symlink()) and not list(tmp_path.glob(".writing-*"))
    ranks.close()


def test_folder_with_versions_of_another_run_is_refused_and_of_the_same_taken_again(tmp_path: Path) -> None:
    first, second, root = tmp_path / "first", tmp_path / "second", tmp_path / "versions"
    root.mkdir()
    claim(root, first)
    claim(root, second)  # nothing is there yet
    ranks = Ranks(root)
    ranks.push(1)
    ranks.close()
    claim(root, second)
    with pytest.raises(SyncError, match=rf"holds versions of the run in {second}, like version-000001, .*give each"):
        claim(root, first)
    (root / ".run").unlink()
    with pytest.raises(SyncError, match="of a run that is not known"):
        claim(root, second)
    assert versions(root) == [1]


def test_lock_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(SyncError, match=r"sync.folder=.*: .*/\.lock cannot be written \(Is a directory\)"):
        Ranks(tmp_path)


def test_second_run_in_a_folder_is_refused_until_the_first_is_over(tmp_path: Path) -> None:
    first = Ranks(tmp_path)
    with pytest.raises(SyncError, match=f"sync.folder={tmp_path}: another run pushes into this folder"):
        Ranks(tmp_path, "second")
    first.writers[0].begin(0, None)  # and is never ended
    first.close()
    assert not list(tmp_path.glob(".writing-*"))
    Ranks(tmp_path, "second").close()


def test_file_that_ends_early_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    reader = FolderReader(ranks.address)
    reader.begin(0, None)
    for writer in ranks.writers:
        writer.begin(0, None)
    (bucket, *_) = ranks.streams[1][0].buckets.values()
    with pytest.raises(OSError, match=r"model-00001-of-00001\.safetensors ends before byte \d+ \(sync\.folder\)"):
        reader.receive(0, bucket, torch.zeros(256, dtype=torch.uint8))
    ranks.close()
