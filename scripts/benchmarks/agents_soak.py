"""Thousands of episodes whose environments and turns break at random: is each accounted for, and is nothing left?"""

import asyncio
import gc
import os
import random
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from conf.choices import Isolation
from conf.schema import Config
from rl.types import Prompt, Sampling, Status, Trajectory
from rollout.episode import Episodes
from scripts.benchmarks.agents_parts import Figure, InstantLane, agent_config, make_episodes, make_prompt, opened_hosts
from scripts.benchmarks.common import say

CONCURRENT, PLAYERS = 16, 24  # more players than places: some always stand in line
MOST_TURNS, MAX_TOKENS = 4, 32
STEP_S, HANG_STEP_S = 60.0, 0.3
SAMPLE_EVERY = 5  # episodes between two looks at the memory
LEFT_DEADLINE_S = 10.0
MARK = "TANDEM_SOAK"  # inherited by every process that the soak starts

# What an episode with this fault must end as. Those of the policy's text, of output and of leftovers end well.
EXPECTED: dict[str, Status] = {
    "": Status.ok,
    "raises": Status.env_failed,
    "exits": Status.env_failed,
    "failure": Status.env_failed,
    "failure_once": Status.ok,
    "dies_once": Status.ok,
    "hangs": Status.env_timeout,
    "killed": Status.env_died,
    "ends": Status.env_died,
    "large": Status.env_bad_value,
    "nan": Status.env_bad_value,
    "none": Status.env_bad_value,
    "text": Status.env_bad_value,
    "nothing": Status.env_bad_value,
    "close_raises": Status.ok,
    "prints": Status.ok,
    "leaves_threads": Status.ok,
    "leaves_process": Status.ok,
    "garbage": Status.ok,
    "malformed_call": Status.ok,
    "engine_fails": Status.engine_failed,
}
CALLS = (
    '<tool_call>{"name": "f", "arguments": {</tool_call>',
    "<tool_call>\nnot json\n</tool_call>",
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
)


@dataclass(kw_only=True)
class Tally:
    """What has come of the episodes so far. rss: (episodes that were over, then what `memory` gives)."""

    results: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rss: list[tuple[int, int, int]] = field(default_factory=list)


def measure_soak(tokenizer: Any, count: int, seed: int = 0) -> list[Figure]:
    """`count` episodes in one tree of processes. What is counted as growth is what stays once all is closed."""
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder, marked() as mark, silenced():
        run(tokenizer, 2, seed, Path(folder) / "warm")  # what a first use imports and opens is no growth
        before = held()
        began = time.monotonic()
        tally = run(tokenizer, count, seed + 1, Path(folder) / "soak")
        took = time.monotonic() - began
        left = await_none(mark)
        after = held()
    for text in tally.wrong[:20]:
        say(f"unaccounted: {text}")
    unaccounted = len(tally.wrong) + sum(tally.results[index] != 1 for index in range(count))
    return [
        Figure("soak_episodes", count, "episodes"),
        Figure("soak_unaccounted", unaccounted, "episodes"),
        Figure("soak_seconds", took, "s"),
        Figure("rss_slope_bytes_per_episode", slope([(n, total) for n, total, _ in tally.rss]), "bytes/episode"),
        Figure("own_rss_slope_bytes_per_episode", slope([(n, own) for n, _, own in tally.rss]), "bytes/episode"),
        Figure("fds_growth", after[0] - before[0], "file descriptors"),
        Figure("threads_growth", after[1] - before[1], "threads"),
        Figure("children_left", left, "processes"),
    ]


def run(tokenizer: Any, count: int, seed: int, folder: Path) -> Tally:
    """Plays tasks drawn from `seed`. The places of all environments are open only meanwhile."""
    folder.mkdir()
    cfg = agent_config(
        "Faulty", Isolation.process, kwargs={}, max_model_len=4096, max_tokens=MAX_TOKENS, max_turns=MOST_TURNS + 1,
        max_concurrent=CONCURRENT, step_s=STEP_S, max_failures=10 * count + 10,
    )  # fmt: skip
    tasks = iter([draw_task(index, seed, folder) for index in range(count)])
    tally = Tally()
    with opened_hosts(cfg) as hosts:
        patient, hasty = (make_episodes(c, hosts, tokenizer) for c in (cfg, with_step_s(cfg, HANG_STEP_S)))

        async def play_all() -> None:
            await asyncio.gather(*(play_tasks(tasks, patient, hasty, tokenizer, tally) for _ in range(PLAYERS)))

        asyncio.run(play_all())
    return tally


def draw_task(index: int, seed: int, folder: Path) -> Prompt:
    """A task with a fault of its own, in a turn or a stage of its own; every third has none."""
    draw = random.Random(f"{seed} {index}")
    fault = draw.choice([f for f in EXPECTED if f]) if draw.random() < 2 / 3 else ""
    turns = draw.randint(1, MOST_TURNS)
    turn = draw.choice(stages(fault, turns))
    return make_prompt(index, fault=fault, turns=turns, turn=turn, mark=str(folder / f"{index}"))


