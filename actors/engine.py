"""DeepSpeed, and nothing but DeepSpeed: process group, engine, backward and step.

This file and actors/weights.py alone import deepspeed. Everything collective is called on all ranks in the same order.
"""

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from actors import compiled
from actors.muon import MuonWithAdamW
from conf.choices import Dtype, Optimizer
from conf.layout import TrainLayout
from conf.schema import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """What the optimizer of one engine is; the learning rate is set before each step. grad_clip 0 is off.

    `compile_timeout_s`: longest wait for another process that compiles it.
    """

    kind: Optimizer
    momentum: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float
    compile_timeout_s: float


def optimizer_spec(trainer: TrainerConfig) -> OptimizerSpec:
    """The optimizer that the configuration describes."""
    return OptimizerSpec(
        kind=trainer.optimizer,
        momentum=trainer.momentum,
        beta1=trainer.beta1,
        beta2=trainer.beta2,
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
        grad_clip=trainer.grad_clip,
        compile_timeout_s=trainer.timeout_s,
    )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """grad_norm: global, before clipping (inf when the step was skipped). skipped: the gradient was not finite."""

    grad_norm: float
    skipped: bool


# Elements in one of DeepSpeed's communication buckets; its default of 5e8 holds 2 GB in fp32.
BUCKET_ELEMENTS = 5 * 10**7

# What AdamW and Muon keep for each parameter; SGD (no momentum) keeps nothing.
ADAM_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def init_distributed(backend: str, timeout_s: float) -> None:
    """Joins the process group named by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Sets no device."""
    import deepspeed

    # Without this, the first start compiles a shared-memory reduction (over a minute, and a lock file that outlives a
    # killed process) that training does not use, and each run leaves its buffers in /dev/shm.
    backend_module: Any = importlib.import_module("deepspeed.comm.torch")
    backend_module.build_shm_op = lambda: None
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=timeout_s))


def forget_other_groups(layout: TrainLayout) -> None:
    """DeepSpeed keeps its process groups in globals: an engine of another layout in this process must not find them."""
    from deepspeed.utils import groups

    if getattr(groups, "tandem_layout", (layout.tp, layout.ep)) != (layout.tp, layout.ep):
        groups._release_process_group_references()
    groups.tandem_layout = (layout.tp, layout.ep)


def register_ulysses(core: str, group: Any) -> str:
    """Makes `core` (a transformers attention) sequence-parallel over `group`; returns its name for transformers.

    It expects `position_ids` in every forward, and takes no mask: causal attention over right-padded rows needs none.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernels: dict[tuple[int, ...], Any] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        rows, heads, _, size = query.shape
        shape = (rows, heads, key.shape[1], size)
        if shape not in kernels:  # it is made for one number of rows
            kernels[shape] = UlyssesSPAttentionHF(
                attn=ALL_ATTENTION_FUNCTIONS[core],
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=size,
                kv_head_count=key.shape[1],
                num_hidden_layers=1,
                process_group=group,
                seq_length_is_variable=True,
            )
        return kernels[shape](module, query, key, value, None, **kwargs)

    name = f"ulysses_{core}"
    AttentionInterface.register(name, attend)
    return name


def matrix_cuts(model_config: Any) -> dict[str, str]:
    """How each matrix of a decoder layer is cut by tensor parallelism: pattern of its name -> style.

    Styles are those of the model's own plan in transformers: colwise (rows of the weight), rowwise (columns), and
    replicated_with_grad_allreduce (whole, but each rank sees a part of its gradient). Embedding and head stay whole.
    """
    styles = ("colwise", "rowwise", "replicated_with_grad_allreduce")
    plan = getattr(model_config, "base_model_tp_plan", None) or {}
    return {
        rf".*{re.escape(name).replace(re.escape('*'), '[0-9]+')}\.(weight|bias)$": style
        for name, style in plan.items()
        if style in styles and name.startswith("layers.")
    }


def partition_config(cuts: dict[str, str]) -> dict[str, Any]:
    """DeepSpeed's description of `matrix_cuts`."""
    kinds = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "skip"}
    return {
        "use_default_specs": False,
        "layer_specs": [
            {
                "patterns": [pattern],
                "partition_type": kinds[style],
                "grad_allreduce": style == "replicated_with_grad_allreduce",
            }
            for pattern, style in cuts.items()
        ],
    }


