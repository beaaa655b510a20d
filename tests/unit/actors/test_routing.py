"""Which experts the routers choose: counted over real tokens once, in every way of cutting a batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.forward import Scorer
from actors.routing import Routing
from conf.choices import Layout
from rl.metrics import router_metrics
from tests.unit.stand_ins import ragged_batch


@pytest.fixture(scope="module")
def lm(tiny_moe_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(tiny_moe_folder)
    found.model.routing = Routing(found.model)
    return found


def counted(lm: Any, layout: Layout) -> dict[str, torch.Tensor]:
    batch = ragged_batch(seed=3, vocab=64)
    Scorer(lm, 1.0, layout)(batch, 1)
    seen: dict[str, torch.Tensor] = lm.model.routing.take()
    return seen


def test_every_real_token_chooses_two_experts_in_each_layer(lm: Any) -> None:
    seen = counted(lm, Layout.padded)
    tokens = sum(ragged_batch(seed=3, vocab=64).lengths)
    assert seen["router_counts_hist"].shape == (2, 8)
    assert seen["router_counts_hist"].sum(1).tolist() == [2 * tokens] * 2
    assert seen["router_probs_hist"].sum(1).tolist() == pytest.approx([tokens] * 2, rel=1e-5)
    assert lm.model.routing.take() == {}


def test_packed_rows_route_as_padded_ones(lm: Any) -> None:
    padded, packed = counted(lm, Layout.padded), counted(lm, Layout.packed)
    for name, value in padded.items():
        torch.testing.assert_close(packed[name], value, atol=1e-3, rtol=1e-4)


def test_shared_prompts_count_once(lm: Any) -> None:
    batch = ragged_batch(seed=3, vocab=64)
    seen = counted(lm, Layout.shared_prefix)
    firsts = {int(g): int(p) for g, p in zip(batch.group_index, batch.prompt_len, strict=True)}
    responses = [n - p for n, p in zip(batch.lengths, batch.prompt_len.tolist(), strict=True)]
    run = sum(min(n, max(responses) - 1) for n in responses)  # the last column predicts nothing and does not run
    assert seen["router_counts_hist"].sum(1).tolist() == [2 * (sum(firsts.values()) + run)] * 2


def metrics(*values: float) -> dict[str, float]:
    names = ("load_max", "entropy", "num_dead", "aux_loss")
    return {f"router/{name}": value for name, value in zip(names, values, strict=True)}


def test_metrics_even_use_is_one_and_single_use_is_the_number_of_experts() -> None:
    even = {"router_counts_hist": torch.full((3, 4), 10.0), "router_probs_hist": torch.full((3, 4), 2.5)}
    assert router_metrics(even) == pytest.approx(metrics(1, 1, 0, 1))
    one = torch.tensor([[8.0, 0, 0, 0]])
    single = {"router_counts_hist": one, "router_probs_hist": one}
    assert router_metrics(single) == pytest.approx(metrics(4, 0, 3, 4))


def test_metrics_of_a_dense_model_are_none() -> None:
    assert router_metrics({}) == {}


# -- replay --

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def model_of(family: str, seed: int) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SMALL | FAMILIES[family])).eval()
    lm.model.routing = Routing(lm.model)
    return lm


@pytest.mark.parametrize("layout", [Layout.padded, Layout.packed])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_routes_are_those_of_the_recording_model(family: str, layout: Layout) -> None:
    """Another model chooses otherwise; with routes given it takes those, in whatever layout they were recorded."""
    batch = ragged_batch(seed=3, vocab=64)
    first, second = model_of(family, 1), model_of(family, 2)
    with torch.no_grad():
        own, _ = Scorer(first, 1.0, layout)(batch, 1)
        counts = first.model.routing.take()["router_counts_hist"]
        routes = first.model.routing.recorded(batch.attention_mask)
        assert routes.shape == (*batch.tokens.shape, 2, 2)
        free, _ = Scorer(second, 1.0, Layout.padded)(batch, 1)
        assert not torch.equal(second.model.routing.take()["router_counts_hist"], counts)
        batch.routes = routes
        again, _ = Scorer(first, 1.0, layout)(batch, 1)
        torch.testing.assert_close(again, own)
        padded, _ = Scorer(second, 1.0, Layout.padded)(batch, 1)
        replayed = second.model.routing.take()
        packed, _ = Scorer(second, 1.0, Layout.packed)(batch, 1)
    assert torch.equal(replayed["router_counts_hist"], counts)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(padded, free, atol=1e-5)


def test_replayed_weights_are_the_present_routers_scores_by_hand() -> None:
    """Qwen3's router in plain torch: softmax over all, gathered at the given experts, and made to sum to one."""
    lm = model_of("qwen3_moe", 1)
    router, tokens = lm.model.layers[0].mlp.gate, torch.randn(5, 32)
    given = torch.stack([torch.randperm(8)[:2] for _ in range(5)])
    with lm.model.routing.reading(torch.ones(1, 5, dtype=torch.bool), given[None, :, None].expand(1, 5, 2, 2)):
        _, weights, chosen = router(tokens)
    scores = (tokens @ router.weight.T).softmax(-1).gather(1, given)
    assert torch.equal(chosen, given)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))
    (gradient,) = torch.autograd.grad(weights[:, 0].sum(), router.weight)
    assert gradient.abs().sum() > 0
