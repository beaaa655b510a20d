"""Checkpoint files: published whole or not at all, and never trusted before they are read back."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors import checkpoint
from actors.checkpoint import (
    export_hf,
    file_crc,
    find_whole,
    list_checkpoints,
    publish,
    read_manifest,
    read_shards,
    verify,
    write_shards,
)
from conf.choices import Optimizer
from rl.faults import CheckpointError

CONFIG = {"trainer": {"dtype": "float32"}, "num_steps": 3}


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"large")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def writer(content: bytes = b"weights" * 100) -> Callable[[Path], tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Writes two files, as two ranks would."""

    def write(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        entries = []
        for rank in range(2):
            path = folder / f"policy-{rank:05d}-00000.safetensors"
            path.write_bytes(content + bytes([rank]))
            entries.append(
                {
                    "role": "policy",
                    "file": path.name,
                    "nbytes": len(content) + 1,
                    "crc": file_crc(path),
                    "tensors": {f"w{rank}|master": [2]},
                }
            )
        return entries, {"roles": {"policy": {"optimizer_step": 7}}}

    return write


def save(root: Path, model_path: Path, step: int, keep: int = 0, write: Any = None) -> Path:
    return publish(root, step, write or writer(), {"step": step}, CONFIG, model_path, keep)


def test_publish_folder_is_whole_and_says_what_is_in_it(root: Path, model_path: Path) -> None:
    folder = save(root, model_path, 20)
    assert folder == root / "step_000020"
    verify(folder)
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["run_state"], manifest["config"]) == (20, {"step": 20}, CONFIG)
    assert manifest["roles"]["policy"]["optimizer_step"] == 7
    assert sorted(p.name for p in (folder / "model").iterdir()) == ["config.json", "tokenizer.json"]
    assert [p.name for p in root.iterdir()] == ["step_000020"]


def test_publish_keep_removes_the_oldest_only(root: Path, model_path: Path) -> None:
    for step in (1, 2, 9, 10, 100):
        save(root, model_path, step, keep=2)
    assert [p.name for p in list_checkpoints(root)] == ["step_000010", "step_000100"]


def test_publish_keep_zero_keeps_all(root: Path, model_path: Path) -> None:
    for step in range(4):
        save(root, model_path, step)
    assert len(list_checkpoints(root)) == 4


def test_publish_same_step_again_replaces_it(root: Path, model_path: Path) -> None:
    save(root, model_path, 1)
    folder = save(root, model_path, 1, write=writer(b"newer"))
    assert (folder / "policy-00000-00000.safetensors").read_bytes() == b"newer\0"
    assert len(list(root.iterdir())) == 1


def test_publish_after_falling_back_keeps_what_it_wrote(root: Path, model_path: Path) -> None:
    """Step 20 is broken, the run went on from 10 and saves 11: with keep=1 the new one must survive."""
    save(root, model_path, 10)
    broken = save(root, model_path, 20)
    (broken / "policy-00000-00000.safetensors").write_bytes(b"")
    folder = save(root, model_path, 11, keep=1)
    assert folder.is_dir()
    assert find_whole(root)[0] == folder


def full_disk(folder: Path) -> Any:
    (folder / "policy-00000-00000.safetensors").write_bytes(b"half")
    raise OSError(28, "No space left on device")


def interrupted(folder: Path) -> Any:
    (folder / "policy-00000-00000.safetensors").write_bytes(b"half")
    raise KeyboardInterrupt


def wrong_crc(folder: Path) -> Any:
    entries, extra = writer()(folder)
    return [entries[0], entries[1] | {"crc": 1}], extra


def missing_file(folder: Path) -> Any:
    entries, extra = writer()(folder)
    (folder / entries[1]["file"]).unlink()
    return entries, extra


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (full_disk, CheckpointError),
        (interrupted, KeyboardInterrupt),
        (wrong_crc, CheckpointError),
        (missing_file, CheckpointError),
    ],
)
def test_publish_failure_leaves_older_ones_and_no_half_folder(
    root: Path, model_path: Path, write: Any, error: type[BaseException]
) -> None:
    older = save(root, model_path, 1)
    with pytest.raises(error):
        save(root, model_path, 2, keep=1, write=write)
    assert list(root.iterdir()) == [older]
    verify(older)


def test_publish_failure_while_replacing_leaves_the_old_content(root: Path, model_path: Path) -> None:
    older = save(root, model_path, 1)
    with pytest.raises(CheckpointError, match=r"step_000001 could not be written: .*No space left on device"):
        save(root, model_path, 1, write=full_disk)
    verify(older)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def nullify(key: str, path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: None}))


SHARD, MANIFEST = "policy-00001-00000.safetensors", "manifest.json"


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (SHARD, truncate),
        (SHARD, flip),
        (SHARD, Path.unlink),
        (SHARD, lambda path: path.write_bytes(b"")),
        (MANIFEST, truncate),
        (MANIFEST, Path.unlink),
        (MANIFEST, lambda path: path.write_text("")),
        (MANIFEST, lambda path: path.write_bytes(b"\xff\xfe\x00")),
        (MANIFEST, lambda path: path.write_text("[]")),
        (MANIFEST, lambda path: path.write_text('{"format": 1}')),
        (MANIFEST, lambda path: path.write_text('{"format": 99, "files": []}')),
        *((MANIFEST, partial(nullify, key)) for key in ("format", "step", "files", "run_state", "config")),
    ],
)
def test_find_whole_broken_newest_gives_the_older_one_with_a_warning(
    root: Path, model_path: Path, name: str, harm: Callable[[Path], Any]
) -> None:
    older, newest = save(root, model_path, 1), save(root, model_path, 2)
    harm(newest / name)
    found, warnings = find_whole(root)
    assert found == older
    assert len(warnings) == 1
    assert str(newest) in warnings[0] and "looking for an older one" in warnings[0]


