"""Runs with further roles: critic, teacher, reward model, greedy baseline; and a PPO run that was cut in two."""

import math
from pathlib import Path

import pytest

from tests.integration.real import random_folder
from tests.integration.scripts import Job, read_lines, run_folder, start, training_state

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN_S = 240.0
SMALL = (
    "experiment=tiny_sort",
    "prompts_per_step=8",
    "samples_per_prompt=4",
    "trainer.schedule=constant",
    "sft.num_steps=0",
    "evaluation.every=0",
    "tracking=none",
)
LETTERS = "reward._target_=tests.integration.rewards.letters"  # a random model has some
PPO = (
    LETTERS,
    "algo=ppo",
    "algo.num_mini_batches=2",
    "algo.kl_coef=0.05",
    "algo.kl_target=0.001",
    "algo.kl_horizon=100",
    "algo.reference_refresh=2",
    "critic.warmup_steps=1",
    "critic.value_clip=0.5",
    "checkpoint.every=3",
)


def train(folder: Path, model: Path, *more: str) -> Job:
    return start("train.py", folder, *SMALL, f"model.path={model}", *more).wait(RUN_S).check()


@pytest.fixture(scope="module")
def straight(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of PPO, each role in processes of its own."""
    return run_folder(train(tmp_path_factory.mktemp("ppo"), tiny_folder, *PPO, "num_steps=5").folder)


def test_ppo_trains_the_critic_first_and_moves_the_kl_coefficient(straight: Path) -> None:
    rows = [row for row in read_lines(straight / "metrics.jsonl") if row["step"] >= 1]
    assert "policy/grad_norm" not in rows[0] and rows[0]["mismatch/mean"] <= 1e-5
    for row in rows[1:]:
        assert row["policy/grad_norm"] > 0 and row["mismatch/mean"] <= 1e-5
    assert all(row["critic/grad_norm"] > 0 and math.isfinite(row["critic/explained_variance"]) for row in rows)
    kl = [row["reward/kl"] for row in rows]  # the reference follows after steps 2 and 4
    assert kl[0] == kl[1] == 0 and abs(kl[2]) < 1e-6 < abs(kl[3]) and abs(kl[4]) < 1e-6
    state = training_state(straight, 5)[1]["run_state"]
    assert (state["step"], state["optimizer_step"], state["reference_step"]) == (5, 8, 4)
    assert state["kl_coef"] != 0.05
    assert (straight / "checkpoints" / "step_000005" / "reference" / "model.safetensors").exists()


@pytest.mark.slow
def test_ppo_resumed_with_roles_side_by_side_equals_the_straight_run(
    straight: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Critic, its moments, reference, KL coefficient: everything continues, though the roles now share processes, and
    sleep in turn."""
    beside = ("cluster.colocate=[critic,reference]", "cluster.sleep=true")
    train(tmp_path, tiny_folder, *PPO, *beside, "num_steps=3")
    run = run_folder(train(tmp_path, tiny_folder, *PPO, *beside, "num_steps=5").folder)
    row = next(row for row in read_lines(run / "metrics.jsonl") if row["step"] == 2)
    for role in ("policy", "critic", "reference"):
        assert row[f"memory/{role}_asleep_bytes"] > 0 and row["time/turns_s"] > 0
    for role in ("policy", "critic"):
        ours, theirs = training_state(run, 5, role), training_state(straight, 5, role)
        assert ours[0].keys() == theirs[0].keys() and len(ours[0]) > 10
        for name, tensor in theirs[0].items():
            assert float((ours[0][name] - tensor).abs().max()) <= 1e-6, f"{role}: {name}"
        assert ours[1]["roles"][role]["optimizer_step"] == theirs[1]["roles"][role]["optimizer_step"]
        kept = ("step", "optimizer_step", "prompts_consumed", "kl_coef", "reference_step")
        for name in kept:
            assert ours[1]["run_state"][name] == pytest.approx(theirs[1]["run_state"][name], rel=1e-5), name


@pytest.mark.slow
def test_distill_comes_nearer_to_its_teacher(tiny_folder: Path, tmp_path: Path) -> None:
    """The policy starts with strong preferences; the teacher has next to none."""
    job = train(
        tmp_path,
        random_folder(tiny_folder, tmp_path / "policy", seed=1),
        "algo=distill",
        f"teacher.path={tiny_folder}",
        "teacher.top_k=8",
        "reward=none",
        "num_steps=6",
        "trainer.lr=1e-2",
        "trainer.grad_clip=1.0",
        "cluster.colocate=[teacher]",
    )
    losses = [r["policy/policy_loss"] for r in read_lines(run_folder(job.folder) / "metrics.jsonl") if r["step"] >= 1]
    assert losses[-1] < 0.5 * losses[0] and min(losses) >= -1e-6


@pytest.mark.slow
def test_rloo_with_a_reward_model_learns_from_both(tiny_folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    scorer = tmp_path / "scorer"
    config = AutoConfig.from_pretrained(tiny_folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(scorer)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(scorer)
    job = train(tmp_path, tiny_folder, LETTERS, "algo=rloo", f"reward_model.path={scorer}", "num_steps=2")
    rows = [row for row in read_lines(run_folder(job.folder) / "metrics.jsonl") if row["step"] >= 1]
    assert all(row["reward/model"] != 0 and row["policy/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_remax_compares_with_the_greedy_answer(tiny_folder: Path, tmp_path: Path) -> None:
    job = train(tmp_path, tiny_folder, LETTERS, "algo=remax", "samples_per_prompt=1", "num_steps=2")
    rows = [row for row in read_lines(run_folder(job.folder) / "metrics.jsonl") if row["step"] >= 1]
    assert all(row["policy/grad_norm"] > 0 and row["advantage/max"] <= 1 for row in rows)


@pytest.mark.slow
def test_dapo_with_a_constant_reward_ends_every_step(tiny_folder: Path, tmp_path: Path) -> None:
    job = train(tmp_path, tiny_folder, "algo=dapo", "reward=none", "num_steps=2", "algo.max_draws=2")
    rows = [row for row in read_lines(run_folder(job.folder) / "metrics.jsonl") if row["step"] >= 1]
    assert [(row["rollout/groups_dropped"], row["rollout/groups_filled"]) for row in rows] == [(8, 8)] * 2
    assert training_state(run_folder(job.folder), 2)[1]["run_state"]["prompts_consumed"] == 32
