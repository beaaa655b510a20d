"""The whole path of a rank in fp64: whatever the algorithm, a batch cut in any way trains the same (invariant 4).

Random ragged batches with wholly masked rows and NaN at every masked place, on a small Qwen3. Plain SGD's step is the
gradient, which Adam would hide errors of.
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
from conf.choices import (
    Advantage,
    Aggregation,
    Correction,
    KlPlace,
    Layout,
    PolicyLoss,
)
from rl import losses
from rl.aggregation import loss_weights
from rl.batching import plan_micro_batches
from rl.types import Batch, Scores
from tests.unit.stand_ins import make_cfg, ragged_batch, tiny_qwen3

VOCAB = 32
ALGORITHMS: dict[str, dict[str, Any]] = {
    "clip, KL and entropy": {"kl_coef": 0.3, "entropy_coef": 0.01, "dual_clip": 3.0},
    "sequence mean": {"aggregation": Aggregation.sequence_mean, "correction": Correction.band},
    "sequence sum": {"aggregation": Aggregation.sequence_sum, "loss": PolicyLoss.cispo},
    "gspo": {"loss": PolicyLoss.gspo, "aggregation": Aggregation.sequence_mean},
    "gmpo": {"loss": PolicyLoss.gmpo, "aggregation": Aggregation.sequence_mean},
    "sapo": {"loss": PolicyLoss.sapo, "correction": Correction.mask_sequence},
    "decoupled": {"loss": PolicyLoss.decoupled, "kl_in": KlPlace.reward, "kl_coef": 0.1},
    "reinforce": {"loss": PolicyLoss.reinforce, "correction": Correction.truncate, "staleness_decay": 0.5},
    "divergence": {"loss": PolicyLoss.divergence},
}


@pytest.fixture(scope="module")
def lm() -> torch.nn.Module:
    return tiny_qwen3(vocab=VOCAB).double()


def config(name: str) -> Any:
    algo = ALGORITHMS[name]
    if algo.get("loss") is PolicyLoss.divergence:
        algo = algo | {"advantage": Advantage.teacher}
    cfg = make_cfg()
    return type(cfg.algo)(**algo)


def batch_for(seed: int, divergence: bool) -> Batch:
    """A scored fp64 batch; its second row has no action token, and NaN stands at every masked place."""
    batch = ragged_batch(seed, VOCAB, prompt_lens=(2 + seed % 3, 5, 1), samples=3)
    batch.action_mask[1] = False
    batch.version = torch.arange(batch.num_rows) % 3
    mask = batch.action_mask
    for name in ("rollout_logprobs", "train_logprobs", "ref_logprobs", "advantages"):
        setattr(batch, name, torch.where(mask, getattr(batch, name).double(), math.nan))
    if divergence:
        random = torch.Generator().manual_seed(seed)
        logits = torch.randn(*mask.shape, VOCAB, generator=random, dtype=torch.float64)
        batch.teacher_topk, batch.teacher_ids = logits.log_softmax(-1).topk(5)
    return batch


def accumulate(lm: torch.nn.Module, algo: Any, batch: Batch, layout: Layout, ranks: int, budget: int) -> Any:
    """Loss and gradients as the ranks sum them, and the metrics' sums."""
    scorer = Scorer(lm, 0.8, layout)
    scorer.zero_grad()
    batch.loss_weight = loss_weights(algo.aggregation, batch.action_mask, 6)
    total, parts = 0.0, []
    for plan in plan_micro_batches(batch, layout, ranks, budget, chunk_tokens=4):
        for micro in plan:
            part = (
                batch.select(micro.rows)
                if micro.rows
                else dummy_batch(batch.teacher_ids is not None, with_reference=True)
            )
            scores = Scores(**dict(zip(SCORES, scorer(part, micro.num_chunks), strict=False)))
            loss, sums = losses.policy_objective(algo, part, scores, version=3)
            (loss / batch.num_action_tokens).backward()
            total += float(loss.detach()) / batch.num_action_tokens
            parts.append(sums)
    gradients = {n: p.grad.clone() for n, p in lm.named_parameters() if p.grad is not None}
    sums = {
        name: torch.stack([part[name].double() for part in parts]).sum(0)
        for name in parts[0]
        if not name.endswith("_max")
    }
    return total, gradients, sums


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(list(Layout)),
    ranks=st.integers(1, 2),
    budget=st.sampled_from([1, 20, 40]),
    data=st.data(),
)
def test_any_cut_gives_the_same_loss_gradient_and_metrics(
    lm: torch.nn.Module, name: str, seed: int, layout: Layout, ranks: int, budget: int, data: st.DataObject
) -> None:
    algo = config(name)
    batch = batch_for(seed, algo.has_divergence)
    loss, gradients, sums = accumulate(lm, algo, batch, Layout.padded, 1, 10_000)
    assert math.isfinite(loss) and all(torch.isfinite(g).all() for g in gradients.values())
    order = data.draw(st.permutations(range(batch.num_rows)))
    found, found_gradients, found_sums = accumulate(lm, algo, batch.select(order), layout, ranks, budget)
    assert found == pytest.approx(loss, abs=1e-6)
    assert found_gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[parameter], gradient, atol=1e-6, rtol=1e-6, msg=parameter)
    for metric, value in sums.items():
        torch.testing.assert_close(found_sums[metric], value, atol=1e-6, rtol=1e-6, msg=metric)
