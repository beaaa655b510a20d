"""What this rank holds of the model folder's tensors, and who of the ranks that hold the same sends it.

ZeRO-3 leaves each rank a part of every flat parameter, tensor and expert parallelism a slice of some; at ZeRO 0 to 2
data-parallel ranks hold the same, and share the sending.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from actors.engine import Engine, Slice
from actors.lora import adapter_names
from actors.pieces import Piece
from actors.weights import Part, full_shapes, gathered, parts_of
from weightsync import held
from weightsync.held import Parameter, Share
from weightsync.regions import Regions
from weightsync.sender import Read, plain


def held_regions(engine: Engine, world: int) -> Regions:
    """What this rank is to send: its buffers are numbers in `parts_of`, tensors numbers in `full_shapes`.

    Collective. No two ranks' regions overlap, and together they are everything.
    """
    return held.held_regions(parameters_of(engine), shares_of(engine, world))


def parameters_of(engine: Engine) -> list[Parameter]:
    """Each of `parts_of`, with the numbers of its tensors in `full_shapes`. Not collective."""
    numbers = {name: k for k, name in enumerate(full_shapes(engine))}
    return [described(part.name, part.shape, part.pieces, numbers) for part in parts_of(engine)]


def described(name: str, shape: tuple[int, ...], pieces: Sequence[Piece], numbers: Mapping[str, int]) -> Parameter:
    """A parameter as weightsync.held has it. Tensors without a number are in no folder: adapters."""
    known = tuple((numbers[piece.name], piece.index) for piece in pieces if piece.name in numbers)
    return Parameter(name=name, shape=shape, pieces=known)


def shares_of(engine: Engine, world: int) -> list[Share]:
    """What this rank has of each of `parts_of`. Collective."""
    parts = parts_of(engine)
    replicas: dict[int, tuple[int, int]] = {}
    if engine.zero_stage < 3:
        for part in parts:
            key = 0 if part.slice is None else id(part.slice.group)
            if key not in replicas:
                replicas[key] = replica(part.slice, world)
    found = []
    for part in parts:
        cut: dict[str, int] = {}
        if part.slice is not None:
            rank = torch.distributed.get_rank(part.slice.group)
            cut = {"dim": part.slice.dim, "part": rank, "parts": part.slice.size}
        if engine.zero_stage == 3:
            parameter = part.parameter
            cut |= {"numel": int(parameter.ds_tensor.ds_numel), "partition": int(parameter.ds_zero_partition_rank)}
        else:
            number, count = replicas[0 if part.slice is None else id(part.slice.group)]
            cut |= {"replica": number, "replicas": count}
        found.append(Share(**cut))
    return found


def replica(cut_by: Slice | None, world: int) -> tuple[int, int]:
    """(number of this rank among those that hold the same, how many these are). Collective where ranks hold slices."""
    if cut_by is None:
        return (torch.distributed.get_rank() if world > 1 else 0), world
    members = torch.distributed.get_process_group_ranks(cut_by.group)
    groups: list[list[int]] = [[] for _ in range(world)]
    torch.distributed.all_gather_object(groups, members)
    return sorted({tuple(group) for group in groups}).index(tuple(members)), world // cut_by.size


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What this rank held of a version: how to read it, and the copies that are read, by number in `parts_of`."""

    reads: list[Read]
    copies: dict[int, torch.Tensor]


def take_snapshot(engine: Engine, room: Snapshot | None) -> Snapshot:
    """Copies what this rank holds into host memory, that of `room` where given. Collective at ZeRO-3 with adapters."""
    copies = {} if room is None else room.copies
    return Snapshot(reads=sources_of(engine, copies), copies=copies)


def sources_of(engine: Engine, copies: dict[int, torch.Tensor] | None = None) -> list[Read]:
    """How to read each of `parts_of`, as it is now; adapters merged. Collective at ZeRO-3 with adapters.

    With `copies` what is trained is copied there, and read from there.
    """
    parts = parts_of(engine)
    adapters = [part.name for part in parts if engine.lora_scale is not None and ".lora_" in part.name]
    found: list[Read] = []
    merged: dict[str, torch.Tensor] = {}
    if adapters:
        with gathered(engine, adapters) as live:
            merged = {name: tensor.float().clone() for name, tensor in live.items()}
    for number, part in enumerate(parts):
        flat, low = local_flat(engine, part)
        if copies is not None and part.parameter.requires_grad:
            flat = copied(flat, number, copies)
        a, b = (merged.get(name) for name in adapter_names(part.name))
        if a is None or b is None:
            found.append(plain(flat))
        else:
            assert part.slice is None and engine.lora_scale is not None
            found.append(with_adapter(flat, low, a.to(flat.device), b.to(flat.device), engine.lora_scale))
    return found


def copied(flat: torch.Tensor, number: int, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy in host memory, in `copies` under `number`, which is made where it is missing."""
    if number not in copies:
        copies[number] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
    return copies[number].copy_(flat)


def local_flat(engine: Engine, part: Part) -> tuple[torch.Tensor, int]:
    """What this rank holds of a parameter, flat, and the first element of that."""
    if engine.zero_stage < 3:
        return part.parameter.data.flatten(), 0
    own = part.parameter.ds_tensor
    return own.data.flatten(), int(own.ds_numel) * int(part.parameter.ds_zero_partition_rank)


def with_adapter(flat: torch.Tensor, low: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> Read:
    """Elements of W + scale B A, of which `flat` holds W from element `low` on."""
    width = a.shape[1]
    base = plain(flat)

    def read(at: int, row: int, col: int, count: int, length: int) -> torch.Tensor:
        first = low + at
        last = first + (count - 1) * row + (length - 1) * col
        top = first // width
        delta = b[top : last // width + 1] @ a  # [rows, width], of those rows alone
        mine = delta.as_strided((count, length), (row, col), first - top * width)
        held = base(at, row, col, count, length)
        return (held.float() + scale * mine).to(held.dtype)

    return read
