"""Reading the headers of a Hugging Face folder: names and shapes, without the weights."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rl.faults import SyncError


def own_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """As `folder_shapes`, without a head that is the embedding again: some folders hold it twice."""
    return without_tied_head(folder_shapes(folder), read_object(folder / "config.json"))


def without_tied_head(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder but for a head that its config.json ties to the embedding."""
    tied = config.get("tie_word_embeddings")
    return {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}


def files_of(folder: Path) -> list[str]:
    """The names of a Hugging Face folder's safetensors files. Raises SyncError for an index that is none."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise SyncError(f"{index} has no weight_map that gives the file of each tensor: it is damaged")
    return sorted(set(places.values()))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises SyncError, naming the file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SyncError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SyncError(f"{path} holds a {type(found).__name__}, not a JSON object: it is damaged")
    return found


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a Hugging Face folder, from the safetensors headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files_of(folder):
        with safe_open(folder / name, framework="pt") as tensors:
            shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118 (no iterator)
    return shapes


def differences(
    sent: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], tied: frozenset[str]
) -> list[str]:
    """What keeps tensors of the shapes `sent` from being a whole update of a model with tensors `expected`.

    `tied` names may be missing: they alias another tensor. Empty when the update is whole.
    """
    problems = [f"{name}: the engine's model has no such tensor" for name in sent if name not in expected]
    problems += [f"{name}: missing from the update" for name in expected if name not in sent and name not in tied]
    problems += [
        f"{name}: shape {shape} sent, {tuple(expected[name])} expected"
        for name, shape in sent.items()
        if name in expected and tuple(expected[name]) != shape
    ]
    return problems


def in_groups(shapes: Mapping[str, tuple[int, ...]], item_bytes: int, limit_bytes: int) -> list[list[str]]:
    """The names in their order, in groups of at most `limit_bytes`; a larger tensor is alone."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * item_bytes
        if used and used + size > limit_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups
