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
