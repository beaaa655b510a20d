"""Plans a push of weights and prints what would be sent. Starts nothing; of the model it reads config.json alone.

    python scripts/plan_sync.py model.path=FOLDER trainer.zero_stage=3 cluster.train_ranks=2 'rollout.tp=[2]'
    python scripts/plan_sync.py model.path=FOLDER 'rollout.tp=[8]' 'rollout.pp=[2]' --json links.json --save plans/mine

The layouts are those of the configuration, as in scripts/train.py. `--json FILE` writes all figures, with the bytes of
every link; `--save FOLDER` writes the plan, one file for each rank.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from conf.choices import Channel
from conf.errors import ConfigError
from conf.launch import ArgumentParser, launch, report
from conf.schema import Config
from rl.run_folder import write_json

if TYPE_CHECKING:
    from actors.layout_plan import TrainedModel
    from weightsync.plan import Wanted
    from weightsync.planner import RankPlan, Readers, Tally
    from weightsync.regions import Regions

MAX_ROWS = 64  # links that are printed one by one


@dataclass(kw_only=True)
class Planned:
    """A plan's sums, and how long it took to make."""

    tally: "Tally"
    readers: "Readers"
    workers: list[list[str]]  # of each reader
    seconds: dict[str, float] = field(default_factory=dict)
    saved: str = ""

    def figures(self, cfg: Config) -> dict[str, Any]:
        """For --json; bytes of links by rank and reader."""
        tally = self.tally
        return {
            "model": cfg.model.path,
            "trainer": {"ranks": cfg.cluster.train_ranks, "layout": cfg.train_layout.label()},
            "engines": [
                {"tp": cfg.engine_tp(n), "pp": cfg.engine_pp(n), "ep": cfg.rollout.ep and cfg.engine_tp(n) > 1}
                for n in range(cfg.cluster.rollout_engines)
            ],
            "readers": self.workers,
            "links_bytes": tally.links,
            "bytes": tally.num_bytes,
            "least_bytes": self.readers.num_bytes,
            "ratio": tally.num_bytes / self.readers.num_bytes,
            "slot_bytes": cfg.sync.slot_bytes,
            "buckets": tally.num_buckets,
            "rounds": tally.num_rounds,
            "max_bucket_bytes": tally.max_bucket_bytes,
            "moves": tally.num_moves,
            "hash": tally.plan_hash,
            "seconds": self.seconds,
            "peak_bytes": peak_bytes(),
        }


def run(cfg: Config, json: str | None = None, save: str | None = None) -> int:
    """The script."""
    from weightsync.plan import PlanError
    from weightsync.saved_plan import require_new

    if cfg.sync.channel is Channel.disk:
        raise ConfigError("sync.channel=disk: a folder is the only reader of ranks; plan for sync.channel=shm")
    if json is not None and not (Path(json).parent.is_dir() and os.access(Path(json).parent, os.W_OK)):
        raise ConfigError(f"--json {json}: no folder that can be written to; make it first")
    try:
        if save is not None:
            require_new(Path(save))
        planned = plan(cfg, save)
        show(cfg, planned)
        if json is not None:
            write_json(Path(json), planned.figures(cfg))
    except (PlanError, OSError) as error:
        raise ConfigError(str(error)) from error
    return 0


def plan(cfg: Config, save: str | None) -> Planned:
    """Plans for all ranks, one after the other; only what they add up to is kept.

    Raises ConfigError or PlanError for what does not fit.
    """
    from actors.layout_plan import trained_model
    from rollout.data import read_object
    from rollout.preflight.launch import require_engine_sizes
    from rollout.preflight.model_folder import require_layout
    from weightsync.planner import Tally, join_readers
    from weightsync.saved_plan import save_plan

    began = time.monotonic()
    path = cfg.model.path
    described = read_object(Path(path) / "config.json", "model.path")
    require_layout("model.path", path, described, cfg, cfg.train_layout)
    require_engine_sizes(cfg.rollout, described)
    try:
        model = trained_model(path, cfg.train_layout, cfg.lora)
    except Exception as error:  # whatever odd values make the many model classes raise
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"model.path={path}: config.json describes no model that can be built: {told}") from error
    built = time.monotonic()
    wants, workers = wanted_by(cfg, model)
    readers = join_readers(wants)
    recorded = time.monotonic()
    tally = Tally(readers)
    planned = Planned(tally=tally, readers=readers, workers=workers)
    ranks = planned_ranks(cfg, model, readers, tally)
    if save is None:
        for _ in ranks:
            pass
    else:
        about = {"model": path, "layout": cfg.train_layout.label(), "engines": engines_label(cfg)}
        planned.saved = save_plan(Path(save), ranks, readers, cfg.sync.slot_bytes, about).hash()
    tally.require_whole()
    done = time.monotonic()
    planned.seconds = {"model": built - began, "wants": recorded - built, "plan": done - recorded, "all": done - began}
    return planned


