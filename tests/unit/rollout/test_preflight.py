"""What a launch refuses before anything starts: each message quotes the key, its value, and what would be right."""

import json
import math
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.checkpoint import file_crc, publish
from actors.resume import resolve_start
from conf.choices import Advantage, Channel, Dtype, Layout, Optimizer, Quantization, Template
from conf.errors import ConfigError
from conf.launch import to_dict
from conf.schema import (
    AlgoConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    CriticConfig,
    DataConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    SyncConfig,
    TeacherConfig,
    TrainerConfig,
)
from rollout.data import require_model_folder
from rollout.preflight.launch import (
    Prepared,
    prepare,
    require_channel,
    require_compilers,
    require_disk,
    require_engine_device,
    require_engine_sizes,
    require_memory,
    require_own_folder,
    require_version_room,
)

HEADS, CONTEXT = 4, 1024  # of the tiny model
GIGABYTE = 10**9

REWARDS = """
VALUES = {"none": None, "nan": float("nan"), "text": "1.0"}

def fine(completion, record):
    return 1.0

def value(completion, record, kind):
    return VALUES[kind]

def raises(completion, record):
    raise ValueError("no verdict")
"""


class Scene:
    """A valid launch in a folder of its own: a copy of the tiny model, eight prompts, a reward; made wrong by tests."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model, self.data = folder, folder / "model", folder / "prompts.jsonl"
        shutil.copytree(model, self.model)
        self.write([{"prompt": f"{letter}cb="} for letter in "adefghij"])

    def write(self, records: list[dict[str, Any]]) -> None:
        self.data.write_text("".join(json.dumps(record) + "\n" for record in records))

    def edit(self, name: str, **changes: Any) -> None:
        """Changes keys of a JSON file of the model folder."""
        path = self.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def remove(self, pattern: str) -> None:
        """Deletes files of the model folder."""
        for path in self.model.glob(pattern):
            path.unlink()

    def cfg(self, **changes: Any) -> Config:
        """The configuration; `data`, `reward`, `rollout` are merged into the valid ones."""
        data: dict[str, Any] = {"path": str(self.data), "eval_size": 2, "template": Template.plain}
        sections: dict[str, Any] = (
            {
                "prompts_per_step": 4,
                "samples_per_prompt": 2,
                "model": ModelConfig(path=str(self.model)),
                "evaluation": EvaluationConfig(every=1),
                "sync": SyncConfig(probe_tokens=8),
            }
            | changes
            | {
                "data": DataConfig(**data | changes.get("data", {})),
                "reward": RewardConfig(**{"_target_": "preflight_rewards.fine"} | changes.get("reward", {})),
                "rollout": RolloutConfig(**{"max_tokens": 8, "max_model_len": 16} | changes.get("rollout", {})),
            }
        )
        return Config(**sections)

    def checkpoint(self, shapes: dict[str, tuple[int, ...]], **config: Any) -> Path:
        """A checkpoint of this launch, with parameters of these shapes."""

        def write(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            path = folder / "shard.safetensors"
            path.write_bytes(b"state")
            tensors = {f"{name}|master": list(shape) for name, shape in shapes.items()}
            return [{"role": "policy", "file": path.name, "nbytes": 5, "crc": file_crc(path), "tensors": tensors}], {}

        run_dir = self.folder / "runs" / "2026-01-01-run"
        return publish(run_dir / "checkpoints", 2, write, {"step": 2}, to_dict(self.cfg(**config)), self.model, keep=0)


@pytest.fixture
def scene(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    (tmp_path / "preflight_rewards.py").write_text(REWARDS)
    (tmp_path / "preflight_broken.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    return Scene(tmp_path, tiny_folder)


def check(cfg: Config) -> Prepared:
    """Everything that scripts/train.py checks before it starts anything, in its order."""
    prepared = prepare(cfg)
    require_disk(cfg, prepared.shapes)
    require_memory(cfg, prepared.shapes, prepared.model, "cpu")
    resolve_start(cfg, to_dict(cfg), prepared.shapes)
    return prepared


def refusal(cfg: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    return str(caught.value)


def test_valid_launch_is_prepared(scene: Scene) -> None:
    prepared = check(scene.cfg())
    assert (len(prepared.train), len(prepared.held_out), prepared.warnings) == (6, 2, [])
    assert prepared.stop_token_ids == (1,) and "model.embed_tokens.weight" in prepared.shapes
    assert prepared.decode([*prepared.tokenizer("abc")["input_ids"], 1]) == "abc"


# The model folder

MODEL_FAULTS: dict[str, tuple[Callable[[Scene], object], list[str]]] = {
    "no folder": (lambda s: shutil.rmtree(s.model), ["no such folder"]),
    "no config.json": (lambda s: (s.model / "config.json").unlink(), ["no config.json", "Hugging Face model folder"]),
    "config.json cut": (lambda s: (s.model / "config.json").write_text('{"model_type": '), ["config.json", "JSON"]),
    "no tokenizer": (
        lambda s: s.remove("tokenizer*"),
        ["no tokenizer in it", "tokenizer.json"],
    ),
    "tokenizer cut": (lambda s: (s.model / "tokenizer.json").write_text("{"), ["its tokenizer cannot be loaded"]),
    "no weights": (lambda s: (s.model / "model.safetensors").unlink(), ["its weights (safetensors)", "cannot be read"]),
    "weights cut": (
        lambda s: (s.model / "model.safetensors").write_bytes((s.model / "model.safetensors").read_bytes()[:-100]),
        ["its weights (safetensors)", "cannot be read"],
    ),
    "weights pickled": (
        lambda s: (s.model / "model.safetensors").rename(s.model / "pytorch_model.bin"),
        ["its weights (safetensors)", "cannot be read"],
    ),
    "shard missing": (
        lambda s: (s.model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "part-1.safetensors"}}'),
        ["its weights (safetensors)", "part-1.safetensors"],
    ),
    "generation_config.json no object": (
        lambda s: (s.model / "generation_config.json").write_text("[]"),
        ["generation_config.json holds a list"],
    ),
    "generation_config.json cut": (
        lambda s: (s.model / "generation_config.json").write_text("{"),
        ["generation_config.json", "JSON"],
    ),
}


ODD_VALUES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no heads": ({"num_attention_heads": 0}, ["describes no model that can be built"]),
    "heads of another model": ({"num_attention_heads": 2}, ["q_proj.weight has shape (128, 64), not (64, 64)"]),
    "more kv heads": ({"num_key_value_heads": 4}, ["k_proj.weight has shape (64, 64), not (128, 64)"]),
    "heads as text": ({"num_attention_heads": "4"}, ["describes no model that can be built"]),
    "more layers": ({"num_hidden_layers": 3, "layer_types": None}, ["model.layers.2", "is missing", "and 7 more"]),
    "fewer layers": ({"num_hidden_layers": 1, "layer_types": None}, ["the model has no model.layers.1"]),
    "unknown kind": ({"model_type": "foo"}, ["describes no model that can be built"]),
    "unknown activation": ({"hidden_act": "foo"}, ["describes no model that can be built"]),
    "quantized": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantized weights"]),
    "end beyond the vocabulary": ({"eos_token_id": 1000}, ["eos_token_id", "1000", "must be token ids"]),
}


@pytest.mark.parametrize("fault", ODD_VALUES)
def test_config_json_that_is_not_the_weights_own_is_refused(scene: Scene, fault: str) -> None:
    changes, pieces = ODD_VALUES[fault]
    scene.edit("config.json", **changes)
    message = refusal(scene.cfg())
    for piece in [f"model.path={scene.model}", *pieces]:
        assert piece in message


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


UP, EMBED = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "piece"),
    [
        (lambda w: w.pop(UP), f"{UP} is missing"),
        (lambda w: w.update({UP: w[UP][:, :32].clone()}), f"{UP} has shape (128, 32), not (128, 64)"),
        (lambda w: w.update(extra=w[UP].clone()), "the model has no extra"),
        (lambda w: w.update({"lm_head.weight": w[EMBED] + 1}), "lm_head.weight is not the embedding"),
    ],
)
def test_weights_that_are_not_the_models_are_named(
    scene: Scene, change: Callable[[dict[str, torch.Tensor]], object], piece: str
) -> None:
    edit_weights(scene.model, change)
    assert piece in refusal(scene.cfg())


def test_head_that_is_the_embedding_again_is_fine(scene: Scene) -> None:
    edit_weights(scene.model, lambda w: w.update({"lm_head.weight": w[EMBED].clone()}))
    check(scene.cfg())


def test_tokenizer_with_more_ids_than_the_model_is_refused(scene: Scene) -> None:
    edit_weights(scene.model, lambda w: w.update({EMBED: w[EMBED][:16].clone()}))
    scene.edit("config.json", vocab_size=16)
    message = refusal(scene.cfg())
    assert "its tokenizer has ids up to 63" in message and "the model has 16 tokens" in message


@pytest.mark.parametrize("target", ["gate_proj", "down_proj"])
def test_adapters_for_experts_are_refused(scene: Scene, tiny_moe_folder: Path, target: str) -> None:
    shutil.rmtree(scene.model)
    shutil.copytree(tiny_moe_folder, scene.model)
    check(scene.cfg(lora=LoraConfig(rank=4, targets=["q_proj"])))
    message = refusal(scene.cfg(lora=LoraConfig(rank=4, targets=["q_proj", target])))
    assert f"{target} are matrices of experts" in message and "k_proj" in message


ROLES: dict[str, Callable[[Scene, Path], Config]] = {
    "critic.path": lambda s, folder: s.cfg(
        algo=AlgoConfig(advantage=Advantage.gae), critic=CriticConfig(path=str(folder))
    ),
    "teacher.path": lambda s, folder: s.cfg(
        algo=AlgoConfig(advantage=Advantage.teacher), teacher=TeacherConfig(path=str(folder))
    ),
}


@pytest.mark.parametrize("key", ROLES)
def test_other_roles_models_are_checked_like_the_policys(scene: Scene, key: str, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(scene.model, folder)
    cfg = ROLES[key](scene, folder)
    check(cfg)
    config = json.loads((folder / "config.json").read_text())
    for changes, piece in [
        ({"max_position_embeddings": 8}, "rollout.max_model_len=16, but the model's context is 8 tokens"),
        ({"num_attention_heads": 2}, "q_proj.weight has shape (128, 64), not (64, 64)"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | changes))
        message = refusal(cfg)
        assert piece in message and f"{key}={folder}" in message
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    assert f"{key}={folder}: its weights (safetensors) cannot be read" in refusal(cfg)


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_model_folder_that_cannot_be_used_is_named(scene: Scene, fault: str) -> None:
    spoil, pieces = MODEL_FAULTS[fault]
    spoil(scene)
    message = refusal(scene.cfg())
    for piece in [f"model.path={scene.model}", *pieces]:
        assert piece in message


def test_chat_template_missing_where_chat_is_asked(scene: Scene) -> None:
    (scene.model / "chat_template.jinja").unlink()
    message = refusal(scene.cfg(data={"template": Template.chat}))
    for piece in ["data.template=chat", str(scene.model), "no chat template", "data.template=plain"]:
        assert piece in message
    check(scene.cfg())  # plain text needs none


# Layouts


@pytest.mark.parametrize(
    ("model", "trainer", "pieces"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, {"sp": 2}, ["trainer.sp=2", "9 attention heads"]),
        ({}, {"ep": 2}, ["trainer.ep=2", "qwen3 has no experts"]),
        ({"final_logit_softcapping": 30.0}, {}, ["final_logit_softcapping=30.0", "another distribution"]),
        (
            {"sliding_window": 8, "use_sliding_window": True},
            {"layout": Layout.shared_prefix},
            ["trainer.layout=shared_prefix", "rollout.max_model_len=16", "sees 8 tokens only"],
        ),
        ({"model_type": None}, {}, ["no model_type"]),
        ({"vocab_size": 32}, {}, ["vocab_size=32", "of another model"]),
        ({}, {"replay_routing": True}, ["trainer.replay_routing=true", "qwen3 has no experts"]),
        ({"model_type": "gpt2"}, {"tp": 2}, ["trainer.tp=2", "matrices of a gpt2", "trainer.zero_stage=3"]),
    ],
)
def test_model_that_the_layout_cannot_cut(
    scene: Scene, model: dict[str, Any], trainer: dict[str, Any], pieces: list[str]
) -> None:
    scene.edit("config.json", **model)
    trainer = {"layout": Layout.padded} | trainer
    sections = {"cluster": ClusterConfig(train_ranks=2), "algo": AlgoConfig(num_epochs=2)}
    message = refusal(scene.cfg(trainer=TrainerConfig(**trainer), **sections))
    for piece in [*pieces, str(scene.model)]:
        assert piece in message


def test_attention_that_cannot_share_rows_is_refused(scene: Scene) -> None:
    trainer = TrainerConfig(layout=Layout.padded, sp=2)
    model = ModelConfig(path=str(scene.model), attention="eager")
    message = refusal(scene.cfg(model=model, trainer=trainer, cluster=ClusterConfig(train_ranks=2)))
    for piece in ["model.attention=eager", "trainer.sp=2", "sdpa"]:
        assert piece in message


def test_attention_that_transformers_does_not_have_is_named_with_the_choices(scene: Scene) -> None:
    message = refusal(scene.cfg(model=ModelConfig(path=str(scene.model), attention="foo")))
    for piece in ["model.attention=foo", "eager", "sdpa"]:
        assert piece in message


def test_stop_token_that_is_no_id_is_named(scene: Scene) -> None:
    (scene.model / "generation_config.json").write_text('{"eos_token_id": "abc"}')
    assert "'abc'" in refusal(scene.cfg())


def test_generator_that_exits_is_an_error(scene: Scene) -> None:
    (scene.folder / "preflight_exits.py").write_text("import sys\ndef rows(split, seed, size): sys.exit(0)\n")
    cfg = scene.cfg(data={"path": None, "_target_": "preflight_exits.rows"})
    assert "SystemExit" in refusal(cfg)


def test_demonstrations_of_a_file_are_rendered_once_for_check_and_warm_start(scene: Scene) -> None:
    scene.write([{"prompt": f"{letter}cb=", "completion": "bc"} for letter in "adefghij"])
    assert prepare(scene.cfg()).demonstrations == []
    prepared = prepare(scene.cfg(sft=SftConfig(num_steps=3)))
    assert [prompt for prompt, _ in prepared.demonstrations] == [prompt.token_ids for prompt in prepared.train]
    assert all(prepared.decode(completion) == "bc" for _, completion in prepared.demonstrations)


def test_demonstrations_without_completions_are_found_before_anything_starts(scene: Scene) -> None:
    assert "no column 'completion'" in refusal(scene.cfg(sft=SftConfig(num_steps=3)))


def test_cache_larger_than_the_machine_is_refused(scene: Scene) -> None:
    message = refusal(scene.cfg(rollout={"kv_cache_bytes": 2**50}))
    assert "rollout.kv_cache_bytes=1125899906842624" in message


def test_disk_counts_adapters_only_where_only_they_are_saved(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    lora = LoraConfig(rank=1, targets=["q_proj"])
    shapes = [s for n, s in prepare(scene.cfg()).shapes.items() if n.endswith("q_proj.weight")]
    adapters = sum(rows + columns for rows, columns in shapes)
    cfg = scene.cfg(lora=lora, checkpoint=CheckpointConfig(export=False))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(GIGABYTE, 0, 12 * adapters))
    check(cfg)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(GIGABYTE, 0, 12 * adapters - 1))
    refusal(cfg)


COMPILED = {"cpu_adam": TrainerConfig(optimizer=Optimizer.cpu_adam), "fused": TrainerConfig(fused_logprobs=True)}


@pytest.mark.parametrize(
    ("what", "device", "tools", "advice"),
    [
        ("cpu_adam", "cpu", ("c++", "ninja"), "use trainer.optimizer=adamw"),
        ("fused", "cpu", ("g++",), "use trainer.fused_logprobs=false"),
        ("fused", "cuda", ("cc",), "use trainer.fused_logprobs=false"),
    ],
)
def test_what_is_compiled_needs_its_compiler(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, what: str, device: str, tools: tuple[str, ...], advice: str
) -> None:
    have = {"c++", "g++", "cc", "ninja"}
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("actors.compiled.shutil.which", lambda name, path: name if name in have else None)
    cfg = scene.cfg(trainer=COMPILED[what])
    require_compilers(cfg, device)
    for tool in tools:
        have.remove(tool)
        with pytest.raises(ConfigError) as caught:
            require_compilers(cfg, device)
        for piece in [what, f"{tool} cannot be found", "apt-get install g++", advice]:
            assert piece in str(caught.value)
        require_compilers(scene.cfg(), device)
        have.add(tool)


def test_cpu_adam_on_a_gpu_needs_the_offload(scene: Scene) -> None:
    cfg = scene.cfg(trainer=COMPILED["cpu_adam"])
    with pytest.raises(ConfigError, match=r"trainer.optimizer=cpu_adam .* use trainer.offload_optimizer=true"):
        require_compilers(cfg, "cuda")
    require_compilers(scene.cfg(trainer=TrainerConfig(optimizer=Optimizer.cpu_adam, offload_optimizer=True)), "cuda")
    require_compilers(cfg, "cpu")


def test_adapters_for_a_matrix_that_is_not_there(scene: Scene) -> None:
    message = refusal(scene.cfg(lora=LoraConfig(rank=4, targets=["q_proj", "wq"])))
    for piece in ["lora.targets=['q_proj', 'wq']", "called wq", "down_proj, gate_proj, k_proj"]:
        assert piece in message
    check(scene.cfg(lora=LoraConfig(rank=4, targets=["q_proj"])))


@pytest.mark.parametrize(
    ("device", "offload", "refused"), [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)]
)
def test_state_that_this_machine_cannot_hold(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, device: str, offload: bool, refused: bool
) -> None:
    """0.1M parameters: 1.6 MB of AdamW state in fp32 on one rank, of which 1.2 MB are offloaded."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1_000_000))
    cfg = scene.cfg(trainer=TrainerConfig(offload_optimizer=offload))
    prepared = prepare(cfg)
    if not refused:
        require_memory(cfg, prepared.shapes, prepared.model, device)
        return
    with pytest.raises(ConfigError, match=r"trainer.zero_stage=1, cluster.train_ranks=1.*which has 0.0 GB"):
        require_memory(cfg, prepared.shapes, prepared.model, device)


