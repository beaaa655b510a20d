"""Plans from config.json alone: those of a running system; the script that makes, prints and saves them."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from actors.layout_plan import trained_model
from conf.choices import Channel
from conf.errors import ConfigError
from conf.schema import Config, LoraConfig
from scripts.benchmarks.sync_matrix import config_of, layouts, model_folder, random_row
from scripts.plan_sync import main, plan, run, wanted_by
from tests.integration.real import connect, start_engines, start_ranks, started_cluster
from weightsync.held import held_regions
from weightsync.planner import join_readers, plan_rank, streams_of
from weightsync.saved_plan import load_plan

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ENGINES = [(2, 1), (1, 1), (1, 2), (1, 1)]  # two are alike


def bare_config(source: Path, out: Path, engines: list[tuple[int, int]]) -> Config:
    """Two ranks at ZeRO-3 with spread experts, and these engines; a folder of a config.json alone."""
    (layout,) = [x for x in layouts() if (x.ranks, x.zero_stage, x.ep) == (2, 3, 2)]
    out.mkdir()
    copy(source / "config.json", out)
    cfg = config_of(layout, out, engines, Channel.shm, out)
    return replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 16))


@pytest.mark.slow  # its halves are compared in test_places and in tests/numerics/test_layout_plan
def test_plan_without_processes_is_that_of_running_ranks_and_engines(tmp_path: Path) -> None:
    folder = model_folder("experts", 0, tmp_path / "whole")
    cfg = bare_config(folder, tmp_path / "bare", [(2, 1)])
    model = trained_model(cfg.model.path, cfg.train_layout, LoraConfig())
    wants, workers = wanted_by(cfg, model)
    readers = join_readers(wants)
    live = replace(cfg, model=replace(cfg.model, path=str(folder)))
    with started_cluster() as cluster:
        engines = start_engines(cluster, live, folder)
        group = start_ranks(cluster, [live], folder)[2]
        from actors.roles import ActorPolicy

        links = connect(ActorPolicy(live, group), engines.handles, random_row(7, 16)).links
    assert [len(names) for names in workers] == [1, 1]
    for rank, link in enumerate(links):
        own = plan_rank(held_regions(model.parameters, model.shares(rank)), readers, cfg.sync.slot_bytes)
        assert tuple(stream.fingerprint() for stream in streams_of(own, wants)) == link.signed


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return bare_config(model_folder("experts", 0, tmp_path / "whole"), tmp_path / "bare", ENGINES)


def test_script_prints_every_link_and_saves_what_it_planned(
    cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cfg, json=str(tmp_path / "figures.json"), save=str(tmp_path / "plan")) == 0
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "figures.json").read_text())
    for piece in ["1 x tp2, 2 x tp1, 1 x tp1 pp2", "5, of 6 workers", "rank 1", "engine 1 worker 0 (and 1 alike)"]:
        assert piece in printed
    assert figures["hash"] in printed and 1 <= figures["ratio"] < 1.02
    assert sum(map(sum, figures["links_bytes"])) == figures["bytes"]
    model = trained_model(cfg.model.path, cfg.train_layout, LoraConfig())
    readers = join_readers(wanted_by(cfg, model)[0])
    for rank in range(2):
        held = held_regions(model.parameters, model.shares(rank))
        found = load_plan(tmp_path / "plan", rank, 2, held, readers, cfg.sync.slot_bytes)
        assert found.bytes_to(5).tolist() == figures["links_bytes"][rank]
    with pytest.raises(ConfigError, match="holds a plan already"):
        run(cfg, save=str(tmp_path / "plan"))


def test_plan_is_the_same_when_it_is_made_again_and_another_for_other_buckets(cfg: Config) -> None:
    first, again = (plan(cfg, None).tally.plan_hash for _ in range(2))
    other = plan(replace(cfg, sync=replace(cfg.sync, bucket_bytes=1 << 17)), None).tally.plan_hash
    assert first == again != other


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 3}, "rollout.tp="),
        ({"model_type": "no_such_model"}, "model_type no_such_model has no experts"),
        ({"hidden_size": "wide"}, "describes no model that can be built"),
        ({"architectures": None}, "name one that generates in config.json"),
    ],
)
def test_config_json_that_does_not_fit_is_refused(cfg: Config, changes: dict[str, Any], said: str) -> None:
    path = Path(cfg.model.path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=said):
        run(cfg)


def test_wrong_option_of_the_script_is_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["--json"], "expected one argument"),
        (["--jsn", "x"], "--jsn"),
        (["model.pth=x"], "model.pth"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2 and said in capsys.readouterr().err
