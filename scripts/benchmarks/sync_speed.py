"""How fast a push is, on two models: against the engine's own load, a copy of memory, and a plain broadcast.

Each yardstick runs where the push runs: the load in the engine's worker, from shared memory that holds every tensor
and is mapped and touched; the copy in the rank, of as many bytes into touched memory; the broadcast over the push's own
group, of the push's own buckets, with nothing to fill, sign or read before and after.
"""

import argparse
import dataclasses
import math
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
from safetensors import safe_open

from actors.checkpoint import MODEL_FILES
from conf.choices import Channel
from conf.schema import Config
from rollout.preflight.launch import prepare
from scripts.benchmarks.common import Parts, Row, bench_config, medians, say, start_parts
from scripts.benchmarks.sync_matrix import held_bytes, on_ranks, peaks_of_push, set_config
from scripts.wiring import probe_row
from weightsync.channels.shm import Ring, open_ring
from weightsync.folder import own_shapes
from weightsync.plan import aligned, turns_of
from weightsync.sync import WeightSync

SECOND = "random bf16"  # beside the model that is asked for


def second_model(first: Path, out: Path) -> Path:
    """A random model of about 350 MB in bfloat16, with the tokenizer of the first."""
    import shutil

    import transformers

    vocabulary = transformers.AutoConfig.from_pretrained(first).vocab_size
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
    for name in MODEL_FILES:
        if name != "config.json" and (first / name).exists():
            shutil.copyfile(first / name, out / name)
    return out


def measure_speed(args: argparse.Namespace) -> tuple[list[Row], dict[str, float | None], dict[str, Any]]:
    """Rows of both models, the ratios of their medians, and what was pushed."""
    rows: list[Row] = []
    ratios: dict[str, float | None] = {}
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        second = second_model(Path(args.model), Path(root) / "second")
        for folder, dtype, suffix in ((args.model, "float32", ""), (str(second), "bfloat16", "_bf16")):
            chosen = argparse.Namespace(**{**vars(args), "model": folder})
            cfg = bench_config(chosen, "trainer.zero_stage=1", f"trainer.dtype={dtype}", f"rollout.dtype={dtype}")
            found = list(measure_model(cfg, args.repeats, suffix, told))
            rows += found
            got = medians(found)
            push, load, memcpy = (got[f"{variant}{suffix}"] for variant in ("push", "load", "memcpy"))
            ratios |= {
                f"push_vs_load{suffix}": push["total_s"] / load["total_s"],
                f"push_without_probe_vs_load{suffix}": push["without_probe_s"] / load["total_s"],
                f"push_vs_load_and_memcpy{suffix}": push["total_s"] / (load["total_s"] + memcpy["total_s"]),
                f"shm_vs_memcpy{suffix}": memcpy["total_s"] / got[f"shm{suffix}"]["total_s"],
                f"shm_unsigned_vs_memcpy{suffix}": memcpy["total_s"] / got[f"shm_unsigned{suffix}"]["total_s"],
                f"peak_extra_vs_bucket{suffix}": told[f"peak_extra_bytes{suffix}"] / cfg.sync.bucket_bytes,
                f"collective_vs_gloo{suffix}": got[f"gloo{suffix}"]["total_s"] / got[f"collective{suffix}"]["total_s"],
                f"collective_unsigned_vs_gloo{suffix}": got[f"gloo{suffix}"]["total_s"]
                / got[f"collective_unsigned{suffix}"]["total_s"],
            }
    return rows, ratios, told


def measure_model(cfg: Config, repeats: int, suffix: str, told: dict[str, Any]) -> list[Row]:
    """Rows of one model, whose trainer and engine start for it."""
    prepared = prepare(cfg)
    rows: list[Row] = []

    def note(variant: str, repeat: int, seconds: float, **more: float) -> None:
        if repeat:  # the first warms both sides up
            rows.append({"variant": variant + suffix, "repeat": repeat - 1, "total_s": seconds, **more})

    with start_parts(cfg, prepared, with_engines=True) as parts:
        handle, timeout = parts.engines.handles[0], cfg.sync.timeout_s
        warm = fill_memory(Path(cfg.model.path), cfg.trainer.dtype.value)
        told[f"num_bytes{suffix}"] = parts.sync.num_bytes
        before = on_ranks(parts.group, held_bytes)
        peaks = peaks_of_push(parts.group, parts.sync, 0)
        told[f"peak_extra_bytes{suffix}"] = cfg.sync.bucket_bytes + peaks[0] - before[0]  # the slots were there before
        told["bucket_bytes"] = cfg.sync.bucket_bytes
        for repeat in range(repeats + 1):
            started = time.monotonic()
            metrics = parts.sync.push(version=repeat)
            push_s = time.monotonic() - started
            handle.pause().result()
            load_s = on_worker(handle, load_warm, timeout, warm=warm.info)
            phases = {key.removeprefix("sync/"): value for key, value in metrics.items() if key.endswith("_s")}
            note("push", repeat, push_s, without_probe_s=push_s - phases["probe_s"], **phases)
            note("load", repeat, load_s)
            note("memcpy", repeat, on_rank(parts, copy_bytes, timeout, parts.sync.num_bytes))
            note("shm", repeat, on_rank(parts, pack_everything, timeout))
            note("shm_unsigned", repeat, on_rank(parts, pack_unsigned, timeout))
            say(f"{repeat}/{repeats}: push {push_s:.3f} s, load {load_s:.3f} s")
        warm.ring.close()
        other = dataclasses.replace(cfg, sync=dataclasses.replace(cfg.sync, channel=Channel.collective))
        parts.policy.cfg = other
        on_rank(parts, partial(set_config, other), timeout)
        row = probe_row(len(prepared.tokenizer), cfg.sync.probe_tokens, cfg.seed)
        sync = WeightSync(parts.policy, parts.engines.handles, row, cfg.probe_bound, other.sync, timeout, say)
        for repeat in range(repeats + 1):
            sync.push(version=repeat)
            for variant, sends, receives in (
                ("collective", pack_everything, receive_everything),
                ("collective_unsigned", pack_unsigned, receive_everything),
                ("gloo", broadcast_everything, receive_everything),
            ):
                reading = handle.actor._rpc.remote(receives)
                sent_s = on_rank(parts, sends, timeout)
                (read_s,) = ray.get(reading, timeout=timeout)
                note(variant, repeat, max(sent_s, read_s))
            say(f"{repeat}/{repeats}: broadcast")
    return rows


