"""A role's weights and moments as whole tensors with the names of its model folder, whatever the layout.

Functions over an engine; all are collective: every rank calls them in the same order.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from actors.engine import ADAM_MOMENTS, Engine, Slice
from actors.lora import adapter_names, base_name, merged
from actors.pieces import Piece, pieces_of
from conf.choices import Optimizer

State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A parameter of this rank: of which whole it is a slice (or None), and which tensors of the folder that holds.

    `name` is the module's, without what adapters add to it; adapters are parts too, of names that no folder has.
    """

    name: str
    parameter: Any
    slice: Slice | None
    shape: tuple[int, ...]
    pieces: list[Piece]

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.slice is None else self.slice.whole(value)


def parts_of(engine: Engine) -> list[Part]:
    """All parameters, in module order; tied tensors once."""
    found = []
    for name, parameter in engine.module.named_parameters():
        cut = engine.slices.get(id(parameter))
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        if cut is not None:
            shape[cut.dim] *= cut.size
        own = base_name(name.removeprefix("lm."))
        pieces = pieces_of(own, tuple(shape), engine.model_type)
        found.append(Part(name=own, parameter=parameter, slice=cut, shape=tuple(shape), pieces=pieces))
    return found


def full_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the folder. Not collective."""
    parts = [part for part in parts_of(engine) if engine.lora_scale is None or ".lora_" not in part.name]
    return {piece.name: piece.shape for part in parts for piece in part.pieces}


def trained_parts(engine: Engine) -> list[Part]:
    """The parameters that the optimizer holds: all of them, or the adapters."""
    return [part for part in parts_of(engine) if part.parameter.requires_grad]


def trained_moments(engine: Engine) -> dict[str, tuple[str, ...]]:
    """Name -> what the optimizer keeps for it, of every tensor of the training state. Not collective."""
    return {piece.name: engine.moments(part.parameter) for part in trained_parts(engine) for piece in part.pieces}


def trained_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the training state. Not collective."""
    return {piece.name: piece.shape for part in trained_parts(engine) for piece in part.pieces}


@contextlib.contextmanager
def gathered(engine: Engine, names: list[str]) -> Iterator[State]:
    """The named tensors, live and whole, adapters merged, while the context lasts; read only."""
    import deepspeed

    wanted = set(names)
    parts = {part.name: part for part in parts_of(engine)}
    chosen = [part for part in parts.values() if any(piece.name in wanted for piece in part.pieces)]
    beside = {part.name: [parts[n] for n in adapter_names(part.name) if n in parts] for part in chosen}
    chosen += [adapter for pair in beside.values() for adapter in pair]
    context = (
        deepspeed.zero.GatheredParameters([part.parameter for part in chosen])
        if engine.zero_stage == 3
        else contextlib.nullcontext()
    )
    with context:
        found: State = {}
        for part in chosen:
            whole = part.whole(part.parameter.data)
            if engine.lora_scale is not None and beside.get(part.name):
                a, b = (adapter.parameter.data for adapter in beside[part.name])
                whole = merged(whole, a, b, engine.lora_scale)
            found |= {piece.name: whole[piece.index] for piece in part.pieces if piece.name in wanted}
        yield found


