"""A rollout engine: vLLM inside a Ray actor. Token ids in, token ids and log-probabilities out.

One thread owns the engine: it alone steps it, adds and aborts requests, and loads weights, in the order in which the
calls arrive. So a push never meets a running forward, and requests that come in one call enter one batch.
"""

import asyncio
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conf.choices import Quantization
from conf.errors import ConfigError
from conf.schema import Config
from rl.types import Completion, Sampling
from weightsync.plan import TWO_DRIVERS, Item, Link, Seat, Wanted, two_drivers

IDLE_WAIT_S = 0.5
QUANTIZATIONS = {
    Quantization.none: None,
    Quantization.fp8: "fp8",
    Quantization.int8: "int8_per_channel_weight_only",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to sample. `deadline_s` counts from its arrival at the engine."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    deadline_s: float


@dataclass(kw_only=True)
class Outcome:
    """A finished request: its completion, or why there is none."""

    request_id: str
    completion: Completion | None = None
    timed_out: bool = False
    error: str = ""


@dataclass(kw_only=True)
class _Running:
    request: Request
    arrived: float
    first_token: float = 0.0
    logprobs: list[float] = field(default_factory=list)


class RolloutEngine:
    """One vLLM engine. Paused until the first weight push has been verified."""

    def __init__(self, cfg: Config, index: int, device: str):
        self.cfg, self.index, self.device = cfg, index, device
        self._commands: queue.Queue[tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]] = (
            queue.Queue()
        )
        self._running: dict[str, _Running] = {}
        self._done: asyncio.Queue[Outcome] = asyncio.Queue()
        self._paused = True
        self._whole = False  # whether its weights are those of one version
        self._connection = ""  # name of the one that a weight sync made last
        self._asleep = False
        self._dead = ""
        self.version = -1

    async def start(self, model_path: str, num_threads: int) -> int:
        """Loads the model; returns the actor's process id."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._own_engine, args=(model_path, num_threads, ready), daemon=True)
        self._thread.start()
        await ready
        return os.getpid()

    # -- sampling --

    async def submit(self, requests: list[Request]) -> None:
        """Queues requests; they enter the engine together, once it is not paused."""

        def work() -> None:
            for request in requests:
                self._add(request)

        await self._run(work)

    async def abort(self, request_ids: list[str]) -> None:
        """Drops requests whose answer nobody waits for; unknown ones are none."""

        def work() -> None:
            found = [request_id for request_id in request_ids if request_id in self._running]
            if found:
                self._llm.abort_request(found)
            for request_id in found:
                del self._running[request_id]

        await self._run(work)

    async def collect(self, timeout_s: float) -> list[Outcome]:
        """Everything finished since the last call; waits up to `timeout_s` for the first. Raises in a dead engine."""
        if self._dead:
            raise RuntimeError(self._dead)
        outcomes = []
        try:
            outcomes.append(await asyncio.wait_for(self._done.get(), timeout_s))
        except TimeoutError:
            return []
        while not self._done.empty():
            outcomes.append(self._done.get_nowait())
        return outcomes

    # -- weight updates: as weightsync.sides.Sink --

    async def wanted(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> list[Wanted]:
        """What each worker wants of tensors of these shapes; checks them against the model."""
        found: list[Wanted] = await self._run(lambda: self._call_workers("wanted", shapes, dtype))
        return found

    async def connect(self, name: str, seats: list[Seat], links: list[Link]) -> list[set[tuple[int, int]]]:
        """Opens the channels of the trainer's ranks in each worker, which has one of the seats."""

        def work() -> list[set[tuple[int, int]]]:
            self._connection = name
            return self._call_workers("connect", name, seats, links)

        found: list[set[tuple[int, int]]] = await self._run(work)
        return found

    async def pause(self) -> None:
        """Stops stepping; running requests stay and recompute their cache, which was made with the old weights."""

        def work() -> None:
            self._paused = True
            self._drain()
            if not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM kept blocks of its prefix cache; stale keys and values would outlive the push")

        await self._run(work)

    async def begin_update(self, name: str, version: int, modules: list[str] | None) -> None:
        """Takes the modules of the push apart. Raises RuntimeError unless the engine is paused, as do the next two."""

        def work() -> None:
            self._require_paused()
            if name == self._connection:  # workers refuse another, and their weights stay as they are
                self._whole = False
            self._call_workers("begin", name, version, modules)

        await self._run(work)

    async def load(self, name: str, items: list[Item]) -> None:
        def work() -> None:
            self._require_paused()
            self._call_workers("load", name, items)

        await self._run(work)

    async def finish_update(self, name: str, version: int) -> list[str]:
        """Finishes the update; tokens sampled from now on carry `version`. Gives each worker's fingerprint."""

        def work() -> list[str]:
            self._require_paused()
            prints: list[str] = self._call_workers("finish", name)
            self._llm.set_weight_version(str(version))
            self.version, self._whole = version, True
            return prints

        found: list[str] = await self._run(work)
        return found

    async def resume(self, name: str) -> None:
        """Lets the engine step again: its weights have been verified, by the weight sync of the connection `name`.

        Raises RuntimeError when another has connected since, or when it holds no whole version.
        """

        def work() -> None:
            if not self._connection:
                raise RuntimeError(
                    f"rollout engine {self.index}: no push has reached it since it started; it must stay paused"
                )
            if name != self._connection:
                raise RuntimeError(two_drivers("connected to this engine", self._connection, name))
            if not self._whole:
                raise RuntimeError(
                    f"rollout engine {self.index} is in the middle of a push (connection {self._connection}) and must "
                    f"stay paused: {TWO_DRIVERS}"
                )
            self._paused = False

        await self._run(work)

    async def sleep(self) -> None:
        """Gives the memory of weights and cache back, the weights' content waiting on the host; requests wait too."""

        def work() -> None:
            self._asleep = True
            if self.device == "cuda":  # vLLM's CPU backend has nothing to give back
                self._llm.sleep(level=1, mode="keep")

        await self._run(work)

    async def wake(self) -> None:
        """Undoes `sleep`; the cache is empty."""

        def work() -> None:
            if self.device == "cuda":
                self._llm.wake_up()
            self._asleep = False

        await self._run(work)

    async def accept_loaded(self, version: int) -> None:
        """Takes the model folder's own weights as `version` and lets the engine step: evaluation without a trainer."""

        def work() -> None:
            self._llm.set_weight_version(str(version))
            self.version, self._whole, self._paused = version, True, False

        await self._run(work)

    async def probe(self, row: list[int]) -> list[float]:
        """Log-probabilities, at temperature 1, of each token of `row` but the first, under the loaded weights."""
        return await self._run(lambda: self._prompt_logprobs(row))

    # -- the thread that owns the engine --

    def _own_engine(self, model_path: str, num_threads: int, ready: "asyncio.Future[None]") -> None:
        try:
            self._llm = build_engine(self.cfg, self.index, self.device, model_path, num_threads)
        except BaseException as error:
            self._loop.call_soon_threadsafe(
                ready.set_exception, RuntimeError(f"rollout engine {self.index}: {error!r}")
            )
            return
        self._loop.call_soon_threadsafe(ready.set_result, None)
        try:
            while True:
                self._take_commands(block=not self._can_step())
                if self._can_step():
                    self._step()
        except Exception as error:  # vLLM cannot be used after a failed step: everything in flight is lost
            self._fail_all(f"rollout engine {self.index} died while sampling: {error!r}")

    def _can_step(self) -> bool:
        return bool(self._running) and not self._paused and not self._asleep

    def _take_commands(self, block: bool) -> None:
        """Runs every waiting command, in order; waits a while for the first when `block`."""
        try:
            item = self._commands.get(block, IDLE_WAIT_S)
            while True:
                self._execute(*item)
                item = self._commands.get_nowait()
        except queue.Empty:
            self._abort_overdue()

    def _execute(
        self, command: Callable[[], Any], future: "asyncio.Future[Any]", loop: asyncio.AbstractEventLoop
    ) -> None:
        try:
            result = command()
        except Exception as error:
            loop.call_soon_threadsafe(set_unless_done, future, None, error)
        else:
            loop.call_soon_threadsafe(set_unless_done, future, result, None)

    async def _run(self, command: Callable[[], Any]) -> Any:
        if self._dead:
            raise RuntimeError(self._dead)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._commands.put((command, future, loop))
        if self._dead and not future.done():  # it died in between, and nobody reads the queue
            future.set_exception(RuntimeError(self._dead))
        return await future

    async def _rpc(self, method: Any, **kwargs: Any) -> Any:
        return await self._run(lambda: self._llm.collective_rpc(method, kwargs=kwargs))

    def _require_paused(self) -> None:
        """Raises RuntimeError in an engine that steps: weights must not change under it."""
        if not self._paused:
            raise RuntimeError(f"rollout engine {self.index} was resumed in the middle of a push: {TWO_DRIVERS}")

    def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every worker's receiver. Raises ValueError with what they say when one of them fails."""
        answers = self._llm.collective_rpc("attempt", args=(method, pickle.dumps(args)))
        failures = [failure for failure, _ in answers]
        if any(failures):
            raise ValueError("\n".join(dict.fromkeys(filter(None, failures))))
        return [pickle.loads(result) for _, result in answers]

    def _add(self, request: Request) -> None:
        now = time.monotonic()
        try:
            self._llm.add_request(
                request.request_id, {"prompt_token_ids": request.prompt_ids}, sampling_params(request.sampling)
            )
        except Exception as error:
            self._finish(Outcome(request_id=request.request_id, error=f"vLLM refused the request: {error}"))
            return
        self._running[request.request_id] = _Running(request=request, arrived=now)

    def _step(self) -> None:
        self._take_outputs(self._llm.step())
        self._abort_overdue()

    def _take_outputs(self, outputs: list[Any]) -> None:
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if not running.first_token:
                running.first_token = time.monotonic()
            if output.finished:
                del self._running[output.request_id]
                self._finish(Outcome(request_id=output.request_id, completion=as_completion(running, output)))

    def _drain(self) -> None:
        """Takes in what is still between pipeline stages: tokens of the old weights, which belong to their requests."""
        core = self._llm.engine_core.engine_core
        while core.batch_queue:
            output, scheduled, _ = core.batch_queue.pop()
            for outputs in core.scheduler.update_from_output(scheduled, output.result()).values():
                taken = self._llm.output_processor.process_outputs(
                    outputs.outputs, engine_core_timestamp=outputs.timestamp, weight_version=str(self.version)
                )
                self._take_outputs(taken.request_outputs)

    def _abort_overdue(self) -> None:
        now = time.monotonic()
        overdue = [r.request for r in self._running.values() if now - r.arrived > r.request.deadline_s]
        if overdue:
            self._llm.abort_request([request.request_id for request in overdue])
        for request in overdue:
            del self._running[request.request_id]
            self._finish(
                Outcome(
                    request_id=request.request_id,
                    timed_out=True,
                    error=f"rollout engine {self.index}: nothing in {request.deadline_s:g} s (rollout.deadline_s)",
                )
            )

    def _prompt_logprobs(self, row: list[int]) -> list[float]:
        """Runs one request by itself: the pause put all others back into the waiting queue; they stay out meanwhile."""
        from vllm import SamplingParams

        waiting = self._llm.engine_core.engine_core.scheduler.waiting
        held = list(waiting)
        waiting.remove_requests(held)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        self._llm.add_request(f"probe-{time.monotonic_ns()}", {"prompt_token_ids": row}, params)
        try:
            while True:
                for output in self._llm.step():
                    if output.finished:
                        pairs = zip(output.prompt_logprobs[1:], row[1:], strict=True)
                        return [entry[token].logprob for entry, token in pairs]
        finally:
            for request in held:
                waiting.add_request(request)

    def _finish(self, outcome: Outcome) -> None:
        self._loop.call_soon_threadsafe(self._done.put_nowait, outcome)

    def _fail_all(self, message: str) -> None:
        self._dead = message  # nothing is queued from now on
        for request_id in self._running:
            self._finish(Outcome(request_id=request_id, error=message))
        while not self._commands.empty():
            _, future, loop = self._commands.get()
            loop.call_soon_threadsafe(set_unless_done, future, None, RuntimeError(message))


