"""Episodes of several turns with a real engine: every trained id and log-probability is what it sampled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.choices import Isolation
from conf.schema import NO_REWARD, ClusterConfig, Config, DataConfig, EnvConfig, ModelConfig
from rl.types import Status
from rollout.engines import EngineGroup
from rollout.preflight.launch import Prepared, prepare
from scripts.benchmarks.agents_exact import Noted, exact_figures, note_episodes
from tests.integration.real import load_hf, one_thread, random_folder, start_engines, started_cluster
from tests.unit.stand_ins import make_cfg

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

EPISODES, TEMPERATURE = 20, 1.3


@pytest.fixture(scope="module")
def cfg(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = random_folder(tiny_folder, tmp_path_factory.mktemp("agents") / "model", seed=1, spread=0.05)
    guess = {"low": 1, "high": 5, "turns": 4, "style": "plain"}
    return make_cfg(
        rollout={
            "max_tokens": 12, "max_model_len": 256, "temperature": TEMPERATURE, "kv_cache_bytes": 64 << 20,
            "num_threads": 1,
        },
        reward={"_target_": NO_REWARD},
        cluster=ClusterConfig(rollout_engines=2),
        model=ModelConfig(path=str(folder)),
        data=DataConfig(from_env=True, size=EPISODES, eval_size=0),
        env=EnvConfig(_target_="rollout.envs.guess.Guess", kwargs=guess, isolation=Isolation.inline),
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(cfg: Config) -> Prepared:
    return prepare(cfg)


@pytest.fixture(scope="module")
def noted(cfg: Config, prepared: Prepared) -> Iterator[list[Noted]]:
    """The episodes, which two engines have played."""
    with started_cluster() as cluster:
        engines: EngineGroup = start_engines(cluster, cfg, Path(cfg.model.path), Path(cfg.model.path))
        engines.accept_loaded(version=0)
        yield note_episodes(cfg, prepared, engines.handles, EPISODES)
        engines.stop()


def test_episodes_of_a_real_engine_are_trained_id_for_id(cfg: Config, prepared: Prepared, noted: list[Noted]) -> None:
    assert [episode.trajectory.status for episode in noted] == [Status.ok] * EPISODES
    assert max(len(episode.calls) for episode in noted) == 4
    with one_thread():
        lm = load_hf(Path(cfg.model.path))
        found = {figure.name: figure.value for figure in exact_figures(noted, prepared.tokenizer, lm, TEMPERATURE)}
    assert found["rows_exact"] == found["rows_total"] == EPISODES
    assert found["completions_trained_once"] == found["completions_total"]
    assert found["max_logprob_diff"] < 1e-4
    assert found["observation_gradient"] == 0.0
    assert found["action_gradient"] > 0.0


def test_versions_of_a_real_engine_are_those_that_it_served(noted: list[Noted]) -> None:
    for episode in noted:
        row = episode.trajectory
        assert {v for v, acts in zip(row.versions, row.action_mask, strict=True) if acts} == {0}
        assert {v for v, acts in zip(row.versions, row.action_mask, strict=True) if not acts} == {-1}
