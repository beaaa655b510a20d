"""What is said at launch about environments that cannot work, and what those that can are prepared with."""

from pathlib import Path
from typing import Any

import pytest

from conf.choices import Isolation, Rewrite
from conf.errors import ConfigError
from conf.launch import compose
from conf.schema import NO_REWARD, Config, DataConfig, EnvConfig, ModelConfig, RewardConfig, RolloutConfig, SftConfig
from rollout.demonstrations import oracle_turns
from rollout.environment import Observation
from rollout.played import task_of
from rollout.preflight.environment import make_bridge, make_tasks, prepare_env, try_first_task
from tests.unit.rollout.agents import CHATML, FORGETFUL, chat_tokenizer

ENVS = "tests.unit.rollout.some_envs"


def config(target: str, *, from_env: bool = True, sft: int = 0, max_model_len: int = 200, **env: Any) -> Config:
    return Config(
        model=ModelConfig(path="m"),
        env=EnvConfig(_target_=target if "." in target else f"{ENVS}.{target}", isolation=Isolation.inline, **env),
        data=DataConfig(
            from_env=from_env, _target_=None if from_env else "rollout.tasks.sort.generate", size=3, eval_size=2
        ),
        reward=RewardConfig(_target_=NO_REWARD),
        rollout=RolloutConfig(max_model_len=max_model_len),
        sft=SftConfig(num_steps=sft),
    )


def prepare(cfg: Config, template: str | None = CHATML) -> int:
    """All of it, as a launch does; the tokens of the first prompt."""
    tokenizer = chat_tokenizer(template or CHATML)
    tokenizer.chat_template = template
    prepared = prepare_env(cfg, tokenizer)
    train, _ = make_tasks(cfg)
    return try_first_task(cfg, prepared, tokenizer, train[0])


def test_environment_that_works_is_reset_once_and_its_prompt_measured() -> None:
    assert prepare(config("Plain")) == len("user\ntrain0" + "\n" + "assistant\n") + 3


def test_tasks_of_the_environment_are_made_for_each_split() -> None:
    train, held_out = make_tasks(config("Plain", kwargs={"length": 2}))
    assert [p.record["text"] for p in train] == ["train0train0", "train1train1", "train2train2"]
    assert [p.record["text"] for p in held_out] == ["eval0eval0", "eval1eval1"]
    assert [p.index for p in train] == [0, 1, 2]


def test_arguments_that_make_task_does_not_take_are_named() -> None:
    cfg = config("Tools")
    cfg.data.kwargs = {"length": 3}
    with pytest.raises(
        ConfigError, match=r"Tools\.make_task .*'length'; it is called as make_task\(split, seed, index"
    ):
        make_tasks(cfg)


def test_records_of_the_data_are_tasks_too() -> None:
    train, _ = make_tasks(config("Plain", from_env=False))
    assert set(train[0].record) == {"prompt", "answer"}


