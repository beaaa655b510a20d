"""Adapters: merged, switched off, written and read back, against the same model in other forms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.lora import adapters_off, add_adapters, base_name, merge_all, write_adapter
from conf.schema import LoraConfig

LORA = LoraConfig(rank=3, alpha=6)
IDS = torch.tensor([[5, 9, 2, 40, 33, 7]])


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(lm: Any) -> torch.Tensor:
    found: torch.Tensor = lm(IDS).logits
    return found


def adapted(folder: Path, lora: LoraConfig = LORA) -> Any:
    """A model whose adapters do something."""
    lm = load(folder)
    torch.manual_seed(0)
    add_adapters(lm, lora)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return lm


def adapters(lm: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in lm.named_parameters() if ".lora_" in name}


def test_new_adapters_change_nothing_and_alone_are_trained(tiny_folder: Path) -> None:
    lm, before = load(tiny_folder), logits(load(tiny_folder))
    add_adapters(lm, LORA)
    assert torch.equal(logits(lm), before)
    trained = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert len(trained) == 2 * 7 * 2  # A and B of seven matrices in two layers


def test_targets_choose_the_matrices(tiny_folder: Path) -> None:
    lm = adapted(tiny_folder, LoraConfig(rank=2, targets=["q_proj", "down_proj"]))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapters(lm)} == {"q_proj", "down_proj"}


def test_adapters_off_is_the_model_before_training(tiny_folder: Path) -> None:
    lm, before = adapted(tiny_folder), logits(load(tiny_folder))
    with adapters_off(lm):
        assert torch.equal(logits(lm), before)
    assert float((logits(lm) - before).abs().max()) > 0.1
    assert any(p.requires_grad for p in lm.parameters())


def test_merged_weights_compute_the_same(tiny_folder: Path) -> None:
    lm, plain = adapted(tiny_folder), load(tiny_folder)
    base = load_file(tiny_folder / "model.safetensors")
    merged = merge_all(base, adapters(lm), LORA.scale)
    assert merged.keys() == base.keys() == {base_name(n) for n, _ in lm.named_parameters() if ".lora_" not in n}
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(lm), atol=1e-5, rtol=1e-5)


def test_written_adapter_is_read_by_peft(tiny_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    lm = adapted(tiny_folder)
    write_adapter(adapters(lm), LORA, str(tiny_folder), tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tiny_folder), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(again), logits(lm), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_keeps_the_dtype_of_the_base(tiny_folder: Path, dtype: torch.dtype) -> None:
    base = {n: t.to(dtype) for n, t in load_file(tiny_folder / "model.safetensors").items()}
    assert {t.dtype for t in merge_all(base, adapters(adapted(tiny_folder)), 2.0).values()} == {dtype}
