"""Critic, teacher and reward model on a small Qwen3 in this process, against plain forwards of one row at a time."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.forward import Scorer, ValueScorer
from actors.rank import recompute_activations
from actors.reward_model import RewardModelRank
from actors.roles import ActorCritic, ActorPolicy, ActorRewardModel, ActorTeacher, with_next_token
from conf.choices import Advantage, Layout, PolicyLoss, Recompute
from conf.schema import CriticConfig, TeacherConfig
from rl.numerics import MismatchError
from rl.types import Batch
from tests.unit.stand_ins import LocalGroup, make_cfg, ragged_batch, tiny_qwen3

VOCAB = 32
DISTILL: dict[str, Any] = {"algo": {"advantage": Advantage.teacher, "loss": PolicyLoss.divergence}}


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_qwen3(vocab=VOCAB)


@pytest.fixture
def batch() -> Batch:
    return ragged_batch(7, VOCAB, prompt_lens=(2, 6, 3), samples=3)


def states(lm: Any, batch: Batch, row: int) -> torch.Tensor:
    """The last hidden states [N, H] of one row alone."""
    hidden: torch.Tensor = lm.model(input_ids=batch.tokens[row : row + 1, : batch.lengths[row]]).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("layout", Layout)
def test_critic_values_are_of_the_state_before_each_token_and_after_the_last(
    lm: Any, batch: Batch, layout: Layout
) -> None:
    cfg = make_cfg(trainer={"layout": layout, "micro_batch_tokens": 30})
    scorer = ValueScorer(lm.model, layout)
    torch.nn.init.normal_(scorer.value_head.weight)
    critic = ActorCritic(cfg, LocalGroup(cfg, scorer, "critic"))  # type: ignore[arg-type]
    values, after = critic.values(batch)
    assert values.shape == batch.tokens.shape and (values[~batch.action_mask] == 0).all()
    with torch.no_grad():
        for row in range(batch.num_rows):
            wanted = scorer.value_head(states(lm, batch, row))[:, 0]
            places = batch.action_mask[row].nonzero()[:, 0]
            torch.testing.assert_close(values[row, places], wanted[places - 1], atol=1e-5, rtol=1e-5)
            assert float(after[row]) == pytest.approx(float(wanted[-1]), abs=1e-5)


@pytest.mark.parametrize("kind", [Recompute.full, Recompute.selective])
def test_recomputation_leaves_dropout_off(batch: Batch, kind: Recompute) -> None:
    """A model that was made with dropout scores the same in the training mode that recomputation needs."""
    lm = tiny_qwen3(vocab=VOCAB, attention_dropout=0.5)
    scorer = Scorer(lm.eval(), 1.0, Layout.padded)
    wanted = scorer(batch, 1)[0]
    recompute_activations(lm, kind)
    assert lm.training
    torch.testing.assert_close(scorer(batch, 1)[0], wanted)


def test_fused_update_checks_the_mismatch_on_rows_of_the_present_weights_only(batch: Batch) -> None:
    """With lag, a row that older weights sampled may differ; one that the present weights sampled may not."""
    cfg = make_cfg(max_lag=1, rollout={"mismatch_limit": 1e-4})
    policy = ActorPolicy(cfg, LocalGroup(cfg, Scorer(tiny_qwen3(vocab=VOCAB), 1.0, Layout.padded)))  # type: ignore[arg-type]
    batch.ref_logprobs = None
    batch.version = torch.full_like(batch.version, 6)
    policy.update(batch, 0, 7)  # recorded log-probabilities are nowhere near, but no row is of version 7
    batch.version[0] = 7
    with pytest.raises(MismatchError, match="version 7"):
        policy.update(batch, 0, 7)


def test_with_next_token_adds_one_action_token_behind_each_row(batch: Batch) -> None:
    longer = with_next_token(batch)
    assert longer.lengths == [n + 1 for n in batch.lengths]
    assert longer.num_action_tokens == batch.num_action_tokens + batch.num_rows
    assert torch.equal(longer.tokens[:, :-1], batch.tokens)


def test_critic_starts_at_zero_and_comes_to_the_returns(lm: Any, batch: Batch) -> None:
    cfg = make_cfg(num_steps=50, algo={"advantage": Advantage.gae}, critic=CriticConfig(lr=0.05))
    critic = ActorCritic(cfg, LocalGroup(cfg, ValueScorer(tiny_qwen3(vocab=VOCAB).model, Layout.padded), "critic"))  # type: ignore[arg-type]
    batch.values, _ = critic.values(batch)
    assert (batch.values == 0).all()
    batch.returns = torch.where(batch.action_mask, 1.5, math.nan)
    losses = []
    for step in range(30):
        losses.append(critic.update(batch, step)["critic/loss"])
    assert losses[0] == pytest.approx(1.5**2 / 2) and losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("top_k", [0, 4, 1000])
def test_teacher_top_logprobs_are_its_likeliest_tokens(lm: Any, batch: Batch, top_k: int) -> None:
    cfg = make_cfg(teacher=TeacherConfig(path="teacher", top_k=top_k), **DISTILL)
    scorer = Scorer(lm, 0.7, Layout.shared_prefix)
    teacher = ActorTeacher(cfg, LocalGroup(cfg, scorer, "teacher", trained=False))  # type: ignore[arg-type]
    ids, logprobs = teacher.top_logprobs(batch)
    count = top_k if top_k == 4 else VOCAB
    assert ids.shape == logprobs.shape == (*batch.tokens.shape, count)
    with torch.no_grad():
        for row in range(batch.num_rows):
            every = (lm.lm_head(states(lm, batch, row)) / 0.7).log_softmax(-1)
            for t in batch.action_mask[row].nonzero()[:, 0].tolist():
                wanted = every[t - 1].topk(count)
                torch.testing.assert_close(logprobs[row, t], wanted.values, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(every[t - 1][ids[row, t]], wanted.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [VOCAB, 5])
def test_divergence_is_the_reverse_kl_with_the_rest_as_one_outcome(lm: Any, batch: Batch, top_k: int) -> None:
    logits = torch.randn(*batch.tokens.shape, VOCAB, generator=torch.Generator().manual_seed(0))
    every = logits.log_softmax(-1)
    batch.teacher_topk, batch.teacher_ids = every.topk(top_k)
    _, _, divergence = Scorer(lm, 0.7, Layout.padded)(batch, 3)
    assert (divergence[~batch.action_mask] == 0).all()
    with torch.no_grad():
        for row in range(batch.num_rows):
            ours = (lm.lm_head(states(lm, batch, row)) / 0.7).softmax(-1)
            for t in batch.action_mask[row].nonzero()[:, 0].tolist():
                chosen = batch.teacher_ids[row, t]
                p, q = ours[t - 1][chosen], every[row, t][chosen].exp()
                wanted = float((p * (p / q).log()).sum())
                if top_k < VOCAB:
                    wanted += float((1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log())
                assert float(divergence[row, t]) == pytest.approx(wanted, abs=1e-4)


def test_reward_model_scores_the_last_token_of_each_row(batch: Batch, tmp_path: Path) -> None:
    """As the model's own forward does it for one row alone; a batch may contain the pad id, which misleads that one."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_labels": 1, "pad_token_id": 0}
    torch.manual_seed(1)
    model = Qwen3ForSequenceClassification(Qwen3Config(**shape, **heads)).eval()
    model.save_pretrained(tmp_path)
    cfg = make_cfg(trainer={"micro_batch_tokens": 30})
    group: Any = LocalGroup(cfg, torch.nn.Identity(), "reward_model")
    rank: RewardModelRank = group.rank
    rank.start(str(tmp_path), "127.0.0.1", 1, None, 1)
    batch.tokens[0, batch.lengths[0] - 1] = 0  # the pad id, as content
    found = ActorRewardModel(cfg, group).scores(batch)
    with torch.no_grad():
        for row in range(batch.num_rows):
            hidden = model.model(input_ids=batch.tokens[row : row + 1, : batch.lengths[row]]).last_hidden_state
            assert float(found[row]) == pytest.approx(float(model.score(hidden[0, -1])), abs=1e-5)
