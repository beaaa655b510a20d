"""Episodes of several turns: are the trained ids those of the engine, what does a turn cost, and what can break them.

exact: a real engine and plain transformers. overhead and long: an engine and an environment that answer at once.
soak: environments that break at random, in processes.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from rollout.data import load_tokenizer
from scripts.benchmarks.agents_exact import measure_exact
from scripts.benchmarks.agents_overhead import measure_long, measure_overhead
from scripts.benchmarks.agents_parts import Figure
from scripts.benchmarks.agents_soak import measure_soak
from scripts.benchmarks.common import Result, Row, make_result, say

MOST_DIFF = 1e-4  # nats between engine and recomputation, both in fp32


def measure(args: argparse.Namespace) -> Result:
    """`wrong` says which of the promises were not kept; speed is none of them."""
    tokenizer = load_tokenizer(args.model)
    measures: dict[str, Callable[[], list[Figure]]] = {
        "overhead": lambda: measure_overhead(tokenizer),
        "long": lambda: measure_long(tokenizer),
        "soak": lambda: measure_soak(tokenizer, args.soak),
        "exact": lambda: measure_exact(args),
    }
    rows: list[Row] = []
    wrong: list[str] = []
    for repeat in range(args.repeats):
        for name in (name for name in measures if name in args.only):
            say(f"{name}, {repeat + 1} of {args.repeats}")
            found = measures[name]()
            rows += [as_row(figure, repeat) for figure in found]
            wrong += broken_promises({figure.name: figure.value for figure in found})
    result = make_result(args, rows, {}, most_logprob_diff=MOST_DIFF)
    return result | ({"wrong": "; ".join(wrong)} if wrong else {})


def as_row(figure: Figure, repeat: int) -> Row:
    return {"variant": figure.name, "repeat": repeat} | figure._asdict()


def broken_promises(values: Mapping[str, Any]) -> list[str]:
    """What must hold of these figures, where they were measured, and does not."""
    promises = {
        "rows_exact": values.get("rows_total"),
        "completions_trained_once": values.get("completions_total"),
        "exact_episodes_failed": 0,
        "observation_gradient": 0.0,
        "soak_unaccounted": 0,
        "children_left": 0,
    }
    found = [
        f"{k}={values[k]:g}, wanted {wanted:g}" for k, wanted in promises.items() if values.get(k, wanted) != wanted
    ]
    if not values.get("max_logprob_diff", 0.0) <= MOST_DIFF:
        found.append(f"max_logprob_diff={values['max_logprob_diff']:g}, wanted at most {MOST_DIFF:g}")
    return found
