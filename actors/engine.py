"""DeepSpeed, and nothing but DeepSpeed: process group, engine, backward, step, and access to full parameters.

The only file that imports deepspeed. Everything collective is called on all ranks in the same order.
"""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from conf.schema import Dtype, Optimizer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """What the optimizer of one engine is; the learning rate is set before each step. grad_clip 0 is off."""

    kind: Optimizer
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float


def optimizer_spec(trainer: TrainerConfig) -> OptimizerSpec:
    """The optimizer that the configuration describes."""
    return OptimizerSpec(
        kind=trainer.optimizer,
        beta1=trainer.beta1,
        beta2=trainer.beta2,
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
        grad_clip=trainer.grad_clip,
    )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """grad_norm: global, before clipping (inf when the step was skipped). skipped: the gradient was not finite."""

    grad_norm: float
    skipped: bool


# Elements in one of DeepSpeed's communication buckets; its default of 5e8 holds 2 GB in fp32.
BUCKET_ELEMENTS = 5 * 10**7

# Moments that AdamW keeps for each parameter; SGD (no momentum) keeps none.
MOMENTS = {Optimizer.adamw: ("exp_avg", "exp_avg_sq"), Optimizer.sgd: ()}


def init_distributed(backend: str, timeout_s: float) -> None:
    """Joins the process group named by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Sets no device."""
    import deepspeed

    # Without this, the first start compiles a shared-memory reduction (over a minute, and a lock file that outlives a
    # killed process) that training does not use, and each run leaves its buffers in /dev/shm.
    backend_module: Any = importlib.import_module("deepspeed.comm.torch")
    backend_module.build_shm_op = lambda: None
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=timeout_s))


