"""Everything that can be known to be wrong before a process starts: model, data, reward, sizes, disk."""

import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from actors.compiled import missing_tools
from conf.choices import Channel, Optimizer, Quantization
from conf.errors import ConfigError
from conf.layout import EXPERT_KEYS
from conf.schema import NO_REWARD, Config, LoraConfig, RolloutConfig
from rl.faults import SyncError
from rl.plan.memory import ITEM_BYTES, held_bytes, num_adapter_parameters, promised_bytes
from rl.run_folder import nearest_folder
from rl.types import Prompt
from rollout.data import (
    load_records,
    load_tokenizer,
    read_object,
    render_demonstrations,
    render_prompts,
    require_model_folder,
)
from rollout.preflight.environment import PreparedEnv, make_tasks, prepare_env, try_first_task
from rollout.preflight.model_folder import check_model
from rollout.preflight.role_models import check_role_models, read_shapes
from rollout.rewards import check_reward
from weightsync.channels.disk import KEPT, bytes_there, claim
from weightsync.folder import without_tied_head
from weightsync.plan import PlanError
from weightsync.saved_plan import require_sizes
from weightsync.sides import VERSIONS_KEPT

ATTENTION = ("sdpa", "eager", "flash_attention_2")
VOCABULARY_STEP = 64  # vLLM pads the vocabulary to a multiple of it

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
    env: PreparedEnv | None = None

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, special tokens left out: what a reward function sees."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def prepare(cfg: Config) -> Prepared:
    """Loads tokenizer and prompts and checks them against the configuration. Raises ConfigError; starts nothing."""
    require_model_folder(cfg.model.path)
    shapes = read_shapes("model.path", cfg.model.path)
    model = read_model_config(cfg, shapes)
    tokenizer = load_tokenizer(cfg.model.path)
    require_vocabulary(cfg.model.path, tokenizer, shapes)
    check_role_models(cfg, tokenizer)
    require_attention(cfg)
    require_targets(cfg.lora, shapes)
    env = prepare_env(cfg, tokenizer) if cfg.env._target_ else None
    dropped = eval_dropped = 0
    if env is not None:
        train, held_out = make_tasks(cfg)
    else:
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
    demonstrations = []
    if cfg.sft.num_steps and env is None:
        demonstrations = render_demonstrations(cfg.data, cfg.sft, tokenizer, 1, cfg.seed)
    warnings = [w for w in (check_reward(cfg.reward, train[0].record),) if w and env is None]
    if cfg.evaluation.every and cfg.reward._target_ == NO_REWARD and env is None:
        warnings.append(f"reward._target_={NO_REWARD}: evaluation has no reward to report; eval/* will be 0")
    if dropped + eval_dropped:
        warnings.append(f"data.drop_overlong: left out {dropped} training and {eval_dropped} held-out prompts")
    longest = max(len(p.token_ids) for p in train + held_out)
    if env is not None:
        longest = try_first_task(cfg, env, tokenizer, train[0])
    if longest + cfg.rollout.max_tokens > cfg.rollout.max_model_len:
        warnings.append(
            f"rollout.max_model_len={cfg.rollout.max_model_len}: the longest prompt ({longest} tokens) leaves fewer "
            f"than "
            f"rollout.max_tokens={cfg.rollout.max_tokens} for its completions; they end truncated"
        )
    return Prepared(
        tokenizer=tokenizer,
        stop_token_ids=stop_tokens(Path(cfg.model.path), tokenizer, model, env.stop_token_id if env else None),
        shapes=shapes,
        train=train,
        held_out=held_out,
        model=model,
        demonstrations=demonstrations if cfg.data._target_ is None else [],
        warnings=warnings,
        env=env,
    )


