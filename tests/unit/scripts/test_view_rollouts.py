"""The viewer: what it chooses, what it shows, and that text of a rollout cannot become markup."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.types import Group, Prompt, Status, Trajectory
from rollout.record import MOST_TOKENS, describe_rollout
from scripts.view_rollouts import main


class Characters:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def rollout(step: int = 1, text: str = "<b>hi</b>", count: int = 1, **more: Any) -> dict[str, Any]:
    ids = list(map(ord, "ab" + text)) * count
    mask = ([False] * 2 + [True] * len(text)) * count
    trajectory = Trajectory(
        token_ids=ids,
        prompt_len=2,
        action_mask=mask,
        logprobs=[-0.5 if m else 0.0 for m in mask],
        versions=[4 if m else -1 for m in mask],
        reward=1.5,
        token_rewards=[0.0] * (len(ids) - 1) + [0.25],
        text=text,
        transcript=[
            {"kind": "message", "agent": "main", "role": "user", "content": "what & why"},
            {"kind": "action", "agent": "main", "segment": 1, "text": text, "reward": 0.25},
        ],
        **more,
    )
    prompt = Prompt(index=0, token_ids=[], record={"number": 3})
    group = Group(position=7, prompt=prompt, trajectories=[trajectory], version=4)
    return describe_rollout(step, group, trajectory, Characters())


def write(folder: Path, *rollouts: dict[str, Any]) -> Path:
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    return folder


def test_terminal_shows_the_newest_step_with_turns_and_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path, rollout(step=1, text="old"), rollout(step=2))
    assert main([str(run), "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "step 2 · group 7 · ended · reward 1.75" in shown
    assert "<b>hi</b>" in shown
    assert "[+0.25]" in shown
    assert "version 4" in shown
    assert "old" not in shown


def test_page_escapes_what_was_said_and_tells_of_each_token(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([str(write(tmp_path, rollout())), "--html", str(page)]) == 0
    text = page.read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;hi&lt;/b&gt;" in text
    assert "what &amp; why" in text
    assert "logprob -0.5 (p 0.607), version 4, reward +0.25" in text
    assert "http" not in text  # nothing is loaded from elsewhere


def test_failed_chooses_failures_and_shows_their_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = rollout(text="bad", status=Status.env_failed, error="Traceback\nKeyError: 3")
    assert main([str(write(tmp_path, rollout(text="fine"), bad)), "--failed"]) == 0
    shown = capsys.readouterr().out
    assert "KeyError: 3" in shown
    assert "env_failed · no reward" in shown
    assert "fine" not in shown


def test_long_rows_lose_their_middle_and_say_so(tmp_path: Path) -> None:
    long = rollout(text="x" * 98, count=100)
    assert len(long["rows"][0]["tokens"]) == MOST_TOKENS
    page = tmp_path / "page.html"
    assert main([str(write(tmp_path, long)), "--html", str(page)]) == 0
    assert f"[{100 * 100 - MOST_TOKENS} tokens left out]" in page.read_text()


@pytest.mark.parametrize(
    ("line", "code", "what"), [("{", 2, "rollouts.jsonl:1: not JSON"), ("", 1, "holds no rollouts yet")]
)
def test_run_without_usable_rollouts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, what: str
) -> None:
    (tmp_path / "rollouts.jsonl").write_text(line)
    assert main([str(tmp_path)]) == code
    assert what in capsys.readouterr().err


def test_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "none: there is no such run folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "it has no rollouts (yet)" in capsys.readouterr().err


def test_turn_that_was_cut_off_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = rollout(text="unfinished")
    cut["transcript"][1]["truncated"] = True
    single = rollout(text="sing", truncated=True) | {"transcript": []}
    run, page = write(tmp_path, rollout(text="finished"), cut, single), tmp_path / "page.html"
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[cut off") == 2 and "unfinished [cut off" in shown and "sing [cut off" in shown
    assert main([str(run), "--html", str(page)]) == 0
    assert page.read_text().count("[cut off") == 2
