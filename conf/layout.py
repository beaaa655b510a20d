"""How a training role is spread over its ranks, and which ways are legal. Pure."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conf.choices import Dtype, Recompute

# Mixture-of-experts models whose experts can be spread (DeepSpeed AutoEP), by model_type.
EXPERT_MODELS = ("qwen3_moe", "mixtral", "deepseek_v3")
# The keys that count their experts; one model_type is seen with several, by who wrote its config.json.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """One way to spread a role over `ranks` processes.

    Ranks are numbered by (replica, sp, tp), the last one fastest. The ranks of a replica work on the same rows: under
    sp each on a part of every row, under tp each with a part of every matrix. ep spreads the experts over ranks of
    different replicas. ZeRO partitions over all ranks that hold the same weights.
    """

    ranks: int
    zero_stage: int
    sp: int
    tp: int
    ep: int
    hpz: int
    offload_optimizer: bool
    offload_parameters: bool
    recompute: Recompute
    dtype: Dtype

    @property
    def replicas(self) -> int:
        """Groups of ranks that each have rows of their own: the data-parallel size."""
        return self.ranks // (self.sp * self.tp)

    def replica_of(self, rank: int) -> int:
        return rank // (self.sp * self.tp)

    @property
    def loss_scale(self) -> int:
        """What a rank's share of the loss is multiplied with before the backward pass.

        At every ZeRO stage gradients are averaged over the ranks that hold the same weights, while losses here are
        shares of a global mean, which add up. DeepSpeed knows nothing of sp: it counts those ranks as data-parallel.
        """
        return self.ranks // self.tp

    def frozen(self) -> "TrainLayout":
        """The layout of a frozen role beside it: whole copies of the weights, rows spread as far as sp spreads them."""
        return dataclasses.replace(
            self,
            zero_stage=0,
            tp=1,
            ep=1,
            hpz=1,
            offload_optimizer=False,
            offload_parameters=False,
            recompute=Recompute.none,
        )

    def label(self) -> str:
        """Short name: `zero3 dp1 sp2 offload=optimizer recompute=full`."""
        words = [f"zero{self.zero_stage}", f"dp{self.replicas}"]
        words += [f"{key}{getattr(self, key)}" for key in ("sp", "tp", "ep", "hpz") if getattr(self, key) > 1]
        moved = [name for name in ("optimizer", "parameters") if getattr(self, f"offload_{name}")]
        words += [f"offload={'+'.join(moved)}"] if moved else []
        words += [f"recompute={self.recompute.value}"] if self.recompute is not Recompute.none else []
        return " ".join(words + ([self.dtype.value] if self.dtype is not Dtype.float32 else []))

    def refusal(self) -> str | None:
        """Why no model can be trained in this layout, with the option to change; None when it is legal."""
        stage = f"trainer.zero_stage={self.zero_stage}"
        if self.zero_stage not in (0, 1, 2, 3):
            return f"{stage}: must be 0, 1, 2 or 3"
        for key in ("sp", "tp", "ep", "hpz"):
            if getattr(self, key) < 1:
                return f"trainer.{key}={getattr(self, key)}: must be at least 1"
        if self.ranks % (self.sp * self.tp):
            return (
                f"cluster.train_ranks={self.ranks} with trainer.sp={self.sp}, trainer.tp={self.tp}: "
                "not divisible by their product"
            )
        if self.sp > 1 and self.tp > 1:
            return f"trainer.sp={self.sp} with trainer.tp={self.tp}: both divide the attention heads; use one of them"
        if self.tp > 1 and self.zero_stage == 3:
            return (
                f"trainer.tp={self.tp} with {stage}: partitions of slices cannot be saved or pushed whole; "
                "use trainer.zero_stage=0, 1 or 2"
            )
        if self.ep > 1 and (self.sp > 1 or self.tp > 1):
            return f"trainer.ep={self.ep} with trainer.sp={self.sp}, trainer.tp={self.tp}: use one of the three"
        if self.ranks % self.ep:
            return f"cluster.train_ranks={self.ranks} with trainer.ep={self.ep}: not divisible"
        if self.hpz > 1 and self.zero_stage != 3:
            return f"trainer.hpz={self.hpz} with {stage}: a second partition needs trainer.zero_stage=3"
        if self.hpz > 1 and self.ep > 1:
            return f"trainer.hpz={self.hpz} with trainer.ep={self.ep}: experts have no second partition; use hpz=1"
        if self.ranks % self.hpz:
            return f"cluster.train_ranks={self.ranks} with trainer.hpz={self.hpz}: not divisible"
        if self.offload_optimizer and self.zero_stage == 0:
            return f"trainer.offload_optimizer=true with {stage}: it needs a ZeRO stage of 1, 2 or 3"
        if self.offload_parameters and self.zero_stage != 3:
            return f"trainer.offload_parameters=true with {stage}: only trainer.zero_stage=3 can"
        if self.offload_parameters and not self.offload_optimizer:
            return "trainer.offload_parameters=true with trainer.offload_optimizer=false: offload the optimizer first"
        if self.recompute is Recompute.selective and (self.tp > 1 or self.ep > 1 or self.zero_stage == 3):
            return (
                f"trainer.recompute=selective with trainer.tp={self.tp}, trainer.ep={self.ep}, {stage}: what it keeps "
                "would be reduced twice, or is gathered anew; use trainer.recompute=full"
            )
        if self.dtype is Dtype.bfloat16 and self.zero_stage == 0:
            return (
                f"trainer.dtype=bfloat16 with {stage}: ZeRO-0 keeps no fp32 master and drifts; "
                "use trainer.zero_stage=1, 2 or 3"
            )
        return None


def every_layout(ranks: int, dtype: Dtype) -> Iterator[TrainLayout]:
    """All combinations for this many ranks, legal or not."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for stage, sp, tp, ep, hpz, optimizer, parameters, recompute in itertools.product(
        (0, 1, 2, 3), sizes, sizes, sizes, sizes, (False, True), (False, True), Recompute
    ):
        yield TrainLayout(
            ranks=ranks,
            zero_stage=stage,
            sp=sp,
            tp=tp,
            ep=ep,
            hpz=hpz,
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            recompute=recompute,
            dtype=dtype,
        )


