"""The model folders of further roles, checked before a process starts: critic, teacher, reward model.

All of them read the policy's token ids, so each must have the policy's tokenizer.
"""

from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.schema import Config
from rollout.data import load_tokenizer, read_object
from rollout.preflight.model_folder import check_model
from weightsync.folder import folder_shapes


def check_role_models(cfg: Config, tokenizer: Any) -> None:
    """Raises ConfigError, naming the key, for a folder that its role cannot use."""
    for key, path in (
        ("critic.path", cfg.critic.path),
        ("teacher.path", cfg.teacher.path),
        ("reward_model.path", cfg.reward_model.path),
    ):
        if path is not None:
            require_same_tokens(key, path, tokenizer)
    layout = cfg.train_layout
    for key, path, spread, with_head in (
        ("critic.path", cfg.critic.path, layout, False),
        ("teacher.path", cfg.teacher.path, layout.frozen(), True),
    ):
        if path is not None:
            check_model(key, path, cfg, spread, read_shapes(key, path), with_head)
    if cfg.reward_model.path is not None:
        require_one_score(cfg.reward_model.path)


def read_shapes(key: str, path: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model folder. Raises ConfigError when there are no weights."""
    try:
        return folder_shapes(Path(path))
    except Exception as error:
        raise ConfigError(f"{key}={path}: its weights (safetensors) cannot be read: {error}") from error


def require_same_tokens(key: str, path: str, tokenizer: Any) -> None:
    """Raises ConfigError unless the folder's tokenizer gives every token the policy's id."""
    theirs, ours = load_tokenizer(path, key).get_vocab(), tokenizer.get_vocab()
    if theirs == ours:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    first = differing[0]
    raise ConfigError(
        f"{key}={path}: another tokenizer than model.path's ({len(theirs)} and {len(ours)} tokens, {len(differing)} "
        f"differ, such as {first!r}: {theirs.get(first)} and {ours.get(first)}). It would read other words than the "
        "policy wrote; give a model with the policy's tokenizer"
    )


def require_one_score(path: str) -> None:
    """Raises ConfigError unless the folder holds a sequence-classification model with one label."""
    config = read_object(Path(path) / "config.json", "reward_model.path")
    labels = len(config.get("id2label") or {"0": ""}) if "num_labels" not in config else config["num_labels"]
    if labels != 1:
        raise ConfigError(f"reward_model.path={path}: {labels} labels; a reward is one number, so it needs one label")
    shapes = read_shapes("reward_model.path", path)
    head = shapes.get("score.weight")
    if head is None or head[0] != 1:
        raise ConfigError(
            f"reward_model.path={path}: "
            + ("no score.weight in it" if head is None else f"score.weight has shape {head}")
            + "; a sequence-classification model with one label is needed"
        )
