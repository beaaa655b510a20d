"""Reading the headers of a Hugging Face folder: names and shapes, without the weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open


def own_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """As `folder_shapes`, without a head that is the embedding again: some folders hold it twice."""
    return without_tied_head(folder_shapes(folder), json.loads((folder / "config.json").read_text()))


def without_tied_head(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder but for a head that its config.json ties to the embedding."""
    tied = config.get("tie_word_embeddings")
    return {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}


def files_of(folder: Path) -> list[str]:
    """The names of a Hugging Face folder's safetensors files."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a Hugging Face folder, from the safetensors headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files_of(folder):
        with safe_open(folder / name, framework="pt") as tensors:
            shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118 (no iterator)
    return shapes
