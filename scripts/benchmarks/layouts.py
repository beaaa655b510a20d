"""Every layout of two training ranks on a small model: the same numbers as one process, its speed and its memory.

For each legal layout: five SGD updates against one process of plain torch (losses and gradients), training tokens per
second against plain DistributedDataParallel on as many processes, and the bytes of tensors that a rank holds. For each
illegal one: the reason. The models have 3 million parameters and random weights; one is dense, the other has experts.

Last, the log-probabilities of one row of 32,768 tokens on one rank, and on two that share it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from actors.engine import BUCKET_ELEMENTS
from actors.forward import Scorer
from actors.group import RankGroup, as_micro, plan_ranks, quadratic_tokens
from actors.rank import Micro
from actors.roles import ActorPolicy, plan_updates
from conf.choices import Dtype, Layout, Optimizer, Recompute
from conf.errors import ConfigError
from conf.layout import TrainLayout, every_layout
from conf.schema import AlgoConfig, ClusterConfig, Config, ModelConfig, RolloutConfig, TrainerConfig
from rl.batching import collate, plan_micro_batches
from rl.losses import clipped_ratio
from rl.plan.memory import bytes_between_steps, elements_of
from rl.types import Batch, Group, Prompt, Trajectory
from scripts.benchmarks.common import Result, Row, Yardstick, environment_of, make_result, say
from weightsync.folder import folder_shapes

RANKS = 2
UPDATES = 5
VOCABULARY = 64
# What every row has, null where it was not measured; `state_bytes` beside the prediction is of the same moment.
KEYS = (
    "layout",
    "legal",
    "reason",
    "max_loss_diff",
    "max_grad_rel_diff",
    "tok_s_ratio",
    "peak_bytes",
    "state_bytes",
    "predicted_bytes",
)
LR = 0.05
LARGE_LR = 10.0  # for one step, whose way is then the gradient with little rounding
SHAPES = [(24, (40, 12, 33, 7)), (9, (60, 48, 5, 21)), (40, (16, 16, 30, 52)), (3, (70, 2, 44, 28))] * 2


def model_folder(out: Path, experts: bool) -> Path:
    """A random model of 3 million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    if experts:
        config: Any = Qwen3MoeConfig(
            **common, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True
        )
        lm: Any = Qwen3MoeForCausalLM(config)
    else:
        lm = Qwen3ForCausalLM(Qwen3Config(**common))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)  # so that every layer matters
    lm.save_pretrained(out)
    return out


def config_of(layout: TrainLayout, folder: Path, optimizer: Optimizer, lr: float = LR) -> Config:
    """The configuration of a layout; everything else is the same for all."""
    fields = {key: value for key, value in vars(layout).items() if key != "ranks"}
    trainer = TrainerConfig(
        **fields,
        layout=Layout.padded,
        optimizer=optimizer,
        lr=lr if optimizer is Optimizer.sgd else 0.0,
        grad_clip=0.0,
        micro_batch_tokens=768,
        logprob_chunk_tokens=512,
        num_threads=1,
    )
    return Config(
        prompts_per_step=len(SHAPES),
        samples_per_prompt=4,
        num_steps=1000,
        algo=AlgoConfig(kl_coef=0.05),
        model=ModelConfig(path=str(folder)),
        rollout=RolloutConfig(mismatch_limit=100.0),
        trainer=trainer,
        cluster=ClusterConfig(train_ranks=layout.ranks),
    )


def random_batch() -> Batch:
    """32 rows of 5 to 110 tokens in 8 groups, with everything that an update reads, from a fixed seed."""
    random = torch.Generator().manual_seed(0)
    groups = []
    for position, (prompt, responses) in enumerate(SHAPES):
        rows = [torch.randint(0, VOCABULARY, (prompt + n,), generator=random).tolist() for n in responses]
        trajectories = [
            Trajectory(
                token_ids=rows[0][:prompt] + row[prompt:],
                prompt_len=prompt,
                action_mask=[False] * prompt + [True] * (len(row) - prompt),
                logprobs=[0.0] * len(row),
                versions=[-1] * prompt + [0] * (len(row) - prompt),
                reward=0.0,
            )
            for row in rows
        ]
        record = Prompt(index=position, token_ids=rows[0][:prompt], record={})
        groups.append(Group(position=position, prompt=record, trajectories=trajectories, version=0))
    batch = collate(groups)
    mask = batch.action_mask
    zeros = torch.zeros(mask.shape)
    batch.advantages = torch.where(mask, torch.randn(mask.shape, generator=random), zeros)
    batch.ref_logprobs = torch.where(mask, -4 + 0.3 * torch.randn(mask.shape, generator=random), zeros)
    batch.rollout_logprobs = batch.ref_logprobs.clone()
    batch.kl_coef = 0.05
    return batch


