"""Whether engines hold what the trainer holds: every training layout into every engine layout, through every channel.

Each push carries fresh random weights in fp32, which are then trained for one step for the push of what has changed.
Engines score a random row; plain transformers, with the trainer's weights, says what is right.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from actors.cluster import Cluster
from actors.engine import optimizer_spec
from actors.group import RankGroup
from actors.roles import ActorPolicy
from actors.tensor_bytes import live_bytes
from conf.choices import Channel, Dtype, Optimizer, Recompute
from conf.errors import ConfigError
from conf.layout import TrainLayout, every_layout, model_refusal
from conf.schema import ClusterConfig, Config, ModelConfig, RolloutConfig, SyncConfig, TrainerConfig
from rl.batching import collate
from rl.faults import SyncError
from rl.types import Batch, Group, Prompt, Trajectory
from rollout.engines import EngineGroup
from scripts.benchmarks.common import Row, say
from weightsync.plan import Link, Seat, narrowed
from weightsync.sync import WeightSync

VOCABULARY = 192  # divisible by the largest tensor-parallel size, as vLLM wants it
LIMIT = 1e-5  # largest gap in nats
MOVED = 1e-2  # smallest gap between what is pushed and what the engines held, in nats: else a push proves nothing
LEARNING_RATE = 0.1
BUCKET_BYTES = 1 << 18  # several buckets a rank
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# Each model: its config class in transformers, and what it changes; the parallel sizes of its engines (tp, pp).
MODELS: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "tied": ("Qwen3Config", {}, [(1, 1), (2, 1), (1, 2)]),
    "untied": ("Qwen3Config", {"tie_word_embeddings": False}, [(1, 1), (2, 1), (1, 2)]),
    "9 heads, 3 kv": (
        "LlamaConfig",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 288},
        [(1, 1), (3, 1), (1, 2)],
    ),
    "experts": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        [(1, 1), (2, 1), (1, 2)],
    ),
    "qkv bias": ("Qwen2Config", {"hidden_size": 128}, [(1, 1), (2, 1), (1, 2)]),
}


def layouts() -> list[TrainLayout]:
    """Every stage on one rank and on two, with tensor or expert parallelism or neither."""
    return [
        layout
        for ranks in (1, 2)
        for layout in every_layout(ranks, Dtype.float32)
        if layout.sp == layout.hpz == 1 and min(layout.tp, layout.ep) == 1 and layout.recompute is Recompute.none
        if not layout.offload_optimizer and not layout.offload_parameters
    ]


def model_folder(name: str, seed: int, out: Path) -> Path:
    """A random model, of which every layer matters."""
    import transformers

    config = getattr(transformers, MODELS[name][0])(**SIZES | MODELS[name][1])
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            wide = parameter.dim() > 1
            noise = torch.randn(parameter.shape, generator=random) * (parameter.shape[-1] ** -0.5 if wide else 0.15)
            parameter.copy_(noise if wide else 1 + noise)
    lm.save_pretrained(out)
    return out


def config_of(layout: TrainLayout, folder: Path, sizes: list[tuple[int, int]], channel: Channel, root: Path) -> Config:
    fields = {key: value for key, value in vars(layout).items() if key != "ranks"}
    return Config(
        prompts_per_step=4,
        samples_per_prompt=2,
        num_steps=1000,
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(**fields, optimizer=Optimizer.sgd, lr=LEARNING_RATE, grad_clip=0.0, num_threads=1),
        rollout=RolloutConfig(
            tp=[tp for tp, _ in sizes],
            pp=[pp for _, pp in sizes],
            max_model_len=256,
            kv_cache_bytes=32 << 20,
            num_threads=1,
            mismatch_limit=1e9,
        ),
        sync=SyncConfig(
            channel=channel,
            folder=str(root / "versions") if channel is Channel.disk else None,
            delta=True,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=120.0,
        ),
        cluster=ClusterConfig(train_ranks=layout.ranks, rollout_engines=len(sizes)),
    )


def random_row(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_batch() -> Batch:
    """Eight rows with advantages of both signs: what one step of training needs."""
    groups = []
    for position in range(4):
        rows = [random_row(position, 4) + random_row(100 + 2 * position + k, 12) for k in range(2)]
        trajectories = [
            Trajectory(
                token_ids=row,
                prompt_len=4,
                action_mask=[False] * 4 + [True] * 12,
                logprobs=[0.0] * 4 + [-4.0] * 12,
                versions=[-1] * 4 + [0] * 12,
            )
            for row in rows
        ]
        prompt = Prompt(index=position, token_ids=rows[0][:4], record={})
        groups.append(Group(position=position, prompt=prompt, trajectories=trajectories, version=0))
    batch = collate(groups)
    batch.advantages = batch.action_mask * torch.tensor([1.0, -1.0] * 4)[:, None]
    return batch


def measure_matrix(models: list[str]) -> list[Row]:
    """A row for each model, training layout, engine, channel and kind of push; illegal ones with their reason."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        cluster = Cluster(ClusterConfig())
        try:
            for name in models:
                rows += measure_model(cluster, name, Path(root))
        finally:
            cluster.stop()
    return rows