@pytest.mark.parametrize(
    ("target", "change", "template", "message"),
    [
        ("nowhere.Env", {}, CHATML, "env._target_=nowhere.Env.*no module"),
        ("NoStep", {}, CHATML, "NoStep.*step"),
        ("NoTasks", {}, CHATML, "NoTasks has no make_task"),
        ("Plain", {"kwargs": {"size": 3}}, CHATML, "size"),
        ("NumberForText", {}, CHATML, "reset must return an Observation, a list of messages or a str, found 7"),
        ("Plain", {"kwargs": {"length": 99}}, CHATML, "begins with .* tokens, and the context has room for 200"),
        ("Plain", {}, None, "no chat template"),
        ("Plain", {}, FORGETFUL, "rewrites history.*env.on_rewrite=keep"),
        ("SetForTask", {}, CHATML, r"make_task\('train', 0, 0\): Object of type set is not JSON serializable"),
        ("ObjectForTask", {}, CHATML, "ObjectForTask: make_task must be static.*@staticmethod"),
        ("ChanceForTask", {}, CHATML, r"make_task\('train', 0, 0\) gave another task the second time"),
        ("ExitForTask", {}, CHATML, r"make_task\('train', 0, 0\): SystemExit: 3"),
        ("Tools", {}, CHATML, "has tools, but env.tool_format=auto.*env.tool_format=hermes"),
        ("Tools", {"tool_format": "hermes"}, CHATML, "rollout.max_tokens=16: the shortest call of a tool of .* is 5. "),
    ],
)
def test_environment_that_cannot_work_is_refused_at_launch(
    target: str, change: dict[str, Any], template: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        prepare(config(target, **change), template)


def test_held_out_tasks_share_no_seed_with_training_tasks() -> None:
    train, held_out = make_tasks(config("Plain"))
    seeds = [task_of(0, prompt).seed for prompt in (*train, *held_out)]
    assert len(set(seeds)) == len(seeds) == 5


@pytest.mark.parametrize("rewrite", [Rewrite.keep, Rewrite.fork])
def test_template_that_rewrites_history_passes_when_the_choice_is_made(rewrite: Rewrite) -> None:
    make_bridge(config("Plain", on_rewrite=rewrite), chat_tokenizer(FORGETFUL), "none")


def test_oracle_turns_hold_what_is_seen_and_what_to_say() -> None:
    cfg, tokenizer = config("rollout.envs.guess.Guess", kwargs={"style": "plain", "high": 7}, sft=1), chat_tokenizer()
    pairs = oracle_turns(cfg, prepare_env(cfg, tokenizer), tokenizer, num_tasks=5)
    assert {tokenizer.decode(said) for seen, said in pairs if len(seen) == len(pairs[0][0])} == {"4<|im_end|>"}
    for seen, said in pairs:
        assert said[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(seen).endswith("assistant\n")
    assert len(pairs) > 5


def test_environment_without_an_oracle_has_no_demonstrations() -> None:
    cfg, tokenizer = config("Plain", sft=1), chat_tokenizer()
    with pytest.raises(ConfigError, match=r"sft\.num_steps=1.*has no oracle\(\) to learn from"):
        oracle_turns(cfg, prepare_env(cfg, tokenizer), tokenizer, num_tasks=1)


def test_env_on_the_command_line_brings_its_tasks_and_rewards() -> None:
    cfg = compose(["env=my.module.Env", "num_steps=3"])
    assert (cfg.env._target_, cfg.data.from_env, cfg.reward._target_) == ("my.module.Env", True, NO_REWARD)
    cfg = compose(["env=guess", "data=file", "data.path=tasks.jsonl"])
    assert (cfg.env._target_, cfg.data.path, cfg.data.from_env) == ("rollout.envs.guess.Guess", "tasks.jsonl", False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=env"], "there is no environment to make tasks"),
        (["env=guess", "reward=arithmetic"], "the environment gives the rewards; use reward=none"),
        (["env=gues"], "env has no such choice.*nearest: guess"),
        (["env=my_envs.py"], "takes no file; .*env=my_envs.CLASS"),
        (["env=./games/my_envs.py"], "takes no file; .*env=games.my_envs.CLASS"),
        (["env=../games/my_envs.py"], "takes no file; .*env=package.module.CLASS"),
        (["env=guess", "env.context_tokens=9999"], "an engine takes no more"),
        (["env=guess", "env.on_rewrite=fork", "env.context=window"], "use env.context=stop"),
        (["env=guess", "env.tool_format=json"], "must be one of auto, hermes, llama, xml, none, or vllm:NAME"),
        (["env=guess", "algo=remax"], "the greedy answer is that of one turn"),
    ],
)
def test_settings_that_do_not_go_with_an_environment_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        compose(overrides)


def test_first_environment_of_the_examples_can_be_trained_from_the_root() -> None:
    cfg = compose(["experiment=quickstart", "env=examples.my_first_env.Sums"])
    tokenizer = chat_tokenizer()
    prepared = prepare_env(cfg, tokenizer)
    train, held_out = make_tasks(cfg)
    assert try_first_task(cfg, prepared, tokenizer, train[0]) > 10
    assert (len(train), len(held_out)) == (cfg.data.size, cfg.data.eval_size)
    assert len(Path("examples/my_first_env.py").read_text().splitlines()) < 40


def test_observation_may_be_given_whole() -> None:
    assert Observation(messages=[]).agent == "main"
