"""Every legal layout on two ranks gives what one process of plain torch gives.

The list comes from the code that decides what is legal, so none is forgotten.
"""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.checkpoint import read_manifest
from actors.compiled import machine_folder
from actors.engine import cpu_adam, optimizer_spec
from actors.group import RankGroup
from actors.roles import ActorPolicy
from conf.choices import Dtype, Layout, Optimizer, Recompute
from conf.layout import TrainLayout, every_layout
from conf.schema import Config
from rl.types import Batch
from tests.integration.real import random_folder, restart, start_ranks, started_cluster
from tests.numerics.plain import PlainPolicy
from tests.numerics.recipes import (
    TOLERANCE,
    Result,
    assert_close,
    config,
    for_recipe,
    plain_results,
    ragged_batch,
    weights_of,
)

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(180)]

LEGAL = [layout for layout in every_layout(2, Dtype.float32) if layout.refusal() is None]
DENSE = [layout for layout in LEGAL if layout.ep == 1]
# Each stage with each way to spread it, and each further choice once; all the others are among the slow tests.
FURTHER = (
    "zero1 dp1 sp2 recompute=selective",
    "zero2 dp1 tp2 recompute=full",
    "zero3 dp1 sp2 recompute=full",
    "zero2 dp2 offload=optimizer",
    "zero3 dp1 sp2 offload=optimizer+parameters",
    "zero3 dp2 hpz2",
    "zero3 dp2 ep2 offload=optimizer",
)
CLIPPED = ("zero0 dp1 tp2", "zero1 dp1 tp2", "zero2 dp1 sp2", "zero3 dp1 sp2", "zero1 dp2 offload=optimizer")


def quick(layout: TrainLayout) -> bool:
    plain = layout.recompute is Recompute.none and layout.hpz == 1 and not layout.offload_optimizer
    return plain or layout.label() in FURTHER


def cases(layouts: list[TrainLayout]) -> list[Any]:
    return [pytest.param(x, id=x.label(), marks=[] if quick(x) else [pytest.mark.slow]) for x in layouts]


@pytest.fixture(scope="module")
def moe_folder(tiny_moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tiny_moe_folder, tmp_path_factory.mktemp("parallel") / "moe", seed=1)


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[RankGroup]:
    with started_cluster() as cluster:
        yield start_ranks(cluster, [config("sgd", ranks=2)], folder)[2]


@dataclass(frozen=True)
class Wanted:
    """A model, a batch, and what plain torch makes of them."""

    folder: Path
    batch: Batch
    results: dict[str, Result]


def wanted_of(folder: Path) -> Wanted:
    batch = ragged_batch(folder)
    return Wanted(folder, batch, plain_results(folder, batch, ("sgd", "sgd_fused")))


@pytest.fixture(scope="module")
def dense(folder: Path) -> Wanted:
    return wanted_of(folder)


@pytest.fixture(scope="module")
def moe(moe_folder: Path) -> Wanted:
    return wanted_of(moe_folder)


def layout_config(layout: TrainLayout, recipe: str = "sgd", rows: Layout | None = None) -> Any:
    fields = {key: value for key, value in vars(layout).items() if key not in ("ranks", "zero_stage")}
    able = layout.sp == 1 and layout.recompute is Recompute.none
    return config(
        recipe, layout.zero_stage, 2, layout=rows or (Layout.shared_prefix if able else Layout.padded), **fields
    )


def assert_equals_plain(policy: ActorPolicy, wanted: Wanted, out: Path, recipe: str) -> None:
    batch, (curve, weights, logprobs) = wanted.batch, wanted.results[recipe]
    for number, row in enumerate(curve):
        found = policy.update(for_recipe(batch, recipe), number * policy.cfg.algo.num_epochs, number)
        assert {name: found[name] for name in row} == pytest.approx(row, abs=TOLERANCE)
        assert found["policy/skipped_steps"] == 0
    assert_close(weights_of(policy, wanted.folder, out), weights, TOLERANCE)
    gaps = (policy.logprobs(batch) - logprobs)[batch.action_mask].abs()
    assert float(gaps.mean()) <= TOLERANCE and float(gaps.max()) <= 10 * TOLERANCE


@pytest.mark.parametrize("layout", cases(LEGAL))
def test_five_updates_in_every_layout_equal_plain_torch(
    group: RankGroup, request: pytest.FixtureRequest, tmp_path: Path, layout: TrainLayout
) -> None:
    wanted: Wanted = request.getfixturevalue("moe" if layout.ep > 1 else "dense")
    policy = restart(group, layout_config(layout), wanted.folder)
    assert_equals_plain(policy, wanted, tmp_path / "hf", "sgd")


@pytest.mark.parametrize("layout", [x for x in LEGAL if x.label() == "zero3 dp2"], ids=TrainLayout.label)
def test_experts_that_are_partitioned_and_run_twice_a_pass_equal_plain_torch(
    group: RankGroup, moe: Wanted, tmp_path: Path, layout: TrainLayout
) -> None:
    """Where prompts are shared, a layer runs for the prompt and again for the responses."""
    policy = restart(group, layout_config(layout, rows=Layout.shared_prefix), moe.folder)
    assert_equals_plain(policy, moe, tmp_path / "hf", "sgd")


