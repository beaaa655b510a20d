"""The model folders of further roles, checked before a process starts: critic, teacher, reward model.

All of them read the policy's token ids, so each must have the policy's tokenizer.
"""

from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.layout import head_refusal
from conf.schema import Config
from rollout.data import load_tokenizer, read_object
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
    if cfg.teacher.path is not None:
        refusal = head_refusal(read_object(Path(cfg.teacher.path) / "config.json", "teacher.path"))
        if refusal is not None:
            raise ConfigError(f"teacher.path={cfg.teacher.path}: {refusal}")
    if cfg.reward_model.path is not None:
        require_one_score(cfg.reward_model.path)


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
    try:
        shapes = folder_shapes(Path(path))
    except Exception as error:
        raise ConfigError(f"reward_model.path={path}: its weights (safetensors) cannot be read: {error}") from error
    head = shapes.get("score.weight")
    if head is None or head[0] != 1:
        raise ConfigError(
            f"reward_model.path={path}: "
            + ("no score.weight in it" if head is None else f"score.weight has shape {head}")
            + "; a sequence-classification model with one label is needed"
        )
