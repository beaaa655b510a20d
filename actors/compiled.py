"""C++ that is compiled when it is first asked for: once per machine, and never in the way of a later start.

torch and DeepSpeed guard a compilation with a file named `lock` and wait for ever for one that a killed process left.
Here a build happens under a lock that the kernel takes back from a dead process, in a folder of that attempt alone (its
orphaned compilers may go on writing there), and is moved to its place only when it is whole.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Module = TypeVar("Module")

ROOT_KEY = "TORCH_EXTENSIONS_DIR"  # torch builds extension NAME in the folder NAME of this one
POLL_S = 0.1


def cache_root() -> Path:
    """Where compiled code is kept: a folder of Tandem's own in TORCH_EXTENSIONS_DIR, or in the user's cache."""
    if os.environ.get(ROOT_KEY):
        return Path(os.environ[ROOT_KEY]) / "tandem"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def machine_folder() -> Path:
    """The part of `cache_root` for this processor and these packages: what is built for one does not run on others."""
    parts = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed")]
    parts += [platform.python_version(), platform.machine(), os.environ.get("CXX", "")]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        parts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return cache_root() / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def search_path() -> str:
    """PATH, and behind it the folder of this environment's programs: pip puts ninja there."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def missing_tools(names: tuple[str, ...]) -> list[str]:
    """Those of `names` that are not there; CXX, where set, stands for the C++ compiler."""
    wanted = [os.environ.get("CXX") or name if name in ("c++", "g++") else name for name in names]
    return [name for name in wanted if shutil.which(name.split()[0], path=search_path()) is None]


@contextlib.contextmanager
def only_one(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds the lock of this file, which ends with the process. Raises TimeoutError when another keeps it so long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("a+") as file:  # not inherited by compilers: an orphan must not hold it
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = path.read_text().strip() or "unknown"
                    raise TimeoutError(
                        f"{path}: process {holder} has been compiling for {timeout_s:g} s; end it, or raise "
                        "trainer.timeout_s"
                    ) from None
                time.sleep(POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def load(name: str, build: Callable[[], Module], timeout_s: float) -> Module:
    """What `build` gives: it compiles extension `name` into TORCH_EXTENSIONS_DIR, or finds it there, and loads it."""
    folder = machine_folder()
    with only_one(folder / f"{name}.flock", timeout_s):
        for left in folder.glob(f"{name}-building-*"):
            shutil.rmtree(left, ignore_errors=True)
        (folder / name / "lock").unlink(missing_ok=True)  # of a process that was killed while it loaded
        if (folder / name).exists():
            return built_in(folder, build)
        attempt = Path(tempfile.mkdtemp(prefix=f"{name}-building-", dir=folder))
        module = built_in(attempt, build)
        (attempt / name).rename(folder / name)
        shutil.rmtree(attempt, ignore_errors=True)
        return module


@contextlib.contextmanager
def kept_whole(folder: Path, timeout_s: float) -> Iterator[None]:
    """For a compiler that writes its results in place and takes what it finds: nothing half-written stays in `folder`.

    One process at a time; what one has left that was killed in here is thrown away by the next.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    with only_one(folder.with_name(f"{folder.name}.flock"), timeout_s):
        if unfinished.exists():
            shutil.rmtree(folder, ignore_errors=True)
        unfinished.touch()
        try:
            yield
        finally:  # what a killed process does not reach
            unfinished.unlink()


def built_in(folder: Path, build: Callable[[], Module]) -> Module:
    """What `build` gives, with `folder` in the place of TORCH_EXTENSIONS_DIR."""
    before = {key: os.environ.get(key) for key in (ROOT_KEY, "PATH")}
    os.environ |= {ROOT_KEY: str(folder), "PATH": search_path()}
    try:
        return build()
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
