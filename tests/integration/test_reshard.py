"""Files resharded between layouts hold what ranks and workers of these layouts hold; vLLM itself loads them.

What is right is computed anew: by cutting whole tensors with torch, and by vLLM's own weight loaders on real tensors.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.layout_plan import trained_model
from conf.choices import Channel
from conf.errors import ConfigError
from conf.schema import ClusterConfig, Config, LoraConfig, RolloutConfig, SyncConfig, TrainerConfig
from rollout.engine import engine_config
from scripts.benchmarks.sync_matrix import config_of, layouts, model_folder
from scripts.reshard import lock, main, reshard, written_aside
from tests.integration.real import hf_logprobs, load_hf, random_folder, random_ids
from tests.integration.scripts import ROOT
from weightsync.held import held_regions

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

BUCKET_BYTES = 1 << 16


def config(ranks: int = 1, **trainer: Any) -> Config:
    return Config(
        prompts_per_step=24,  # rows for every number of ranks
        trainer=TrainerConfig(**trainer),
        rollout=RolloutConfig(max_model_len=128, max_tokens=16),
        sync=SyncConfig(bucket_bytes=BUCKET_BYTES),
        cluster=ClusterConfig(train_ranks=ranks),
    )


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tiny_moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": random_folder(tiny_folder, root / "dense", seed=1),
        "moe": random_folder(tiny_moe_folder, root / "moe", seed=1),
    }


def whole(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("dense", 8, {"zero_stage": 3}),
    ("dense", 3, {"zero_stage": 3}),
    ("dense", 4, {"zero_stage": 1, "tp": 2}),
    ("dense", 2, {"zero_stage": 0}),
    ("moe", 4, {"zero_stage": 3, "ep": 2}),
    ("moe", 4, {"zero_stage": 2, "ep": 4}),
]


@pytest.mark.parametrize(("kind", "ranks", "spread"), LAYOUTS)
def test_train_layout_holds_what_its_ranks_hold_and_goes_back_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path, kind: str, ranks: int, spread: dict[str, Any]
) -> None:
    cfg, source = config(ranks, **spread), folders[kind]
    reshard(cfg, source, "train-layout", tmp_path / "ranks", None)
    live = whole(source)
    model = trained_model(str(source), cfg.train_layout, LoraConfig())
    names = tuple(model.shapes)
    for rank in range(ranks):
        file = load_file(tmp_path / f"ranks/rank-{rank:05d}.safetensors")
        assert file.keys() == {parameter.name for parameter in model.parameters}
        shares = model.shares(rank)
        rows = held_regions(model.parameters, shares)
        for n in range(len(rows)):
            r = {key: int(column[n]) for key, column in vars(rows).items()}
            step = np.arange(r["count"])[:, None], np.arange(r["length"])[None]
            flat, part = live[names[r["tensor"]]].flatten(), file[model.parameters[r["buffer"]].name].flatten()
            mine = part[r["at"] + step[0] * r["row"] + step[1] * r["col"]]
            assert torch.equal(mine, flat[r["start"] + step[0] * r["stride"] + step[1]])
        for parameter, share in zip(model.parameters, shares, strict=True):
            if parameter.name in live:  # cut as ZeRO and tensor parallelism cut
                cut = live[parameter.name].chunk(share.parts, share.dim)[share.part]
                if share.numel is not None:
                    size = share.numel * ranks // share.parts
                    cut = torch.nn.functional.pad(cut.flatten(), (0, size - cut.numel()))
                    cut = cut[share.partition * share.numel :][: share.numel]
                assert torch.equal(file[parameter.name], cut), parameter.name
    again = config()
    reshard(again, tmp_path / "ranks", "hf", tmp_path / "back", None)
    reshard(again, source, "hf", tmp_path / "straight", None)
    for path in (tmp_path / "straight").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    back = whole(tmp_path / "back")
    assert back.keys() == live.keys() and all(torch.equal(back[name], live[name]) for name in live)


ENGINES = [
    ("tied", 2, 1, False),
    ("experts", 2, 1, False),
    ("experts", 2, 1, True),
    ("9 heads, 3 kv", 3, 1, False),
    ("untied", 1, 2, False),
    ("qkv bias", 2, 1, False),
]


@pytest.mark.parametrize(("name", "tp", "pp", "ep"), ENGINES)
def test_vllm_layout_holds_what_vllms_own_loading_gives_each_worker(
    tmp_path: Path, name: str, tp: int, pp: int, ep: bool
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from weightsync.places import groups_of, standing_in

    source = model_folder(name, 0, tmp_path / "model")
    cfg = config_of(layouts()[0], source, [(tp, pp)], Channel.shm, tmp_path)
    cfg = replace(cfg, rollout=replace(cfg.rollout, ep=ep))
    reshard(cfg, source, "vllm-layout", tmp_path / "out", None)
    live, found = whole(source), sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(found) == tp * pp
    for rank, path in enumerate(found):
        settings = engine_config(cfg, 0, str(source))
        settings.parallel_config.rank = rank
        with (
            set_current_vllm_config(settings),
            standing_in(groups_of(rank, tp, pp)),
            set_default_torch_dtype(torch.float32),
            torch.device("cpu"),
            torch.no_grad(),
        ):
            model = initialize_model(vllm_config=settings, model_config=settings.model_config)
            for tensor in model.parameters():
                tensor.zero_()
            model.load_weights(iter(live.items()))
        state, file = model.state_dict(), load_file(path)
        storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        assert len(file) == len(storages) and file.keys() <= state.keys()
        for key, tensor in file.items():
            assert tensor.shape == state[key].shape and torch.equal(tensor, state[key]), key


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_that_load_vllm_layouts_by_sharded_state_score_as_transformers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    named = []
    for kind, tp, pp in (("dense", 1, 1), ("dense", 2, 1), ("moe", 2, 1)):
        out, cfg = tmp_path / f"{kind}-{tp}-{pp}", config()
        cfg = replace(cfg, rollout=replace(cfg.rollout, tp=[tp], pp=[pp]))
        reshard(cfg, folders[kind], "vllm-layout", out, None)
        named.append((kind, f"{out}:{tp}:{pp}"))
    row = random_ids(3, 40)
    command = [sys.executable, "-m", "tests.integration.sharded_state", json.dumps(row), *(text for _, text in named)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    for (kind, text), logprobs in zip(named, json.loads(done.stdout.splitlines()[-1]), strict=True):
        gap = (hf_logprobs(load_hf(folders[kind]), row) - torch.tensor(logprobs)).abs().max()
        assert float(gap) < 1e-4, f"{text}: {gap}"


# arguments after the source, pieces of the message
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no kind": (("--out", "new"), ("--to must be given", "hf|train-layout|vllm-layout")),
    "unknown kind": (("--to", "gguf", "--out", "new"), ("--to", "'gguf'", "train-layout")),
    "unknown dtype": (("--to", "hf", "--out", "new", "--dtype", "int4"), ("--dtype", "'int4'", "bfloat16")),
    "out is there": (("--to", "hf", "--out", "there"), ("--out there exists already",)),
    "out is under a file": (("--to", "hf", "--out", "file/new"), ("--out file/new: ", "/file is a file")),
    "illegal layout": (
        ("--to", "train-layout", "--out", "new", "trainer.tp=2", "trainer.zero_stage=3", "cluster.train_ranks=2"),
        ("trainer.tp=2 with trainer.zero_stage=3",),
    ),
    "layout that does not fit": (
        ("--to", "train-layout", "--out", "new", "trainer.tp=4", "cluster.train_ranks=4"),
        ("trainer.tp=4: does not divide the model's 2 kv heads",),
    ),
    "engine that does not fit": (
        ("--to", "vllm-layout", "--out", "new", "rollout.tp=[3]"),
        ("rollout.tp=[3]: 3 does not divide the model's 4 attention heads",),
    ),
    "adapters": (("--to", "train-layout", "--out", "new", "lora.rank=2"), ("lora.rank=2: adapters are merged",)),
    "misspelt key": (("--to", "hf", "--out", "new", "sync.bucket=1"), ("sync.bucket=1", "nearest: sync.bucket_bytes")),
}


def refuse(source: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command line is refused."""
    with pytest.raises(SystemExit) as ended:
        main([source, *arguments])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("configuration error: ")]
    assert ended.value.code == 2 and len(told) == 1
    return told[0]


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_ends_with_one_line_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("file").write_text("")
    told = refuse(str(folders["dense"]), REFUSED[name][0], capsys)
    assert all(piece in told for piece in REFUSED[name][1]), told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_full_disk_names_the_file_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    told = refuse(str(folders["dense"]), ("--to", "hf", "--out", str(tmp_path / "new")), capsys)
    assert "model-00001-of-00001.safetensors: No space left on device; what was begun is removed; make room" in told
    assert not list(tmp_path.iterdir())


