"""Muon for the matrices of the decoder layers, AdamW for all else: one optimizer, as DeepSpeed wants it."""

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with updates as large as AdamW's (Liu et al. 2025, equation 4), so that one learning
    rate fits both. `matrices` are whole [out, in]; a part of one, or several flattened, would be something else.
    """

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        others: list[torch.nn.Parameter],
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=0.0, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True),
        ]
        super().__init__([{"params": matrices, "name": "matrices"}, {"params": others, "name": "others"}], {"lr": 0.0})
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of both, with the learning rates of this optimizer's own groups."""
        assert closure is None
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
            part.step()
