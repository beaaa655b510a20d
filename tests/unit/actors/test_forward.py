"""Scoring: each log-probability belongs to its own token, at the sampling temperature, in any layout and chunking."""

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.forward import Scorer, chunked_scores, scatter
from actors.fused import FusedTokenScores
from actors.policy import probe_batch
from actors.rank import dummy_batch
from conf.choices import Layout
from conf.errors import ConfigError
from conf.schema import RolloutConfig
from rl.batching import collate
from rl.losses import clipped_ratio
from rl.types import Batch
from tests.unit.stand_ins import make_group, ragged_batch, tiny_qwen3


class TableLm(torch.nn.Module):
    """A language model whose logits at position p are row p of a table, whatever the tokens."""

    base_model_prefix = "model"

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        from transformers import Qwen3Config

        self.config = Qwen3Config(num_hidden_layers=1)
        self.model = TableBase(logits)

    def get_output_embeddings(self) -> torch.nn.Module:
        return torch.nn.Identity()


class TableBase(torch.nn.Module):
    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.table = torch.nn.Parameter(logits)

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> SimpleNamespace:
        if past_key_values is not None:
            zeros = torch.zeros(input_ids.shape[0], 1, input_ids.shape[1], 1)
            past_key_values.update(zeros, zeros, 0)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return SimpleNamespace(last_hidden_state=self.table[position_ids])


def table_batch() -> Batch:
    """A prompt of 2 tokens; responses of 4 and of 1 token, vocabulary 5."""
    return collate([make_group(0, [1, 4], [[3, 0, 2, 4], [2]])])


TABLE = torch.tensor([[((7 * p + 3 * v) % 11) / 3 for v in range(5)] for p in range(6)])


@pytest.mark.parametrize("layout", Layout)
def test_scorer_hand_set_logits_match_token_by_token(layout: Layout) -> None:
    batch = table_batch()
    with torch.no_grad():
        logprobs, entropy = Scorer(TableLm(TABLE), 1.0, layout)(batch, 2)
    known = TABLE.double().log_softmax(-1)
    for row, length in enumerate(batch.lengths):
        for t in range(batch.tokens.shape[1]):
            trained = 2 <= t < length
            wanted = float(known[t - 1, batch.tokens[row, t]]) if trained else 0.0
            assert float(logprobs[row, t]) == pytest.approx(wanted, abs=1e-6)
            spread = float(-(known[t - 1].exp() * known[t - 1]).sum()) if trained else 0.0
            assert float(entropy[row, t]) == pytest.approx(spread, abs=1e-5)
    values = logprobs[batch.action_mask].tolist()
    assert len({round(v, 4) for v in values}) == len(values) == batch.num_action_tokens == 5


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("place", [2, 3, 4, 5])
def test_scorer_one_advantage_touches_that_position_alone(layout: Layout, place: int) -> None:
    lm = TableLm(TABLE)
    batch = table_batch()
    logprobs, _ = Scorer(lm, 1.0, layout)(batch, 1)
    advantages = torch.zeros_like(logprobs)
    advantages[0, place] = 1.0
    loss, _ = clipped_ratio(logprobs, logprobs.detach(), advantages, batch.action_mask, 0.2, 0.2)
    loss.sum().backward()
    assert lm.model.table.grad is not None
    assert lm.model.table.grad.any(-1).nonzero()[:, 0].tolist() == [place - 1]


@pytest.mark.parametrize("layout", Layout)
def test_scorer_temperature_half_scales_logits_not_logprobs(layout: Layout) -> None:
    lm = TableLm(torch.tensor([[2.0, 0.0]] * 4))
    batch = collate([make_group(0, [1], [[0, 0, 0]])])
    scorer = Scorer(lm, 0.5, layout)
    assert scorer(batch, 2)[0][0, 1:].tolist() == pytest.approx([-0.01815] * 3, abs=1e-5)
    assert scorer(batch, 2, 1.0)[0][0, 1:].tolist() == pytest.approx([-0.12693] * 3, abs=1e-5)
    hot = math.exp(-0.01815)
    wanted = -(hot * math.log(hot) + (1 - hot) * math.log(1 - hot))
    assert float(scorer(batch, 2)[1][0, 1]) == pytest.approx(wanted, abs=1e-3)


def test_temperature_zero_is_refused_for_training() -> None:
    with pytest.raises(ConfigError, match=r"rollout.temperature=0"):
        RolloutConfig(temperature=0.0)


# -- a real model --


@pytest.fixture(scope="module")
def lm() -> torch.nn.Module:
    return tiny_qwen3(seed=1)


