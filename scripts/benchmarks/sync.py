"""A push of all weights, against what no push can avoid: the engine's own load, plus one copy of the bytes.

The yardstick runs in the engine's process, in the thread that owns the engine: one layerwise reload of vLLM from shared
memory that already holds every tensor and is mapped and touched, and one copy of as many bytes into touched memory.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors import safe_open

from rl.faults import SyncError
from rollout.preflight import prepare
from scripts.benchmarks.common import Result, Row, bench_config, make_result, medians, say, start_parts
from scripts.benchmarks.sync_matrix import LIMIT, MODELS, measure_matrix
from weightsync.channels.shm import Ring, open_ring
from weightsync.folder import own_shapes
from weightsync.plan import aligned


def measure(args: argparse.Namespace) -> Result:
    cfg = bench_config(args)
    prepared = prepare(cfg)
    rows: list[Row] = [] if args.skip_matrix else measure_matrix(list(MODELS))
    wrong = [row["variant"] for row in rows if row["legal"] and not row["max_logprob_diff"] <= LIMIT]
    if wrong:
        raise SyncError(f"engines that do not hold the trainer's weights (gap above {LIMIT:g}): {'; '.join(wrong)}")
    with start_parts(cfg, prepared, with_engines=True) as parts:
        handle = parts.engines.handles[0]
        whole = fill_memory(Path(args.model), cfg.trainer.dtype.value)
        for repeat in range(args.repeats + 1):  # the first warms both sides up
            started = time.monotonic()
            metrics = parts.sync.push(version=repeat)
            push_s = time.monotonic() - started
            handle.pause().result()
            (load,) = ray.get(handle.actor._rpc.remote(load_warm, warm=whole.info), timeout=cfg.sync.timeout_s)
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
        whole.ring.close()
        num_bytes = parts.sync.num_bytes
        num_rounds = max(len(link.stream.buckets) for link in parts.sync.links)
    found = medians([row for row in rows if row["variant"] in ("push", "load + memcpy")])
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
        num_bytes=num_bytes,
        num_rounds=num_rounds,
        probe_tokens=cfg.sync.probe_tokens,
    )


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


def load_warm(worker: Any, warm: dict[str, Any]) -> dict[str, float]:
    """Runs in the engine's worker: seconds of one whole reload from warm memory, and of one copy of its bytes."""
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
    load_s = time.monotonic() - started
    target = torch.zeros_like(memory)
    target.fill_(1)
    started = time.monotonic()
    target.copy_(memory)
    memcpy_s = time.monotonic() - started
    return {"total_s": load_s + memcpy_s, "load_s": load_s, "memcpy_s": memcpy_s}
