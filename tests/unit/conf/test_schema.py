"""The YAML files against the schema, and the rules between fields."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf import document
from conf.choices import (
    Advantage,
    Channel,
    Correction,
    Device,
    KlPlace,
    Layout,
    Optimizer,
    PolicyLoss,
    Truncated,
)
from conf.errors import ConfigError
from conf.keys import CONF, Key, all_keys, group_choices, section_keys
from conf.launch import compose, to_dict
from conf.schema import (
    SECTIONS,
    AlgoConfig,
    ClusterConfig,
    Config,
    CriticConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    SyncConfig,
    TeacherConfig,
    TrainerConfig,
)

GROUPS = group_choices()
EXPERIMENTS = GROUPS["experiment"]
TWO = {"a": 1.0, "b": 1.0}
MUST_BE_GIVEN = {
    "model=hf": "model.path=somewhere",
    "data=file": "data.path=a.jsonl",
    "reward=function": "reward._target_=m.f",
    "algo=distill": "teacher.path=teacher",
    "sync=disk": "sync.folder=versions",
}
ROUNDS = max(len(choices) for choices in GROUPS.values())
FILES = sorted(CONF.glob("*/*.yaml"))


def schema_of(file: Path) -> dict[str, Key]:
    """Keys and defaults that a YAML file is laid over."""
    if file.parent.name == "experiment":
        return all_keys()
    return {key.path: key for key in section_keys(SECTIONS[file.parent.name], "")}


def flat(node: object, prefix: str = "") -> dict[str, object]:
    """Leaves of nested dictionaries by dotted path; free dictionaries (kwargs) stay whole."""
    if not isinstance(node, dict) or prefix.endswith("kwargs."):
        return {prefix.rstrip("."): node}
    return {path: leaf for key, value in node.items() for path, leaf in flat(value, f"{prefix}{key}.").items()}


def contents(file: Path) -> dict[str, object]:
    """The leaves of a YAML file, without its defaults list."""
    node = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(node, dict)
    node.pop("defaults")
    return flat(node) if node else {}


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_compose_each_choice_of_each_group_valid(turn: int) -> None:
    chosen = {group: choices[turn % len(choices)] for group, choices in GROUPS.items() if group != "experiment"}
    if chosen["algo"] == "remax":  # only for answers of one turn
        chosen["env"] = "none"
    if chosen["env"] != "none":  # which gives the rewards, and may make the tasks
        chosen |= {"reward": "none", "data": "env" if turn % 2 else chosen["data"]}
    elif chosen["data"] == "env":
        chosen["data"] = "sort"
    overrides = [f"{group}={choice}" for group, choice in chosen.items()]
    overrides += [MUST_BE_GIVEN[override] for override in overrides if override in MUST_BE_GIVEN]
    cfg = to_dict(compose(overrides))
    for group, choice in chosen.items():
        for key, value in contents(CONF / group / f"{choice}.yaml").items():
            assert flat(cfg[group])[key] == (value or flat(cfg[group])[key]), f"{group}={choice} does not set {key}"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_compose_each_experiment_sets_what_its_file_says(experiment: str) -> None:
    cfg = flat(to_dict(compose([f"experiment={experiment}"])))
    for key, value in contents(CONF / "experiment" / f"{experiment}.yaml").items():
        assert cfg[key] == value
    assert cfg["name"] == experiment
    every, steps = cfg["evaluation.every"], cfg["num_steps"]
    assert isinstance(every, int) and isinstance(steps, int) and every and steps % every == 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_yaml_file_any_holds_only_differences_from_the_schema(file: Path) -> None:
    schema = schema_of(file)
    for path, value in contents(file).items():
        assert path in schema, f"{file}: {path} is not in the schema"
        default = schema[path].default
        assert value != getattr(default, "name", default), f"{file}: {path} repeats the schema's default"


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_yaml_file_any_begins_with_its_meaning_and_its_schema(file: Path) -> None:
    defaults = OmegaConf.to_container(OmegaConf.load(file))["defaults"]  # type: ignore[index, call-overload]
    assert any(line.startswith("# ") and not line.startswith("# @") for line in file.read_text().splitlines()[:2])
    assert defaults[-1] == "_self_"
    assert file.parent.name == "experiment" or defaults == ["schema", "_self_"]


def test_schema_every_key_has_a_meaning_and_a_known_type() -> None:
    for key in all_keys().values():
        assert key.help and key.wanted
        assert key.default is None or key.fits(getattr(key.default, "name", key.default))


def test_compose_nothing_equals_the_schema_defaults() -> None:
    assert compose([]) == Config()


def test_config_page_in_docs_is_current() -> None:
    assert document.PAGE.read_text() == document.page(), "run `python -m conf.document`"


def test_document_check_stale_page_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "PAGE", tmp_path / "docs" / "config.md")
    monkeypatch.setattr("sys.argv", ["document", "--check"])
    assert document.main() == 1
    monkeypatch.setattr("sys.argv", ["document"])
    assert document.main() == 0
    monkeypatch.setattr("sys.argv", ["document", "--check"])
    assert document.main() == 0


def test_experiment_with_group_override_keeps_the_command_line() -> None:
    cfg = compose(["experiment=tiny_sort", "model=smollm2", "trainer=zero2", "sft.num_steps=0"])
    assert (cfg.model.path, cfg.trainer.zero_stage, cfg.trainer.lr, cfg.sft.num_steps) == ("models/smollm2", 2, 3e-4, 0)


def test_num_optimizer_steps_ten_steps_two_epochs_two_mini_batches_is_40() -> None:
    shape = ["trainer.micro_batch_tokens=64", "cluster.train_ranks=2", "samples_per_prompt=4"]
    cfg = compose(["num_steps=10", "prompts_per_step=8", "algo.num_epochs=2", "algo.num_mini_batches=2", *shape])
    assert cfg.num_optimizer_steps == 40
    assert replace(cfg, cluster=ClusterConfig(train_ranks=1), samples_per_prompt=8).num_optimizer_steps == 40


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (
            lambda: Config(prompts_per_step=8, algo=AlgoConfig(num_mini_batches=3)),
            ["prompts_per_step=8", "num_mini_batches=3"],
        ),
        (lambda: Config(samples_per_prompt=1), ["samples_per_prompt=1", "at least 2"]),
        (lambda: RolloutConfig(max_tokens=512), ["rollout.max_tokens=512", "rollout.max_model_len=512"]),
        (lambda: Config(rollout=RolloutConfig(tp=[1, 2])), ["rollout.tp=[1, 2]", "cluster.rollout_engines=1"]),
        (lambda: Config(cluster=ClusterConfig(train_ranks=3)), ["64 rows", "cluster.train_ranks=3"]),
        (lambda: AlgoConfig(clip_low=1.5), ["algo.clip_low=1.5", "<= 1"]),
        (lambda: AlgoConfig(dual_clip=0.5), ["algo.dual_clip=0.5", "above 1"]),
        (lambda: AlgoConfig(kl_target=0.1), ["algo.kl_target=0.1", "algo.kl_coef=0.0"]),
        (lambda: AlgoConfig(reference_refresh=5), ["algo.reference_refresh=5", "algo.kl_coef=0.0"]),
        (lambda: AlgoConfig(curriculum_low=0.9, curriculum_high=0.1), ["algo.curriculum_low=0.9", "high=0.1"]),
        (lambda: AlgoConfig(correction_low=3.0), ["algo.correction_low=3.0", "<= 2"]),
        (
            lambda: AlgoConfig(loss=PolicyLoss.gmpo, advantage=Advantage.gae),
            ["algo.loss=gmpo", "algo.advantage=gae", "one advantage for a row"],
        ),
        (lambda: AlgoConfig(dual_clip=3.0, loss=PolicyLoss.gspo), ["algo.dual_clip=3.0", "algo.loss=gspo"]),
        (
            lambda: AlgoConfig(advantage=Advantage.gae, dynamic_sampling=True),
            ["algo.dynamic_sampling=true", "algo.advantage=gae"],
        ),
        (
            lambda: AlgoConfig(advantage=Advantage.remax, overlong_buffer_tokens=4),
            ["algo.advantage=remax", "algo.overlong_buffer_tokens=4"],
        ),
        (
            lambda: AlgoConfig(advantage=Advantage.teacher, kl_coef=0.1, kl_in=KlPlace.reward),
            ["algo.kl_in=reward", "algo.advantage=teacher"],
        ),
        (
            lambda: Config(reward_model=RewardModelConfig(path="m"), reward=RewardConfig(shuffle=True)),
            ["reward.shuffle=true", "reward_model.path=m"],
        ),
        (
            lambda: AlgoConfig(loss=PolicyLoss.decoupled, correction=Correction.band),
            ["algo.loss=decoupled", "algo.correction=band"],
        ),
        (lambda: AlgoConfig(loss=PolicyLoss.divergence), ["algo.loss=divergence", "algo.advantage=group", "distill"]),
        (
            lambda: Config(critic=CriticConfig(path="c")),
            ["critic.path=c", "algo.advantage=group", "no critic", "algo=ppo"],
        ),
        (
            lambda: Config(algo=AlgoConfig(advantage=Advantage.gae), critic=CriticConfig(warmup_steps=12)),
            ["critic.warmup_steps=12", "num_steps=12"],
        ),
        (lambda: Config(algo=AlgoConfig(advantage=Advantage.teacher)), ["teacher.path=null", "algo.advantage=teacher"]),
        (lambda: Config(teacher=TeacherConfig(path="t")), ["teacher.path=t", "algo.advantage=group"]),
        (
            lambda: Config(samples_per_prompt=1, algo=AlgoConfig(advantage=Advantage.rloo)),
            ["samples_per_prompt=1", "algo.advantage=rloo"],
        ),
        (
            lambda: Config(reward_model=RewardModelConfig(path="m"), algo=AlgoConfig(dynamic_sampling=True)),
            ["reward_model.path=m", "algo.dynamic_sampling=true"],
        ),
        (
            lambda: Config(reward=RewardConfig(weights=TWO, separate=True), algo=AlgoConfig(advantage=Advantage.rloo)),
            ["reward.separate=true", "algo.advantage=rloo"],
        ),
        (lambda: RewardConfig(separate=True), ["reward.separate=true", "at least two"]),
        (
            lambda: Config(algo=AlgoConfig(overlong_buffer_tokens=16)),
            ["algo.overlong_buffer_tokens=16", "rollout.max_tokens=16"],
        ),
        (lambda: ClusterConfig(colocate=["policy"]), ["cluster.colocate=['policy']", "critic, reference"]),
        (lambda: Config(name="a/b"), ["name='a/b'"]),
        (lambda: TrainerConfig(lr=float("nan")), ["trainer.lr=nan"]),
        (lambda: TrainerConfig(lr=float("inf")), ["trainer.lr=inf", "finite"]),
        (lambda: Config(trainer=TrainerConfig(zero_stage=4)), ["trainer.zero_stage=4"]),
        (lambda: TrainerConfig(optimizer=Optimizer.muon), ["trainer.optimizer=muon", "trainer.zero_stage=1"]),
        (
            lambda: Config(
                trainer=TrainerConfig(optimizer=Optimizer.cpu_adam), cluster=ClusterConfig(device=Device.cuda)
            ),
            ["trainer.optimizer=cpu_adam", "cluster.device=cuda", "use trainer.offload_optimizer=true"],
        ),
        (
            lambda: Config(
                algo=AlgoConfig(advantage=Advantage.teacher, loss=PolicyLoss.divergence),
                teacher=TeacherConfig(path="teacher"),
                trainer=TrainerConfig(fused_logprobs=True),
            ),
            ["trainer.fused_logprobs=true", "algo.loss=divergence", "use trainer.fused_logprobs=false"],
        ),
        (
            lambda: Config(algo=AlgoConfig(kl_target=0.1, kl_coef=0.1, kl_horizon=10)),
            ["algo.kl_horizon=10", "prompts_per_step=8", "more than 12.8"],
        ),
        (lambda: SyncConfig(channel=Channel.disk), ["sync.channel=disk", "write sync.folder=FOLDER"]),
        (lambda: SyncConfig(folder="x"), ["sync.folder=x", "sync.channel=shm", "use sync.channel=disk, or leave"]),
        (
            lambda: Config(rollout=RolloutConfig(max_model_len=8, max_tokens=4)),
            ["sync.probe_tokens=8", "rollout.max_model_len=8"],
        ),
        (
            lambda: Config(
                reward=RewardConfig(weights=TWO, separate=True), algo=AlgoConfig(truncated=Truncated.punish)
            ),
            ["reward.separate=true", "algo.truncated=punish"],
        ),
        (
            lambda: Config(algo=AlgoConfig(num_mini_batches=4), cluster=ClusterConfig(train_ranks=4)),
            ["trainer.layout=shared_prefix", "algo.num_mini_batches=4", "no group"],
        ),
        (
            lambda: Config(lora=LoraConfig(rank=2), trainer=TrainerConfig(optimizer=Optimizer.muon, zero_stage=0)),
            ["lora.rank=2", "trainer.optimizer=muon"],
        ),
        (lambda: Config(run_dir=""), ["run_dir=''"]),
        (lambda: AlgoConfig(curriculum_low=float("nan")), ["algo.curriculum_low=nan"]),
        (lambda: AlgoConfig(dual_clip=float("inf")), ["algo.dual_clip=inf"]),
        (lambda: TrainerConfig(beta2=1.0), ["trainer.beta2=1.0", "< 1"]),
        (lambda: TrainerConfig(replay_routing=True), ["trainer.replay_routing=true", "trainer.layout=shared_prefix"]),
        (
            lambda: Config(trainer=TrainerConfig(replay_routing=True, layout=Layout.packed)),
            ["trainer.replay_routing=true", "algo.num_mini_batches=1", "algo.num_epochs=1"],
        ),
        (lambda: ModelConfig(path=""), ["model.path"]),
        (lambda: RewardConfig(_target_=""), ["reward._target_"]),
        (lambda: DataConfig(), ["data._target_=null", "data.path=null"]),
        (lambda: DataConfig(_target_="a.b", path="c"), ["data._target_=a.b", "data.path=c"]),
    ],
)
def test_schema_impossible_values_refused_with_fields_and_values(make: Callable[[], object], pieces: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    for piece in pieces:
        assert piece in str(error.value)


@pytest.mark.parametrize("file", sorted((CONF / "algo").glob("*.yaml")), ids=lambda file: file.stem)
def test_algorithms_page_has_a_row_with_every_key_the_file_sets(file: Path) -> None:
    page = (CONF.parent / "docs" / "algorithms.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{file.stem}` | ")]
    for key, value in re.findall(r"^(\w+): (\S+)", file.read_text(), re.M):
        if key != "name":
            assert f"`{key}={value}`" in row
