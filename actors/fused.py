"""Log-probabilities and entropies of tokens, and their gradient, each in one compiled kernel (trainer.fused_logprobs).

The formulas are those of actors.forward.TokenScores. What torch runs there as several passes over [tokens, vocabulary]
in fp32 is here one pass forward and one backward over the logits as the head gives them; nothing else of that size is
made but the gradient. torch.compile writes the kernels (Triton on a GPU, C++ on a CPU) when they are first called.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actors.compiled import kept_whole, machine_folder


def scores(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, entropy and logarithm of the normaliser [N], of logits [N, V] in any float dtype.

    All in the dtype of `temperature`.
    """
    scaled = logits.to(temperature.dtype) / temperature
    top = scaled.amax(-1, keepdim=True)
    shifted = scaled - top
    weights = shifted.exp()
    total = weights.sum(-1)
    normaliser = total.log()
    entropy = normaliser - (weights * shifted).sum(-1) / total
    logprobs = logits.gather(-1, targets[:, None])[:, 0].to(temperature.dtype) / temperature - top[:, 0] - normaliser
    return logprobs, entropy, top[:, 0] + normaliser


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    entropy: torch.Tensor,
    normaliser: torch.Tensor,
    of_logprobs: torch.Tensor,
    of_entropy: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits, in their dtype."""
    every = logits.to(temperature.dtype) / temperature - normaliser[:, None]
    found = every.exp() * (-of_entropy[:, None] * (every + entropy[:, None]) - of_logprobs[:, None])
    chosen = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return ((found + torch.where(chosen, of_logprobs[:, None], 0.0)) / temperature).to(logits.dtype)


def compiling() -> contextlib.AbstractContextManager[None]:
    """Guards a call that compiles. The locks of torch's compiler end with their process, but it takes a library that a
    killed linker has half written for a whole one."""
    from torch._inductor.config import file_lock_timeout
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    own = folder.parent == machine_folder()  # of a training rank; elsewhere others compile there too
    return kept_whole(folder, file_lock_timeout) if own else contextlib.nullcontext()


@functools.cache
def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled, once for any number of tokens."""
    compiled = torch.compile(function, fullgraph=True)
    known = set()

    def call(logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, *columns: torch.Tensor) -> Any:
        for tensor in (logits, targets, *columns):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        kind = (logits.dtype, logits.device.type, logits.shape[-1], len(logits) == 1)
        with contextlib.nullcontext() if kind in known else compiling():
            found = compiled(logits, targets, temperature, *columns)
        known.add(kind)
        return found

    return call


class FusedTokenScores(torch.autograd.Function):
    """logits [N, V], targets [N], temperature -> log-probabilities and entropies [N] in fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        scale = torch.tensor(temperature, dtype=dtype, device=logits.device)  # a number would be compiled in
        targets = targets.clone()  # a chunk of many: where a view begins would be compiled in
        logprobs, entropy, normaliser = kernel(scores)(logits, targets, scale)
        ctx.save_for_backward(logits, targets, scale, entropy, normaliser)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, of_logprobs: torch.Tensor, of_entropy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        columns = of_logprobs.clone(), of_entropy.clone()  # as the targets
        return kernel(gradient)(*ctx.saved_tensors, *columns), None, None
