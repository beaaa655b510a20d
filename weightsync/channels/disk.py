"""A Hugging Face folder for each version, on a file system that ranks and engines share.

The ranks write what each of them holds straight to its place in the safetensors files, and every worker reads what it
wants of it. A version's folder gets its name once every engine that is left has it, so others may take it from there:
`version-000012` with the model's index, and with its configuration and tokenizer. In a push of what has changed it
holds only tensors of which an engine's module has changed; unless these are all, `sync.json` says so, and there is no
configuration.
"""

import fcntl
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl.faults import SyncError
from weightsync.files import FULL, Entry, header_of, naming, sync_file, write_at
from weightsync.plan import ITEM_BYTES, Bucket, Buffer, Wanted, aligned
from weightsync.regions import Regions

FILE_BYTES = 5 << 30  # tensors of at most so many bytes in a file, unless one alone is larger
KEPT = 2  # versions, and all since the whole one that the first of them builds on
INDEX, ABOUT = "model.safetensors.index.json", "sync.json"
UNFINISHED = ".writing-version-"
OWNER = ".run"  # the run folder of the run whose versions these are


@dataclass(frozen=True, kw_only=True)
class FolderAddress:
    """Where versions are written, and which tensors they have: number -> (buffer of the folder's Wanted, shape)."""

    root: str
    name: str  # of the connection
    slot_bytes: int
    buffers: tuple[Buffer, ...]
    shapes: tuple[tuple[int, ...], ...]

    def aside(self, version: int) -> Path:
        """Where a version is written until it is whole."""
        return Path(self.root) / f"{UNFINISHED}{version:06d}-{self.name}"


@dataclass(frozen=True, kw_only=True)
class File:
    """A safetensors file: its header, and the offset of each tensor in it, by number."""

    name: str
    header: bytes
    offsets: dict[int, int]


def folder_wanted(shapes: Mapping[str, tuple[int, ...]], dtype: str, workers: Sequence[Wanted]) -> Wanted:
    """A whole folder as a reader: each tensor in one piece.

    A buffer's `module` is the first of the tensors that an engine can only take together with it: those that meet in
    a module of any of the `workers`. `dtype` is that of tensors which the workers want in several.
    """
    names = tuple(shapes)
    group = list(range(len(names)))

    def root(k: int) -> int:
        while group[k] != k:
            group[k] = k = group[group[k]]
        return k

    dtypes: list[set[str]] = [set() for _ in names]
    for wanted in workers:
        first: dict[int, int] = {}
        modules = wanted.module_of(wanted.regions.buffer).tolist()
        for tensor, module, buffer in zip(
            wanted.regions.tensor.tolist(), modules, wanted.regions.buffer.tolist(), strict=True
        ):
            a, b = root(first.setdefault(module, tensor)), root(tensor)
            group[max(a, b)] = min(a, b)
            dtypes[tensor].add(wanted.buffers[buffer].dtype)
    sizes = [math.prod(shape) for shape in shapes.values()]
    return Wanted(
        names=names,
        regions=Regions.of([(k, 0, 1, size, size, k, 0, size, 1) for k, size in enumerate(sizes)]),
        buffers=tuple(
            Buffer(module=names[root(k)], name=name, dtype=next(iter(kinds)) if len(kinds) == 1 else dtype)
            for k, (name, kinds) in enumerate(zip(names, dtypes, strict=True))
        ),
    )


