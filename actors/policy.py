"""The training rank: one process of the policy, or of a frozen reference. A plain class; actors/group.py wraps it."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors import checkpoint
from actors.engine import Engine, OptimizerSpec, init_distributed
from actors.forward import Scorer, require_supported
from conf.schema import Config, Dtype, Layout
from rl import losses
from rl.masking import masked_fill_zero
from rl.metrics import merge_sums, tensor_sums
from rl.numerics import require_match
from rl.types import Batch
from weightsync.manifest import plan_buckets
from weightsync.sender import Sender


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


def dummy_batch() -> Batch:
    """One row without action tokens: its loss and every gradient are 0."""
    zeros = torch.zeros(1, 3)
    return Batch(
        tokens=torch.zeros(1, 3, dtype=torch.long),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        action_mask=torch.zeros(1, 3, dtype=torch.bool),
        rollout_logprobs=zeros,
        rewards=torch.zeros(1),
        group_index=torch.zeros(1, dtype=torch.long),
        prompt_len=torch.ones(1, dtype=torch.long),
        version=torch.zeros(1, dtype=torch.long),
        ref_logprobs=zeros,
        advantages=zeros,
    )


def load_lm(path: str, attention: str, dtype: Dtype, device: str) -> torch.nn.Module:
    """The causal language model of a Hugging Face folder, in `dtype` on `device`, without dropout."""
    from transformers import AutoModelForCausalLM

    lm: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype.value), attn_implementation=attention, local_files_only=True
    )
    require_supported(lm.config)
    return lm.to(device).eval()  # dropout off in training too: the engine samples without it


class TrainRank:
    """One rank of the policy: scoring, updates, weights for the sync, checkpoints."""

    def __init__(self, cfg: Config, rank: int, world: int, device: str):
        self.cfg, self.rank, self.world, self.device = cfg, rank, world, device
        self._sender: Sender | None = None
        self._probe_row: list[int] = []
        self._probe_logprobs: list[float] | None = None  # of the row, under the weights as they are

    def start(self, model_path: str, address: str, port: int, spec: OptimizerSpec | None, num_threads: int) -> None:
        """Joins the group and loads the model. Collective: every rank of the group must be starting.

        Without `spec` the model is frozen: no process group, no optimizer, a whole copy on each rank.
        """
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world),
            LOCAL_RANK=os.environ.get("TANDEM_LOCAL_RANK", "0"),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        torch.set_num_threads(num_threads)
        torch.manual_seed(self.cfg.seed)
        self._probe_logprobs = None
        if spec is not None:
            init_distributed("nccl" if self.device == "cuda" else "gloo", self.cfg.trainer.timeout_s)
        lm = load_lm(model_path, self.cfg.model.attention, self.cfg.trainer.dtype, self.device)
        if self.cfg.trainer.gradient_checkpointing:
            lm.train()
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        scorer = Scorer(lm, self.cfg.rollout.temperature, self.cfg.trainer.layout)
        self.score: Scorer | Engine = scorer.requires_grad_(spec is not None)
        if spec is not None:
            self.score = self.engine = Engine(scorer, spec, self.cfg.trainer.zero_stage, self.cfg.trainer.dtype)

    def free_port(self) -> int:
        """A free port of this rank's host, for the group's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    @torch.no_grad()
    def logprobs(self, micros: list[Micro]) -> list[torch.Tensor]:
        """Log-probabilities [B, T] of each micro-batch (dummies left out), on the CPU."""
        out = []
        for micro in micros:
            values, _ = self.score(self._on_device(micro.batch), micro.num_chunks)
            if micro.batch is not None:
                out.append(values.float().cpu())
        return out

    def update(self, updates: list[Update]) -> list[dict[str, float]]:
        """Optimizer steps, one for each entry; returns the sums over this rank's action tokens of each step.

        Raises rl.numerics.MismatchError on all ranks, before the optimizer moves, when `mismatch_limit` is exceeded.
        """
        results = [self._update(update) for update in updates]
        self._probe_logprobs = None
        if self._probe_row:
            self.probe(self._probe_row)  # now, so that the push that follows need not wait for it
        return results

    def _update(self, update: Update) -> dict[str, float]:
        started = time.monotonic()
        parts = []
        for micro in update.micros:
            batch = self._on_device(micro.batch)
            logprobs, entropy = self.engine(batch, micro.num_chunks)
            loss, tensors = losses.grpo(self.cfg.algo, batch, logprobs)
            tensors["entropy"] = entropy.double().sum()
            self.engine.backward(loss, update.num_action_tokens)
            parts.append(tensor_sums(tensors))
        sums = merge_sums(parts)
        if update.mismatch_limit is not None:
            total = torch.tensor(sums["mismatch"], dtype=torch.float64)
            if self.world > 1:
                torch.distributed.all_reduce(total)
            require_match(float(total) / update.num_action_tokens, update.mismatch_limit, update.version)
        forward_s = time.monotonic() - started
        result = self.engine.step(update.lr)
        return sums | {
            "grad_norm": result.grad_norm,
            "skipped_steps": float(result.skipped),
            "backward_s": forward_s,
            "optimizer_s": time.monotonic() - started - forward_s,
        }

    def sft(self, updates: list[Update]) -> list[dict[str, float]]:
        """Supervised steps: minus the mean log-probability of the action tokens."""
        self._probe_logprobs = None
        out = []
        for update in updates:
            total = 0.0
            for micro in update.micros:
                batch = self._on_device(micro.batch)
                logprobs, _ = self.engine(batch, micro.num_chunks, 1.0, Layout.padded)
                loss = -masked_fill_zero(logprobs, batch.action_mask).sum()
                self.engine.backward(loss, update.num_action_tokens)
                total += float(loss.detach())
            result = self.engine.step(update.lr)
            out.append({"loss": total, "grad_norm": result.grad_norm, "skipped_steps": float(result.skipped)})
        return out

    def manifest(self) -> dict[str, Any]:
        """What each push will carry; rank 0 also makes its ring. Returns the arguments of the engines' init phase."""
        manifest = plan_buckets(self.engine.shapes(), self.cfg.trainer.dtype.value, self.cfg.sync.bucket_bytes)
        self._manifest = manifest
        if self.rank > 0:
            return {}
        self._sender = Sender(manifest, self.cfg.sync.num_slots)
        ring = self._sender.ring
        return {
            "path": ring.path,
            "slot_bytes": ring.slot_bytes,
            "num_slots": ring.num_slots,
            "manifest": manifest.to_dict(),
            "fingerprint": manifest.fingerprint(),
        }

    def pack(self, bucket: int) -> int:
        """Copies one bucket of live weights into the ring (rank 0); returns its checksum. Collective under ZeRO-3."""
        names = [tensor.name for tensor in self._manifest.buckets[bucket].tensors]
        with self.engine.gathered(names) as tensors:
            return self._sender.pack(bucket, tensors) if self._sender else 0

    @torch.no_grad()
    def probe(self, row: list[int]) -> list[float]:
        """Log-probabilities at temperature 1 of each token of `row` but the first. Collective under ZeRO-3."""
        if self._probe_logprobs is None or row != self._probe_row:
            logprobs, _ = self.engine(self._on_device(probe_batch(row)), 1, 1.0, Layout.padded)
            self._probe_row, self._probe_logprobs = row, [float(x) for x in logprobs[0, 1:].cpu()]
        return self._probe_logprobs

    def save(self, folder: str) -> list[dict[str, Any]]:
        """Writes this rank's share of the training state into `folder`; returns its manifest entries. Collective."""
        return checkpoint.write_shards(Path(folder), self.engine, self.rank, self.world)

    def export(self, folder: str, model_path: str) -> None:
        """Writes the live weights as a Hugging Face folder (rank 0). Collective under ZeRO-3."""
        weights: dict[str, torch.Tensor] = {}
        for bucket in plan_buckets(
            self.engine.shapes(), self.cfg.trainer.dtype.value, self.cfg.sync.bucket_bytes
        ).buckets:
            names = [tensor.name for tensor in bucket.tensors]
            with self.engine.gathered(names) as tensors:
                if self.rank == 0:
                    weights |= {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        if self.rank == 0:
            checkpoint.write_hf(weights, Path(model_path), Path(folder))

    def load(self, folder: str) -> None:
        """Reads the whole training state, in whatever layout it was saved. Collective."""
        self._probe_logprobs = None
        checkpoint.read_shards(Path(folder), self.engine)

    def state(self) -> dict[str, Any]:
        """Optimizer step and random state of this rank, for the checkpoint."""
        return {"optimizer_step": self.engine.optimizer_step, "torch_rng": torch.get_rng_state().tolist()}

    def _on_device(self, batch: Batch | None) -> Batch:
        batch = batch if batch is not None else dummy_batch()
        if self.device == "cpu":
            return batch
        moved = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
        return Batch(**moved)


def probe_batch(row: list[int]) -> Batch:
    """One row in which every token but the first is an action token."""
    count = len(row)
    return Batch(
        tokens=torch.tensor([row]),
        attention_mask=torch.ones(1, count, dtype=torch.bool),
        action_mask=torch.tensor([[False] + [True] * (count - 1)]),
        rollout_logprobs=torch.zeros(1, count),
        rewards=torch.zeros(1),
        group_index=torch.zeros(1, dtype=torch.long),
        prompt_len=torch.ones(1, dtype=torch.long),
        version=torch.zeros(1, dtype=torch.long),
    )
