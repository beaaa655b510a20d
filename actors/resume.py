"""Where a run continues: which folder, which checkpoint, and whether the configuration still means the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from actors.checkpoint import SEPARATOR, files_of, find_whole, read_manifest, verify
from actors.lora import adapter_names, lora_of
from conf.errors import ConfigError
from conf.schema import Config
from rl.faults import CheckpointError
from rl.run_folder import resolve_run_dir

# Keys that may change between the parts of one run: where and how fast it runs, not what it learns.
FREE = (
    "num_steps", "run_dir", "resume", "checkpoint", "tracking", "evaluation", "cluster", "sync",
    "trainer.zero_stage", "trainer.layout", "trainer.micro_batch_tokens", "trainer.logprob_chunk_tokens",
    "trainer.sp", "trainer.tp", "trainer.ep", "trainer.hpz", "trainer.offload_optimizer", "trainer.offload_parameters",
    "trainer.recompute", "trainer.num_threads", "trainer.timeout_s", "trainer.fused_logprobs",
    "rollout.tp", "rollout.pp", "rollout.max_num_seqs", "rollout.kv_cache_bytes", "rollout.gpu_memory_utilization",
    "rollout.prefix_caching", "rollout.num_threads", "rollout.deadline_s", "rollout.mismatch_limit",
    "reward.deadline_s", "reward.num_workers", "model.attention",
)  # fmt: skip

# Values that may change into one another: they compute the same.
SAME = {"trainer.optimizer": {"cpu_adam": "adamw"}}


@dataclass(kw_only=True)
class Start:
    """Where a run begins: its folder, and the checkpoint that it continues (or None) with its manifest."""

    run_dir: Path
    checkpoint: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


def resolve_start(cfg: Config, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Start:
    """Folder and checkpoint of this run. Raises ConfigError when `resume` names something that cannot be continued."""
    if cfg.resume not in ("auto", "never"):
        folder = as_checkpoint(Path(cfg.resume))
        manifest = read_manifest(folder)
        require_same_model(folder, manifest, shapes)
        changed = differences(manifest["config"], config)
        if changed and not cfg.checkpoint.force:
            raise ConfigError(
                f"resume={cfg.resume}: the configuration differs in what is learnt:\n  "
                + "\n  ".join(changed)
                + "\nGive the same values, or checkpoint.force=true"
            )
        run_dir = resolve_run_dir(cfg.name, cfg.run_dir or folder.parent.parent, "never")
        return Start(run_dir=run_dir, checkpoint=folder, manifest=manifest)
    messages: list[str] = []
    newest_of = cache(find_whole)  # reads every byte

    def continues(folder: Path) -> bool:
        newest, warnings = newest_of(folder / "checkpoints")
        messages.extend(warnings)
        if newest is None:
            return False
        manifest = read_manifest(newest)
        changed = differences(manifest["config"], config)
        if changed and not cfg.checkpoint.force:
            messages.append(
                f"resume=auto: {folder.name} was run with another configuration ({changed[0]}); starting anew"
            )
            return False
        return int(manifest["step"]) < cfg.num_steps

    run_dir = resolve_run_dir(cfg.name, cfg.run_dir, cfg.resume, continues=continues)
    start = Start(run_dir=run_dir, messages=list(dict.fromkeys(messages)))
    if cfg.resume == "never":
        return start
    newest, warnings = newest_of(run_dir / "checkpoints")
    start.messages = list(dict.fromkeys([*start.messages, *warnings]))
    if newest is None:
        return start
    manifest = read_manifest(newest)
    require_same_model(newest, manifest, shapes)
    changed = differences(manifest["config"], config)
    if changed and not cfg.checkpoint.force:
        raise ConfigError(
            f"run_dir={run_dir}: its checkpoint was made with another configuration:\n  "
            + "\n  ".join(changed)
            + "\nGive the same values, checkpoint.force=true, resume=never, or another run_dir"
        )
    start.checkpoint, start.manifest = newest, manifest
    return start


def as_checkpoint(path: Path) -> Path:
    """`path` as a verified checkpoint: itself, or the newest whole one of a run folder. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"resume={path}: no such folder")
    if (path / "checkpoints").is_dir():
        newest, warnings = find_whole(path / "checkpoints")
        if newest is None:
            raise ConfigError(f"resume={path}: no whole checkpoint in it" + "".join(f"\n  {w}" for w in warnings))
        return newest
    try:
        verify(path)
    except CheckpointError as error:
        raise ConfigError(f"resume={path}: {error}") from error
    return path


def require_same_model(folder: Path, manifest: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError unless the checkpoint's parameters are those of the model folder."""
    saved = {
        key.split(SEPARATOR)[0]: tuple(shape)
        for entry in files_of(manifest, "policy")
        for key, shape in entry["tensors"].items()
        if key.endswith(f"{SEPARATOR}master")
    }
    if lora_of(manifest["config"]).rank > 0:
        require_same_base(folder, saved, shapes)
        return
    wrong = [
        f"{n}: {s} in the checkpoint, {shapes.get(n, 'nothing')} in model.path"
        for n, s in saved.items()
        if shapes.get(n) != s
    ]
    # A tied head is in some folders and never in a checkpoint; buffers neither.
    wrong += [
        f"{n}: nothing in the checkpoint, {s} in model.path"
        for n, s in shapes.items()
        if n not in saved and n.endswith(".weight") and n != "lm_head.weight"
    ]
    if wrong:
        raise ConfigError(f"{folder} is of another architecture than model.path:\n  " + "\n  ".join(wrong[:5]))


def require_same_base(
    folder: Path, adapters: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ConfigError unless the checkpoint's adapters fit matrices of the model folder."""
    for name, shape in shapes.items():
        a, b = adapter_names(name)
        if a in adapters and (adapters[b][0], adapters[a][1]) != shape:
            raise ConfigError(f"{folder}: its adapter of {name} fits {adapters[b][0]} x {adapters[a][1]}, not {shape}")
    fitting = {adapter for name in shapes for adapter in adapter_names(name)}
    strange = [name for name in adapters if name not in fitting]
    if strange:
        raise ConfigError(f"{folder} is of another architecture than model.path: it has no place for {strange[:3]}")


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys that change what is learnt and differ, as `key: old -> new`."""
    out = []
    for key in sorted(set(saved) | set(now)):
        path = f"{prefix}{key}"
        if path in FREE:
            continue
        old, new = (SAME.get(path, {}).get(str(value), value) for value in (saved.get(key), now.get(key)))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            out += differences(old, new, f"{path}.")
        elif old != new:
            out.append(f"{path}: {old} -> {new}")
    return out
