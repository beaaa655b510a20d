"""Sampling through the pool and the engine actor, against raw vllm.LLM.generate in a process of its own.

Both get the same prompts, engine settings, sampling parameters and seeds, and ignore stop tokens, so that both make
exactly prompts x samples x max_tokens tokens. Tandem's time includes routing, Ray, decoding and rewards. A third row
shows vLLM without a seed for each request.
"""

import argparse
import time
from dataclasses import replace
from typing import Any

import ray

from conf.schema import Config
from rl.faults import RoleDied
from rl.prompts import PromptStream
from rl.types import Sampling
from rollout.engine import sampling_params
from rollout.pool import RolloutPool
from rollout.preflight.launch import prepare
from rollout.rewards import RewardPool
from rollout.seeds import derive_seed
from rollout.single_turn import SingleTurn
from scripts.benchmarks.common import (
    Result,
    Row,
    Yardstick,
    bench_config,
    environment_of,
    make_result,
    medians,
    say,
    start_parts,
)

# Engine settings that must be equal on both sides: (part of vLLM's config, attribute).
SETTINGS = (
    ("model_config", "dtype"),
    ("model_config", "max_model_len"),
    ("model_config", "enforce_eager"),
    ("model_config", "logprobs_mode"),
    ("model_config", "generation_config"),
    ("model_config", "skip_tokenizer_init"),
    ("scheduler_config", "max_num_seqs"),
    ("scheduler_config", "max_num_batched_tokens"),
    ("scheduler_config", "enable_chunked_prefill"),
    ("scheduler_config", "async_scheduling"),
    ("cache_config", "block_size"),
    ("cache_config", "enable_prefix_caching"),
    ("cache_config", "kv_cache_memory_bytes"),
    ("parallel_config", "tensor_parallel_size"),
    ("compilation_config", "mode"),
)


def settings(llm_engine: Any) -> dict[str, str]:
    """The engine settings that bear on speed, and the CPU threads, as text."""
    import torch

    config = llm_engine.vllm_config
    found = {f"{part}.{key}": str(getattr(getattr(config, part), key)) for part, key in SETTINGS}
    return found | {"num_threads": str(torch.get_num_threads())}


def settings_of_actor(engine: Any) -> dict[str, str]:
    return settings(engine._llm)


class RawEngine:
    """The yardstick: vllm.LLM."""

    def __init__(self, cfg: Config, num_threads: int):
        import torch
        from vllm import LLM

        torch.set_num_threads(num_threads)
        rollout = cfg.rollout
        self.llm = LLM(
            model=cfg.model.path,
            skip_tokenizer_init=True,
            dtype=rollout.dtype.value,
            seed=cfg.seed,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=max(8192, rollout.max_model_len),
            enable_chunked_prefill=False,
            enable_prefix_caching=rollout.prefix_caching,
            enforce_eager=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            kv_cache_memory_bytes=rollout.kv_cache_bytes,
            block_size=32,
        )

    def settings(self) -> dict[str, str]:
        return settings(self.llm.llm_engine)

    def generate(self, prompts: list[list[int]], samplings: list[Sampling]) -> tuple[float, int]:
        """(seconds, tokens) of one batch of requests, each with its own parameters."""
        self.llm.reset_prefix_cache()
        params = [sampling_params(sampling) for sampling in samplings]
        started = time.monotonic()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        took = time.monotonic() - started
        return took, sum(len(output.outputs[0].token_ids) for output in outputs)


def measure(args: argparse.Namespace) -> Result:
    cfg = bench_config(args, f"num_steps={args.repeats + 1}")
    prepared = prepare(cfg)
    rows: list[Row] = []
    wanted = args.prompts * args.samples * args.max_tokens
    with start_parts(cfg, prepared, with_engines=True) as parts:
        parts.sync.push(version=0)
        handle = parts.engines.handles[0]
        say("starting vllm.LLM")
        env = environment_of(handle.actor)
        with Yardstick("scripts.benchmarks.rollout:RawEngine", env, cfg, args.threads) as raw:
            require_equal(
                ray.get(handle.actor.__ray_call__.remote(settings_of_actor), timeout=60), raw.call("settings")
            )
            stream = PromptStream(prompts=prepared.train, seed=cfg.seed, shuffle=cfg.data.shuffle)
            scorer = RewardPool(cfg.reward)
            pool = RolloutPool(
                cfg, parts.engines.handles, stream, SingleTurn(cfg, scorer, prepared.decode), stop_token_ids=()
            )
            try:
                for repeat in range(args.repeats + 1):  # the first warms both sides up
                    positions = range(repeat * args.prompts, (repeat + 1) * args.prompts)
                    measured = {"tandem": time_pool(pool, handle, parts.sync.connection.name, repeat, args.prompts)}
                    prompts, seeded = requests(cfg, stream, positions, pool.sampling)
                    measured["vllm"] = raw.call("generate", prompts, seeded)
                    unseeded = [replace(sampling, seed=None) for sampling in seeded]
                    measured["vllm, unseeded"] = raw.call("generate", prompts, unseeded)
                    for variant, (took_s, num_tokens) in measured.items():
                        require_count(variant, num_tokens, wanted)
                        if repeat:
                            figures = {"took_s": took_s, "num_tokens": num_tokens, "tok_s": num_tokens / took_s}
                            rows.append({"variant": variant, "repeat": repeat - 1} | figures)
                    say(f"{repeat}/{args.repeats}: " + ", ".join(f"{k} {t:.2f} s" for k, (t, _) in measured.items()))
            finally:
                pool.close()
                scorer.close()
    found = medians(rows)
    ratios: dict[str, float | None] = {
        "tok_s_vs_vllm": found["tandem"]["tok_s"] / found["vllm"]["tok_s"],
        "tok_s_vs_vllm_unseeded": found["tandem"]["tok_s"] / found["vllm, unseeded"]["tok_s"],
    }
    return make_result(args, rows, ratios, dtype=cfg.rollout.dtype.value)


def time_pool(pool: RolloutPool, handle: Any, connection: str, version: int, count: int) -> tuple[float, int]:
    """(seconds, tokens) of one step's rollouts, from the prompts' release to the scored groups."""
    handle.pause().result()  # clears the prefix cache, as before each step of a run
    handle.resume(connection).result()
    started = time.monotonic()
    if version == 0:
        pool.start(first_position=0, version=0)
    else:
        pool.set_version(version)
    groups = pool.next_groups(count)
    took = time.monotonic() - started
    failed = [t for g in groups for t in g.trajectories if not t.valid]
    if failed:
        raise RoleDied(f"{len(failed)} trajectories failed, the first with {failed[0].error}")
    return took, sum(t.num_action_tokens for g in groups for t in g.trajectories)


def requests(
    cfg: Config, stream: PromptStream, positions: range, sampling: Sampling
) -> tuple[list[list[int]], list[Sampling]]:
    """The prompts and sampling parameters that the pool sends for these positions, seeds included."""
    prompts, samplings = [], []
    for position in positions:
        for sample in range(cfg.samples_per_prompt):
            prompts.append(stream.at(position).token_ids)
            samplings.append(replace(sampling, seed=derive_seed("train", cfg.seed, position, sample)))
    return prompts, samplings


def require_equal(ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Raises RoleDied unless both engines run with the same settings: the comparison would mean nothing."""
    different = [f"{key}: {ours[key]} in Tandem, {theirs[key]} in vLLM" for key in ours if ours[key] != theirs[key]]
    if different:
        raise RoleDied("the engines' settings differ:\n  " + "\n  ".join(different))


def require_count(variant: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise RoleDied(f"{variant} made {found} tokens, {wanted} expected")