def cpu_adam(groups: list[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for parameters in host memory; compiles it where this machine has not done so yet."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    compiled.load("cpu_adam", CPUAdamBuilder().load, spec.compile_timeout_s)  # DeepSpeed keeps it for this process
    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups, lr=0.0, betas=(spec.beta1, spec.beta2), eps=spec.eps, weight_decay=spec.weight_decay
    )
    return optimizer


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A parameter of which each rank of `group` holds an equal part along `dim`."""

    dim: int
    group: Any
    size: int

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, of this rank's part. Collective over the group."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(parts, part, group=self.group)
        return torch.cat(parts, self.dim)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole."""
        return whole.chunk(self.size, self.dim)[torch.distributed.get_rank(self.group)].contiguous()


class Engine:
    """A DeepSpeed engine over `module`, with one meaning for every layout.

    `module` parameters must be in the live dtype. Gradients of all `backward` calls since the last `step` add up.
    `model_config` says how tensor parallelism cuts the matrices; `lora_scale` is that of its adapters, if it has any.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        spec: OptimizerSpec,
        layout: TrainLayout,
        model_config: Any,
        lora_scale: float | None = None,
    ):
        import deepspeed

        self.spec, self.layout, self.zero_stage = spec, layout, layout.zero_stage
        self.model_type, self.lora_scale = str(model_config.model_type), lora_scale
        self._norm_at_stage_0 = 0.0
        self.base: torch.optim.Optimizer
        cuts = matrix_cuts(model_config) if layout.tp > 1 else {}
        bucket = min(BUCKET_ELEMENTS, sum(p.numel() for p in module.parameters()))  # it is allocated whole
        bucket += bucket % 2  # DeepSpeed wants it even
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": spec.grad_clip if self.zero_stage > 0 else 0.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.zero_stage,
                "overlap_comm": False,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_param_persistence_threshold": 0,
                "zero_hpz_partition_size": layout.hpz,
                # DeepSpeed would reduce an expert layer's gradients after each of its backward passes, and a layer has
                # two where prompts are shared. It does so for experts that are modules of their own: ours never are.
                "leaf_module": {"classes": []},
                **({"offload_optimizer": {"device": "cpu"}} if layout.offload_optimizer else {}),
                **({"offload_param": {"device": "cpu"}} if layout.offload_parameters else {}),
            },
        }
        if layout.dtype is Dtype.bfloat16:
            settings["bf16"] = {"enabled": True}
        if layout.ep > 1:
            settings["expert_parallel"] = {
                "enabled": True,
                "autoep_size": layout.ep,
                "preset_model": self.model_type,
                "moe_layer_pattern": r".*layers\.\d+\.mlp",
                "use_grouped_mm": False,
            }
        if layout.tp > 1:
            settings["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": partition_config(cuts)}
        whole = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.matrices = {id(p) for name, p in module.named_parameters() if p.dim() == 2 and "layers." in name}
        forget_other_groups(layout)
        module.config = model_config  # DeepSpeed looks for it there
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=self._make_optimizer, config=settings)
        self.module: torch.nn.Module = self.engine.module
        self.slices: dict[int, Slice] = {}
        if layout.tp > 1:
            self.engine.first_dataloader_check.remove()  # it compares arguments that it cannot compare
            self._note_matrix_slices(whole, cuts)
        if layout.ep > 1:
            self._note_expert_slices()

    def moments(self, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        """What the optimizer keeps for a parameter."""
        if self.spec.kind is Optimizer.muon and id(parameter) in self.matrices:
            return MUON_MOMENTS
        return () if self.spec.kind is Optimizer.sgd else ADAM_MOMENTS

    def _make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """DeepSpeed calls it with the parameters as its parallelism has left them. The learning rate comes with steps.

        Experts have groups of their own: their gradients are reduced over fewer ranks.
        """
        spec = self.spec
        dense: list[Any] = []
        experts: dict[str, list[Any]] = {}
        trained: list[Any] = [p for p in parameters if p.requires_grad]
        for parameter in trained:
            if getattr(parameter, "allreduce", True):
                dense.append(parameter)
            else:
                experts.setdefault(parameter.group_name, []).append(parameter)
        groups: list[dict[str, Any]] = [{"params": dense, "name": "dense"}]
        groups += [{"params": found, "name": name, "moe": True} for name, found in experts.items()]
        if spec.kind is Optimizer.muon:
            matrices, others = ([p for p in dense if (id(p) in self.matrices) is which] for which in (True, False))
            betas = (spec.beta1, spec.beta2)
            others += [p for found in experts.values() for p in found]
            self.base = MuonWithAdamW(matrices, others, spec.momentum, betas, spec.eps, spec.weight_decay)
        elif spec.kind is Optimizer.sgd:
            self.base = torch.optim.SGD(groups, lr=0.0, weight_decay=spec.weight_decay)
        elif spec.kind is Optimizer.cpu_adam:
            self.base = cpu_adam(groups, spec)
        else:
            # fused: one pass without temporaries; DeepSpeed's own would be compiled at first use.
            self.base = torch.optim.AdamW(
                groups,
                lr=0.0,
                betas=(spec.beta1, spec.beta2),
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                fused=True,
            )
        if self.zero_stage == 0:
            self.base.register_step_pre_hook(self._clip_at_stage_0)
        return self.base

    def _note_matrix_slices(self, whole: dict[str, tuple[int, ...]], cuts: dict[str, str]) -> None:
        """Which dimension of each parameter is cut. Raises RuntimeError when one is not cut as its plan says."""
        group = self.engine.mpu.get_tensor_model_parallel_group()
        for name, parameter in self.module.named_parameters():
            style = next((style for pattern, style in cuts.items() if re.match(pattern, name)), None)
            wanted = list(whole[name])
            if style == "colwise" or (style == "rowwise" and name.endswith(".weight")):
                dim = 0 if style == "colwise" else 1
                wanted[dim] //= self.layout.tp
                self.slices[id(parameter)] = Slice(dim=dim, group=group, size=self.layout.tp)
            if list(parameter.shape) != wanted:
                raise RuntimeError(f"{name}: tensor parallelism made it {tuple(parameter.shape)}, not {tuple(wanted)}")

    def _note_expert_slices(self) -> None:
        """Experts are cut along the first dimension."""
        from deepspeed.utils import groups

        parameter: Any
        for parameter in self.module.parameters():
            if not getattr(parameter, "allreduce", True):
                group = groups._get_expert_parallel_group(parameter.group_name)
                self.slices[id(parameter)] = Slice(dim=0, group=group, size=self.layout.ep)

    def _clip_at_stage_0(self, *_: Any) -> None:
        """ZeRO-0 reports no norm and applies NaN gradients: take the norm, clip, and drop what is not finite here."""
        norm = self._norm_of_gradients()
        self._norm_at_stage_0 = float(norm)
        if not torch.isfinite(norm):
            for parameter in self.engine.module.parameters():
                parameter.grad = None
        elif self.spec.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), self.spec.grad_clip, norm)

    def _norm_of_gradients(self) -> torch.Tensor:
        """Global norm at ZeRO-0: slices of matrices and experts add up over the ranks that share them."""
        norm_of, found = torch.nn.utils.get_total_norm, [(id(p), p.grad) for p in self.module.parameters()]
        gradients = [(key, gradient) for key, gradient in found if gradient is not None]
        whole = norm_of([gradient for key, gradient in gradients if key not in self.slices])
        if not self.slices:
            return whole
        cut = norm_of([gradient for key, gradient in gradients if key in self.slices]).square()
        torch.distributed.all_reduce(cut, group=next(iter(self.slices.values())).group)
        return (cut + whole.square()).sqrt()

    def close(self) -> None:
        """Lets go of all tensors: hooks that DeepSpeed has left on parameters would keep them."""
        self.engine.destroy()
        for parameter in self.module.parameters():
            parameter.data, parameter.grad = torch.empty(0), None
        self.base.state.clear()

    def __call__(self, *args: Any) -> Any:
        return self.engine(*args)

    def release(self) -> None:
        """Lets go of the whole weights that a forward without a backward has gathered at ZeRO-3. Not collective."""
        if self.zero_stage == 3:
            self.engine.optimizer.empty_partition_cache()

    def backward(self, loss_sum: torch.Tensor, divisor: int) -> None:
        """Adds the gradient of loss_sum / divisor, summed over ranks; `divisor` is a global count."""
        self.engine.backward(loss_sum / divisor * self.layout.loss_scale, scale_wrt_gas=False)

    def step(self, lr: float) -> StepResult:
        """One optimizer step with the gradients so far; clips by global norm; skips when the gradient is not finite."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        for group in self.base.param_groups:
            group["lr"] = lr
        self.engine.step()
        if self.zero_stage == 0:
            norm = self._norm_at_stage_0
            self.engine.zero_grad()
        else:
            norm = float(self.engine.get_global_grad_norm() or 0.0)
        finite = norm == norm and norm not in (float("inf"), -1.0)
        return StepResult(grad_norm=norm if finite else float("inf"), skipped=not finite)
