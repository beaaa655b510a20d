import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from rl import summary as names
from rl.summary import build_summary, duration, final_table, plot_reward

KEYS = {
    "status", "steps", "reward_first", "reward_last", "eval_first", "eval_last", "eval_greedy_first",
    "eval_greedy_last", "mismatch_max", "rollout_tok_s", "train_tok_s", "sync_s_median", "step_s_median", "phases",
    "peak_rss_bytes", "wall_s",
}  # fmt: skip


def history() -> list[dict[str, float]]:
    rows: list[dict[str, float]] = [{names.STEP: 0, names.EVAL: 0.25, names.EVAL_GREEDY: 0.2}]
    for step in range(1, 11):
        rows.append(
            {
                names.STEP: step,
                names.REWARD: step / 10,
                names.MISMATCH: 1e-6 * step,
                names.ROLLOUT_TOK_S: 100.0,
                names.TRAIN_TOK_S: 50.0,
                names.STEP_S: 20.0 if step == 1 else 10.0,
                "time/rollout_s": 6.0,
                names.SYNC_S: 1.0,
            }
        )
    rows[-1] |= {names.EVAL: 0.9, names.EVAL_GREEDY: 0.95}
    return rows


def test_summary_holds_exactly_the_promised_keys() -> None:
    summary = build_summary(history(), status="finished", wall_s=110.0, peak_rss_bytes=5)
    assert summary.keys() == KEYS
    assert summary["steps"] == 10
    assert summary["reward_first"] == pytest.approx(0.2) and summary["reward_last"] == pytest.approx(0.9)
    assert (summary["eval_first"], summary["eval_last"]) == (0.25, 0.9)
    assert (summary["eval_greedy_first"], summary["eval_greedy_last"]) == (0.2, 0.95)
    assert summary["mismatch_max"] == pytest.approx(1e-5)
    assert summary["step_s_median"] == 10.0
    assert summary["phases"] == {"rollout": 6.0, "sync": 1.0} and summary["sync_s_median"] == 1.0


@pytest.mark.parametrize(("count", "first", "last"), [(1, 1.0, 1.0), (2, 1.0, 2.0), (5, 1.5, 4.5), (7, 2.0, 6.0)])
def test_first_and_last_steps_do_not_overlap(count: int, first: float, last: float) -> None:
    rows = [{names.STEP: step, names.REWARD: step} for step in range(1, count + 1)]
    summary = build_summary(rows, status="finished", wall_s=1.0)
    assert (summary["reward_first"], summary["reward_last"]) == (first, last)


def test_a_mismatch_that_is_not_finite_is_not_hidden() -> None:
    rows = [*history(), {names.STEP: 11, names.MISMATCH: math.nan}]
    assert build_summary(rows, status="failed", wall_s=1.0)["mismatch_max"] is None


def test_a_run_without_a_step_has_a_summary_and_a_table(tmp_path: Path) -> None:
    summary = build_summary([], status="failed", wall_s=0.2, error="Traceback\nRuntimeError: no engine")
    assert summary.keys() == {*KEYS, "error"} and summary["steps"] == 0
    json.dumps(summary, allow_nan=False)
    assert "RuntimeError: no engine" in rendered(summary)
    assert not plot_reward([], tmp_path / "reward.png") and not (tmp_path / "reward.png").exists()


def test_final_table_shows_the_figures() -> None:
    text = rendered(build_summary(history(), status="finished", wall_s=110.0, peak_rss_bytes=4_200_000_000))
    for part in (
        "finished after 10 steps",
        "0.250 -> 0.900",
        "1.00e-05",
        "100 tok/s",
        "4.20 GB",
        "1 min 50 s",
        "rollout",
    ):
        assert part in text


def test_reward_png_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "reward.png"
    assert plot_reward(history(), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.2, 59.4, 187, 7500)] == ["0 s", "59 s", "3 min 07 s", "2 h 05 min"]


def rendered(summary: dict[str, object]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(final_table(summary))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()
