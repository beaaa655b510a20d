"""The tree of segments: rows are what the engine saw, each sampled token is trained once, and cost is linear."""

from tracemalloc import get_traced_memory, start, stop

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.types import Completion
from rollout.trajectory import Kind, Tree


def completion(ids: list[int]) -> Completion:
    return Completion(
        prompt_ids=[],
        token_ids=ids,
        logprobs=[-float(token) for token in ids],
        finish_reason="stop",
        versions=[7] * len(ids),
        ttft_s=0.0,
        decode_s=0.0,
    )


ids = st.lists(st.integers(1, 4), min_size=1, max_size=4)
# Each call continues the path of an earlier one (its number, modulo), cut back to a share of it, with ids behind.
calls = st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1), ids, ids), min_size=1, max_size=8)


@given(calls)
def test_rows_of_any_calls_hold_each_sampled_token_once_where_the_engine_saw_it(
    made: list[tuple[int, float, list[int], list[int]]],
) -> None:
    tree, seen = Tree(), [[9, 9]]
    wanted = []
    for number, kept, heard, said in made:
        before = seen[number % len(seen)]
        prompt = [9, 9] + before[2 : 2 + int(kept * len(before))] + heard
        node = tree.attach(prompt)
        assert tree.ids(node) == prompt
        node = tree.add_action(node, completion(said))
        assert tree.ids(node) == prompt + said
        seen.append(prompt + said)
        wanted.append((tuple(prompt), tuple(said)))
    found = []
    for row in tree.rows():
        assert len(row.token_ids) == len(row.action_mask) == len(row.logprobs) == len(row.versions)
        for (_, last), number in zip(row.turns, row.segments, strict=True):
            first = last + 1 - len(tree.segments[number].ids)
            assert all(row.action_mask[first : last + 1])
            assert row.logprobs[first : last + 1] == [-float(token) for token in row.token_ids[first : last + 1]]
            assert row.versions[first : last + 1] == [7] * (last + 1 - first)
            found.append((tuple(row.token_ids[:first]), tuple(row.token_ids[first : last + 1])))
        assert sum(row.action_mask) == sum(len(tree.segments[n].ids) for n in row.segments)
        assert not row.action_mask[0] and row.prompt_len >= 1
    assert sorted(found) == sorted(wanted)


def test_forks_are_counted_and_continuations_are_not() -> None:
    tree = Tree()
    node = tree.add_action(tree.attach([1, 2]), completion([3]))
    tree.add_action(tree.attach([1, 2, 3, 4]), completion([5]))
    assert tree.num_forks == 0
    tree.add_action(tree.attach([1, 2, 3, 8]), completion([6]))  # another continuation of the same turn
    tree.add_action(tree.attach([1, 9]), completion([6]))  # another beginning
    assert (tree.num_forks, len(tree.rows()), node) == (2, 3, 1)


def test_ids_behind_the_last_turn_are_left_out() -> None:
    tree = Tree()
    node = tree.add_action(tree.attach([1]), completion([2, 3]))
    tree.add(node, Kind.observation, [4, 5])
    (row,) = tree.rows()
    assert row.token_ids == [1, 2, 3]


@pytest.mark.parametrize("change", [{"logprobs": [0.0]}, {"versions": []}, {"token_ids": []}])
def test_turn_without_a_logprob_for_each_token_is_refused(change: dict[str, list[int]]) -> None:  # rllm#816
    wrong = completion([1, 2])
    for name, value in change.items():
        setattr(wrong, name, value)
    with pytest.raises(ValueError, match="each token needs one of each"):
        Tree().add_action(-1, wrong)


def test_a_thousand_turns_of_200_tokens_take_little_memory() -> None:
    tree, node = Tree(), -1
    start()
    for _ in range(1000):
        node = tree.add(node, Kind.observation, range(100))
        node = tree.add_action(node, completion([1] * 100))
    (row,) = tree.rows()
    _, peak = get_traced_memory()
    stop()
    assert len(row.token_ids) == 200_000
    assert peak < 50e6


def test_followed_segment_is_there_once_and_another_is_a_fork() -> None:  # areal-project/AReaL#1551
    tree = Tree()
    turn = tree.add_action(tree.attach([1, 2]), completion([3]))
    first = tree.follow(turn, Kind.observation, [4, 5])
    assert (tree.follow(turn, Kind.observation, [4, 5]), tree.num_forks) == (first, 0)
    assert tree.follow(turn, Kind.observation, [4, 6]) != first
    assert tree.num_forks == 1
    assert tree.follow(turn, Kind.close, []) == turn


def test_turn_of_another_agent_is_not_shared() -> None:
    tree = Tree()
    tree.add_action(tree.attach([1, 2], "a"), completion([3]), "a")
    tree.add_action(tree.attach([1, 2, 3, 4], "b"), completion([5]), "b")
    assert [(row.agent, row.token_ids, sum(row.action_mask)) for row in tree.rows()] == [
        ("a", [1, 2, 3], 1),
        ("b", [1, 2, 3, 4, 5], 1),
    ]
