"""The folder's tensors in a module's parameters: nothing lost, nothing twice."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.pieces import pieces_of


def folder_of(name: str, value: torch.Tensor, model_type: str = "qwen3_moe") -> dict[str, torch.Tensor]:
    found = {}
    for piece in pieces_of(name, tuple(value.shape), model_type):
        found[piece.name] = value[piece.index]
        assert found[piece.name].shape == piece.shape
    return found


def test_parameter_without_experts_is_its_own_piece() -> None:
    (piece,) = pieces_of("model.layers.0.mlp.gate_proj.weight", (3, 4), "qwen3")
    assert (piece.name, piece.shape, piece.index) == ("model.layers.0.mlp.gate_proj.weight", (3, 4), ())


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("model.layers.1.mlp.experts.gate_up_proj", (4, 6, 5), 8),
        ("model.layers.1.mlp.experts.down_proj", (4, 5, 3), 4),
        ("model.layers.1.mlp.experts.w1", (4, 3, 5), 4),
        ("model.layers.1.mlp.router.gate.weight", (4, 5), 1),
    ],
)
def test_pieces_cover_every_element_once(name: str, shape: tuple[int, ...], count: int) -> None:
    value = torch.arange(math.prod(shape)).reshape(shape)
    found = folder_of(name, value)
    assert len(found) == count
    assert sorted(x for piece in found.values() for x in piece.flatten().tolist()) == list(range(value.numel()))


@pytest.mark.parametrize("names", ["transformers", "expert parallel"])
def test_experts_of_a_real_folder_have_its_names_and_values(tiny_moe_folder: Path, names: str) -> None:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_moe_folder)
    wanted = load_file(tiny_moe_folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, value in lm.named_parameters():
        prefix, _, last = name.rpartition(".")
        if names == "transformers" or ".mlp." not in name:
            found |= folder_of(name, value)
        elif last == "gate_up_proj":
            gate, up = value.chunk(2, 1)
            found |= folder_of(f"{prefix}.w1", gate) | folder_of(f"{prefix}.w3", up)
        elif last == "down_proj":
            found |= folder_of(f"{prefix}.w2", value)
        else:
            found |= folder_of(name.replace("mlp.gate.weight", "mlp.router.gate.weight"), value)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_mixtral_folders_have_names_of_their_own() -> None:
    names = [p.name for p in pieces_of("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 3), "mixtral")]
    assert names[:2] == [f"model.layers.0.block_sparse_moe.experts.0.{w}.weight" for w in ("w1", "w3")]
