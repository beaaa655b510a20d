"""Every policy loss against a loop over tokens that shares no code with it, and against enumerated exact gradients."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rl import losses
from rl.advantages import group_advantages, leave_one_out
from rl.types import Sums

Row = list[float]
Loss = Callable[..., tuple[torch.Tensor, Sums]]


def clip_token(ratio: float, advantage: float, low: float, high: float) -> float:
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def naive_clip(new: Row, old: Row, adv: Row, low: float, high: float, dual: float) -> Row:
    out = []
    for n, o, a in zip(new, old, adv, strict=True):
        loss = clip_token(math.exp(n - o), a, low, high)
        out.append(min(loss, -a * dual) if a < 0 and dual else loss)
    return out


def naive_gspo(new: Row, old: Row, adv: Row, low: float, high: float) -> Row:
    ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
    return [clip_token(ratio, a, low, high) for a in adv]


def naive_gmpo(new: Row, old: Row, adv: Row, low: float, high: float) -> Row:
    total = 0.0
    for n, o in zip(new, old, strict=True):
        plain, bounded = n - o, min(max(n - o, -low), high)
        total += min(plain, bounded) if adv[0] > 0 else max(plain, bounded) if adv[0] < 0 else 0.0
    return [-adv[0] * math.exp(total / len(new))] * len(new)


def naive_cispo(new: Row, old: Row, adv: Row, low: float, high: float) -> Row:
    weights = [min(max(math.exp(n - o), 1 - low), 1 + high) for n, o in zip(new, old, strict=True)]
    return [-w * a * n for w, a, n in zip(weights, adv, new, strict=True)]


def naive_sapo(new: Row, old: Row, adv: Row, positive: float, negative: float) -> Row:
    out = []
    for n, o, a in zip(new, old, adv, strict=True):
        tau = positive if a > 0 else negative
        out.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1))))
    return out


def naive_reinforce(new: Row, old: Row, adv: Row) -> Row:
    return [-a * n for n, a in zip(new, adv, strict=True)]


# name -> (loss, naive loss, further arguments, whether a row has one advantage)
LOSSES: dict[str, tuple[Loss, Callable[..., Row], tuple[float, ...], bool]] = {
    "clip": (losses.clipped_ratio, naive_clip, (0.2, 0.28, 0.0), False),
    "dual clip": (losses.clipped_ratio, naive_clip, (0.2, 0.2, 1.5), False),
    "gspo": (losses.gspo, naive_gspo, (0.05, 0.1), False),
    "gmpo": (losses.gmpo, naive_gmpo, (0.3, 0.4), True),
    "cispo": (losses.cispo, naive_cispo, (0.3, 0.5), False),
    "sapo": (losses.sapo, naive_sapo, (1.0, 1.05), False),
    "reinforce": (losses.reinforce, naive_reinforce, (), False),
}


def ragged(seed: int, one_advantage: bool) -> tuple[torch.Tensor, ...]:
    """new, old, advantages, mask [6, 9] in fp64: rows with holes, one wholly masked, NaN at every masked place."""
    random = np.random.default_rng(seed)
    mask = torch.tensor(random.random((6, 9)) < 0.6)
    mask[:, 3], mask[2] = True, False
    new = torch.tensor(random.normal(-1.5, 0.7, mask.shape))
    old = new + torch.tensor(random.normal(0, 0.4, mask.shape))
    advantages = torch.tensor(random.normal(0, 1, (6, 1 if one_advantage else 9))).expand(6, 9)
    nan = torch.tensor(math.nan, dtype=torch.float64)
    return (*(torch.where(mask, x, nan) for x in (new, old, advantages)), mask)


def rows_of(*tensors: torch.Tensor, mask: torch.Tensor) -> list[list[Row]]:
    return [[tensor[i][mask[i]].tolist() for tensor in tensors] for i in range(len(mask)) if mask[i].any()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", LOSSES)
def test_loss_any_ragged_batch_equals_a_loop_over_tokens(name: str, seed: int) -> None:
    loss, naive, arguments, one_advantage = LOSSES[name]
    new, old, advantages, mask = ragged(seed, one_advantage)
    found, sums = loss(new, old, advantages, mask, *arguments)
    assert (found[~mask] == 0).all() and all(torch.isfinite(value).all() for value in sums.values())
    wanted = [naive(*row, *arguments) for row in rows_of(new, old, advantages, mask=mask)]
    ours = [row for (row,) in rows_of(found, mask=mask)]
    for a, b in zip(ours, wanted, strict=True):
        assert a == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_equals_differences_of_the_loop(name: str) -> None:
    """By central differences of the naive row loss. The weights of CISPO are constants: they stay where they were."""
    loss, naive, arguments, one_advantage = LOSSES[name]
    new, old, advantages, mask = ragged(11, one_advantage)
    logprobs = new.clone().requires_grad_()
    found, _ = loss(logprobs, old, advantages, mask, *arguments)
    found.sum().backward()
    assert logprobs.grad is not None and (logprobs.grad[~mask] == 0).all()
    step = 1e-6
    slopes = [row for (row,) in rows_of(logprobs.grad, mask=mask)]
    for (new_row, old_row, adv_row), slope_row in zip(rows_of(new, old, advantages, mask=mask), slopes, strict=True):
        for t, slope in enumerate(slope_row):
            up, down = list(new_row), list(new_row)
            up[t], down[t] = new_row[t] + step, new_row[t] - step
            if name == "cispo":
                (weight,) = naive_cispo([new_row[t]], [old_row[t]], [adv_row[t]], *arguments)
                wanted = weight / new_row[t]
            elif name == "gspo":  # GSPO-token: the ratio's own gradient, with each token's advantage in its place
                ratio = math.exp(sum(n - o for n, o in zip(new_row, old_row, strict=True)) / len(new_row))
                moved = [clip_token(ratio * math.exp(d), adv_row[t], *arguments) for d in (step, -step)]
                wanted = (moved[0] - moved[1]) / (2 * step)
            else:
                wanted = sum(naive(up, old_row, adv_row, *arguments)) - sum(naive(down, old_row, adv_row, *arguments))
                wanted /= 2 * step
            assert slope == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"), [(5, -1, 3, 0), (0.1, 2, -0.2, -2), (2, -1, 2, 1), (0.5, -1, 0.8, 0)]
)
def test_dual_clip_bounds_negative_advantages_only(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero, true = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    found, sums = losses.clipped_ratio(logprob, zero, zero + advantage, true, 0.2, 0.2, 3.0)
    (gradient,) = torch.autograd.grad(found.sum(), logprob)
    assert float(found.detach()) == pytest.approx(loss)
    assert float(gradient) / ratio == pytest.approx(slope, abs=1e-12)
    assert int(sums["dual_clip"]) == (ratio == 5)


def test_decoupled_is_the_clipped_loss_times_proximal_over_behaviour() -> None:
    new, old, advantages, mask = ragged(3, False)
    behaviour = old - 0.3
    found, _ = losses.decoupled(new, old, advantages, mask, 0.2, 0.2, behaviour)
    clipped, _ = losses.clipped_ratio(new, old, advantages, mask, 0.2, 0.2)
    torch.testing.assert_close(found, clipped * math.exp(0.3))


# -- exact gradients: a policy over two tokens, two steps long, every outcome counted with its probability --

REWARD = {(0, 0): 1.0, (0, 1): -0.5, (1, 0): 0.25, (1, 1): 2.0}
SEQUENCES = list(REWARD)


def sequence_logprobs(theta: torch.Tensor) -> torch.Tensor:
    """theta [3]: logits of token 1 at the start, after 0, after 1. Log-probabilities [4 sequences, 2 tokens]."""
    rows = []
    for first, second in SEQUENCES:
        logits = torch.stack([theta[0], theta[1 + first]])
        chosen = torch.tensor([first, second], dtype=torch.float64)
        rows.append(torch.nn.functional.logsigmoid(logits * (2 * chosen - 1)))
    return torch.stack(rows)


def exact_gradient(theta: torch.Tensor) -> torch.Tensor:
    """Of minus the expected reward."""
    rewards = torch.tensor([REWARD[s] for s in SEQUENCES], dtype=torch.float64)
    expected = -(sequence_logprobs(theta).sum(1).exp() * rewards).sum()
    (gradient,) = torch.autograd.grad(expected, theta)
    return gradient


@pytest.fixture
def theta() -> torch.Tensor:
    return torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("baseline", [0.0, 0.7])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_at_the_sampling_policy_has_the_exact_policy_gradient(
    name: str, baseline: float, theta: torch.Tensor
) -> None:
    """At ratio 1, summed over tokens, every one of them is the policy gradient, whatever the baseline."""
    loss, _, arguments, _ = LOSSES[name]
    logprobs = sequence_logprobs(theta)
    advantages = torch.tensor([[REWARD[s] - baseline] * 2 for s in SEQUENCES], dtype=torch.float64)
    per_token, _ = loss(logprobs, logprobs.detach(), advantages, torch.ones(4, 2, dtype=torch.bool), *arguments)
    (found,) = torch.autograd.grad((logprobs.detach().sum(1).exp() * per_token.sum(1)).sum(), theta)
    torch.testing.assert_close(found, exact_gradient(theta), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("estimator", "factor"), [("rloo", 1.0), ("dr_grpo", None)])
def test_group_estimator_has_the_exact_policy_gradient(
    estimator: str, factor: float | None, size: int, theta: torch.Tensor
) -> None:
    """RLOO without bias; Dr.GRPO's own mean shrinks it by (n - 1) / n. Every group of `size` samples is counted."""
    logprobs = sequence_logprobs(theta)
    mask, total = torch.ones(size, 2, dtype=torch.bool), torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(4), repeat=size):
        rewards, same = torch.tensor([REWARD[SEQUENCES[i]] for i in group]), torch.zeros(size, dtype=torch.long)
        rows = group_advantages(rewards, same, False) if estimator == "dr_grpo" else leave_one_out(rewards, same)
        picked = logprobs[list(group)]
        per_token, _ = losses.reinforce(picked, picked.detach(), rows.double()[:, None].expand(size, 2), mask)
        total = total + picked.detach().sum().exp() * per_token.sum() / size
    (found,) = torch.autograd.grad(total, theta)
    scale = factor if factor is not None else (size - 1) / size
    torch.testing.assert_close(found, scale * exact_gradient(theta), atol=1e-7, rtol=1e-6)


