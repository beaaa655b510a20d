"""What the layout tests share: recipes of updates, a batch as if an older policy had made it, and comparing weights."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from actors.roles import ActorPolicy
from conf.choices import Optimizer
from conf.schema import ClusterConfig, Config
from rl.batching import collate
from rl.types import Batch, Status
from tests.integration.real import export, load_hf, random_ids
from tests.numerics.plain import PlainPolicy, all_logprobs
from tests.unit.stand_ins import make_cfg, make_group

TOLERANCE = 1e-5
TEMPERATURE = 0.8
KL_COEF = 0.05

# scored: two optimizer steps an update, against recorded old log-probabilities, so that ratios leave 1 and are clipped.
# fused: one step, whose forward is the scoring; the gradient is clipped in every step.
SCORED = {"num_epochs": 2, "kl_coef": KL_COEF, "clip_low": 0.1, "clip_high": 0.15}
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {"algo": SCORED, "trainer": {"optimizer": Optimizer.sgd, "lr": 0.05, "grad_clip": 0.0}},
    # eps: a gradient of the size of its own rounding error would otherwise be a full step, this way or that
    "adamw": {
        "algo": SCORED,
        "trainer": {"optimizer": Optimizer.adamw, "lr": 3e-4, "grad_clip": 1.0, "weight_decay": 0.01, "eps": 1e-6},
    },
    "sgd_fused": {
        "algo": SCORED | {"num_epochs": 1},
        "trainer": {"optimizer": Optimizer.sgd, "lr": 0.5, "grad_clip": 0.05},
    },
    "smooth": {
        "algo": {"num_epochs": 1, "kl_coef": KL_COEF},
        "trainer": {"optimizer": Optimizer.sgd, "lr": 0.02, "grad_clip": 0.0},
    },
}
COMPARED = ("sgd", "adamw", "sgd_fused")


def config(recipe: str, stage: int = 1, ranks: int = 1, **trainer: Any) -> Config:
    cut = {"micro_batch_tokens": 96, "logprob_chunk_tokens": 20, "num_threads": 1, "zero_stage": stage}
    made = RECIPES[recipe]
    return make_cfg(
        algo=made["algo"],
        trainer=made["trainer"] | cut | trainer,
        rollout={"temperature": TEMPERATURE, "max_model_len": 128, "mismatch_limit": 10.0},
        num_steps=5,
        cluster=ClusterConfig(train_ranks=ranks),
    )


def recorded(folder: Path, groups: list[Any], seed: int) -> Batch:
    """A batch with every array filled as if an older policy had sampled and scored it."""
    batch = collate(groups)
    mask = batch.action_mask
    random = torch.Generator().manual_seed(seed)
    now = all_logprobs(load_hf(folder), batch, TEMPERATURE)

    def near(spread: float) -> torch.Tensor:
        return torch.where(mask, now + spread * torch.randn(mask.shape, generator=random), torch.zeros(()))

    batch.rollout_logprobs, batch.train_logprobs, batch.ref_logprobs = near(0.02), near(0.15), near(0.3)
    batch.advantages = torch.where(mask, torch.randn(mask.shape, generator=random), torch.zeros(()))
    batch.kl_coef = KL_COEF
    return batch


def ragged_batch(folder: Path) -> Batch:
    """11 valid rows: prompts of 1 to 17 tokens, responses of 1 to 16; five more were dropped."""
    ok, lost = Status.ok, Status.engine_failed
    shapes: list[tuple[int, dict[int, Status]]] = [
        (5, {1: ok, 9: ok, 4: lost, 6: ok}),
        (17, {12: ok, 3: ok, 7: ok, 2: ok}),
        (2, {8: lost, 5: ok, 1: ok, 3: lost}),
        (1, {4: lost, 16: ok, 2: ok, 11: lost}),
    ]
    made = []
    for position, (prompt, rows) in enumerate(shapes):
        responses = [random_ids(100 * position + n, n) for n in rows]
        made.append(make_group(position, random_ids(position, prompt), responses, status=list(rows.values())))
    return recorded(folder, made, seed=2)


def for_recipe(batch: Batch, recipe: str) -> Batch:
    return dataclasses.replace(batch, train_logprobs=None) if recipe.endswith("fused") else batch


Result = tuple[list[dict[str, float]], dict[str, torch.Tensor], torch.Tensor]


def plain_results(folder: Path, batch: Batch, recipes: tuple[str, ...]) -> dict[str, Result]:
    """For each recipe: the metrics of five updates, the weights and the log-probabilities after them."""
    out = {}
    for recipe in recipes:
        policy = PlainPolicy(config(recipe), folder)
        curve = [policy.update(for_recipe(batch, recipe)) for _ in range(5)]
        out[recipe] = curve, policy.weights(), all_logprobs(policy.lm, batch, TEMPERATURE)
    return out


def weights_of(policy: ActorPolicy, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The live weights, by way of an export; a push carries the same names and shapes."""
    found = load_file(export(policy, folder, out) / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == policy.shapes()
    return found


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    gaps = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= tolerance, f"{worst}: {gaps[worst]:.2e}"
