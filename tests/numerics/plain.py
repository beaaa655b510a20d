"""The yardstick of the layout tests: the same updates in one process of plain torch, written as naively as can be.

One row at a time, no padding, no sharing, no DeepSpeed; formulas spelled out from the papers, not taken from rl/.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from conf.choices import Optimizer
from conf.schema import Config
from rl.types import Batch
from tests.integration.real import load_hf


def row_logprobs(lm: Any, batch: Batch, row: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) of the action tokens of one row."""
    length = int(batch.attention_mask[row].sum())
    ids = batch.tokens[row, :length]
    logits = lm(ids[None]).logits[0, :-1] / temperature
    everything = torch.log_softmax(logits, -1)
    taken = batch.action_mask[row, 1:length]
    entropy = -(everything.exp() * everything).sum(-1)
    return everything.gather(-1, ids[1:, None])[:, 0][taken], entropy.detach()[taken]


@torch.no_grad()
def all_logprobs(lm: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """[B, T], zero where there is no action token."""
    out = torch.zeros(batch.tokens.shape)
    for row in range(batch.num_rows):
        out[row][batch.action_mask[row]] = row_logprobs(lm, batch, row, temperature)[0]
    return out


class PlainPolicy:
    """GRPO with a KL term (k2), token mean over the batch, as `update` of the real policy."""

    def __init__(self, cfg: Config, folder: Path):
        trainer = cfg.trainer
        self.cfg, self.lm = cfg, load_hf(folder)
        self.parameters = [p for _, p in self.lm.named_parameters()]
        self.optimizer: torch.optim.Optimizer
        if trainer.optimizer is Optimizer.adamw:
            self.optimizer = torch.optim.AdamW(
                self.parameters,
                lr=trainer.lr,
                betas=(trainer.beta1, trainer.beta2),
                eps=trainer.eps,
                weight_decay=trainer.weight_decay,
            )
        else:
            self.optimizer = torch.optim.SGD(self.parameters, lr=trainer.lr)

    def update(self, batch: Batch) -> dict[str, float]:
        """One update: `algo.num_epochs` optimizer steps on the whole batch. Metrics under the real policy's names."""
        steps = [self._step(batch) for _ in range(self.cfg.algo.num_epochs)]
        return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}

    def _step(self, batch: Batch) -> dict[str, float]:
        algo, temperature = self.cfg.algo, self.cfg.rollout.temperature
        self.optimizer.zero_grad()
        total = int(batch.action_mask.sum())
        found: dict[str, float] = {}

        def note(name: str, values: torch.Tensor) -> None:
            found[name] = found.get(name, 0.0) + float(values.detach().double().sum()) / total

        for row in range(batch.num_rows):
            mask = batch.action_mask[row]
            new, entropy = row_logprobs(self.lm, batch, row, temperature)
            old = batch.train_logprobs[row][mask] if batch.train_logprobs is not None else new.detach()
            ref, advantage = batch.ref_logprobs[row][mask], batch.advantages[row][mask]  # type: ignore[index]
            ratio = torch.exp(new - old)
            clipped = torch.clamp(ratio, 1 - algo.clip_low, 1 + algo.clip_high)
            surrogate = torch.minimum(ratio * advantage, clipped * advantage)
            kl = (ref - new) ** 2 / 2
            ((-surrogate + algo.kl_coef * kl).sum() / total).backward()
            note("policy/policy_loss", -surrogate)
            note("policy/kl", kl)
            note("policy/entropy", entropy)
            note("policy/ratio", ratio)
            note("policy/clip_low", (ratio < 1 - algo.clip_low) & (advantage < 0))
            note("policy/clip_high", (ratio > 1 + algo.clip_high) & (advantage > 0))
            if batch.train_logprobs is None:
                note("mismatch/mean", (new - batch.rollout_logprobs[row][mask]).abs())
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in self.parameters))
        found["policy/grad_norm"] = float(norm)
        clip = self.cfg.trainer.grad_clip
        if clip and float(norm) > clip:
            for parameter in self.parameters:
                parameter.grad *= clip / float(norm)
        self.optimizer.step()
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all weights, by the names that transformers gives them in a folder."""
        with tempfile.TemporaryDirectory() as folder:
            self.lm.save_pretrained(folder)
            return {k: v.clone() for k, v in load_file(Path(folder) / "model.safetensors").items()}
