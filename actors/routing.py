"""Mixture of experts: which experts the routers choose, as sums that add up over micro-batches, layers and ranks."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from rl.metrics import Sums


class Routing:
    """Watches a model's routers while `reading`. `take` gives what was seen since the last call, [layers, experts].

    Routers are found by what they return: transformers' (logits, scores, chosen), or DeepSpeed's expert-parallel ones'
    (scores, chosen, counts).
    """

    def __init__(self, base: torch.nn.Module):
        self.routers = [m for m in base.modules() if type(m).__name__.endswith("TopKRouter")]
        self.real: torch.Tensor | None = None
        self.seen: Sums = {}
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._note, layer))

    @contextlib.contextmanager
    def reading(self, real: torch.Tensor) -> Iterator[None]:
        """`real` [B, T] bool: the tokens of the forward in it that count. Recomputation happens outside, uncounted."""
        self.real = real.flatten()
        try:
            yield
        finally:
            self.real = None

    @torch.no_grad()
    def _note(self, layer: int, router: Any, inputs: Any, output: Any) -> None:
        if self.real is None:
            return
        if torch.is_floating_point(output[1]):
            logits, _, chosen = output
        else:
            _, chosen, _ = output
            logits = router.gate(inputs[0])
        probabilities = logits.float().softmax(-1)[self.real]
        experts = logits.shape[-1]
        counts = torch.bincount(chosen[self.real].flatten(), minlength=experts)
        for name, value in (("router_counts_hist", counts), ("router_probs_hist", probabilities.sum(0))):
            if name not in self.seen:
                self.seen[name] = torch.zeros(len(self.routers), experts, dtype=torch.float64)
            self.seen[name][layer] += value.double().cpu()

    def take(self) -> Sums:
        """Tokens that chose each expert, and the sum of the routers' probabilities; empty for a dense model."""
        seen, self.seen = self.seen, {}
        return seen
