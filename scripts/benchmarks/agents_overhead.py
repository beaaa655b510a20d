"""What a turn costs beside the engine and the environment: both answer at once, so what is left is ours."""

import asyncio
import time
import tracemalloc
from typing import Any

from conf.choices import Isolation
from rl.faults import RoleDied
from rl.types import Sampling, Trajectory
from rollout.episode import Episodes
from scripts.benchmarks.agents_parts import (
    Figure,
    InstantLane,
    agent_config,
    make_episodes,
    make_prompt,
    opened_hosts,
)

CONCURRENT, TURNS, ACTION_TOKENS = 64, 40, 24
LONG_TURNS, LONG_TOKENS = 1000, 200_000
LONG_WORDS = 80  # of each message; the turns of the policy have the rest of the tokens
WARM_TURNS = 2


def measure_overhead(tokenizer: Any, concurrent: int = CONCURRENT, turns: int = TURNS) -> list[Figure]:
    """Wall milliseconds for one turn of any of so many episodes at a time, with the environment here and in processes.

    Each message and each turn is another text than all before it, so that nothing is found in a cache.
    """
    inline = time_turns(tokenizer, Isolation.inline, concurrent, turns)
    process = time_turns(tokenizer, Isolation.process, concurrent, turns)
    return [Figure("framework_ms_per_turn", inline, "ms"), Figure("framework_ms_per_turn_process", process, "ms")]


def time_turns(tokenizer: Any, isolation: Isolation, concurrent: int, turns: int) -> float:
    cfg = agent_config(
        "Talk", isolation, kwargs={}, max_model_len=1 << 15, max_tokens=ACTION_TOKENS, max_turns=turns,
        max_concurrent=concurrent,
    )  # fmt: skip

    async def play_all(episodes: Episodes, count: int) -> float:
        lanes = [InstantLane(spoken(tokenizer, ACTION_TOKENS, n, count)) for n in range(concurrent)]
        began = time.perf_counter()
        plays = [play(episodes, lane, index, count) for index, lane in enumerate(lanes)]
        for trajectory in await asyncio.gather(*plays):
            require_turns(trajectory, count)
        return time.perf_counter() - began - sum(lane.seconds for lane in lanes)

    async def measure() -> float:
        episodes = make_episodes(cfg, hosts, tokenizer)
        await play_all(episodes, WARM_TURNS)  # processes start, modules are imported
        return await play_all(episodes, turns)

    with opened_hosts(cfg) as hosts:
        return 1000 * asyncio.run(measure()) / (concurrent * turns)


def measure_long(tokenizer: Any, turns: int = LONG_TURNS, tokens: int = LONG_TOKENS) -> list[Figure]:
    """One episode of many turns and tokens: its seconds, and in a run of its own the peak of the memory it takes."""
    seconds, trajectory = play_long(tokenizer, turns, tokens)
    num_tokens = trajectory.num_tokens
    del trajectory
    tracemalloc.start()
    try:
        play_long(tokenizer, turns, tokens)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return [
        Figure("long_turns", turns, "turns"),
        Figure("long_tokens", num_tokens, "tokens"),
        Figure("long_seconds", seconds, "s"),
        Figure("long_peak_bytes", peak, "bytes"),
    ]


def play_long(tokenizer: Any, turns: int, tokens: int) -> tuple[float, Trajectory]:
    """(seconds without the engine's own, the trajectory) of one episode."""
    action = max(8, tokens // turns - LONG_WORDS - 12)
    cfg = agent_config(
        "Talk", Isolation.inline, kwargs={"words": LONG_WORDS}, max_model_len=2 * tokens, max_tokens=action,
        max_turns=turns,
    )  # fmt: skip
    lane = InstantLane(spoken(tokenizer, action, 0, turns))

    async def measure() -> tuple[float, Trajectory]:
        began = time.perf_counter()
        trajectory = await play(make_episodes(cfg, hosts, tokenizer), lane, 0, turns)
        return time.perf_counter() - began - lane.seconds, trajectory

    with opened_hosts(cfg) as hosts:
        seconds, trajectory = asyncio.run(measure())
    require_turns(trajectory, turns)
    return seconds, trajectory


def spoken(tokenizer: Any, count: int, episode: int, turns: int) -> Any:
    """What an engine says in each turn: `count` ids, the last of them the end of the turn."""
    word = tokenizer(" and", add_special_tokens=False)["input_ids"][:1]
    numbers = [tokenizer(f"{episode} {turn}", add_special_tokens=False)["input_ids"] for turn in range(turns)]
    said = [[*number, *(word * count)][: count - 1] + [tokenizer.eos_token_id] for number in numbers]
    return said.__getitem__


async def play(episodes: Episodes, lane: InstantLane, index: int, turns: int) -> Trajectory:
    prompt, sampling = make_prompt(index, turns=turns), Sampling(max_tokens=episodes.cfg.rollout.max_tokens)
    return await episodes.play(lane, prompt, sampling, seed=index)


def require_turns(trajectory: Trajectory, turns: int) -> None:
    """Raises RoleDied unless the episode went as it was meant to."""
    played = trajectory.metrics.get("turns")
    if not trajectory.valid or played != turns or trajectory.more:
        raise RoleDied(
            f"an episode of {turns} turns ended as {trajectory.status.value} after {played} in {len(trajectory.rows)} "
            f"rows: {trajectory.error}"
        )
