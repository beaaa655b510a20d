"""Whether engines hold what the trainer holds: every training layout into every engine layout, through every channel.

Each push carries fresh random weights in fp32, which are then trained for one step for the push of what has changed.
Engines score a random row; plain transformers, with the trainer's weights, says what is right.
"""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
import torch

from actors.cluster import Cluster
from actors.engine import optimizer_spec
from actors.group import RankGroup
from actors.roles import ActorPolicy
from actors.tensor_bytes import live_bytes, peak_bytes
from conf.choices import Channel, Dtype, Optimizer, Recompute
from conf.errors import ConfigError
from conf.layout import TrainLayout, every_layout, model_refusal
from conf.schema import ClusterConfig, Config, ModelConfig, RolloutConfig, SyncConfig, TrainerConfig
from rl.batching import collate
from rl.faults import SyncError
from rl.types import Batch, Group, Prompt, Trajectory
from rollout.engines import EngineGroup
from scripts.benchmarks.common import Row, say
from weightsync.sync import WeightSync

VOCABULARY = 192  # divisible by the largest tensor-parallel size, as vLLM wants it
LIMIT = 1e-5  # largest gap in nats
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


def config_of(layout: TrainLayout, folder: Path, sizes: list[tuple[int, int]], channel: Channel) -> Config:
    fields = {key: value for key, value in vars(layout).items() if key != "ranks"}
    return Config(
        prompts_per_step=4,
        samples_per_prompt=2,
        num_steps=1000,
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(**fields, optimizer=Optimizer.sgd, lr=0.05, grad_clip=0.0, num_threads=1),
        rollout=RolloutConfig(
            tp=[tp for tp, _ in sizes],
            pp=[pp for _, pp in sizes],
            max_model_len=256,
            kv_cache_bytes=32 << 20,
            num_threads=1,
            mismatch_limit=1e9,
        ),
        sync=SyncConfig(channel=channel, delta=True, timeout_s=120.0),
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
    first = {ranks: config_of(layout, folders[0], sizes, Channel.shm) for ranks, layout in plainest.items()}
    groups = {
        ranks: RankGroup(cfg, cluster, "policy", str(folders[0]), optimizer_spec(cfg.trainer))
        for ranks, cfg in first.items()
    }
    engines = EngineGroup(first[1], cluster, str(folders[0]))
    try:
        for ready in [*(group.start() for group in groups.values()), engines.start()]:
            ready.result()
        rows: list[Row] = []
        for number, (channel, layout) in enumerate((c, layout) for c in Channel for layout in layouts()):
            labels = {"model": name, "train": layout.label(), "channel": channel.value}
            refusal = layout.refusal() or model_refusal(layout, SIZES | MODELS[name][1] | {"model_type": kind(name)})
            found: list[Row] = []
            if refusal is None:
                try:
                    cfg = config_of(layout, folders[1 + number % 2], sizes, channel)
                    found = list(measure_layout(groups[layout.ranks], engines, cfg, folders[1 + number % 2], root))
                except ConfigError as error:
                    refusal = str(error)
            else:
                found = [{"engine": engine_label(size), "mode": mode} for size in sizes for mode in ("full", "delta")]
            for row in found:
                told = {"legal": refusal is None, "reason": refusal or ""}
                variant = " / ".join([name, layout.label(), row["engine"], channel.value, row["mode"]])
                rows.append(EMPTY | {"variant": variant, "repeat": 0} | labels | told | row)
            worst = max((row["max_logprob_diff"] for row in found if "max_logprob_diff" in row), default=None)
            say(f"{name} / {layout.label()} / {channel.value}: {refusal or f'largest gap {worst:.1e}'}")
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


def measure_layout(group: RankGroup, engines: EngineGroup, cfg: Config, folder: Path, root: Path) -> Iterator[Row]:
    """A push of everything, then one of what a step of training has changed; a row for each engine and push."""
    group.restart(cfg, str(folder), optimizer_spec(cfg.trainer)).result()
    policy = ActorPolicy(cfg, group)
    before = on_ranks(group, held_bytes)
    handles = [Sized(handle) for handle in engines.handles]
    sync = WeightSync(policy, handles, random_row(7, 16), 1e-3, cfg.sync, cfg.cluster.start_timeout_s, say)
    sizes = list(zip(cfg.rollout.tp, cfg.rollout.pp, strict=True))
    for version, mode in enumerate(("full", "delta")):
        weights = folder
        if mode == "delta":
            policy.update(random_batch(), 0, 0)
            weights = root / "trained"
            group.call("export", str(weights), str(folder))
        started = time.monotonic()
        metrics = sync.push(version)
        push_s = time.monotonic() - started
        if metrics["sync/num_resent"] or metrics["sync/num_restarted"]:
            raise SyncError(f"{cfg.train_layout.label()}, {mode}: an engine needed another push")
        gaps = gaps_of(handles, weights)
        extra = None
        if cfg.sync.channel is Channel.shm and mode == "full":  # a broadcast would wait for its readers
            extra = max(peak - base for peak, base in zip(on_ranks(group, pack_peak), before, strict=True))
        for handle, size, gap in zip(handles, sizes, gaps, strict=True):
            yield {
                "engine": engine_label(size),
                "mode": mode,
                "max_logprob_diff": gap,
                "push_s": push_s,
                "bytes": handle.num_bytes,
                "peak_extra_bytes": extra,
            }


class Sized:
    """An engine handle that counts the bytes which its workers are sent in a push."""

    def __init__(self, handle: Any):
        self._handle, self.num_bytes = handle, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def connect(self, seats: list[Any], links: list[Any]) -> Future[Any]:
        self._seats, self._links = seats, links
        return self._handle.connect(seats, links)

    def begin_update(self, modules: list[str] | None) -> Future[Any]:
        from weightsync.plan import narrowed

        readers = {seat.reader for seat in self._seats}
        streams = [link.stream if modules is None else narrowed(link.stream, modules) for link in self._links]
        self.num_bytes = sum(stream.bytes_to(reader) for stream in streams for reader in readers)
        return self._handle.begin_update(modules)


@torch.no_grad()
def gaps_of(handles: list[Sized], folder: Path) -> list[float]:
    """Largest gap of each engine's log-probabilities of a row from those of plain transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    row = torch.tensor(random_row(11, 60))
    wanted = lm(row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]
    found = [handle.probe(row.tolist()).result(timeout=60) for handle in handles]
    return [float((torch.tensor(values) - wanted).abs().max()) for values in found]


def on_ranks(group: RankGroup, function: Any) -> list[int]:
    """A function of each rank's host, by rank."""
    found: list[int] = ray.get([actor.__ray_call__.remote(function) for actor in group.actors], timeout=120)
    return found


def held_bytes(host: Any) -> int:
    """Bytes of tensors in a rank's process."""
    import gc

    gc.collect()
    return live_bytes(host.device)


def pack_peak(host: Any) -> int:
    """The most bytes of tensors in a rank's process while it packs its first bucket."""
    role = host.roles["policy"]
    numbers = [0 if role._sender.current.buckets else None] * role.world
    return peak_bytes(lambda: role.pack(numbers, 0), host.device)[1]