# Sizes


def test_prompts_fewer_than_a_batch_gives_both_numbers(scene: Scene) -> None:  # B46
    message = refusal(scene.cfg(prompts_per_step=7))
    for piece in ["prompts_per_step=7", "holds 6 prompts", "lower prompts_per_step or give more data"]:
        assert piece in message


def test_prompts_dropped_as_overlong_count_as_missing(scene: Scene) -> None:
    scene.write([{"prompt": f"{letter}cb="} for letter in "abc"] + [{"prompt": "a" * 60}] * 3 + [{"prompt": "a="}] * 2)
    message = refusal(scene.cfg(data={"drop_overlong": True}))
    assert "prompts_per_step=4" in message and "holds 3 prompts" in message


def test_prompts_exactly_a_batch_is_enough(scene: Scene) -> None:
    assert len(check(scene.cfg(prompts_per_step=6)).train) == 6


def test_prompt_longer_than_the_room_is_refused_by_number(scene: Scene) -> None:  # B56
    scene.write([{"prompt": "abc="}, {"prompt": "a" * 16}, *[{"prompt": "abc="}] * 6])
    message = refusal(scene.cfg())
    for piece in ["prompt 1", "16 tokens", "room for a prompt is 15", "rollout.max_model_len", "data.drop_overlong"]:
        assert piece in message
    assert "rollout.max_tokens" not in message  # lowering it would not help: a completion takes what is left


