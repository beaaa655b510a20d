"""Bad input at the command line: exit code 2, one clear message, nothing started, nothing left behind, in seconds."""

import shutil
import time
from pathlib import Path

import pytest

from tests.faults.runs import Launch, Run, patience

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300, method="signal")]

LIMIT_S = 40.0  # some of it imports transformers: seconds on idle cores


@pytest.fixture(autouse=True)
def named(work: Path) -> None:
    """What the overrides below name."""
    (work / "file").write_text("")
    (work / "thing").mkdir()
    (work / "cut.jsonl").write_text('{"prompt": "ab="}\n{"prompt": \n')
    (work / "verdicts.py").write_text("def score(completion, record):\n    return float('nan')\n")


FILE = ("data=file", "data.template=plain")
# overrides (the last one of a key wins), pieces of the message
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "misspelt key": (("trainer.lrr=1",), ("trainer.lrr=1", "nearest: trainer.lr")),
    "model folder": (("model.path=nowhere",), ("model.path=nowhere", "no such folder")),
    "dataset line": ((*FILE, "data.path=cut.jsonl"), ("data.path", "cut.jsonl:2", "not JSON")),
    "reward": (("reward=function", "reward._target_=verdicts.score"), ("verdicts.score", "nan", "not a finite number")),
    "run folder": (("run_dir=file/run",), ("run_dir=", "file/run", "cannot be written")),
    "no checkpoint": (("resume=thing",), ("resume=thing", "manifest.json")),
}


def require_refused(run: Run, began: float, pieces: tuple[str, ...]) -> None:
    code = run.wait(LIMIT_S)
    assert code == 2, run.err
    assert run.err.startswith("configuration error: ") and run.err.count("configuration error") == 1
    assert "Traceback" not in run.err + run.out and run.out == ""
    assert run.err.count("\n") <= 3, f"more than one message:\n{run.err}"
    for piece in pieces:
        assert piece in run.err
    assert run.leftovers() == [] and not list(run.folder.glob("*"))
    assert time.monotonic() < began + patience(LIMIT_S)


def test_each_ends_at_once_with_one_message(launch: Launch, work: Path) -> None:
    before = sorted(path.name for path in work.iterdir())
    waiting = list(CASES.items())
    running: list[tuple[str, Run, float]] = []
    while waiting or running:  # two at a time
        while waiting and len(running) < 2:
            name, (overrides, _) = waiting.pop(0)
            running.append((name, launch(*overrides, name=name.replace(" ", "_")), time.monotonic()))
        name, run, began = running.pop(0)
        require_refused(run, began, CASES[name][1])
    shutil.rmtree(work / "__pycache__", ignore_errors=True)  # Python's, of the reward module
    assert sorted(path.name for path in work.iterdir()) == before


def test_a_sweep_with_one_bad_job_starts_none(launch: Launch, work: Path) -> None:
    run = launch("-m", "run_dir=null", "num_steps=1,0")
    require_refused(run, time.monotonic(), ("num_steps=0", ">= 1"))
    assert not (work / "runs").exists()
