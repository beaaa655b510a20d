"""Where a run continues: which folder, which checkpoint, and which differences forbid it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from actors.checkpoint import file_crc, publish
from actors.resume import FREE, differences, resolve_start
from conf.errors import ConfigError
from conf.launch import to_dict
from conf.schema import Config
from rl import run_folder
from tests.unit.stand_ins import make_cfg

SHAPES = {"w": (2, 2)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(cfg: Config, shapes: dict[str, tuple[int, ...]] | None = None) -> Any:
    return resolve_start(cfg, to_dict(cfg), SHAPES if shapes is None else shapes)


def save(run_dir: Path, cfg: Config, step: int) -> Path:
    def write(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        path = folder / "shard.safetensors"
        path.write_bytes(b"state")
        entry = {
            "role": "policy",
            "file": path.name,
            "nbytes": 5,
            "crc": file_crc(path),
            "tensors": {"w|master": [2, 2]},
        }
        return [entry], {}

    return publish(run_dir / "checkpoints", step, write, {"step": step}, to_dict(cfg), run_dir / "model", keep=0)


def unfinished(step: int = 2, **changes: Any) -> tuple[Path, Path]:
    """A run folder of the default name, and its checkpoint."""
    run_dir = run_folder.make("runs", "run")
    return run_dir, save(run_dir, make_cfg(**changes), step)


def test_auto_no_run_makes_a_new_folder() -> None:
    found = start(make_cfg())
    assert found.run_dir.is_dir() and found.run_dir.parent.name == "runs"
    assert (found.checkpoint, found.manifest, found.messages) == (None, {}, [])


def test_auto_unfinished_run_continues_in_its_folder() -> None:
    run_dir, folder = unfinished()
    found = start(make_cfg())
    assert (found.run_dir, found.checkpoint, found.manifest["run_state"]) == (run_dir, folder, {"step": 2})


def test_auto_more_steps_than_the_finished_run_continues_it() -> None:
    _, folder = unfinished(step=4)
    assert start(make_cfg(num_steps=6)).checkpoint == folder


def test_auto_finished_run_starts_anew() -> None:
    run_dir, _ = unfinished(step=4)
    found = start(make_cfg(num_steps=4))
    assert found.run_dir != run_dir and found.checkpoint is None


def test_auto_other_name_starts_anew() -> None:
    run_dir, _ = unfinished()
    assert start(make_cfg(name="other")).run_dir != run_dir


def test_auto_other_meaning_starts_anew_and_says_why() -> None:
    run_dir, _ = unfinished()
    found = start(make_cfg(trainer={"lr": 0.25}))
    assert found.run_dir != run_dir and found.checkpoint is None
    assert len(found.messages) == 1 and "trainer.lr: 0.5 -> 0.25" in found.messages[0]


def test_auto_force_continues_though_the_meaning_differs() -> None:
    _, folder = unfinished()
    cfg = make_cfg(trainer={"lr": 0.25})
    cfg.checkpoint.force = True
    assert start(cfg).checkpoint == folder


def test_auto_free_keys_may_change() -> None:
    _, folder = unfinished()
    cfg = make_cfg(num_steps=9, trainer={"zero_stage": 3, "micro_batch_tokens": 64}, rollout={"deadline_s": 9.0})
    cfg.cluster.train_ranks, cfg.checkpoint.keep, cfg.tracking.wandb = 2, 7, False
    assert start(cfg).checkpoint == folder


def test_auto_broken_newest_falls_back_with_one_warning() -> None:
    run_dir, older = unfinished(step=1)
    newest = save(run_dir, make_cfg(), 2)
    (newest / "shard.safetensors").write_bytes(b"stat")
    found = start(make_cfg())
    assert found.checkpoint == older
    assert len(found.messages) == 1 and str(newest) in found.messages[0]


def test_never_ignores_what_is_there() -> None:
    run_dir, _ = unfinished()
    found = start(make_cfg(resume="never"))
    assert found.run_dir != run_dir and found.checkpoint is None


@pytest.mark.parametrize("of_run", [True, False])
def test_path_of_a_run_or_of_a_checkpoint_continues_there(of_run: bool) -> None:
    run_dir, folder = unfinished()
    found = start(make_cfg(resume=str(run_dir if of_run else folder)))
    assert (found.run_dir, found.checkpoint) == (run_dir, folder)


def test_path_with_run_dir_continues_into_that_folder(here: Path) -> None:
    _, folder = unfinished()
    found = start(make_cfg(resume=str(folder), run_dir=str(here / "elsewhere")))
    assert (found.run_dir, found.checkpoint) == (here / "elsewhere", folder)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "broken", "run without a checkpoint"])
def test_path_that_is_no_checkpoint_is_refused_by_name(here: Path, kind: str) -> None:
    path = here / "thing"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "broken":
        _, path = unfinished()
        (path / "shard.safetensors").unlink()
    elif kind == "run without a checkpoint":
        (path / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"resume={path}: "):
        start(make_cfg(resume=str(path)))


def test_path_other_meaning_is_refused_with_every_difference() -> None:
    _, folder = unfinished()
    with pytest.raises(ConfigError) as caught:
        start(make_cfg(resume=str(folder), trainer={"lr": 0.25}, seed=3))
    for piece in ("trainer.lr: 0.5 -> 0.25", "seed: 0 -> 3", "checkpoint.force=true"):
        assert piece in str(caught.value)


@pytest.mark.parametrize("by", ["path", "run_dir", "auto"])
@pytest.mark.parametrize("shapes", [{"w": (2, 3)}, {"v": (2, 2)}])
def test_other_architecture_is_refused(by: str, shapes: dict[str, tuple[int, ...]]) -> None:
    run_dir, folder = unfinished()
    places: dict[str, dict[str, Any]] = {
        "path": {"resume": str(folder)},
        "run_dir": {"run_dir": str(run_dir)},
        "auto": {},
    }
    with pytest.raises(ConfigError, match=r"of another architecture than model.path"):
        start(make_cfg(**places[by]), shapes)


def test_run_dir_with_another_meaning_is_refused() -> None:
    run_dir, _ = unfinished()
    with pytest.raises(ConfigError, match="resume=never, or another run_dir"):
        start(make_cfg(run_dir=str(run_dir), trainer={"lr": 0.25}))


def test_differences_nested_new_and_dropped_keys_are_named() -> None:
    saved = {"seed": 0, "algo": {"clip_low": 0.2, "old": 1}, "num_steps": 4, "trainer": {"zero_stage": 1}}
    now = {"seed": 0, "algo": {"clip_low": 0.3, "new": 2}, "num_steps": 9, "trainer": {"zero_stage": 3}}
    assert differences(saved, now) == ["algo.clip_low: 0.2 -> 0.3", "algo.new: None -> 2", "algo.old: 1 -> None"]
    assert differences(now, now) == []


def test_differences_both_forms_of_adamw_are_one_optimizer() -> None:
    adamw, cpu_adam, sgd = ({"trainer": {"optimizer": name}} for name in ("adamw", "cpu_adam", "sgd"))
    assert differences(adamw, cpu_adam) == differences(cpu_adam, adamw) == []
    assert differences(cpu_adam, sgd) == ["trainer.optimizer: adamw -> sgd"]


@pytest.mark.parametrize("key", FREE)
def test_free_each_key_exists_in_the_schema(key: str) -> None:
    node: Any = make_cfg()
    for part in key.split("."):
        assert part in {field.name for field in dataclasses.fields(node)}
        node = getattr(node, part)


def test_free_nothing_that_is_learnt_from_is_in_it() -> None:
    sections = ("algo", "model.path", "data", "reward._target_", "trainer.lr", "rollout.temperature", "sft", "seed")
    assert not set(sections) & set(FREE)
