"""The command line: good and bad overrides, sweeps, help, what is printed and what is imported."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.errors import ConfigError
from conf.keys import all_keys, nearest_key
from conf.launch import compose, hydra_parser, launch, main, to_dict, to_yaml
from conf.overrides import expand, quoted, read
from conf.schema import Config, SftConfig, TrainerConfig

ROOT = Path(__file__).parents[3]
Capture = pytest.CaptureFixture[str]

# (overrides, pieces that the message must contain)
BAD: list[tuple[list[str], list[str]]] = [
    # unknown keys
    (["trainer.lrr=1"], ["trainer.lrr=1", "nearest: trainer.lr"]),
    (["modle.path=x"], ["modle.path=x", "nearest: model.path"]),
    (["lr=1e-6"], ["lr=1e-6", "trainer.lr", "sft.lr"]),
    (["+trainer.new=1"], ["+trainer.new=1", "'+' cannot add", "nearest: trainer."]),
    (["++trainer.new=1"], ["++trainer.new=1", "'+' cannot add", "nearest: trainer."]),
    (["+trainer.lr=1"], ["+trainer.lr=1", "write trainer.lr=1"]),
    (["trainer.lr.x=1"], ["trainer.lr.x=1", "no key"]),
    (["algorithm=grpo"], ["algorithm=grpo", "nearest: algo"]),
    (["hydra.run.dir=x"], ["hydra.run.dir=x", "run_dir=PATH"]),
    (["hydra/launcher=basic"], ["hydra/launcher=basic"]),
    (["sft=3"], ["sft is a section", "sft."]),
    # groups
    (["algo=grpp"], ["algo=grpp", "dr_grpo, gmpo, grpo", "nearest: grpo"]),
    (["experiment=quikstart"], ["experiment=quikstart", "tiny_sort", "nearest: quickstart"]),
    (["algo=null"], ["algo=null", "dr_grpo, gmpo, grpo"]),
    (["algo=[grpo,dr_grpo]"], ["algo=[grpo,dr_grpo]", "choices"]),
    (["algo=grpo,dr_grpo"], ["algo=grpo,dr_grpo", "-m"]),
    (["trainer=schema"], ["trainer=schema", "zero0, zero1, zero2, zero3"]),
    (["+experiment=quickstart"], ["write experiment=quickstart"]),
    (["~algo"], ["~algo", "choose one of"]),
    (["algo@x=grpo"], ["algo@x=grpo", "algo=CHOICE"]),
    # types
    (["num_steps=abc"], ["num_steps=abc", "an integer", "'abc'"]),
    (["num_steps=04"], ["num_steps=04", "an integer", "write 4"]),
    (["num_steps='4'"], ["num_steps='4'", "an integer", "write 4"]),
    (["num_steps=1.5"], ["num_steps=1.5", "an integer"]),
    (["num_steps=true"], ["num_steps=true", "an integer"]),
    (["num_steps="], ["num_steps=", "an integer"]),
    (["num_steps=[1]"], ["num_steps=[1]", "an integer"]),
    (["trainer.lr=fast"], ["trainer.lr=fast", "a number"]),
    (["trainer.lr=true"], ["trainer.lr=true", "a number"]),
    (["reward.shuffle=yes"], ["reward.shuffle=yes", "true or false"]),
    (["reward.shuffle=1"], ["reward.shuffle=1", "true or false"]),
    (["trainer.dtype=bf16"], ["trainer.dtype=bf16", "float32, bfloat16", "nearest: bfloat16"]),
    (["rollout.tp=2"], ["rollout.tp=2", "a list", "'rollout.tp=[2]'"]),
    (["rollout.tp=[1,a]"], ["rollout.tp=[1,a]", "an integer"]),
    (["data.kwargs=3"], ["data.kwargs=3", "a dictionary"]),
    (["name=[a]"], ["name=[a]", "text"]),
    # null only where the type allows it
    (["trainer.lr=null"], ["trainer.lr=null", "a number, not null"]),
    (["name=null"], ["name=null", "text, not null"]),
    (["trainer.dtype=null"], ["trainer.dtype=null", "not null"]),
    (["rollout.tp=null"], ["rollout.tp=null", "not null"]),
    (["~data.path"], ["~data.path", "write data.path=null"]),
    (["~trainer.lr"], ["~trainer.lr", "write trainer.lr=VALUE"]),
    # syntax
    (["data.path=a=b"], ["data.path=a=b", """'data.path="a=b"'"""]),
    (["data.path=a,b"], ["data.path=a,b", "-m", """'data.path="a,b"'"""]),
    (["rollout.tp=1,2"], ["rollout.tp=1,2", "-m", "'rollout.tp=[1,2]'"]),
    (["num_steps=1,2"], ["num_steps=1,2", "-m"]),
    (["num_steps=range(1,3)"], ["num_steps=range(1,3)", "-m"]),
    (["data.path=it's"], ["data.path=it's", """'data.path="it'"'"'s"'"""]),
    (["data.kwargs.stop=[###]"], ["data.kwargs.stop=[###]", '["first text","second text"]']),
    (["num_steps = 3"], ["num_steps = 3", "without spaces"]),
    (["quickstart"], ["quickstart", "key=value"]),
    (["=3"], ["=3", "key=value"]),
    (["num_steps=${nothing}"], ["num_steps", "nothing"]),
    (["name=${oc.env:TANDEM_NO_SUCH_VARIABLE}"], ["name", "TANDEM_NO_SUCH_VARIABLE"]),
    # values and combinations
    (["num_steps=0"], ["num_steps=0", ">= 1"]),
    (["prompts_per_step=8", "algo.num_mini_batches=3"], ["prompts_per_step=8", "algo.num_mini_batches=3"]),
    (
        ["prompts_per_step=3", "samples_per_prompt=3", "cluster.train_ranks=2"],
        ["prompts_per_step=3", "samples_per_prompt=3", "9 rows", "cluster.train_ranks=2"],
    ),
    (["trainer=zero0", "trainer.dtype=bfloat16"], ["trainer.dtype=bfloat16", "trainer.zero_stage=0"]),
    (["data=file"], ["data.path", "data=file data.path=FILE"]),
    (["model=hf"], ["model.path", "model.path=FOLDER"]),
    (["reward=function"], ["reward._target_"]),
]

# (override, key, the value it gives): no two of the same key, so one config shows them all
GOOD: list[tuple[str, str, object]] = [
    ("++trainer.lr=1e-6", "trainer.lr", 1e-6),
    ("trainer.grad_clip=1", "trainer.grad_clip", 1.0),
    ("seed=1_000", "seed", 1000),
    ("run_dir=null", "run_dir", None),
    ("trainer.dtype=bfloat16", "trainer.dtype", "bfloat16"),
    ("reward.kwargs.stop=['###']", "reward.kwargs", {"stop": ["###"]}),
    ("+sft.kwargs.n=04", "sft.kwargs", {"n": "04"}),
    ("data.kwargs={a: 1, b: [x, null]}", "data.kwargs", {"a": 1, "b": ["x", None]}),
    ("data.system_prompt='a=b, c'", "data.system_prompt", "a=b, c"),
    ('model.path="a,b"', "model.path", "a,b"),
    ("name=2024.10", "name", "2024.10"),
    ("algo.name=1e3", "algo.name", "1e3"),
    ("tracking.project=04", "tracking.project", "04"),
    ("resume=true", "resume", "true"),
    ("sft.lr=${trainer.lr}", "sft.lr", 1e-6),
    ("data.eval_path=/a b/c-d_e.jsonl", "data.eval_path", "/a b/c-d_e.jsonl"),
    ("cluster.rollout_engines=3", "cluster.rollout_engines", 3),
    ("rollout.tp=[2,1,1]", "rollout.tp", [2, 1, 1]),
]


def value_at(cfg: Config, path: str) -> object:
    node: object = to_dict(cfg)
    for name in path.split("."):
        assert isinstance(node, dict)
        node = node[name]
    return node


def never(cfg: Config) -> int:
    raise AssertionError("the task must not run")


@pytest.mark.parametrize(("overrides", "pieces"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_command_line_bad_override_exit_2(overrides: list[str], pieces: list[str], capsys: Capture) -> None:
    assert main(never, overrides) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("configuration error: ") and err.count("\n") == 1
    for piece in pieces:
        assert piece in err


@pytest.fixture(scope="module")
def good() -> Config:
    return compose([override for override, _, _ in GOOD])


@pytest.mark.parametrize(("override", "path", "value"), GOOD, ids=[override for override, _, _ in GOOD])
def test_compose_good_override_gives_value_and_type(good: Config, override: str, path: str, value: object) -> None:
    assert value_at(good, path) == value and type(value_at(good, path)) is type(value)


def test_compose_result_holds_no_omegaconf_container(good: Config) -> None:
    assert type(good.data.kwargs) is dict and type(good.data.kwargs["b"]) is list and type(good.rollout.tp) is list


def test_compose_dictionary_entry_deleted_is_gone() -> None:
    assert compose(["data.kwargs={a:1,b:2}", "~data.kwargs.a"]).data.kwargs == {"b": 2}


@settings(max_examples=200, deadline=None)
@given(st.text("ab1.=,'\"\\#[]{}():;|! $", min_size=1, max_size=8).filter(lambda text: "${" not in text))
def test_quoted_any_text_pasted_into_a_shell_gives_the_text(text: str) -> None:
    (override,) = shlex.split(quoted("run_dir", text))
    assert read(OverridesParser.create(), override).value() == text


def test_main_valid_overrides_gives_task_the_dataclass_and_returns_its_code() -> None:
    seen: list[Config] = []
    assert main(lambda cfg: seen.append(cfg), ["num_steps=3"]) == 0
    assert not GlobalHydra.instance().is_initialized()
    assert type(seen[0]) is Config and seen[0].num_steps == 3


def test_main_config_error_in_task_printed_like_any_other(capsys: Capture) -> None:
    def task(cfg: Config) -> int:
        raise ConfigError("model.path=nowhere: there is no such folder")

    assert main(task, []) == 2
    assert capsys.readouterr().err == "configuration error: model.path=nowhere: there is no such folder\n"


def test_main_other_error_in_task_is_raised() -> None:
    with pytest.raises(AssertionError, match="must not run"):
        main(never, [])


def test_main_cfg_job_prints_the_resolved_config(capsys: Capture) -> None:
    assert main(never, ["sft.lr=${trainer.lr}", "--cfg", "job", "trainer.lr=0.5"]) == 0
    printed = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert printed == to_dict(Config(trainer=TrainerConfig(lr=0.5), sft=SftConfig(lr=0.5)))


def test_main_help_names_groups_experiments_and_docs(capsys: Capture) -> None:
    assert main(never, ["--help"], doc="Train a policy.") == 0
    text = capsys.readouterr().out
    for piece in ["Train a policy.", "usage:", "tiny_sort", "zero0, zero1", "num_steps", "-m", "docs/config.md"]:
        assert piece in text


@pytest.mark.parametrize("argv", [["--foo"], ["--cfg", "hydra"], ["--config-dir", "/nowhere"], ["--multi"]])
def test_main_unknown_option_exit_2(argv: list[str], capsys: Capture) -> None:
    assert main(never, argv) == 2
    err = capsys.readouterr().err
    assert argv[0] in err and err.count("\n") == 1


def test_sweep_two_keys_runs_every_combination_in_order() -> None:
    jobs = expand(OverridesParser.create(), ["seed=range(0,2)", "trainer.lr=1e-4,3e-4", "name=try"])
    assert [job[:2] for job in jobs] == [[f"seed={seed}", f"trainer.lr={lr}"] for seed in (0, 1) for lr in (1e-4, 3e-4)]
    assert all(job[2] == "name=try" for job in jobs)


def test_sweep_jobs_of_one_name_get_numbered_names() -> None:
    seen: list[tuple[str, int]] = []
    assert main(lambda cfg: seen.append((cfg.name, cfg.seed)), ["seed=3,4", "-m", "name=try"]) == 0
    assert seen == [("try-0", 3), ("try-1", 4)]


def test_sweep_over_a_group_by_glob_gives_its_choices_without_the_schema() -> None:
    with hydra_parser() as parser:
        assert expand(parser, ["trainer=glob(*)"]) == [[f"trainer=zero{stage}"] for stage in range(4)]


@pytest.mark.parametrize(
    ("argv", "pieces"),
    [
        (["num_steps=1,0"], ["num_steps=0"]),
        (["algo=grpo,nope"], ["algo=nope", "nearest:"]),
        (["trainer.lr=interval(0,1)"], ["trainer.lr=interval(0,1)", "range(1,4)"]),
        (["experiment=glob(zz*)"], ["experiment=glob(zz*)", "no value"]),
        (["seed=1,2", "run_dir=/tmp/x"], ["run_dir=/tmp/x", "2 jobs"]),
    ],
)
def test_sweep_one_bad_job_starts_none(argv: list[str], pieces: list[str], capsys: Capture) -> None:
    assert main(never, ["-m", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(piece in err for piece in pieces)


def test_sweep_failing_jobs_run_all_and_first_code_wins(capsys: Capture) -> None:
    def task(cfg: Config) -> int:
        if cfg.seed == 1:
            raise RuntimeError("broken")
        raise ConfigError("seed=2: not today")

    assert main(task, ["-m", "seed=1,2"]) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: broken" in err and "configuration error: seed=2" in err


@pytest.mark.parametrize("code", [130, 143])
def test_sweep_interrupted_job_ends_the_sweep(code: int) -> None:
    seen: list[int] = []

    def task(cfg: Config) -> int:
        seen.append(cfg.seed)
        return code if cfg.seed == 2 else 0

    assert main(task, ["-m", "seed=1,2,3"]) == code
    assert seen == [1, 2]


def test_launch_ctrl_c_outside_the_task_s_own_handling_exit_130(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def task(cfg: Config) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as stopped:
        launch(task)
    assert stopped.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("body", "pieces"),
    [
        ("num_stepz: 3\n", ["experiment/mine", "num_stepz", "nearest: num_steps"]),
        ("trainer:\n  lr: abc\n", ["experiment/mine", "trainer.lr", "abc"]),
        ("trainer: [\n", ["mine.yaml", "line"]),
        ("defaults:\n  - override /model: tinny\n", ["model=tinny", "nearest: tiny"]),
    ],
)
def test_config_dir_bad_file_one_message(body: str, pieces: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n" + body)
    assert main(never, ["--config-dir", str(tmp_path), "experiment=mine"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(piece in err for piece in pieces)


def test_config_dir_experiment_of_the_user_is_found(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nnum_steps: 5\n")
    assert compose(["experiment=mine"], config_dir=str(tmp_path)).num_steps == 5


def test_nearest_key_two_letters_swapped_is_found_again() -> None:
    options = [path for path in all_keys() if len(path.split(".")[-1]) > 6]
    for path in options:
        assert path in nearest_key(path[:-2] + path[-1] + path[-2], list(all_keys()))


def values_for(path: str) -> st.SearchStrategy[object]:
    """Valid values of keys that are free of rules between fields."""
    key = all_keys()[path]
    if hasattr(key.type, "__members__"):
        return st.sampled_from(list(key.type.__members__))
    words = st.text("abcXYZ019_.- =,'\"\\#[]{}():;|$é", min_size=1, max_size=12).filter(lambda text: "${" not in text)
    strategies: dict[object, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        int: st.integers(1, 10**6),
        float: st.floats(0.001, 0.999),
        str: words,
    }
    return strategies[key.type] if not key.optional else st.none() | strategies[key.type]


FREE_KEYS = [
    "num_steps", "seed", "max_lag", "run_dir", "algo.name", "algo.clip_low", "algo.kl_coef", "algo.kl_estimator",
    "algo.normalize_std", "model.path", "data.template", "data.system_prompt", "data.eval_path", "data.shuffle",
    "trainer.lr", "trainer.schedule", "trainer.beta2", "trainer.num_threads", "cluster.address",
    "cluster.device", "reward.deadline_s", "resume", "checkpoint.force", "tracking.project", "tracking.wandb", "sft.lr",
    "sft.batch_size",
]  # fmt: skip


def written(path: str, value: object) -> str:
    """An override as a user types it (the shell's quotes already gone)."""
    if isinstance(value, str) and hasattr(all_keys()[path].type, "__members__"):
        return f"{path}={value}"
    if isinstance(value, str):
        return shlex.split(quoted(path, value))[0]
    return f"{path}={'null' if value is None else str(value).lower()}"


@settings(max_examples=3, deadline=None)
@given(st.fixed_dictionaries({path: values_for(path) for path in FREE_KEYS}), st.sets(st.sampled_from(FREE_KEYS)))
def test_compose_random_valid_overrides_round_trip(values: dict[str, object], left_out: set[str]) -> None:
    given_values = {path: value for path, value in values.items() if path not in left_out}
    cfg = compose([written(path, value) for path, value in given_values.items()])
    for path in FREE_KEYS:
        assert value_at(cfg, path) == given_values.get(path, value_at(Config(), path))
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(cfg))) == to_dict(cfg)