def files_of(address: FolderAddress, modules: Collection[str] | None) -> list[File]:
    """The files of a version with these modules' tensors (None: all), in order."""
    chosen = None if modules is None else set(modules)
    groups: list[list[int]] = []
    used = FILE_BYTES
    for number, buffer in enumerate(address.buffers):
        size = math.prod(address.shapes[number]) * ITEM_BYTES[buffer.dtype]
        if chosen is None or buffer.module in chosen:
            if used + size > FILE_BYTES:
                groups.append([])
                used = 0
            groups[-1].append(number)
            used += size
    files = []
    for index, numbers in enumerate(groups):
        buffers = [(address.buffers[number], address.shapes[number]) for number in numbers]
        header, placed = header_of([Entry(name=b.name, dtype=b.dtype, shape=shape) for b, shape in buffers])
        offsets = {number: entry.offset for number, entry in zip(numbers, placed, strict=True)}
        name = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        files.append(File(name=name, header=header, offsets=offsets))
    return files


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes [begin, end) of a bucket, and where they lie in a file."""

    file: str
    offset: int
    begin: int
    end: int


Places = dict[int, tuple[str, int]]  # of each tensor that a version has, by number: file, and offset in it


def places_of(files: Sequence[File]) -> Places:
    return {number: (file.name, at) for file in files for number, at in file.offsets.items()}


def spans_of(address: FolderAddress, places: Places, bucket: Bucket) -> list[Span]:
    """Where what is sent of a bucket lies."""
    m, found = bucket.moves, []
    for k in bucket.sent:
        number, length, row, at = int(m.target[k]), int(m.length[k]), int(m.target_row[k]), int(m.target_at[k])
        assert int(m.target_col[k]) == 1 or length == 1  # a folder's tensors are contiguous
        item = ITEM_BYTES[address.buffers[number].dtype]
        file, base = places[number]
        begin, count, size = int(bucket.offset[k]), int(m.count[k]), length * item
        if row == length:
            count, size = 1, count * size
        found += [
            Span(file=file, offset=base + (at + i * row) * item, begin=begin + i * size, end=begin + (i + 1) * size)
            for i in range(count)
        ]
    return found


class FolderWriter:
    """A rank's side. Rank 0 also writes headers, and names the folder in the end.

    `beside`: files of the model that the folder of a whole version has too.
    Raises SyncError when another run writes there.
    """

    def __init__(self, address: FolderAddress, rank: int, num_slots: int, beside: Sequence[Path]):
        self.address, self._rank, self._beside = address, rank, beside
        self._slots = [torch.zeros(address.slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        Path(address.root).mkdir(parents=True, exist_ok=True)
        self._lock = -1
        if rank == 0:
            self._lock = lock(Path(address.root))
            remove_unfinished(Path(address.root))  # by a run that was killed

    def connect(self) -> None:
        """As weightsync.channels.channel.Outlet: the workers open the files by themselves."""

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Outlet. Raises SyncError when the version's name is taken."""
        if self._rank == 0:
            require_replaceable(version_folder(Path(self.address.root), version), version)
        self._aside, self._files = self.address.aside(version), files_of(self.address, modules)
        self._version, self._places = version, places_of(self._files)
        self._whole = len(self._places) == len(self.address.buffers)  # a push of changes may carry everything
        with self._told_when_full():
            self._aside.mkdir(exist_ok=True)
        if self._rank == 0:
            for file in self._files:
                self._write(file.name, [(0, file.header)])

    def slot(self, index: int) -> torch.Tensor:
        """As weightsync.channels.channel.Outlet."""
        return self._slots[index]

    def send(self, index: int, reader: int, bucket: Bucket) -> None:
        """Writes a bucket to its places, through to the disk."""
        data: Any = self._slots[index].numpy()
        parts: dict[str, list[tuple[int, Any]]] = {}
        for span in spans_of(self.address, self._places, bucket):
            parts.setdefault(span.file, []).append((span.offset, data[span.begin : span.end]))
        for name, found in parts.items():
            self._write(name, found)

    def _write(self, name: str, parts: Sequence[tuple[int, Any]]) -> None:
        path = self._aside / name
        with self._told_when_full(), naming(path):
            file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                for offset, data in parts:
                    write_at(file, data, offset)
                os.fdatasync(file)  # another host sees a file as it was when it was closed
            finally:
                os.close(file)

    def end(self, version: int) -> None:
        """Gives the folder its name (rank 0), and removes versions that nobody needs any more."""
        if self._rank > 0:
            return
        root = Path(self.address.root)
        with self._told_when_full():
            self._write_beside(version)
        replace_folder(version_folder(root, version), self._aside)
        prune(root, version)
        sync_file(root)

    def _write_beside(self, version: int) -> None:
        """Writes what a version's folder has beside weights, through to the disk."""
        buffers = self.address.buffers
        for path in self._beside if self._whole else []:  # nobody is to load a part as a model
            with naming(self._aside / path.name):
                shutil.copyfile(path, self._aside / path.name)
        where = {buffers[number].name: file for number, (file, _) in self._places.items()}
        index = {"metadata": {"total_size": self._num_bytes()}, "weight_map": where}
        for name, content in (
            (INDEX, json.dumps(index, indent=1)),
            (ABOUT, json.dumps({"version": version, "whole": self._whole})),
        ):
            with naming(self._aside / name):
                (self._aside / name).write_text(content)
        for path in [*self._aside.iterdir(), self._aside]:
            with naming(path):
                sync_file(path)

    def _num_bytes(self) -> int:
        """Bytes of the weights of the version that is being written."""
        buffers, shapes = self.address.buffers, self.address.shapes
        return sum(math.prod(shapes[number]) * ITEM_BYTES[buffers[number].dtype] for number in self._places)

    @contextmanager
    def _told_when_full(self) -> Iterator[None]:
        """Raises SyncError when the disk is full, or a quota used up."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            root = Path(self.address.root)
            there, free = bytes_of([self._aside]), shutil.disk_usage(root).free
            raise SyncError(
                f"sync.folder={root}: {error.strerror}: version {self._version} takes {self._num_bytes() / 1e6:,.1f} "
                f"MB, of which {there / 1e6:,.1f} MB are written, and {free / 1e6:,.1f} MB are free beside the "
                "versions that are kept; make room, or give a sync.folder on a larger disk, and start the run again"
            ) from error

    def close(self) -> None:
        """Removes what was not finished, and lets others write to the folder."""
        if self._lock >= 0:
            remove_unfinished(Path(self.address.root))
            os.close(self._lock)
            self._lock = -1


def version_folder(root: Path, version: int) -> Path:
    return root / f"version-{version:06d}"


def about_version(path: Path) -> dict[str, Any] | None:
    """What the folder of a version says of itself; None for what is no such folder: somebody else's, a copy of one
    under another name, or half removed."""
    try:
        about = json.loads((path / ABOUT).read_text())
        own = path == version_folder(path.parent, int(about["version"])) and not path.is_symlink()
        return {"version": int(about["version"]), "whole": bool(about["whole"])} if own else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_replaceable(path: Path, version: int) -> None:
    """Raises SyncError when there is something in a version's place that is no version, and nobody's to remove."""
    if (path.exists() or path.is_symlink()) and about_version(path) is None:
        raise SyncError(
            f"{path} is in the way of version {version} (sync.folder) and was not written by a push: it has no "
            f"{ABOUT} of this version; move it away, or give another sync.folder"
        )


def claim(root: Path, run: Path) -> None:
    """Notes that the versions in a folder are those of the run in the run folder `run`.

    Raises SyncError when there are versions of another run, as pushes of this one would replace and remove them, or
    something else by the name of a version.
    """
    for entry in root.glob("version-*"):
        if re.fullmatch(r"version-\d{6,}", entry.name):
            require_replaceable(entry, int(entry.name.removeprefix("version-")))
    path = root / OWNER
    try:
        owner = path.read_text().strip()
    except FileNotFoundError:
        owner = ""
    found = sorted(entry.name for entry in root.glob("version-*") if about_version(entry) is not None)
    if found and owner != str(run):
        whose = f"the run in {owner}" if owner else f"a run that is not known (no {OWNER} in it)"
        raise SyncError(
            f"sync.folder={root}: it holds versions of {whose}, like {found[0]}, which a push of this run, in {run}, "
            "could remove; give each run its own, or remove the versions that nobody needs"
        )
    if owner != str(run):
        with naming(path):
            path.write_text(f"{run}\n")


def prune(root: Path, version: int) -> None:
    """Removes versions after this one, which is the newest (a run was resumed from before them), and of those before
    it all but KEPT and what these build on: all since the last whole one that is not after them."""
    abouts = [about for path in root.glob("version-*") if (about := about_version(path)) is not None]
    found = {about["version"]: about["whole"] for about in abouts}  # version: whether it is whole
    older = sorted(number for number in found if number <= version)
    first = min(older[-KEPT:])
    first = max((number for number in older if found[number] and number <= first), default=first)
    for number in found:
        if number > version or number < first:
            replace_folder(version_folder(root, number), None)


def replace_folder(path: Path, new: Path | None) -> None:
    """Gives a version's name to the folder `new` (None: to nothing), and removes what had it; what a kill leaves of
    that has no version's name."""
    old = path.with_name(f"{UNFINISHED}removed-{uuid.uuid4().hex[:8]}") if path.exists() else None
    if old is not None:
        path.rename(old)
    if new is not None:
        new.rename(path)  # right after: an engine that is mended has its version written again, and others may want it
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)  # somebody may be reading it; the next run takes the rest


