"""Which prompts a step trains on: dynamic sampling, and leaving out prompts that teach nothing.

Both are bounded: a step ends whatever the model does (design: no loop whose exit depends on the model alone).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conf.schema import AlgoConfig
from rl.types import Group

# Share of the newest observation in a prompt's rolling pass rate.
NEWEST = 0.5
REVISITED = 4


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Groups that a step trains on, and those it sampled and left out. `filled`: kept although without signal."""

    kept: list[Group]
    dropped: list[Group]
    filled: int = 0


def has_signal(group: Group, separate: bool) -> bool:
    """Whether the group's valid rewards differ: otherwise its advantages are all 0. `separate`: any named one does."""
    rewards = {(*(row.total for row in t.rows), *(sorted(t.rewards.items()) if separate else ())) for t in group.valid}
    return len(rewards) > 1


def draw_groups(algo: AlgoConfig, separate: bool, take: Callable[[int], list[Group]], count: int) -> Draw:
    """`count` groups from `take`. With dynamic sampling groups without signal are replaced: Yu et al. 2025 (DAPO), 3.2.

    At most `max_draws` x `count` groups are drawn. What is missing then is filled with groups without signal, those
    with a valid member first, so that the batch keeps its size. Groups drawn and left out count as consumed.
    """
    if not algo.dynamic_sampling:
        return Draw(kept=take(count), dropped=[])
    kept: list[Group] = []
    spare: list[Group] = []
    budget = algo.max_draws * count
    while len(kept) < count and budget > 0:
        drawn = take(min(count - len(kept), budget))
        budget -= len(drawn)
        for group in drawn:
            (kept if has_signal(group, separate) else spare).append(group)
    missing = count - len(kept)
    spare.sort(key=lambda group: (not group.valid, group.position))
    kept = sorted(kept + spare[:missing], key=lambda group: group.position)
    return Draw(kept=kept, dropped=spare[missing:], filled=missing)


def note_pass_rates(algo: AlgoConfig, pass_rates: dict[str, float], groups: list[Group]) -> None:
    """Moves the rolling mean reward of each group's prompt towards what was just seen, where a curriculum needs it."""
    for group in groups if algo.has_curriculum else []:
        rewards = [t.total for t in group.valid]
        if rewards:
            key, seen = str(group.prompt.index), sum(rewards) / len(rewards)
            pass_rates[key] = seen if key not in pass_rates else (1 - NEWEST) * pass_rates[key] + NEWEST * seen


def is_settled(algo: AlgoConfig, pass_rates: Mapping[str, float], index: int, epoch: int) -> bool:
    """Whether prompt `index` is known to be too hard or too easy to teach anything, by the curriculum's bounds.

    Never in every REVISITED-th epoch: the policy changes, and a prompt that is never drawn cannot show it.
    """
    if epoch % REVISITED == 0:
        return False
    rate = pass_rates.get(str(index))
    if rate is None:
        return False
    too_hard = algo.curriculum_low is not None and rate < algo.curriculum_low
    too_easy = algo.curriculum_high is not None and rate > algo.curriculum_high
    return too_hard or too_easy