def naive(lm: torch.nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [B, T] row by row: no padding, no shared prompt, fp64 softmax."""
    logprobs, entropy = torch.zeros(2, *batch.tokens.shape, dtype=torch.float64)
    with torch.no_grad():
        for i, length in enumerate(batch.lengths):
            row = batch.tokens[i, :length]
            scores = (lm(input_ids=row[None]).logits[0].double() / temperature).log_softmax(-1)
            for t in range(1, length):
                if batch.action_mask[i, t]:
                    logprobs[i, t] = scores[t - 1, row[t]]
                    entropy[i, t] = torch.distributions.Categorical(logits=scores[t - 1]).entropy()
    return logprobs, entropy


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("prompt_lens", [(4, 4), (1, 6, 3), (2,)])
def test_scorer_any_prompts_equal_rows_scored_alone(
    lm: torch.nn.Module, layout: Layout, temperature: float, prompt_lens: tuple[int, ...]
) -> None:
    batch = ragged_batch(len(prompt_lens), 32, prompt_lens=prompt_lens)
    with torch.no_grad():
        logprobs, entropy = Scorer(lm, temperature, layout)(batch, 3)
    wanted, wanted_entropy = naive(lm, batch, temperature)
    torch.testing.assert_close(logprobs.double(), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=2e-5, rtol=1e-5)
    assert logprobs.dtype is entropy.dtype is torch.float32


@pytest.mark.parametrize("layout", Layout)
def test_scorer_all_responses_of_one_token(lm: torch.nn.Module, layout: Layout) -> None:
    batch = collate([make_group(0, [3, 9, 9], [[1], [2], [9]]), make_group(1, [3], [[4]])])
    with torch.no_grad():
        logprobs, _ = Scorer(lm, 1.0, layout)(batch, 1)
    torch.testing.assert_close(logprobs.double(), naive(lm, batch, 1.0)[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", Layout)
def test_scorer_masked_tokens_inside_a_response_are_context_only(lm: torch.nn.Module, layout: Layout) -> None:
    batch = collate([make_group(0, [3, 9], [[1, 2, 3, 4], [5, 6]])])
    batch.action_mask[0, 3] = False
    with torch.no_grad():
        logprobs, _ = Scorer(lm, 1.0, layout)(batch, 2)
    assert logprobs[0, 3] == 0
    torch.testing.assert_close(logprobs.double(), naive(lm, batch, 1.0)[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", Layout)
def test_scorer_interleaved_groups_equal_sorted_ones(lm: torch.nn.Module, layout: Layout) -> None:
    batch = ragged_batch(4, 32, prompt_lens=(2, 6))
    order = [3, 0, 4, 1, 5, 2]
    with torch.no_grad():
        scorer = Scorer(lm, 1.0, layout)
        straight, mixed = scorer(batch, 1)[0], scorer(batch.select(order), 1)[0]
    torch.testing.assert_close(mixed, straight[order], atol=1e-5, rtol=1e-5)


def test_scorer_any_number_of_chunks_gives_values_and_gradients_of_one(lm: torch.nn.Module) -> None:
    torch.manual_seed(0)
    hidden, targets, head = torch.randn(5, 32), torch.tensor([0, 31, 7, 7, 2]), lm.get_output_embeddings()  # type: ignore[operator]
    calls = []
    hook = head.register_forward_hook(lambda _module, args, _out: calls.append(len(args[0])))

    def run(num_chunks: int) -> tuple[torch.Tensor, ...]:
        x = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, entropy = chunked_scores(x, targets, head, 0.7, num_chunks)
        forward = list(calls)
        (logprobs * torch.arange(1, 6) - entropy).sum().backward()
        assert len(forward) == num_chunks and len(set(forward)) == 1
        calls.clear()
        assert x.grad is not None
        return logprobs.detach(), entropy.detach(), x.grad, head.weight.grad.clone()

    wanted = run(1)
    for num_chunks in range(2, 9):
        for found, value in zip(run(num_chunks), wanted, strict=True):
            torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-5)
    hook.remove()
    scores = (head(hidden).detach().double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(wanted[0].double(), scores.gather(-1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(wanted[1].double(), -(scores.exp() * scores).sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_dummy_batch_reaches_every_head_call_with_exactly_zero_gradient(layout: Layout, num_chunks: int) -> None:
    lm = tiny_qwen3(tie_word_embeddings=False)
    batch = dummy_batch()
    logprobs, entropy = Scorer(lm, 1.0, layout)(batch, num_chunks)
    assert batch.advantages is not None and not logprobs.any() and not entropy.any()
    loss, sums = clipped_ratio(logprobs, logprobs.detach(), batch.advantages, batch.action_mask, 0.2, 0.2)
    (loss.sum() / 7).backward()
    assert all(float(value) == 0 for value in sums.values())
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    assert all(g is None or not g.any() for g in gradients.values())
    assert gradients["lm_head.weight"] is not None


def test_probe_batch_scores_every_token_but_the_first(lm: torch.nn.Module) -> None:
    batch = probe_batch([3, 1, 4, 1, 5])
    with torch.no_grad():
        logprobs, _ = Scorer(lm, 0.5, Layout.shared_prefix)(batch, 1, 1.0, Layout.padded)
    wanted, _ = naive(lm, batch, 1.0)
    assert batch.num_action_tokens == 4
    torch.testing.assert_close(logprobs.double(), wanted, atol=2e-5, rtol=1e-5)


def test_scatter_puts_values_in_row_major_order() -> None:
    mask = torch.tensor([[False, True], [True, True]])
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    spread = scatter(values, mask)
    assert spread.tolist() == [[0, 1], [2, 3]]
    (spread * torch.tensor([[9.0, 1.0], [2.0, 3.0]])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1, 2, 3]


# -- compiled kernels --

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scores_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, temperature: float, fused: bool
) -> Found:
    """Log-probabilities, entropies and the gradient of a weighted sum of them; `fused` False is the reference."""
    logits = logits.detach().requires_grad_()
    if fused:
        logprobs, entropy = FusedTokenScores.apply(logits, targets, temperature)
    else:
        every = (logits / temperature).log_softmax(-1)
        logprobs, entropy = every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    (weights[0] @ logprobs + weights[1] @ entropy).backward()
    assert logits.grad is not None
    return logprobs.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_formulas_are_exact_in_fp64(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Uncompiled: what the kernels are made from."""
    monkeypatch.setattr("actors.fused.kernel", lambda function: function)
    random = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 50, generator=random, dtype=torch.float64)
    targets, weights = torch.randint(0, 50, (6,), generator=random), torch.randn(2, 6, dtype=torch.float64)
    found, wanted = (scores_and_gradient(logits, targets, weights, temperature, fused) for fused in (True, False))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    weights[1] = 0
    alone = logits.clone().requires_grad_()
    logprobs, _ = FusedTokenScores.apply(alone, targets, temperature)
    (weights[0] @ logprobs).backward()  # of log-probabilities only
    torch.testing.assert_close(alone.grad, scores_and_gradient(logits, targets, weights, temperature, False)[2])


