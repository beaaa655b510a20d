"""A process that is killed while it compiles does not hold up the next start, nor do its orphaned compilers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults]

# torch's own loader, with its lock, for a module without torch's headers: they alone take a minute to compile.
SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_answer() {
    PyObject* made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "answer", 42);
    return made;
}
"""
ANSWER = """
import sys
from torch.utils.cpp_extension import load
from actors import compiled
print(compiled.load("answer", lambda: load("answer", [sys.argv[1]]), 60.0).answer)
"""
CPU_ADAM = """
import torch
from actors.engine import OptimizerSpec, cpu_adam
from conf.choices import Optimizer
weights = torch.nn.Parameter(torch.ones(100))
weights.grad = torch.ones(100)
optimizer = cpu_adam(
    [{"params": [weights]}],
    OptimizerSpec(kind=Optimizer.cpu_adam, momentum=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0,
                  grad_clip=0.0, compile_timeout_s=60.0),
)
optimizer.param_groups[0]["lr"] = 0.5
optimizer.step()
assert torch.allclose(weights, torch.full_like(weights, 0.5)), weights
print(42)
"""


@contextmanager
def started(program: str, *args: str, env: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """The program in a session of its own, all of which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(what: str, found: "subprocess.Popen[str]", root: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not list(root.rglob(what)):
        assert found.poll() is None and time.monotonic() < deadline, found.communicate()
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_killed_compilation_leaves_a_lock_that_nobody_waits_for(tmp_path: Path) -> None:
    source, compiler, root = tmp_path / "answer.cpp", tmp_path / "slow_compiler", tmp_path / "cache"
    source.write_text(SOURCE)
    # only a compilation (-c) is held up, for as long as the file `hold` is there
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) touch {root}/tandem/compiling; '
                        f'while [ -e {tmp_path}/hold ]; do sleep 0.1; done;; esac\nexec c++ "$@"\n')  # fmt: skip
    compiler.chmod(0o755)
    (tmp_path / "hold").touch()
    env = {"TORCH_EXTENSIONS_DIR": str(root), "CXX": str(compiler)}
    with started(ANSWER, str(source), env=env) as first:
        wait_for("compiling", first, root, 60)
        (lock,) = root.rglob("lock")
        first.kill()  # the process alone: its compiler lives on, and so does torch's lock
        first.wait()
        assert lock.exists()
        (tmp_path / "hold").unlink()
        with started(ANSWER, str(source), env=env) as second:
            out, err = second.communicate(timeout=60)
        assert (second.returncode, out.strip()) == (0, "42"), err
    assert list(root.rglob("lock")) == [] == list(root.rglob("*-building-*"))
    (built,) = root.rglob("answer.so")
    made = built.stat().st_mtime_ns
    built.with_name("lock").touch()  # of a process that was killed while it loaded what was there
    with started(ANSWER, str(source), env=env) as third:
        out, err = third.communicate(timeout=60)
    assert (third.returncode, out.strip()) == (0, "42"), err
    assert built.stat().st_mtime_ns == made, "it was compiled again"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_compilation_of_cpu_adam_does_not_hold_up_the_next_start(tmp_path: Path) -> None:
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "DEEPSPEED_LOG_LEVEL": "error"}
    with started(CPU_ADAM, env=env) as first:
        wait_for("lock", first, tmp_path, 120)
        time.sleep(5)
        assert first.poll() is None
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert len(list(tmp_path.rglob("lock"))) == 1 and not list(tmp_path.rglob("*.so"))
    with started(CPU_ADAM, env=env) as second:
        out, err = second.communicate(timeout=1200)
    assert second.returncode == 0 and out.split()[-1] == "42", err
    assert list(tmp_path.rglob("lock")) == [] and len(list(tmp_path.rglob("cpu_adam/cpu_adam.so"))) == 1