def test_prompt_that_fills_the_context_but_one_is_kept_with_a_warning(scene: Scene) -> None:  # B56
    scene.write([{"prompt": "abc="}, {"prompt": "a" * 15}, *[{"prompt": "abc="}] * 6])
    (warning,) = check(scene.cfg()).warnings
    for piece in ["rollout.max_model_len=16", "15 tokens", "rollout.max_tokens=8", "truncated"]:
        assert piece in warning


def test_overlong_prompts_left_out_are_counted(scene: Scene) -> None:
    scene.write([{"prompt": "a" * 16}, *[{"prompt": "abc="}] * 7])
    prepared = check(scene.cfg(data={"drop_overlong": True}))
    assert len(prepared.train) == 5
    assert prepared.warnings == ["data.drop_overlong: left out 1 training and 0 held-out prompts"]


def test_max_model_len_beyond_the_context_gives_both_numbers(scene: Scene) -> None:
    message = refusal(scene.cfg(rollout={"max_model_len": CONTEXT + 1}))
    for piece in [f"rollout.max_model_len={CONTEXT + 1}", f"context is {CONTEXT} tokens", "max_position_embeddings"]:
        assert piece in message
    check(scene.cfg(rollout={"max_model_len": CONTEXT}))


def test_max_tokens_beyond_max_model_len_gives_both_numbers(scene: Scene) -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_tokens=16 with rollout.max_model_len=16: no room"):
        scene.cfg(rollout={"max_tokens": 16})


