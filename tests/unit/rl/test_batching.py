"""Cutting a batch: nothing is lost or doubled, and every rank reaches every collective equally often."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.choices import Layout
from conf.errors import ConfigError
from rl.batching import (
    MicroBatch,
    NoValidTrajectories,
    collate,
    imbalance,
    in_one_line,
    plan_micro_batches,
    row_work,
    split_mini_batches,
)
from rl.types import Batch, Status
from tests.unit.stand_ins import make_cfg, make_group

# -- collate --


@pytest.mark.parametrize("other", [0, 1])
def test_collate_eos_and_pad_share_an_id_masks_come_from_lengths(other: int) -> None:
    """Id 0 is pad and eos at once: in the prompt, at the end of one response, and missing in the other."""
    batch = collate([make_group(4, [0, 9, 0], [[5, 6, 0], [5, 6, 7], [other]])])
    assert batch.tokens.tolist() == [[0, 9, 0, 5, 6, 0], [0, 9, 0, 5, 6, 7], [0, 9, 0, other, 0, 0]]
    assert batch.attention_mask.int().tolist() == [[1] * 6, [1] * 6, [1, 1, 1, 1, 0, 0]]
    assert batch.action_mask.int().tolist() == [[0, 0, 0, 1, 1, 1]] * 2 + [[0, 0, 0, 1, 0, 0]]
    assert batch.num_action_tokens == 7
    assert batch.lengths == [6, 6, 4]


def test_collate_arrays_are_token_aligned_and_typed() -> None:
    group = make_group(7, [1, 2], [[3, 4], [5]], reward=[0.5, -1.0], versions=[[-1, -1, 4, 3], [-1, -1, 6]])
    batch = collate([group])
    assert batch.rollout_logprobs[0].tolist() == pytest.approx([0, 0, -1.0, -1.01])
    assert batch.rewards.tolist() == [0.5, -1.0]
    assert batch.group_index.tolist() == [7, 7]
    assert batch.prompt_len.tolist() == [2, 2]
    assert batch.version.tolist() == [3, 6]
    assert (batch.tokens.dtype, batch.rollout_logprobs.dtype, batch.action_mask.dtype) == (
        torch.int64,
        torch.float32,
        torch.bool,
    )


def test_collate_failed_rows_are_left_out_of_everything() -> None:
    status = [Status.ok, Status.reward_failed]
    batch = collate([make_group(0, [1], [[2], [3] * 20], status=status, reward=[1.0, 5.0])])
    assert batch.tokens.tolist() == [[1, 2]]
    assert batch.rewards.tolist() == [1.0]


def test_collate_nothing_valid_raises_with_the_first_errors() -> None:
    group = make_group(
        0,
        [1],
        [[2], [3]],
        status=[Status.reward_failed, Status.engine_timeout],
        error=["Traceback ...\nKeyError: 'answer'", ""],
    )
    with pytest.raises(NoValidTrajectories, match="all 2 trajectories") as caught:
        collate([group])
    assert "reward_failed: KeyError: 'answer'" in str(caught.value)
    assert "engine_timeout: (no message)" in str(caught.value)
    assert caught.value.groups == [group]


def test_error_in_one_line_names_the_innermost_place() -> None:
    trace = 'Traceback:\n  File "a.py", line 1, in f\n    f()\n  File "b.py", line 22, in step\nKeyError: 1\n'
    assert in_one_line(trace) == "KeyError: 1 (b.py:22 in step)"
    assert in_one_line("out of memory\n") == "out of memory"
    assert in_one_line(" ") == "(no message)"


# -- mini-batches --

group_ids = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(groups=group_ids, data=st.data(), seed=st.integers(0, 99))
def test_split_mini_batches_any_groups_are_dealt_out_whole_and_exactly_once(
    groups: list[int], data: st.DataObject, seed: int
) -> None:
    count = data.draw(st.integers(1, len(set(groups))))
    index = torch.tensor(groups)
    parts = split_mini_batches(index, count, (seed, 1))
    assert len(parts) == count
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    owners = [{groups[row] for row in part} for part in parts]
    assert sum(map(len, owners)) == len(set(groups))
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    assert parts == split_mini_batches(index, count, (seed, 1))


def test_split_mini_batches_other_seeds_deal_otherwise() -> None:
    index = torch.arange(16)
    deals = {tuple(map(tuple, split_mini_batches(index, 4, (0, step, epoch)))) for step in range(3) for epoch in (0, 1)}
    assert len(deals) == 6


def test_split_mini_batches_one_keeps_the_rows_in_order() -> None:
    assert split_mini_batches(torch.tensor([5, 1, 5]), 1, (0,)) == [[0, 1, 2]]


def test_split_mini_batches_fewer_groups_than_mini_batches_names_both() -> None:
    with pytest.raises(NoValidTrajectories, match=r"2 groups .* algo.num_mini_batches=3"):
        split_mini_batches(torch.tensor([0, 0, 1]), 3, (0,))


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ({"prompts_per_step": 6, "algo": {"num_mini_batches": 4}}, ["prompts_per_step=6", "algo.num_mini_batches=4"]),
        ({"samples_per_prompt": 1}, ["samples_per_prompt=1", "at least 2"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_at_start(sizes: dict[str, object], pieces: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_cfg(**sizes)  # type: ignore[arg-type]
    assert all(piece in str(caught.value) for piece in pieces)


# -- micro-batches --


def batch_of(shapes: list[tuple[int, list[int]]]) -> Batch:
    """Groups of (prompt length, response lengths)."""
    return collate([make_group(10 * i, [1] * p, [[2] * n for n in lengths]) for i, (p, lengths) in enumerate(shapes)])


def padded_tokens(batch: Batch, rows: list[int], layout: Layout) -> int:
    """Tokens that one forward computes, counted from the layout's definition."""
    prompts, lengths = batch.prompt_len.tolist(), batch.lengths
    if layout is Layout.padded:
        return len(rows) * max(lengths[r] for r in rows)
    if layout is Layout.packed:
        return sum(lengths[r] for r in rows)
    groups = {int(batch.group_index[r]) for r in rows}
    return len(groups) * max(prompts[r] for r in rows) + len(rows) * max(lengths[r] - prompts[r] for r in rows)