def on_rank(parts: Parts, function: Any, timeout_s: float, *args: Any) -> float:
    """Seconds that a function of the rank's process says it took."""
    found: float = ray.get(
        parts.group.actors[0].__ray_call__.remote(partial(call_last, function, args)), timeout=timeout_s
    )
    return found


def call_last(function: Any, args: tuple[Any, ...], host: Any) -> Any:
    return function(*args, host)


def on_worker(handle: Any, function: Any, timeout_s: float, **kwargs: Any) -> float:
    """Seconds that a function of the engine's worker says it took."""
    (found,) = ray.get(handle.actor._rpc.remote(function, **kwargs), timeout=timeout_s)
    return float(found)


# -- in the rank's process --


def copy_bytes(num_bytes: int, host: Any) -> float:
    """Seconds of one copy into memory that is mapped already."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    started = time.monotonic()
    target.copy_(source)
    return time.monotonic() - started


@torch.no_grad()
def pack_everything(host: Any) -> float:
    """Seconds of filling, signing and sending every bucket."""
    role = host.roles["policy"]
    role.begin_push(role._connection, 0, None)
    started = time.monotonic()
    for turn in turns_of(list(role._sender.streams.values()), 0):
        role._sender.pack(turn)
    finish_sending(role)
    return time.monotonic() - started


def pack_unsigned(host: Any) -> float:
    """Seconds of filling every bucket, without signing it."""
    with mock.patch("weightsync.sender.digest_of", lambda _data: 0):
        return pack_everything(host)


def broadcast_everything(host: Any) -> float:
    """Seconds of broadcasts of every bucket, whatever is in the slots."""
    role = host.roles["policy"]
    outlet = role._sender.outlet
    started = time.monotonic()
    for k, (reader, number) in enumerate(turns_of(list(role._sender.streams.values()), 0)):
        outlet.slot(k % 2)
        outlet.send(k % 2, reader, role._sender.streams[reader].buckets[number])
    finish_sending(role)
    return time.monotonic() - started


def finish_sending(role: Any) -> None:
    for index in range(2):
        role._sender.outlet.slot(index)


# -- in the engine's worker --


def receive_everything(worker: Any) -> float:
    """Seconds of receiving every bucket, without reading it."""
    receiver = worker.tandem
    started = time.monotonic()
    for bucket in receiver.streams[0].buckets.values():
        receiver.inlets[0].receive(0, bucket, receiver.inbox)
    return time.monotonic() - started


@dataclass
class Warm:
    """Shared memory that holds a whole model: what to tell another process of it, and the memory."""

    info: dict[str, Any]
    ring: Ring


def fill_memory(folder: Path, dtype: str) -> Warm:
    """Shared memory with every tensor of the model's files."""
    shapes = own_shapes(folder)
    kind: torch.dtype = getattr(torch, dtype)
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name], end = end, end + aligned(math.prod(shape) * kind.itemsize)
    ring = Ring(end, 1)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in shapes.keys() & set(tensors.keys()):
                view_of(ring.memory, offsets[name], shapes[name], kind).copy_(tensors.get_tensor(name))
    places = [(name, offsets[name], shape) for name, shape in shapes.items()]
    return Warm({"path": ring.path, "nbytes": end, "dtype": dtype, "places": places}, ring)


def view_of(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def load_warm(worker: Any, warm: dict[str, Any]) -> float:
    """Seconds of one whole reload from warm memory."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from weightsync.receiver import repack

    memory = open_ring(warm["path"], warm["nbytes"], 1)
    memory.max()  # maps every page here
    kind = getattr(torch, warm["dtype"])
    model = worker.get_model()
    started = time.monotonic()
    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights((name, view_of(memory, at, tuple(shape), kind)) for name, at, shape in warm["places"])
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
        repack(model)
    return time.monotonic() - started
