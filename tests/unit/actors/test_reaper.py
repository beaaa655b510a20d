"""The reaper: when the driver's pipe closes, what carries the mark is killed and the folder goes; nothing else."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from actors import reaper

SLEEP = [sys.executable, "-I", "-S", "-c", "import sys; print('up', flush=True); sys.stdin.read()"]


class Scene:
    """A folder, a mark, and processes that wait for ever."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, f"TANDEM_TEST={uuid.uuid4().hex}"
        self.started: list[subprocess.Popen[bytes]] = []

    def child(self, *marks: str) -> subprocess.Popen[bytes]:
        env = os.environ | dict(mark.split("=", 1) for mark in marks)
        process = subprocess.Popen(SLEEP, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process

    def reaper(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", reaper.__file__, self.mark, str(self.folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.started.append(process)
        return process


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    folder = tmp_path / "run"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "socket").write_text("x")
    scene = Scene(folder)
    yield scene
    for process in scene.started:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def test_reaper_closed_pipe_kills_marked_processes_and_removes_the_folder(scene: Scene) -> None:
    marked = [scene.child(scene.mark), scene.child(scene.mark, "OTHER=1")]
    bystander = scene.child(f"{scene.mark}0")
    process = scene.reaper()
    assert process.stdin is not None
    process.stdin.write(b"alive")
    process.stdin.flush()
    assert process.poll() is None and all(child.poll() is None for child in marked)
    process.stdin.close()
    assert [child.wait(timeout=30) for child in marked] == [-9, -9]
    assert process.wait(timeout=30) == 0
    assert not scene.folder.exists()
    assert bystander.poll() is None


def test_reaper_kills_what_writes_in_the_folder_but_not_the_driver_nor_who_reads(scene: Scene) -> None:
    """As Ray's agents do: their names lie over their environment, where no mark can be read then."""
    log = scene.folder / "deep" / "log"
    with log.open("w") as out:
        writer = subprocess.Popen(SLEEP, stdin=subprocess.PIPE, stdout=out)
        scene.started.append(writer)
        with log.open() as read:
            reader = subprocess.Popen(SLEEP, stdin=subprocess.PIPE, pass_fds=(read.fileno(),))
        scene.started.append(reader)
        process = scene.reaper()
        process.communicate(timeout=30)
        assert writer.wait(timeout=30) == -9  # this process, the reaper's parent, writes there too and goes on
    assert reader.poll() is None and not scene.folder.exists()


def test_reaper_driver_killed_does_the_same(scene: Scene) -> None:
    """The pipe's other end belongs to a process that gets SIGKILL: the kernel closes it."""
    child = scene.child(scene.mark)
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-I', '-S', {reaper.__file__!r}, {scene.mark!r}, "
        f"{str(scene.folder)!r}], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    driver = subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    scene.started.append(driver)
    assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
    driver.kill()
    assert child.wait(timeout=30) == -9


def test_reaper_nothing_marked_still_removes_the_folder(scene: Scene) -> None:
    process = scene.reaper()
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not scene.folder.exists()


def test_marked_whole_variables_only(scene: Scene) -> None:
    child, other = scene.child(scene.mark), scene.child(f"X{scene.mark}")
    found = reaper.marked(scene.mark.encode())
    assert child.pid in found
    assert other.pid not in found and os.getpid() not in found


MAPS = [
    sys.executable,
    "-I",
    "-c",
    "import multiprocessing, sys\n"
    "from multiprocessing import resource_tracker, shared_memory\n"
    "resource_tracker.register = lambda *_: None\n"  # or it would clean up, as it does not after SIGKILL of both
    "made = shared_memory.SharedMemory(create=True, size=4096)\n"
    "lock = multiprocessing.get_context('spawn').Lock()\n"
    "print(made.name, 'sem.' + lock._semlock.name[1:], flush=True); sys.stdin.read()",
]


def holder(scene: Scene, *marks: str) -> tuple[subprocess.Popen[bytes], list[Path]]:
    env = os.environ | dict(mark.split("=", 1) for mark in marks)
    process = subprocess.Popen(MAPS, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    scene.started.append(process)
    assert process.stdout is not None
    return process, [Path("/dev/shm") / name for name in process.stdout.readline().decode().split()]


def test_reaper_unlinks_shared_memory_of_marked_processes_only(scene: Scene) -> None:
    _, ours = holder(scene, scene.mark)
    gone, earlier = holder(scene, scene.mark)
    _, theirs = holder(scene)
    try:
        process = scene.reaper()
        assert process.stdin is not None
        process.stdin.write(b"look")
        process.stdin.flush()
        deadline = time.monotonic() + 20
        while process.poll() is None and not reaper.shared_files([gone.pid]):
            assert time.monotonic() < deadline
        process.stdin.close()
        assert process.wait(timeout=20) == 0
        assert not any(path.exists() for path in ours + earlier) and all(path.exists() for path in theirs)
    finally:
        for path in ours + earlier + theirs:
            path.unlink(missing_ok=True)
