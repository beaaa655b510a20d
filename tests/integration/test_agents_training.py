"""The whole path of an environment: warm start from its oracle, episodes, updates, pushes, rollouts to look at; and
that a run which was cut in two plays the same episodes."""

from pathlib import Path

import pytest

from scripts.view_rollouts import main as view
from tests.integration.scripts import Job, read_lines, run_folder, start

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN_S = 240.0
SMALL = (
    "experiment=tiny_guess",
    "prompts_per_step=8",
    "samples_per_prompt=4",
    "algo.num_mini_batches=1",
    "trainer.schedule=constant",
    "sft.num_steps=20",
    "sft.batch_size=32",
    "data.size=64",
    "evaluation.every=0",
    "tracking=none",
    "tracking.samples_per_step=32",
)


def train(folder: Path, model: Path, *more: str) -> Job:
    return start("train.py", folder, *SMALL, f"model.path={model}", *more).wait(RUN_S).check()


@pytest.fixture(scope="module")
def straight(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(train(tmp_path_factory.mktemp("guess"), tiny_folder, "num_steps=3").folder)


def test_agents_are_trained_on_what_the_engine_sampled(straight: Path) -> None:
    rows = [row for row in read_lines(straight / "metrics.jsonl") if row["step"] >= 1]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch/max"] <= 1e-4 and row["rollout/num_failed"] == 0
        assert 1 < row["env/turns"] <= 4
        assert row["env/forks"] == 0


def test_rollouts_of_agents_can_be_looked_at(straight: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert view([str(straight), "--html", str(page)]) == 0
    text = page.read_text()
    assert "1-15?" in text
    assert "version 2" in text
    for rollout in read_lines(straight / "rollouts.jsonl"):
        assert rollout["status"] == "ok"
        for row in rollout["rows"]:
            assert all(
                version == rollout["step"] - 1 for version, t in zip(row["versions"], row["trained"], strict=True) if t
            )


@pytest.mark.slow
def test_agents_of_a_run_that_was_cut_in_two_play_the_same_episodes(
    straight: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    train(tmp_path, tiny_folder, "num_steps=2")
    cut = run_folder(train(tmp_path, tiny_folder, "num_steps=3").folder)
    texts = [[r["completion"] for r in read_lines(run / "rollouts.jsonl")] for run in (straight, cut)]
    assert texts[0] == texts[1]
