"""Plans in files, so that a large one is made once: a header in JSON, and for each rank a file of plain arrays.

A plan is good for one key only: what each rank holds, what the readers want, and the size of a bucket. Whoever reads it
gives all that it knows of these, and is refused, by name, when something differs.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.plan import PlanError
from weightsync.planner import RankPlan, Readers, regions_fingerprint
from weightsync.regions import Moves, Regions

HEADER = "plan.json"
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a plan is for: fingerprints of what each rank holds and of what each reader wants, and slot_bytes."""

    ranks: tuple[str, ...]
    readers: tuple[str, ...]
    slot_bytes: int

    @classmethod
    def of(cls, held: Sequence[Regions], readers: Readers, slot_bytes: int) -> "Key":
        """For ranks that hold this."""
        return cls(
            ranks=tuple(regions_fingerprint(regions) for regions in held),
            readers=tuple(wanted.fingerprint() for wanted in readers.wants),
            slot_bytes=slot_bytes,
        )

    def hash(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def save_plan(
    folder: Path,
    ranks: Iterable[tuple[Regions, RankPlan]],
    readers: Readers,
    slot_bytes: int,
    about: Mapping[str, Any],
) -> Key:
    """Writes the plans of all ranks, one after the other as they are made; gives the key that they are good for.

    `ranks`: what each holds, and its plan. `about`: words for people, like the layout's label. The header comes last:
    a folder without one is no plan. Raises PlanError when the folder holds a plan already.
    """
    require_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held, prints = [], []
    for number, (regions, plan) in enumerate(ranks):
        held.append(regions_fingerprint(regions))
        prints.append(plan.fingerprint())
        arrays = {**vars(plan.moves), "reader": plan.reader, "sizes": plan.sizes, "begin": plan.begin}
        np.savez_compressed(rank_file(folder, number), **arrays)
    wanted = tuple(wants.fingerprint() for wants in readers.wants)
    key = Key(ranks=tuple(held), readers=wanted, slot_bytes=slot_bytes)
    header = {"format": FORMAT, "hash": key.hash(), "key": asdict(key), "plans": prints, "about": dict(about)}
    partial = folder / f"{HEADER}.partial"
    partial.write_text(json.dumps(header, indent=1) + "\n")
    os.replace(partial, folder / HEADER)
    return key


def require_new(folder: Path) -> None:
    """Raises PlanError when the folder holds a plan."""
    if (folder / HEADER).exists():
        raise PlanError(f"{folder} holds a plan already; name another folder, or remove it")


def load_plan(folder: Path, rank: int, num_ranks: int, held: Regions, readers: Readers, slot_bytes: int) -> RankPlan:
    """The plan of one rank that holds `held`, for these readers.

    Raises PlanError, saying what differs, when the plan is for something else, or damaged.
    """
    header = read_header(folder)
    key = key_of(header)
    wanted = tuple(wants.fingerprint() for wants in readers.wants)
    problems = differing_sizes(key, num_ranks, slot_bytes)
    if len(key.ranks) == num_ranks and key.ranks[rank] != regions_fingerprint(held):
        problems.append(f"rank {rank} holds other parts of the model than in its layout")
    if len(key.readers) != len(wanted):
        problems.append(f"it is for {len(key.readers)} readers, not {len(wanted)} (rollout.tp, rollout.pp)")
    else:
        problems += [f"reader {n} wants other parts" for n, own in enumerate(wanted) if own != key.readers[n]][:4]
    require_none(folder, header, problems)
    plan = read_rank(folder, rank)
    if plan.fingerprint() != header["plans"][rank]:
        raise PlanError(f"{rank_file(folder, rank)} is damaged: its content is not that of the plan; make it again")
    return plan


def require_sizes(folder: Path, num_ranks: int, slot_bytes: int) -> None:
    """Raises PlanError when a saved plan cannot be for so many ranks and such buckets: what is known at launch."""
    header = read_header(folder)
    require_none(folder, header, differing_sizes(key_of(header), num_ranks, slot_bytes))


def key_of(header: Mapping[str, Any]) -> Key:
    """Raises TypeError or KeyError for a header that is damaged."""
    saved = header["key"]
    return Key(ranks=tuple(saved["ranks"]), readers=tuple(saved["readers"]), slot_bytes=saved["slot_bytes"])


def differing_sizes(key: Key, num_ranks: int, slot_bytes: int) -> list[str]:
    problems = []
    if key.slot_bytes != slot_bytes:
        problems.append(f"its buckets are of {key.slot_bytes} bytes, not {slot_bytes} (half of sync.bucket_bytes)")
    if len(key.ranks) != num_ranks:
        problems.append(f"it is for {len(key.ranks)} training ranks, not {num_ranks} (cluster.train_ranks)")
    return problems


def require_none(folder: Path, header: Mapping[str, Any], problems: Sequence[str]) -> None:
    """Raises PlanError with the problems, if there are any."""
    if problems:
        about = ", ".join(f"{name}: {value}" for name, value in header["about"].items())
        raise PlanError(
            f"the plan in {folder} ({about}) does not fit: {'; '.join(problems)}; make another with "
            "scripts/plan_sync.py"
        )


def read_header(folder: Path) -> dict[str, Any]:
    """The header of a saved plan. Raises PlanError where there is none."""
    try:
        header: dict[str, Any] = json.loads((folder / HEADER).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{folder}: no saved plan ({error}); make one with scripts/plan_sync.py --save") from error
    damaged = f"{folder / HEADER} is damaged, or no plan's; make one with scripts/plan_sync.py --save"
    if not isinstance(header, dict):
        raise PlanError(damaged)
    if header.get("format") != FORMAT:
        raise PlanError(f"{folder}: a plan of format {header.get('format')}, not {FORMAT}; make it again")
    try:
        prints, about = header["plans"], header["about"]
        whole = key_of(header).hash() == header["hash"] and len(prints) == len(header["key"]["ranks"])
        whole = whole and isinstance(prints, list) and isinstance(about, dict)
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise PlanError(damaged)
    return header


def read_rank(folder: Path, rank: int) -> RankPlan:
    """One rank's file. Raises PlanError when it cannot be read."""
    path = rank_file(folder, rank)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            columns = {name: arrays[name] for name in arrays.files}
        for name, column in columns.items():  # a fingerprint is that of the numbers, whatever they are kept in
            if column.dtype != np.int64 or column.ndim != 1:
                raise TypeError(f"{name} is {column.dtype} {list(column.shape)}, not a row of int64")
        rest = {name: columns.pop(name) for name in ("reader", "sizes", "begin")}
        return RankPlan(moves=Moves(**columns), **rest)
    except Exception as error:  # zip, zlib and numpy each raise their own for what is cut off or overwritten
        raise PlanError(f"{path} cannot be read ({type(error).__name__}: {error}); make the plan again") from error


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.npz"
