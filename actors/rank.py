"""What every trained role of a rank has in common: joining the group, its engine, its share of a checkpoint."""

import gc
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from actors import checkpoint
from actors.engine import Engine, OptimizerSpec, StepResult, init_distributed, register_ulysses
from actors.routing import Routing
from actors.sequence import SequenceGroup, join_sequence
from actors.sleep import own_weights
from actors.tensor_bytes import live_bytes, peak_bytes
from actors.weights import optimizer_step
from conf.choices import Dtype, Recompute
from conf.schema import Config
from rl.faults import RoleError
from rl.types import Batch, Sums


@dataclass(frozen=True, kw_only=True)
class Micro:
    """One forward of one rank: rows (none in a dummy) and the number of head calls, equal on all ranks."""

    batch: Batch | None
    num_chunks: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step of one rank. `num_action_tokens` is the global divisor; `lr` the learning rate of this step.

    `mismatch_limit`: the forward of this step is the scoring of the batch; check it before the optimizer moves.
    """

    micros: list[Micro]
    num_action_tokens: int
    lr: float
    version: int
    mismatch_limit: float | None = None


@dataclass(kw_only=True)
class UpdateResult:
    """For each optimizer step of one rank: sums over its action tokens, and figures of the step as a whole."""

    sums: list[Sums]
    steps: list[dict[str, float]]

    def add(self, sums: Sums, result: StepResult, backward_s: float, optimizer_s: float) -> None:
        """Notes one optimizer step."""
        self.sums.append(sums)
        self.steps.append(
            {
                "grad_norm": result.grad_norm,
                "skipped_steps": float(result.skipped),
                "backward_s": backward_s,
                "optimizer_s": optimizer_s,
            }
        )


class Rank:
    """One rank of a trained role. Subclasses say what the module is and what a forward of it means."""

    sequence: SequenceGroup | None = None

    def __init__(self, cfg: Config, role: str, rank: int, world: int, device: str):
        self.cfg, self.role, self.rank, self.world, self.device = cfg, role, rank, world, device
        self.layout = cfg.train_layout
        self.routing = Routing(torch.nn.Identity())

    def join(self, address: str, port: int, num_threads: int, trains: bool) -> None:
        """Joins the process group (once for a process that holds several roles) and seeds this process.

        A frozen role has a group only where its ranks share rows.
        """
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world),
            LOCAL_RANK="0",  # each process sees its own devices only
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        torch.set_num_threads(num_threads)
        torch.manual_seed(self.cfg.seed)
        if trains or self.layout.sp > 1:
            init_distributed("nccl" if self.device == "cuda" else "gloo", self.cfg.trainer.timeout_s)
        self.sequence = join_sequence(self.layout, self.rank)

    def model(self) -> torch.nn.Module | Engine | None:
        """What holds this role's state; None before it has started."""
        return getattr(self, "engine", None)

    def release(self) -> None:
        """After forwards without a backward: lets go of what they gathered."""
        model = self.model()
        if isinstance(model, Engine):
            model.release()

    def close(self) -> None:
        """Lets go of the engine's memory."""
        if hasattr(self, "engine"):
            self.engine.close()

    def load_lm(self, path: str) -> Any:
        """The causal language model of a Hugging Face folder, in the trainer's dtype, without dropout."""
        attention = self.cfg.model.attention
        if self.sequence is not None:
            attention = register_ulysses(attention, self.sequence.group)
        lm = load_lm(path, attention, self.cfg.trainer.dtype, self.device)
        if self.cfg.cluster.sleep:
            own_weights(lm)
        return lm

    def wrap(self, module: torch.nn.Module, spec: OptimizerSpec, lm: Any, lora_scale: float | None = None) -> Engine:
        """A DeepSpeed engine around `module`, which computes with `lm`, in the trainer's layout."""
        recompute_activations(lm, self.layout.recompute)
        self.engine = Engine(module, spec, self.layout, lm.config, lora_scale)
        base = getattr(lm, lm.base_model_prefix)
        self.routing = Routing(base)
        if self.routing.routers:
            base.routing = self.routing
        return self.engine

    def accumulate(self, update: Update) -> Sums:
        """Forward and backward of all micro-batches of one optimizer step; sums over this rank's action tokens."""
        raise TypeError(f"{self.role} is frozen: it has no loss")

    def update(self, updates: list[Update]) -> UpdateResult:
        """Optimizer steps, one for each entry."""
        result = UpdateResult(sums=[], steps=[])
        for update in updates:
            started = time.monotonic()
            sums = self.accumulate(update)
            backward_s = time.monotonic() - started
            result.add(sums, self.engine.step(update.lr), backward_s, time.monotonic() - started - backward_s)
        return result

    def measured(self, argument: Any, method: str) -> tuple[Any, int, int]:
        """A method's result; bytes of tensors on this rank before it, and the most while it ran."""
        gc.collect()  # engines of earlier layouts in this process
        before = live_bytes(self.device)
        result, peak = peak_bytes(lambda: getattr(self, method)(argument), self.device)
        return result, before, peak

    def save(self, folder: str) -> list[dict[str, Any]]:
        """Writes this rank's share of the training state into `folder`; returns its manifest entries. Collective."""
        return checkpoint.write_shards(Path(folder), self.role, self.engine, self.rank, self.world)

    def load(self, folder: str) -> None:
        """Reads the whole training state, in whatever layout it was saved. Collective."""
        checkpoint.read_shards(Path(folder), self.role, self.engine)
        saved = checkpoint.read_manifest(Path(folder))["roles"][self.role]
        torch.set_rng_state(torch.tensor(saved["torch_rng"], dtype=torch.uint8))

    def state(self) -> dict[str, Any]:
        """Optimizer step and random state of this rank, for the checkpoint."""
        return {"optimizer_step": optimizer_step(self.engine), "torch_rng": torch.get_rng_state().tolist()}

    def on_device(self, batch: Batch | None) -> Batch:
        """The batch where this rank computes; a dummy where there is none."""
        batch = batch if batch is not None else dummy_batch(self.cfg.algo.has_divergence, self.cfg.algo.has_reference)
        if self.device == "cpu":
            return batch
        moved: dict[str, Any] = {
            k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()
        }
        return Batch(**moved)