def read_model_config(cfg: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """config.json of the model, checked against its weights, context length and parallel sizes."""
    path = Path(cfg.model.path) / "config.json"
    require_described(Path(cfg.model.path), read_object(path), shapes)
    model = check_model("model.path", cfg.model.path, cfg, cfg.train_layout, shapes)
    require_engine_sizes(cfg.rollout, model)
    if cfg.trainer.replay_routing and not any(key in model for key in EXPERT_KEYS):
        raise ConfigError(
            f"trainer.replay_routing=true: a {model.get('model_type')} has no experts (model.path={cfg.model.path})"
        )
    return model


def require_engine_sizes(rollout: RolloutConfig, model: Mapping[str, Any]) -> None:
    """Raises ConfigError when an engine cannot cut this model as it should."""
    heads = model.get("num_attention_heads")
    for size in rollout.tp:
        if heads is not None and heads % size:
            raise ConfigError(
                f"rollout.tp={list(rollout.tp)}: {size} does not divide the model's {heads} attention heads"
            )
        padded = -(-int(model.get("vocab_size", 0)) // VOCABULARY_STEP) * VOCABULARY_STEP
        if padded % size:
            raise ConfigError(
                f"rollout.tp={list(rollout.tp)}: {size} does not divide the vocabulary, which vLLM pads to {padded}"
            )
    experts: Any = next((model[key] for key in EXPERT_KEYS if model.get(key)), None)
    if rollout.quantization is Quantization.int8 and experts is None:
        raise ConfigError(
            f"rollout.quantization=int8: vLLM rounds experts to int8, and a {model.get('model_type')} has none; "
            "use none"
        )
    if rollout.ep and experts is None:
        raise ConfigError(
            f"rollout.ep=true: a {model.get('model_type')} has no experts (config.json has none of "
            f"{', '.join(EXPERT_KEYS)}); use rollout.ep=false"
        )
    if rollout.ep and max(rollout.tp) > experts:
        raise ConfigError(
            f"rollout.ep=true with rollout.tp={list(rollout.tp)}: more members than the model's {experts} experts; "
            "use a smaller size"
        )
    layers = model.get("num_hidden_layers")
    for size in rollout.pp:
        if layers is not None and size > layers:
            raise ConfigError(f"rollout.pp={list(rollout.pp)}: {size} stages, but the model has {layers} layers")


def require_engine_device(rollout: RolloutConfig, device: str) -> None:
    """Raises ConfigError for what vLLM cannot run on this device."""
    if rollout.ep and device == "cpu":
        raise ConfigError(
            "rollout.ep=true on a CPU: vLLM's kernel for experts there knows nothing of experts that are elsewhere, "
            "and its process dies in the first forward; use rollout.ep=false, or GPUs (cluster.device=cuda)"
        )
    if rollout.quantization is not Quantization.none and device == "cpu":
        raise ConfigError(
            f"rollout.quantization={rollout.quantization.value} on a CPU: vLLM's build for CPUs has no kernel that "
            "rounds weights as they are loaded; use rollout.quantization=none, or GPUs (cluster.device=cuda)"
        )


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


def require_attention(cfg: Config) -> None:
    """Raises ConfigError for an attention implementation that is not known, not here, or not for this layout."""
    name = cfg.model.attention
    if name not in ATTENTION:
        raise ConfigError(f"model.attention={name}: must be one of {', '.join(ATTENTION)}")
    if cfg.trainer.sp > 1 and name == "eager":
        raise ConfigError(
            f"model.attention=eager with trainer.sp={cfg.trainer.sp}: ranks that share rows need sdpa or "
            "flash_attention_2"
        )
    if name == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise ConfigError("model.attention=flash_attention_2: the package flash-attn is not installed; use sdpa")


def require_vocabulary(path: str, tokenizer: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError when the tokenizer gives ids that the model does not have."""
    size = next(shape[0] for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))
    most = max(tokenizer.get_vocab().values())
    if most >= size:
        raise ConfigError(
            f"model.path={path}: its tokenizer has ids up to {most}, but the model has {size} tokens (vocab_size in "
            "config.json); one of them is another model's"
        )


def stop_tokens(folder: Path, tokenizer: Any, model: dict[str, Any], end_of_turn: int | None = None) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's eos, those of config.json and generation_config.json, and the chat
    template's end of turn, where there are further turns."""
    found: list[Any] = [tokenizer.eos_token_id, model.get("eos_token_id"), end_of_turn]
    path = folder / "generation_config.json"
    if path.exists():
        found.append(read_object(path).get("eos_token_id"))
    flat = [i for item in found for i in (item if isinstance(item, list) else [item]) if i is not None]
    if any(not isinstance(i, int) or not 0 <= i < model["vocab_size"] for i in flat):
        raise ConfigError(f"model.path={folder}: eos_token_id in config.json or {path.name}: {flat}: must be token ids")
    return tuple(sorted(set(flat)))


def require_targets(lora: LoraConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ConfigError when `lora.targets` names matrices that the model does not have."""
    layers = {name.split(".")[-2] for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name}
    experts = {name.split(".")[-2] for name in shapes if ".experts." in name}
    layers -= experts
    if bad := [target for target in lora.targets if target in experts]:
        raise ConfigError(
            f"lora.targets={list(lora.targets)}: {', '.join(bad)} are matrices of experts, which adapters do not "
            f"reach; leave them out, or choose among {', '.join(sorted(layers))}"
        )
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
    if cfg.sync.snapshot:
        wanted += VERSIONS_KEPT * snapshot_bytes(cfg, shapes)
    if wanted > have:
        raise ConfigError(
            f"trainer.zero_stage={layout.zero_stage}, cluster.train_ranks={layout.ranks}, trainer.offload_optimizer="
            f"{str(layout.offload_optimizer).lower()}: {layout.ranks} ranks of this model hold {wanted / 1e9:.1f} GB "
            f"in this machine's memory, which has {have / 1e9:.1f} GB; use a higher ZeRO stage, fewer ranks, "
            "lora.rank, sync.snapshot=false, or more machines"
        )
    caches = cfg.rollout.kv_cache_bytes * cfg.cluster.rollout_engines
    if device == "cpu" and caches > have:
        raise ConfigError(
            f"rollout.kv_cache_bytes={cfg.rollout.kv_cache_bytes} with cluster.rollout_engines="
            f"{cfg.cluster.rollout_engines}: {caches / 1e9:.1f} GB, but this machine has {have / 1e9:.1f} GB"
        )


def snapshot_bytes(cfg: Config, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Bytes of one copy, by all ranks, of the weights that each of them holds and trains."""
    weights = held_bytes(cfg, "policy", shapes).weights
    return weights * cfg.train_layout.ranks if cfg.lora.rank == 0 else 0.0


def require_channel(cfg: Config, device: str) -> None:
    """Raises ConfigError when weights cannot travel as they are to: on this device, by this plan, or through this
    folder, which is made."""
    if cfg.sync.channel is Channel.ipc and device != "cuda":
        raise ConfigError(f"sync.channel=ipc on {device}: it is memory of a GPU; use sync.channel=shm")
    if cfg.sync.plan is not None:
        try:
            require_sizes(Path(cfg.sync.plan), cfg.cluster.train_ranks, cfg.sync.slot_bytes)
        except PlanError as error:
            raise ConfigError(f"sync.plan={cfg.sync.plan}: {error}") from error
    if cfg.sync.folder is not None:
        folder = Path(cfg.sync.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"sync.folder={folder}: nothing can be written there ({error.strerror})") from error


def require_own_folder(cfg: Config, run_dir: Path) -> None:
    """Raises ConfigError when sync.folder holds the versions of another run than that in `run_dir`; else notes that
    they are this run's."""
    if cfg.sync.folder is not None:
        try:
            claim(Path(cfg.sync.folder), run_dir)
        except SyncError as error:
            raise ConfigError(str(error)) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"sync.folder={cfg.sync.folder}: {error}") from error


def require_version_room(
    cfg: Config, shapes: Mapping[str, tuple[int, ...]], model: Mapping[str, Any], pushes: int
) -> None:
    """Raises ConfigError when the disk of sync.folder cannot hold the versions that `pushes` pushes leave there at
    once: those that are kept, and one that is being written. What is there already counts as room.

    With sync.delta only whole ones are counted: nobody knows how much will change.
    """
    if cfg.sync.folder is None:
        return
    root, sync = Path(cfg.sync.folder), cfg.sync
    versions = min(pushes, 1 + (pushes > sync.full_every) if sync.delta else KEPT + 1)
    item = min(ITEM_BYTES[cfg.trainer.dtype], ITEM_BYTES[cfg.rollout.dtype])
    wanted = versions * item * sum(math.prod(shape) for shape in without_tied_head(shapes, model).values())
    usage = shutil.disk_usage(root)
    free = usage.free + bytes_there(root)
    if free < wanted and usage.total:  # some file systems tell no sizes
        raise ConfigError(
            f"sync.folder={root}: {free / 1e6:,.1f} MB free, what earlier versions there take included, but {versions} "
            f"version{'s' * (versions > 1)} of this model, of which one is being written, need {wanted / 1e6:,.1f} MB; "
            "make room, or give a sync.folder on a larger disk"
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
    parameters = sum(math.prod(shape) for shape in shapes.values())
    trained = parameters if cfg.lora.rank == 0 else num_adapter_parameters(cfg.lora, shapes)
    trained += parameters * cfg.algo.has_critic
    saves = cfg.checkpoint.every > 0 or cfg.checkpoint.at_end
    wanted = trained * CHECKPOINT_BYTES * saves
    wanted += parameters * ITEM_BYTES[cfg.trainer.dtype] * cfg.checkpoint.export
    free = shutil.disk_usage(nearest_folder(run_dir)).free
    if free < wanted:
        raise ConfigError(
            f"{run_dir}: {free / 1e9:.1f} GB free, but one checkpoint and the export of this model "
            f"need {wanted / 1e9:.1f} GB; "
            "set run_dir to a larger disk, or checkpoint.at_end=false, checkpoint.every=0 and checkpoint.export=false"
        )