# -- one process of plain torch --


def plain_updates(folder: Path, batch: Batch, lr: float, count: int) -> tuple[list[float], list[Any]]:
    """Losses of SGD updates, and the folder's weights before each and at the end; row by row."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    losses: list[float] = []
    weights: list[dict[str, torch.Tensor]] = []

    def keep() -> None:
        with tempfile.TemporaryDirectory() as out:
            lm.save_pretrained(out)
            weights.append({k: v.clone() for k, v in load_file(Path(out) / "model.safetensors").items()})

    keep()
    assert batch.advantages is not None and batch.ref_logprobs is not None
    for _ in range(count):
        lm.zero_grad()
        total = 0.0
        for row, length in enumerate(batch.lengths):
            ids, taken = batch.tokens[row, :length], batch.action_mask[row, 1:length]
            logprobs = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0][taken]
            mask = batch.action_mask[row]
            ratio = (logprobs - logprobs.detach()).exp()
            gap = logprobs - batch.ref_logprobs[row][mask]
            loss = (-ratio * batch.advantages[row][mask] + 0.05 * gap.square() / 2).sum() / batch.num_action_tokens
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        with torch.no_grad():
            for parameter in lm.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=lr)
        keep()
    return losses, weights


def largest_gradient_gap(found: dict[str, torch.Tensor], before: Any, after: Any) -> float:
    """Largest relative difference of a tensor's gradient (Euclidean), by the way that one SGD update took it.

    Tensors that hardly move, less than a thousandth of the largest, are compared with that.
    """
    moved = {name: (after[name] - before[name]).norm() for name in before}
    floor = 1e-3 * max(float(norm) for norm in moved.values())
    return max(float((found[name] - after[name]).norm()) / max(float(moved[name]), floor) for name in before)


# -- plain DistributedDataParallel --


class DdpRank:
    """The yardstick: one of two processes of torch's DistributedDataParallel with fused AdamW."""

    def __init__(self, folder: str, rank: int, port: int, cfg: Config):
        import torch.distributed as dist

        from actors.rank import load_lm

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
        lm = load_lm(folder, cfg.model.attention, Dtype.float32, "cpu")
        self.model = torch.nn.parallel.DistributedDataParallel(Scorer(lm, 1.0, Layout.padded))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.cfg = cfg

    def update(self, micros: list[Micro], num_action_tokens: int) -> float:
        """One optimizer step; its seconds."""
        import contextlib

        started = time.monotonic()
        algo = self.cfg.algo
        for index, micro in enumerate(micros):
            batch = micro.batch
            assert batch is not None and batch.advantages is not None and batch.ref_logprobs is not None
            quiet = self.model.no_sync() if index + 1 < len(micros) else contextlib.nullcontext()
            with quiet:
                logprobs, *_ = self.model(batch, micro.num_chunks)
                loss, _ = clipped_ratio(
                    logprobs, logprobs.detach(), batch.advantages, batch.action_mask, algo.clip_low, algo.clip_high
                )
                gap = torch.where(batch.action_mask, logprobs - batch.ref_logprobs, 0.0)
                ((loss + 0.05 * gap.square() / 2).sum() / num_action_tokens * RANKS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.monotonic() - started


@contextmanager
def ddp_updates(env: dict[str, str], folder: Path, cfg: Config, batch: Batch) -> Iterator[Callable[[], float]]:
    """Plain DDP processes, and how to have them make an update: its seconds, of the slower process."""
    import socket

    plans = plan_micro_batches(
        batch,
        cfg.trainer.layout,
        RANKS,
        cfg.trainer.micro_batch_tokens,
        cfg.trainer.logprob_chunk_tokens,
        quadratic_tokens(str(folder)),
    )
    micros = [[as_micro(batch, micro) for micro in plan] for plan in plans]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = list(pool.map(lambda r: Yardstick(f"{__name__}:DdpRank", env, str(folder), r, port, cfg), range(RANKS)))
        try:
            yield lambda: max(
                pool.map(lambda r: ranks[r].call("update", micros[r], batch.num_action_tokens), range(RANKS))
            )
        finally:
            for rank in ranks:
                rank.close()


# -- Tandem --


@contextmanager
def started(cluster: Any, cfg: Config, folder: Path) -> Iterator[RankGroup]:
    """Training ranks in processes of their own, which end with this."""
    from actors.engine import optimizer_spec

    group = RankGroup(cfg, cluster, "policy", str(folder), optimizer_spec(cfg.trainer))
    try:
        group.start().result()
        yield group
    finally:
        group.stop()


def restart(group: RankGroup, cfg: Config, folder: Path) -> ActorPolicy:
    """Has the group's processes load the model again, in another layout."""
    from actors.engine import optimizer_spec

    group.restart(cfg, str(folder), optimizer_spec(cfg.trainer)).result()
    return ActorPolicy(cfg, group)


def measure_layout(
    group: RankGroup,
    layout: TrainLayout,
    folder: Path,
    batch: Batch,
    plain: Any,
    ddp: Callable[[], float],
    repeats: int,
) -> dict[str, float]:
    """Differences from plain torch, seconds of an update, and bytes of a rank, which is in this layout with AdamW.

    Tandem and DDP take turns, as the machine changes; the first update of each is left out.
    """
    from safetensors.torch import load_file

    losses, (before, after) = plain
    policy = ActorPolicy(group.cfg, group)
    took, ratios = [], []
    for step in range(repeats + 1):
        began = time.monotonic()
        policy.update(batch, step, step)
        took.append(time.monotonic() - began)
        ratios.append(ddp() / took[-1])
    updates = plan_updates(group, policy.cfg, batch, 0, lambda _: 0.0, 0, 100.0)
    measured = group.call_each("measured", updates, "update")
    held, peak = max(m[1] for m in measured), max(m[2] for m in measured)
    policy = restart(group, config_of(layout, folder, Optimizer.sgd), folder)
    gaps = []
    for step in range(UPDATES):
        metrics = policy.update(batch, step, step)
        gaps.append(abs(metrics["policy/policy_loss"] + 0.05 * metrics["policy/kl"] - losses[step]))
    policy = restart(group, config_of(layout, folder, Optimizer.sgd, LARGE_LR), folder)
    policy.update(batch, 0, 0)
    with tempfile.TemporaryDirectory() as out:
        group.call("export", f"{out}/hf", str(folder))
        found = load_file(f"{out}/hf/model.safetensors")
    return {
        "max_loss_diff": max(gaps),
        "max_grad_rel_diff": largest_gradient_gap(found, before, after),
        "update_s": statistics.median(took[1:]),
        "tok_s_ratio": statistics.median(ratios[1:]),
        "peak_bytes": peak,
        "state_bytes": held,
    }


def chosen_layouts(args: argparse.Namespace) -> list[TrainLayout]:
    """The layouts to look at, legal or not. Raises ConfigError for a name in --only that is none of the legal ones."""
    found = list(every_layout(RANKS, Dtype.float32))
    if args.only:
        legal = {x.label(): x for x in found if x.refusal() is None}
        unknown = [label for label in args.only if label not in legal]
        if unknown:
            raise ConfigError(f"--only {unknown[0]!r}: no legal layout; they are: {', '.join(legal)}")
        return [layout for label, layout in legal.items() if label in args.only]  # stages ascend, as ZeRO-3 stays
    return found if args.all else [x for x in found if x.recompute is Recompute.none or is_plainest(x)]


def measure(args: argparse.Namespace) -> Result:
    from actors.cluster import Cluster

    chosen = chosen_layouts(args)
    batch, rows = random_batch(), list[Row]()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {False: model_folder(Path(scratch) / "dense", False), True: model_folder(Path(scratch) / "moe", True)}
        cluster = Cluster(ClusterConfig(start_timeout_s=300))
        try:
            for experts, folder in folders.items():
                mine = [layout for layout in chosen if (layout.ep > 1) == experts]
                rows += measure_model(args, cluster, folder, mine, batch) if mine else []
            if not args.only:
                rows += measure_long_row(cluster, folders[False], args.long_tokens)
        finally:
            cluster.stop()
    rows = [{"repeat": 0} | dict.fromkeys(KEYS) | row for row in rows]
    return make_result(args, rows, worst_ratios(rows), ranks=RANKS, updates=UPDATES, num_tokens=sum(batch.lengths))


def measure_model(
    args: argparse.Namespace, cluster: Any, folder: Path, layouts: Sequence[TrainLayout], batch: Batch
) -> list[Row]:
    """The rows of one model: layouts with ep are for the one with experts, those without it for the dense one.

    DeepSpeed keeps engines of ZeRO-3 alive, so each of those layouts has fresh processes; the others share theirs.
    """
    plain = plain_updates(folder, batch, LR, UPDATES)[0], plain_updates(folder, batch, LARGE_LR, 1)[1]
    rows: list[Row] = []
    elements = elements_of(folder_shapes(folder))  # the head is tied, and so not in the folder
    legal = [x for x in layouts if x.refusal() is None]
    group, ddp = None, None
    with ExitStack() as yardstick, ExitStack() as processes:
        for number, layout in enumerate(legal):
            began = time.monotonic()
            cfg = config_of(layout, folder, Optimizer.adamw)
            if group is None or layout.zero_stage == 3:
                processes.close()
                group = processes.enter_context(started(cluster, cfg, folder))
            else:
                restart(group, cfg, folder)
            start_s = time.monotonic() - began
            if ddp is None:
                env = environment_of(group.actors[0])
                ddp = yardstick.enter_context(ddp_updates(env, folder, cfg, batch))
            found = measure_layout(group, layout, folder, batch, plain, ddp, args.repeats)
            row: Row = {
                "variant": f"{'moe ' if layout.ep > 1 else ''}{layout.label()}",
                "layout": layout.label(),
                "legal": True,
                "reason": "",
                **found,
                "predicted_bytes": bytes_between_steps(layout, elements, 2, BUCKET_ELEMENTS),
            }
            rows.append(row)
            say(
                f"{number + 1}/{len(legal)} {row['variant']}: loss {row['max_loss_diff']:.1e}, gradient "
                f"{row['max_grad_rel_diff']:.1e}, {row['tok_s_ratio']:.2f} of DDP, "
                f"state {row['state_bytes'] / 1e6:.1f} MB (predicted {row['predicted_bytes'] / 1e6:.1f}), "
                f"peak {row['peak_bytes'] / 1e6:.1f} MB; start {start_s:.0f} s of {time.monotonic() - began:.0f}"
            )
    for layout in layouts:
        reason = layout.refusal()
        if reason is not None:
            rows.append({"variant": layout.label(), "layout": layout.label(), "legal": False, "reason": reason})
    return rows


def measure_long_row(cluster: Any, folder: Path, num_tokens: int) -> list[Row]:
    """Log-probabilities of one row whole on one rank (the other has none), and shared by two."""
    random = torch.Generator().manual_seed(1)
    row = torch.randint(0, VOCABULARY, (num_tokens,), generator=random).tolist()
    trajectory = Trajectory(
        token_ids=row,
        prompt_len=1,
        action_mask=[False] + [True] * (num_tokens - 1),
        logprobs=[0.0] * num_tokens,
        versions=[-1] + [0] * (num_tokens - 1),
    )
    record = Prompt(index=0, token_ids=row[:1], record={})
    batch = collate([Group(position=0, prompt=record, trajectories=[trajectory], version=0)])
    found: dict[int, torch.Tensor] = {}
    rows: list[Row] = []
    for sp in (1, RANKS):
        layout = next(x for x in every_layout(RANKS, Dtype.float32) if x.sp == sp and x.tp == x.ep == 1)
        cfg = config_of(layout, folder, Optimizer.sgd)
        with started(cluster, cfg, folder) as group:
            micros = [[as_micro(batch, micro) for micro in plan] for plan in plan_ranks(group, cfg, batch)]
            began = time.monotonic()
            measured = group.call_each("measured", micros, "logprobs")
            took = time.monotonic() - began
        (found[sp],) = (values for m in measured for values in m[0])
        figures = {"logprobs_s": took, "peak_bytes": max(m[2] for m in measured)}
        figures["max_logprob_diff"] = float((found[sp] - found[1]).abs().max())
        of_layout = {"layout": layout.label(), "legal": True, "reason": ""}
        rows.append({"variant": f"row of {num_tokens} tokens on {sp}"} | of_layout | figures)
        say(f"{rows[-1]['variant']}: {took:.0f} s, peak {figures['peak_bytes'] / 1e6:.0f} MB")
    return rows


def is_plainest(layout: TrainLayout) -> bool:
    """Nothing but a stage and one way to spread it."""
    return layout.hpz == 1 and not layout.offload_optimizer and not layout.offload_parameters


def worst_ratios(rows: list[Row]) -> dict[str, float | None]:
    """The slowest plain data-parallel layout of each stage against DDP."""
    found: dict[str, float | None] = {}
    for stage in range(4):
        match = [r["tok_s_ratio"] for r in rows if r["variant"] == f"zero{stage} dp2"]
        found[f"zero{stage}_vs_ddp"] = match[0] if match else None
    return found
