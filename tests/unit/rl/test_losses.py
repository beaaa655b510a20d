"""Losses by value and by gradient, against tables and against loops that know no tensors.

The last part runs the whole path of a training rank on a small Qwen3: a batch cut in any way trains the same.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.forward import Scorer
from actors.policy import SCORES
from actors.rank import dummy_batch
from conf.choices import KlEstimator, Layout
from rl import losses
from rl.batching import MicroBatch, plan_micro_batches
from rl.losses import clipped_ratio, kl_penalty
from rl.masking import masked_fill_zero
from rl.types import Batch, Scores
from tests.unit.stand_ins import make_cfg, ragged_batch, tiny_qwen3

JUNK = [math.nan, math.inf, -math.inf, 1e30]


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def at_ratio(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, d loss / d ratio, and counts of one token whose ratio is `ratio`."""
    logprob = one(math.log(ratio) - 2.0).requires_grad_()
    loss, sums = clipped_ratio(logprob, one(-2.0), one(advantage), one(1).bool(), low, high)
    (slope,) = torch.autograd.grad(loss.sum(), logprob)
    return float(loss.detach()), float(slope) / ratio, sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "loss", "slope", "clipped"),
    [
        (1.5, +1, 0.2, -1.2, 0, "clip_high"),
        (0.5, +1, 0.2, -0.5, -1, None),
        (0.5, -1, 0.2, 0.8, 0, "clip_low"),
        (1.5, -1, 0.2, 1.5, 1, None),
        (1.5, +1, 0.28, -1.28, 0, "clip_high"),
        (1.25, +1, 0.28, -1.25, -1, None),
        (0.75, -1, 0.28, 0.8, 0, "clip_low"),
        (1.0, +1, 0.2, -1.0, -1, None),
        (1.0, -2, 0.2, 2.0, 2, None),
        (0.1, +2, 0.2, -0.2, -2, None),
        (5.0, 0, 0.2, 0, 0, None),
    ],
)
def test_clipped_ratio_each_region_has_its_value_and_slope(
    ratio: float, advantage: float, high: float, loss: float, slope: float, clipped: str | None
) -> None:
    found, found_slope, sums = at_ratio(ratio, advantage, 0.2, high)
    assert found == pytest.approx(loss)
    assert found_slope == pytest.approx(slope, abs=1e-12)
    assert {k for k in ("clip_low", "clip_high") if sums[k]} == ({clipped} if clipped else set())
    assert float(sums["ratio"]) == pytest.approx(ratio)


def test_clipped_ratio_narrow_low_bound_is_its_own() -> None:
    assert at_ratio(0.85, -1, 0.1, 0.5)[:2] == pytest.approx((0.9, 0))
    assert at_ratio(0.85, -1, 0.2, 0.5)[:2] == pytest.approx((0.85, 1))


def test_clipped_ratio_four_pairs_clip_half_of_them() -> None:
    logprobs = torch.tensor([[1.5, 0.5, 0.5, 1.5]]).log()
    ones = torch.ones(1, 4, dtype=torch.bool)
    _, sums = clipped_ratio(logprobs, torch.zeros(1, 4), torch.tensor([[1.0, 1, -1, -1]]), ones, 0.2, 0.2)
    assert (int(sums["clip_low"]) + int(sums["clip_high"])) / 4 == 0.5


@pytest.mark.parametrize("junk", JUNK)
def test_clipped_ratio_junk_at_masked_places_changes_neither_loss_nor_gradient(junk: float) -> None:
    mask = torch.tensor([[False, True, True, False]])
    clean = [torch.tensor([[-9.0, -1.0, -2.0, -9.0]]), torch.tensor([[0.0, -1.1, -1.9, 0.0]]), torch.ones(1, 4)]

    def run(arguments: list[torch.Tensor]) -> tuple[Any, ...]:
        logprobs = arguments[0].clone().requires_grad_()
        loss, sums = clipped_ratio(logprobs, arguments[1], arguments[2], mask, 0.2, 0.2)
        loss.sum().backward()
        assert logprobs.grad is not None
        return loss.detach(), logprobs.grad, sums

    loss, gradient, sums = run(clean)
    for place in range(3):
        dirty = list(clean)
        dirty[place] = torch.where(mask, dirty[place], torch.tensor(junk))
        dirty_loss, dirty_gradient, dirty_sums = run(dirty)
        assert torch.equal(dirty_loss, loss)
        assert torch.equal(dirty_gradient, gradient)
        assert dirty_sums == sums
    assert gradient[~mask].tolist() == loss[~mask].tolist() == [0, 0]


