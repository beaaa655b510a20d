"""What a worker of an engine wants, as its model's own `load_weights` tells.

It is run on tensors without data, and every copy that it would make is noted. So no table of architectures is needed,
and fused, sliced and distributed weights come out right.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from weightsync.plan import ITEM_BYTES, Buffer, PlanError, Wanted
from weightsync.regions import Regions, view_region


class Recorder(TorchDispatchMode):
    """Notes every copy from one of `sources` into one of `targets`, by their storages, in place of making it."""

    def __init__(self, sources: dict[int, int], targets: dict[int, int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources, self.targets = sources, targets
        self.rows: list[tuple[int, ...]] = []
        self.others: list[int] = []  # targets that are filled from anything but a source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            number = self.targets.get(target.untyped_storage()._cdata)
            tensor = self.sources.get(source.untyped_storage()._cdata)
            if number is not None:
                if tensor is None or source.shape != target.shape:
                    self.others.append(number)
                else:
                    self.rows += view_region(tensor, number, source, target)
                return target
        elif func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and not is_zeroing(func, args):
            number = self.targets.get(args[0].untyped_storage()._cdata)
            if number is not None or args[0].untyped_storage()._cdata in self.sources:
                self.others.append(-1 if number is None else number)
                return args[0]
        return func(*args, **(kwargs or {}))


def is_zeroing(func: Any, args: Any) -> bool:
    """Whether an operation fills with zeros, as loaders do with rows of padding."""
    return func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0)


@torch.no_grad()
def record(model: Any, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: str) -> Wanted:
    """What `model`, as vLLM has built it in this worker, wants of a folder's tensors.

    `dtype` is the trainer's; where a parameter's is smaller, that is what should be sent. The model stays as it was.
    Raises PlanError, naming parameters, when a value is computed on the way from the folder to a parameter.
    """
    found: list[tuple[str, str, torch.Tensor]] = []
    targets: dict[int, int] = {}
    try:
        initialize_layerwise_reload(model)
        for module_name, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                tensor.weight_loader = _get_original_loader(tensor)
                if targets.setdefault(tensor.untyped_storage()._cdata, len(found)) == len(found):
                    found.append((module_name, name, tensor))
        held = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in shapes]
        sources = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(held)}
        with Recorder(sources, targets) as recorder:
            model.load_weights(iter(zip(names, held, strict=True)))
    finally:
        restore(model)
    strange = sorted({".".join(found[n][:2]) if n >= 0 else "a tensor of the folder" for n in recorder.others})
    if strange:
        raise PlanError(f"the engine computes these when it loads a folder, which a push cannot repeat: {strange[:8]}")
    regions = Regions.of(recorder.rows)
    used = list(dict.fromkeys(regions.buffer.tolist()))
    require_covered(model, found, regions)
    buffers = tuple(
        Buffer(module=found[n][0], name=found[n][1], dtype=sent_as(found[n][2].dtype, dtype, ".".join(found[n][:2])))
        for n in used
    )
    order = {n: k for k, n in enumerate(used)}
    numbered = Regions(**{**vars(regions), "buffer": np.array([order[n] for n in regions.buffer.tolist()], np.int64)})
    return Wanted(names=tuple(names), regions=numbered, buffers=buffers)


def require_covered(model: torch.nn.Module, found: Sequence[tuple[str, str, torch.Tensor]], regions: Regions) -> None:
    """Raises PlanError, naming parameters, when a module would be loaded in part.

    Only rows of padding may stay out: of vocabularies and of experts. What they hold is zero.
    """
    sizes = np.zeros(len(found), np.int64)
    np.add.at(sizes, regions.buffer, regions.num_elements)
    loaded = {found[n][0] for n in set(regions.buffer.tolist())}
    problems = []
    for (module_name, name, tensor), size in zip(found, sizes.tolist(), strict=True):
        module = model.get_submodule(module_name)
        parameter = name in module._parameters
        padded = isinstance(module, VocabParallelEmbedding) or hasattr(module, "w13_weight")
        kept = size == 0 and not tensor.is_meta  # vLLM leaves it alone in a reload
        if module_name in loaded and parameter and size < tensor.numel() and not padded and not kept:
            problems.append(f"{module_name}.{name} ({size} of {tensor.numel()} elements)")
        if size and not parameter and name in module._non_persistent_buffers_set:
            problems.append(f"{module_name}.{name} (a buffer that vLLM does not take from a reload)")
    if problems:
        raise PlanError(f"the folder does not fill what the engine loads: {', '.join(problems[:8])}")


def sent_as(wanted: torch.dtype, held: str, name: str) -> str:
    """The smaller of two dtypes: rounding before the journey or after it is the same."""
    own = str(wanted).removeprefix("torch.")
    if own not in ITEM_BYTES:
        raise PlanError(f"the engine keeps {name} in {own}; a push can give it {', '.join(ITEM_BYTES)}")
    return own if ITEM_BYTES[own] < ITEM_BYTES[held] else held


def restore(model: torch.nn.Module, keep: Collection[str] = ()) -> None:
    """Puts the engine's own tensors back into every module that is prepared for loading, but for those in `keep`."""
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if name not in keep and info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
            info.reset()