class Engine:
    """A DeepSpeed engine over `module`, with one meaning for every ZeRO stage.

    `module` parameters must be in the live dtype. Gradients of all `backward` calls since the last `step` add up.
    """

    def __init__(self, module: torch.nn.Module, spec: OptimizerSpec, zero_stage: int, dtype: Dtype):
        import deepspeed

        self.spec, self.zero_stage = spec, zero_stage
        parameters = [p for p in module.parameters() if p.requires_grad]
        if spec.kind is Optimizer.adamw:
            # fused: one pass without temporaries; DeepSpeed's own would be compiled at first use.
            self.base: torch.optim.Optimizer = torch.optim.AdamW(
                parameters,
                lr=0.0,
                betas=(spec.beta1, spec.beta2),
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                fused=True,
            )
        else:
            self.base = torch.optim.SGD(parameters, lr=0.0, weight_decay=spec.weight_decay)
        self._norm_at_stage_0 = 0.0
        if zero_stage == 0:
            self.base.register_step_pre_hook(self._clip_at_stage_0)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": spec.grad_clip if zero_stage > 0 else 0.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": zero_stage,
                "overlap_comm": False,
                "reduce_bucket_size": BUCKET_ELEMENTS,
                "allgather_bucket_size": BUCKET_ELEMENTS,
                "stage3_param_persistence_threshold": 0,
            },
        }
        if dtype is Dtype.bfloat16:
            settings["bf16"] = {"enabled": True}
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=self.base, config=settings)
        self.module: torch.nn.Module = self.engine.module

    def _clip_at_stage_0(self, *_: Any) -> None:
        """ZeRO-0 reports no norm and applies NaN gradients: take the norm, clip, and drop what is not finite here."""
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._norm_at_stage_0 = float(norm)
        if not torch.isfinite(norm):
            for parameter in self.engine.module.parameters():
                parameter.grad = None
        elif self.spec.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), self.spec.grad_clip, norm)

    def __call__(self, *args: Any) -> Any:
        return self.engine(*args)

    def backward(self, loss_sum: torch.Tensor, divisor: int) -> None:
        """Adds the gradient of loss_sum / divisor, summed over ranks; `divisor` is a global count."""
        self.engine.backward(loss_sum / divisor * self.engine.dp_world_size, scale_wrt_gas=False)

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

    def names(self) -> list[str]:
        """Parameter names as in the Hugging Face folder, in module order; tied tensors once."""
        return [name.removeprefix("lm.") for name, _ in self.module.named_parameters()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of each parameter."""
        return {
            name.removeprefix("lm."): tuple(getattr(p, "ds_shape", p.shape))
            for name, p in self.module.named_parameters()
        }

    @contextlib.contextmanager
    def gathered(self, names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Full live tensors of the named parameters while the context lasts. Collective under ZeRO-3; read only."""
        import deepspeed

        chosen = {name: p for name, p in zip(self.names(), self.module.parameters(), strict=True) if name in set(names)}
        context = (
            deepspeed.zero.GatheredParameters(list(chosen.values()))
            if self.zero_stage == 3
            else contextlib.nullcontext()
        )
        with context:
            yield {name: chosen[name].data for name in names}

    def full_state(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """For each parameter: fp32 `master` and the optimizer's moments, whole. Collective; the caller copies."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._materialize_moments()
        for name, parameter in zip(self.names(), self.module.parameters(), strict=True):
            if self.zero_stage == 0:
                moments = self.base.state[parameter]
                yield name, {"master": parameter.data, **{key: moments[key] for key in MOMENTS[self.spec.kind]}}
            else:
                state = {"master": safe_get_full_fp32_param(parameter)}
                for key in MOMENTS[self.spec.kind]:
                    state[key] = safe_get_full_optimizer_state(parameter, key)
                yield name, state

    def set_full_state(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `full_state` for one parameter: master and live weights, and moments where given."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = dict(zip(self.names(), self.module.parameters(), strict=True))[name]
        self._materialize_moments()
        with torch.no_grad():
            if self.zero_stage == 0:
                parameter.data.copy_(state["master"].view_as(parameter))
                for key in set(state) - {"master"}:
                    self.base.state[parameter][key].copy_(state[key].view_as(parameter))
            elif self.zero_stage == 3:
                self._set_partition(parameter, state)
            else:
                parameter.data.copy_(state["master"].view_as(parameter))
                safe_set_full_fp32_param(parameter, state["master"].float())
                for key in set(state) - {"master"}:
                    safe_set_full_optimizer_state(parameter, state[key].float(), key)

    def _set_partition(self, parameter: Any, state: dict[str, torch.Tensor]) -> None:
        """ZeRO-3: DeepSpeed's own setter cannot cut a tensor whose size the ranks do not divide; pad and cut here."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        part = parameter.ds_tensor.numel()
        rank, world = self.engine.global_rank, self.engine.dp_world_size

        def local(value: torch.Tensor) -> torch.Tensor:
            flat = value.flatten().float()
            return torch.nn.functional.pad(flat, (0, part * world - flat.numel()))[rank * part : (rank + 1) * part]

        safe_set_local_fp32_param(parameter, local(state["master"]))
        parameter.ds_tensor.data.copy_(local(state["master"]))
        for key in set(state) - {"master"}:
            safe_set_local_optimizer_state(parameter, local(state[key]), key)

    @property
    def optimizer_step(self) -> int:
        """Steps that the optimizer's moments have seen (its bias correction); 0 for SGD."""
        return max((int(s["step"]) for s in self.base.state.values() if "step" in s), default=0)

    def set_optimizer_step(self, step: int) -> None:
        """Sets the moments' step count, after `set_full_state`."""
        self._materialize_moments()
        for state in self.base.state.values():
            if "step" in state:
                state["step"].fill_(step)

    def _materialize_moments(self) -> None:
        """torch makes optimizer state in the first step; a resumed run needs it before that."""
        if self.base.state or not MOMENTS[self.spec.kind]:
            return
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self.engine.optimizer
        flat = {
            0: lambda: list(self.module.parameters()),
            1: lambda: zero.single_partition_of_fp32_groups,
            2: lambda: zero.single_partition_of_fp32_groups,
            3: lambda: zero.fp32_partitioned_groups_flat,
        }[self.zero_stage]()
        for tensor in flat:
            self.base.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{key: torch.zeros_like(tensor) for key in MOMENTS[self.spec.kind]},
            }
        if self.zero_stage in (1, 2):
            for group, tensor in zip(zero.bit16_groups, flat, strict=True):
                lazy_init_hp_params_optimizer_state(group, tensor, self.base.state)