@pytest.mark.parametrize(
    ("sizes", "piece"),
    [
        ({"tp": [1, 3]}, "rollout.tp=[1, 3]: 3 does not divide the vocabulary, which vLLM pads to 128"),
        ({"pp": [2, 5]}, "rollout.pp=[2, 5]: 5 stages, but the model has 4 layers"),
    ],
)
def test_engine_sizes_must_cut_vocabulary_and_layers(sizes: dict[str, Any], piece: str) -> None:
    model = {"num_attention_heads": 6, "vocab_size": 100, "num_hidden_layers": 4}
    with pytest.raises(ConfigError) as caught:
        require_engine_sizes(RolloutConfig(**sizes), model)
    assert piece in str(caught.value)
    require_engine_sizes(RolloutConfig(tp=[1, 2], pp=[4]), model)


def test_expert_parallel_engines_need_experts_and_a_device_that_runs_them() -> None:
    rollout, model = RolloutConfig(tp=[1, 4], ep=True), {"model_type": "qwen3_moe"}
    with pytest.raises(ConfigError, match=r"rollout.ep=true: a qwen3_moe has no experts"):
        require_engine_sizes(rollout, model)
    with pytest.raises(ConfigError, match=r"rollout.tp=\[1, 4\]: more members than the model's 2 experts"):
        require_engine_sizes(rollout, model | {"num_experts": 2})
    require_engine_sizes(rollout, model | {"num_experts": 4})
    with pytest.raises(ConfigError, match=r"rollout.ep=true on a CPU: .* use rollout.ep=false"):
        require_engine_device(rollout, "cpu")
    require_engine_device(rollout, "cuda")
    require_engine_device(RolloutConfig(tp=[2]), "cpu")
    with pytest.raises(ConfigError, match=r"rollout.ep=true with rollout.tp=\[1\]"):
        RolloutConfig(ep=True)