def set_unless_done(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    """Settles a future whose waiter may have been cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def build_engine(cfg: Config, index: int, device: str, model_path: str, num_threads: int) -> Any:
    """A vLLM engine with every setting that could change what is sampled given explicitly."""
    import torch
    from vllm.v1.engine.llm_engine import LLMEngine

    torch.set_num_threads(num_threads)
    llm = LLMEngine.from_engine_args(engine_args(cfg, index, device, model_path))
    if cfg.engine_pp(index) > 1:
        llm.collective_rpc("make_room_between_stages")
    return llm


def engine_args(cfg: Config, index: int, device: str, model_path: str) -> Any:
    """vLLM's arguments of engine number `index`."""
    from vllm import EngineArgs

    rollout = cfg.rollout
    memory: dict[str, Any] = {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    if device == "cpu":
        # The smallest block of the CPU kernel: samples of one prompt share whole blocks only.
        memory = {"kv_cache_memory_bytes": rollout.kv_cache_bytes, "block_size": 32}
    elif cfg.cluster.sleep:
        memory["enable_sleep_mode"] = True
    return EngineArgs(
        model=model_path,
        skip_tokenizer_init=True,
        dtype=rollout.dtype.value,
        quantization=QUANTIZATIONS[rollout.quantization],
        seed=cfg.seed * 1000 + index,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=max(8192, rollout.max_model_len),
        enable_chunked_prefill=False,  # a chunked prefill with a seeded request kills the CPU engine
        enable_prefix_caching=rollout.prefix_caching,
        tensor_parallel_size=cfg.engine_tp(index),
        pipeline_parallel_size=cfg.engine_pp(index),
        enable_expert_parallel=rollout.ep and cfg.engine_tp(index) > 1,
        distributed_executor_backend="mp"
        if cfg.engine_workers(index) > 1
        else None,  # not Ray, though this is an actor
        enforce_eager=device == "cpu",
        generation_config="vllm",  # the model folder's generation_config.json must not fill in sampling options
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: after the temperature
        worker_extension_cls="weightsync.receiver.WorkerExtension",
        disable_log_stats=True,
        **memory,
    )


def engine_config(cfg: Config, index: int, model_path: str) -> Any:
    """vLLM's whole configuration of engine number `index`, as on a CPU; starts nothing.

    Raises ConfigError when vLLM does not take the folder for a model that generates.
    """
    found = engine_args(cfg, index, "cpu", model_path).create_engine_config()
    if found.model_config.runner_type != "generate":
        raise ConfigError(
            f"model.path={model_path}: vLLM takes it for a {found.model_config.runner_type} model of architecture "
            f"{', '.join(found.model_config.architectures)}; name one that generates in config.json, like "
            '"architectures": ["Qwen3ForCausalLM"]'
        )
    return found


def sampling_params(sampling: Sampling) -> Any:
    """vLLM's parameters, with every knob that has an effect sent explicitly."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=sampling.seed if sampling.temperature > 0 else None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the ids that end a completion are those above, whatever the model's configuration says
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )


def as_completion(running: _Running, output: Any) -> Completion:
    """vLLM's finished output as a Completion. Raises RuntimeError unless ids, logprobs and versions line up."""
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(sample.logprobs, ids, strict=True)]
    versions = [int(span.version) for span in sample.weight_versions or [] for _ in range(span.start, span.end)]
    if len(versions) != len(ids):
        raise RuntimeError(
            f"{len(ids)} tokens but {len(versions)} weight versions: the engine sampled with unlabelled weights"
        )
    now = time.monotonic()
    return Completion(
        prompt_ids=running.request.prompt_ids,
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason,
        versions=versions,
        ttft_s=running.first_token - running.arrived,
        decode_s=now - running.first_token,
    )
