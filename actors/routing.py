"""Mixture of experts: which experts the routers choose, counted, recorded, and replayed."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl.types import Sums


class Routing:
    """Watches a model's routers while `reading`. `take` gives what was seen since the last call, [layers, experts].

    Routers are found by what they return: transformers' (logits, scores, chosen), or DeepSpeed's expert-parallel ones'
    (scores, chosen, counts).
    """

    def __init__(self, base: torch.nn.Module):
        self.routers: list[Any] = [m for m in base.modules() if type(m).__name__.lower().endswith("topkrouter")]
        self.real: torch.Tensor | None = None
        self.routes: torch.Tensor | None = None
        self.chosen: list[torch.Tensor] = []
        self.seen: Sums = {}
        for layer, router in enumerate(self.routers):
            router.forward = partial(self._route, layer, router.forward)
            router.register_forward_hook(partial(self._note, layer))

    @contextlib.contextmanager
    def reading(self, real: torch.Tensor, routes: torch.Tensor | None = None) -> Iterator[None]:
        """`real` [B, T] bool: the tokens of the forward in it that count. Recomputation happens outside, uncounted.

        `routes` [B, T, layers, k]: the experts that each token takes, instead of those that its router would choose.
        """
        self.real, self.chosen = real.flatten(), []
        self.routes = None if routes is None else routes.flatten(0, 1).long()
        try:
            yield
        finally:
            self.real = self.routes = None

    def recorded(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """The experts that each token of the last forward took, [B, T, layers, k] int16 on the CPU.

        `attention_mask` [B, T] is that of its batch, whose rows ran padded or packed.
        """
        found = torch.stack(self.chosen, 1).short().cpu()
        if len(found) == attention_mask.numel():
            return found.unflatten(0, attention_mask.shape)
        routes = torch.zeros(*attention_mask.shape, *found.shape[1:], dtype=found.dtype)
        routes[attention_mask] = found
        return routes

    def _route(self, layer: int, forward: Any, *inputs: Any, **options: Any) -> Any:
        if self.routes is None:
            return forward(*inputs, **options)
        with Given(self.routes[:, layer].contiguous(), self.routers[layer].num_experts):
            return forward(*inputs, **options)

    @torch.no_grad()
    def _note(self, layer: int, router: Any, inputs: Any, output: Any) -> None:
        if self.real is None:
            return
        if torch.is_floating_point(output[1]):
            logits, _, chosen = output
        else:
            _, chosen, _ = output
            logits = router.gate(inputs[0])
        self.chosen.append(chosen)
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


class Given(TorchFunctionMode):
    """A router's last choice is given: where it takes the k best of all experts, it takes `chosen` [tokens, k].

    All routers choose by torch.topk and take their weights from the scores at what it returns, so the weights, and
    their gradients, stay those of the present scores.
    """

    def __init__(self, chosen: torch.Tensor, num_experts: int):
        super().__init__()
        self.chosen, self.num_experts = chosen, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk:
            k = args[1] if len(args) > 1 else kwargs["k"]
            if (args[0].shape[-1], k) == (self.num_experts, self.chosen.shape[-1]):  # not a choice among groups of them
                return args[0].gather(-1, self.chosen), self.chosen
        return func(*args, **kwargs)
