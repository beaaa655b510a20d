"""What a layout is said to hold, from config.json alone, is what the ranks of running DeepSpeed engines hold."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
import ray

from actors.group import RankGroup
from actors.layout_plan import trained_model
from conf.choices import Dtype, Layout, Recompute
from conf.layout import TrainLayout, every_layout
from conf.schema import LoraConfig
from tests.integration.real import random_folder, restart, start_ranks, started_cluster
from tests.numerics.recipes import config
from weightsync.held import Share, held_regions
from weightsync.regions import Regions

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(180)]

LAYOUTS = [
    layout
    for ranks in (1, 2)
    for layout in every_layout(ranks, Dtype.float32)
    if layout.refusal() is None and layout.recompute is Recompute.none
    if not layout.offload_optimizer and not layout.offload_parameters
]


@pytest.fixture(scope="module")
def folders(
    tiny_folder: Path, tiny_moe_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """By kind of model: a folder with random weights, and one of its config.json alone."""
    found = {}
    for name, source, tied in (("dense", tiny_folder, False), ("moe", tiny_moe_folder, True)):
        root = tmp_path_factory.mktemp(name)
        whole, bare = random_folder(source, root / "whole", seed=1, tied=tied), root / "bare"
        bare.mkdir()
        copy(whole / "config.json", bare)
        found[name] = (whole, bare)
    return found


@pytest.fixture(scope="module")
def groups(folders: dict[str, tuple[Path, Path]]) -> Iterator[dict[int, RankGroup]]:
    with started_cluster() as cluster:
        yield start_ranks(cluster, [config("sgd", ranks=ranks) for ranks in (1, 2)], folders["dense"][0])


def compare(groups: dict[int, RankGroup], folders: tuple[Path, Path], layout: TrainLayout, lora: LoraConfig) -> None:
    spread = {key: value for key, value in vars(layout).items() if key not in ("ranks", "zero_stage")}
    cfg = replace(config("sgd", layout.zero_stage, layout.ranks, layout=Layout.padded, **spread), lora=lora)
    policy = restart(groups[layout.ranks], cfg, folders[0])

    def holds(host: Any) -> tuple[list[Share], Regions]:
        from actors.shards import held_regions, shares_of

        role = host.roles["policy"]
        return shares_of(role.engine, role.world), held_regions(role.engine, role.world)

    found = ray.get([actor.__ray_call__.remote(holds) for actor in policy.group.actors], timeout=60)
    planned = trained_model(str(folders[1]), layout, lora)
    assert list(planned.shapes.items()) == list(policy.shapes().items())
    for rank, (shares, regions) in enumerate(found):
        mine = held_regions(planned.parameters, planned.shares(rank))
        for field in fields(Regions):
            np.testing.assert_array_equal(getattr(mine, field.name), getattr(regions, field.name), err_msg=field.name)
        if lora.rank == 0:
            assert planned.shares(rank) == [replace(share) for share in shares]


CASES = [("dense", x) for x in LAYOUTS if x.ep == 1] + [("moe", x) for x in LAYOUTS if x.tp == 1]


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[f"{kind} {x.ranks} {x.label()}" for kind, x in CASES])
def test_held_regions_of_a_layout_without_processes_equal_those_of_live_ranks(
    groups: dict[int, RankGroup], folders: dict[str, tuple[Path, Path]], kind: str, layout: TrainLayout
) -> None:
    compare(groups, folders[kind], layout, LoraConfig())


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.tp == x.ep == x.hpz == x.sp == 1], ids=TrainLayout.label)
def test_held_regions_beside_adapters_equal_those_of_live_ranks(
    groups: dict[int, RankGroup], folders: dict[str, tuple[Path, Path]], layout: TrainLayout
) -> None:
    compare(groups, folders["dense"], layout, LoraConfig(rank=2))
