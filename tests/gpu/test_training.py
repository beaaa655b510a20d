"""One NVIDIA GPU: the same numbers as the CPU, and packed rows through a kernel that takes variable lengths."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.cluster import Cluster
from actors.engine import optimizer_spec
from actors.group import RankGroup
from actors.roles import ActorPolicy
from conf.choices import Device, Dtype, Layout
from conf.schema import ClusterConfig, Config, ModelConfig
from rl.types import Batch
from tests.integration.real import random_folder, restart
from tests.numerics.recipes import assert_close, config, for_recipe, plain_results, ragged_batch, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# fp32 matrix products of a GPU round in another order than a CPU's.
TOLERANCE = 1e-4


def on_gpu(cfg: Config, attention: str = "sdpa") -> Config:
    cluster = dataclasses.replace(cfg.cluster, device=Device.cuda)
    return dataclasses.replace(cfg, cluster=cluster, model=ModelConfig(path=cfg.model.path, attention=attention))


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tiny_folder, tmp_path_factory.mktemp("gpu") / "model", seed=1)


@pytest.fixture(scope="module")
def ragged(folder: Path) -> Batch:
    return ragged_batch(folder)


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[RankGroup]:
    cluster = Cluster(ClusterConfig(device=Device.cuda))
    try:
        cfg = on_gpu(config("sgd"))
        found = RankGroup(cfg, cluster, "policy", str(folder), optimizer_spec(cfg.trainer))
        found.start().result(timeout=200)
        yield found
    finally:
        cluster.stop()


@pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_updates_on_a_gpu_equal_plain_torch_on_the_cpu(
    group: RankGroup, folder: Path, ragged: Batch, tmp_path: Path, stage: int, layout: Layout
) -> None:
    policy: ActorPolicy = restart(group, on_gpu(config("sgd", stage, layout=layout)), folder)
    curve, weights, _ = plain_results(folder, ragged, ("sgd",))["sgd"]
    for number, wanted in enumerate(curve):
        found = policy.update(for_recipe(ragged, "sgd"), 2 * number, number)
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=TOLERANCE)
    assert_close(weights_of(policy, folder, tmp_path / "hf"), weights, TOLERANCE)


@pytest.mark.parametrize("dtype", Dtype)
def test_fused_logprobs_equal_the_default_ones(group: RankGroup, folder: Path, ragged: Batch, dtype: Dtype) -> None:
    """The kernels that torch.compile writes for this GPU, in the forward and in the loss of two updates."""
    results = []
    for fused in (False, True):
        cfg = on_gpu(config("sgd", 1, layout=Layout.padded, dtype=dtype, fused_logprobs=fused))
        policy = restart(group, cfg, folder)
        curve = [policy.update(ragged, 2 * number, number)["policy/grad_norm"] for number in range(2)]
        results.append((curve, policy.logprobs(ragged)[ragged.action_mask]))
    (wanted, logprobs), (found, others) = results
    tolerance = TOLERANCE if dtype is Dtype.float32 else 0.02
    assert found == pytest.approx(wanted, rel=tolerance)
    assert float((others - logprobs).abs().mean()) < tolerance


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_nap_gives_the_memory_back_and_changes_nothing(
    group: RankGroup, folder: Path, ragged: Batch, tmp_path: Path, stage: int
) -> None:
    cfg = on_gpu(config("adamw", stage, layout=Layout.padded))
    found = []
    for sleep in (False, True):
        policy = restart(group, dataclasses.replace(cfg, cluster=dataclasses.replace(cfg.cluster, sleep=sleep)), folder)
        for number in range(2):
            policy.update(for_recipe(ragged, "adamw"), 2 * number, number)
            if sleep:
                held = policy.group.memory()
                policy.group.rest()
                assert policy.group.memory()["asleep_bytes"] > 0.99 * held["parameters_bytes"] + held["optimizer_bytes"]
        found.append(weights_of(policy, folder, tmp_path / str(sleep)))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_packed_rows_through_flash_attention_score_as_padded_ones(
    group: RankGroup, folder: Path, ragged: Batch
) -> None:
    """In bf16: mean difference of a token's log-probability, not the largest."""
    pytest.importorskip("flash_attn")
    bf16: dict[str, Any] = {"dtype": Dtype.bfloat16}
    padded = restart(group, on_gpu(config("sgd", 1, layout=Layout.padded, **bf16)), folder).logprobs(ragged)
    packed_cfg = on_gpu(config("sgd", 1, layout=Layout.packed, **bf16), "flash_attention_2")
    packed = restart(group, packed_cfg, folder).logprobs(ragged)
    gaps = (packed - padded)[ragged.action_mask].abs()
    assert float(gaps.mean()) < 0.02