def wanted_by(cfg: Config, model: "TrainedModel") -> tuple[list["Wanted"], list[list[str]]]:
    """What each reader wants, and the names of the workers that are this reader."""
    from rollout.engine import engine_config
    from weightsync.places import worker_wants
    from weightsync.planner import distinct
    from weightsync.record import Folder

    folder = Folder.of(model.shapes)
    made: dict[tuple[int, int], list[Wanted]] = {}
    wants, names = [], []
    for engine in range(cfg.cluster.rollout_engines):
        size = (cfg.engine_tp(engine), cfg.engine_pp(engine))
        if size not in made:
            settings = engine_config(cfg, engine, cfg.model.path)
            dtype = cfg.trainer.dtype.value
            made[size] = [worker_wants(settings, rank, folder, dtype) for rank in range(size[0] * size[1])]
        wants += made[size]
        names += [f"engine {engine} worker {worker}" for worker in range(len(made[size]))]
    readers, which = distinct(wants)
    workers: list[list[str]] = [[] for _ in readers]
    for name, number in zip(names, which, strict=True):
        workers[number].append(name)
    return readers, workers


def planned_ranks(
    cfg: Config, model: "TrainedModel", readers: "Readers", tally: "Tally"
) -> Iterator[tuple["Regions", "RankPlan"]]:
    """What each rank holds, and its plan, which is added to the tally."""
    from weightsync.held import held_regions, whole_regions
    from weightsync.planner import plan_rank

    whole = whole_regions(model.parameters)
    for rank in range(cfg.cluster.train_ranks):
        held = held_regions(model.parameters, model.shares(rank), whole)
        found = plan_rank(held, readers, cfg.sync.slot_bytes)
        tally.add(found)
        yield held, found


def show(cfg: Config, planned: Planned) -> None:
    """Prints the plan."""
    from rich.console import Console
    from rich.table import Table

    console, tally, ranks = Console(), planned.tally, cfg.cluster.train_ranks
    total = Table("", "", title="plan of a push", show_header=False)
    for name, value in [
        ("model", cfg.model.path),
        ("trainer", f"{ranks} rank{'s' * (ranks > 1)}, {cfg.train_layout.label()}"),
        ("engines", engines_label(cfg)),
        ("readers", f"{len(planned.workers)}, of {sum(map(len, planned.workers))} workers"),
        ("bytes", f"{size(tally.num_bytes)}, {tally.num_bytes / planned.readers.num_bytes:.4f} of the least"),
        (
            "buckets",
            f"{tally.num_buckets} of at most {size(cfg.sync.slot_bytes)}; largest {size(tally.max_bucket_bytes)}",
        ),
        ("rounds", str(tally.num_rounds)),
        ("moves", str(tally.num_moves)),
        ("hash", tally.plan_hash),
        *([("saved, key", planned.saved)] if planned.saved else []),
        ("seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in planned.seconds.items())),
        ("peak memory", size(peak_bytes())),
    ]:
        total.add_row(name, value)
    console.print(total)
    console.print(links_table(planned))


def links_table(planned: Planned) -> Any:
    """Every link when there are few, else what ranks send and readers get."""
    from rich.table import Table

    links, names = planned.tally.links, [label(workers) for workers in planned.workers]
    if len(links) * len(names) <= MAX_ROWS:
        table = Table("from", "to", "bytes")
        for rank, row in enumerate(links):
            for name, nbytes in zip(names, row, strict=True):
                table.add_row(f"rank {rank}", name, size(nbytes))
        return table
    table = Table("bytes", "smallest", "mean", "largest")
    columns = [sum(row[n] for row in links) for n in range(len(names))]
    every = [nbytes for row in links for nbytes in row]
    for name, sums in (("of a rank", [sum(row) for row in links]), ("to a reader", columns), ("of a link", every)):
        table.add_row(name, size(min(sums)), size(sum(sums) / len(sums)), size(max(sums)))
    return table


def engines_label(cfg: Config) -> str:
    """`2 x tp2, 1 x tp4 pp2`."""
    counts: dict[str, int] = {}
    for engine in range(cfg.cluster.rollout_engines):
        tp, pp = cfg.engine_tp(engine), cfg.engine_pp(engine)
        name = f"tp{tp}" + (f" pp{pp}" if pp > 1 else "") + (" ep" if cfg.rollout.ep and tp > 1 else "")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def label(workers: list[str]) -> str:
    """The first worker of a reader, and how many want the same."""
    return workers[0] + (f" (and {len(workers) - 1} alike)" if len(workers) > 1 else "")


def size(nbytes: float) -> str:
    """Bytes in the largest unit that leaves a number above 1."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3f} {unit}"
    return f"{nbytes:.0f} B"


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: list[str]) -> NoReturn:
    """Takes this script's own options out; the rest is that of every script."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--save", metavar="FOLDER")
    try:
        own, rest = parser.parse_known_args(argv)
    except ConfigError as error:
        sys.exit(report(error))
    sys.argv[1:] = rest
    launch(partial(run, json=own.json, save=own.save), doc=__doc__)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(sys.argv[1:])
