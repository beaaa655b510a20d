"""A model that lies in files: a checkpoint, a Hugging Face folder, or the files of a training layout's ranks.

What is in it is described as regions held; nothing is read before it is asked for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from actors.checkpoint import SEPARATOR, files_of, find_whole, read_manifest, verify_file
from actors.lora import adapter_names, lora_of, merged
from actors.rank_files import LAYOUT, RankFiles
from actors.resume import require_same_base
from conf.errors import ConfigError
from rl.faults import CheckpointError
from weightsync.channels.disk import require_whole_version
from weightsync.files import Entry, Mapped, read_entries
from weightsync.folder import files_of as folder_files
from weightsync.folder import read_object, without_tied_head
from weightsync.regions import Regions
from weightsync.reshard import Held, Tick
from weightsync.sender import Read, plain

Lies = tuple[Mapped, Entry]  # a tensor: the file that it is in, and where


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A model in files.

    `dtypes` has the dtype that each tensor is handed on in; `model_files` is the folder of configuration and tokenizer.
    """

    about: str
    model_files: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    held: Held


def open_stored(path: Path, dtype: str | None, checked: Tick = lambda _: None) -> Stored:
    """The policy in a checkpoint (or the newest whole one of a run folder), or the model in one of the other folders.

    Weights are rounded to `dtype`; None keeps a checkpoint's trainer.dtype, and what other folders hold. `checked` is
    told of the bytes whose checksums are right. Raises ConfigError or CheckpointError, naming the file, for what is no
    model, or damaged, and SyncError for a version of a sync.folder that holds only what had changed.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder (looked in {Path.cwd()}); name a checkpoint or a model folder")
    if (path / "checkpoints").is_dir():
        newest, warnings = find_whole(path / "checkpoints")
        if newest is None:
            raise ConfigError(f"{path}: no whole checkpoint in this run folder" + "".join(f"; {w}" for w in warnings))
        path = newest
    require_whole_version(path)
    try:
        if (path / "manifest.json").exists():
            return open_checkpoint(path, dtype, checked)
        if (path / LAYOUT).exists():
            return open_ranks(path, dtype, checked)
        if (path / "config.json").exists():
            return open_folder(path, dtype)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(str(error)) from error
    raise ConfigError(
        f"{path} holds neither manifest.json (a checkpoint), nor {LAYOUT} (a training layout), nor config.json (a "
        "Hugging Face folder)"
    )


def open_checkpoint(path: Path, dtype: str | None, checked: Tick) -> Stored:
    """The policy's master weights, or the model that its adapters belong to with these merged into it."""
    manifest = read_manifest(path)
    dtype = dtype or str(manifest["config"]["trainer"]["dtype"])
    found: dict[str, Lies] = {}
    for entry in files_of(manifest, "policy"):
        verify_file(path, entry)
        checked(entry["nbytes"])
        for name, lies in tensors_in(path / entry["file"]).items():
            name, _, kind = name.partition(SEPARATOR)
            if kind == "master":
                found[name] = lies
    lora = lora_of(manifest["config"])
    about = f"checkpoint of step {manifest['step']}"
    if lora.rank == 0:
        return stored(about, path / "model", found, dtype)
    base = Path(manifest["base"])
    try:
        frozen = folder_tensors(base)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{error}; the adapters of {path} belong to the model in {base}") from error
    require_same_base(path, shapes_of(found), shapes_of(frozen))
    return stored(f"{about}, adapters merged", path / "model", frozen, dtype, Adapters(found, lora.scale))


def open_folder(path: Path, dtype: str | None) -> Stored:
    return stored("Hugging Face folder", path, folder_tensors(path), dtype)


def open_ranks(path: Path, dtype: str | None, checked: Tick) -> Stored:
    """The files of a training layout's ranks; of those that hold the same the first is read."""
    ranks = RankFiles.read(path)
    buffers: list[Lies] = []
    parts: list[Regions] = []
    for entry, parameters, regions in ranks.files:
        verify_file(path, entry)
        checked(entry["nbytes"])
        tensors = tensors_in(path / entry["file"])
        missing = [name for name in parameters if name not in tensors]
        if missing:
            raise CheckpointError(f"{path / entry['file']} lacks {missing[0]}, which {LAYOUT} says it holds")
        parts.append(Regions(**{**vars(regions), "buffer": regions.buffer + len(buffers)}))
        buffers += [tensors[name] for name in parameters]
    regions = Regions.concat(parts)
    counts = np.zeros(len(ranks.shapes), np.int64)
    np.add.at(counts, regions.tensor, regions.num_elements)
    for (name, shape), count in zip(ranks.shapes.items(), counts.tolist(), strict=True):
        if count != math.prod(shape):
            raise CheckpointError(f"{path}: its ranks hold {count} of the {math.prod(shape)} elements of {name}")
    dtypes = dict.fromkeys(ranks.shapes, "")
    names = tuple(ranks.shapes)
    for tensor, buffer in zip(regions.tensor.tolist(), regions.buffer.tolist(), strict=True):
        dtypes[names[tensor]] = buffers[buffer][1].dtype
    if dtype is not None:
        dtypes = dict.fromkeys(names, dtype)
    reads = tuple(rounded(plain(file.flat(entry)), dtype or entry.dtype) for file, entry in buffers)
    files = list({id(file): file for file, _ in buffers}.values())
    held = Held(names=names, regions=regions, reads=reads, release=releasing(files))
    about = f"training layout {ranks.label}"
    return Stored(about=about, model_files=path, shapes=ranks.shapes, dtypes=dtypes, held=held)


