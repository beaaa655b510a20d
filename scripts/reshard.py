"""Reshards the policy's weights of a checkpoint, or a model folder, into files of another layout. Starts nothing.

    python scripts/reshard.py runs/2026-01-01-quickstart/checkpoints/step_000020 --to hf --out exported
    python scripts/reshard.py models/smollm2 --to train-layout --out ranks trainer.zero_stage=3 cluster.train_ranks=8
    python scripts/reshard.py ranks --to vllm-layout --out workers 'rollout.tp=[3]' --dtype bfloat16

The source is a checkpoint (or a run folder, for its newest), a Hugging Face folder, or what --to train-layout wrote.
`--to hf` writes a Hugging Face folder, `train-layout` a file for each rank of the layout that the overrides give, and
`vllm-layout` what each worker of the engines of the overrides loads with load_format=sharded_state. `--out` names a new
folder; `--dtype` rounds the weights (by default to a checkpoint's trainer.dtype). docs/weightsync.md says more.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from conf.choices import Dtype
from conf.errors import ConfigError
from conf.launch import ArgumentParser, launch, report
from conf.schema import Config
from rl.run_folder import nearest_folder
from scripts.plan_sync import size

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.layout_plan import TrainedModel
    from actors.stored import Stored
    from weightsync.reshard import Target, Tick

KINDS = ("hf", "train-layout", "vllm-layout")
ASIDE = ".resharding-"
Targets = dict[str, list["Target"]]  # by the folder in the new folder that they are written to


def run(cfg: Config, own: argparse.Namespace) -> int:
    """The script."""
    from rl.faults import CheckpointError, SyncError
    from weightsync.files import FULL
    from weightsync.plan import PlanError

    missing = [name for name, value in (("CHECKPOINT", own.source), ("--to", own.to), ("--out", own.out)) if not value]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given: CHECKPOINT --to {'|'.join(KINDS)} --out FOLDER")
    try:
        reshard(cfg, Path(own.source), own.to, Path(own.out), own.dtype)
    except (CheckpointError, PlanError, SyncError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        advice = (
            "; what was begun is removed; make room, or name an --out on another disk" if error.errno in FULL else ""
        )
        # Of a copy the second name is that of the new file.
        name = error.filename2 or error.filename or own.out
        raise ConfigError(f"{name}: {error.strerror or error}{advice}") from error
    return 0


def reshard(cfg: Config, source: Path, to: str, out: Path, dtype: str | None) -> None:
    """Writes the folder `out`, which must not be there.

    Raises ConfigError, CheckpointError, PlanError, SyncError or OSError, each naming what is wrong and where.
    """
    from actors.checkpoint import copy_model_files
    from actors.rank_files import describe
    from actors.stored import open_stored
    from weightsync.files import sync_file
    from weightsync.reshard import write_index, write_target

    require_new(out)
    remove_left(out)
    bucket_bytes = (
        cfg.sync.bucket_bytes // 3
    )  # beside a bucket, what it is read from and what it is written to are mapped
    with progress() as phase:
        stored = open_stored(source, dtype, phase("checksums"))
        cfg = replace(cfg, model=replace(cfg.model, path=str(stored.model_files)))
        model = fitting_model(cfg, stored, to)
        folders = targets_of(cfg, to, stored, model)
        total = sum(target.num_bytes for targets in folders.values() for target in targets)
        require_room(out, total)
        copied, checked = phase("copied", total), phase("read again", total)
        with written_aside(out) as aside:
            for name, targets in folders.items():
                copy_model_files(stored.model_files, aside / name)
                for target in targets:
                    write_target(aside / name, stored.held, target, bucket_bytes, copied, checked)
                if to == "hf":
                    write_index(aside / name, targets[0])
                    set_dtype(aside / name / "config.json", set(stored.dtypes.values()))
                elif to == "train-layout" and model is not None:
                    describe(aside, model, targets)
            for path in aside.rglob("*"):
                sync_file(path)
    files = {(name, p.file) for name, targets in folders.items() for target in targets for p in target.places}
    print(f"{source} ({stored.about}) -> {out} ({to}): {size(total)} in {len(files)} file{'s' * (len(files) > 1)}")


def fitting_model(cfg: Config, stored: "Stored", to: str) -> "TrainedModel | None":
    """The model in the training layout of the configuration, whose engines can take it too where it is for them; none
    for a Hugging Face folder, which has no layout.

    Raises ConfigError when weights and config.json, or either layout, do not fit.
    """
    from actors.layout_plan import trained_model
    from rollout.preflight.launch import require_engine_sizes
    from rollout.preflight.model_folder import check_model

    described = check_model("source", cfg.model.path, cfg, cfg.train_layout, stored.shapes)
    if to == "hf":
        return None
    if cfg.lora.rank:
        raise ConfigError(f"lora.rank={cfg.lora.rank}: adapters are merged before weights are resharded; leave it out")
    if to == "vllm-layout":
        require_engine_sizes(cfg.rollout, described)
    return trained_model(cfg.model.path, cfg.train_layout, cfg.lora)


def targets_of(cfg: Config, to: str, stored: "Stored", model: "TrainedModel | None") -> Targets:
    """What is to be written."""
    from actors.rank_files import rank_targets
    from weightsync.reshard import folder_target

    if to == "hf":
        return {"": [folder_target(stored.shapes, stored.dtypes)]}
    assert model is not None
    return {"": rank_targets(model, stored.dtypes)} if to == "train-layout" else engine_targets(cfg, stored)


def engine_targets(cfg: Config, stored: "Stored") -> Targets:
    """The files of each engine's workers: of engines of several sizes in a folder for each size, like `tp2-pp1`."""
    from rollout.engine import engine_config
    from weightsync.places import worker_target
    from weightsync.record import Folder

    sizes = {(cfg.engine_tp(n), cfg.engine_pp(n)): n for n in reversed(range(cfg.cluster.rollout_engines))}
    folder, found = Folder.of(stored.shapes), {}
    for (tp, pp), engine in sorted(sizes.items()):
        settings = engine_config(cfg, engine, cfg.model.path)
        name = f"tp{tp}-pp{pp}" if len(sizes) > 1 else ""
        found[name] = [worker_target(settings, rank, folder) for rank in range(tp * pp)]
    return found