@pytest.mark.parametrize("estimator", KlEstimator)
@pytest.mark.parametrize("junk", JUNK)
def test_kl_penalty_junk_at_masked_places_changes_neither_value_nor_gradient(
    junk: float, estimator: KlEstimator
) -> None:
    mask = torch.tensor([[False, True]])
    for place in (0, 1):
        pair = [
            torch.tensor([[junk if place == 0 else 0.0, -1.0]]),
            torch.tensor([[junk if place == 1 else 0.0, -2.0]]),
        ]
        logprobs = pair[0].requires_grad_()
        kl = kl_penalty(logprobs, pair[1], mask, estimator)
        kl.sum().backward()
        assert logprobs.grad is not None
        assert kl[0, 0] == logprobs.grad[0, 0] == 0
        assert torch.isfinite(kl).all() and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_clipped_ratio_huge_gap_stays_finite(gap: float, advantage: float) -> None:
    logprob = torch.tensor([[0.0]]).requires_grad_()
    loss, sums = clipped_ratio(
        logprob, torch.tensor([[-gap]]), torch.tensor([[advantage]]), torch.ones(1, 1).bool(), 0.2, 0.2
    )
    loss.sum().backward()
    assert logprob.grad is not None
    assert torch.isfinite(loss).all() and torch.isfinite(logprob.grad).all() and torch.isfinite(sums["ratio"])


# -- KL estimators, by enumeration of a policy (0.5, 0.5) = sigmoid(theta) against a reference (0.8, 0.2) --


def two_token_policy(theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """theta, and the log-probabilities [1, 2] of token 0 and token 1."""
    parameter = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    log = torch.nn.functional.logsigmoid
    return parameter, torch.stack([log(parameter), log(-parameter)])[None]


def expected(theta: float, reference: tuple[float, float], estimator: KlEstimator) -> tuple[list[float], float, float]:
    """Value of each token, expected value, and expected gradient in theta of the estimator as a loss term."""
    parameter, logprobs = two_token_policy(theta)
    ref = torch.tensor([reference], dtype=torch.float64).log()
    values = kl_penalty(logprobs, ref, torch.ones(1, 2, dtype=torch.bool), estimator)
    weight = logprobs.detach().exp()  # tokens come from the policy; sampling carries no gradient
    (slope,) = torch.autograd.grad((weight * values).sum(), parameter)
    return values[0].tolist(), float((weight * values).sum().detach()), float(slope)


EXACT_KL = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)


@pytest.mark.parametrize(
    ("estimator", "values", "mean", "gradient"),
    [
        (KlEstimator.k1, (-0.4700, 0.9163), 0.22314, 0.0),
        (KlEstimator.k2, (0.1105, 0.4198), None, -0.34657),
        (KlEstimator.k3, (0.1300, 0.3163), 0.22314, -0.30000),
        (KlEstimator.k3_ratio, (0.1300, 0.3163), 0.22314, -0.34657),
    ],
)
def test_kl_penalty_two_tokens_have_the_values_and_expected_gradient_of_the_table(
    estimator: KlEstimator, values: tuple[float, float], mean: float | None, gradient: float
) -> None:
    found, average, slope = expected(0.0, (0.8, 0.2), estimator)
    assert found == pytest.approx(values, abs=6e-5)
    assert slope == pytest.approx(gradient, abs=1e-5)
    if mean is not None:
        assert average == pytest.approx(mean, abs=1e-5) == pytest.approx(EXACT_KL, abs=1e-5)


