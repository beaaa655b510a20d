"""Supervised warm start: teaches a model demonstrations, through the same training ranks as the policy's.

    python scripts/sft.py experiment=tiny_sort sft.num_steps=500 run_dir=runs/warm

writes a Hugging Face folder `<run folder>/sft`. `scripts/train.py` does the same first when sft.num_steps > 0.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from actors.cluster import Cluster, detect_device
from actors.engine import OptimizerSpec
from actors.group import RankGroup, as_micro, in_thread
from actors.rank import Update
from conf.choices import Layout, Optimizer, Schedule
from conf.errors import ConfigError
from conf.launch import launch
from conf.schema import Config
from rl.batching import collate, plan_micro_batches
from rl.numerics import NotFiniteError
from rl.schedule import learning_rate
from rl.types import Batch, Group, Prompt, Trajectory
from rollout.data import draw_demonstrations, render_demonstrations
from rollout.demonstrations import oracle_turns
from rollout.preflight.launch import Prepared, prepare, require_compilers

# Steps sent to the ranks in one call: enough to hide the call, few enough to show progress.
STEPS_PER_CALL = 20


def demonstration_batch(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    """Rows of (prompt ids, completion ids); the completion's tokens are the action tokens."""
    groups = []
    for index, (prompt, completion) in enumerate(pairs):
        count = len(completion)
        trajectory = Trajectory(
            token_ids=prompt + completion,
            prompt_len=len(prompt),
            action_mask=[False] * len(prompt) + [True] * count,
            logprobs=[0.0] * (len(prompt) + count),
            versions=[0] * (len(prompt) + count),
        )
        prompt_record = Prompt(index=index, token_ids=prompt, record={})
        groups.append(Group(position=index, prompt=prompt_record, trajectories=[trajectory], version=0))
    return collate(groups)


def plan_steps(
    cfg: Config, group: RankGroup, pairs: list[tuple[list[int], list[int]]], steps: range
) -> list[list[Update]]:
    """Updates [replica][k] of some steps of the warm start."""
    sft, trainer = cfg.sft, cfg.trainer
    per_replica: list[list[Update]] = [[] for _ in range(group.replicas)]
    for step in steps:
        batch = demonstration_batch(pairs[step * sft.batch_size : (step + 1) * sft.batch_size])
        lr = learning_rate(step, sft.num_steps, sft.lr, Schedule.linear, sft.warmup_steps, sft.final_lr_ratio)
        plans = plan_micro_batches(
            batch, Layout.padded, group.replicas, trainer.micro_batch_tokens, trainer.logprob_chunk_tokens
        )
        for replica, plan in enumerate(plans):
            micros = [as_micro(batch, micro) for micro in plan]
            update = Update(micros=micros, num_action_tokens=batch.num_action_tokens, lr=lr, version=0)
            per_replica[replica].append(update)
    return per_replica


def demonstrations(cfg: Config, prepared: Prepared, count: int) -> list[tuple[list[int], list[int]]]:
    """What the warm start learns from: turns of the environment's oracle, or at most `count` of a generator."""
    if prepared.env is not None:
        return oracle_turns(cfg, prepared.env, prepared.tokenizer, min(count, cfg.data.size))
    return render_demonstrations(cfg.data, cfg.sft, prepared.tokenizer, count, cfg.seed)


def warm_start(
    cfg: Config, cluster: Cluster, prepared: Prepared, out: Path, say: Callable[[str], None]
) -> dict[str, float]:
    """Trains `cfg.sft.num_steps` steps and writes the result to `out`. Returns the last loss and the seconds taken."""
    started, loss = time.monotonic(), float("nan")
    sft = cfg.sft
    spec = OptimizerSpec(
        kind=Optimizer.adamw,
        compile_timeout_s=cfg.trainer.timeout_s,
        momentum=0.0,
        beta1=0.9,
        beta2=sft.beta2,
        eps=1e-8,
        weight_decay=sft.weight_decay,
        grad_clip=sft.grad_clip,
    )
    group = RankGroup(cfg, cluster, "sft", cfg.model.path, spec)
    try:
        ready: Future[Any] = group.start()
        count = sft.num_steps * sft.batch_size
        rendered = prepared.demonstrations or demonstrations(cfg, prepared, count)
        pairs = draw_demonstrations(cfg.data, rendered, count, cfg.seed)
        calls = [
            range(first, min(first + STEPS_PER_CALL, sft.num_steps))
            for first in range(0, sft.num_steps, STEPS_PER_CALL)
        ]
        updates = plan_steps(cfg, group, pairs, calls[0])
        ready.result()
        for number, steps in enumerate(calls):
            running = in_thread(partial(group.call_each, "sft", updates))
            tokens = updates[0][-1].num_action_tokens
            if number + 1 < len(calls):
                updates = plan_steps(cfg, group, pairs, calls[number + 1])  # while the ranks compute
            done = running.result()
            skipped = sum(step["skipped_steps"] for step in done[0])
            if skipped:
                raise NotFiniteError(
                    f"warm start: {skipped:g} of the gradients of steps {steps.start + 1} to {steps.stop} were not "
                    f"finite; sft.lr={sft.lr} is too high, or the model cannot score what the data holds"
                )
            loss = sum(replica[-1]["loss"] for replica in done) / tokens
            say(f"warm start {steps.stop}/{sft.num_steps}: loss {loss:.3f}, {time.monotonic() - started:.0f} s")
        group.call("export", str(out), cfg.model.path)
        return {"sft/loss": loss, "sft/seconds": time.monotonic() - started}
    finally:
        group.stop()


def run(cfg: Config) -> int:
    """The script: a warm start by itself."""
    from rl.run_folder import resolve_run_dir

    if cfg.sft.num_steps == 0:
        raise ConfigError("sft.num_steps=0: give the number of steps, for example sft.num_steps=500")
    prepared = prepare(cfg)
    adamw = dataclasses.replace(cfg.trainer, optimizer=Optimizer.adamw)  # a warm start's, whatever training uses
    require_compilers(dataclasses.replace(cfg, trainer=adamw), detect_device(cfg.cluster))
    run_dir = resolve_run_dir(f"{cfg.name}-sft", cfg.run_dir, "never")
    cluster = Cluster(cfg.cluster)
    try:
        warm_start(cfg, cluster, prepared, run_dir / "sft", lambda text: print(text, flush=True))
    finally:
        cluster.stop()
    print(f"wrote {run_dir / 'sft'}")
    return 0


if __name__ == "__main__":
    launch(run, doc=__doc__)
