"""Low-rank adapters (Hu et al. 2021, LoRA): W + (alpha / rank) B A, with W frozen and A, B trained. Through peft."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from conf.schema import LoraConfig

ADAPTER = "default"


def add_adapters(lm: Any, lora: LoraConfig) -> None:
    """Puts an adapter beside each matrix that `lora.targets` names, and freezes everything else.

    A is random and B zero, so that nothing changes at first.
    """
    from peft import inject_adapter_in_model

    linear = {name.rpartition(".")[2] for name, module in lm.named_modules() if isinstance(module, torch.nn.Linear)}
    linear.discard("lm_head")
    inject_adapter_in_model(peft_config(lora, sorted(linear)), lm, adapter_name=ADAPTER)


def peft_config(lora: LoraConfig, linear: list[str]) -> Any:
    """The adapter's description in peft's terms. `linear`: the targets where the configuration names none."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or linear,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


@contextlib.contextmanager
def adapters_off(lm: torch.nn.Module) -> Iterator[None]:
    """The model without its adapters: what it was before training."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True  # its own switch would also freeze the adapters
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def base_name(name: str) -> str:
    """The name in the model folder of a frozen matrix that has an adapter."""
    return name.replace(".base_layer.", ".")


def adapter_names(base: str) -> tuple[str, str]:
    """The names of A and B beside the matrix `base` of the model folder."""
    prefix = base.removesuffix(".weight")
    return f"{prefix}.lora_A.{ADAPTER}.weight", f"{prefix}.lora_B.{ADAPTER}.weight"


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[out, in] of W + scale B A, in the dtype of W; the product is taken in fp32."""
    return (base.float() + scale * (b.float() @ a.float())).to(base.dtype)


def merge_all(
    base: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """A folder's tensors with their adapters merged."""
    found = dict(base)
    for name, weight in base.items():
        a, b = adapter_names(name)
        if a in adapters:
            found[name] = merged(weight, adapters[a], adapters[b], scale)
    return found


def write_adapter(adapters: Mapping[str, torch.Tensor], lora: LoraConfig, model_path: str, out: Path) -> None:
    """Writes adapters as a folder that peft and inference engines load on top of the model at `model_path`."""
    out.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapters})
    settings = peft_config(lora, targets)
    settings.base_model_name_or_path = model_path
    settings.inference_mode = True
    settings.save_pretrained(str(out))
    tensors = {f"base_model.model.{k.replace(f'.{ADAPTER}.', '.')}": v.contiguous() for k, v in adapters.items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def lora_of(config: Mapping[str, Any]) -> LoraConfig:
    """The adapter section of a stored configuration; those from before it existed have none."""
    return LoraConfig(**json.loads(json.dumps(config.get("lora", {}))))
