"""The prompt cursor: every prompt once per epoch, no gap between epochs, and resuming anywhere changes nothing."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.prompts import PromptStream, epoch_order, prompt_at
from rl.types import Prompt


def make_stream(num_prompts: int, seed: int = 0, shuffle: bool = True) -> PromptStream:
    prompts = [Prompt(index=index, token_ids=[index], record={}) for index in range(num_prompts)]
    return PromptStream(prompts=prompts, seed=seed, shuffle=shuffle)


sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31 - 1)


@given(num_prompts=sizes, seed=seeds, shuffle=st.booleans(), epoch=st.integers(0, 5))
def test_each_epoch_is_a_permutation(num_prompts: int, seed: int, shuffle: bool, epoch: int) -> None:
    positions = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    assert sorted(prompt_at(p, num_prompts, seed, shuffle) for p in positions) == list(range(num_prompts))


@given(num_prompts=sizes, seed=seeds, shuffle=st.booleans(), positions=st.lists(st.integers(0, 200), max_size=20))
def test_stream_depends_on_the_position_alone(num_prompts: int, seed: int, shuffle: bool, positions: list[int]) -> None:
    stream = make_stream(num_prompts, seed, shuffle)
    for position in positions:
        assert stream.at(position).index == prompt_at(position, num_prompts, seed, shuffle)
        assert stream.epoch(position) == position // num_prompts


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(epoch_order(epoch, 32, seed, True)) for epoch in range(4) for seed in range(4)]
    assert len(set(orders)) == 16


def test_order_is_the_same_in_every_version() -> None:
    assert epoch_order(0, 8, 0, True).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert epoch_order(1, 8, 0, True).tolist() == [3, 7, 4, 2, 1, 6, 5, 0]


def test_without_shuffling_the_order_is_the_file_s() -> None:
    assert [prompt_at(position, 3, 7, False) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("saved_step", [3, 4, 5, 8])
def test_resume_at_and_around_an_epoch_boundary(saved_step: int) -> None:  # B38
    num_prompts, batch, num_steps = 8, 2, 8

    def run(first_step: int, last_step: int) -> list[list[int]]:
        stream = make_stream(num_prompts)
        return [[stream.at(step * batch + i).index for i in range(batch)] for step in range(first_step, last_step)]

    straight = run(0, num_steps)
    resumed = run(0, saved_step) + run(saved_step, num_steps)
    assert resumed == straight
    assert len(resumed) == 8
    for epoch in (resumed[:4], resumed[4:]):
        assert sorted(index for step in epoch for index in step) == list(range(num_prompts))


def test_part_batches_drop_nothing() -> None:  # B46
    stream, batch = make_stream(10), 4
    seen: Counter[int] = Counter()
    spanning = 0
    for first in range(0, 50, batch):
        positions = range(first, min(first + batch, 50))
        seen.update(stream.at(position).index for position in positions)
        spanning += len({stream.epoch(position) for position in positions}) > 1
    assert seen == dict.fromkeys(range(10), 5)
    assert spanning == 2  # batches that cross 10 and 30; 20 and 40 are multiples of 4


def test_positions_out_of_range() -> None:
    with pytest.raises(ValueError, match="position=-1"):
        prompt_at(-1, 3, 0, True)
    with pytest.raises(ValueError, match="num_prompts=0"):
        prompt_at(0, 0, 0, True)
    with pytest.raises(ValueError, match="num_prompts=0"):
        make_stream(0).at(0)