def full_state(engine: Engine) -> Iterator[tuple[str, State]]:
    """For each trained tensor: fp32 `master` and the optimizer's moments. The caller copies."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    materialize_moments(engine)
    for part in trained_parts(engine):
        kinds = engine.moments(part.parameter)
        if engine.zero_stage == 0:
            moments = engine.base.state[part.parameter]
            state = {"master": part.parameter.data, **{kind: moments[kind] for kind in kinds}}
        else:
            state = {"master": safe_get_full_fp32_param(part.parameter)}
            state |= {kind: safe_get_full_optimizer_state(part.parameter, kind) for kind in kinds}
        state = {kind: part.whole(value) for kind, value in state.items()}
        for piece in part.pieces:
            yield piece.name, {kind: value[piece.index] for kind, value in state.items()}


def load_full_state(engine: Engine, read: Callable[[str], State]) -> None:
    """The inverse of `full_state`: `read` gives the state of a tensor. Sets master and live weights, and
    moments."""
    materialize_moments(engine)
    for part in trained_parts(engine):
        state: State = {}
        for piece in part.pieces:
            for kind, value in read(piece.name).items():
                if not piece.index:
                    state[kind] = value
                else:
                    state.setdefault(kind, value.new_empty(part.shape))[piece.index] = value
        if part.slice is not None:
            state = {kind: part.slice.part(value) for kind, value in state.items()}
        set_state(engine, part.parameter, state)


def set_state(engine: Engine, parameter: Any, state: State) -> None:
    """Master and live weights, and moments where given, of this rank's parameter."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    moments = {kind: value.float() for kind, value in state.items() if kind != "master"}
    with torch.no_grad():
        if engine.zero_stage == 3:
            set_partition(parameter, state["master"], moments)
            return
        parameter.data.copy_(state["master"].view_as(parameter))
        if engine.zero_stage == 0:
            for kind, value in moments.items():
                engine.base.state[parameter][kind].copy_(value.view_as(parameter))
            return
        safe_set_full_fp32_param(parameter, state["master"].float())
        for kind, value in moments.items():
            safe_set_full_optimizer_state(parameter, value, kind)


def set_partition(parameter: Any, master: torch.Tensor, moments: State) -> None:
    """ZeRO-3: DeepSpeed's own setter cannot cut a tensor whose size the ranks do not divide; pad and cut here."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    count = parameter.ds_tensor.numel()
    rank, ranks = parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size

    def local(value: torch.Tensor) -> torch.Tensor:
        flat = value.flatten().float()
        return torch.nn.functional.pad(flat, (0, count * ranks - flat.numel()))[rank * count : (rank + 1) * count]

    safe_set_local_fp32_param(parameter, local(master))
    parameter.ds_tensor.data.copy_(local(master))
    parameter.ds_secondary_tensor = None  # of hpz: made anew by the next gathering
    for kind, value in moments.items():
        safe_set_local_optimizer_state(parameter, local(value), kind)


def optimizer_step(engine: Engine) -> int:
    """Steps that the optimizer's moments have seen (its bias correction); 0 for SGD. Not collective."""
    return max((int(state["step"]) for state in engine.base.state.values() if "step" in state), default=0)


def set_optimizer_step(engine: Engine, step: int) -> None:
    """Sets the moments' step count, after `load_full_state`."""
    materialize_moments(engine)
    for state in engine.base.state.values():
        if engine.spec.kind is Optimizer.cpu_adam:  # DeepSpeed counts in a number, torch in a tensor
            state["step"] = step
        elif "step" in state:
            state["step"].fill_(step)


def materialize_moments(engine: Engine) -> None:
    """torch makes optimizer state in the first step; a resumed run needs it before that."""
    if engine.base.state or engine.spec.kind is Optimizer.sgd:
        return
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    zero = engine.engine.optimizer
    flat = {
        0: lambda: [p for p in engine.module.parameters() if p.requires_grad],
        1: lambda: zero.single_partition_of_fp32_groups,
        2: lambda: zero.single_partition_of_fp32_groups,
        3: lambda: zero.fp32_partitioned_groups_flat,
    }[engine.zero_stage]()
    for tensor in flat:
        kinds = engine.moments(tensor)
        count: dict[str, Any] = {}
        if kinds == ADAM_MOMENTS:
            zero_steps = torch.zeros((), dtype=torch.float32, device=tensor.device)
            count["step"] = 0 if engine.spec.kind is Optimizer.cpu_adam else zero_steps
        engine.base.state[tensor] = count | {kind: torch.zeros_like(tensor) for kind in kinds}
    if engine.zero_stage in (1, 2):
        for group, tensor in zip(zero.bit16_groups, flat, strict=True):
            lazy_init_hp_params_optimizer_state(group, tensor, engine.base.state)
