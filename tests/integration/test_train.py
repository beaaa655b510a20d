"""Whole runs, started as users start them: what they write, what they leave, and that resuming changes nothing."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.prepare_model import PrepareError, prepare_smollm2
from scripts.reshard import reshard
from tests.integration.scripts import ROOT, Job, read_json, read_lines, run_folder, start, training_state, wait_all
from tests.unit.stand_ins import make_cfg

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN_S = 240.0  # longest run, on a busy machine
PROMPTS, SAMPLES = 8, 4
MISMATCH = 1e-5
SMALL = (
    "experiment=tiny_sort",
    f"prompts_per_step={PROMPTS}",
    f"samples_per_prompt={SAMPLES}",
    "algo.num_mini_batches=1",
    "trainer.schedule=constant",
    "sft.num_steps=40",
    "reward._target_=tests.integration.rewards.closeness",
    f"tracking.samples_per_step={PROMPTS * SAMPLES}",
)
TRACKED = ("tracking=offline", "algo.kl_coef=0.05")
SUMMARY = (
    "status", "steps", "reward_first", "reward_last", "eval_first", "eval_last", "eval_greedy_first",
    "eval_greedy_last", "mismatch_max", "rollout_tok_s", "train_tok_s", "sync_s_median", "step_s_median", "phases",
    "peak_rss_bytes", "wall_s",
)  # fmt: skip


def begin(folder: Path, model: Path, *more: str, env: dict[str, str] | None = None) -> Job:
    """A run of scripts/train.py, just started."""
    return start("train.py", folder, *SMALL, f"model.path={model}", *more, env=env)


def train(folder: Path, model: Path, *more: str) -> Job:
    """A run of scripts/train.py, finished and checked."""
    return begin(folder, model, *more).wait(RUN_S).check()


@pytest.fixture(scope="module")
def both(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Two runs at once, as most of their time is waiting for imports on one core: three steps, and six."""
    key = {"WANDB_API_KEY": "0" * 40}
    jobs = {
        name: begin(tmp_path_factory.mktemp(name), tiny_folder, *TRACKED, f"num_steps={steps}", env=key)
        for name, steps in {"short": 3, "straight": 6}.items()
    }
    wait_all(jobs.values(), RUN_S)
    return jobs


@pytest.fixture(scope="module")
def short(both: dict[str, Job]) -> Job:
    """Three steps with a reference, checkpoint and export at the end; with a W&B key, which must not be used."""
    return both["short"].check()