def test_weights_are_rounded_only_where_vllm_can() -> None:
    fp8, int8 = (
        RolloutConfig(quantization=kind, dtype=Dtype.bfloat16) for kind in (Quantization.fp8, Quantization.int8)
    )
    with pytest.raises(ConfigError, match=r"rollout\.quantization=int8 with rollout\.dtype=float32"):
        RolloutConfig(quantization=Quantization.int8)
    for rounded in (fp8, int8):
        with pytest.raises(ConfigError, match=rf"rollout\.quantization={rounded.quantization.value} on a CPU"):
            require_engine_device(rounded, "cpu")
        require_engine_device(rounded, "cuda")
    with pytest.raises(ConfigError, match=r"rollout\.quantization=int8: .* a qwen3 has none; use none"):
        require_engine_sizes(int8, {"model_type": "qwen3"})
    require_engine_sizes(int8, {"model_type": "qwen3_moe", "num_experts": 2})


@pytest.mark.parametrize(("tp", "bad"), [([3], 3), ([1, 8], 8)])
def test_tensor_parallel_size_must_divide_the_heads(scene: Scene, tp: list[int], bad: int) -> None:
    message = refusal(scene.cfg(rollout={"tp": tp}, cluster=ClusterConfig(rollout_engines=len(tp))))
    for piece in [f"rollout.tp={tp}", f"{bad} does not divide", f"{HEADS} attention heads"]:
        assert piece in message


