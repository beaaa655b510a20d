"""Pushes: whether engines hold what the trainer holds, in every layout and through every channel, and how fast."""

import argparse

from scripts.benchmarks.common import Result, Row, make_result
from scripts.benchmarks.sync_matrix import LIMIT, MODELS, measure_matrix
from scripts.benchmarks.sync_speed import measure_speed


def measure(args: argparse.Namespace) -> Result:
    """`wrong` names the engines that do not hold the trainer's weights."""
    cells: list[Row] = [] if args.skip_matrix else measure_matrix(args.only or list(MODELS))
    wrong = [row["variant"] for row in cells if row["legal"] and not row["max_logprob_diff"] <= LIMIT]
    rows, ratios, told = ([], {}, {}) if args.skip_speed else measure_speed(args)
    result = make_result(args, cells + rows, ratios, **told)
    if wrong:
        what = f"engines that do not hold the trainer's weights (gap above {LIMIT:g} nats)"
        result["wrong"] = f"{what}: {'; '.join(wrong)}"
    return result
