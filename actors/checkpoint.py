"""Topology-free checkpoints: written aside, synced, verified, published by rename.

    step_000020/
      manifest.json          format, step, tensors (name, shape, file), files (bytes, crc32), run state, configuration
      policy-00000-00000.safetensors ...    fp32 master, exp_avg, exp_avg_sq of whole parameters, under "<name>|<kind>"
      critic-00000-00000.safetensors ...    the same of the critic, where there is one
      reference/             the reference policy as a Hugging Face folder, once it is no longer the first one
      model/                 config.json and tokenizer, so that the checkpoint can be evaluated and exported by itself

No file knows the ZeRO stage or the number of ranks that wrote it. A folder without a manifest is not a checkpoint.
"""

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from actors.engine import Engine
from actors.lora import lora_of, merge_all
from actors.weights import State, full_state, load_full_state, set_optimizer_step, trained_moments, trained_shapes
from conf.errors import ConfigError
from rl.faults import CheckpointError
from rl.run_folder import write_json
from weightsync.files import sync_file

FORMAT = 2
# Bytes after which a rank begins a new shard file: bounds the memory that a save needs.
SHARD_BYTES = 1 << 30
SEPARATOR = "|"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)


def write_shards(folder: Path, role: str, engine: Engine, rank: int, world: int) -> list[dict[str, Any]]:
    """Writes the parameters that fall to this rank, whole; returns [{role, file, nbytes, crc, tensors}]. Collective."""
    pending: dict[str, torch.Tensor] = {}
    entries: list[dict[str, Any]] = []

    def flush() -> None:
        if pending:
            path = folder / f"{role}-{rank:05d}-{len(entries):05d}.safetensors"
            save_file(pending, path)
            sync_file(path)
            shapes = {name: list(tensor.shape) for name, tensor in pending.items()}
            size, crc = path.stat().st_size, file_crc(path)
            entries.append({"role": role, "file": path.name, "nbytes": size, "crc": crc, "tensors": shapes})
            pending.clear()

    for index, (name, state) in enumerate(full_state(engine)):
        if index % world == rank:
            for kind, tensor in state.items():
                pending[f"{name}{SEPARATOR}{kind}"] = tensor.detach().float().cpu().clone().contiguous()
            if sum(t.nbytes for t in pending.values()) >= SHARD_BYTES:
                flush()
    flush()
    return entries


def read_shards(folder: Path, role: str, engine: Engine) -> None:
    """Loads every parameter's master weights and moments of a role, and its optimizer's step. Collective.

    Raises CheckpointError when a tensor is missing, or shapes or optimizer are not this engine's.
    """
    manifest = read_manifest(folder)
    place = {name: entry["file"] for entry in files_of(manifest, role) for name in entry["tensors"]}
    saved = {name.split(SEPARATOR)[0]: None for name in place}
    shapes, moments = trained_shapes(engine), trained_moments(engine)
    unknown, missing = [n for n in saved if n not in shapes], [n for n in shapes if n not in saved]
    if unknown or missing:
        raise CheckpointError(
            f"{folder} is of another architecture: it lacks {missing[:3] or 'nothing'}, "
            f"this model lacks {unknown[:3] or 'nothing'}"
        )

    def read(name: str) -> State:
        state = {}
        for kind in ("master", *moments[name]):
            key = f"{name}{SEPARATOR}{kind}"
            if key not in place:
                raise CheckpointError(
                    f"{folder} holds no {kind} of {name}: it was saved with another trainer.optimizer"
                )
            with safe_open(folder / place[key], framework="pt") as tensors:
                state[kind] = tensors.get_tensor(key)
            if tuple(state[kind].shape) != shapes[name]:
                raise CheckpointError(
                    f"{folder}: {name} has shape {tuple(state[kind].shape)}, this model's has {shapes[name]}"
                )
        return state

    load_full_state(engine, read)
    set_optimizer_step(engine, manifest["roles"][role]["optimizer_step"])


def files_of(manifest: Mapping[str, Any], role: str) -> list[dict[str, Any]]:
    """The files of one role. Raises CheckpointError when there are none."""
    found = [entry for entry in manifest["files"] if entry["role"] == role]
    if not found:
        raise CheckpointError(f"the checkpoint of step {manifest['step']} holds no {role}; it was saved without one")
    return found


