"""What a worker of an engine wants, as its model's own `load_weights` tells.

It is run on tensors without data, and every copy that it would make is noted. So no table of architectures is needed,
and fused, sliced and distributed weights come out right.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from weightsync.plan import ITEM_BYTES, Buffer, PlanError, Wanted
from weightsync.regions import Ints, Regions, view_region

LAYER = re.compile(r"(.*?)\.([0-9]+)\.")  # the outermost number in a name


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


@dataclass(frozen=True, kw_only=True)
class FolderLayer:
    """The tensors `stack`.`number`.* of a folder, by number; `kind` is equal for layers of equal names and shapes."""

    stack: str
    number: str
    tensors: list[int]
    kind: int


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder's tensors, and which of them are a layer's: the same for all workers."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[FolderLayer, ...]
    alone: tuple[int, ...]  # outside of layers

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> "Folder":
        tensors: dict[tuple[str, str], list[int]] = {}
        inside: dict[tuple[str, str], list[Any]] = {}
        alone = []
        for n, (name, shape) in enumerate(shapes.items()):
            found = LAYER.match(name)
            if found is None:
                alone.append(n)
                continue
            layer = (found[1], found[2])
            tensors.setdefault(layer, []).append(n)
            inside.setdefault(layer, []).append((name[found.end() :], shape))
        kinds: dict[Any, int] = {}
        layers = tuple(
            FolderLayer(
                stack=stack,
                number=number,
                tensors=tensors[stack, number],
                kind=kinds.setdefault(tuple(inside[stack, number]), len(kinds)),
            )
            for stack, number in tensors
        )
        return cls(names=tuple(shapes), shapes=tuple(shapes.values()), layers=layers, alone=tuple(alone))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer: the numbers of its tensors in the folder, rising, and the name of its module."""

    tensors: list[int]
    module: str


Target = tuple[str, str, torch.Tensor]  # module, name in it, the parameter or buffer as vLLM loads it


@torch.no_grad()
def record(model: Any, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: str) -> Wanted:
    """What `model`, as vLLM has built it in this worker, wants of a folder's tensors.

    `dtype` is the trainer's; where a parameter's is smaller, that is what should be sent. The model stays as it was.
    Raises PlanError, naming parameters, when a value is computed on the way from the folder to a parameter.
    """
    with prepared(model) as found:
        regions = copies(model, found, names, shapes, dtype, range(len(names)))
    return as_wanted(model, found, names, dtype, regions)


@torch.no_grad()
def record_alike(model: Any, folder: Folder, dtype: str) -> Wanted:
    """As `record`, which for a model of many layers takes minutes: of layers that are alike only one is recorded.

    Two layers are alike when both the folder's tensors and the model's modules under them are: the same names under
    the layer, classes, shapes, dtypes and loaders. What is recorded of one then holds for the other.
    """
    names, shapes = folder.names, folder.shapes
    with prepared(model) as found:
        classes, alone = layers_alike(model, folder)
        firsts = [tensor for members in classes for tensor in members[0].tensors]
        regions = copies(model, found, names, shapes, dtype, sorted([*alone, *firsts]))
        numbers = {(module, name): n for n, (module, name, _) in enumerate(found)}
        repeated, left = [], []
        for first, *others in classes:
            own = regions.take(np.isin(regions.tensor, first.tensors))
            nth = np.searchsorted(first.tensors, own.tensor)
            for other in others:
                targets = moved_targets(found, numbers, own, first.module, other.module)
                if targets is None:
                    left += other.tensors
                else:
                    tensors = np.array(other.tensors, np.int64)[nth]
                    repeated.append(Regions(**{**vars(own), "tensor": tensors, "buffer": targets}))
        if left:
            repeated.append(copies(model, found, names, shapes, dtype, sorted(left)))
    return as_wanted(model, found, names, dtype, Regions.concat([regions, *repeated]))


@contextmanager
def prepared(model: Any) -> Iterator[list[Target]]:
    """The model as it is when vLLM loads a folder into it, while the context lasts: everything that can be loaded."""
    found: list[Target] = []
    storages = set()
    try:
        initialize_layerwise_reload(model)
        for module_name, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                tensor.weight_loader = _get_original_loader(tensor)
                if (storage := tensor.untyped_storage()._cdata) not in storages:
                    storages.add(storage)
                    found.append((module_name, name, tensor))
        yield found
    finally:
        restore(model)


