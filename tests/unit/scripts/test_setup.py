"""scripts/setup in its own folder, with a PATH of stand-ins: its messages, and when it installs. Fetches nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = (
    "bash", "env", "dirname", "sha256sum", "cut", "cat", "df", "awk", "du", "flock", "grep", "tail", "wc", "sleep",
    "mkdir", "cp", "rm", "touch",
)  # fmt: skip

# Answers what setup asks of a Python, and writes down each call. `-m venv DIR` copies itself to DIR/bin/python.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$1 $2" in
  "-V "*) echo "Python VERSION" ;;
  "-c "*version_info*) [ "VERSION" = 3.11.9 ] ;;
  "-c "*ensurepip*) exit VENV ;;
  "-c "*vllm*) echo "the index is not there"; exit "${IMPORTS:-0}" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip")
    case "$*" in
      *"install"*"-r "*) echo "Collecting something"; echo "the index is not there"; exit "${PIP_REQUIREMENTS:-0}" ;;
      *"install"*"-e ."*) exit "${PIP_PROJECT:-0}" ;;
    esac ;;
esac
"""


class Scene:
    """A checkout with only what setup reads, and the folder that is its whole PATH."""

    def __init__(self, folder: Path):
        self.project, self.path, self.calls = folder / "project", folder / "bin", folder / "calls"
        for name in ("scripts/setup", "requirements/cpu.txt", "requirements/envs.txt", "pyproject.toml"):
            (self.project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.project / name)
        self.path.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.path / tool).symlink_to(found)
        for tool in ("g++", "git"):
            self.tool(tool, "#!/bin/sh\n")
        self.python("python3.11")
        self.env = {"CALLS": str(self.calls), "TANDEM_DISK_GB": "0"}

    def tool(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name: str, version: str = "3.11.9", venv: bool = True) -> Path:
        return self.tool(name, PYTHON.replace("VERSION", version).replace("VENV", "0" if venv else "1"))

    def setup(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs it; what Python was asked goes to `pip_calls` and `python_calls`."""
        self.calls.write_text("")
        return subprocess.run(
            [str(self.project / "scripts" / "setup"), *options],
            env={"PATH": str(self.path), **self.env, **env},
            capture_output=True,
            text=True,
            timeout=30,
        )

    def refused(self, **env: str) -> str:
        """The message of a setup that must not get as far as an installation."""
        result = self.setup(**env)
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.startswith("setup: ") and result.stderr.count("\n") == 1
        assert self.installs() == [] and not (self.project / ".venv").exists()
        return result.stderr

    def installs(self) -> list[str]:
        """What pip was asked to install in the last setup: "packages" or "project"."""
        calls = [line for line in self.calls.read_text().splitlines() if "pip install" in line]
        return ["packages" if "-r requirements/cpu.txt" in line else "project" for line in calls]

    def installed(self, **env: str) -> list[str]:
        """As `installs`, after a setup that must succeed."""
        result = self.setup(**env)
        assert result.returncode == 0, result.stderr
        return self.installs()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize(("tool", "package"), [("g++", "the package g++ on Debian"), ("git", "Install git")])
def test_missing_tool_is_named_with_what_to_install(scene: Scene, tool: str, package: str) -> None:
    (scene.path / tool).unlink()
    message = scene.refused()
    assert f"{tool} was not found" in message and package in message


def test_python_missing_says_what_is_there_instead(scene: Scene) -> None:
    (scene.path / "python3.11").unlink()
    message = scene.refused()
    for piece in ["Python 3.11 was not found", "python3 is missing", "python3.11-venv", "TANDEM_PYTHON"]:
        assert piece in message
    scene.python("python3", version="3.12.1")
    assert "python3 is Python 3.12.1" in scene.refused()


def test_python_without_venv_is_named_with_its_package(scene: Scene) -> None:
    path = scene.python("python3.11", venv=False)
    message = scene.refused()
    for piece in [str(path), "lacks the modules venv and ensurepip", "python3.11-venv", "TANDEM_PYTHON"]:
        assert piece in message


def test_python_without_venv_another_one_is_taken(scene: Scene) -> None:
    scene.python("python3.11", venv=False)
    scene.python("python3")
    assert scene.installed() == ["packages", "project"]


def test_python_given_by_hand_is_checked_and_used(scene: Scene) -> None:
    other = scene.python("mine", version="3.10.2")
    assert f"TANDEM_PYTHON={other} is not a Python 3.11" in scene.refused(TANDEM_PYTHON=str(other))
    assert "TANDEM_PYTHON=/nowhere is not a Python 3.11" in scene.refused(TANDEM_PYTHON="/nowhere")
    other = scene.python("mine", venv=False)
    assert f"TANDEM_PYTHON={other} lacks the modules venv" in scene.refused(TANDEM_PYTHON=str(other))
    (scene.path / "python3.11").unlink()
    other = scene.python("mine")
    assert scene.installed(TANDEM_PYTHON=str(other)) == ["packages", "project"]


def test_envs_asked_for_once_are_installed_from_then_on(scene: Scene) -> None:
    assert scene.installed() == ["packages", "project"]
    (scene.path / "make").symlink_to("/bin/true")
    assert scene.setup("--envs").returncode == 0
    assert "-r requirements/cpu.txt -r requirements/envs.txt" in scene.calls.read_text()
    assert scene.installed() == []
    (scene.project / "requirements" / "envs.txt").write_text("other==1\n")
    assert scene.installed() == ["packages", "project"]
    assert "-r requirements/envs.txt" in scene.calls.read_text()


def test_envs_without_make_leave_out_what_is_built_with_it(scene: Scene) -> None:
    result = scene.setup("--envs")
    assert "make was not found; jericho is built with it" in result.stdout
    (scene.path / "make").symlink_to("/bin/true")
    assert "jericho" not in (scene.project / ".venv" / "envs.txt").read_text()
    (scene.project / ".venv" / "tandem-setup").unlink()
    assert "make" not in scene.setup("--envs").stdout


def test_option_that_there_is_not_is_refused(scene: Scene) -> None:
    result = scene.setup("--env")
    assert (result.returncode, result.stderr) == (1, "setup: --env is not an option; the only one is --envs\n")


def test_disk_too_small_gives_both_sizes(scene: Scene) -> None:
    message = scene.refused(TANDEM_DISK_GB="1000000")
    for piece in ["too little disk space", str(scene.project), "MB free", "1024000000 MB more needed"]:
        assert piece in message


def test_second_call_installs_nothing_and_says_nothing(scene: Scene) -> None:
    assert scene.installed() == ["packages", "project"]
    result = scene.setup()
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert scene.installs() == []
    assert scene.calls.read_text().split("\n") == ["-V", ""]  # no more than the version of .venv's Python


def test_second_call_needs_no_tools(scene: Scene) -> None:
    scene.installed()
    for tool in ("g++", "git", "python3.11"):
        (scene.path / tool).unlink()
    assert scene.installed(TANDEM_DISK_GB="1000000") == []


@pytest.mark.parametrize("name", ["requirements/cpu.txt", "pyproject.toml"])
def test_changed_list_installs_again(scene: Scene, name: str) -> None:
    scene.installed()
    with (scene.project / name).open("a") as file:
        file.write("# changed\n")
    assert scene.installed() == ["packages", "project"]
    assert scene.installed() == []


def test_moved_folder_installs_again(scene: Scene) -> None:
    """The scripts of .venv hold absolute paths."""
    scene.installed()
    scene.project = scene.project.rename(scene.project.with_name("moved"))
    assert scene.installed() == ["packages", "project"]


@pytest.mark.parametrize(
    ("step", "done"),
    [
        ("PIP_REQUIREMENTS", ["packages"]),
        ("PIP_PROJECT", ["packages", "project"]),
        ("IMPORTS", ["packages", "project"]),
    ],
)
def test_failed_install_shows_the_end_of_the_log_and_is_tried_again(scene: Scene, step: str, done: list[str]) -> None:
    result = scene.setup(**{step: "1"})
    assert result.returncode == 1 and scene.installs() == done
    assert "failed. The last lines of" in result.stderr and "the index is not there" in result.stderr
    assert scene.installed() == ["packages", "project"]
    assert scene.installed() == []


def test_killed_install_is_never_built_upon(scene: Scene) -> None:
    """SIGKILL while packages are written: they may look complete."""
    scene.installed()
    (scene.project / ".venv" / "half-written").touch()
    (scene.project / ".venv" / "tandem-unfinished").touch()
    assert scene.installed() == ["packages", "project"]
    assert not (scene.project / ".venv" / "half-written").exists()


def test_two_at_once_install_once(scene: Scene) -> None:
    scene.calls.write_text("")
    slow = (scene.path / "python3.11").read_text().replace('echo "Collecting something"', "sleep 1")
    scene.tool("python3.11", slow)
    command = [str(scene.project / "scripts" / "setup")]
    env = {"PATH": str(scene.path), **scene.env}
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=30)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert scene.installs() == ["packages", "project"]
    assert sum("waiting for it" in output for output in outputs) == 1


def test_called_from_another_folder_works_on_its_own(scene: Scene, tmp_path: Path) -> None:
    here = tmp_path / "elsewhere"
    here.mkdir()
    scene.calls.write_text("")
    env = {"PATH": str(scene.path), **scene.env}
    subprocess.run(
        [os.path.relpath(scene.project / "scripts" / "setup", here)], env=env, cwd=here, check=True, timeout=30
    )
    assert (scene.project / ".venv" / "tandem-setup").exists() and list(here.iterdir()) == []