def stages(fault: str, turns: int) -> list[int]:
    """Where a fault can be, as scripts.benchmarks.agents_envs.Faulty counts: a step, reset (-1), score (-2)."""
    if fault == "hangs":  # the short deadline is that of a step
        return [*range(turns)]
    if fault in ("nan", "none", "text"):  # reset gives no reward
        return [-2, *range(turns)]
    return [-2, -1, *range(turns)]


def with_step_s(cfg: Config, step_s: float) -> Config:
    return replace(cfg, env=replace(cfg.env, step_s=step_s))


async def play_tasks(tasks: Iterator[Prompt], patient: Episodes, hasty: Episodes, tokenizer: Any, tally: Tally) -> None:
    """One player: the next task, until there are no more. The short deadline is for tasks that hang: on a busy machine
    it would end others too."""
    for task in tasks:
        fault, episodes = task.record["fault"], patient
        if fault == "hangs":
            episodes = hasty
        lane = make_lane(task, tokenizer)
        try:
            trajectory = await episodes.play(lane, task, Sampling(max_tokens=MAX_TOKENS), seed=task.index)
        except Exception as error:
            tally.wrong.append(f"{task.record}: raised {error!r}")
            tally.results[task.index] += 1
            continue
        tally.results[task.index] += 1
        if problem := mismatch(task, trajectory):
            tally.wrong.append(f"{task.record}: {problem}")
        if sum(tally.results.values()) % SAMPLE_EVERY == 0:
            tally.rss.append((sum(tally.results.values()), *memory()))


def mismatch(task: Prompt, trajectory: Trajectory) -> str:
    """In what an episode has not ended as its fault demands; "" if in nothing."""
    wanted = EXPECTED[task.record["fault"]]
    if trajectory.status is not wanted:
        return f"{trajectory.status.value} instead of {wanted.value}: {trajectory.error[-300:]}"
    if wanted is not Status.ok:
        return "" if trajectory.error else f"{wanted.value} without an error"
    turns = task.record["turns"]
    if trajectory.metrics["turns"] != turns or trajectory.total != 1.0 + 0.5 * turns:
        return f"{trajectory.metrics['turns']:g} turns with reward {trajectory.total}, wanted {turns}"
    return ""


def make_lane(task: Prompt, tokenizer: Any) -> InstantLane:
    """What the policy says: a word, or whatever its fault is."""
    draw, fault = random.Random(task.index), task.record["fault"]
    end = tokenizer.eos_token_id

    def say(turn: int) -> list[int] | None:
        if fault == "engine_fails" and turn >= max(task.record["turn"], 0):
            return None
        if fault == "garbage":
            return [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, MAX_TOKENS + 8))]
        text = draw.choice(CALLS) if fault == "malformed_call" else f"turn {turn}"
        return [*tokenizer(text, add_special_tokens=False)["input_ids"][: MAX_TOKENS - 1], end]

    return InstantLane(say)


# -- what the processes hold --


def memory() -> tuple[int, int]:
    """(bytes of memory of this process and the median one of the environments', of this one alone).

    The median, since a process that makes an answer of 50 MB at the moment holds several times that, and the number of
    these is chance. What they have started themselves and left behind is counted by `num_marked`.
    """
    own = psutil.Process()
    mine, others = own.memory_info().rss, [0]
    for child in own.children():
        with suppress(psutil.Error):
            others.append(child.memory_info().rss)
    return mine + int(np.median(others)), mine


def held() -> tuple[int, int]:
    """(file descriptors, threads) of this process."""
    gc.collect()
    return psutil.Process().num_fds(), threading.active_count()


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Median of the slopes between any two of the second half of (episodes, bytes), Sen 1968, which a process that
    holds a large observation at the moment does not sway; 0 of fewer than two points."""
    half = points[len(points) // 2 :]
    if len(half) < 2:
        return 0.0
    x, y = (np.array(values, dtype=float) for values in zip(*half, strict=True))
    one, other = np.triu_indices(len(half), k=1)
    apart = x[other] != x[one]
    return float(np.median((y[other] - y[one])[apart] / (x[other] - x[one])[apart])) if apart.any() else 0.0


@contextmanager
def marked() -> Iterator[str]:
    """Every process that is started meanwhile has this mark in its environment."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        del os.environ[MARK]


def await_none(mark: str) -> int:
    """Processes that have the mark still, once all have had time to end."""
    deadline = time.monotonic() + LEFT_DEADLINE_S
    while (count := num_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return count


def num_marked(mark: str) -> int:
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            count += process.environ().get(MARK) == mark
    return count


@contextmanager
def silenced() -> Iterator[None]:
    """What other processes print meanwhile goes nowhere; they write to our standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