def test_find_whole_intact_newest_gives_no_warning(root: Path, model_path: Path) -> None:
    save(root, model_path, 1)
    newest = save(root, model_path, 2)
    assert find_whole(root) == (newest, [])


def test_find_whole_nothing_there_is_none(root: Path, model_path: Path) -> None:
    assert find_whole(root) == (None, [])
    (save(root, model_path, 1) / MANIFEST).unlink()
    found, warnings = find_whole(root)
    assert found is None and len(warnings) == 1


def test_find_whole_half_written_folder_is_no_checkpoint(root: Path, model_path: Path) -> None:
    whole = save(root, model_path, 1)
    (root / ".writing-step_000002-abcd").mkdir()
    assert find_whole(root) == (whole, [])


# -- shards --


MOMENTS = {
    **dict.fromkeys((Optimizer.adamw, Optimizer.cpu_adam), ("exp_avg", "exp_avg_sq")),
    Optimizer.sgd: (),
    Optimizer.muon: ("momentum_buffer",),
}


class StateEngine:
    """An engine of plain tensors; `plain_state` has actors.checkpoint read and write them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], kind: Optimizer, seed: int | None = None):
        self.spec, self.shapes, self.steps = SimpleNamespace(kind=kind), shapes, -1
        random = torch.Generator().manual_seed(seed or 0)
        kinds = ("master", *MOMENTS[kind])
        self.state = {} if seed is None else {
            name: {k: torch.randn(shape, generator=random) for k in kinds} for name, shape in shapes.items()
        }  # fmt: skip


@pytest.fixture(autouse=True)
def plain_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(engine: StateEngine, read: Callable[[str], dict[str, torch.Tensor]]) -> None:
        engine.state |= {name: read(name) for name in engine.shapes}

    def moments(engine: StateEngine) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(engine.shapes, MOMENTS[engine.spec.kind])

    monkeypatch.setattr(checkpoint, "trained_shapes", lambda engine: engine.shapes)
    monkeypatch.setattr(checkpoint, "trained_moments", moments)
    monkeypatch.setattr(checkpoint, "full_state", lambda engine: engine.state.items())
    monkeypatch.setattr(checkpoint, "load_full_state", load)
    monkeypatch.setattr(checkpoint, "set_optimizer_step", lambda engine, step: setattr(engine, "steps", step))


SHAPES = {"embed": (6, 4), "l.0.w": (4, 4), "l.0.b": (4,), "l.1.w": (4, 4), "scale": ()}


def save_state(root: Path, model_path: Path, engine: StateEngine, world: int) -> Path:
    def write(folder: Path) -> Any:
        entries = [e for rank in range(world) for e in write_shards(folder, "policy", engine, rank, world)]  # type: ignore[arg-type]
        return entries, {"roles": {"policy": {"optimizer_step": 5}}}

    return save(root, model_path, 3, write=write)


@pytest.mark.parametrize("kind", Optimizer)
@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_shards_any_number_of_ranks_give_back_every_bit(
    root: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Optimizer, world: int, shard_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    engine = StateEngine(SHAPES, kind, seed=1)
    folder = save_state(root, model_path, engine, world)
    assert len(read_manifest(folder)["files"]) == (len(SHAPES) if shard_bytes == 1 else min(world, len(SHAPES)))
    other = StateEngine(SHAPES, kind)
    read_shards(folder, "policy", other)  # type: ignore[arg-type]
    assert other.state.keys() == engine.state.keys() and other.steps == 5
    for name, state in engine.state.items():
        assert other.state[name].keys() == state.keys()
        assert all(torch.equal(other.state[name][k], value) for k, value in state.items())


def test_read_shards_sgd_checkpoint_into_adam_names_the_optimizer(root: Path, model_path: Path) -> None:
    folder = save_state(root, model_path, StateEngine(SHAPES, Optimizer.sgd, seed=1), 2)
    with pytest.raises(CheckpointError, match=r"holds no exp_avg of embed.*trainer.optimizer"):
        read_shards(folder, "policy", StateEngine(SHAPES, Optimizer.adamw))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({k: v for k, v in SHAPES.items() if k != "l.1.w"}, r"this model lacks \['l.1.w'\]"),
        (SHAPES | {"l.2.w": (4, 4)}, r"it lacks \['l.2.w'\]"),
        (SHAPES | {"embed": (4, 6)}, r"embed has shape \(6, 4\), this model's has \(4, 6\)"),
    ],
)
def test_read_shards_another_architecture_is_refused(
    root: Path, model_path: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    folder = save_state(root, model_path, StateEngine(SHAPES, Optimizer.sgd, seed=1), 2)
    with pytest.raises(CheckpointError, match=message):
        read_shards(folder, "policy", StateEngine(shapes, Optimizer.sgd))  # type: ignore[arg-type]


def test_export_hf_writes_the_master_weights_and_the_model_files(root: Path, model_path: Path, tmp_path: Path) -> None:
    engine = StateEngine(SHAPES, Optimizer.adamw, seed=1)
    folder = save_state(root, model_path, engine, 2)
    out = tmp_path / "hf"
    for _ in range(2):  # a second export replaces the first
        assert export_hf(folder, out) == out
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == SHAPES.keys()
    assert all(torch.equal(weights[name], engine.state[name]["master"]) for name in SHAPES)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "none"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "hf", "model"]
