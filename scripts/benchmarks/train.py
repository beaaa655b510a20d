"""One update of the policy (ZeRO-1, one rank), against a plain torch loop in a process of its own.

Both train the same fixed batch, cut into the same micro-batches, with the same forward and loss. The learning rate is
0: AdamW does all of its work, but the weights stay, so every repeat is the same task. Tandem's time includes cutting
the batch and sending it through Ray. A third row is the plain loop with every row padded and its prompt computed anew,
as most trainers do.
"""

import argparse
import dataclasses
import random
import time
from typing import Any

import torch

from actors.group import as_micro
from actors.rank import Micro
from conf.choices import Layout
from conf.schema import Config
from rl.advantages import broadcast_to_tokens, group_advantages
from rl.batching import collate, plan_micro_batches
from rl.faults import RoleDied
from rl.types import Batch, Group, Prompt, Trajectory
from rollout.preflight.launch import prepare
from scripts.benchmarks.common import (
    Result,
    Row,
    Yardstick,
    bench_config,
    environment_of,
    make_result,
    medians,
    say,
    start_parts,
)

# How many of 16 tokens the completions of the quickstart's first steps use: 12 on average, half of them cut off.
LENGTHS = (16, 16, 4, 16, 9, 16, 12, 7)


def lengthened(prompts: list[Prompt], num_tokens: int) -> list[Prompt]:
    """The prompts repeated up to a length, or as they are for 0."""
    if num_tokens == 0:
        return prompts
    return [dataclasses.replace(p, token_ids=(p.token_ids * num_tokens)[:num_tokens]) for p in prompts]