@pytest.fixture(scope="module")
def copies(short: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the short run as it was after three steps, to be continued in different ways."""
    names = ("same", "other")
    root = tmp_path_factory.mktemp("copies")
    return {name: Path(shutil.copytree(short.folder, root / name, symlinks=True)) for name in names}


@pytest.fixture(scope="module")
def straight(both: dict[str, Job]) -> Path:
    """Six steps in one go."""
    return run_folder(both["straight"].check().folder)


@pytest.fixture(scope="module")
def resumed(copies: dict[str, Path], tiny_folder: Path) -> Path:
    """Three steps, then six with the same command."""
    return run_folder(train(copies["same"], tiny_folder, *TRACKED, "num_steps=6").folder)


# -- what a run writes --


def test_run_writes_its_summary_and_metrics(short: Job) -> None:
    run = run_folder(short.folder)
    summary = read_json(run / "summary.json")
    assert set(summary) == set(SUMMARY)
    assert summary["status"] == "finished" and summary["steps"] == 3
    assert all(value is not None for value in summary.values())
    assert 0 < summary["mismatch_max"] <= MISMATCH
    assert {"rollout", "score", "update", "sync"} <= set(summary["phases"])
    assert 0 < summary["wall_s"] < short.seconds and summary["peak_rss_bytes"] > 1e8
    rows = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert set(rows[0]) >= {"eval/mean", "eval/greedy_mean"} and rows[3]["eval/mean"] == summary["eval_last"]
    for row in rows[1:]:
        assert row["mismatch/mean"] <= MISMATCH
        assert row["rollout/num_failed"] == 0 and row["policy/skipped_steps"] == 0
        assert row["rollout/lag_mean"] == row["rollout/lag_max"] == 0
        assert all(math.isfinite(value) for value in row.values())
    assert rows[2]["memory/policy_parameters_bytes"] == pytest.approx(4 * 102_848, rel=0.01)
    assert rows[2]["memory/policy_update_peak_bytes"] > rows[2]["memory/policy_promised_bytes"]
    assert "memory of policy ranks, zero0 dp1: weights 0.4 MB (promised 0.4)" in short.text
    for name in ("config.yaml", "versions.json", "run.json", "evaluation_000000.json", "evaluation_000003.json"):
        assert (run / name).stat().st_size
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_run_starts_a_reference_that_equals_the_first_policy(short: Job) -> None:
    rows = read_lines(run_folder(short.folder) / "metrics.jsonl")
    assert rows[1]["policy/kl"] == pytest.approx(0.0, abs=1e-12)
    assert rows[3]["policy/kl"] > 1e-8


def test_run_draws_each_prompt_once_and_records_every_sample(short: Job) -> None:
    samples = read_lines(run_folder(short.folder) / "rollouts.jsonl")
    for step in (1, 2, 3):
        drawn = [sample["position"] for sample in samples if sample["step"] == step]
        assert drawn == [k for k in range(PROMPTS * (step - 1), PROMPTS * step) for _ in range(SAMPLES)]
    assert len(samples) == 3 * PROMPTS * SAMPLES
    assert {sample["status"] for sample in samples} == {"ok"}


def test_exported_model_is_the_checkpoint_and_loads(short: Job, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_folder(short.folder)
    lm = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(run / "hf").decode([44, 45]) != ""
    assert lm.get_input_embeddings().weight.data_ptr() == lm.get_output_embeddings().weight.data_ptr()
    state, manifest = training_state(run, 3)
    names = {name for name, _ in lm.named_parameters()}
    assert set(state) == {f"{name}|{kind}" for name in names for kind in ("master", "exp_avg", "exp_avg_sq")}
    for name, parameter in lm.named_parameters():
        assert torch.equal(parameter, state[f"{name}|master"])
    assert manifest["roles"]["policy"]["optimizer_step"] == manifest["step"] == 3
    assert manifest["run_state"]["prompts_consumed"] == 3 * PROMPTS
    reshard(make_cfg(), run, "hf", tmp_path / "resharded", None)
    exported, resharded = load_file(run / "hf/model.safetensors"), load_file(next(tmp_path.glob("*/*.safetensors")))
    assert exported.keys() == resharded.keys()
    assert all(torch.equal(resharded[name], tensor) for name, tensor in exported.items())


def wandb_ids(run: Path) -> list[str]:
    return [path.name.split("-")[-1] for path in sorted((run / "wandb").glob("offline-run-*"))]


def test_tracking_offline_stays_offline_with_a_key(short: Job) -> None:
    run = run_folder(short.folder)
    assert "W&B: offline (tracking.offline=true)" in short.text.replace("\n", " ")
    (found,) = wandb_ids(run)
    assert training_state(run, 3)[1]["run_state"]["tracking_ids"] == {"wandb": found}
    assert list((run / "wandb").glob(f"offline-run-*/run-{found}.wandb"))


# -- resuming --

TIMES = ("time", "tok_s", "_s", "memcpy_ratio")


def comparable(run: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl without what depends on the clock, or on where a part of the run begins."""
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["step"] >= 1]
    return [
        {key: value for key, value in row.items() if not key.endswith(TIMES) and not key.startswith("memory/")}
        for row in rows
    ]


def assert_same_run(run: Path, straight: Path, tolerance: float) -> None:
    ours, theirs = training_state(run, 6), training_state(straight, 6)
    assert ours[0].keys() == theirs[0].keys()
    for key, tensor in theirs[0].items():
        assert float((ours[0][key] - tensor).abs().max()) <= tolerance, key
    kept = ("step", "optimizer_step", "prompts_consumed", "tokens_sampled", "tokens_trained", "trajectories_failed")
    assert [ours[1]["run_state"][k] for k in kept] == [theirs[1]["run_state"][k] for k in kept]
    assert ours[1]["roles"] == theirs[1]["roles"]
    assert ours[1]["roles"]["policy"]["optimizer_step"] == 6
    samples = [
        [(s["step"], s["position"], s["completion"]) for s in read_lines(folder / "rollouts.jsonl")]
        for folder in (run, straight)
    ]
    assert samples[0] == samples[1]
    assert [position for _, position, _ in samples[0]] == [k for k in range(6 * PROMPTS) for _ in range(SAMPLES)]


def evaluations(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("eval/")}


def assert_same_rows(run: Path, straight: Path, tolerance: float, apart: Sequence[str] = ()) -> None:
    """Every metric of every step, `apart` from some."""
    ours, theirs = comparable(run), comparable(straight)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, 7))
    for found, wanted in zip(ours, theirs, strict=True):
        if wanted["step"] == 3:  # the short run evaluated there, as it was its last
            found = {key: value for key, value in found.items() if key not in evaluations(found)}
        # the gap between engine and trainer is rounding: it has the size of the tolerance itself
        for key in [key for key in wanted if key.startswith(("mismatch/", "sync/probe_max"))]:
            assert found.pop(key) <= 1e-4 and wanted.pop(key) <= 1e-4
        for key in apart:
            del found[key], wanted[key]
        assert found == pytest.approx(wanted, abs=tolerance)