def remove_unfinished(root: Path) -> None:
    """Removes what was begun and not finished. Only for who holds the lock, or when nobody writes any more."""
    for left in root.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)  # a rank may be writing to it as it dies


def remove_left(root: Path) -> None:
    """Removes what a run that is over has begun and not finished, unless another one pushes into the folder by now."""
    with suppress(SyncError):
        file = lock(root)
        try:
            remove_unfinished(root)
        finally:
            os.close(file)


def bytes_of(folders: Sequence[Path]) -> int:
    """What the files in these folders take on the disk, as far as they are still there."""
    total = 0
    for path in (path for folder in folders for path in folder.glob("*")):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def bytes_there(root: Path) -> int:
    """What versions in a folder, and what is left of unfinished ones, take on the disk."""
    versions = [path for path in root.glob("version-*") if about_version(path) is not None]
    return bytes_of([*versions, *root.glob(f"{UNFINISHED}*")])


def require_whole_version(path: Path) -> None:
    """Raises SyncError for a version's folder that holds only a part of the weights."""
    try:
        whole = json.loads((path / ABOUT).read_text())["whole"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no version's folder
    if whole is False:
        raise SyncError(
            f'{path} holds only what has changed since the version before (sync.delta; "whole": false in its {ABOUT}), '
            "which is no model by itself; use a version that is whole, or a checkpoint of the run"
        )


def lock(root: Path) -> int:
    """Keeps others from pushing into a folder until the file that it gives is closed, or its process ends."""
    try:
        file = os.open(root / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise SyncError(f"sync.folder={root}: {root / '.lock'} cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise SyncError(f"sync.folder={root}: another run pushes into this folder; give each run its own") from None
    except OSError as error:
        os.close(file)
        raise SyncError(
            f"sync.folder={root}: files cannot be locked there ({error}); use another file system"
        ) from None
    return file


class FolderReader:
    """A worker's side."""

    def __init__(self, address: FolderAddress):
        self._address = address

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Inlet."""
        self._aside, self._places = self._address.aside(version), places_of(files_of(self._address, modules))

    def receive(self, slot: int, bucket: Bucket, memory: torch.Tensor) -> torch.Tensor:
        """The bytes of a bucket, gathered from the files."""
        data: Any = memory.numpy()
        opened: dict[str, int] = {}
        try:
            for span in spans_of(self._address, self._places, bucket):
                if span.file not in opened:
                    opened[span.file] = os.open(self._aside / span.file, os.O_RDONLY)
                view, offset = memoryview(data[span.begin : span.end]), span.offset
                while view:
                    done = os.preadv(opened[span.file], [view], offset)
                    if not done:
                        raise OSError(f"{self._aside / span.file} ends before byte {offset} (sync.folder)")
                    view, offset = view[done:], offset + done
        finally:
            for file in opened.values():
                os.close(file)
        # What aligns the pieces is in no file, but counts in the digests.
        for k in bucket.sent:
            item = ITEM_BYTES[self._address.buffers[int(bucket.moves.target[k])].dtype]
            end = int(bucket.offset[k]) + int(bucket.moves.num_elements[k]) * item
            memory[end : aligned(end)].zero_()
        return memory