def recorded_batch(prompts: list[Prompt], samples: int, max_tokens: int, full: bool = False) -> Batch:
    """A batch with the prompts and the lengths of the task; tokens and rewards are drawn from a fixed seed.

    `full`: every completion has `max_tokens`.
    """
    rng = random.Random(0)
    vocabulary = sorted({token for prompt in prompts for token in prompt.token_ids})
    groups = []
    for position, prompt in enumerate(prompts):
        trajectories = []
        for sample in range(samples):
            share = 16 if full else LENGTHS[(position + sample) % len(LENGTHS)]
            count = max(1, share * max_tokens // 16)
            size = len(prompt.token_ids)
            trajectories.append(
                Trajectory(
                    token_ids=prompt.token_ids + rng.choices(vocabulary, k=count),
                    prompt_len=size,
                    action_mask=[False] * size + [True] * count,
                    logprobs=[0.0] * (size + count),
                    versions=[-1] * size + [0] * count,
                    reward=float(sample % 2),
                )
            )
        groups.append(Group(position=position, prompt=prompt, trajectories=trajectories, version=0))
    batch = collate(groups)
    rewards = group_advantages(batch.rewards, batch.group_index, normalize_std=True)
    batch.advantages = broadcast_to_tokens(rewards, batch.action_mask)
    return batch


def micro_batches(cfg: Config, batch: Batch, layout: Layout) -> list[Micro]:
    """The micro-batches of a single rank."""
    trainer = cfg.trainer
    (plan,) = plan_micro_batches(batch, layout, 1, trainer.micro_batch_tokens, trainer.logprob_chunk_tokens)
    return [as_micro(batch, micro) for micro in plan]


class PlainLoop:
    """The yardstick: torch, AdamW, and nothing else."""

    def __init__(self, cfg: Config, num_threads: int):
        from actors.forward import Scorer
        from actors.rank import load_lm

        torch.set_num_threads(num_threads)
        trainer = cfg.trainer
        self.cfg = cfg
        lm = load_lm(cfg.model.path, cfg.model.attention, trainer.dtype, "cpu")
        self.scorer = Scorer(lm, cfg.rollout.temperature, trainer.layout)
        self.optimizer = torch.optim.AdamW(
            self.scorer.parameters(),
            lr=trainer.lr,
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.eps,
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def update(self, micros: list[Micro], num_action_tokens: int, layout: Layout) -> dict[str, float]:
        """One optimizer step; seconds of forward and backward, of the optimizer, and the gradient's norm."""
        from rl.losses import clipped_ratio

        algo, started, total = self.cfg.algo, time.monotonic(), 0.0
        for micro in micros:
            batch = micro.batch
            assert batch is not None and batch.advantages is not None
            logprobs, entropy, *_ = self.scorer(batch, micro.num_chunks, layout=layout)
            loss, _ = clipped_ratio(
                logprobs, logprobs.detach(), batch.advantages, batch.action_mask, algo.clip_low, algo.clip_high
            )
            (loss.sum() / num_action_tokens).backward()
            total += float(entropy.detach().sum()) / num_action_tokens
        backward = time.monotonic()
        norm = torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), self.cfg.trainer.grad_clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        ended = time.monotonic()
        return {
            "update_s": ended - started,
            "backward_s": backward - started,
            "optimizer_s": ended - backward,
            "grad_norm": float(norm),
            "entropy": total,
        }


def measure(args: argparse.Namespace) -> Result:
    cfg = bench_config(args, f"num_steps={args.repeats + 2}", "trainer.zero_stage=1", "trainer.lr=0")
    prepared = prepare(cfg)
    prompts = lengthened(prepared.train[: args.prompts], args.prompt_tokens)
    batch = recorded_batch(prompts, args.samples, args.max_tokens, full=args.prompt_tokens > 0)
    layouts = {"torch": cfg.trainer.layout, "torch, padded": Layout.padded}
    cuts = {variant: micro_batches(cfg, batch, layout) for variant, layout in layouts.items()}
    rows: list[Row] = []
    with start_parts(cfg, prepared, with_engines=False) as parts:
        batch.rollout_logprobs = parts.policy.logprobs(batch)  # what an engine with these weights would have said
        say("starting the plain loop")
        env = environment_of(parts.group.actors[0])
        with Yardstick("scripts.benchmarks.train:PlainLoop", env, cfg, args.threads) as plain:
            for repeat in range(args.repeats + 1):  # the first warms both sides up
                measured = {"tandem": time_policy(parts.policy, batch, repeat)}
                for variant, layout in layouts.items():
                    measured[variant] = plain.call("update", cuts[variant], batch.num_action_tokens, layout)
                require_same_work(measured)
                if repeat:
                    for variant, figures in measured.items():
                        rate = {"tok_s": sum(batch.lengths) / figures["update_s"]}
                        rows.append({"variant": variant, "repeat": repeat - 1} | figures | rate)
                took = ", ".join(f"{k} {figures['update_s']:.2f} s" for k, figures in measured.items())
                say(f"{repeat}/{args.repeats}: {took}")
    found = medians(rows)
    ratios: dict[str, float | None] = {
        "tok_s_vs_torch": found["tandem"]["tok_s"] / found["torch"]["tok_s"],
        "tok_s_vs_torch_padded": found["tandem"]["tok_s"] / found["torch, padded"]["tok_s"],
    }
    return make_result(
        args,
        rows,
        ratios,
        dtype=cfg.trainer.dtype.value,
        zero_stage=cfg.trainer.zero_stage,
        layout=cfg.trainer.layout.value,
        micro_batches={variant: len(micros) for variant, micros in cuts.items()},
        num_tokens=sum(batch.lengths),
        num_action_tokens=batch.num_action_tokens,
    )


def require_same_work(measured: dict[str, dict[str, float]]) -> None:
    """Raises RoleDied unless all variants found the same entropy and gradient: the comparison would mean nothing.

    The entropy, because a loss whose old log-probabilities are its own says nothing of the model. DeepSpeed and torch
    sum the 10^8 squares of a norm in fp32 in another order, which shows in its fifth digit.
    """
    for name, tolerance, variants in (
        ("entropy", 1e-5, list(measured)),
        ("grad_norm", 1e-4, list(measured)),
        ("grad_norm", 1e-5, ["torch", "torch, padded"]),
    ):
        found = {variant: measured[variant][name] for variant in variants}
        first = found[variants[0]]
        if not all(abs(value - first) <= tolerance * abs(first) for value in found.values()):
            raise RoleDied(f"{name} differs: {found}")


def time_policy(policy: Any, batch: Batch, step: int) -> dict[str, float]:
    started = time.monotonic()
    metrics = policy.update(batch, step, version=0)
    took = time.monotonic() - started
    return {
        "update_s": took,
        "backward_s": metrics["policy/backward_s"],
        "optimizer_s": metrics["policy/optimizer_s"],
        "grad_norm": metrics["policy/grad_norm"],
        "entropy": metrics["policy/entropy"],
    }
