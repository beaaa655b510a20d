"""Which layouts are legal, and for which models."""

import dataclasses
from typing import Any

import pytest

from conf.choices import Dtype, Layout, Recompute
from conf.errors import ConfigError
from conf.layout import TrainLayout, every_layout, model_refusal
from conf.schema import ClusterConfig
from tests.unit.stand_ins import make_cfg

QWEN = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
SMOLLM2 = {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
MOE = QWEN | {"model_type": "qwen3_moe", "num_experts": 8}


def layout(ranks: int = 2, **trainer: Any) -> TrainLayout:
    return make_cfg(
        trainer={"layout": Layout.padded} | trainer, cluster=ClusterConfig(train_ranks=ranks), prompts_per_step=12
    ).train_layout


@pytest.mark.parametrize(
    ("ranks", "trainer", "pieces"),
    [
        (3, {"sp": 2}, ["cluster.train_ranks=3", "trainer.sp=2"]),
        (2, {"tp": 2, "zero_stage": 3}, ["trainer.tp=2", "trainer.zero_stage=3", "use trainer.zero_stage=0, 1 or 2"]),
        (4, {"tp": 2, "sp": 2}, ["trainer.sp=2", "trainer.tp=2", "attention heads"]),
        (2, {"ep": 2, "tp": 2}, ["trainer.ep=2", "trainer.tp=2"]),
        (2, {"ep": 3}, ["trainer.ep=3", "not divisible"]),
        (2, {"hpz": 2, "zero_stage": 2}, ["trainer.hpz=2", "trainer.zero_stage=2"]),
        (2, {"zero_stage": 0, "offload_optimizer": True}, ["trainer.offload_optimizer=true", "trainer.zero_stage=0"]),
        (2, {"zero_stage": 2, "offload_parameters": True}, ["trainer.offload_parameters=true", "zero_stage=3"]),
        (2, {"zero_stage": 0, "dtype": Dtype.bfloat16}, ["trainer.dtype=bfloat16", "trainer.zero_stage=0"]),
        (2, {"sp": 2, "layout": Layout.shared_prefix}, ["trainer.sp=2", "trainer.layout=shared_prefix", "padded"]),
        (2, {"recompute": Recompute.full, "layout": Layout.shared_prefix}, ["trainer.recompute=full", "padded"]),
        (2, {"recompute": Recompute.selective, "tp": 2}, ["trainer.recompute=selective", "trainer.tp=2", "full"]),
        (
            2,
            {"recompute": Recompute.selective, "zero_stage": 3},
            ["trainer.recompute=selective", "trainer.zero_stage=3"],
        ),
        (2, {"recompute": Recompute.selective, "ep": 2}, ["trainer.recompute=selective", "trainer.ep=2"]),
        (2, {"hpz": 2, "ep": 2, "zero_stage": 3}, ["trainer.hpz=2", "trainer.ep=2"]),
        (2, {"zero_stage": 4}, ["trainer.zero_stage=4"]),
        (2, {"sp": 0}, ["trainer.sp=0"]),
    ],
)
def test_illegal_layout_is_refused_with_fields_and_values(
    ranks: int, trainer: dict[str, Any], pieces: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        layout(ranks, **trainer)
    for piece in pieces:
        assert piece in str(error.value)


@pytest.mark.parametrize(
    ("trainer", "model", "pieces"),
    [
        ({"sp": 2}, SMOLLM2, ["trainer.sp=2", "9 attention heads", "3 kv heads"]),
        ({"sp": 2}, QWEN | {"sliding_window": 64}, ["trainer.sp=2", "sliding window"]),
        ({"tp": 2}, SMOLLM2, ["trainer.tp=2", "9 attention heads"]),
        ({"tp": 2}, QWEN | {"intermediate_size": 129}, ["trainer.tp=2", "129 intermediate channels"]),
        ({"tp": 2}, MOE, ["trainer.tp=2", "qwen3_moe", "trainer.ep"]),
        ({"ep": 2}, QWEN, ["trainer.ep=2", "qwen3 has no experts", "qwen3_moe"]),
        ({"ep": 2}, MOE | {"num_experts": 7}, ["trainer.ep=2", "7 experts"]),
        ({"ep": 2}, QWEN | {"model_type": "mixtral", "num_local_experts": 9}, ["trainer.ep=2", "9 experts"]),
        ({"ep": 2}, QWEN | {"model_type": "qwen3_moe"}, ["trainer.ep=2", "num_local_experts"]),
    ],
)
def test_model_that_a_layout_cannot_cut_is_refused(
    trainer: dict[str, Any], model: dict[str, Any], pieces: list[str]
) -> None:
    refusal = model_refusal(layout(2, **trainer), model)
    for piece in pieces:
        assert piece in str(refusal)


@pytest.mark.parametrize(
    ("trainer", "model"),
    [({}, SMOLLM2), ({"sp": 2}, QWEN), ({"tp": 2}, QWEN), ({"ep": 2}, MOE), ({"sp": 2}, MOE), ({"zero_stage": 3}, MOE)],
)
def test_model_that_fits_is_taken(trainer: dict[str, Any], model: dict[str, Any]) -> None:
    assert model_refusal(layout(2, **trainer), model) is None


def test_sequence_window_that_is_switched_off_does_not_matter() -> None:
    model = QWEN | {"sliding_window": 64, "use_sliding_window": False}
    assert model_refusal(layout(2, sp=2), model) is None


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_every_rank_of_a_legal_layout_has_one_replica(ranks: int) -> None:
    legal = [x for x in every_layout(ranks, Dtype.float32) if x.refusal() is None]
    assert len({x.label() for x in legal}) == len(legal) > 20
    for x in legal:
        members = [x.replica_of(rank) for rank in range(ranks)]
        assert members == sorted(members) and set(members) == set(range(x.replicas))
        assert all(members.count(replica) == x.sp * x.tp for replica in range(x.replicas))
        assert x.loss_scale * x.tp == ranks
        frozen = x.frozen()
        assert frozen.refusal() is None and frozen.replicas == ranks // x.sp


def test_rows_are_divided_by_replicas_not_by_ranks() -> None:
    assert layout(4, sp=4).replicas == 1
    with pytest.raises(ConfigError, match=r"48 rows: not divisible by cluster.train_ranks=5"):
        layout(5)
    with pytest.raises(ConfigError, match=r"not divisible by cluster.train_ranks=10 / trainer.sp=2 / trainer.tp=1"):
        layout(10, sp=2)


def test_label_names_what_differs_from_plain_data_parallelism() -> None:
    assert layout(2).label() == "zero1 dp2"
    full = dataclasses.replace(
        layout(4, sp=2, zero_stage=3, hpz=2, offload_optimizer=True, offload_parameters=True),
        recompute=Recompute.full,
        dtype=Dtype.bfloat16,
    )
    assert full.label() == "zero3 dp2 sp2 hpz2 offload=optimizer+parameters recompute=full bfloat16"
