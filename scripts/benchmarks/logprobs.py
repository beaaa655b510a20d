"""Log-probabilities, entropies and their gradients of many tokens over a large vocabulary, against the naive way.

The naive way makes the logits of all tokens at once. `fused`: with the kernels of trainer.fused_logprobs. Each side
runs in a process of its own; the rise of its resident memory is measured from before the forward to the peak of forward
and backward, gradients of the head included.
"""

import argparse
import os
import re
import time
from pathlib import Path

import torch

from rl.faults import RoleDied
from scripts.benchmarks.common import Result, Row, Yardstick, make_result, medians, say

# Largest difference from the naive way's values, in nats. The compiled kernels add up a vocabulary in another order.
LIMITS = {"tandem": 1e-6, "fused": 5e-5}


class Head:
    """A head and hidden states, the same in every process."""

    def __init__(self, num_tokens: int, vocabulary: int, width: int, num_threads: int):
        torch.set_num_threads(num_threads)
        random = torch.Generator().manual_seed(0)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(vocabulary, width, generator=random) / width**0.5)
        self.hidden = torch.randn(num_tokens, width, generator=random)
        self.targets = torch.randint(0, vocabulary, (num_tokens,), generator=random)
        self.weights = torch.randn(2, num_tokens, generator=random)

    def run(self, chunk_tokens: int, fused: bool = False) -> dict[str, float]:
        """Seconds of a forward and backward, and the rise of memory; in chunks, or naively when `chunk_tokens` is 0."""
        hidden = self.hidden.clone().requires_grad_()
        self.head.zero_grad(set_to_none=True)
        before, started = reset_peak(), time.monotonic()
        logprobs, entropy = self.scores(hidden, chunk_tokens, fused)
        forward_s = time.monotonic() - started
        (self.weights[0] @ logprobs + self.weights[1] @ entropy).backward()
        return {
            "forward_s": forward_s,
            "seconds": time.monotonic() - started,
            "rise_bytes": float(peak_bytes() - before),
        }

    def gap(self, num_tokens: int, chunk_tokens: int, fused: bool = False) -> float:
        """Largest difference of log-probabilities and entropies between the two ways, over the first tokens."""
        with torch.no_grad():
            pairs = zip(
                self.scores(self.hidden[:num_tokens], chunk_tokens, fused),
                self.scores(self.hidden[:num_tokens], 0),
                strict=True,
            )
            return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)

    def scores(self, hidden: torch.Tensor, chunk_tokens: int, fused: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        from actors.forward import chunked_scores

        targets = self.targets[: len(hidden)]
        if chunk_tokens:
            num_chunks = -(-len(hidden) // chunk_tokens)
            logprobs, entropy = chunked_scores(hidden, targets, self.head, 1.0, num_chunks, fused=fused)
            return logprobs, entropy
        every = self.head(hidden).log_softmax(-1)
        return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def reset_peak() -> int:
    """Makes the present resident memory the peak; gives it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


def measure(args: argparse.Namespace) -> Result:
    size = (args.tokens, args.vocabulary, args.width, args.threads)
    rows: list[Row] = []
    with (
        Yardstick("scripts.benchmarks.logprobs:Head", dict(os.environ), *size) as ours,
        Yardstick("scripts.benchmarks.logprobs:Head", dict(os.environ), *size) as fused,
        Yardstick("scripts.benchmarks.logprobs:Head", dict(os.environ), *size) as naive,
    ):
        sides = {"tandem": (ours, (args.chunk_tokens,)), "fused": (fused, (args.chunk_tokens, True))}
        gaps = {name: side.call("gap", 256, *how) for name, (side, how) in sides.items()}
        for name, gap in gaps.items():
            if not gap <= LIMITS[name]:
                raise RoleDied(f"{name} differs from the naive way by {gap:.3g}, limit {LIMITS[name]:g}")
        for repeat in range(args.repeats + 1):  # the first warms all sides up
            found = {name: side.call("run", *how) for name, (side, how) in sides.items()}
            found["naive"] = naive.call("run", 0)
            if repeat:
                rows += [{"variant": name, "repeat": repeat - 1} | row for name, row in found.items()]
            say(f"{repeat}/{args.repeats}: " + ", ".join(f"{k} {v['seconds']:.2f} s" for k, v in found.items()))
    of = medians(rows)
    ratios: dict[str, float | None] = {
        "time_vs_naive": of["tandem"]["seconds"] / of["naive"]["seconds"],
        "rise_vs_naive": of["tandem"]["rise_bytes"] / of["naive"]["rise_bytes"],
        "fused_time_vs_naive": of["fused"]["seconds"] / of["naive"]["seconds"],
        "fused_rise_vs_naive": of["fused"]["rise_bytes"] / of["naive"]["rise_bytes"],
    }
    return make_result(args, rows, ratios, largest_gaps=gaps)
