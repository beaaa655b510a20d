"""The live view of a run: a table that redraws itself on a terminal, one plain line for each step anywhere else.

It must never end a run: whatever goes wrong while showing something is dropped. `View` is a context manager; leaving
it, by Ctrl-C too, gives the terminal back (a process that a signal ends without unwinding cannot do so: turn SIGTERM
into an exception).
"""

import atexit
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from time import monotonic
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl import summary as names

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"
TREND_STEPS = 30
RATE_STEPS = 10  # steps whose median time predicts the time left

# metric, label on the table, label on a plain line, format
SHOWN = (
    (names.REWARD, "reward", "reward", "{:.3f}"),
    (names.ENTROPY, "entropy", "entropy", "{:.3f}"),
    (names.MISMATCH, "mismatch", "mismatch", "{:.1e}"),
    (names.GRAD_NORM, "grad norm", "grad", "{:.3g}"),
    (names.KL, "kl", "kl", "{:.2e}"),
    (names.LR, "learning rate", "lr", "{:.2e}"),
    (names.ROLLOUT_TOK_S, "rollout tok/s", "rollout tok/s", "{:,.0f}"),
    (names.TRAIN_TOK_S, "train tok/s", "train tok/s", "{:,.0f}"),
    (names.EVAL, "held-out, sampled", "eval", "{:.3f}"),
    (names.EVAL_GREEDY, "held-out, greedy", "greedy", "{:.3f}"),
)


class View:
    """What the terminal shows of a run. Open it with `open_view`; every method is safe to call at any time."""

    def __init__(self, num_steps: int, name: str, console: Console, live: bool) -> None:
        self.num_steps = num_steps
        self.name = name
        self.console = console
        self.finished_steps = 0
        self.num_failed = 0
        self.history: list[dict[str, float]] = []
        self.running: list[tuple[str, float]] = []  # phases entered and not left: name, start (monotonic seconds)
        self.step_ended = monotonic()
        self.display: Live | None = None
        if live:
            try:
                display = Live(get_renderable=self.render, console=console, refresh_per_second=4)
                display.start()
                self.display = display
                atexit.register(self.close)
            except Exception:
                self.display = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows `name` and its running seconds while the block runs. Fits `rl.timing.make_timer` as its hook."""
        entry = (name, monotonic())
        self.running.append(entry)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                self.running.remove(entry)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step: `step` is its number (from 1), `metrics` what was logged for it."""
        with contextlib.suppress(Exception):
            now = monotonic()
            row = {"step": float(step), **{key: float(value) for key, value in metrics.items()}}
            if step > 0:  # what is shown as step 0 is the evaluation before training, after a slow start
                row.setdefault(names.STEP_S, now - self.step_ended)
            self.step_ended = now
            self.finished_steps = step
            failed = row.get(names.NUM_FAILED, 0.0)
            self.num_failed += int(failed) if math.isfinite(failed) else 0
            self.history.append(row)
            if self.display is None:
                self._print(plain_line(step, self.num_steps, row, self.time_left_s()))
            else:
                self.display.refresh()

    def message(self, text: str) -> None:
        """Shows a line of text: above the table, or among the plain lines."""
        with contextlib.suppress(Exception):
            self._print(text)

    def time_left_s(self) -> float | None:
        """Seconds until the last step ends, from the median of the last steps; None before the first."""
        times = names.series(self.history, names.STEP_S)[-RATE_STEPS:]
        return median(times) * max(0, self.num_steps - self.finished_steps) if times else None

    def render(self) -> RenderableType:
        """The table as it is now. Called from the refresh thread."""
        try:
            return self._draw()
        except Exception as error:
            return Text(f"step {self.finished_steps}/{self.num_steps} (view: {error})")

    def close(self) -> None:
        """Leaves the last table on the screen and gives the terminal back. May be called twice."""
        display, self.display = self.display, None
        if display is not None:
            atexit.unregister(self.close)
            with contextlib.suppress(Exception):
                display.stop()

    def __enter__(self) -> "View":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)
        self.console.file.flush()

    def _draw(self) -> RenderableType:
        history = list(self.history)
        last = history[-1] if history else {}
        ascii_only = self.console.options.ascii_only
        figures = Table.grid(padding=(0, 2))
        for key, label, _, form in SHOWN:
            values = names.series(history, key)
            if values:
                value = form.format(last[key] if key in last else values[-1])
                trend = sparkline(values[-TREND_STEPS:], ascii_only) if key in (names.REWARD, names.ENTROPY) else ""
                figures.add_row(label, Text(value, style="bold", justify="right"), Text(trend, style="green"))
        if self.num_failed:
            figures.add_row("failed samples in all", Text(str(self.num_failed), style="bold red", justify="right"), "")
        parts: list[RenderableType] = [figures]
        phases = {name: last[key] for name, key in names.phase_keys([last]).items() if math.isfinite(last[key])}
        if phases:
            bars = Table.grid(padding=(0, 2))
            for name, seconds in phases.items():
                bar = ("#" if ascii_only else "█") * round(24 * seconds / (sum(phases.values()) or 1.0))
                bars.add_row(name, Text(f"{seconds:.1f} s", justify="right"), Text(bar, style="cyan"))
            parts += [Text(f"step {self.finished_steps}: {last.get(names.STEP_S, 0.0):.1f} s", style="dim"), bars]
        running = list(self.running)
        now = " > ".join(name for name, _ in running)
        parts.append(Text(f"now: {now} {monotonic() - running[-1][1]:.0f} s" if running else "now: -", style="yellow"))
        left = self.time_left_s()
        title = f"{self.name} step {self.finished_steps}/{self.num_steps}"
        title += f", {names.duration(left)} left" if left else ""
        return Panel(Group(*parts), title=Text(title.strip()), title_align="left", expand=False)


def open_view(num_steps: int, *, name: str = "", live: bool = True, console: Console | None = None) -> View:
    """A view of a run of `num_steps` steps: a table when `live` and the console can redraw, else plain lines."""
    console = console or Console(highlight=False)
    return View(num_steps, name, console, live and console.is_terminal and not console.is_dumb_terminal)


def plain_line(step: int, num_steps: int, metrics: Mapping[str, float], left_s: float | None) -> str:
    """One step on one line, for logs."""
    parts = [f"step {step}/{num_steps}"]
    parts += [f"{label} {form.format(metrics[key])}" for key, _, label, form in SHOWN if key in metrics]
    phases = " ".join(f"{name} {metrics[key]:.1f}" for name, key in names.phase_keys([metrics]).items())
    if names.STEP_S in metrics:
        parts.append(f"{metrics[names.STEP_S]:.1f} s" + (f" ({phases})" if phases else ""))
    if metrics.get(names.NUM_FAILED):
        parts.append(f"failed samples {metrics[names.NUM_FAILED]:.0f}")
    if left_s:
        parts.append(f"{names.duration(left_s)} left")
    return " | ".join(parts)


def sparkline(values: Sequence[float], ascii_only: bool = False) -> str:
    """One character for each value, low to high between the smallest and the largest of them."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(blocks[min(len(blocks) - 1, int((v - low) / span * len(blocks))) if span > 0 else 0] for v in values)