def test_full_disk_names_the_new_file_and_not_the_one_that_is_copied(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(source: Path, target: Path) -> None:  # as shutil's own
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    told = refuse(str(folders["dense"]), ("--to", "hf", "--out", str(tmp_path / "new")), capsys)
    assert told.startswith(f"configuration error: {tmp_path}/.resharding-new-") and "No space left on device" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["hf", "train-layout", "vllm-layout"])
def test_disk_without_room_is_told_with_what_is_wanted_and_free_before_anything_is_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, kind: str
) -> None:
    asked = []

    def usage(folder: Path) -> Any:
        asked.append(folder)
        return SimpleNamespace(free=123_000, total=10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    told = refuse(str(folders["dense"]), ("--to", kind, "--out", str(tmp_path / "a" / "new")), capsys)
    assert f"--out {tmp_path}/a/new: its weights take " in told and f"123.000 kB are free in {tmp_path}" in told
    assert asked == [tmp_path] and not list(tmp_path.iterdir())


# Runs the script, which ends itself by a signal as it calls a function: argv is the signal, the function, the rest.
ENDING = """
import os, signal, sys
import weightsync.files, weightsync.reshard
from scripts import reshard
number, (owner, name) = getattr(signal, sys.argv[1]), sys.argv[2].split(".")
owner = {"os": os, "files": weightsync.files, "reshard": weightsync.reshard, "Path": reshard.Path}[owner]
usual, out = getattr(owner, name), sys.argv[-1]
def end(*args, **kwargs):
    if name != "rename" or str(args[1]) == out:
        os.kill(os.getpid(), number)
    return usual(*args, **kwargs)
setattr(owner, name, end)
reshard.main(sys.argv[3:])
"""


@pytest.mark.parametrize("place", ["os.posix_fallocate", "reshard.spread", "reshard.written", "Path.rename"])
def test_run_that_was_killed_leaves_no_folder_that_looks_whole_and_the_next_one_removes_what_is_left(
    folders: dict[str, Path], tmp_path: Path, place: str
) -> None:
    out = tmp_path / "new"
    command = [str(folders["dense"]), "--to", "hf", "--out", str(out)]

    def run(number: str) -> "subprocess.CompletedProcess[str]":
        script = [sys.executable, "-c", ENDING, number, place, *command]
        return subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=100)

    interrupted = run("SIGINT")
    assert interrupted.returncode == 130 and interrupted.stderr.endswith("interrupted\n"), interrupted.stderr
    assert not list(tmp_path.iterdir())
    assert run("SIGKILL").returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".resharding-new-*"))) == 1
    assert not out.exists() or not list(out.iterdir())
    others = tmp_path / ".resharding-new-2-0123abcd", tmp_path / ".resharding-new-89abcdef"
    for other in others:
        other.mkdir()
    held = lock(others[1])
    assert held is not None
    if out.exists():
        assert "--out" in run("SIGKILL").stderr
        out.rmdir()
    reshard(config(), folders["dense"], "hf", out, None)
    assert sorted(tmp_path.iterdir()) == sorted([*others, out]), "of another --out, and of a run that goes on"
    os.close(held)
    live, found = whole(folders["dense"]), whole(out)
    assert found.keys() == live.keys() and all(torch.equal(found[name], live[name]) for name in live)