# Keys by which a head changes its logits; scoring reads hidden states and the head's matrix, so it would miss them.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def head_refusal(model: Mapping[str, Any]) -> str | None:
    """Why a causal language model of this config.json cannot be scored; None when it can."""
    for key in LOGIT_TRANSFORMS:
        if model.get(key) not in (None, 0, 1):
            return (
                f"a {model.get('model_type')} with {key}={model[key]}: the trainer would score another distribution "
                "than the engine samples"
            )
    return None


def sliding_window(model: Mapping[str, Any]) -> int | None:
    """Tokens that an attention layer of this config.json sees at most; None when it sees all."""
    window: int | None = model.get("sliding_window")
    return window if window and model.get("use_sliding_window", True) else None


def model_refusal(layout: TrainLayout, model: Mapping[str, Any]) -> str | None:
    """Why the model of this config.json cannot be trained in a layout that is legal by itself; None when it can."""
    heads = model.get("num_attention_heads", 1)
    kv_heads = model.get("num_key_value_heads") or heads
    if heads % layout.sp or (kv_heads % layout.sp and layout.sp % kv_heads):
        return (
            f"trainer.sp={layout.sp}: must divide the model's {heads} attention heads, and divide its {kv_heads} kv "
            "heads or be a multiple of them"
        )
    if layout.sp > 1 and sliding_window(model) is not None:
        return f"trainer.sp={layout.sp}: this model has a sliding window, which parts of a row would not see; use sp=1"
    if layout.tp > 1:
        wide = model.get("intermediate_size", layout.tp)
        for name, count in (("attention heads", heads), ("kv heads", kv_heads), ("intermediate channels", wide)):
            if count % layout.tp:
                return f"trainer.tp={layout.tp}: does not divide the model's {count} {name}"
        if model.get("model_type") in EXPERT_MODELS:
            return f"trainer.tp={layout.tp}: model_type {model['model_type']} has experts; spread them with trainer.ep"
    experts: Any = next((model[key] for key in EXPERT_KEYS if key in model), None)
    chosen: Any = model.get("num_experts_per_tok")
    if model.get("model_type") in EXPERT_MODELS and None not in (experts, chosen) and not 1 <= chosen <= experts:
        return f"num_experts_per_tok={chosen} of a {model['model_type']} with {experts} experts"
    if layout.ep > 1:
        if model.get("model_type") not in EXPERT_MODELS or experts is None:
            return (
                f"trainer.ep={layout.ep}: model_type {model.get('model_type')} has no experts that can be spread "
                f"({', '.join(EXPERT_MODELS)} have, counted by {', '.join(EXPERT_KEYS)})"
            )
        if experts % layout.ep:
            return f"trainer.ep={layout.ep}: does not divide the model's {experts} experts"
    return None
