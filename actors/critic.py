"""A rank of the critic: a value head on a causal language model's body, trained on the returns."""

import torch

from actors.engine import OptimizerSpec
from actors.forward import ValueScorer
from actors.rank import Micro, Rank, Update
from rl.losses import value_loss
from rl.metrics import merge_sums, on_cpu
from rl.types import Sums


class CriticRank(Rank):
    """One rank of the critic: values, updates, checkpoints."""

    def start(self, model_path: str, address: str, port: int, spec: OptimizerSpec, num_threads: int) -> None:
        """Joins the group and loads the body of the model. Collective: every rank of the group must be starting."""
        self.join(address, port, num_threads, trains=True)
        lm = self.load_lm(model_path)
        body = getattr(lm, lm.base_model_prefix)
        self.wrap(ValueScorer(body, self.cfg.trainer.layout, self.sequence).to(self.device), spec, lm)

    @torch.no_grad()
    def values(self, micros: list[Micro]) -> list[torch.Tensor]:
        """Values [B, T] of each micro-batch (dummies left out), on the CPU."""
        found = [(m, self.engine(self.on_device(m.batch))) for m in micros]
        self.release()
        return [values.float().cpu() for micro, values in found if micro.batch is not None]

    def accumulate(self, update: Update) -> Sums:
        """As Rank."""
        parts = []
        for micro in update.micros:
            batch = self.on_device(micro.batch)
            assert batch.values is not None and batch.returns is not None
            loss, sums = value_loss(
                self.engine(batch), batch.values, batch.returns, batch.action_mask, self.cfg.critic.value_clip
            )
            self.engine.backward(loss.sum(), update.num_action_tokens)
            parts.append(on_cpu(sums | {"loss": loss.sum()}))
        return merge_sums(parts)
