"""Real processes for tests: model folders, training ranks that start again in the same processes, engines, questions.

Importing torch, DeepSpeed and vLLM takes longer than all that a test does with them, so the processes of a module are
started once, and each test gives them another model and another configuration.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import ray
import torch

from actors.checkpoint import copy_model_files
from actors.cluster import Cluster
from actors.engine import optimizer_spec
from actors.group import RankGroup, wait_all
from actors.roles import ActorPolicy
from conf.schema import ClusterConfig, Config
from rl.types import Completion, Group, Prompt, Sampling
from rollout.engine import Outcome, Request
from rollout.engines import EngineGroup, EngineHandle
from rollout.single_turn import as_trajectory
from weightsync.sync import WeightSync

START_S = 150.0
ANSWER_S = 60.0
SERIAL = count()


# -- models --


def random_folder(source: Path, out: Path, seed: int, tied: bool = True, spread: float = 0.15) -> Path:
    """A Hugging Face folder like `source` with random weights, large enough for every layer to matter.

    All weights are exact in bfloat16, so that a bf16 run starts from the same ones. Its generation_config.json asks for
    greedy decoding: it must have no effect anywhere.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    config.tie_word_embeddings = tied
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            noise = torch.randn(parameter.shape, generator=random) * spread
            parameter.copy_((noise if parameter.dim() > 1 else 1 + noise).bfloat16().float())
    copy_model_files(source, out)
    lm.save_pretrained(out)
    settings = {"do_sample": True, "top_k": 1, "temperature": 0.1, "top_p": 0.1, "repetition_penalty": 2.0}
    (out / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 1}))
    return out


def load_hf(folder: Path) -> Any:
    """The model of a folder in plain transformers, fp32, with the attention that materialises its scores."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def hf_logprobs(lm: Any, row: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token of `row` but the first, by one whole forward of that row alone."""
    ids = torch.tensor(row)
    logits = lm(ids[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@torch.no_grad()
def hf_greedy(lm: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation of a prompt, by a whole forward for each token."""
    row = list(prompt)
    for _ in range(num_tokens):
        row.append(int(lm(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(prompt) :]


def random_ids(seed: int, length: int, vocab: int = 64) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- processes --


@contextmanager
def one_thread() -> Iterator[None]:
    """Models as small as these are slower with two threads than with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def started_cluster() -> Iterator[Cluster]:
    """A Ray cluster of its own, stopped at the end."""
    cluster = Cluster(ClusterConfig())
    try:
        yield cluster
    finally:
        cluster.stop()


def start_ranks(cluster: Cluster, cfgs: Sequence[Config], folder: Path) -> dict[int, RankGroup]:
    """Training groups by their number of ranks, one for each configuration, with the model loaded."""
    groups = {
        cfg.cluster.train_ranks: RankGroup(cfg, cluster, "policy", str(folder), optimizer_spec(cfg.trainer))
        for cfg in cfgs
    }
    for ready in [group.start() for group in groups.values()]:
        ready.result(timeout=START_S)
    return groups


def restart(group: RankGroup, cfg: Config, folder: Path, frozen: bool = False) -> ActorPolicy:
    """Has the group's processes load `folder` under another configuration. `frozen`: without optimizer, a reference."""
    group.restart(cfg, str(folder), None if frozen else optimizer_spec(cfg.trainer)).result(timeout=START_S)
    return ActorPolicy(cfg, group)


def start_engines(cluster: Cluster, cfg: Config, *folders: Path) -> EngineGroup:
    """The engines of a configuration, each with the model of its folder loaded; paused, as always before a push."""
    engines = EngineGroup(cfg, cluster, str(folders[0]))
    starts = [handle.start(str(folder), 1) for handle, folder in zip(engines.handles, folders, strict=True)]
    wait_all(starts, [handle.name for handle in engines.handles], "start", START_S)
    return engines


def connect(policy: Any, handles: Sequence[Any], probe: list[int]) -> WeightSync:
    """A push from this policy into these engines, as scripts/train.py puts it together."""
    sync = replace(policy.cfg.sync, timeout_s=ANSWER_S)
    return WeightSync(policy, handles, probe, policy.cfg.probe_bound, sync, START_S)


def export(policy: ActorPolicy, source: Path, out: Path) -> Path:
    """The policy's live weights as a Hugging Face folder."""
    policy.group.call("export", str(out), str(source))
    return out


# -- questions to one engine --


def make_request(prompt: list[int], deadline_s: float = ANSWER_S, **sampling: Any) -> Request:
    settings = {"max_tokens": 24, "temperature": 1.0} | sampling
    name = f"test-{next(SERIAL)}"
    return Request(request_id=name, prompt_ids=prompt, sampling=Sampling(**settings), deadline_s=deadline_s)


def submit(handle: EngineHandle, requests: list[Request]) -> None:
    ray.get(handle.actor.submit.remote(requests), timeout=ANSWER_S)


def collect(handle: EngineHandle, requests: Sequence[Request], timeout_s: float = ANSWER_S) -> list[Outcome]:
    """The outcomes of the requests, in their order. Raises AssertionError when some do not come."""
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(requests):
        assert time.monotonic() < deadline, f"{len(outcomes)} of {len(requests)} requests answered"
        for outcome in ray.get(handle.actor.collect.remote(1.0), timeout=ANSWER_S):
            outcomes[outcome.request_id] = outcome
    return [outcomes[request.request_id] for request in requests]


def completions(handle: EngineHandle, requests: Sequence[Request]) -> list[Completion]:
    """As `collect`, of requests that must succeed."""
    found = [(outcome.completion, outcome.error) for outcome in collect(handle, requests)]
    assert all(completion is not None for completion, _ in found), [error for _, error in found if error]
    return [completion for completion, _ in found if completion is not None]


def ask(handle: EngineHandle, requests: list[Request]) -> list[Completion]:
    submit(handle, requests)
    return completions(handle, requests)


def is_silent(handle: EngineHandle, requests: list[Request], seconds: float = 0.7) -> bool:
    """Whether the engine takes the requests and answers none of them."""
    submit(handle, requests)
    return ray.get(handle.actor.collect.remote(seconds), timeout=ANSWER_S) == []


def as_groups(answers: list[Completion]) -> list[Group]:
    """One group for each completion, rewarded in turn with 0 and 1."""
    groups = []
    for index, completion in enumerate(answers):
        row = as_trajectory(completion)
        row.reward = float(index % 2)
        prompt = Prompt(index=index, token_ids=completion.prompt_ids, record={})
        groups.append(Group(position=index, prompt=prompt, trajectories=[row], version=0))
    return groups