# Data

ROWS = b'{"prompt": "c="}\n' * 4


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        (b"", ["is empty"]),
        (b"\n\n", ["is empty"]),
        (b'{"prompt": "a="}\n{"prompt": \n', ["prompts.jsonl:2", "not JSON"]),
        (b'{"prompt": "a="}\n["b"]\n', ["prompts.jsonl:2", "is a list, not an object"]),
        (b'{"prompt": "a="}\n\n{"promt": "b="}\n' + ROWS, ["prompts.jsonl:3", "data.prompt_key='prompt'", "'promt'"]),
        (b'{"prompt": "a="}\n{"prompt": 3}\n' + ROWS, ["prompts.jsonl:2", "is a int, not a string"]),
        (b'{"prompt": "a="}\n', ["has 1 rows and data.eval_size=2", "lower data.eval_size"]),
    ],
    ids=["empty", "blank lines", "cut line", "no object", "misspelt column", "no text", "all held out"],
)
def test_dataset_that_cannot_be_used_is_named_with_its_line(scene: Scene, content: bytes, pieces: list[str]) -> None:
    scene.data.write_bytes(content)
    message = refusal(scene.cfg())
    for piece in ["data.path", str(scene.data), *pieces]:
        assert piece in message


def test_dataset_missing_is_named(scene: Scene) -> None:
    message = refusal(scene.cfg(data={"path": "nowhere.jsonl"}))
    assert "data.path=nowhere.jsonl: no such file" in message and str(scene.folder) in message