def measure_model(cluster: Cluster, name: str, root: Path) -> list[Row]:
    """All rows of one model, with engines of all its kinds side by side."""
    sizes = MODELS[name][2]
    folders = [model_folder(name, seed, root / f"{name}-{seed}") for seed in range(3)]
    plainest = {layout.ranks: layout for layout in layouts() if layout.zero_stage + layout.tp + layout.ep == 2}
    first = {ranks: config_of(layout, folders[0], sizes, Channel.shm, root) for ranks, layout in plainest.items()}
    groups = {
        ranks: RankGroup(cfg, cluster, "policy", str(folders[0]), optimizer_spec(cfg.trainer))
        for ranks, cfg in first.items()
    }
    engines = EngineGroup(first[1], cluster, str(folders[0]))
    try:
        for ready in [*(group.start() for group in groups.values()), engines.start()]:
            ready.result()
        rows: list[Row] = []
        for number, layout in enumerate(layouts()):
            refusal = layout.refusal() or model_refusal(layout, SIZES | MODELS[name][1] | {"model_type": kind(name)})
            if refusal is None:
                folder = folders[1 + number % 2]
                try:
                    found = list(measure_layout(groups[layout.ranks], engines, layout, sizes, folder, root))
                except ConfigError as error:
                    refusal = str(error)
            if refusal is not None:
                kinds = itertools.product(sizes, Channel, ("full", "delta"))
                found = [{"engine": engine_label(s), "channel": c.value, "mode": mode} for s, c, mode in kinds]
            else:
                no_gpu = {"channel": Channel.ipc.value, "legal": False, "reason": "memory of a GPU"}
                found += [{"engine": engine_label(s), "mode": m} | no_gpu for s in sizes for m in ("full", "delta")]
            for row in found:
                told = {"model": name, "train": layout.label(), "legal": refusal is None, "reason": refusal or ""}
                variant = " / ".join([name, layout.label(), row["engine"], row["channel"], row["mode"]])
                rows.append(EMPTY | {"variant": variant, "repeat": 0} | told | row)
            worst = max((row["max_logprob_diff"] for row in found if "max_logprob_diff" in row), default=None)
            say(f"{name} / {layout.label()}: {refusal or f'largest gap {worst:.1e}'}")
        return rows
    finally:
        engines.stop()
        cluster.release("rollout")
        for group in groups.values():
            group.stop()


EMPTY: Row = {"max_logprob_diff": None, "push_s": None, "bytes": None, "peak_extra_bytes": None}


def kind(name: str) -> str:
    """The model_type of a config class."""
    import transformers

    return str(getattr(transformers, MODELS[name][0]).model_type)


def engine_label(size: tuple[int, int]) -> str:
    return f"tp{size[0]}" if size[1] == 1 else f"pp{size[1]}"


