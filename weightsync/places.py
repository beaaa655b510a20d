"""What each worker of an engine would want, without the engine: its part of vLLM's model, built in this process.

vLLM builds a worker's part by asking its process groups who the worker is. Small stand-ins answer here, and memory
that would be filled from a folder is not allocated. Everything else, like tables of experts, is computed as always.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightsync.plan import ITEM_BYTES, PlanError, Wanted
from weightsync.record import Folder, record_alike
from weightsync.reshard import Place, Target


@dataclass(frozen=True, kw_only=True)
class Members:
    """What vLLM asks of a process group, and of the torch group in it. `ranks` are its members; one is this worker."""

    ranks: tuple[int, ...]
    rank: int
    unique_name: str

    @property
    def rank_in_group(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def local_rank(self) -> int:
        return self.rank

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.last_rank

    @property
    def device_group(self) -> "TorchGroup":
        return TorchGroup(self)

    @property
    def cpu_group(self) -> "TorchGroup":
        return TorchGroup(self)


@dataclass(frozen=True)
class TorchGroup:
    """As a torch process group, of which only sizes may be asked."""

    members: Members

    def size(self) -> int:
        return self.members.world_size

    def rank(self) -> int:
        return self.members.rank_in_group


def groups_of(rank: int, tp: int, pp: int) -> dict[str, Members]:
    """The groups of worker `rank` of tp x pp, by vLLM's names for them; the tensor-parallel number runs fastest."""
    stage, place = divmod(rank, tp)
    row = tuple(range(stage * tp, (stage + 1) * tp))
    column = tuple(other * tp + place for other in range(pp))
    alone = (rank,)
    members = {
        "_WORLD": tuple(range(tp * pp)),
        "_TP": row,
        "_ETP": row,
        "_EP": row,
        "_EPLB": row,
        "_PP": column,
        "_DP": alone,
        "_PCP": alone,
        "_DCP": alone,
    }
    return {name: Members(ranks=ranks, rank=rank, unique_name=name) for name, ranks in members.items()}


@contextmanager
def standing_in(groups: dict[str, Members]) -> Iterator[None]:
    """vLLM's process groups are these while the context lasts. Raises PlanError where vLLM has not all of them."""
    known = {name: getattr(parallel_state, name) for name in groups if hasattr(parallel_state, name)}
    if known.keys() != groups.keys():
        raise PlanError(
            f"vllm.distributed.parallel_state has no {', '.join(sorted(groups.keys() - known.keys()))}: this vLLM "
            "keeps its groups elsewhere; use the version in pyproject.toml"
        )
    try:
        for name, group in groups.items():
            setattr(parallel_state, name, group)
        yield
    finally:
        for name, before in known.items():
            setattr(parallel_state, name, before)


class Weightless(TorchFunctionMode):
    """Tensors that are allocated without a value, as weights are before they are loaded, get no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.empty_strided):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@torch.no_grad()
def build_worker(vllm_config: Any, rank: int) -> Any:
    """Worker `rank`'s part of the model of a VllmConfig, whose weights have no memory. Starts nothing.

    Ranks are numbered by (pipeline stage, tensor-parallel number), the last one fastest.
    """
    parallel = vllm_config.parallel_config
    static, vllm_config.compilation_config.static_forward_context = (
        vllm_config.compilation_config.static_forward_context,
        {},  # layers enter themselves, and must not be there yet
    )
    before, parallel.rank = parallel.rank, rank
    try:
        with (
            standing_in(groups_of(rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)),
            set_default_torch_dtype(vllm_config.model_config.dtype),
            torch.device("cpu"),
            Weightless(),
        ):
            return initialize_model(vllm_config=vllm_config, model_config=vllm_config.model_config).eval()
    finally:
        parallel.rank = before
        vllm_config.compilation_config.static_forward_context = static


def worker_wants(vllm_config: Any, rank: int, folder: Folder, dtype: str) -> Wanted:
    """What worker `rank` of an engine wants of a folder's tensors, as weightsync.record.record of the running one.

    `dtype` is the trainer's. Raises PlanError as `record` does.
    """
    parallel = vllm_config.parallel_config
    model = build_worker(vllm_config, rank)
    with (
        set_current_vllm_config(vllm_config),
        standing_in(groups_of(rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)),
    ):
        return record_alike(model, folder, dtype)


def worker_target(vllm_config: Any, rank: int, folder: Folder) -> Target:
    """The file from which vLLM's `load_format=sharded_state` loads worker `rank` of an engine.

    It has every tensor of the worker's model under vLLM's name, in the engine's dtype and as vLLM builds it: before its
    kernels pack anything. Raises PlanError as `record` does, and for tensors that no folder fills.
    """
    parallel = vllm_config.parallel_config
    model = build_worker(vllm_config, rank)
    state = model.state_dict()
    shared: dict[int, list[str]] = {}
    for name, tensor in state.items():
        shared.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    # Of tensors that are one, like a tied head and its embedding, vLLM's loader asks for the first by name.
    first = {name: min(names) for names in shared.values() for name in names}
    with (
        set_current_vllm_config(vllm_config),
        standing_in(groups_of(rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)),
    ):
        wanted = record_alike(model, folder, "float32")
    stage, place = divmod(rank, parallel.tensor_parallel_size)
    piped = f"model-pp-{stage}-tp-{place}-part-0.safetensors"
    file = piped if parallel.pipeline_parallel_size > 1 else f"model-rank-{place}-part-0.safetensors"
    names = [first[f"{b.module}.{b.name}" if b.module else b.name] for b in wanted.buffers]
    buffers, places = [], []
    for buffer, name in zip(wanted.buffers, names, strict=True):
        tensor = state[name]
        if not tensor.is_contiguous() or tensor.storage_offset():
            raise PlanError(f"the engine keeps {name} in strides {tensor.stride()}, which a file cannot")
        buffers.append(replace(buffer, dtype=str(tensor.dtype).removeprefix("torch.")))
        places.append(Place(file=file, name=name, shape=tuple(tensor.shape)))
    rest = {name: state[name] for name in dict.fromkeys(first.values()) if name not in names and state[name].numel()}
    strange = [n for n, t in rest.items() if t.is_meta or str(t.dtype).removeprefix("torch.") not in ITEM_BYTES]
    if strange:
        raise PlanError(f"the folder does not fill these of the engine's tensors, or they have no value: {strange[:8]}")
    fixed = tuple((Place(file=file, name=name, shape=tuple(t.shape)), t.detach()) for name, t in rest.items())
    return Target(wanted=replace(wanted, buffers=tuple(buffers)), places=tuple(places), fixed=fixed)