def set_dtype(path: Path, dtypes: set[str]) -> None:
    """Has a config.json name the dtype of the weights beside it, where they have one in common."""
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if len(dtypes) == 1 and config.get(key) not in dtypes:
        (config[key],) = dtypes
        path.write_text(json.dumps(config, indent=2) + "\n")


def require_new(out: Path) -> None:
    """Raises ConfigError when there is something of this name already, or no folder that it could be in."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out} exists already; name a new folder, or remove it")
    parent = nearest_folder(out)
    if not parent.is_dir():
        raise ConfigError(f"--out {out}: {parent} is a file; name a folder")


def require_room(out: Path, nbytes: int) -> None:
    """Raises ConfigError when the disk that `out` will be on has no room for so many bytes."""
    disk = nearest_folder(out)
    usage = shutil.disk_usage(disk)
    if usage.free < nbytes and usage.total:
        raise ConfigError(
            f"--out {out}: its weights take {size(nbytes)}, and {size(usage.free)} are free in {disk}; make room, or "
            "name an --out on another disk"
        )


def remove_left(out: Path) -> None:
    """Removes what killed runs were writing beside `out`. That of a run that goes on is locked, and stays."""
    name = re.compile(rf"{re.escape(ASIDE + out.name)}-[0-9a-f]{{8}}")
    for left in list(out.parent.iterdir()) if out.parent.is_dir() else []:
        if name.fullmatch(left.name) and (held := lock(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)


def lock(folder: Path) -> int | None:
    """Locks a folder until the file that it gives is closed, or its process ends; None where another process has, or
    the file system cannot."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A folder beside `out` that gets its name in the end, or is removed when something fails.

    Raises ConfigError when something of that name has appeared since.
    """
    from weightsync.files import sync_file

    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f"{ASIDE}{out.name}-{uuid.uuid4().hex[:8]}")
    unlocked, held = aside.with_name(f"{aside.name}.new"), None
    try:
        unlocked.mkdir()
        held = lock(unlocked)
        unlocked.rename(aside)  # under this name another run removes what nobody holds
        yield aside
        try:
            out.mkdir()  # takes the name: a rename alone would replace a folder that is empty
        except FileExistsError:
            require_new(out)
            raise
        try:
            aside.rename(out)
        except BaseException:
            with suppress(OSError):  # it has its name: an interrupt came after that
                out.rmdir()
            raise
        sync_file(out.parent)
    except BaseException:
        for folder in (unlocked, aside):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if held is not None:
            os.close(held)


@contextmanager
def progress() -> Iterator["Callable[..., Tick]"]:
    """Shows phases on standard error: phase(name, bytes in all) gives what tells it of bytes that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description:>10}"), *columns, console=Console(stderr=True)) as shown:

        def phase(name: str, total: int | None = None) -> "Tick":
            task = shown.add_task(name, total=total, visible=False)

            def advance(nbytes: int) -> None:
                shown.update(task, advance=nbytes, visible=True)

            return advance

        yield phase


def main(argv: list[str]) -> NoReturn:
    """Takes this script's own options and the source out; the rest is that of every script."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--to", choices=KINDS)
    parser.add_argument("--out", metavar="FOLDER")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype])
    try:
        own, rest = parser.parse_known_args(argv)
    except ConfigError as error:
        sys.exit(report(error))
    own.source = next(
        (text for text in rest if not text.startswith("-") and ("=" not in text or Path(text).exists())), ""
    )
    if own.source:
        rest.remove(own.source)
    sys.argv[1:] = rest
    launch(partial(run, own=own), doc=__doc__)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(sys.argv[1:])