def measure_layout(
    group: RankGroup, engines: EngineGroup, layout: TrainLayout, sizes: list[tuple[int, int]], folder: Path, root: Path
) -> Iterator[Row]:
    """Through each channel a push of everything, then one of what a step of training has changed; a row for each engine
    and push."""
    cfg = config_of(layout, folder, sizes, Channel.shm, root)
    group.restart(cfg, str(folder), optimizer_spec(cfg.trainer)).result()
    policy = ActorPolicy(cfg, group)
    handles: list[Any] = [Sized(handle) for handle in engines.handles]
    weights, version, held = folder, 0, None
    for channel in Channel:
        if channel is Channel.ipc:
            continue
        cfg = config_of(layout, folder, sizes, channel, root)
        policy.cfg = cfg
        on_ranks(group, partial(set_config, cfg))
        before = on_ranks(group, held_bytes)
        sync = WeightSync(policy, handles, random_row(7, 16), 1e-3, cfg.sync, cfg.cluster.start_timeout_s, say)
        for mode in ("full", "delta"):
            if version:
                policy.update(random_batch(), 0, 0)
                weights = root / "trained"
                group.call("export", str(weights), str(folder))
            if mode == "full":  # measured apart: noting every allocation takes long
                peaks = peaks_of_push(group, sync, version)
            started = time.monotonic()
            metrics = sync.push(version)
            push_s = time.monotonic() - started
            if metrics["sync/num_resent"] or metrics["sync/num_restarted"]:
                raise SyncError(f"{layout.label()}, {channel.value}, {mode}: an engine needed another push")
            wanted = scores_of(weights)
            if held is not None and float((wanted - held).abs().max()) < MOVED:
                raise SyncError(f"{layout.label()}, {channel.value}, {mode}: training has moved the weights too little")
            held, version = wanted, version + 1
            for handle, size in zip(handles, sizes, strict=True):
                found = torch.tensor(handle.probe(random_row(11, 60)).result(timeout=60))
                yield {
                    "engine": engine_label(size),
                    "channel": channel.value,
                    "mode": mode,
                    "max_logprob_diff": float((found - wanted).abs().max()),
                    "push_s": push_s,
                    "bytes": handle.num_bytes,
                    "peak_extra_bytes": max(p - b for p, b in zip(peaks, before, strict=True)),
                }
        group.call("close_sync")


def peaks_of_push(group: RankGroup, sync: WeightSync, version: int) -> list[int]:
    """The most bytes of tensors in each rank's process in a whole push; the next push is whole again."""
    group.measure(True)
    sync.push(version)
    group.measure(False)
    sync.forget()
    return on_ranks(group, sync_peak)


class Sized:
    """An engine handle that counts the bytes which its workers are sent in a push."""

    def __init__(self, handle: Any):
        self._handle, self.num_bytes = handle, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def connect(self, name: str, seats: list[Seat], links: list[Link]) -> Future[list[set[tuple[int, int]]]]:
        self._links = links
        return self._handle.connect(name, seats, links)

    def begin_update(self, name: str, version: int, modules: list[str] | None) -> Future[Any]:
        streams = [narrowed(stream, modules) for link in self._links for stream in link.streams]
        self.num_bytes = sum(stream.num_bytes for stream in streams)
        return self._handle.begin_update(name, version, modules)


@torch.no_grad()
def scores_of(folder: Path) -> torch.Tensor:
    """Log-probabilities of a random row by plain transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    row = torch.tensor(random_row(11, 60))
    return lm(row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def on_ranks(group: RankGroup, function: Any) -> list[int]:
    """A function of each rank's host, by rank."""
    found: list[int] = ray.get([actor.__ray_call__.remote(function) for actor in group.actors], timeout=120)
    return found


def held_bytes(host: Any) -> int:
    """Bytes of tensors in a rank's process."""
    import gc

    gc.collect()
    return live_bytes(host.device)


def set_config(cfg: Config, host: Any) -> None:
    """Has the policy of a rank push by another configuration."""
    host.roles["policy"].cfg = cfg


def sync_peak(host: Any) -> int:
    """The most bytes of tensors in a rank's process in the last push that was measured."""
    return int(host.peaks["policy"].pop("sync"))