# -- values --


def test_value_loss_is_half_the_squared_error_and_gives_explained_variance() -> None:
    from rl.metrics import critic_metrics

    values = torch.tensor([[0.0, 1.0, 2.0, 9.0]], dtype=torch.float64)
    returns = torch.tensor([[1.0, 1.0, 4.0, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    loss, sums = losses.value_loss(values, values, returns, mask, 0.0)
    assert loss.tolist() == [[0.5, 0.0, 2.0, 0.0]]
    found = critic_metrics(sums | {"loss": loss.sum()}, 3)
    error, target = np.array([-1.0, 0.0, -2.0]), np.array([1.0, 1.0, 4.0])
    assert found["critic/explained_variance"] == pytest.approx(1 - error.var() / target.var())
    assert found["critic/loss"] == pytest.approx(2.5 / 3)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (0.5, 0.0, 1.0, 0.32, 0.0),
        (0.1, 0.0, 1.0, 0.405, -0.9),
        (-0.5, 0.0, 1.0, 1.125, -1.5),
        (0.5, 0.0, 0.1, 0.08, 0.4),
    ],
)
def test_value_clip_takes_the_larger_error(value: float, old: float, target: float, loss: float, slope: float) -> None:
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    was, wanted = (torch.tensor([[x]], dtype=torch.float64) for x in (old, target))
    found, _ = losses.value_loss(v, was, wanted, torch.ones(1, 1, dtype=torch.bool), 0.2)
    (gradient,) = torch.autograd.grad(found.sum(), v)
    assert (float(found.detach()), float(gradient)) == pytest.approx((loss, slope))