def dummy_batch(with_teacher: bool = False, with_reference: bool = False) -> Batch:
    """One row without action tokens: its loss and every gradient are 0."""
    zeros = torch.zeros(1, 3)
    return Batch(
        tokens=torch.zeros(1, 3, dtype=torch.long),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        action_mask=torch.zeros(1, 3, dtype=torch.bool),
        rollout_logprobs=zeros,
        rewards=torch.zeros(1),
        group_index=torch.zeros(1, dtype=torch.long),
        episode_index=torch.zeros(1, dtype=torch.long),
        prefix_index=torch.zeros(1, dtype=torch.long),
        prompt_len=torch.ones(1, dtype=torch.long),
        version=torch.zeros(1, dtype=torch.long),
        truncated=torch.zeros(1, dtype=torch.bool),
        ref_logprobs=zeros if with_reference else None,
        advantages=zeros,
        returns=zeros,
        values=zeros,
        teacher_ids=torch.zeros(1, 3, 1, dtype=torch.long) if with_teacher else None,
        teacher_topk=torch.zeros(1, 3, 1) if with_teacher else None,
    )


def load_lm(path: str, attention: str, dtype: Dtype, device: str) -> torch.nn.Module:
    """The causal language model of a Hugging Face folder, in `dtype` on `device`, without dropout."""
    from transformers import AutoModelForCausalLM

    lm: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype.value), attn_implementation=attention, local_files_only=True
    )
    for name, parameter in lm.named_parameters():
        if not torch.isfinite(parameter).all():
            raise RoleError(f"{path}: {name} holds values that are not finite; the weights are damaged")
    return lm.to(device).eval()  # dropout off in training too: the engine samples without it


# Results that selective recomputation keeps: the costly ones.
KEPT = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")


def recompute_activations(lm: Any, kind: Recompute) -> None:
    """Turns activation checkpointing on, which transformers does in training mode only; dropout stays off."""
    if kind is Recompute.none:
        return
    for module in lm.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or isinstance(module, torch.nn.Dropout)):
                setattr(module, name, 0.0)
    lm.train()
    settings: dict[str, Any] = {"use_reentrant": False}
    if kind is Recompute.selective:
        kept = [getattr(torch.ops.aten, name).default for name in KEPT]
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
