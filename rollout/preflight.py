"""Everything that can be known to be wrong before a process starts: model, data, reward, sizes, disk."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from actors.compiled import missing_tools
from conf.choices import Layout, Optimizer
from conf.errors import ConfigError
from conf.layout import EXPERT_KEYS, head_refusal, model_refusal, sliding_window
from conf.schema import Config, LoraConfig
from rl.plan.memory import ITEM_BYTES, held_bytes, num_adapter_parameters, promised_bytes
from rl.types import Prompt
from rollout.data import load_records, load_tokenizer, read_object, render_demonstrations, render_prompts
from rollout.rewards import check_reward
from rollout.role_models import check_role_models
from weightsync.folder import folder_shapes, without_tied_head

ALWAYS_THERE = ("eager", "sdpa")  # attention of every transformers: no need to import it, which takes seconds
NO_REWARD = "rollout.tasks.nothing.reward"  # of conf/reward/none.yaml

# Bytes of a checkpoint for each trained parameter: fp32 master and two fp32 moments.
CHECKPOINT_BYTES = 12


@dataclass(kw_only=True)
class Prepared:
    """What a run needs of the outside world, checked."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    train: list[Prompt]
    held_out: list[Prompt]
    model: dict[str, Any]  # its config.json
    # Demonstrations of data.path for the warm start; a generator is asked for its own when that begins.
    demonstrations: list[tuple[list[int], list[int]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, special tokens left out: what a reward function sees."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def prepare(cfg: Config) -> Prepared:
    """Loads tokenizer and prompts and checks them against the configuration. Raises ConfigError; starts nothing."""
    tokenizer = load_tokenizer(cfg.model.path)
    model = read_model_config(cfg)
    check_role_models(cfg, tokenizer)
    shapes = model_shapes(Path(cfg.model.path))
    require_described(Path(cfg.model.path), model, shapes)
    require_attention(cfg.model.attention)
    require_targets(cfg.lora, shapes)
    train_rows, eval_rows = load_records(cfg.data, cfg.seed)
    room = cfg.rollout.max_model_len - 1
    train, dropped = render_prompts(train_rows, cfg.data, tokenizer, room)
    held_out, eval_dropped = render_prompts(eval_rows, cfg.data, tokenizer, room) if eval_rows else ([], 0)
    if len(train) < cfg.prompts_per_step:
        raise ConfigError(
            f"prompts_per_step={cfg.prompts_per_step}, but the data holds {len(train)} prompts: "
            "lower prompts_per_step or give more data"
        )
    if cfg.evaluation.every and not held_out:
        raise ConfigError(
            f"evaluation.every={cfg.evaluation.every}, but there are no held-out prompts: "
            "set data.eval_size or data.eval_path, or evaluation.every=0"
        )
    demonstrations = render_demonstrations(cfg.data, cfg.sft, tokenizer, 1, cfg.seed) if cfg.sft.num_steps else []
    warnings = [w for w in (check_reward(cfg.reward, train[0].record),) if w]
    if cfg.evaluation.every and cfg.reward._target_ == NO_REWARD:
        warnings.append(f"reward._target_={NO_REWARD}: evaluation has no reward to report; eval/* will be 0")
    if dropped + eval_dropped:
        warnings.append(f"data.drop_overlong: left out {dropped} training and {eval_dropped} held-out prompts")
    longest = max(len(p.token_ids) for p in train + held_out)
    if longest + cfg.rollout.max_tokens > cfg.rollout.max_model_len:
        warnings.append(
            f"rollout.max_model_len={cfg.rollout.max_model_len}: the longest prompt ({longest} tokens) leaves fewer "
            f"than "
            f"rollout.max_tokens={cfg.rollout.max_tokens} for its completions; they end truncated"
        )
    return Prepared(
        tokenizer=tokenizer,
        stop_token_ids=stop_tokens(Path(cfg.model.path), tokenizer, model),
        shapes=shapes,
        train=train,
        held_out=held_out,
        model=model,
        demonstrations=demonstrations if cfg.data._target_ is None else [],
        warnings=warnings,
    )


def read_model_config(cfg: Config) -> dict[str, Any]:
    """config.json of the model, checked against context length and parallel sizes."""
    path = Path(cfg.model.path) / "config.json"
    model = read_object(path)
    context = model.get("max_position_embeddings")
    if context is not None and cfg.rollout.max_model_len > context:
        raise ConfigError(
            f"rollout.max_model_len={cfg.rollout.max_model_len}, but the model's context is {context} tokens "
            f"(max_position_embeddings in {path})"
        )
    heads = model.get("num_attention_heads")
    for size in cfg.rollout.tp:
        if heads is not None and heads % size:
            raise ConfigError(
                f"rollout.tp={list(cfg.rollout.tp)}: {size} does not divide the model's {heads} attention heads"
            )
    refusal = model_refusal(cfg.train_layout, model) or head_refusal(model)
    if refusal is not None:
        raise ConfigError(f"{refusal} ({path})")
    window = sliding_window(model)
    if cfg.trainer.layout is Layout.shared_prefix and window is not None and window < cfg.rollout.max_model_len:
        raise ConfigError(
            f"trainer.layout=shared_prefix with rollout.max_model_len={cfg.rollout.max_model_len}: the model's "
            f"attention sees {window} tokens only ({path}), which a shared prompt's cache does not keep; use "
            "trainer.layout=padded"
        )
    if cfg.trainer.replay_routing and not any(key in model for key in EXPERT_KEYS):
        raise ConfigError(f"trainer.replay_routing=true: a {model.get('model_type')} has no experts ({path})")
    if cfg.trainer.tp > 1 and not has_matrix_cuts(str(model.get("model_type"))):
        raise ConfigError(
            f"trainer.tp={cfg.trainer.tp}: transformers says nothing of how the matrices of a {model.get('model_type')}"
            f" are cut ({path}); spread it with trainer.zero_stage=3 or trainer.sp instead"
        )
    return model


def has_matrix_cuts(model_type: str) -> bool:
    """Whether transformers has a plan for tensor parallelism within the layers of this kind of model."""
    from transformers import CONFIG_MAPPING

    plan = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None) if model_type in CONFIG_MAPPING else None
    return any(name.startswith("layers.") for name in plan or {})


def require_described(folder: Path, model: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError unless config.json names a kind of model, and has the sizes of the weights beside it."""
    path = folder / "config.json"
    if not isinstance(model.get("model_type"), str):
        raise ConfigError(f"{path}: no model_type; it must be the config.json of a Hugging Face model")
    embedding = next((shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), None)
    described = (model.get("vocab_size"), model.get("hidden_size"))
    if embedding is not None and None not in described and embedding != described:
        raise ConfigError(
            f"{path}: vocab_size={described[0]} and hidden_size={described[1]}, but the weights beside it embed "
            f"{embedding[0]} tokens in {embedding[1]} numbers: they are of another model"
        )


def require_attention(name: str) -> None:
    """Raises ConfigError for an attention implementation that transformers does not have, or cannot import here."""
    if name in ALWAYS_THERE:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import is_flash_attn_2_available

    choices = ["eager", *(n for n in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in n)]
    if name not in choices:
        raise ConfigError(f"model.attention={name}: must be one of {', '.join(sorted(set(choices)))}")
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError("model.attention=flash_attention_2: the package flash-attn is not installed; use sdpa")


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face folder. Raises ConfigError when there are no weights."""
    try:
        return folder_shapes(folder)
    except Exception as error:
        raise ConfigError(f"model.path={folder}: its weights (safetensors) cannot be read: {error}") from error


def stop_tokens(folder: Path, tokenizer: Any, model: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's eos, and those of config.json and generation_config.json."""
    found: list[Any] = [tokenizer.eos_token_id, model.get("eos_token_id")]
    path = folder / "generation_config.json"
    if path.exists():
        found.append(read_object(path).get("eos_token_id"))
    flat = [i for item in found for i in (item if isinstance(item, list) else [item]) if i is not None]
    if any(not isinstance(i, int) for i in flat):
        raise ConfigError(f"model.path={folder}: eos_token_id in config.json or {path.name}: {flat}: must be token ids")
    return tuple(sorted(set(flat)))


def require_targets(lora: LoraConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ConfigError when `lora.targets` names matrices that the model does not have."""
    layers = {name.split(".")[-2] for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name}
    unknown = [target for target in lora.targets if target not in layers]
    if unknown:
        raise ConfigError(
            f"lora.targets={list(lora.targets)}: no matrix of the model is called {', '.join(unknown)}; "
            f"it has {', '.join(sorted(layers))}"
        )


def require_memory(cfg: Config, shapes: Mapping[str, tuple[int, ...]], model: Mapping[str, Any], device: str) -> None:
    """Raises ConfigError when this machine cannot hold what its training ranks will: on a CPU all of their state, on
    GPUs what is offloaded to the host or sleeps there; or, on a CPU, the engines' caches.

    A cluster that is joined is not looked at.
    """
    if cfg.cluster.address is not None:
        return
    have = psutil.virtual_memory().total
    shapes = without_tied_head(shapes, model)
    layout = cfg.train_layout
    wanted = 0.0
    for role in ["policy", *["critic"] * cfg.algo.has_critic]:
        wanted += held_bytes(cfg, role, shapes).total * layout.ranks
        if device == "cuda" and not cfg.cluster.sleep:
            wanted -= promised_bytes(cfg, role, shapes, device).total * layout.ranks
    if wanted > have:
        raise ConfigError(
            f"trainer.zero_stage={layout.zero_stage}, cluster.train_ranks={layout.ranks}, trainer.offload_optimizer="
            f"{str(layout.offload_optimizer).lower()}: {layout.ranks} ranks of this model hold {wanted / 1e9:.1f} GB "
            f"in this machine's memory, which has {have / 1e9:.1f} GB; use a higher ZeRO stage, fewer ranks, "
            "lora.rank, or more machines"
        )
    caches = cfg.rollout.kv_cache_bytes * cfg.cluster.rollout_engines
    if device == "cpu" and caches > have:
        raise ConfigError(
            f"rollout.kv_cache_bytes={cfg.rollout.kv_cache_bytes} with cluster.rollout_engines="
            f"{cfg.cluster.rollout_engines}: {caches / 1e9:.1f} GB, but this machine has {have / 1e9:.1f} GB"
        )


def require_compilers(cfg: Config, device: str) -> None:
    """Raises ConfigError when something is to be compiled that cannot be, or could not run, on this device.

    The tools of a cluster that is joined are not looked at.
    """
    cpu_adam = cfg.trainer.optimizer is Optimizer.cpu_adam
    if cpu_adam and device == "cuda" and not cfg.trainer.offload_optimizer:
        raise ConfigError(
            "trainer.optimizer=cpu_adam with trainer.offload_optimizer=false on a GPU: it works on weights in host "
            "memory; use trainer.offload_optimizer=true, or trainer.optimizer=adamw"
        )
    if cfg.cluster.address is not None:
        return
    for asked, key, tools, instead in (
        (cpu_adam, "trainer.optimizer=cpu_adam", ("c++", "ninja"), "trainer.optimizer=adamw"),
        (
            cfg.trainer.fused_logprobs,
            "trainer.fused_logprobs=true",
            ("g++",) if device == "cpu" else ("cc",),
            "trainer.fused_logprobs=false",
        ),
    ):
        missing = missing_tools(tools) if asked else []
        if missing:
            raise ConfigError(
                f"{key}: it is compiled on this machine, where {' and '.join(missing)} cannot be found; install them "
                f"(apt-get install g++, pip install ninja), or use {instead}"
            )


def require_disk(cfg: Config, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ConfigError when the disk of the run folder, which need not exist yet, cannot hold one more checkpoint
    (and the export) of this model.
    """
    run_dir = Path(cfg.run_dir or (cfg.resume if cfg.resume not in ("auto", "never") else "runs")).absolute()
    disk = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    parameters = sum(math.prod(shape) for shape in shapes.values())
    trained = parameters if cfg.lora.rank == 0 else num_adapter_parameters(cfg.lora, shapes)
    trained += parameters * cfg.algo.has_critic
    saves = cfg.checkpoint.every > 0 or cfg.checkpoint.at_end
    wanted = trained * CHECKPOINT_BYTES * saves
    wanted += parameters * ITEM_BYTES[cfg.trainer.dtype] * cfg.checkpoint.export
    free = shutil.disk_usage(disk).free
    if free < wanted:
        raise ConfigError(
            f"{run_dir}: {free / 1e9:.1f} GB free, but one checkpoint and the export of this model "
            f"need {wanted / 1e9:.1f} GB; "
            "set run_dir to a larger disk, or checkpoint.at_end=false, checkpoint.every=0 and checkpoint.export=false"
        )
