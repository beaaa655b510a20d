"""Real ranks and engines for tests of pushes, and what says whether engines hold the right weights.

Each push carries *different random* weights: with the same weights, or with small changes, a push that does nothing
looks right. Compared with plain transformers in fp32.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from actors.cluster import Cluster
from actors.group import RankGroup
from actors.roles import ActorPolicy
from conf.schema import ClusterConfig, Config
from rl.batching import collate
from rl.types import Batch, Completion
from rollout.engines import EngineHandle
from tests.integration.real import (
    as_groups,
    ask,
    hf_logprobs,
    load_hf,
    make_request,
    random_folder,
    random_ids,
    restart,
    start_engines,
    start_ranks,
)
from tests.unit.stand_ins import make_cfg

LARGEST, MEAN = 1e-4, 1e-5
BLOCK = 32  # tokens in a block of the prefix cache
CONTEXT, LONG = 1024, 600
PROBE = random_ids(99, 16)


def config(stage: int = 1, ranks: int = 1, tp: Sequence[int] = (1,), **rollout: Any) -> Config:
    return make_cfg(
        trainer={"zero_stage": stage, "lr": 0.05, "grad_clip": 0.0, "num_threads": 1},
        rollout={"max_model_len": CONTEXT, "kv_cache_bytes": 64 << 20, "num_threads": 1, "tp": list(tp)} | rollout,
        cluster=ClusterConfig(train_ranks=ranks, rollout_engines=len(tp)),
    )


def random_folders(tiny_folder: Path, root: Path) -> dict[str, Path]:
    """Random models: tied-0 and untied-0 are what the engines start with; -1 and -2 are pushed."""
    names = [(kind, number) for kind in ("tied", "untied") for number in range(3)]
    return {
        f"{kind}-{number}": random_folder(tiny_folder, root / f"{kind}-{number}", seed=10 + index, tied=kind == "tied")
        for index, (kind, number) in enumerate(names)
    }


@dataclass
class World:
    """The processes of this module."""

    groups: dict[int, RankGroup]
    engines: dict[str, list[EngineHandle]]
    folders: dict[str, Path]

    def policy(self, name: str, stage: int = 1, ranks: int = 1, **rollout: Any) -> ActorPolicy:
        """A trainer that holds the weights of folder `name`."""
        return restart(self.groups[ranks], config(stage, ranks, **rollout), self.folders[name])

    def handles(self, kind: str) -> list[EngineHandle]:
        return self.engines[kind]


def make_world(cluster: Cluster, folders: dict[str, Path]) -> World:
    """Trainers of one and of two ranks; for tied models an engine and one of two tensor-parallel members; an untied."""
    tied, untied = folders["tied-0"], folders["untied-0"]
    groups = start_ranks(cluster, [config(ranks=ranks) for ranks in (1, 2)], tied)
    one, two, three = start_engines(cluster, config(tp=(1, 2, 1)), tied, tied, untied).handles
    return World(groups, {"tied": [one, two], "untied": [three]}, folders)


def assert_close(found: Sequence[float], wanted: torch.Tensor) -> None:
    gaps = (torch.tensor(found) - wanted).abs()
    assert gaps.shape == wanted.shape
    assert float(gaps.max()) <= LARGEST and float(gaps.mean()) <= MEAN, gaps


def assert_holds(handles: Sequence[EngineHandle], folder: Path, version: int, temperature: float = 1.0) -> None:
    """Each engine scores a given row, and records what it samples, as plain transformers with the folder's weights."""
    lm = load_hf(folder)
    for number, handle in enumerate(handles):
        row = random_ids(1000 * version + number, 40)
        assert_close(ray.get(handle.actor.probe.remote(row), timeout=60), hf_logprobs(lm, row))
        requests = [make_request(random_ids(k, 3 + 7 * k), seed=k, temperature=temperature) for k in range(8)]
        for answer in ask(handle, requests):
            assert answer.versions == [version] * 24
            assert_close(answer.logprobs, hf_answer(lm, answer, temperature))


def hf_answer(lm: Any, answer: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the completion's tokens."""
    return hf_logprobs(lm, answer.prompt_ids + answer.token_ids, temperature)[len(answer.prompt_ids) - 1 :]


def distance(one: Path, other: Path) -> float:
    """Mean gap between two models' log-probabilities: large when a mistake would show."""
    row = random_ids(5, 60)
    return float((hf_logprobs(load_hf(one), row) - hf_logprobs(load_hf(other), row)).abs().mean())


def train_batch() -> Batch:
    """Something to learn that moves the weights far: the log-probabilities are recorded as 0, whatever they are."""
    answers = [
        Completion(
            prompt_ids=random_ids(k, 4),
            token_ids=random_ids(100 + k, 12),
            logprobs=[0.0] * 12,
            finish_reason="length",
            versions=[0] * 12,
            ttft_s=0.0,
            decode_s=0.0,
        )
        for k in range(4)
    ]
    batch = collate(as_groups(answers))
    batch.advantages = batch.action_mask * 4.0
    return batch


def train(policy: ActorPolicy) -> None:
    """Moves the weights by two large steps of SGD."""
    for number in range(2):
        policy.update(train_batch(), number, number)


def wait_until_sampling(handle: EngineHandle, num_requests: int) -> None:
    """Waits until all requests of the engine have their first token."""

    def started(engine: Any) -> int:
        return sum(running.first_token > 0 for running in engine._running.values())

    deadline = time.monotonic() + 30
    while ray.get(handle.actor.__ray_call__.remote(started), timeout=60) < num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Around:
    """A source or an engine that does what `inner` does, but for what a subclass says."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
