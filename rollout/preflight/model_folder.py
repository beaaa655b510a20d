"""Whether a model folder is what its config.json says, and fits the layout, checked before a process starts.

transformers builds the model that config.json describes, without memory for its weights; the weights beside it must be
that model's, tensor by tensor. So a missing tensor is never made up, and sizes that do not fit are found here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from actors.layout_plan import built
from actors.pieces import pieces_of
from conf.choices import Layout
from conf.errors import ConfigError
from conf.layout import TrainLayout, head_refusal, model_refusal, sliding_window
from conf.schema import Config
from rollout.data import read_object
from weightsync.folder import files_of, without_tied_head

HEADS = ("lm_head.weight", "score.weight")  # what a critic replaces
SHOWN = 4


def check_model(
    key: str,
    path: str,
    cfg: Config,
    layout: TrainLayout,
    shapes: Mapping[str, tuple[int, ...]],
    with_head: bool = True,
) -> dict[str, Any]:
    """The config.json of a folder whose tensors have `shapes`. Raises ConfigError when a role cannot use it."""
    model = read_object(Path(path) / "config.json", key)
    wanted = built_shapes(f"{key}={path}", path)
    require_layout(key, path, model, cfg, layout)
    require_weights(f"{key}={path}", path, model, wanted, shapes, with_head)
    return model


def require_weights(
    where: str,
    path: str,
    config: Mapping[str, Any],
    built: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    with_head: bool,
) -> None:
    """Raises ConfigError unless `shapes` are the tensors of the model, whose `built` ones these should be.

    `with_head`: the head is needed too, and nothing may be there beside what the model has.
    """
    if config.get("quantization_config") is not None:
        raise ConfigError(f"{where}: config.json has a quantization_config; quantized weights cannot be trained")
    wanted, found = without_tied_head(built, config), without_tied_head(shapes, config)
    if not with_head:
        wanted = {name: shape for name, shape in wanted.items() if name not in HEADS}
        found = {name: shape for name, shape in found.items() if name in wanted}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [
        f"{name} has shape {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems += [f"the model has no {name}" for name in found if name not in wanted]
    if problems:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ConfigError(
            f"{where}: its weights are not those of the model that its config.json describes: "
            f"{'; '.join(problems[:SHOWN])}{more}"
        )
    if with_head and config.get("tie_word_embeddings") and "lm_head.weight" in shapes:
        require_same_head(where, Path(path))


def require_layout(key: str, path: str, model: Mapping[str, Any], cfg: Config, layout: TrainLayout) -> None:
    """Raises ConfigError when the model of this config.json cannot be trained, or scored, as the configuration says."""
    where = f"{key}={path}"
    context = model.get("max_position_embeddings")
    if context is not None and cfg.rollout.max_model_len > context:
        raise ConfigError(
            f"rollout.max_model_len={cfg.rollout.max_model_len}, but the model's context is {context} tokens "
            f"(max_position_embeddings, {where})"
        )
    refusal = model_refusal(layout, model) or head_refusal(model)
    if refusal is not None:
        raise ConfigError(f"{refusal} ({where})")
    window = sliding_window(model)
    if cfg.trainer.layout is Layout.shared_prefix and window is not None and window < cfg.rollout.max_model_len:
        raise ConfigError(
            f"trainer.layout=shared_prefix with rollout.max_model_len={cfg.rollout.max_model_len}: the model's "
            f"attention sees {window} tokens only ({where}), which a shared prompt's cache does not keep; use "
            "trainer.layout=padded"
        )
    if layout.tp > 1 and not has_matrix_cuts(str(model.get("model_type"))):
        raise ConfigError(
            f"trainer.tp={layout.tp}: transformers says nothing of how the matrices of a {model.get('model_type')} "
            f"are cut ({where}); spread it with trainer.zero_stage=3 or trainer.sp instead"
        )


def has_matrix_cuts(model_type: str) -> bool:
    """Whether transformers has a plan for tensor parallelism within the layers of this kind of model."""
    from transformers import CONFIG_MAPPING

    plan = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None) if model_type in CONFIG_MAPPING else None
    return any(name.startswith("layers.") for name in plan or {})


def built_shapes(where: str, path: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the folder's model must have. Raises ConfigError when it cannot be built."""
    try:
        lm = built(path)
    except Exception as error:  # whatever odd values make the many model classes raise
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{where}: config.json describes no model that can be built: {told}") from error
    parts = [
        piece
        for name, parameter in lm.named_parameters()
        for piece in pieces_of(name, tuple(parameter.shape), str(lm.config.model_type))
    ]
    return {piece.name: piece.shape for piece in parts}


def require_same_head(where: str, folder: Path) -> None:
    """Raises ConfigError when a folder whose head is said to be its embedding holds another one."""
    tensors = {}
    for name in files_of(folder):
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no iterator)
                if key.endswith(("embed_tokens.weight", "lm_head.weight")):
                    tensors[key.rpartition(".")[0].rpartition(".")[2]] = file.get_tensor(key)
    if "embed_tokens" in tensors and not tensors["embed_tokens"].equal(tensors["lm_head"]):
        raise ConfigError(
            f"{where}: config.json has tie_word_embeddings=true, but lm_head.weight is not the embedding; set it to "
            "false, or remove lm_head.weight from the weights"
        )
