"""Folders of critic, teacher and reward model that cannot be used: refused by key, before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.choices import Advantage
from conf.errors import ConfigError
from conf.schema import (
    AlgoConfig,
    Config,
    CriticConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rollout.data import load_tokenizer
from rollout.preflight.role_models import check_role_models


def with_roles(critic: Path | None = None, teacher: Path | None = None, reward_model: Path | None = None) -> Config:
    advantage = Advantage.gae if critic else Advantage.teacher if teacher else Advantage.group
    return Config(
        algo=AlgoConfig(advantage=advantage),
        critic=CriticConfig(path=str(critic) if critic else None),
        teacher=TeacherConfig(path=str(teacher) if teacher else None),
        reward_model=RewardModelConfig(path=str(reward_model) if reward_model else None),
    )


@pytest.fixture
def scorer(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a score head of one label."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "scorer"))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(1, 4)}, folder / "model.safetensors")
    edit(folder, num_labels=1)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(tiny_folder: Path, cfg: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_role_models(cfg, load_tokenizer(str(tiny_folder)))
    return str(caught.value)


def test_roles_with_the_policys_tokenizer_pass(tiny_folder: Path, scorer: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_folder))
    check_role_models(with_roles(), tokenizer)
    check_role_models(with_roles(critic=tiny_folder, reward_model=scorer), tokenizer)
    check_role_models(with_roles(teacher=tiny_folder), tokenizer)


@pytest.mark.parametrize("role", ["critic", "teacher", "reward_model"])
def test_another_vocabulary_is_refused_with_a_token_that_differs(tiny_folder: Path, scorer: Path, role: str) -> None:
    path = scorer / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    message = refused(tiny_folder, with_roles(**{role: scorer}))
    for piece in (f"{role}.path={scorer}", "another tokenizer than model.path's", "2 differ", "'a'"):
        assert piece in message


@pytest.mark.parametrize("role", ["critic", "teacher", "reward_model"])
def test_missing_folder_is_refused_by_its_key(tiny_folder: Path, role: str) -> None:
    assert refused(tiny_folder, with_roles(**{role: Path("nowhere")})).startswith(
        f"{role}.path=nowhere: no such folder"
    )


def test_reward_model_with_three_labels_is_refused(tiny_folder: Path, scorer: Path) -> None:
    edit(scorer, num_labels=3)
    assert "3 labels; a reward is one number" in refused(tiny_folder, with_roles(reward_model=scorer))


def test_reward_model_without_a_head_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "bare"))
    edit(folder, num_labels=1)
    assert "no score.weight in it" in refused(tiny_folder, with_roles(reward_model=folder))