@pytest.mark.parametrize(
    "layout", [x for x in LEGAL if x.label() in ("zero1 dp2 ep2", "zero3 dp2")], ids=TrainLayout.label
)
def test_updates_replay_the_routes_of_the_scoring(group: RankGroup, moe: Wanted, layout: TrainLayout) -> None:
    """Both optimizer steps, at weights far from each other, send every token where the scoring sent it."""
    cfg = layout_config(layout, rows=Layout.padded)
    loads = {}
    for replays in (True, False):
        trainer = dataclasses.replace(cfg.trainer, lr=30.0, replay_routing=replays)
        policy = restart(group, dataclasses.replace(cfg, trainer=trainer), moe.folder)
        batch = dataclasses.replace(moe.batch)
        batch.train_logprobs = policy.logprobs(batch)
        assert (batch.routes is not None) is replays
        loads[replays] = policy.update(batch, 0, 0)["router/load_max"]
        if batch.routes is not None:
            trained = batch.attention_mask & batch.action_mask.any(-1, keepdim=True)
            counts = [torch.bincount(routes.flatten(), minlength=8) for routes in batch.routes[trained].unbind(1)]
            wanted = sum(float(count.max() / count.sum()) * 8 for count in counts) / len(counts)
    assert loads[True] == pytest.approx(wanted)
    assert loads[False] != pytest.approx(wanted)


@pytest.mark.parametrize("layout", [x for x in DENSE if x.label() in CLIPPED], ids=TrainLayout.label)
def test_gradient_is_clipped_by_its_global_norm_in_every_layout(
    group: RankGroup, dense: Wanted, tmp_path: Path, layout: TrainLayout
) -> None:
    policy = restart(group, layout_config(layout, "sgd_fused"), dense.folder)
    assert_equals_plain(policy, dense, tmp_path / "hf", "sgd_fused")


# -- Muon --


class MuonAndAdamW:
    """Two of torch's optimizers side by side."""

    def __init__(self, policy: PlainPolicy):
        trainer = policy.cfg.trainer
        named = list(policy.lm.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and ".layers." in name]
        others = [p for name, p in named if not (p.dim() == 2 and ".layers." in name)]
        decay = trainer.weight_decay
        muon = torch.optim.Muon(matrices, lr=trainer.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=trainer.lr, weight_decay=decay, eps=trainer.eps)
        self.both: list[torch.optim.Optimizer] = [muon, adamw]

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()


def test_muon_equals_torchs_and_continues_from_a_checkpoint(
    group: RankGroup, folder: Path, dense: Wanted, tmp_path: Path
) -> None:
    cfg = config("adamw", 0, 2, layout=Layout.padded, optimizer=Optimizer.muon)
    plain, policy = PlainPolicy(cfg, folder), restart(group, cfg, folder)
    optimizer: Any = MuonAndAdamW(plain)
    plain.optimizer = optimizer
    for number in range(4):
        if number == 2:
            save(policy, tmp_path / "checkpoint")
            policy = restart(group, cfg, folder)
            policy.group.call("load", str(tmp_path / "checkpoint"))
        wanted = plain.update(dense.batch)
        found = policy.update(dense.batch, number * 2, number)
        # orthogonalisation in bf16 rounds what differs in the last bit to another value now and then
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-3)
    assert_close(weights_of(policy, folder, tmp_path / "hf"), plain.weights(), 2e-4)


# -- compiled kernels: the processes must be told to compile when they start --


def num_compiled(_: Any) -> tuple[int, str]:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_updates_through_compiled_kernels_equal_plain_torch(
    group: RankGroup, folder: Path, dense: Wanted, tmp_path: Path
) -> None:
    cfg = config("sgd", 1, 2, layout=Layout.padded, fused_logprobs=True)
    (own,) = start_ranks(group.cluster, [cfg], folder).values()
    try:
        own.measure(True)  # a mode in which torch.compile would refuse to be called
        assert_equals_plain(ActorPolicy(cfg, own), dense, tmp_path / "hf", "sgd")
        compiled = ray.get([actor.__ray_call__.remote(num_compiled) for actor in own.actors], timeout=60)
    finally:
        own.stop()
    for count, kept_in in compiled:
        assert count >= 2, "the formulas ran uncompiled"
        assert Path(kept_in).parent == machine_folder() and list(Path(kept_in).iterdir())
        assert not Path(f"{kept_in}.unfinished").exists()


# -- DeepSpeed's AdamW for host memory; slow where it has not been compiled yet --

HOST = ["zero0 dp2", "zero1 dp2 offload=optimizer", "zero3 dp2", "zero3 dp2 offload=optimizer+parameters"]
EXACT = 3e-6  # ten steps of weights near 1, each rounded once more or less


