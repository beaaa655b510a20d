"""Batches that are cut are copies; the run state counts what it says."""

import dataclasses
import json
import pickle

import pytest
import torch

from rl.batching import collate
from rl.types import RunState, Sampling, Status
from tests.unit.stand_ins import make_group, ragged_batch


def test_select_rows_are_in_the_given_order_and_cut_to_the_longest() -> None:
    batch = collate([make_group(0, [1], [[2], [3, 4, 5, 6], [7, 8]], reward=[1.0, 2.0, 3.0])])
    part = batch.select([2, 0])
    assert part.tokens.tolist() == [[1, 7, 8], [1, 2, 0]]
    assert part.rewards.tolist() == [3.0, 1.0]
    assert part.lengths == [3, 2]
    assert part.train_logprobs is None


def test_select_result_shares_no_memory_and_pickles_small() -> None:
    batch = ragged_batch(0, 32, prompt_lens=(20, 30), samples=20)
    part = batch.select([0])
    part.tokens.fill_(9)
    assert part.train_logprobs is not None and batch.train_logprobs is not None
    part.train_logprobs.fill_(9)
    assert not (batch.tokens == 9).all(1).any()
    assert not (batch.train_logprobs == 9).any()
    assert len(pickle.dumps(part)) < len(pickle.dumps(batch)) / 4


def test_select_keeps_the_values_of_every_array() -> None:
    batch = ragged_batch(1, 32)
    rows = [4, 1, 7]
    part = batch.select(rows)
    for field in dataclasses.fields(batch):
        whole, cut = getattr(batch, field.name), getattr(part, field.name)
        if not isinstance(whole, torch.Tensor):
            assert cut == whole
        else:
            assert torch.equal(cut, whole[rows][..., : part.tokens.shape[1]] if whole.dim() == 2 else whole[rows])
    assert part.num_action_tokens == int(batch.action_mask[rows].sum())


def test_select_no_rows_is_an_empty_batch() -> None:
    empty = ragged_batch(0, 32).select([])
    assert (empty.num_rows, empty.num_action_tokens, empty.lengths) == (0, 0, [])


def test_advance_counts_steps_prompts_tokens_and_failures() -> None:
    status = [Status.ok, Status.engine_failed]
    groups = [make_group(3, [1, 2], [[3, 4], [5]], status=status), make_group(4, [1], [[2], [2, 2]])]
    state = RunState(step=5, optimizer_step=20, prompts_consumed=3)
    state.advance(groups, optimizer_steps=4)
    assert (state.step, state.optimizer_step, state.prompts_consumed) == (6, 24, 5)
    assert (state.tokens_sampled, state.tokens_trained, state.trajectories_failed) == (6, 4 + 2 + 3, 1)


def test_run_state_survives_json() -> None:
    state = RunState(step=3, optimizer_step=6, prompts_consumed=24, wall_s=1.5, tracking_ids={"wandb": "abc"})
    assert RunState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state


def test_group_valid_holds_only_ok_members() -> None:
    for status in Status:
        group = make_group(0, [1], [[2]], status=[status])
        assert len(group.valid) == (status is Status.ok)


def test_sampling_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling(max_tokens=1).temperature = 0.5  # type: ignore[misc]
