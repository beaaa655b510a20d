"""Dynamic sampling ends whatever the rewards are, and keeps the batch's size; settled prompts are left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import AlgoConfig
from rl.sampling import Draw, draw_groups, has_signal, is_settled, note_pass_rates
from rl.types import Group, Status
from tests.unit.stand_ins import make_group

DYNAMIC = AlgoConfig(dynamic_sampling=True, max_draws=3)


def group(position: int, *outcomes: float) -> Group:
    return make_group(position, [1], [[2]] * len(outcomes), reward=list(outcomes))


class Source:
    """Groups in order of position; `useful` says which have signal."""

    def __init__(self, useful: list[bool]):
        self.useful, self.position, self.asked = useful, 0, list[int]()

    def take(self, count: int) -> list[Group]:
        self.asked.append(count)
        groups = []
        for _ in range(count):
            useful = self.useful[self.position] if self.position < len(self.useful) else False
            groups.append(group(self.position, 1.0, 0.0 if useful else 1.0))
            self.position += 1
        return groups


def positions(groups: list[Group]) -> list[int]:
    return [g.position for g in groups]


def test_has_signal_needs_two_valid_rewards_that_differ() -> None:
    signals = [has_signal(group(0, *rewards), separate=False) for rewards in ((1.0, 0.0), (1.0, 1.0), (1.0,))]
    assert signals == [True, False, False]
    failed = make_group(0, [1], [[2], [2]], reward=[1.0, 0.0], status=[Status.ok, Status.reward_failed])
    assert not has_signal(failed, separate=False)


def test_has_signal_named_rewards_that_cancel_count_where_they_are_compared_one_by_one() -> None:
    opposite = group(0, 0.5, 0.5)
    opposite.trajectories[0].rewards, opposite.trajectories[1].rewards = {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}
    assert has_signal(opposite, separate=True) and not has_signal(opposite, separate=False)


def test_draw_off_takes_what_comes() -> None:
    source = Source([])
    draw = draw_groups(AlgoConfig(), False, source.take, 4)
    assert (positions(draw.kept), draw.dropped, draw.filled, source.asked) == ([0, 1, 2, 3], [], 0, [4])


def test_draw_two_of_four_useful_is_filled_from_further_prompts() -> None:
    source = Source([True, False, False, True, False, True, True])
    draw = draw_groups(DYNAMIC, False, source.take, 4)
    assert positions(draw.kept) == [0, 3, 5, 6] and positions(draw.dropped) == [1, 2, 4]
    assert source.asked == [4, 2, 1] and draw.filled == 0


def test_draw_constant_reward_ends_after_the_budget_with_a_full_batch() -> None:
    source = Source([])
    draw = draw_groups(DYNAMIC, False, source.take, 4)
    assert source.position == 12
    assert (positions(draw.kept), len(draw.dropped), draw.filled) == ([0, 1, 2, 3], 8, 4)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 8), st.integers(1, 4))
def test_draw_any_rewards_keep_the_size_the_order_and_the_budget(useful: list[bool], count: int, draws: int) -> None:
    source = Source(useful)
    draw: Draw = draw_groups(AlgoConfig(dynamic_sampling=True, max_draws=draws), False, source.take, count)
    kept, dropped = positions(draw.kept), positions(draw.dropped)
    assert len(kept) == count and kept == sorted(kept)
    assert sorted(kept + dropped) == list(range(source.position)) and source.position <= draws * count
    assert draw.filled == sum(not has_signal(g, separate=False) for g in draw.kept)
    if draw.filled:
        assert source.position == draws * count and not any(has_signal(g, separate=False) for g in draw.dropped)


def test_pass_rates_move_half_way_and_settle_prompts_outside_the_bounds() -> None:
    algo = AlgoConfig(curriculum_low=0.1, curriculum_high=0.9)
    rates: dict[str, float] = {}
    note_pass_rates(algo, rates, [group(0, 1.0, 1.0), group(1, 0.0, 1.0), group(2, 0.0, 0.0)])
    assert rates == {"0": 1.0, "1": 0.5, "2": 0.0}
    assert [is_settled(algo, rates, index, epoch=1) for index in range(4)] == [True, False, True, False]
    assert not any(is_settled(algo, rates, index, epoch) for index in range(4) for epoch in (0, 4, 8))
    note_pass_rates(algo, rates, [group(0, 0.0, 0.0)])
    assert rates["0"] == 0.5 and not is_settled(algo, rates, 0, 1)


def test_pass_rates_without_a_curriculum_keep_nothing() -> None:
    rates: dict[str, float] = {}
    note_pass_rates(AlgoConfig(), rates, [group(0, 1.0, 1.0)])
    assert rates == {}
    assert not is_settled(AlgoConfig(), {"0": 1.0}, 0, 1)


@pytest.mark.parametrize(("low", "high", "settled"), [(None, 0.9, [False, True]), (0.1, None, [True, False])])
def test_settled_one_bound_alone(low: float | None, high: float | None, settled: list[bool]) -> None:
    algo = AlgoConfig(curriculum_low=low, curriculum_high=high)
    assert [is_settled(algo, {"0": 0.0, "1": 1.0}, index, 1) for index in (0, 1)] == settled
