"""The weights that each rank of a training layout holds, in a file for each rank, and what they are of the model.

layout.json                  the layout; the model's tensors (name: shape); the ranks' files (bytes, crc32)
rank-00000.safetensors       rank 0's part of each parameter, by its name: flat at ZeRO-3, else of the slice's shape
rank-00000.json              for each of them which elements of which tensors it holds, and where
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.checkpoint import file_crc
from actors.layout_plan import TrainedModel
from conf.errors import ConfigError
from rl.faults import CheckpointError, SyncError
from rl.run_folder import write_json
from weightsync.folder import read_object
from weightsync.held import Share, held_regions, whole_regions
from weightsync.plan import Buffer, Wanted
from weightsync.regions import Regions
from weightsync.reshard import Place, Target

LAYOUT = "layout.json"
FORMAT = 1
# The columns of a region, in its order: element j of run i of the tensor, `start + i * stride + j`, is element
# `at + i * row + j * col` of the parameter's part.
COLUMNS = ("start", "count", "stride", "length", "at", "row", "col")


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """A folder of ranks' files: of each file that has to be read its entry, parameters, and regions in these."""

    label: str
    shapes: dict[str, tuple[int, ...]]
    files: tuple[tuple[dict[str, Any], list[str], Regions], ...]

    @classmethod
    def read(cls, folder: Path) -> "RankFiles":
        """What is in a folder. Raises CheckpointError, naming the file, for one that is missing or cannot be read."""
        try:
            about = read_object(folder / LAYOUT)
            if about.get("format") != FORMAT:
                raise ConfigError(f"{folder / LAYOUT}: format {about.get('format')}, this version reads {FORMAT}")
            shapes = {name: tuple(map(as_size, shape)) for name, shape in about["tensors"].items()}
            numbers = {name: k for k, name in enumerate(shapes)}
            files = []
            for rank, described in enumerate(about["files"]):
                entry: dict[str, Any] = {key: as_size(described[key]) for key in ("nbytes", "crc", "table_crc")}
                entry["file"] = as_name(described["file"])
                table = folder / f"{stem(rank)}.json"
                parts = read_object(table)["parameters"]
                if file_crc(table) != entry["table_crc"]:
                    raise CheckpointError(
                        f"{table} is damaged: its crc32 is not that in {LAYOUT}; make the folder again"
                    )
                first = [part for part in parts if part["replica"] == 0]
                rows = [
                    (numbers[row[0]], *row[1:5], n, *row[5:]) for n, part in enumerate(first) for row in part["regions"]
                ]
                files.append((entry, [part["name"] for part in first], Regions.of(rows)))
            return cls(label=str(about["label"]), shapes=shapes, files=tuple(files))
        except SyncError as error:
            raise CheckpointError(str(error)) from error
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{folder}: {LAYOUT} or a rank's JSON is damaged ({error!r})") from error


def rank_targets(model: TrainedModel, dtypes: Mapping[str, str]) -> list[Target]:
    """What the file of each rank is to hold: all of the rank's parts, also those that others hold too.

    `dtypes` are those of the model's tensors. Raises ConfigError when they differ within a parameter.
    """
    names, whole = tuple(model.shapes), whole_regions(model.parameters)
    kinds = []
    for parameter in model.parameters:
        found = sorted({dtypes[names[tensor]] for tensor, _ in parameter.pieces})
        if len(found) > 1:
            raise ConfigError(f"{parameter.name} would be of {' and '.join(found)}: choose one with --dtype")
        kinds.append(found[0])
    buffers = tuple(
        Buffer(module=parameter.name, name=parameter.name, dtype=kind)
        for parameter, kind in zip(model.parameters, kinds, strict=True)
    )
    targets = []
    for rank in range(model.layout.ranks):
        shares = model.shares(rank)
        own = [replace(share, replica=0, replicas=1) for share in shares]
        regions = held_regions(model.parameters, own, whole)
        places = tuple(
            Place(file=f"{stem(rank)}.safetensors", name=parameter.name, shape=part_shape(parameter.shape, share))
            for parameter, share in zip(model.parameters, shares, strict=True)
        )
        targets.append(Target(wanted=Wanted(names=names, regions=regions, buffers=buffers), places=places))
    return targets


def part_shape(shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter."""
    if share.numel is not None:
        return (share.numel,)
    return tuple(size // share.parts if dim == share.dim else size for dim, size in enumerate(shape))


def describe(folder: Path, model: TrainedModel, targets: list[Target]) -> None:
    """Writes what is beside the files that the targets have become."""
    names, files = tuple(model.shapes), []
    for rank, target in enumerate(targets):
        shares, r = model.shares(rank), target.wanted.regions
        parts = [
            {"name": p.name, "shape": p.shape, "replica": share.replica, "regions": []}
            for p, share in zip(target.places, shares, strict=True)
        ]
        columns = zip(*(getattr(r, column).tolist() for column in COLUMNS), strict=True)
        for tensor, buffer, row in zip(r.tensor.tolist(), r.buffer.tolist(), columns, strict=True):
            parts[buffer]["regions"].append([names[tensor], *row])
        write_json(folder / f"{stem(rank)}.json", {"rank": rank, "columns": ["tensor", *COLUMNS], "parameters": parts})
        path, table = folder / f"{stem(rank)}.safetensors", folder / f"{stem(rank)}.json"
        entry = {"file": path.name, "nbytes": path.stat().st_size, "crc": file_crc(path)}
        files.append(entry | {"table_crc": file_crc(table)})
    layout = {key: getattr(model.layout, key) for key in ("ranks", "zero_stage", "sp", "tp", "ep", "hpz")}
    write_json(
        folder / LAYOUT,
        {"format": FORMAT, "label": model.layout.label(), "layout": layout, "tensors": model.shapes, "files": files},
    )


def as_size(value: Any) -> int:
    """A whole number that is not negative. Raises TypeError for anything else."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no size")
    return value


def as_name(value: Any) -> str:
    """The name of a file in the folder. Raises TypeError for anything else."""
    if not isinstance(value, str) or Path(value).name != value:
        raise TypeError(f"{value!r} is no file's name")
    return value


def stem(rank: int) -> str:
    return f"rank-{rank:05d}"