def test_three_steps_and_three_more_equal_six(resumed: Path, straight: Path) -> None:
    assert_same_run(resumed, straight, 1e-6)
    assert_same_rows(resumed, straight, 1e-6)


def test_resume_keeps_the_wandb_run(resumed: Path) -> None:
    first, second = wandb_ids(resumed)
    assert first == second


@pytest.mark.slow
def test_resume_in_another_layout_equals_six_steps(copies: dict[str, Path], straight: Path, tiny_folder: Path) -> None:
    """ZeRO-1 on one rank for three steps, ZeRO-3 on two for three more."""
    more = ("trainer.zero_stage=3", "cluster.train_ranks=2", "trainer.layout=padded", "num_steps=6")
    run = run_folder(train(copies["other"], tiny_folder, *TRACKED, *more).folder)
    assert_same_run(run, straight, 1e-5)
    assert_same_rows(run, straight, 1e-5, apart=["train/imbalance"])  # among the ranks


def test_finished_run_is_not_run_again(resumed: Path, tiny_folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in resumed.rglob("*")}
    more = ("num_steps=6", f"run_dir={resumed}")
    job = start("train.py", resumed.parents[1], *SMALL, *TRACKED, f"model.path={tiny_folder}", *more).wait(60)
    assert job.code == 0 and "already finished at step 6" in " ".join(job.text.split())
    assert {path: path.stat().st_mtime_ns for path in resumed.rglob("*")} == before


# -- lag --


def test_max_lag_one_trains_on_samples_one_version_old(short: Job, tmp_path: Path) -> None:
    warm = run_folder(short.folder) / "sft"
    more = ("max_lag=1", "num_steps=4", "sft.num_steps=0", "evaluation.every=0", "algo.num_mini_batches=2")
    run = run_folder(train(tmp_path, warm, *more, "tracking=none", "checkpoint=none").folder)
    rows = read_lines(run / "metrics.jsonl")
    assert [row["rollout/lag_max"] for row in rows] == [0, 1, 1, 1]
    assert all(0 <= row["rollout/lag_mean"] <= row["rollout/lag_max"] for row in rows)
    assert read_json(run / "summary.json")["status"] == "finished"
    assert not (run / "checkpoints").exists() and not (run / "hf").exists() and not (run / "wandb").exists()


# -- the other scripts --


def test_eval_of_checkpoint_and_of_export_agree_with_the_run(short: Job, tiny_folder: Path, tmp_path: Path) -> None:
    run = run_folder(short.folder)
    jobs = [
        start("eval.py", tmp_path / name, *SMALL, "evaluation.samples=2", *overrides)
        for name, overrides in {
            "checkpoint": (f"resume={run}", f"model.path={tiny_folder}"),
            "hf": (f"model.path={run / 'hf'}",),
        }.items()
    ]
    wait_all(jobs, RUN_S)
    checkpoint, folder = (read_json(run_folder(job.check().folder) / "evaluation.json") for job in jobs)
    assert checkpoint["source"] == str(run / "checkpoints" / "step_000003")
    assert folder["source"] == str(run / "hf")
    assert checkpoint["greedy"] == folder["greedy"] and checkpoint["sampled"] == folder["sampled"]
    assert folder["greedy"] == read_json(run / "evaluation_000003.json")["greedy"]
    assert folder["greedy"]["num_samples"] == 64 and folder["sampled"]["num_samples"] == 128


def test_sft_writes_the_folder_that_training_starts_from(short: Job, tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    job = start("sft.py", tmp_path, *SMALL, f"model.path={tiny_folder}").wait(RUN_S).check()
    folder = run_folder(job.folder) / "sft"
    assert f"wrote {folder}" in job.text
    AutoModelForCausalLM.from_pretrained(folder)
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder, run_folder(short.folder) / "sft"))
    start_weights = load_file(tiny_folder / "model.safetensors")
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) <= 1e-6
        assert not torch.equal(tensor, start_weights[name])


# -- a pretrained model --


def test_quickstart_model_two_steps(tmp_path: Path) -> None:
    try:
        model = prepare_smollm2(ROOT / "models" / "smollm2")
    except PrepareError as error:
        pytest.skip(str(error))
    more = ("num_steps=2", "prompts_per_step=2", "samples_per_prompt=4", "evaluation.every=0", "checkpoint=none")
    job = start("train.py", tmp_path, "experiment=quickstart", f"model.path={model}", *more, "tracking=none")
    run = run_folder(job.wait(RUN_S).check().folder)
    summary = read_json(run / "summary.json")
    assert summary["status"] == "finished" and summary["steps"] == 2
    assert 0 < summary["mismatch_max"] <= MISMATCH
    assert all(row["rollout/num_failed"] == 0 for row in read_lines(run / "metrics.jsonl"))
