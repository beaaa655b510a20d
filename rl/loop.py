"""The loop: one page for every algorithm, synchronous and lagged."""

from collections.abc import Callable

from conf.schema import Config
from rl import advantages
from rl.batching import collate
from rl.metrics import batch_metrics
from rl.numerics import mismatch_sums, require_match
from rl.roles import Metrics, Roles
from rl.timing import Timer
from rl.types import Batch, Group, RunState

Hook = Callable[[RunState, list[Group], Metrics], None]


def run(
    cfg: Config, roles: Roles, state: RunState, timer: Timer, before_first: Callable[[], None], after_step: Hook
) -> None:
    """Trains until `cfg.num_steps`. state.step == finished steps == weight version.

    `timer(phase)` times a phase; `before_first()` runs once the engines hold the first weights;
    `after_step(state, groups, metrics)` evaluates, saves and logs. Errors pass through: recovery lives outside.
    """
    policy, critic, reference, rollouts = roles.policy, roles.critic, roles.reference, roles.rollouts
    with timer("sync"):
        roles.sync.push(version=state.step)  # engines hold the resumed weights before any prompt
    before_first()
    rollouts.start(first_position=state.prompts_consumed, version=state.step)  # at most cfg.max_lag versions ahead
    while state.step < cfg.num_steps:
        with timer("rollout"):
            groups = rollouts.next_groups(cfg.prompts_per_step)
        batch = collate(groups)
        with timer("score"):
            if scores_before_update(cfg):
                batch.train_logprobs = policy.logprobs(batch)
            batch.ref_logprobs = reference.logprobs(batch) if reference else None
            batch.values = critic.values(batch) if critic else None
            batch.advantages = advantages.grpo(batch, cfg.algo.normalize_std)
        check_mismatch(cfg, batch, state.step)
        with timer("update"):
            metrics = critic.update(batch, state.optimizer_step) if critic else {}
            metrics |= policy.update(batch, state.optimizer_step)
        metrics |= batch_metrics(batch, groups, state.step)
        state.advance(groups, cfg.algo.num_epochs * cfg.algo.num_mini_batches)
        with timer("sync"):
            metrics |= roles.sync.push(version=state.step)
        after_step(state, groups, metrics)
        rollouts.set_version(state.step)


def scores_before_update(cfg: Config) -> bool:
    """Whether old log-probabilities need a forward of their own.

    With one optimizer step for each batch the update's own forward is at the old weights: it gives the same values,
    and the ranks check them against the engine's before the optimizer moves.
    """
    return cfg.algo.num_epochs * cfg.algo.num_mini_batches > 1


def check_mismatch(cfg: Config, batch: Batch, version: int) -> None:
    """Raises rl.numerics.MismatchError when engine and trainer disagree, where the trainer has scored already.

    With max_lag > 0 only on rows that the present weights sampled whole: since older ones the policy itself has moved.
    """
    if batch.train_logprobs is None:
        return
    mask = batch.action_mask
    if cfg.max_lag > 0:
        mask = mask & (batch.version == version)[:, None]
    if mask.any():
        sums = mismatch_sums(batch.train_logprobs, batch.rollout_logprobs, mask)
        require_match(float(sums["mismatch"]) / int(mask.sum()), cfg.rollout.mismatch_bound, version)
