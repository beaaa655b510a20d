"""What benchmarks share: the schema of results, the parts of a run, and yardsticks in processes of their own."""

import argparse
import math
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

import psutil
from rich.console import Console
from rich.table import Table

from conf.launch import compose
from conf.schema import Config
from rl.faults import RoleDied, RoleTimeout
from rl.run_folder import collect_versions, write_json
from rollout.preflight.launch import Prepared

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800.0
MOST_COLUMNS = 8

Row = dict[str, Any]
Result = dict[str, Any]

# -- results --

FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "machine": dict,
    "versions": dict,
    "config": dict,
    "rows": list,
    "ratios": dict,
    "took_s": (int, float),
}
LABELS: dict[str, type] = dict.fromkeys(("layout", "reason", "model", "train", "engine", "channel", "mode"), str)
LABELS |= {"legal": bool, "name": str, "unit": str}
MACHINE_FIELDS: dict[str, type] = {"cpu": str, "cores": int, "ram_bytes": int, "os": str}


def validate(result: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the place, unless `result` is as every benchmark writes it.

    rows: one for each measurement, with `variant` (who was measured), `repeat` (from 0) and finite figures whose names
    end in their unit (null where one was not measured), beside LABELS that describe the variant; one that was refused
    has a reason and no figure. One with a single figure may have a `name`, a `value` and its `unit` instead.
    ratios: finite and positive, or null where the yardstick was left out.
    """
    if set(result) != set(FIELDS):
        raise ValueError(f"fields {sorted(result)}, wanted {sorted(FIELDS)}")
    for key, kind in FIELDS.items():
        if not isinstance(result[key], kind) or isinstance(result[key], bool):
            raise ValueError(f"{key}: is a {type(result[key]).__name__}")
    machine = result["machine"]
    if {key: type(value) for key, value in machine.items()} != MACHINE_FIELDS:
        raise ValueError(f"machine: {machine}, wanted {MACHINE_FIELDS}")
    for name, version in result["versions"].items():
        if not isinstance(version, str):
            raise ValueError(f"versions.{name}: is a {type(version).__name__}")
    if not result["rows"]:
        raise ValueError("rows: there are none")
    for index, row in enumerate(result["rows"]):
        if not isinstance(row, dict) or not isinstance(row.get("variant"), str):
            raise ValueError(f"rows[{index}]: has no variant")
        if not isinstance(row.get("repeat"), int) or row["repeat"] < 0:
            raise ValueError(f"rows[{index}].repeat: {row.get('repeat')!r}")
        for key in row.keys() & LABELS.keys():
            if not isinstance(row[key], LABELS[key]):
                raise ValueError(f"rows[{index}].{key}: is a {type(row[key]).__name__}")
        figures = figures_of(row)
        if not figures and not row.get("reason"):
            raise ValueError(f"rows[{index}]: has no figure")
        for key, value in figures.items():
            if not is_finite(value):
                raise ValueError(f"rows[{index}].{key}: {value!r} is no finite number")
    for name, ratio in result["ratios"].items():
        if ratio is not None and not (is_finite(ratio) and ratio > 0):
            raise ValueError(f"ratios.{name}: {ratio!r}")
    if not (is_finite(result["took_s"]) and result["took_s"] >= 0):
        raise ValueError(f"took_s: {result['took_s']!r}")


def figures_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, without what says of whom."""
    other = LABELS.keys() | {"variant", "repeat"}
    return {key: value for key, value in row.items() if key not in other and value is not None}


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def make_result(args: argparse.Namespace, rows: list[Row], ratios: dict[str, float | None], **config: Any) -> Result:
    """A result without `took_s`. The benchmark's arguments, and what it adds, are its config."""
    given = {key: value for key, value in vars(args).items() if key not in ("name", "json")}
    return {
        "name": args.name,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "config": given | config,
        "rows": rows,
        "ratios": ratios,
    }


def write_result(result: Result, path: Path) -> None:
    """Writes a result as JSON; ValueError when it breaks the schema."""
    validate(result)
    write_json(path, result)


def describe_machine() -> dict[str, Any]:
    """Processor model, cores, memory and operating system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count() or 1,
        "ram_bytes": int(psutil.virtual_memory().total),
        "os": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """Python, the packages of rl.run_folder, and the commit of the project (with + when its files differ from it)."""
    found = collect_versions()
    commit = found["git_commit"]
    packages = {name: version for name, version in found["packages"].items() if version}
    own = {"tandem commit": commit + ("+" if found["git_dirty"] else "")} if commit else {}
    return {"python": found["python"]} | packages | own


def medians(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Variant -> figure -> median over its repeats, in order of first appearance."""
    variants: dict[str, list[Row]] = {}
    for row in rows:
        variants.setdefault(row["variant"], []).append(row)
    return {
        variant: {
            key: statistics.median(row[key] for row in of)
            for key in dict.fromkeys(k for row in of for k in row)
            if all(key in figures_of(row) for row in of)
        }
        for variant, of in variants.items()
    }


def print_result(result: Result) -> None:
    """The medians as a table, of few variants side by side; how many were refused, and why; and the ratios."""
    found = {variant: figures for variant, figures in medians(result["rows"]).items() if figures}
    columns = list(dict.fromkeys(key for figures in found.values() for key in figures))
    units = {row["variant"]: row["unit"] for row in result["rows"] if "unit" in row}
    table = Table(title=f"{result['name']}: medians", title_justify="left")
    table.add_column("")
    if len(found) <= MOST_COLUMNS and not units:
        for variant in found:
            count = sum(row["variant"] == variant for row in result["rows"])
            table.add_column(f"{variant} ({count} runs)", justify="right")
        for column in columns:
            cells = [figure_text(figures[column]) if column in figures else "" for figures in found.values()]
            table.add_row(column, *cells)
    else:
        for column in columns:
            table.add_column(column, justify="right")
        if units:
            table.add_column("unit")
        for variant, figures in found.items():
            cells = [figure_text(figures[c]) if c in figures else "" for c in columns]
            table.add_row(variant, *cells, *([units.get(variant, "")] if units else []))
    console = Console()
    console.print(table)
    refused = Counter(row["reason"] for row in result["rows"] if row.get("reason"))
    for reason, count in refused.items():
        console.print(f"refused ({count}): {reason}", highlight=False)
    for name, ratio in result["ratios"].items():
        console.print(f"{name}: " + ("not measured" if ratio is None else f"[bold]{ratio:.3f}[/bold]"))


def figure_text(value: float) -> str:
    """A number with about four digits; with an exponent when it is tiny."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


# -- the parts of a run --


def bench_config(args: argparse.Namespace, *extra: str) -> Config:
    """The quickstart with the benchmark's model, sizes and threads; nothing evaluated, saved or tracked."""
    sizes = [
        f"{key}={getattr(args, name)}"
        for key, name in (
            ("prompts_per_step", "prompts"),
            ("samples_per_prompt", "samples"),
            ("rollout.max_tokens", "max_tokens"),
        )
        if hasattr(args, name)
    ]
    return compose([*base_overrides(args), *sizes, *extra])


def base_overrides(args: argparse.Namespace) -> list[str]:
    """What every benchmark changes in the quickstart."""
    return [
        "experiment=quickstart",
        "evaluation.every=0",
        "checkpoint=none",
        "tracking=none",
        f'model.path="{args.model}"',
        f"trainer.num_threads={args.threads}",
        f"rollout.num_threads={args.threads}",
    ]


@dataclass(kw_only=True)
class Parts:
    """Real actors, connected, with no loop around them. `engines` and `sync` are None when not asked for."""

    cluster: Any
    group: Any
    policy: Any
    engines: Any = None
    sync: Any = None


@contextmanager
def start_parts(cfg: Config, prepared: Prepared, with_engines: bool) -> Iterator[Parts]:
    """Starts the training ranks, and the rollout engines when asked for; ends them all."""
    from actors.cluster import Cluster
    from actors.engine import optimizer_spec
    from actors.group import RankGroup
    from actors.roles import ActorPolicy
    from rollout.engines import EngineGroup
    from scripts.wiring import connect_sync

    with ExitStack() as stack:
        say("starting Tandem's actors")
        cluster = Cluster(cfg.cluster)
        stack.callback(cluster.stop)
        group = RankGroup(cfg, cluster, "policy", cfg.model.path, optimizer_spec(cfg.trainer))
        stack.callback(group.stop)
        starting = [group.start()]
        engines = None
        if with_engines:
            engines = EngineGroup(cfg, cluster, cfg.model.path)
            stack.callback(engines.stop)
            starting.append(engines.start())
        for future in starting:
            future.result()
        parts = Parts(cluster=cluster, group=group, policy=ActorPolicy(cfg, group), engines=engines)
        if engines is not None:
            parts.sync = connect_sync(cfg, parts.policy, engines, len(prepared.tokenizer), say)
        yield parts


def environment_of(actor: Any) -> dict[str, str]:
    """The environment that a Ray actor runs in, without Ray's own variables: a yardstick gets the same."""
    import ray

    found: dict[str, str] = ray.get(actor.__ray_call__.remote(read_environment), timeout=60)
    return {key: value for key, value in found.items() if not key.startswith("RAY_")}


def read_environment(_actor: Any) -> dict[str, str]:
    return dict(os.environ)


# -- yardsticks --


class Yardstick:
    """An object in a plain Python process of its own. `target` is "module:Class"; `call` runs one of its methods."""

    def __init__(self, target: str, env: Mapping[str, str], *args: Any):
        self.target = target
        self._ours, theirs = Pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.benchmarks.worker", str(theirs.fileno()), target],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=ROOT,
            )
        try:
            self._ask(args)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Runs a method there. Raises RoleDied with its traceback or its last output, RoleTimeout when it hangs."""
        return self._ask((method, args))

    def close(self) -> None:
        """Ends the process."""
        self._ours.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> "Yardstick":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: Any) -> Any:
        try:
            self._ours.send_bytes(pickle.dumps(message))  # `send` would share tensors through files of its own
            if not self._ours.poll(TIMEOUT_S):
                raise RoleTimeout(f"yardstick {self.target}: no answer in {TIMEOUT_S:g} s")
            succeeded, value = pickle.loads(self._ours.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace")[-2000:]
            raise RoleDied(f"yardstick {self.target}: its process is gone; it said\n{tail}") from error
        if not succeeded:
            raise RoleDied(f"yardstick {self.target} failed:\n{value}")
        return value