def test_held_out_prompts_missing_with_evaluation_on(scene: Scene) -> None:
    message = refusal(scene.cfg(data={"eval_size": 0}))
    for piece in [
        "evaluation.every=1",
        "no held-out prompts",
        "data.eval_size",
        "data.eval_path",
        "evaluation.every=0",
    ]:
        assert piece in message
    check(scene.cfg(data={"eval_size": 0}, evaluation=EvaluationConfig(every=0)))


# The reward


@pytest.mark.parametrize(
    ("target", "pieces"),
    [
        ("nowhere_at_all.score", ["no module 'nowhere_at_all'", "installed packages or in"]),
        ("preflight_rewards.fin", ["has no 'fin'", "did you mean 'fine'"]),
        ("preflight_broken.score", ["importing preflight_broken failed", "no_such_package_at_all"]),
        ("score", ["import path", "package.module.function"]),
    ],
)
def test_reward_that_cannot_be_imported_is_named(scene: Scene, target: str, pieces: list[str]) -> None:
    message = refusal(scene.cfg(reward={"_target_": target}))
    for piece in [f"reward._target_={target}", *pieces]:
        assert piece in message


@pytest.mark.parametrize(("kind", "shown"), [("none", "None"), ("nan", "nan"), ("text", "'1.0' (str)")])
def test_reward_that_returns_no_number_is_shown(scene: Scene, kind: str, shown: str) -> None:
    message = refusal(scene.cfg(reward={"_target_": "preflight_rewards.value", "kwargs": {"kind": kind}}))
    for piece in ["reward._target_=preflight_rewards.value", shown, "not a finite number"]:
        assert piece in message


def test_reward_that_raises_for_the_probe_is_a_warning_with_its_traceback(scene: Scene) -> None:
    (warning,) = check(scene.cfg(reward={"_target_": "preflight_rewards.raises"})).warnings
    assert "reward._target_=preflight_rewards.raises" in warning and "ValueError: no verdict" in warning


# The run folder, the disk, and what is resumed


def test_run_folder_that_cannot_be_written_is_named(scene: Scene) -> None:
    (scene.folder / "file").write_text("")
    run_dir = scene.folder / "file" / "run"  # below a regular file: not even root can write there
    message = refusal(scene.cfg(run_dir=str(run_dir)))
    for piece in [f"run_dir={run_dir}", "cannot be written", "run_dir=PATH"]:
        assert piece in message


def test_disk_too_small_for_a_checkpoint_gives_both_sizes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(GIGABYTE, GIGABYTE - 1000, 1000))
    message = refusal(scene.cfg())
    for piece in ["0.0 GB free", "need 0.0 GB", "run_dir", "checkpoint.at_end=false", "checkpoint.export=false"]:
        assert piece in message
    assert not list((scene.folder / "runs").glob("*")), "a refused launch leaves a run folder behind"
    cfg = scene.cfg()
    cfg.checkpoint.at_end = cfg.checkpoint.export = False
    check(cfg)  # without checkpoints it needs no room


def test_disk_that_just_holds_a_checkpoint_and_the_export_is_enough(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(math.prod(shape) for shape in check(scene.cfg(name="first")).shapes.values())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(GIGABYTE, 0, 16 * parameters))
    check(scene.cfg())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(GIGABYTE, 0, 16 * parameters - 1))
    refusal(scene.cfg())


