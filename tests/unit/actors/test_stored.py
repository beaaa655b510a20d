"""Models in files: a checkpoint gives what exports give, and each kind of damage is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.checkpoint import export_hf, file_crc
from actors.stored import Stored, open_stored
from conf.errors import ConfigError
from rl.faults import CheckpointError
from weightsync.reshard import folder_target, write_target

SHAPES = {"m.up.weight": (6, 4), "m.down.weight": (4, 6), "m.norm.weight": (5,)}


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def checkpoint(folder: Path, weights: dict[str, torch.Tensor], dtype: str, **more: Any) -> Path:
    """As two ranks write it, with moments beside the weights."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text('{"model_type": "none"}')
    entries = []
    for rank in range(2):
        path = folder / f"policy-{rank:05d}-00000.safetensors"
        mine = {name: tensor for k, (name, tensor) in enumerate(weights.items()) if k % 2 == rank}
        state = {f"{name}|master": tensor for name, tensor in mine.items()}
        state |= {f"{name}|exp_avg": tensor + 1 for name, tensor in mine.items()}
        save_file(state, path)
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        size = path.stat().st_size
        entries.append({"role": "policy", "file": path.name, "nbytes": size, "crc": file_crc(path), "tensors": shapes})
    config = {"trainer": {"dtype": dtype}, **more.pop("config", {})}
    manifest = {"format": 2, "step": 20, "files": entries, "run_state": {}, "config": config, **more}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def with_adapters(folder: Path, dtype: str) -> Path:
    """A checkpoint that holds an adapter of one matrix, and the model that it belongs to."""
    base = folder / "base"
    base.mkdir(parents=True)
    save_file(random(SHAPES), base / "model.safetensors")
    pair = random({"m.up.lora_A.default.weight": (2, 4), "m.up.lora_B.default.weight": (6, 2)})
    lora = {"lora": {"rank": 2, "alpha": 6.0}}
    return checkpoint(folder / "step_000020", pair, dtype, base=str(base), config=lora)


def write(stored: Stored, folder: Path, bucket_bytes: int = 64) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_target(
        folder, stored.held, folder_target(stored.shapes, stored.dtypes), bucket_bytes, lambda _: None, lambda _: None
    )
    return load_file(folder / "model-00001-of-00001.safetensors")


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapters", [False, True])
def test_checkpoint_gives_bit_for_bit_what_an_export_gives(tmp_path: Path, adapters: bool, dtype: str) -> None:
    folder = with_adapters(tmp_path, dtype) if adapters else checkpoint(tmp_path / "it", random(SHAPES), dtype)
    stored = open_stored(folder, None)
    assert stored.about.startswith("checkpoint of step 20")
    found = write(stored, tmp_path / "ours")
    require_equal(found, load_file(export_hf(folder, tmp_path / "theirs") / "model.safetensors"))
    if adapters:
        assert not torch.equal(found["m.up.weight"].float(), random(SHAPES)["m.up.weight"])


def test_dtype_that_is_asked_for_is_that_of_every_tensor(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "it", random(SHAPES), "float32")
    rounded = {name: tensor.bfloat16() for name, tensor in random(SHAPES).items()}
    require_equal(write(open_stored(folder, "bfloat16"), tmp_path / "ours"), rounded)


def test_run_folder_is_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run/checkpoints/step_000010", random(SHAPES), "float32", step=10)
    broken = checkpoint(tmp_path / "run/checkpoints/step_000020", random(SHAPES), "float32")
    (broken / "policy-00001-00000.safetensors").unlink()
    assert open_stored(tmp_path / "run", None).about == "checkpoint of step 10"


def damage(folder: Path, kind: str) -> None:
    path = folder / "policy-00001-00000.safetensors"
    if kind == "missing":
        path.unlink()
    elif kind == "flipped":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(("kind", "told"), [("missing", "is missing"), ("flipped", "has crc"), ("cut", "has .* bytes")])
def test_damaged_shard_of_a_checkpoint_is_named(tmp_path: Path, kind: str, told: str) -> None:
    folder = checkpoint(tmp_path / "it", random(SHAPES), "float32")
    damage(folder, kind)
    with pytest.raises(CheckpointError, match=f"policy-00001-00000.safetensors {told}"):
        open_stored(folder, None)


def test_adapters_without_their_model_say_where_it_was(tmp_path: Path) -> None:
    folder = with_adapters(tmp_path, "float32")
    (tmp_path / "base/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"base/model.safetensors is missing.*the adapters of"):
        open_stored(folder, None)


def test_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither manifest"):
        open_stored(tmp_path, None)
    with pytest.raises(ConfigError, match="no such folder"):
        open_stored(tmp_path / "none", None)


def test_hugging_face_folder_without_one_of_its_files_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-00001.safetensors is missing"):
        open_stored(tmp_path, None)
