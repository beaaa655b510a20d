"""The loop: one page for every algorithm, synchronous and lagged."""

from collections.abc import Callable

from conf.choices import KlPlace
from conf.schema import Config
from rl import advantages, rewards
from rl.batching import collate
from rl.kl import adapt
from rl.metrics import batch_metrics
from rl.numerics import current_tokens, mismatch_sums, require_finite, require_match
from rl.roles import Metrics, Roles
from rl.sampling import draw_groups, note_pass_rates
from rl.timing import Timer
from rl.types import Batch, Group, RunState

Hook = Callable[[RunState, list[Group], Metrics], None]


def run(
    cfg: Config, roles: Roles, state: RunState, timer: Timer, before_first: Callable[[], None], after_step: Hook
) -> None:
    """Trains until `cfg.num_steps`. state.step == finished steps == weight version.

    `timer(phase)` times a phase; `before_first()` runs once the engines hold the first weights;
    `after_step(state, groups, metrics)` evaluates, saves and logs. Errors pass through.
    """
    policy, critic, rollouts, per_batch = roles.policy, roles.critic, roles.rollouts, cfg.algo.steps_per_batch
    with timer("sync"):
        roles.sync.push(version=state.step)  # engines hold the resumed weights before any prompt
    before_first()
    rollouts.start(first_position=state.prompts_consumed, version=state.step)  # at most cfg.max_lag versions ahead
    while state.step < cfg.num_steps:
        with timer("rollout"):
            draw = draw_groups(cfg.algo, cfg.reward.separate, rollouts.next_groups, cfg.prompts_per_step)
        batch = collate(draw.kept, sorted(cfg.reward.weights))
        batch.kl_coef = cfg.algo.kl_coef if state.kl_coef is None else state.kl_coef
        with timer("score"):
            metrics = score(cfg, roles, batch, state.step)
        check_mismatch(cfg, batch, state.step)
        trains = state.step >= cfg.critic.warmup_steps
        with timer("update"):
            metrics |= critic.update(batch, state.step) if critic else {}
            metrics |= policy.update(batch, state.optimizer_step, state.step) if trains else {}
        metrics |= batch_metrics(batch, draw, state.step)
        if cfg.algo.kl_target > 0:
            measured = metrics.get("policy/kl", metrics.get("reward/kl", cfg.algo.kl_target))
            state.kl_coef = adapt(batch.kl_coef, measured, cfg.algo.kl_target, cfg.algo.kl_horizon, batch.num_rows)
        note_pass_rates(cfg.algo, state.pass_rates, draw.kept + draw.dropped)
        state.advance(draw.kept + draw.dropped, per_batch if trains else 0)
        with timer("sync"):
            metrics |= roles.sync.push(version=state.step)
        after_step(state, draw.kept + draw.dropped, metrics)
        rollouts.set_version(state.step)
    roles.sync.settle()


def score(cfg: Config, roles: Roles, batch: Batch, step: int) -> Metrics:
    """Everything that is known of a batch before it is trained on: log-probabilities, values, rewards, advantages."""
    metrics: Metrics = {}
    given = batch.rewards
    if roles.reward_model:
        scores = roles.reward_model.scores(batch)
        require_finite("scores", scores, "the reward model")
        batch.rewards = batch.rewards + cfg.reward_model.weight * scores
        metrics["reward/model"] = float(scores.mean())
    batch.outcomes = rewards.row_rewards(batch)
    if scores_before_update(cfg) or step < cfg.critic.warmup_steps:
        batch.train_logprobs = roles.policy.logprobs(batch)
    if roles.reference:
        batch.ref_logprobs = roles.reference.logprobs(batch)
    if roles.teacher and cfg.algo.has_divergence:
        batch.teacher_ids, batch.teacher_topk = roles.teacher.top_logprobs(batch)
    elif roles.teacher:
        batch.teacher_logprobs = roles.teacher.logprobs(batch)
    if roles.critic:
        batch.values, batch.bootstrap = roles.critic.values(batch)
    metrics |= rewards.shape(cfg.algo, batch, cfg.rollout)
    batch.shaping = rewards.row_rewards(batch) - given
    advantages.estimate(cfg.algo, cfg.reward, batch)
    return metrics


def scores_before_update(cfg: Config) -> bool:
    """Whether old log-probabilities need a forward of their own.

    With one optimizer step for each batch the update's own forward is at the old weights: it gives the same values, and
    the ranks check them against the engine's before the optimizer moves. Rewards and advantages that are made of them
    need them earlier.
    """
    algo = cfg.algo
    by_token = algo.has_teacher and not algo.has_divergence
    return algo.steps_per_batch > 1 or by_token or (algo.has_reference and algo.kl_in is KlPlace.reward)


def check_mismatch(cfg: Config, batch: Batch, version: int) -> None:
    """Raises rl.numerics.MismatchError when engine and trainer disagree, where the trainer has scored already."""
    if batch.train_logprobs is None:
        return
    mask = current_tokens(batch, version, cfg.max_lag)
    if mask.any():
        sums = mismatch_sums(batch.train_logprobs, batch.rollout_logprobs, mask)
        require_match(float(sums["mismatch"]) / int(mask.sum()), cfg.rollout.mismatch_bound, version)