def damage(folder: Path, kind: str) -> None:
    """Makes a model folder wrong in one way."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if kind == "config is a list":
        (folder / "config.json").write_text("[]")
    elif kind == "config is cut off":
        (folder / "config.json").write_text('{"model_type": ')
    elif kind == "index without files":
        index.write_text('{"weight_map": {}}')
    elif kind == "index of numbers":
        index.write_text('{"weight_map": {"a": 1}}')
    elif kind == "tensor in two files":
        save_file(load_file(path), folder / "other.safetensors")
        index.write_text('{"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}')
    else:
        tensors = load_file(path)
        del tensors["model.norm.weight"]
        save_file(tensors, path)


DAMAGED = {
    "config is a list": "config.json holds a list, not a JSON object",
    "config is cut off": "config.json cannot be read: ",
    "index without files": "model.safetensors.index.json has no weight_map",
    "index of numbers": "model.safetensors.index.json has no weight_map",
    "tensor in two files": " is in other.safetensors and in another file",
    "tensor missing": "model.norm.weight",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_model_folder_that_is_wrong_is_refused_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, capsys: Any, kind: str
) -> None:
    shutil.copytree(folders["dense"], tmp_path / "source")
    damage(tmp_path / "source", kind)
    arguments = ("--to", "hf", "--out", str(tmp_path / "new"))
    assert DAMAGED[kind] in refuse(str(tmp_path / "source"), arguments, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_config_of_a_folder_names_the_dtype_that_its_weights_have(folders: dict[str, Path], tmp_path: Path) -> None:
    reshard(config(2, zero_stage=3), folders["dense"], "train-layout", tmp_path / "ranks", "bfloat16")
    reshard(config(2, zero_stage=3), tmp_path / "ranks", "hf", tmp_path / "hf", None)
    kinds = {tensor.dtype for tensor in whole(tmp_path / "hf").values()}
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert kinds == {torch.bfloat16} and described.get("torch_dtype", described.get("dtype")) == "bfloat16"


def test_rank_file_that_is_damaged_or_missing_is_named(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    ranks, out = tmp_path / "ranks", str(tmp_path / "new")
    reshard(config(2, zero_stage=3), folders["dense"], "train-layout", ranks, None)
    path = ranks / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert "rank-00001.safetensors has crc" in refuse(str(ranks), ("--to", "hf", "--out", out), capsys)
    path.unlink()
    assert "rank-00001.safetensors is missing" in refuse(str(ranks), ("--to", "hf", "--out", out), capsys)
    table = ranks / "rank-00000.json"
    table.write_text(table.read_text().replace('"start"', '"begin"'))
    assert "rank-00000.json is damaged: its crc32" in refuse(str(ranks), ("--to", "hf", "--out", out), capsys)
    table.write_text("{}")
    assert "a rank's JSON is damaged" in refuse(str(ranks), ("--to", "hf", "--out", out), capsys)


def test_layout_with_values_of_another_kind_is_named(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    ranks, out = tmp_path / "ranks", str(tmp_path / "new")
    reshard(config(2, zero_stage=3), folders["dense"], "train-layout", ranks, None)
    path = ranks / "layout.json"
    text = path.read_text()
    for place, key, value in (
        ("files", "file", 3),
        ("files", "file", "../rank-00000.safetensors"),
        ("files", "crc", None),
        ("files", "nbytes", "3"),
        ("tensors", "model.norm.weight", "ab"),
        ("tensors", "model.norm.weight", [-64]),
    ):
        about = json.loads(text)
        (about["files"][0] if place == "files" else about["tensors"])[key] = value
        path.write_text(json.dumps(about))
        told = refuse(str(ranks), ("--to", "hf", "--out", out), capsys)
        assert "layout.json or a rank's JSON is damaged" in told


@pytest.mark.parametrize("kind", ["empty folder", "folder", "file"])
def test_out_that_appears_while_it_is_written_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "new"
    with pytest.raises(ConfigError, match="new exists already; name a new folder"), written_aside(out) as aside:
        (aside / "config.json").write_text("{}")
        if kind == "file":
            out.write_text("mine")
        else:
            out.mkdir()
        if kind == "folder":
            (out / "notes").write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not (out / "config.json").exists()


def test_interrupt_right_after_the_folder_has_its_name_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path.rename

    def rename(self: Path, target: Path) -> None:
        usual(self, target)
        if target.name == "new":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), written_aside(tmp_path / "new") as aside:
        (aside / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["new"] and (tmp_path / "new" / "config.json").exists()
