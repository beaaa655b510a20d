"""A push of all weights, against what no push can avoid: the engine's own load, plus one copy of the bytes.

The yardstick runs in the engine's process, in the thread that owns the engine: one layerwise reload of vLLM from shared
memory that already holds every tensor and is mapped and touched, and one copy of as many bytes into touched memory.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors import safe_open

from rollout.preflight import prepare
from scripts.benchmarks.common import Result, Row, bench_config, make_result, medians, say, start_parts
from weightsync.channels.shm import open_ring, slot_of, views
from weightsync.manifest import Bucket, Manifest
from weightsync.sender import Sender


def measure(args: argparse.Namespace) -> Result:
    cfg = bench_config(args)
    prepared = prepare(cfg)
    rows: list[Row] = []
    with start_parts(cfg, prepared, with_engines=True) as parts:
        handle = parts.engines.handles[0]
        assert parts.manifest is not None
        manifest = Manifest.from_dict(parts.manifest)
        whole = fill_memory(manifest, Path(args.model))
        ring = whole.ring
        for repeat in range(args.repeats + 1):  # the first warms both sides up
            started = time.monotonic()
            metrics = parts.sync.push(version=repeat)
            push_s = time.monotonic() - started
            handle.pause().result()
            loading = handle.actor._rpc.remote(
                load_warm, path=ring.path, slot_bytes=ring.slot_bytes, manifest=parts.manifest
            )
            (load,) = ray.get(loading, timeout=cfg.sync.timeout_s)
            if repeat:
                probe_s = metrics["sync/probe_s"]
                push = {
                    "total_s": push_s,
                    "transfer_s": metrics["sync/transfer_s"],
                    "probe_s": probe_s,
                    "without_probe_s": push_s - probe_s,
                }
                rows.append({"variant": "push", "repeat": repeat - 1} | push)
                rows.append({"variant": "load + memcpy", "repeat": repeat - 1} | load)
            say(f"{repeat}/{args.repeats}: push {push_s:.3f} s, load + memcpy {load['total_s']:.3f} s")
        ring.close()
    found = medians(rows)
    yardstick_s = found["load + memcpy"]["load_s"] + found["load + memcpy"]["memcpy_s"]
    ratios: dict[str, float | None] = {
        "push_vs_load": found["push"]["total_s"] / yardstick_s,
        "push_without_probe_vs_load": found["push"]["without_probe_s"] / yardstick_s,
    }
    return make_result(
        args,
        rows,
        ratios,
        dtype=cfg.trainer.dtype.value,
        num_bytes=manifest.total_bytes,
        num_buckets=len(manifest.buckets),
        probe_tokens=cfg.sync.probe_tokens,
    )


def fill_memory(manifest: Manifest, folder: Path) -> Sender:
    """Shared memory with a slot for every bucket, filled from the model's files."""
    sender = Sender(manifest, len(manifest.buckets))
    for index, bucket in enumerate(manifest.buckets):
        sender.pack(index, read_bucket(bucket, folder))
    return sender


def read_bucket(bucket: Bucket, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of one bucket, from whichever safetensors file holds them."""
    wanted = {tensor.name for tensor in bucket.tensors}
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in wanted & set(tensors.keys())}
    return found


def load_warm(worker: Any, path: str, slot_bytes: int, manifest: dict[str, Any]) -> dict[str, float]:
    """Runs in the engine's worker: seconds of one whole reload from warm memory, and of one copy of its bytes."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from weightsync.receiver import repack

    buckets = Manifest.from_dict(manifest).buckets
    memory = open_ring(path, slot_bytes, max(2, len(buckets)))
    memory.max()  # maps every page here
    model = worker.get_model()
    started = time.monotonic()
    with torch.no_grad():
        initialize_layerwise_reload(model)
        slots = [slot_of(memory, index, slot_bytes) for index in range(len(buckets))]
        model.load_weights(pair for slot, bucket in zip(slots, buckets, strict=True) for pair in views(slot, bucket))
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
        repack(model)
    load_s = time.monotonic() - started
    source = memory[: sum(bucket.nbytes for bucket in buckets)]
    target = torch.zeros_like(source)
    target.fill_(1)
    started = time.monotonic()
    target.copy_(source)
    memcpy_s = time.monotonic() - started
    return {"total_s": load_s + memcpy_s, "load_s": load_s, "memcpy_s": memcpy_s}