def check_plan(batch: Batch, plans: list[list[MicroBatch]], layout: Layout, budget: int, chunk: int) -> None:
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(r for plan in plans for micro in plan for r in micro.rows) == list(range(batch.num_rows))
    groups = batch.group_index.tolist()
    for slot in zip(*plans, strict=True):
        assert len({micro.num_chunks for micro in slot}) == 1
        assert any(micro.rows for micro in slot)
        most = max(int(batch.action_mask[micro.rows].sum()) for micro in slot)
        assert slot[0].num_chunks * chunk >= most
        assert (slot[0].num_chunks - 1) * chunk < max(most, 1)
        for micro in slot:
            if not micro.rows:
                continue
            units = {groups[r] for r in micro.rows} if layout is Layout.shared_prefix else set(micro.rows)
            assert len(units) == 1 or padded_tokens(batch, micro.rows, layout) <= budget
            if layout is Layout.shared_prefix:
                assert all((groups[r] in units) == (r in micro.rows) for r in range(batch.num_rows))


shapes = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=4)), min_size=1, max_size=8
)


@given(
    shapes=shapes,
    layout=st.sampled_from(list(Layout)),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 120),
    chunk=st.integers(1, 40),
)
def test_plan_any_batch_covers_each_row_once_in_equal_steps_within_the_budget(
    shapes: list[tuple[int, list[int]]], layout: Layout, ranks: int, budget: int, chunk: int
) -> None:
    batch = batch_of(shapes)
    plans = plan_micro_batches(batch, layout, ranks, budget, chunk)
    assert len(plans) == ranks
    check_plan(batch, plans, layout, budget, chunk)
    assert plans == plan_micro_batches(batch, layout, ranks, budget, chunk)


def test_plan_five_long_and_five_short_rows_keep_two_ranks_in_step() -> None:
    """The reported hang: 2 ranks, a budget of 100 tokens, five rows of 95 tokens and five of 20."""
    batch = batch_of([(1, [94])] * 5 + [(1, [19])] * 5)
    plans = plan_micro_batches(batch, Layout.padded, 2, 100, 256)
    check_plan(batch, plans, Layout.padded, 100, 256)
    assert len(plans[0]) == len(plans[1]) <= 5


def test_plan_large_budget_is_one_micro_batch_per_rank() -> None:
    for layout in Layout:
        plans = plan_micro_batches(batch_of([(3, [2, 5])] * 4), layout, 2, 10_000, 256)
        assert [len(plan) for plan in plans] == [1, 1]
        assert [len(plan[0].rows) for plan in plans] == [4, 4]


def test_plan_gives_the_larger_unit_of_a_wave_to_the_rank_with_less_work() -> None:
    batch = batch_of([(3, [7]), (3, [6]), (3, [4]), (3, [1])])
    plans = plan_micro_batches(batch, Layout.padded, 2, 10, 256)
    assert sorted(batch.lengths[r] for micro in plans[0] for r in micro.rows) == [4, 10]
    assert sorted(batch.lengths[r] for micro in plans[1] for r in micro.rows) == [7, 9]
    assert imbalance([14, 16]) == pytest.approx(16 / 15 - 1)


def test_row_work_counts_the_square_of_the_length() -> None:
    batch = batch_of([(3, [7, 2])])
    assert row_work(batch, Layout.padded, math.inf) == [10, 5]
    # token number i stands behind i others: 1 + i / 20 each
    by_hand = [sum(1 + (i + 0.5) / 20 for i in range(n)) for n in (10, 5)]
    assert row_work(batch, Layout.packed, 20) == pytest.approx(by_hand)
    shared = [
        sum(1 + (i + 0.5) / 20 for i in range(3)) / 2 + sum(1 + (i + 0.5) / 20 for i in range(3, n)) for n in (10, 5)
    ]
    assert row_work(batch, Layout.shared_prefix, 20) == pytest.approx(shared)


def test_plan_fewer_units_than_ranks_fills_up_with_dummies() -> None:
    plans = plan_micro_batches(batch_of([(3, [2, 5])]), Layout.shared_prefix, 3, 100, 4)
    assert [plan[0].rows for plan in plans] == [[0, 1], [], []]
    assert [plan[0].num_chunks for plan in plans] == [2, 2, 2]


def test_plan_similar_lengths_run_together() -> None:
    batch = batch_of([(1, [2]), (1, [30]), (1, [3]), (1, [31])])
    plans = plan_micro_batches(batch, Layout.padded, 2, 40, 256)
    assert plans[0] == [MicroBatch(rows=[3], num_chunks=1), MicroBatch(rows=[0], num_chunks=1)]
    assert plans[1] == [MicroBatch(rows=[1], num_chunks=1), MicroBatch(rows=[2], num_chunks=1)]
