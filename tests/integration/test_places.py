"""What workers are said to want, from config.json alone, is what the workers of running engines want."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import transformers

from actors.cluster import Cluster
from actors.layout_plan import trained_model
from conf.choices import Channel, Dtype
from conf.schema import Config, LoraConfig
from rollout.engine import engine_config
from scripts.benchmarks.sync_matrix import MODELS, SIZES, config_of, layouts, model_folder
from tests.integration.real import START_S, start_engines, started_cluster
from weightsync.places import build_worker, groups_of, standing_in, worker_wants
from weightsync.plan import Wanted
from weightsync.record import Folder, layers_alike, record

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started_cluster() as cluster:
        yield cluster


def planned(cfg: Config, folder: Path, engine: int, dtype: str = "float32") -> list[Wanted]:
    shapes = trained_model(str(folder), layouts()[0], LoraConfig()).shapes
    settings = engine_config(cfg, engine, str(folder))
    ranks = range(cfg.engine_workers(engine))
    return [worker_wants(settings, rank, Folder.of(shapes), dtype) for rank in ranks]


@pytest.mark.slow  # tests/numerics/test_sync.py compares with engines that run there
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_wants_of_workers_without_processes_equal_those_of_running_engines(
    cluster: Cluster, tmp_path: Path, name: str, dtype: Dtype
) -> None:
    folder, bare = model_folder(name, 0, tmp_path / "whole"), tmp_path / "bare"
    bare.mkdir()
    copy(folder / "config.json", bare)
    cfg = config_of(layouts()[0], folder, MODELS[name][2], Channel.shm, tmp_path)
    compare(cluster, replace(cfg, rollout=replace(cfg.rollout, dtype=dtype)), folder, bare)


@pytest.mark.slow
def test_wants_of_expert_parallel_workers_equal_those_of_a_running_engine(cluster: Cluster, tmp_path: Path) -> None:
    folder, bare = model_folder("experts", 0, tmp_path / "whole"), tmp_path / "bare"
    bare.mkdir()
    copy(folder / "config.json", bare)
    cfg = config_of(layouts()[0], folder, [(2, 1)], Channel.shm, tmp_path)
    compare(cluster, replace(cfg, rollout=replace(cfg.rollout, ep=True)), folder, bare)


def compare(cluster: Cluster, cfg: Config, folder: Path, bare: Path) -> None:
    """What running engines of `folder` want, with what is planned from its config.json alone in `bare`."""
    shapes = trained_model(str(bare), layouts()[0], LoraConfig()).shapes
    engines = start_engines(cluster, cfg, *[folder] * cfg.cluster.rollout_engines)
    try:
        for number, handle in enumerate(engines.handles):
            live = handle.wanted(shapes, "float32").result(timeout=START_S)
            mine = planned(cfg, bare, number)
            assert [wanted.fingerprint() for wanted in mine] == [wanted.fingerprint() for wanted in live]
    finally:
        engines.stop()
        cluster.release("rollout")


def config_folder(kind: str, out: Path, **sizes: Any) -> Path:
    """A folder of a config.json alone."""
    architecture = kind.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    getattr(transformers, kind)(**SIZES | sizes, architectures=[architecture]).save_pretrained(out)
    return out


MIXED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [1, 4],
}
EXPERTS = "experts in some layers"
DEPTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", {}),
    "bias": ("Qwen2Config", {"hidden_size": 128}),
    EXPERTS: ("Qwen3MoeConfig", MIXED),
    "sliding windows in some layers": ("Gemma3TextConfig", {"num_hidden_layers": 7, "sliding_window": 16}),
}


ENGINES = [(1, 1, False), (2, 1, False), (2, 1, True), (2, 3, False)]


@pytest.mark.parametrize(
    ("name", "tp", "pp", "ep"), [(name, *size) for name in DEPTHS for size in ENGINES if name == EXPERTS or not size[2]]
)
def test_recording_layers_that_are_alike_once_equals_recording_all(
    tmp_path: Path, name: str, tp: int, pp: int, ep: bool
) -> None:
    from vllm.config import set_current_vllm_config

    kind, sizes = DEPTHS[name]
    folder = config_folder(kind, tmp_path / "model", **sizes)
    cfg = config_of(layouts()[0], folder, [(tp, pp)], Channel.shm, tmp_path)
    cfg = replace(cfg, rollout=replace(cfg.rollout, ep=ep))
    settings = engine_config(cfg, 0, str(folder))
    shapes = trained_model(str(folder), layouts()[0], LoraConfig()).shapes
    names, all_shapes = list(shapes), list(shapes.values())
    for rank in range(tp * pp):
        model = build_worker(settings, rank)
        with set_current_vllm_config(settings), standing_in(groups_of(rank, tp, pp)):
            whole = record(model, names, all_shapes, "float32")
        assert worker_wants(settings, rank, Folder.of(shapes), "float32").fingerprint() == whole.fingerprint()
        layers = [module for module in whole.modules if ".layers." in module]
        kinds = {"experts in some layers": 2}.get(name, 1)
        classes, _ = layers_alike(model, Folder.of(shapes))
        assert len(layers) > 0 and len(classes) <= kinds * (1 + (pp > 1))
