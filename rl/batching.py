"""Collating groups into a batch, and cutting a batch: mini-batches, ranks, micro-batches. Pure and deterministic.

Any cut gives the same loss and gradient, because every divisor is a global count (design invariant 4).
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from conf.choices import Layout
from rl.types import MAIN_AGENT, Batch, Group, Trajectory

PLACE = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)  # in a traceback


class NoValidTrajectories(RuntimeError):
    """Every episode of a step, those of `groups`, failed: there is nothing to learn from."""

    def __init__(self, message: str, groups: Sequence[Group] = ()):
        super().__init__(message)
        self.groups = list(groups)


def in_one_line(error: str) -> str:
    """The last line of an error's text, with the innermost place that its traceback names."""
    last = error.strip().splitlines()[-1] if error.strip() else "(no message)"
    places = PLACE.findall(error)
    return f"{last} ({places[-1][0]}:{places[-1][1]} in {places[-1][2]})" if places else last


def collate(groups: Sequence[Group], reward_names: Sequence[str] = ()) -> Batch:
    """The rows of each valid trajectory, right-padded with 0. Failed trajectories are left out.

    `reward_names` are the columns of `reward_parts`, where rewards have names.
    Raises NoValidTrajectories with the first errors when no trajectory is valid.
    """
    rows = [(g, member, row) for g in groups for member, t in enumerate(g.valid) for row in t.rows]
    if not rows:
        errors = [f"{t.status.value}: {in_one_line(t.error)}" for g in groups for t in g.trajectories]
        raise NoValidTrajectories(
            f"all {len(errors)} trajectories of this step failed, for example:\n  "
            + "\n  ".join(dict.fromkeys(errors[:20])),
            groups,
        )
    width = max(len(row.token_ids) for _, _, row in rows)

    def padded(values: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(len(values), width, dtype=dtype)
        for i, row in enumerate(values):
            out[i, : len(row)] = torch.tensor(row, dtype=dtype)
        return out

    trajectories: list[Trajectory] = [row for _, _, row in rows]
    parts = [[t.rewards[name] for name in reward_names] for t in trajectories]
    on_tokens = [t.token_rewards or [] for t in trajectories]
    baselines = [g.baseline.reward for g, _, _ in rows if g.baseline is not None]
    lengths = torch.tensor([len(t.token_ids) for t in trajectories])
    return Batch(
        tokens=padded([t.token_ids for t in trajectories], torch.long),
        attention_mask=torch.arange(width)[None, :] < lengths[:, None],
        action_mask=padded([t.action_mask for t in trajectories], torch.bool),
        rollout_logprobs=padded([t.logprobs for t in trajectories], torch.float32),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        group_index=torch.tensor(group_numbers([(g.position, row.agent) for g, _, row in rows])),
        episode_index=numbered([(g.position, member, row.agent) for g, member, row in rows]),
        prefix_index=numbered([(g.position, tuple(row.token_ids[: row.prompt_len])) for g, _, row in rows]),
        prompt_len=torch.tensor([t.prompt_len for t in trajectories]),
        version=torch.tensor([min((v for v in t.versions if v >= 0), default=-1) for t in trajectories]),
        truncated=torch.tensor([t.truncated for t in trajectories]),
        baseline=torch.tensor(baselines) if baselines else None,
        reward_parts=torch.tensor(parts) if reward_names else None,
        token_rewards=padded(on_tokens, torch.float32) if any(on_tokens) else None,
    )


def numbered(keys: Sequence[Hashable]) -> torch.Tensor:
    """[len(keys)] int64: equal keys get equal numbers, counted from 0 in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def group_numbers(keys: Sequence[tuple[int, str]]) -> list[int]:
    """A number for each (position, agent): the position itself for the main agent, further ones for others."""
    free = max(position for position, _ in keys) + 1
    others: dict[tuple[int, str], int] = {}
    return [key[0] if key[1] == MAIN_AGENT else others.setdefault(key, free + len(others)) for key in keys]


def split_mini_batches(group_index: torch.Tensor, count: int, seed: Sequence[int]) -> list[list[int]]:
    """Row numbers of `count` mini-batches. Groups are shuffled by `seed` and dealt out whole, as evenly as they go.

    Raises NoValidTrajectories when there are fewer groups than mini-batches.
    """
    groups = torch.unique(group_index).tolist()
    if len(groups) < count:
        raise NoValidTrajectories(
            f"{len(groups)} groups hold a valid trajectory, but algo.num_mini_batches={count} needs as many"
        )
    order = np.random.default_rng(list(seed)).permutation(len(groups)) if count > 1 else range(len(groups))
    rank = {groups[g]: i for i, g in enumerate(order)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for row, group in enumerate(group_index.tolist()):
        parts[rank[group] * count // len(groups)].append(row)
    return parts


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward of one rank. `num_chunks` is equal on all ranks: under ZeRO-3 each chunk's head is a collective.

    An empty `rows` is a dummy that adds no loss and no count; it keeps collectives in step.
    """

    rows: list[int]
    num_chunks: int


def plan_micro_batches(
    batch: Batch, layout: Layout, ranks: int, token_budget: int, chunk_tokens: int, quadratic_tokens: float = math.inf
) -> list[list[MicroBatch]]:
    """Micro-batches [rank][k] of a batch; the number k is the same on every rank.

    Units (rows, or whole groups in the shared-prefix layout) are sorted by length and dealt out in waves of one unit
    for each rank, so that the k-th micro-batches of all ranks are of similar size; the largest unit of a wave goes to
    the rank with the least work so far (`row_work`). A micro-batch takes units while its padded tokens stay within
    `token_budget`; a unit larger than that is alone.
    """
    prompt: list[int] = batch.prompt_len.tolist()
    total = batch.lengths
    if layout is Layout.shared_prefix:
        members: dict[int, list[int]] = {}
        for row, group in enumerate(batch.prefix_index.tolist()):
            members.setdefault(group, []).append(row)
        units = list(members.values())
    else:
        units = [[row] for row in range(batch.num_rows)]

    def cost(chosen: list[list[int]]) -> int:
        rows = [r for unit in chosen for r in unit]
        if not rows:
            return 0
        if layout is Layout.padded:
            return len(rows) * max(total[r] for r in rows)
        if layout is Layout.packed:
            return sum(total[r] for r in rows)
        return len(chosen) * max(prompt[r] for r in rows) + len(rows) * max(total[r] - prompt[r] for r in rows)

    work = row_work(batch, layout, quadratic_tokens)
    units.sort(key=lambda unit: cost([unit]), reverse=True)
    slots: list[list[list[list[int]]]] = []
    done = [0.0] * ranks
    for start in range(0, len(units), ranks):
        wave = sorted(units[start : start + ranks], key=lambda unit: sum(work[r] for r in unit), reverse=True)
        given = dict(zip(sorted(range(ranks), key=lambda rank: done[rank]), wave, strict=False))
        for rank, unit in given.items():
            done[rank] += sum(work[r] for r in unit)
        last = slots[-1] if slots else []
        grown = [have + ([given[rank]] if rank in given else []) for rank, have in enumerate(last)]
        if slots and max(cost(chosen) for chosen in grown) <= token_budget:
            slots[-1] = grown
        else:
            slots.append([[given[rank]] if rank in given else [] for rank in range(ranks)])
    action = batch.action_mask.sum(-1).tolist()
    plans: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for slot in slots:
        rows = [[r for unit in chosen for r in unit] for chosen in slot]
        most = max(sum(action[r] for r in chosen) for chosen in rows)
        for rank, chosen in enumerate(rows):
            plans[rank].append(MicroBatch(rows=chosen, num_chunks=max(1, -(-most // chunk_tokens))))
    return plans


def row_work(batch: Batch, layout: Layout, quadratic_tokens: float) -> list[float]:
    """Work of each row, in tokens: one that stands behind n others costs 1 + n / `quadratic_tokens`.

    Attention then costs as much as all matrix products at 6 x hidden size tokens (Kaplan et al. 2020, table 1).
    Rows of a group that share their prompt share its work.
    """
    lengths, prompts = batch.lengths, batch.prompt_len.tolist()
    if layout is not Layout.shared_prefix:
        return [n * (1 + n / 2 / quadratic_tokens) for n in lengths]
    groups = batch.prefix_index.tolist()
    members = Counter(groups)
    return [
        p * (1 + p / 2 / quadratic_tokens) / members[g] + (n - p) * (1 + (n + p) / 2 / quadratic_tokens)
        for n, p, g in zip(lengths, prompts, groups, strict=True)
    ]


def imbalance(work: Sequence[float]) -> float:
    """How much more work the busiest rank has than the mean: 0 is perfect balance."""
    return max(work) / (sum(work) / len(work)) - 1