def test_resume_path_that_is_no_checkpoint_is_named(scene: Scene) -> None:
    (scene.folder / "thing").mkdir()
    for path, piece in [("nowhere", "no such folder"), ("thing", "manifest.json")]:
        message = refusal(scene.cfg(resume=path))
        assert f"resume={path}: " in message and piece in message


def test_resume_path_of_another_architecture_shows_both_shapes(scene: Scene) -> None:
    folder = scene.checkpoint({"model.embed_tokens.weight": (64, 128)})
    message = refusal(scene.cfg(resume=str(folder)))
    for piece in [str(folder), "another architecture", "embed_tokens", "(64, 128)", "(64, 64)", "model.path"]:
        assert piece in message


def test_resume_path_of_a_model_with_fewer_layers_is_refused(scene: Scene) -> None:
    shapes = check(scene.cfg(name="other")).shapes
    folder = scene.checkpoint({name: shape for name, shape in shapes.items() if ".layers.1." not in name})
    message = refusal(scene.cfg(resume=str(folder)))
    for piece in [str(folder), "another architecture", "model.layers.1.", "nothing in the checkpoint"]:
        assert piece in message


def test_resume_path_of_another_configuration_shows_old_and_new(scene: Scene) -> None:
    folder = scene.checkpoint(dict(check(scene.cfg(name="other")).shapes), seed=3)
    message = refusal(scene.cfg(resume=str(folder)))
    for piece in [f"resume={folder}", "seed: 3 -> 0", "checkpoint.force=true"]:
        assert piece in message


def test_memory_of_a_gpu_is_no_channel_between_cpus(scene: Scene) -> None:
    cfg = scene.cfg(sync=SyncConfig(channel=Channel.ipc, probe_tokens=8))
    require_channel(cfg, "cuda")
    with pytest.raises(ConfigError, match=r"sync\.channel=ipc on cpu: .*; use sync\.channel=shm"):
        require_channel(cfg, "cpu")


def test_saved_plan_that_is_none_is_named(scene: Scene, tmp_path: Path) -> None:
    cfg = scene.cfg(sync=SyncConfig(plan=str(tmp_path), probe_tokens=8))
    with pytest.raises(ConfigError, match=r"sync\.plan=.*: no saved plan .*scripts/plan_sync\.py --save"):
        require_channel(cfg, "cpu")


def test_folder_without_room_for_versions_is_refused(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = scene.cfg(sync=SyncConfig(channel=Channel.disk, folder=str(tmp_path), probe_tokens=8))
    shapes = {"w": (1000, 1000)}  # a version of 4 MB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=11_000_000, total=GIGABYTE))
    require_version_room(cfg, shapes, {}, pushes=2)
    with pytest.raises(ConfigError, match=r"sync\.folder=.*: 11\.0 MB free, .* 3 versions .* need 12\.0 MB; make room"):
        require_version_room(cfg, shapes, {}, pushes=3)
    delta = replace(cfg, sync=replace(cfg.sync, delta=True, full_every=4))
    require_version_room(delta, shapes, {}, pushes=100)  # how much changes is not known
    for name in ("version-000007", ".writing-version-000008-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(b"1" * 600_000)
    (tmp_path / "version-000007" / "sync.json").write_text('{"version": 7, "whole": true}')
    require_version_room(cfg, shapes, {}, pushes=3)  # these go


def test_model_path_of_a_version_that_holds_only_changes_is_refused(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "sync.json").write_text('{"version": 7, "whole": false}')
    with pytest.raises(ConfigError, match=r"model\.path=.*: .* holds only what has changed .*; use a version that is"):
        require_model_folder(str(tmp_path))


def test_folder_of_another_runs_versions_is_refused(scene: Scene, tmp_path: Path) -> None:
    cfg = scene.cfg(sync=SyncConfig(channel=Channel.disk, folder=str(tmp_path), probe_tokens=8))
    version = tmp_path / "version-000007"
    version.mkdir()
    (version / "sync.json").write_text('{"version": 7, "whole": true}')
    (tmp_path / ".run").write_text("/runs/other\n")
    with pytest.raises(ConfigError, match=r"sync\.folder=.*: it holds versions of the run in /runs/other"):
        require_own_folder(cfg, tmp_path / "run")
    require_own_folder(cfg, Path("/runs/other"))
    (tmp_path / ".run").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"sync\.folder="):
        require_own_folder(cfg, tmp_path / "run")