@given(theta=st.floats(-3, 3), share=st.floats(0.02, 0.98))
def test_kl_penalty_k2_and_k3_ratio_have_the_gradient_of_the_kl(theta: float, share: float) -> None:
    parameter, logprobs = two_token_policy(theta)
    ref = torch.tensor([[share, 1 - share]], dtype=torch.float64).log()
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), parameter)
    for estimator in (KlEstimator.k2, KlEstimator.k3_ratio):
        assert expected(theta, (share, 1 - share), estimator)[2] == pytest.approx(float(exact), abs=1e-9)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_penalty_same_policy_is_zero_with_zero_gradient(estimator: KlEstimator) -> None:
    values, _, slope = expected(0.0, (0.5, 0.5), estimator)
    assert values == [0, 0]
    assert slope == 0


@pytest.mark.parametrize("estimator", KlEstimator)
@pytest.mark.parametrize("gap", [80.0, -80.0, 1000.0])
def test_kl_penalty_huge_gap_stays_finite(gap: float, estimator: KlEstimator) -> None:
    logprobs = torch.tensor([[-1.0]]).requires_grad_()
    kl = kl_penalty(logprobs, torch.tensor([[-1.0 + gap]]), torch.ones(1, 1).bool(), estimator)
    kl.sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(kl).all() and torch.isfinite(logprobs.grad).all()


def test_masked_fill_zero_keeps_dtype_and_drops_junk() -> None:
    values = torch.tensor([math.nan, 2.0], dtype=torch.float64)
    filled = masked_fill_zero(values, torch.tensor([False, True]))
    assert filled.tolist() == [0.0, 2.0]
    assert filled.dtype is torch.float64


# -- against loops over tokens --


