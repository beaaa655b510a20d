"""Code that is compiled at first use: once, by one process at a time, and in spite of processes that were killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors import compiled
from actors.compiled import ROOT_KEY, cache_root, kept_whole, load, machine_folder, missing_tools, only_one

HOLDER = """
import os, pathlib, sys, time
from actors.compiled import load

def build():
    folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "thing"
    folder.mkdir(exist_ok=True)
    (folder / "lock").touch()
    print("compiling", flush=True)
    time.sleep(60)

load("thing", build, 1.0)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ROOT_KEY, str(tmp_path / "extensions"))
    return tmp_path / "extensions"


class Builder:
    """As torch's loader: makes what is not there, under a file `lock` of its own that must not be there."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.made: list[Path] = []
        self.wait_s = wait_s

    def __call__(self) -> str:
        folder = Path(os.environ[ROOT_KEY]) / "thing"
        folder.mkdir(exist_ok=True)
        (folder / "lock").touch(exist_ok=False)
        if not (folder / "thing.so").exists():
            time.sleep(self.wait_s)
            (folder / "thing.so").touch()
            self.made.append(folder)
        (folder / "lock").unlink()
        return "module"


def test_builds_once_in_a_folder_of_tandems_own(root: Path) -> None:
    build = Builder()
    assert [load("thing", build, 1.0) for _ in range(3)] == ["module"] * 3
    assert len(build.made) == 1
    assert (machine_folder() / "thing" / "thing.so").exists()
    assert [path.name for path in root.iterdir()] == ["tandem"]
    assert os.environ[ROOT_KEY] == str(root)


def test_cache_lies_in_the_users_where_torch_is_not_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ROOT_KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_root() == tmp_path / "cache" / "tandem"
    load("thing", Builder(), 1.0)
    assert ROOT_KEY not in os.environ
    assert list((tmp_path / "cache").rglob("thing.so"))


def test_another_compiler_or_processor_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_folder()
    assert machine_folder() == before
    monkeypatch.setenv("CXX", "clang++")
    assert machine_folder() != before


@pytest.mark.parametrize("whole", [False, True])
def test_start_after_a_killed_one_does_not_wait(whole: bool) -> None:
    """Killed while it compiled, or while it loaded what was there: `lock` is left behind in the folder it used."""
    if whole:
        load("thing", Builder(), 1.0)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "compiling\n"
        with pytest.raises(TimeoutError, match=rf"process {holder.pid} .* trainer.timeout_s"):
            load("thing", Builder(), 0.2)
        os.kill(holder.pid, signal.SIGKILL)
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()
    assert list(machine_folder().rglob("lock"))
    build = Builder()
    started = time.monotonic()
    assert load("thing", build, 5.0) == "module"
    assert time.monotonic() - started < 2
    assert len(build.made) == (0 if whole else 1)
    assert not list(machine_folder().rglob("lock")) and not list(machine_folder().glob("*building*"))


def test_failed_build_leaves_nothing_that_a_later_one_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        (Path(os.environ[ROOT_KEY]) / "thing").mkdir()
        raise RuntimeError("no headers")

    path = os.environ["PATH"]
    with pytest.raises(RuntimeError, match="no headers"):
        load("thing", fail, 1.0)
    assert os.environ["PATH"] == path
    assert not (machine_folder() / "thing").exists()
    build = Builder()
    load("thing", build, 1.0)
    assert len(build.made) == 1


def in_threads(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


def test_one_builds_while_the_others_wait(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine start together (processes there; a lock is that of an open file, so threads will do)."""
    monkeypatch.setattr(compiled, "built_in", lambda folder, build: build(folder))
    made, at_once = [], []

    def build(folder: Path) -> None:
        at_once.append(folder)
        assert len(at_once) == 1, "two at once"
        if not (folder / "thing").exists():
            time.sleep(0.3)
            (folder / "thing").mkdir()
            made.append(folder)
        at_once.pop()

    in_threads([lambda: load("thing", build, 5.0)] * 3)  # type: ignore[arg-type]
    assert len(made) == 1 and not at_once


def test_lock_is_free_again_after_an_error(root: Path) -> None:
    with pytest.raises(ValueError), only_one(root / "x.flock", 1.0):
        raise ValueError
    with only_one(root / "x.flock", 0.0):
        pass


def test_what_a_killed_compiler_half_wrote_is_not_taken_for_whole(root: Path) -> None:
    folder = root / "kernels"
    with kept_whole(folder, 1.0):
        folder.mkdir()
        (folder / "whole.so").touch()
    with kept_whole(folder, 1.0):
        assert (folder / "whole.so").exists()
    program = "import os, pathlib, signal, sys\nfrom actors.compiled import kept_whole\n"
    program += "with kept_whole(pathlib.Path(sys.argv[1]), 1.0):\n    (pathlib.Path(sys.argv[1]) / 'half.so').touch()\n"
    program += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    assert subprocess.run([sys.executable, "-c", program, str(folder)]).returncode == -signal.SIGKILL
    assert (folder / "half.so").exists()
    with kept_whole(folder, 0.0):
        assert not folder.exists()
        folder.mkdir()
        (folder / "whole.so").touch()
    with kept_whole(folder, 0.0):
        assert (folder / "whole.so").exists()


def test_missing_tools_are_those_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert missing_tools(("sh", "no-such-tool")) == ["no-such-tool"]
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    assert missing_tools(("c++", "sh")) == ["no-such-compiler -v"]
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert missing_tools(("ninja",)) == ["ninja"]
    (tmp_path / "ninja").touch(mode=0o755)  # beside the python of an environment that is not activated
    assert missing_tools(("ninja",)) == []
