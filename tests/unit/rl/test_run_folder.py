import json
import math
import os
import subprocess
from datetime import date
from pathlib import Path

import pytest

from conf.errors import ConfigError
from rl.run_folder import (
    collect_versions,
    find_latest,
    git_state,
    make,
    resolve_run_dir,
    status,
    write_config,
    write_json,
    write_versions,
)


def test_make_counts_up_when_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [make("runs", "sort") for _ in range(3)]
    today = f"{date.today():%Y-%m-%d}"
    assert [f.name for f in folders] == [f"{today}-sort", f"{today}-sort-2", f"{today}-sort-3"]
    assert all(f.is_absolute() and f.is_dir() for f in folders)


def test_find_latest_takes_the_newest_of_exactly_this_name(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent", "a") is None
    for name in (
        "2025-01-02-a",
        "2025-03-01-a",
        "2025-03-01-a-2",
        "2025-03-01-a-10",
        "2026-01-01-b-a",
        "2026-01-01-ab",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "2027-01-01-a").write_text("a file")
    latest = find_latest(tmp_path, "a")
    assert latest is not None and latest.name == "2025-03-01-a-10"


def test_a_number_in_a_name_is_not_the_number_of_a_run(tmp_path: Path) -> None:
    first = make(tmp_path, "a")
    other = make(tmp_path, "a-2")
    assert first.name + "-2" == other.name
    assert find_latest(tmp_path, "a") == first
    assert find_latest(tmp_path, "a-2") == other
    assert make(tmp_path, "a").name == first.name + "-3"


def test_resolve_continues_only_what_is_unfinished(tmp_path: Path) -> None:
    first = resolve_run_dir("a", None, "auto", root=tmp_path)
    assert resolve_run_dir("a", None, "auto", root=tmp_path) == first
    assert resolve_run_dir("a", None, "never", root=tmp_path) != first
    latest = find_latest(tmp_path, "a")
    assert latest is not None
    write_json(latest / "summary.json", {"status": "interrupted"})
    assert status(latest) == "interrupted"
    assert resolve_run_dir("a", None, "auto", root=tmp_path) == latest
    write_json(latest / "summary.json", {"status": "finished"})
    assert resolve_run_dir("a", None, "auto", root=tmp_path, continues=lambda folder: True) == latest
    assert resolve_run_dir("a", None, "auto", root=tmp_path) not in (first, latest)


def test_explicit_run_dir_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = resolve_run_dir("a", "x/y", "auto")
    assert folder == tmp_path / "x" / "y" and folder.is_dir()
    assert not (tmp_path / "runs").exists()
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "run"
    with pytest.raises(ConfigError, match=str(target)):
        resolve_run_dir("a", target, "never")
    with pytest.raises(ConfigError, match=str(target)):
        resolve_run_dir("a", None, "never", root=target)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(ConfigError, match="disk is full"):
        resolve_run_dir("a", tmp_path, "never")


def test_write_json_is_atomic_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": math.nan, "b": [1.5, -math.inf], "c": "text"})
    assert json.loads(path.read_text()) == {"a": None, "b": [1.5, None], "c": "text"}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text())["c"] == "text"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_status_of_a_run_without_summary(tmp_path: Path) -> None:
    assert status(tmp_path) is None
    (tmp_path / "summary.json").write_text("{half")
    assert status(tmp_path) is None


def test_config_and_versions_are_written(tmp_path: Path) -> None:
    write_config(tmp_path, "name: a\n")
    versions = write_versions(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "name: a\n"
    assert json.loads((tmp_path / "versions.json").read_text()) == versions
    assert versions["packages"]["torch"] and versions["host"] and versions["num_cpus"] >= 1
    assert collect_versions() == versions


def test_git_state_tells_commit_and_dirt(tmp_path: Path) -> None:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*arguments: str) -> None:
        environment = {**os.environ, **identity, **quiet}
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, env=environment)

    assert git_state(tmp_path) == (None, None)
    git("init")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "x")
    commit, dirty = git_state(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "f").write_text("2")
    assert git_state(tmp_path) == (commit, True)
    inside = tmp_path / "inside"
    inside.mkdir()
    assert git_state(inside) == (None, None)
