"""Pushes on a GPU: memory of it between two processes, and engines that round what they are pushed."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from actors.cluster import Cluster
from conf.choices import Channel, Device, Dtype, Quantization
from tests.integration.pushes import PROBE, config
from tests.integration.real import (
    connect,
    hf_logprobs,
    load_hf,
    random_folder,
    random_ids,
    restart,
    start_engines,
    start_ranks,
)
from weightsync.channels.ipc import DeviceAddress, DeviceRing, DeviceRingReader
from weightsync.plan import Buffer, PlanError, Wanted
from weightsync.planner import plan_streams
from weightsync.regions import Regions
from weightsync.sender import NUM_SLOTS, Sender, digest_of, digests, plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZE = 1000
WANTED = Wanted(
    names=("w",),
    regions=Regions.of([(0, 0, 1, SIZE, SIZE, 0, 0, SIZE, 1)]),
    buffers=(Buffer(module="m", name="w", dtype="float32"),),
)


def read(address: DeviceAddress) -> tuple[tuple[int, ...], list[float]]:
    """What another process finds in slot 0."""
    (stream,) = plan_streams(WANTED.regions, [WANTED], 1 << 16)
    memory = DeviceRingReader(address).receive(0, stream.buckets[0], torch.empty(0))
    return digests(memory, stream.buckets[0]), memory[: 4 * SIZE].view(torch.float32).tolist()


def test_another_process_reads_the_same_bytes() -> None:
    streams = plan_streams(WANTED.regions, [WANTED], 1 << 16)
    ring = DeviceRing(streams[0].max_bytes, NUM_SLOTS)
    sender, weights = Sender(0, streams, [WANTED], ring), torch.randn(SIZE, device="cuda")
    sender.begin([plain(weights)], 0, None)
    item = sender.pack((0, 0))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found, values = pool.submit(read, ring.address).result(timeout=100)
    assert found == item.digests and values == weights.tolist()


def test_another_gpu_is_refused() -> None:
    ring = DeviceRing(64, 1)
    with pytest.raises(PlanError, match="both must be on one GPU"):
        DeviceRingReader(replace(ring.address, uuid="another"))


def test_every_changed_word_changes_the_digest() -> None:
    data = torch.randint(0, 256, (4096,), dtype=torch.uint8, device="cuda")
    first = digest_of(data)
    for place in np.random.default_rng(0).integers(0, 4096, 200).tolist():
        data[place] ^= 1 << (place % 8)
        assert digest_of(data) != first
        data[place] ^= 1 << (place % 8)
    assert digest_of(data) == first


def test_push_into_an_engine_that_rounds_to_fp8(tiny_folder: Path, tmp_path: Path) -> None:
    start, pushed = (random_folder(tiny_folder, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    base = config(quantization=Quantization.fp8, dtype=Dtype.bfloat16)
    on_gpu = replace(base.cluster, device=Device.cuda, gpus_per_rank=0.4, gpus_per_engine=0.4)
    cfg = replace(base, cluster=on_gpu, sync=replace(base.sync, channel=Channel.ipc))
    cluster = Cluster(cfg.cluster)
    try:
        handles = start_engines(cluster, cfg, start).handles
        (group,) = start_ranks(cluster, [cfg], start).values()
        connect(restart(group, cfg, pushed), handles, PROBE).push(1)
        row = random_ids(5, 60)
        found = torch.tensor(ray.get(handles[0].actor.probe.remote(row), timeout=60))
    finally:
        cluster.stop()
    near, far = (float((found - hf_logprobs(load_hf(folder), row)).abs().mean()) for folder in (pushed, start))
    assert near < 0.2 and near < far / 5