def publish(
    root: Path,
    step: int,
    write: Any,
    run_state: Mapping[str, Any],
    config: Mapping[str, Any],
    model_path: Path,
    keep: int,
    reference: Path | None = None,
) -> Path:
    """Makes checkpoint `root/step_<step>`: `write(folder) -> (entries, extra)` has the ranks write their shards aside.

    Everything is synced to disk and verified before the rename; older checkpoints beyond `keep` go only afterwards.
    A failure (a full disk) removes the half-written folder and leaves the older ones as they are.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step_{step:06d}"
    aside = root / f".writing-{final.name}-{uuid.uuid4().hex[:8]}"
    aside.mkdir()
    try:
        entries, extra = write(aside)
        copy_model_files(model_path, aside / "model")
        if reference is not None:
            entries = entries + copy_reference(reference, aside)
        for entry in entries:
            verify_file(aside, entry)
        write_json(
            aside / "manifest.json",
            {
                "format": FORMAT,
                "step": step,
                "files": entries,
                "run_state": dict(run_state),
                "config": dict(config),
                **extra,
            },
        )
        replaced = root / f".replaced-{aside.name}"
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
        sync_file(root)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(
                f"checkpoint {final} could not be written: {error}; older ones are unchanged"
            ) from error
        raise
    for left in root.glob(".*-step_*"):  # of this save, and of one that was killed
        shutil.rmtree(left)
    published = list_checkpoints(root)
    place = published.index(final)
    # Later ones belong to a branch that this run has left, by falling back behind a broken one or by resume=PATH.
    for other in published[place + 1 :] + (published[: max(0, place + 1 - keep)] if keep > 0 else []):
        shutil.rmtree(other)
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(p for p in root.glob("step_*") if p.is_dir()) if root.is_dir() else []


def find_whole(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a warning for each newer one that does not."""
    warnings = []
    for folder in reversed(list_checkpoints(root)):
        try:
            verify(folder)
        except CheckpointError as error:
            warnings.append(f"{error}; looking for an older one")
        else:
            return folder, warnings
    return None, warnings


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CheckpointError when there is none or it cannot be read.

    Raises ConfigError when it is whole but of another format: that is no broken checkpoint to fall back behind.
    """
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: {path.name} cannot be read ({error})") from error
    fields = {"format": object, "step": int, "files": list, "run_state": dict, "config": dict}
    wrong = [key for key, kind in fields.items() if not isinstance(manifest, dict) or key not in manifest]
    wrong = wrong or [key for key, kind in fields.items() if not isinstance(manifest[key], kind)]
    if wrong or manifest["format"] is None:
        raise CheckpointError(f"{folder} is no checkpoint: {path.name} lacks {', '.join(wrong) or 'its format'}")
    if manifest["format"] != FORMAT:
        raise ConfigError(
            f"{folder} has format {manifest['format']}, this version reads {FORMAT}: resume=never, another run_dir, or "
            "the version that wrote it"
        )
    return manifest


def verify(folder: Path) -> None:
    """Raises CheckpointError unless every file is there, of the right size and checksum."""
    for entry in read_manifest(folder)["files"]:
        verify_file(folder, entry)


def verify_file(folder: Path, entry: Mapping[str, Any]) -> None:
    path = folder / entry["file"]
    if not path.is_file():
        raise CheckpointError(f"checkpoint {folder} is broken: {path.name} is missing")
    size = path.stat().st_size
    if size != entry["nbytes"]:
        raise CheckpointError(
            f"checkpoint {folder} is broken: {path.name} has {size} bytes, {entry['nbytes']} were written"
        )
    crc = file_crc(path)
    if crc != entry["crc"]:
        raise CheckpointError(
            f"checkpoint {folder} is broken: {path.name} has crc {crc:08x}, {entry['crc']:08x} was written"
        )


def copy_reference(source: Path, folder: Path) -> list[dict[str, Any]]:
    """Puts the reference's folder into a checkpoint; returns the manifest entries of its files."""
    shutil.copytree(source, folder / "reference", copy_function=link_or_copy)
    entries = []
    for path in sorted((folder / "reference").iterdir()):
        sync_file(path)
        name, size = f"reference/{path.name}", path.stat().st_size
        entries.append({"role": "reference", "file": name, "nbytes": size, "crc": file_crc(path), "tensors": {}})
    return entries


def link_or_copy(source: str, target: str) -> None:
    """A hard link where the file system allows it: the folder is written once and never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def copy_model_files(source: Path, target: Path) -> None:
    """Copies configuration and tokenizer of a Hugging Face folder, without its weights."""
    target.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def export_hf(folder: Path, out: Path) -> Path:
    """Writes a checkpoint's policy as a Hugging Face folder, in the dtype of its config; needs no DeepSpeed.

    Adapters are merged into the model that they were trained on, whose folder must still be there.
    """
    manifest = read_manifest(folder)
    dtype = getattr(torch, manifest["config"]["trainer"]["dtype"])
    weights: dict[str, torch.Tensor] = {}
    for entry in files_of(manifest, "policy"):
        with safe_open(folder / entry["file"], framework="pt") as tensors:
            for key in entry["tensors"]:
                name, kind = key.split(SEPARATOR)
                if kind == "master":
                    weights[name] = tensors.get_tensor(key).to(dtype).contiguous()
    lora = lora_of(manifest["config"])
    if lora.rank > 0:
        base = {name: tensor.to(dtype) for name, tensor in read_folder(Path(manifest["base"])).items()}
        weights = merge_all(base, weights, lora.scale)
    return write_hf(weights, folder / "model", out)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder. Raises CheckpointError when there are none."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise CheckpointError(f"{folder}: no weights there; the checkpoint's adapters belong to that model")
    return found


def write_hf(weights: dict[str, torch.Tensor], model_files: Path, out: Path) -> Path:
    """Writes weights, and the configuration and tokenizer of `model_files`, as the Hugging Face folder `out`."""
    aside = out.with_name(f".writing-{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        copy_model_files(model_files, aside)
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        sync_file(aside / "model.safetensors")
        if out.exists():
            shutil.rmtree(out)
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return out


def file_crc(path: Path) -> int:
    """crc32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc
