"""Loggers: metrics.jsonl (always), W&B and TensorBoard. The only file that imports wandb.

Every logger gets the same call, once for each step: `log(step, metrics)`. The step axis is ours, not a logger's own
counter, so a run that resumes from an older step logs that step again and nothing is dropped.
"""

import json
import math
import netrc
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from conf.schema import TrackingConfig
from rl.run_folder import finite, write_text

Say = Callable[[str], None]

WANDB_STEP = "train/step"
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 3.0


class Logger(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class JsonlLogger:
    """`metrics.jsonl`: one object for each step, {"step": int, "time": unix seconds, metric: number or null...}.

    Opening it keeps the steps up to `resumed_step` (none when that is 0: a new start) and cuts what came later, so a
    resumed run writes each step once. A line that a crash left half-written is cut too.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        keep_steps(path, resumed_step)
        self.file: IO[str] = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, "time": time.time(), **finite(dict(metrics))}
        self.file.write(json.dumps(row, allow_nan=False) + "\n")
        self.file.flush()

    def finish(self, exit_code: int) -> None:
        self.file.close()


class WandbLogger:
    """A W&B run in `run_dir/wandb`, online or offline. Resuming passes the same `run_id`.

    Neither the command line nor code nor console output is uploaded: each may hold secrets.
    """

    def __init__(
        self, project: str, run_dir: Path, config: Mapping[str, Any], run_id: str, say: Say, offline: bool = False
    ) -> None:
        wandb = _import_wandb(run_dir)
        self.say = say

        def start(mode: str) -> Any:
            settings = wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            )
            return wandb.init(
                project=project,
                name=os.environ.get("WANDB_NAME") or run_dir.name,
                dir=run_dir,
                id=run_id,
                resume="allow",
                mode=mode,
                config=without_secrets(config),
                settings=settings,
                reinit="create_new",  # leaves the process-wide `wandb.run` alone
            )

        mode, why = ("offline", "tracking.offline=true") if offline else wandb_mode()
        if mode != "offline":
            try:
                self.run = start(mode)
            except Exception as error:
                # the service still holds the id of the run that failed to start
                wandb.teardown()
                mode, why = "offline", f"could not start online: {_one_line(error)}"
        if mode == "offline":
            self.run = start(mode)
            say(f"W&B: offline ({why}); upload later with: wandb sync {run_dir / 'wandb'}/offline-run-*")
        else:
            say(f"W&B: {self.run.url}")
        self.run.define_metric(WANDB_STEP, hidden=True)
        self.run.define_metric("*", step_metric=WANDB_STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # no `step=` argument: W&B drops points whose step is not larger than the last one it saw
        self.run.log({**metrics, WANDB_STEP: step})

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
        # the service writes the last records after `finish` has returned: only its end proves that they are on disk
        from wandb.sdk import wandb_setup

        if wandb_setup.singleton().most_recent_active_run is not None:
            return  # somebody else's run in this process still needs the service
        closing = threading.Thread(target=wandb_setup.teardown, args=(exit_code,), daemon=True)
        closing.start()
        closing.join(FINISH_TIMEOUT_S)
        if closing.is_alive():
            self.say(f"W&B: the upload did not end within {FINISH_TIMEOUT_S:.0f} s; `wandb sync` sends what is missing")


class TensorBoardLogger:
    """TensorBoard event files in `run_dir/tensorboard`. Resuming hides the points after `resumed_step`."""

    def __init__(self, run_dir: Path, resumed_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # lazily: slow to import, seldom used

        self.writer: Any = SummaryWriter(  # type: ignore[no-untyped-call, unused-ignore]
            str(run_dir / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, global_step=step)
        self.writer.flush()

    def finish(self, exit_code: int) -> None:
        self.writer.close()


@dataclass
class Guarded:
    """A logger whose failure is one warning and the end of that logger, never of the run."""

    name: str
    logger: Logger | None
    say: Say

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda logger: logger.log(step, metrics))

    def finish(self, exit_code: int) -> None:
        self._try(lambda logger: logger.finish(exit_code))

    def _try(self, call: Callable[[Logger], None]) -> None:
        if self.logger is None:
            return
        try:
            call(self.logger)
        except Exception as error:
            self.logger = None
            self.say(f"{self.name}: logging stopped: {_one_line(error)}")


@dataclass(kw_only=True)
class Tracker:
    """Fans metrics out to the loggers and remembers them. A context manager that finishes every logger on every exit.

    `history`: one dict for each logged step, {"step": n, metric: value}; of a resumed run, the earlier steps too.
    `ids`: what to keep in the checkpoint and to give back to `open_loggers` on resume, by logger.
    """

    loggers: list[Logger]
    history: list[dict[str, float]] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    finished: bool = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs everything measured in `step`: call it once for each step, with steps rising."""
        values = {name: float(value) for name, value in metrics.items()}
        self.history.append({"step": float(step), **values})
        for logger in self.loggers:
            logger.log(step, values)

    def finish(self, exit_code: int) -> None:
        """Closes every logger, also when one fails. Only the first call counts."""
        if self.finished:
            return
        self.finished = True
        errors = []
        for logger in self.loggers:
            try:
                logger.finish(exit_code)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code_of(error))


def open_loggers(
    cfg: TrackingConfig,
    run_dir: Path,
    config_dict: Mapping[str, Any],
    state_ids: Mapping[str, str],
    resumed_step: int,
    say: Say | None = None,
) -> Tracker:
    """Opens the loggers that `cfg` asks for, in `run_dir`, which exists.

    `config_dict` is stored in W&B without its secrets; `state_ids` are `Tracker.ids` of the run that is resumed (else
    empty); `resumed_step` is the step of the checkpoint (0 for a new start). `say` shows one line to the user (default:
    stderr).
    """
    say = say or _print_to_stderr
    path = run_dir / "metrics.jsonl"
    loggers: list[Logger] = [JsonlLogger(path, resumed_step)]
    ids = dict(state_ids)

    def add(name: str, make: Callable[[], Logger]) -> None:
        try:
            loggers.append(Guarded(name, make(), say))
        except Exception as error:
            say(f"{name}: not used: {_one_line(error)}")

    try:
        if cfg.wandb and os.environ.get("WANDB_MODE", "").lower() != "disabled":
            run_id = ids.setdefault("wandb", os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
            add("W&B", lambda: WandbLogger(cfg.project, run_dir, config_dict, run_id, say, cfg.offline))
        if cfg.tensorboard:
            add("TensorBoard", lambda: TensorBoardLogger(run_dir, resumed_step))
    except BaseException as error:  # Ctrl-C while W&B connects: what is open must still be finished
        Tracker(loggers=loggers).finish(exit_code_of(error))
        raise
    return Tracker(loggers=loggers, history=read_metrics(path), ids=ids)


def keep_steps(path: Path, last: int) -> None:
    """Leaves the whole lines of steps up to `last` in a JSON-lines file; none when that is 0."""
    kept = [line for step, line in _read_lines(path) if step <= last] if last else []
    write_text(path, "".join(f"{line}\n" for line in kept))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl as `Tracker.history` has them; null is read as nan, a half-written line left out."""
    rows = []
    for _, line in _read_lines(path):
        row = json.loads(line)
        row.pop("time", None)
        rows.append({name: math.nan if value is None else float(value) for name, value in row.items()})
    return rows


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of a process that ends with `error`: 0 for none, 130 for Ctrl-C, a SystemExit's own, else 1."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _import_wandb(run_dir: Path) -> Any:
    """W&B, whose import makes temporary folders that a killed process leaves behind: they come into the run folder."""
    folder = run_dir / "wandb"
    folder.mkdir(exist_ok=True)
    usual, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        import wandb
    finally:
        tempfile.tempdir = usual
    return wandb


def wandb_mode() -> tuple[str, str]:
    """The mode to start W&B in, and why. Never a mode in which W&B would ask for a login on the terminal."""
    asked = os.environ.get("WANDB_MODE", "").lower()
    if asked in ("offline", "dryrun"):
        return "offline", f"WANDB_MODE={asked}"
    import wandb

    settings: Any = wandb.setup(wandb.Settings(silent=True)).settings
    url = os.environ.get("WANDB_BASE_URL") or settings.base_url
    if not (os.environ.get("WANDB_API_KEY") or settings.api_key or settings.identity_token_file or _netrc_has(url)):
        return "offline", "no API key; `wandb login` stores one"
    unreachable = _unreachable(url)
    if unreachable:
        return "offline", unreachable
    return ("shared" if asked == "shared" else "online"), ""


SECRET = re.compile(
    r"(^|_)(secrets?|passwords?|passwd|passphrase|credentials?|bearer|authorization|auth|(api|auth|access|hub|hf)_tokens?"
    r"|(api|access|private|secret|signing|encryption|ssh|auth)_?keys?)($|_)|^key$|(^|_)token$"
)
MODEL_TOKEN = re.compile(r"(^|_)(bos|eos|pad|unk|mask|cls|sep|stop|image|special|per)_token$")  # words, not secrets


def without_secrets(value: Any) -> Any:
    """A copy of a config without the entries whose key looks like a secret, and without user:password in URLs."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items() if not _is_secret(str(key))}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return re.sub(r"://[^/@\s]+@", "://", value) if isinstance(value, str) else value


def _is_secret(key: str) -> bool:
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key).replace("-", "_").replace(".", "_").lower()
    return SECRET.search(words) is not None and MODEL_TOKEN.search(words) is None


def _netrc_has(url: str) -> bool:
    """Whether the user's netrc, where `wandb login` writes, has a password for the host of `url`."""
    named = os.environ.get("NETRC")
    host = urlsplit(url).netloc
    # a key of the service's older address is still accepted at its newer one
    hosts = {host, "api.wandb.ai"} if not os.environ.get("WANDB_BASE_URL") else {host}
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if hosts & netrc.netrc(path).hosts.keys():
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _unreachable(url: str) -> str:
    """Empty if a connection to the host of `url` (or to the proxy on the way) opens within 3 s, else the reason."""
    scheme = urlsplit(url).scheme
    host = urlsplit(url).hostname or ""
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)
    target = urlsplit(proxy if proxy and "://" in proxy else f"http://{proxy}") if proxy else urlsplit(url)
    address = (target.hostname or "", target.port or (443 if target.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"{address[0]}:{address[1]} cannot be reached: {_one_line(error)}"
    return ""


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """(step, line) of each whole line of a JSON-lines file with steps; empty without a file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append((int(json.loads(line)["step"]), line))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
