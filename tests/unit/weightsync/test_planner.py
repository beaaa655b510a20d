"""Plans made for all ranks in one process: those that the ranks make; and in files: what was saved, or refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.weightsync.test_plan import NAMES, wanted, zero3
from weightsync.plan import PlanError
from weightsync.planner import RankPlan, Tally, distinct, join_readers, plan_rank, streams_of
from weightsync.regions import Moves, Regions
from weightsync.saved_plan import HEADER, load_plan, rank_file, save_plan

BUCKET_BYTES = 256


def assert_same(found: RankPlan, expected: RankPlan) -> None:
    for name in vars(Moves.of([])):
        np.testing.assert_array_equal(getattr(found.moves, name), getattr(expected.moves, name))
    for name in ("reader", "sizes", "begin"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@given(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.sampled_from([48, 100, 256, 10_000]))
def test_tally_adds_up_what_the_streams_of_all_ranks_send(ranks: int, parts: int, slot_bytes: int) -> None:
    wants = [wanted(part, parts) for part in range(parts)]
    readers, held = join_readers(wants), zero3(ranks)
    tally = Tally(readers)
    for holds in held:
        plan = plan_rank(holds, readers, slot_bytes)
        own = streams_of(plan, wants)
        sent = {stream.reader: stream.num_bytes for stream in own}
        assert plan.bytes_to(parts).tolist() == [sent.get(reader, 0) for reader in range(parts)]
        assert plan.bucket_bytes.tolist() == [bucket.nbytes for stream in own for bucket in stream.buckets.values()]
        tally.add(plan)
    tally.require_whole()
    assert readers.num_bytes <= tally.num_bytes == sum(map(sum, tally.links))


def test_tally_of_ranks_that_miss_a_tensor_names_it() -> None:
    readers, held = join_readers([wanted()]), zero3(1)[0]
    tally = Tally(readers)
    tally.add(plan_rank(held.take(held.tensor != NAMES.index("norm")), readers, BUCKET_BYTES))
    with pytest.raises(PlanError, match=r"norm \(0 of 8 elements\)"):
        tally.require_whole()


def test_workers_that_want_the_same_are_one_reader() -> None:
    readers, which = distinct([wanted(), wanted(0, 2), wanted(), wanted(1, 2)])
    assert which == [0, 1, 0, 2] and len(readers) == 3


def test_readers_of_other_models_are_refused() -> None:
    with pytest.raises(PlanError, match="different models"):
        join_readers([wanted(), replace(wanted(), names=("other", *NAMES[1:]))])
    with pytest.raises(PlanError, match="no reader"):
        join_readers([])


# -- saved --


def saved(folder: Path, ranks: int = 2, parts: int = 2) -> list[tuple[Regions, RankPlan]]:
    readers = join_readers([wanted(part, parts) for part in range(parts)])
    plans = [(held, plan_rank(held, readers, BUCKET_BYTES)) for held in zero3(ranks)]
    save_plan(folder, plans, readers, BUCKET_BYTES, {"layout": "zero3 dp2"})
    return plans


def loaded(folder: Path, rank: int, ranks: int = 2, parts: int = 2, **changes: Any) -> RankPlan:
    arguments: dict[str, Any] = {
        "num_ranks": ranks,
        "held": zero3(ranks)[rank],
        "readers": join_readers([wanted(part, parts) for part in range(parts)]),
        "slot_bytes": BUCKET_BYTES,
    }
    return load_plan(folder, rank, **arguments | changes)


def test_saved_plan_loads_as_it_was(tmp_path: Path) -> None:
    for rank, (_, plan) in enumerate(saved(tmp_path / "plan")):
        assert_same(loaded(tmp_path / "plan", rank), plan)


@given(ranks=st.integers(1, 4), parts=st.sampled_from([1, 2, 4]))
def test_saved_plan_of_any_layout_loads_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, parts: int
) -> None:
    folder = tmp_path_factory.mktemp("plans") / "plan"
    for rank, (_, plan) in enumerate(saved(folder, ranks, parts)):
        assert_same(loaded(folder, rank, ranks, parts), plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slot_bytes": 512}, ["its buckets are of 256 bytes, not 512 (half of sync.bucket_bytes)"]),
        ({"num_ranks": 3}, ["it is for 2 training ranks, not 3"]),
        ({"held": zero3(3)[1]}, ["rank 1 holds other parts of the model"]),
        ({"readers": join_readers([wanted()])}, ["it is for 2 readers, not 1"]),
        ({"readers": join_readers([wanted(0, 2), wanted(0, 4)])}, ["reader 1 wants other parts"]),
        ({"slot_bytes": 512, "num_ranks": 3}, ["512", "not 3"]),
    ],
)
def test_plan_for_something_else_is_refused_with_what_differs(
    tmp_path: Path, changes: dict[str, Any], said: Sequence[str]
) -> None:
    saved(tmp_path / "plan")
    with pytest.raises(PlanError) as caught:
        loaded(tmp_path / "plan", 1, **changes)
    for piece in [*said, "layout: zero3 dp2", "make another with scripts/plan_sync.py"]:
        assert piece in str(caught.value)


def test_damaged_plan_is_refused(tmp_path: Path) -> None:
    (_, first), _ = saved(tmp_path / "plan")
    shifted = replace(first.moves, source_at=first.moves.source_at + 1)
    arrays = {**vars(shifted), "reader": first.reader, "sizes": first.sizes, "begin": first.begin}
    np.savez_compressed(rank_file(tmp_path / "plan", 0), **arrays)
    with pytest.raises(PlanError, match=r"rank-00000\.npz is damaged"):
        loaded(tmp_path / "plan", 0)
    path = rank_file(tmp_path / "plan", 1)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PlanError, match=r"rank-00001\.npz cannot be read"):
        loaded(tmp_path / "plan", 1)


@pytest.mark.parametrize("change", [lambda x: x + 0.25, lambda x: x.astype(np.uint64), lambda x: x[:, None]])
def test_plan_of_other_kinds_of_numbers_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    (_, first), _ = saved(tmp_path / "plan")
    arrays = {**vars(first.moves), "reader": first.reader, "sizes": first.sizes, "begin": first.begin}
    np.savez_compressed(rank_file(tmp_path / "plan", 0), **arrays | {"source_at": change(first.moves.source_at)})
    with pytest.raises(PlanError, match=r"rank-00000\.npz cannot be read .*source_at is .*; make the plan again"):
        loaded(tmp_path / "plan", 0)


def test_header_with_fingerprints_of_another_kind_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "plan")
    path = tmp_path / "plan" / HEADER
    header = json.loads(path.read_text())
    for changed in ({"plans": {"0": "a", "1": "b"}}, {"about": ["zero3"]}):
        path.write_text(json.dumps(header | changed))
        with pytest.raises(PlanError, match=r"plan\.json is damaged"):
            loaded(tmp_path / "plan", 0)


def test_folder_without_a_whole_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no saved plan"):
        loaded(tmp_path, 0)
    saved(tmp_path / "plan")
    with pytest.raises(PlanError, match="holds a plan already"):
        saved(tmp_path / "plan")
    (tmp_path / "plan" / HEADER).write_text('{"format": 0}')
    with pytest.raises(PlanError, match="format 0, not 2"):
        loaded(tmp_path / "plan", 0)