def naive_token(new: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Loss of one token and its slope in the new log-probability."""
    ratio = math.exp(new - old)
    bound = 1 + high if advantage > 0 else 1 - low
    outside = ratio > bound if advantage > 0 else ratio < bound
    return (-advantage * bound, 0.0) if outside else (-advantage * ratio, -advantage * ratio)


rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4)


@given(rows=rows, data=st.data(), low=st.floats(0.05, 0.9), high=st.floats(0.05, 2))
def test_clipped_ratio_any_ragged_mask_equals_a_loop_over_tokens(
    rows: list[list[bool]], data: st.DataObject, low: float, high: float
) -> None:
    width = max(map(len, rows))
    number = st.floats(-1.5, 1.5)
    new, old, advantages = (
        [[data.draw(number) if t < len(row) and row[t] else math.nan for t in range(width)] for row in rows]
        for _ in range(3)
    )
    mask = torch.tensor([row + [False] * (width - len(row)) for row in rows])
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    was, gain = (torch.tensor(values, dtype=torch.float64) for values in (old, advantages))
    loss, _ = clipped_ratio(logprobs, was, gain, mask, low, high)
    loss.sum().backward()
    assert logprobs.grad is not None
    for i, j in mask.nonzero().tolist():
        value, slope = naive_token(new[i][j], old[i][j], advantages[i][j], low, high)
        assert float(loss[i, j].detach()) == pytest.approx(value, abs=1e-12)
        assert float(logprobs.grad[i, j]) == pytest.approx(slope, abs=1e-12)
    assert (loss[~mask] == 0).all() and (logprobs.grad[~mask] == 0).all()


# -- a whole rank's path on a real model: any cut of a batch gives one loss and one gradient --

ALGO = {"kl_coef": 0.3, "clip_low": 0.2, "clip_high": 0.28}


def accumulate(
    scorer: Scorer, batch: Batch, plans: list[list[MicroBatch]], algo: dict[str, Any] | None = None
) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss, gradients and action tokens seen, as ranks sum them: each micro-batch over the global token count."""
    algo_cfg = make_cfg(algo=ALGO if algo is None else algo).algo
    scorer.zero_grad()
    total, seen, divisor = 0.0, 0, batch.num_action_tokens
    for plan in plans:
        for micro in plan:
            part = batch.select(micro.rows) if micro.rows else dummy_batch(with_reference=True)
            scores = Scores(**dict(zip(SCORES, scorer(part, micro.num_chunks), strict=False)))
            loss, _ = losses.policy_objective(algo_cfg, part, scores, version=0)
            (loss / divisor).backward()
            total += float(loss.detach()) / divisor
            seen += part.num_action_tokens
    return total, {n: p.grad.clone() for n, p in scorer.named_parameters() if p.grad is not None}, seen


def naive_loss(lm: torch.nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by a loop over rows and tokens in fp64: no padding, no batch, no shared code."""
    assert batch.train_logprobs is not None and batch.ref_logprobs is not None and batch.advantages is not None
    lm.zero_grad()
    terms, count = [], 0
    for i in range(batch.num_rows):
        row = batch.tokens[i, : batch.lengths[i]]
        logprobs = lm(input_ids=row[None]).logits[0].double().log_softmax(-1)
        for t in range(int(batch.prompt_len[i]), len(row)):
            new, old = logprobs[t - 1, row[t]], float(batch.train_logprobs[i, t])
            advantage, gap = float(batch.advantages[i, t]), float(batch.ref_logprobs[i, t]) - new
            ratio = (new - old).exp()
            bounded = min(max(float(ratio.detach()), 0.8), 1.28)
            plain = -advantage * ratio
            surrogate = plain if float(plain.detach()) >= -advantage * bounded else torch.tensor(-advantage * bounded)
            terms.append(surrogate + 0.3 * gap**2 / 2)
            count += 1
    loss = torch.stack([term.double() for term in terms]).sum() / count
    loss.backward()
    return float(loss.detach()), {f"lm.{n}": p.grad.clone() for n, p in lm.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * scale + 1e-7, rtol=1e-4, msg=name)


@pytest.fixture(scope="module")
def scorers() -> dict[Layout, Scorer]:
    lm = tiny_qwen3()
    return {layout: Scorer(lm, 1.0, layout) for layout in Layout}


@pytest.fixture(scope="module")
def wanted(scorers: dict[Layout, Scorer]) -> tuple[Batch, float, dict[str, torch.Tensor]]:
    batch = ragged_batch(0, 32)
    return (batch, *naive_loss(scorers[Layout.padded].lm, batch))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 24, 10_000])
def test_token_mean_any_micro_batch_size_ranks_and_layout_equals_a_loop_over_tokens(
    scorers: dict[Layout, Scorer], wanted: Any, layout: Layout, ranks: int, budget: int
) -> None:
    batch, loss, gradients = wanted
    plans = plan_micro_batches(batch, layout, ranks, budget, chunk_tokens=5)
    found, found_gradients, seen = accumulate(scorers[layout], batch, plans)
    assert found == pytest.approx(loss, rel=1e-5)
    assert seen == batch.num_action_tokens
    assert_same_gradients(found_gradients, gradients)


@pytest.mark.parametrize("layout", Layout)
def test_token_mean_any_row_order_is_the_same(scorers: dict[Layout, Scorer], wanted: Any, layout: Layout) -> None:
    batch, loss, gradients = wanted
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = batch.select(order)
    found, found_gradients, _ = accumulate(scorers[layout], shuffled, plan_micro_batches(shuffled, layout, 1, 30, 4))
    assert found == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(found_gradients, gradients)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(("extra", "pad"), [(1, 0), (7, 31)])
def test_token_mean_wider_padding_with_junk_in_it_is_the_same(
    scorers: dict[Layout, Scorer], wanted: Any, layout: Layout, extra: int, pad: int
) -> None:
    batch, loss, gradients = wanted
    wide = widened(batch, extra, pad)
    logprobs, entropy = scorers[layout](wide, 3)
    algo_cfg = make_cfg(algo=ALGO).algo
    scorers[layout].zero_grad()
    total, sums = losses.policy_objective(algo_cfg, wide, Scores(logprobs=logprobs, entropy=entropy), version=0)
    (total / wide.num_action_tokens).backward()
    assert float(total.detach()) / wide.num_action_tokens == pytest.approx(loss, rel=1e-5)
    assert all(torch.isfinite(value).all() for value in sums.values())
    found = {n: p.grad for n, p in scorers[layout].named_parameters() if p.grad is not None}
    assert_same_gradients(found, gradients)


def widened(batch: Batch, extra: int, pad: int) -> Batch:
    """More padding columns; pads hold a content id, and what is masked holds NaN."""
    fields: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            value = torch.nn.functional.pad(value, (0, extra))
        fields[name] = value
    wide = Batch(**fields)
    wide.tokens = torch.where(wide.attention_mask, wide.tokens, torch.tensor(pad))
    for name in ("train_logprobs", "ref_logprobs", "advantages", "rollout_logprobs"):
        setattr(wide, name, torch.where(wide.action_mask, getattr(wide, name), torch.tensor(math.nan)))
    return wide


@pytest.mark.parametrize("layout", Layout)
def test_sgd_step_one_rank_or_three_gives_the_same_weights(scorers: dict[Layout, Scorer], layout: Layout) -> None:
    batch = ragged_batch(5, 32)
    results = []
    for ranks, budget in ((1, 10_000), (3, 16)):
        _, gradients, _ = accumulate(scorers[layout], batch, plan_micro_batches(batch, layout, ranks, budget, 64))
        weights = dict(scorers[layout].named_parameters())
        results.append({name: weights[name].detach() - 0.1 * gradient for name, gradient in gradients.items()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("budget", [1, 1000])
def test_token_mean_one_token_of_loss_four_and_three_of_zero_is_one(
    scorers: dict[Layout, Scorer], budget: int, order: list[int]
) -> None:
    batch = ragged_batch(2, 32, prompt_lens=(2,), samples=2)
    batch.action_mask = torch.zeros_like(batch.action_mask)
    batch.action_mask[0, 2] = True
    width = max(6, batch.tokens.shape[1])
    batch = widened(batch, width - batch.tokens.shape[1], 0) if batch.tokens.shape[1] < width else batch
    batch.attention_mask[1, :5] = True
    batch.action_mask[1, 2:5] = True
    batch.train_logprobs = batch.ref_logprobs = None
    batch.rollout_logprobs = torch.zeros_like(batch.rollout_logprobs)
    batch.advantages = torch.where(batch.action_mask, torch.tensor([[-4.0], [0.0]]), torch.zeros(()))
    batch = batch.select(order)
    plans = plan_micro_batches(batch, Layout.padded, 1, budget, 64)
    assert len(plans[0]) == (2 if budget == 1 else 1)
    loss, gradients, seen = accumulate(scorers[Layout.padded], batch, plans, algo={})
    assert (loss, seen) == (pytest.approx(1.0), 4)
    (alone,) = (i for i, row in enumerate(order) if row == 0)
    only = batch.select([alone])
    _, part, _ = accumulate(scorers[Layout.padded], only, plan_micro_batches(only, Layout.padded, 1, 1, 64), algo={})
    assert_same_gradients(gradients, {name: gradient / 4 for name, gradient in part.items()})


@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), layout=st.sampled_from(list(Layout)), budget=st.sampled_from([1, 20, 40, 9999]))
def test_token_mean_any_ragged_batch_equals_a_loop_over_tokens(
    scorers: dict[Layout, Scorer], seed: int, layout: Layout, budget: int
) -> None:
    batch = ragged_batch(seed, 32, prompt_lens=(1 + seed % 3, 4), samples=2)
    loss, gradients = naive_loss(scorers[layout].lm, batch)
    found, found_gradients, _ = accumulate(
        scorers[layout], batch, plan_micro_batches(batch, layout, 1 + seed % 2, budget, 1 + seed % 7)
    )
    assert found == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert_same_gradients(found_gradients, gradients)


def test_reported_ranks_five_long_and_five_short_rows_equal_one_batch(scorers: dict[Layout, Scorer]) -> None:
    """The reported hang: 2 ranks, a budget of 100 tokens, five rows of 95 beside five of 20 (here in tenths)."""
    from rl.batching import collate
    from tests.unit.stand_ins import make_group

    groups = [make_group(p, [1, 2], [[(p + t) % 32 for t in range(17 if p < 5 else 2)]]) for p in range(10)]
    batch = collate(groups)
    assert sorted(set(batch.lengths)) == [4, 19]
    batch.advantages = batch.action_mask * torch.linspace(-1, 1, 10)[:, None]
    plans = plan_micro_batches(batch, Layout.padded, 2, 20, 8)
    assert len(plans[0]) == len(plans[1])
    cut_loss, cut_gradients, seen = accumulate(scorers[Layout.padded], batch, plans, algo={})
    whole = plan_micro_batches(batch, Layout.padded, 1, 10_000, 10_000)
    loss, gradients, _ = accumulate(scorers[Layout.padded], batch, whole, algo={})
    assert seen == batch.num_action_tokens
    assert cut_loss == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(cut_gradients, gradients)