class Adapters:
    """Merges adapters as exports do, a matrix at a time: the last one stays until another is asked for."""

    def __init__(self, tensors: Mapping[str, Lies], scale: float):
        self._tensors, self._scale = tensors, scale
        self._name, self._matrix = "", torch.empty(0)

    @property
    def files(self) -> list[Mapped]:
        return [file for file, _ in self._tensors.values()]

    def read(self, name: str, lies: Lies, dtype: str) -> Read:
        """Reads the matrix `name`, of which `lies` has what was there before training."""
        kind: torch.dtype = getattr(torch, dtype)
        pair = [self._tensors[adapter] for adapter in adapter_names(name) if adapter in self._tensors]
        base = rounded(plain(lies[0].flat(lies[1])), dtype)
        if not pair:
            return base

        def matrix(tensor: Lies) -> torch.Tensor:
            return tensor[0].flat(tensor[1]).view(tensor[1].shape).to(kind)

        def read(at: int, row: int, col: int, count: int, length: int) -> torch.Tensor:
            if self._name != name:
                a, b = (matrix(tensor) for tensor in pair)
                self._name, self._matrix = name, merged(matrix(lies), a, b, self._scale).flatten()
            return plain(self._matrix)(at, row, col, count, length)

        return read


def stored(
    about: str, model_files: Path, tensors: Mapping[str, Lies], dtype: str | None, adapters: Adapters | None = None
) -> Stored:
    """A model of which each tensor lies whole in a file."""
    if not (model_files / "config.json").is_file():
        raise CheckpointError(
            f"{model_files}: no config.json in it; the model's configuration and tokenizer are needed"
        )
    config = read_object(model_files / "config.json")
    shapes = without_tied_head(shapes_of(tensors), config)
    chosen = {name: tensors[name] for name in shapes}
    dtypes = {name: dtype or entry.dtype for name, (_, entry) in chosen.items()}
    numels = [entry.numel for _, entry in chosen.values()]
    reads = [
        rounded(plain(lies[0].flat(lies[1])), dtypes[name])
        if adapters is None
        else adapters.read(name, lies, dtypes[name])
        for name, lies in chosen.items()
    ]
    held = Held(
        names=tuple(shapes),
        regions=Regions.of([(k, 0, 1, n, n, k, 0, n, 1) for k, n in enumerate(numels) if n]),
        reads=tuple(reads),
        release=releasing([*(file for file, _ in chosen.values()), *(adapters.files if adapters else [])]),
    )
    return Stored(about=about, model_files=model_files, shapes=shapes, dtypes=dtypes, held=held)


def tensors_in(path: Path) -> dict[str, Lies]:
    """The tensors of a safetensors file."""
    entries = read_entries(path)
    file = Mapped(path)
    return {entry.name: (file, entry) for entry in entries}


def folder_tensors(folder: Path) -> dict[str, Lies]:
    """The tensors of a Hugging Face folder. Raises ValueError when a file is missing or damaged."""
    found: dict[str, Lies] = {}
    try:
        names = folder_files(folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/model.safetensors.index.json has no weight_map") from error
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: no such file of weights")
        own = tensors_in(folder / name)
        if twice := sorted(found.keys() & own.keys()):
            raise ValueError(f"{folder}: {twice[0]} is in {name} and in another file; one of them is stale")
        found |= own
    return found


def shapes_of(tensors: Mapping[str, Lies]) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, (_, entry) in tensors.items()}


def rounded(read: Read, dtype: str) -> Read:
    """Reads in another dtype, whatever the reader wants then."""
    kind: torch.dtype = getattr(torch, dtype)
    return lambda at, row, col, count, length: read(at, row, col, count, length).to(kind)


def releasing(files: Sequence[Mapped]) -> Callable[[], None]:
    """Gives back the memory of all of these files."""
    once = list({id(file): file for file in files}.values())

    def release() -> None:
        for file in once:
            file.release()

    return release