def copies(
    model: Any,
    found: Sequence[Target],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    chosen: Sequence[int],
) -> Regions:
    """The copies that loading the tensors of these numbers makes; their buffers are numbers in `found`."""
    held = [torch.empty(shapes[n], dtype=getattr(torch, dtype), device="meta") for n in chosen]
    sources = {tensor.untyped_storage()._cdata: n for n, tensor in zip(chosen, held, strict=True)}
    targets = {tensor.untyped_storage()._cdata: n for n, (_, _, tensor) in enumerate(found)}
    with Recorder(sources, targets) as recorder:
        model.load_weights(iter([(names[n], tensor) for n, tensor in zip(chosen, held, strict=True)]))
    strange = sorted({".".join(found[n][:2]) if n >= 0 else "a tensor of the folder" for n in recorder.others})
    if strange:
        raise PlanError(f"the engine computes these when it loads a folder, which a push cannot repeat: {strange[:8]}")
    return Regions.of(recorder.rows)


def as_wanted(model: Any, found: Sequence[Target], names: Sequence[str], dtype: str, regions: Regions) -> Wanted:
    """Regions whose buffers are numbers in `found`, in the order of the folder, with buffers in order of their use."""
    regions = regions.take(np.argsort(regions.tensor, kind="stable"))
    require_covered(model, found, regions)
    used, first, number = np.unique(regions.buffer, return_index=True, return_inverse=True)
    rank = np.empty_like(used)
    rank[np.argsort(first)] = np.arange(len(used))
    buffers = [
        Buffer(module=found[n][0], name=found[n][1], dtype=sent_as(found[n][2].dtype, dtype, ".".join(found[n][:2])))
        for n in used[np.argsort(first)].tolist()
    ]
    return Wanted(
        names=tuple(names), regions=Regions(**{**vars(regions), "buffer": rank[number]}), buffers=tuple(buffers)
    )


def layers_alike(model: torch.nn.Module, folder: Folder) -> tuple[list[list[Layer]], list[int]]:
    """Classes of layers that are alike, and the numbers of all other tensors."""
    lists: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList):
            lists.setdefault(name.rpartition(".")[2], []).append(name)
    alone = list(folder.alone)
    classes: dict[Any, list[Layer]] = {}
    for layer in folder.layers:
        roots = lists.get(layer.stack.rpartition(".")[2], [])
        if len(roots) != 1:  # it cannot be told which module it is
            alone += layer.tensors
            continue
        module = f"{roots[0]}.{layer.number}"
        like = (layer.stack, layer.kind, likeness(model.get_submodule(module)))
        classes.setdefault(like, []).append(Layer(tensors=layer.tensors, module=module))
    return list(classes.values()), alone


def likeness(root: torch.nn.Module) -> tuple[Any, ...]:
    """Equal for modules that load alike."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (own, tuple(tensor.shape), tensor.dtype, getattr(_get_original_loader(tensor), "__qualname__", ""))
                for own, tensor in [*module._parameters.items(), *module._buffers.items()]
                if tensor is not None
            ),
        )
        for name, module in root.named_modules()
    )


def moved_targets(
    found: Sequence[Target], numbers: dict[tuple[str, str], int], regions: Regions, here: str, there: str
) -> Ints | None:
    """The regions' buffers under module `there` in place of `here`; None when some have no counterpart there."""
    used, number = np.unique(regions.buffer, return_inverse=True)
    out = []
    for n in used.tolist():
        module, name, _ = found[n]
        if module != here and not module.startswith(f"{here}."):
            return None
        out.append(numbers.get((there + module[len(here) :], name), -1))
    return None if -1 in out else np.array(out, np.int64)[number]


def require_covered(model: torch.nn.Module, found: Sequence[Target], regions: Regions) -> None:
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
        kept = size == 0 and (name in SKIP_TENSORS or not tensor.is_meta)  # vLLM leaves it alone in a reload
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
