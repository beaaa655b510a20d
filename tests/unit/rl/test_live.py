import atexit
import io

import pytest
from rich.console import Console

from rl import summary as names
from rl.live import View, open_view, plain_line, sparkline
from rl.timing import make_timer

METRICS = {
    names.REWARD: 0.412,
    names.ENTROPY: 1.25,
    names.MISMATCH: 2.1e-6,
    names.GRAD_NORM: 0.87,
    names.KL: 0.001,
    names.LR: 1e-5,
    names.ROLLOUT_TOK_S: 1234.0,
    names.TRAIN_TOK_S: 567.0,
    names.NUM_FAILED: 2.0,
    names.STEP_S: 20.0,
    "time/rollout_s": 9.0,
    "time/update_s": 8.0,
}


def text_of(view: View) -> str:
    assert isinstance(view.console.file, io.StringIO)
    return view.console.file.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=40, _environ={"TERM": "xterm"})


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    with open_view(12, console=Console(file=io.StringIO(), width=40)) as view:
        view.message("run folder: [x]/runs")
        with view.phase("rollout"):
            pass
        view.step(1, METRICS)
        view.step(2, METRICS)
    lines = text_of(view).splitlines()
    assert len(lines) == 3 and "\x1b" not in text_of(view)
    assert lines[0] == "run folder: [x]/runs"
    assert lines[2] == (
        "step 2/12 | reward 0.412 | entropy 1.250 | mismatch 2.1e-06 | grad 0.87 | kl 1.00e-03 | lr 1.00e-05 | "
        "rollout tok/s 1,234 | train tok/s 567 | 20.0 s (rollout 9.0 update 8.0) | failed samples 2 | 3 min 20 s left"
    )


def test_live_false_gives_plain_lines_on_a_terminal() -> None:
    view = open_view(2, live=False, console=terminal())
    view.step(1, {})
    assert text_of(view).startswith("step 1/2")
    assert view.display is None


def test_live_table_shows_everything_and_the_terminal_is_restored_on_ctrl_c() -> None:
    view = open_view(12, name="demo", console=terminal())
    try:
        with pytest.raises(KeyboardInterrupt), view:
            assert view.display is not None
            view.message("a message")
            view.step(1, METRICS)
            view.step(2, {**METRICS, names.REWARD: 0.9})
            with view.phase("update"), view.phase("forward"):
                console = Console(file=io.StringIO(), width=100)
                console.print(view.render())
                assert isinstance(console.file, io.StringIO)
                shown = console.file.getvalue()
                raise KeyboardInterrupt
    finally:
        view.close()
    for part in (
        "demo step 2/12",
        "3 min 20 s left",
        "0.900",
        "1,234",
        "now: update > forward",
        "failed samples",
        "9.0 s",
    ):
        assert part in shown, part
    output = text_of(view)
    assert "a message" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor was hidden and shown again
    assert view.display is None and view.running == []


def test_the_table_is_ascii_where_the_terminal_is() -> None:
    view = open_view(3, live=False, console=Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=100))
    view.step(1, METRICS)
    view.step(2, METRICS)
    console = Console(file=io.StringIO(), width=100)
    console.print(view.render())
    assert isinstance(console.file, io.StringIO)
    assert "########" in console.file.getvalue() and "█" not in console.file.getvalue()


def test_nothing_that_goes_wrong_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    view = open_view(3, console=Console(file=closed))
    view.step(1, METRICS)
    view.message("x")
    view.step(2, {"reward/mean": "not a number"})  # type: ignore[dict-item]
    view.close()
    broken = open_view(3, live=False, console=Console(file=io.StringIO()))
    monkeypatch.setattr(broken, "_draw", lambda: 1 / 0)
    assert "division" in str(broken.render())
    first = open_view(3, console=(console := terminal()))
    second = open_view(3, console=console)  # the console can hold one live display only
    second.step(1, METRICS)
    first.close()
    second.close()


def test_close_leaves_no_exit_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[object] = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    view = open_view(3, console=terminal())
    assert len(hooks) == 1
    view.close()
    view.close()
    assert hooks == []


def test_phase_is_a_timer_hook() -> None:
    view = open_view(3, console=Console(file=io.StringIO()))
    phases: dict[str, float] = {}
    with make_timer(phases, view.phase)("rollout"):
        assert [name for name, _ in view.running] == ["rollout"]
    assert view.running == [] and phases.keys() == {"rollout"}


def test_an_own_clock_stands_in_for_a_missing_step_time() -> None:
    view = open_view(3, console=Console(file=io.StringIO()))
    view.step(0, {names.EVAL: 0.25})
    assert view.time_left_s() is None and text_of(view) == "step 0/3 | eval 0.250\n"
    view.step(1, {})
    assert view.time_left_s() is not None


def test_sparkline_and_empty_plain_line() -> None:
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline([0, 1], ascii_only=True) == "_#"
    assert plain_line(1, 2, {}, None) == "step 1/2"
