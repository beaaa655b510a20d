"""State of a rank by the layout alone, against the table of the ZeRO paper."""

import dataclasses
from typing import Any

import pytest

from conf.choices import Dtype, Layout, Optimizer
from conf.layout import TrainLayout
from conf.schema import ClusterConfig, LoraConfig
from rl.plan.memory import Elements, bytes_between_steps, elements_of, promised_bytes, state_bytes
from tests.unit.stand_ins import make_cfg


def layout(ranks: int, **trainer: Any) -> TrainLayout:
    cluster = ClusterConfig(train_ranks=ranks)
    return make_cfg(trainer={"layout": Layout.padded} | trainer, cluster=cluster, prompts_per_step=64).train_layout


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_state_is_that_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters in bf16 with Adam on 64 ranks (of 120 GB whole)."""
    found = state_bytes(layout(64, zero_stage=stage, dtype=Dtype.bfloat16), Elements(whole=7_500_000_000), 2)
    assert found.total / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_stage_0_in_fp32_has_no_master_copy() -> None:
    found = state_bytes(layout(1, zero_stage=0), Elements(whole=100), 2)
    assert (found.weights, found.master, found.moments, found.gradients) == (400, 0, 800, 400)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_tensor_parallel_ranks_hold_a_part_of_the_matrices(stage: int) -> None:
    """Four ranks, two of them for each matrix: as two ranks with half of the matrices."""
    cut = state_bytes(layout(4, zero_stage=stage, tp=2), Elements(whole=100, matrices=1000), 2)
    half = state_bytes(layout(2, zero_stage=stage), Elements(whole=100, matrices=500), 2)
    assert cut == half


def test_sequence_parallel_ranks_partition_as_data_parallel_ones() -> None:
    assert state_bytes(layout(4, sp=4), Elements(whole=80), 2) == state_bytes(layout(4), Elements(whole=80), 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_are_spread_and_the_rest_is_not(stage: int) -> None:
    spread, elements = layout(4, zero_stage=stage, ep=4), Elements(whole=40, experts=400)
    found = state_bytes(spread, elements, 2)
    dense = state_bytes(dataclasses.replace(spread, ep=1), Elements(whole=40), 2)
    alone = state_bytes(layout(1, zero_stage=stage), Elements(whole=100), 2)
    assert found.total == pytest.approx(dense.total + alone.total)


def test_second_partition_is_one_more_copy_over_its_ranks() -> None:
    plain = state_bytes(layout(4, zero_stage=3), Elements(whole=80), 2)
    second = state_bytes(layout(4, zero_stage=3, hpz=2), Elements(whole=80), 2)
    assert second.total - plain.total == 4 * 80 / 2


@pytest.mark.parametrize(
    ("trainer", "wanted"),
    [
        ({"zero_stage": 0}, 400 + 800),
        ({"zero_stage": 1}, 400 + 200 + 400),
        ({"zero_stage": 1, "offload_optimizer": True}, 400 + 200 + 400 + 200 + 200),
        ({"zero_stage": 2, "offload_optimizer": True}, 400 + 200 + 400 + 400 + 200),
        ({"zero_stage": 3}, 200 + 200 + 400 + 200 + 240),
        ({"zero_stage": 3, "hpz": 2}, 200 + 200 + 400 + 200 + 240),
        ({"zero_stage": 3, "offload_optimizer": True}, 200 + 200 + 400 + 200 + 240 + 200),
    ],
)
def test_between_steps_buffers_of_deepspeed_stay(trainer: dict[str, Any], wanted: float) -> None:
    """Two ranks, 100 parameters in fp32, buckets of 60."""
    assert bytes_between_steps(layout(2, **trainer), Elements(whole=100), 2, 60) == wanted
    roomy = bytes_between_steps(layout(2, **trainer), Elements(whole=100), 2, 1000)
    assert roomy == wanted + (160 if trainer["zero_stage"] == 3 else 0)


def test_elements_are_told_apart_by_name() -> None:
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
        "model.layers.0.mlp.experts.0.up_proj.weight": (3, 4),
        "model.layers.0.mlp.gate.weight": (2, 4),
        "model.norm.weight": (4,),
    }
    assert elements_of(shapes) == Elements(whole=52, matrices=16, experts=12)


SHAPES = {"model.embed_tokens.weight": (10, 4), "model.layers.0.mlp.up_proj.weight": (4, 4), "lm_head.weight": (10, 4)}
ADAMW: dict[str, Any] = {"optimizer": Optimizer.adamw}


def test_critic_has_no_head() -> None:
    cfg = make_cfg(trainer={"zero_stage": 0})
    policy, critic = (promised_bytes(cfg, role, SHAPES, "cpu") for role in ("policy", "critic"))
    assert (policy.weights, critic.weights) == (4 * 96, 4 * 56)


def test_frozen_roles_hold_whole_weights_alone() -> None:
    cfg = make_cfg(trainer={"zero_stage": 3}, cluster=ClusterConfig(train_ranks=2))
    assert promised_bytes(cfg, "reference", SHAPES, "cpu").total == 4 * 96
    assert promised_bytes(cfg, "policy", SHAPES, "cpu").weights == 4 * 48


def test_adapters_alone_have_moments() -> None:
    found = promised_bytes(
        make_cfg(trainer=ADAMW | {"zero_stage": 0}, lora=LoraConfig(rank=2)), "policy", SHAPES, "cpu"
    )
    assert (found.weights, found.moments) == (4 * (96 + 16), 8 * 16)


def test_what_is_offloaded_is_not_on_the_gpu() -> None:
    moved: dict[str, Any] = ADAMW | {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    cfg = make_cfg(trainer=moved, cluster=ClusterConfig(train_ranks=2))
    found = promised_bytes(cfg, "policy", SHAPES, "cuda")
    assert (found.weights, found.master, found.moments) == (0, 0, 0)
    assert promised_bytes(cfg, "policy", SHAPES, "cpu").moments > 0
