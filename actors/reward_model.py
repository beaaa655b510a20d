"""A rank of the reward model: a frozen sequence-classification model with one label, on the policy's own token ids."""

from typing import Any

import torch

from actors.rank import Micro, Rank
from actors.sleep import own_weights


class RewardModelRank(Rank):
    """Scores whole rows. It reads the ids that the engine made: prompt, completion, and nothing rendered again."""

    def start(self, model_path: str, address: str, port: int, spec: None, num_threads: int) -> None:
        """Loads the model; frozen, a whole copy on each rank."""
        from transformers import AutoModelForSequenceClassification

        self.join(address, port, num_threads, trains=False)
        dtype = getattr(torch, self.cfg.trainer.dtype.value)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            model_path, dtype=dtype, num_labels=1, local_files_only=True
        )
        if self.cfg.cluster.sleep:
            own_weights(model)
        self.body = getattr(model, model.base_model_prefix).to(self.device).eval().requires_grad_(False)
        self.head = model.score.to(self.device).eval().requires_grad_(False)

    def model(self) -> torch.nn.Module | None:
        """As Rank."""
        return torch.nn.ModuleList([self.body, self.head]) if hasattr(self, "body") else None

    @torch.no_grad()
    def scores(self, micros: list[Micro]) -> list[torch.Tensor]:
        """The score [B] of each micro-batch (dummies left out), at the last token of each row, on the CPU.

        Rows are right-padded and attention is causal, so the last token's state has seen its row and nothing else. (The
        model's own forward would look for it by the pad id, which rows may contain.)
        """
        out = []
        for micro in micros:
            if micro.batch is not None:
                batch = self.on_device(micro.batch)
                hidden = self.body(input_ids=batch.tokens, use_cache=False).last_hidden_state
                last = batch.attention_mask.sum(-1) - 1
                out.append(self.head(hidden[torch.arange(len(last)), last])[:, 0].float().cpu())
        return out