@pytest.fixture(scope="module")
def compiled_here() -> None:
    """Compiled before the ranks ask for it: tests wait for ranks only so long."""
    trainer = dataclasses.replace(config("adamw").trainer, optimizer=Optimizer.cpu_adam)
    cpu_adam([{"params": [torch.nn.Parameter(torch.zeros(1))]}], optimizer_spec(trainer))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("layout", [x for x in LEGAL if x.label() in HOST], ids=TrainLayout.label)
def test_five_updates_with_cpu_adam_equal_adamw(
    group: RankGroup, folder: Path, dense: Wanted, tmp_path: Path, layout: TrainLayout
) -> None:
    results = []
    for kind in (Optimizer.adamw, Optimizer.cpu_adam):
        cfg = with_optimizer(layout_config(layout, "adamw"), kind)
        policy = restart(group, cfg, folder)
        curve = [policy.update(dense.batch, number * 2, number)["policy/policy_loss"] for number in range(5)]
        results.append((curve, weights_of(policy, folder, tmp_path / kind.value)))
    (wanted, weights), (found, others) = results
    assert found == pytest.approx(wanted, abs=EXACT)
    assert_close(others, weights, EXACT)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    ("saved", "read"), [(Optimizer.adamw, Optimizer.cpu_adam), (Optimizer.cpu_adam, Optimizer.adamw)]
)
@pytest.mark.parametrize(("first", "second"), [(HOST[1], HOST[2]), (HOST[3], HOST[0])])
def test_checkpoint_of_one_adamw_continues_in_the_other(
    group: RankGroup,
    folder: Path,
    dense: Wanted,
    tmp_path: Path,
    saved: Optimizer,
    read: Optimizer,
    first: str,
    second: str,
) -> None:
    """Master, both moments and their step count: any of them left behind would move the third update."""
    by_name = {layout.label(): layout for layout in LEGAL}
    policy = restart(group, with_optimizer(layout_config(by_name[first], "adamw"), saved), folder)
    for number in range(2):
        policy.update(dense.batch, number * 2, number)
    save(policy, tmp_path / "checkpoint")
    policy.update(dense.batch, 4, 2)
    weights = weights_of(policy, folder, tmp_path / "straight")
    policy = restart(group, with_optimizer(layout_config(by_name[second], "adamw"), read), folder)
    policy.group.call("load", str(tmp_path / "checkpoint"))
    assert policy.group.call("state")[0]["optimizer_step"] == 4
    policy.update(dense.batch, 4, 2)
    assert_close(weights_of(policy, folder, tmp_path / "resumed"), weights, EXACT)


def with_optimizer(cfg: Config, kind: Optimizer) -> Config:
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, optimizer=kind))


# -- checkpoints: saved in one layout, read in another --

SAVED = [
    "zero0 dp1 tp2",
    "zero1 dp1 sp2",
    "zero2 dp1 tp2",
    "zero3 dp2",
    "zero3 dp2 hpz2",
    "zero1 dp2 offload=optimizer",
]


@pytest.mark.parametrize("saved", SAVED)
def test_checkpoint_of_one_layout_continues_in_another(
    group: RankGroup, folder: Path, dense: Wanted, tmp_path: Path, saved: str
) -> None:
    """AdamW: two updates, a checkpoint, and a third one after it was read by the next layout of the list."""
    by_name = {layout.label(): layout for layout in LEGAL}
    other = SAVED[(SAVED.index(saved) + 1) % len(SAVED)]
    batch = dense.batch
    cfg = layout_config(by_name[saved], "adamw")
    policy = restart(group, cfg, folder)
    for number in range(2):
        policy.update(batch, number * 2, number)
    entries = save(policy, tmp_path / "checkpoint")
    wanted = policy.update(batch, 4, 2)
    weights = weights_of(policy, folder, tmp_path / "straight")
    second = restart(group, layout_config(by_name[other], "adamw"), folder)
    second.group.call("load", str(tmp_path / "checkpoint"))
    assert read_manifest(tmp_path / "checkpoint")["files"] == entries
    found = second.update(batch, 4, 2)
    for name in ("policy/policy_loss", "policy/kl", "policy/grad_norm", "policy/entropy"):
        assert found[name] == pytest.approx(wanted[name], abs=TOLERANCE)
    assert_close(weights_of(second, folder, tmp_path / "resumed"), weights, TOLERANCE)


def save(policy: ActorPolicy, folder: Path) -> list[dict[str, Any]]:
    """A checkpoint as actors.checkpoint publishes it, in the folder itself."""
    from actors.checkpoint import FORMAT
    from rl.run_folder import write_json

    folder.mkdir()
    entries: list[dict[str, Any]] = [e for rank in policy.group.call("save", str(folder)) for e in rank]
    roles = {"policy": policy.group.call("state")[0]}
    manifest = {"format": FORMAT, "step": 2, "files": entries, "run_state": {}, "config": {}, "roles": roles}
    write_json(folder / "manifest.json", manifest)
    return entries