def run_script(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a script whose task says what has been imported, in an empty folder."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nbegin = time.perf_counter()\nfrom conf.launch import launch\n"
        "def task(cfg):\n"
        "    heavy = {'torch', 'ray', 'vllm', 'transformers', 'deepspeed', 'wandb', 'numpy'} & set(sys.modules)\n"
        "    print(cfg.name, sorted(heavy), time.perf_counter() - begin)\n"
        "    return 3\n"
        "launch(task)\n"
    )
    (tmp_path / "cwd").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *argv]
    return subprocess.run(command, cwd=tmp_path / "cwd", env=environment, capture_output=True, text=True, timeout=60)


def test_script_valid_is_quick_imports_nothing_heavy_and_leaves_no_file(tmp_path: Path) -> None:
    done = run_script(tmp_path, "experiment=tiny_sort", "num_steps=20")
    assert done.returncode == 3 and done.stderr == ""
    name, heavy, seconds = done.stdout.split()
    assert (name, heavy) == ("tiny_sort", "[]")
    assert float(seconds) < 3  # 0.5 s on an idle machine; the bound leaves room for a busy one
    assert list((tmp_path / "cwd").iterdir()) == []


def test_script_bad_key_exit_2_one_line_on_stderr(tmp_path: Path) -> None:
    done = run_script(tmp_path, "+trainer.new=1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in done.stderr and "trainer.new" in done.stderr
    assert list((tmp_path / "cwd").iterdir()) == []