def test_fused_scorer_equals_the_default_one(lm: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []

    def uncompiled(function: Any) -> Any:
        kinds.append(function.__name__)
        return function

    monkeypatch.setattr("actors.fused.kernel", uncompiled)
    batch, results = ragged_batch(3, 32, prompt_lens=(1, 6, 3)), []
    for fused in (False, True):
        lm.zero_grad()
        logprobs, entropy = Scorer(lm, 0.6, Layout.padded, fused=fused)(batch, 3)
        assert bool(kinds) is fused
        (logprobs.sum() - 2 * entropy.sum()).backward()
        results.append([logprobs.detach(), entropy.detach(), *(p.grad.clone() for p in lm.parameters())])  # type: ignore[union-attr]
    assert kinds.count("gradient") == 3
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.environ.get("TORCHDYNAMO_DISABLE") == "1", reason="TORCHDYNAMO_DISABLE=1: nothing is compiled")
def test_compiled_kernels_equal_the_default_and_fp64_for_any_number_of_tokens() -> None:
    """50,000 tokens of vocabulary; the errors of both against fp64 are of one size (see TokenScores)."""
    from torch._dynamo.utils import counters

    random = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 50_000, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(50_000, 16, generator=random))
    before = counters["stats"]["unique_graphs"]
    for count, num_chunks, temperature in ((24, 2, 1.0), (35, 5, 0.7), (9, 1, 1.3), (64, 4, 1.0)):
        hidden = torch.randn(count, 16, generator=random)
        targets = torch.randint(0, 50_000, (count,), generator=random)
        weights = torch.randn(2, count, generator=random)
        found = []
        for fused, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
            x = hidden.to(dtype, copy=True).requires_grad_()
            scored = chunked_scores(x, targets, head.to(dtype), temperature, num_chunks, fused=fused)
            (weights.to(dtype) * torch.stack(scored)).sum().backward()
            assert x.grad is not None
            found.append([*(values.detach().double() for values in scored), x.grad.double()])
        for ours, default in zip(found[0][:2], found[1][:2], strict=True):
            torch.testing.assert_close(ours, default, atol=1e-5, rtol=1e-5)
        for ours, default, exact in zip(*found, strict=True):
            limit = 2 * float((default - exact).abs().max()) + 1e-6 * float(exact.abs().max())
            assert float((ours - exact).abs().max()) <= limit
    assert counters["stats"]["unique_graphs"] - before == 2, "compiled again for another number of tokens"
