"""Weights from files of one layout into files of another, planned as a push is: regions held, met with regions wanted.

Both sides are mapped, and a bucket travels between them, so that memory does not grow with the model.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rl.faults import SyncError
from weightsync.channels.disk import FolderAddress, files_of, folder_wanted
from weightsync.files import Entry, Mapped, create, header_of
from weightsync.plan import ITEM_BYTES, Bucket, Stream, Wanted
from weightsync.planner import plan_streams, require_whole
from weightsync.regions import Regions
from weightsync.sender import Read, digests, fill, plain, spread


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor is to lie: in which file of the new folder, under which name, in which shape."""

    file: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one reader wants, and the places of its buffers, whose dtypes are those in the files.

    `fixed` tensors are written as they are. What nothing is copied to is zero.
    """

    wanted: Wanted
    places: tuple[Place, ...]
    fixed: tuple[tuple[Place, torch.Tensor], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.wanted.num_bytes()


@dataclass(frozen=True, kw_only=True)
class Held:
    """What lies in files: regions of the tensors `names`, how to read their buffers, and how to give memory back."""

    names: tuple[str, ...]
    regions: Regions
    reads: tuple[Read, ...]
    release: Callable[[], None] = lambda: None

    def numbered(self, names: Sequence[str]) -> Regions:
        """The regions, with tensors by their numbers in `names`, which has them all."""
        number = {name: k for k, name in enumerate(names)}
        tensors = torch.tensor([number[name] for name in self.names], dtype=torch.int64).numpy()
        return replace(self.regions, tensor=tensors[self.regions.tensor])


Tick = Callable[[int], None]  # so many more bytes are done


def write_target(folder: Path, held: Held, target: Target, bucket_bytes: int, copied: Tick, checked: Tick) -> None:
    """Writes a reader's files into `folder`, where they must not be yet, and reads them again.

    Raises PlanError when what is held is not everything that is wanted, OSError, naming a file, when one cannot be
    written, and SyncError when a file does not hold what was copied to it.
    """
    streams = plan_streams(held.numbered(target.wanted.names), [target.wanted], bucket_bytes)
    require_whole(streams, [target.wanted])
    (stream,) = streams or (Stream(reader=0, buckets={}),)  # a worker may want nothing, a rank hold nothing
    placed = create_files(folder, target)
    signed = copy(folder, placed, held, target, stream, copied)
    files = {name: Mapped(folder / name) for name in placed}
    reads = [plain(files[p.file].flat(placed[p.file][p.name])) for p in target.places]
    memory = torch.zeros(stream.max_bytes, dtype=torch.uint8)
    for number, bucket in stream.buckets.items():
        fill(memory, written(bucket), reads, target.wanted)
        if digests(memory, bucket) != signed[number]:
            names = sorted({target.places[n].file for n in bucket.moves.target.tolist()})
            raise SyncError(f"{', '.join(str(folder / name) for name in names)}: not what was written is read again")
        checked(bucket.nbytes)
        for file in files.values():
            file.release()


def copy(
    folder: Path, placed: dict[str, dict[str, Entry]], held: Held, target: Target, stream: Stream, copied: Tick
) -> dict[int, tuple[int, ...]]:
    """Copies a stream's buckets into files that are there; gives the digests of each bucket's segments, as read."""
    files = {name: Mapped(folder / name, writable=True) for name in placed}
    flats = [files[p.file].flat(placed[p.file][p.name]) for p in target.places]
    for place, value in target.fixed:
        files[place.file].flat(placed[place.file][place.name]).copy_(value.flatten())
    memory = torch.zeros(stream.max_bytes, dtype=torch.uint8)
    targets, signed = [plain(flat) for flat in flats], {}
    for number, bucket in stream.buckets.items():
        signed[number] = fill(memory, bucket, held.reads, target.wanted, at_once=False)
        spread(memory, bucket, targets, target.wanted)
        copied(bucket.nbytes)
        held.release()
        for file in files.values():
            file.release()
    for file in files.values():
        file.flush()
    return signed


def create_files(folder: Path, target: Target) -> dict[str, dict[str, Entry]]:
    """Makes a target's files, with nothing but zeros in their tensors; gives these, by file and name."""
    tensors: dict[str, list[Entry]] = {}
    dtypes = [buffer.dtype for buffer in target.wanted.buffers]
    dtypes += [str(value.dtype).removeprefix("torch.") for _, value in target.fixed]
    places = [*target.places, *(place for place, _ in target.fixed)]
    for place, dtype in zip(places, dtypes, strict=True):
        tensors.setdefault(place.file, []).append(Entry(name=place.name, dtype=dtype, shape=place.shape))
    placed = {}
    for name, entries in tensors.items():
        entries.sort(key=lambda entry: -ITEM_BYTES[entry.dtype])  # each lies at a multiple of its size
        header, found = header_of(entries)
        create(folder / name, header, max(entry.offset + entry.nbytes for entry in found))
        placed[name] = {entry.name: entry for entry in found}
    return placed


def written(bucket: Bucket) -> Bucket:
    """The bucket as it would be filled from what it was copied to."""
    m = bucket.moves
    moves = replace(m, source=m.target, source_at=m.target_at, source_row=m.target_row, source_col=m.target_col)
    return replace(bucket, moves=moves)


def folder_target(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> Target:
    """The weights of a Hugging Face folder, in these dtypes: each tensor in one piece, by name, whatever held them."""
    shapes = dict(sorted(shapes.items()))
    wanted = folder_wanted(shapes, "float32", [])
    buffers = tuple(replace(buffer, dtype=dtypes[buffer.name]) for buffer in wanted.buffers)
    address = FolderAddress(root="", name="", slot_bytes=0, buffers=buffers, shapes=tuple(shapes.values()))
    names = {number: file.name for file in files_of(address, None) for number in file.offsets}
    places = tuple(Place(file=names[k], name=name, shape=shape) for k, (name, shape) in enumerate(shapes.items()))
    return Target(wanted=replace(wanted, buffers=buffers), places=places)


def write_index(folder: Path, target: Target) -> None:
    """Writes the index of a Hugging Face folder: which tensor is in which file."""
    index = {"metadata": {"total_size": target.num_bytes}, "weight_map": {p.name: p.file for p in target.places}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
