"""Sleep and wake: the device memory of a role's state, given back while another role or the engine has its turn.

A storage is emptied in place, so every view of it (flat ZeRO buffers, partitions, tied weights) stays what it is. Its
content waits in host memory, or, for a role whose device is the host itself, in an unlinked file.
"""

import ctypes
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from actors.engine import Engine

# What a role's state consists of. `gradients` are the buffers in which an engine sums and moves them.
PARTS = ("parameters", "optimizer", "gradients")
SMALLEST_BYTES = 1 << 12  # step counters and the like stay


def state_storages(model: torch.nn.Module | Engine, device: str) -> dict[str, list[Any]]:
    """The storages on `device` of each of PARTS; one that several tensors share is listed once, for the first part."""
    found: dict[str, list[Any]] = {}
    seen: set[int] = set()
    for part, tensors in state_tensors(model).items():
        found[part] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device and storage._cdata not in seen:
                seen.add(storage._cdata)
                found[part].append(storage)
    return found


def state_tensors(model: torch.nn.Module | Engine) -> dict[str, Iterable[torch.Tensor]]:
    """The tensors of each of PARTS."""
    if isinstance(model, torch.nn.Module):
        return {"parameters": weights_of(model)}
    masters = [parameter for group in model.base.param_groups for parameter in group["params"]]
    masters += model.base.state  # at ZeRO-3 the groups are empty between steps
    return {
        "parameters": weights_of(model.module),
        "optimizer": [*(master.data for master in masters), *tensors_in(list(model.base.state.values()))],
        "gradients": tensors_in(model.engine.optimizer),
    }


def own_weights(module: torch.nn.Module) -> None:
    """Copies weights that are views of a mapped file, which cannot be emptied."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def weights_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and this rank's partitions of them at ZeRO-3."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield tensor.data
        for name in ("ds_tensor", "ds_secondary_tensor"):
            if getattr(tensor, name, None) is not None:
                yield getattr(tensor, name)


def tensors_in(thing: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors that containers and DeepSpeed's own objects hold, and their gradients; models are not entered."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, torch.nn.Module):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing.data
        if thing.grad is not None:
            yield thing.grad
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from tensors_in(key, seen)
            yield from tensors_in(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from tensors_in(value, seen)
    elif type(thing).__module__.startswith("deepspeed."):
        yield from tensors_in(vars(thing) if hasattr(thing, "__dict__") else {}, seen)


@dataclass(kw_only=True)
class Asleep:
    """An emptied storage, and where its `num_bytes` wait."""

    storage: Any
    num_bytes: int
    kept: torch.Tensor | None = None
    file: Any = None


@dataclass(kw_only=True)
class Sleeper:
    """What sleeps of one role on `device`."""

    device: str
    asleep: dict[str, list[Asleep]] = field(default_factory=dict)

    def sleep(self, model: torch.nn.Module | Engine, parts: Iterable[str]) -> None:
        """Empties these parts, except what sleeps already."""
        wanted = [part for part in parts if part not in self.asleep]
        storages = state_storages(model, self.device) if wanted else {}
        for part in wanted:
            self.asleep[part] = []
            for storage in storages.get(part, []):  # noted one by one: one that fails loses none of those before it
                entry = put_aside(storage, self.device)
                self.asleep[part] += [entry] if entry is not None else []
        if wanted:
            give_back(self.device)

    def wake(self, parts: Iterable[str]) -> None:
        """Fills these parts again, bit for bit."""
        for part in parts:
            while self.asleep.get(part):
                bring_back(self.asleep[part][-1])
                self.asleep[part].pop()
            self.asleep.pop(part, None)

    def num_bytes(self) -> dict[str, int]:
        """Bytes of each part that sleeps."""
        return {part: sum(entry.num_bytes for entry in entries) for part, entries in self.asleep.items()}


def put_aside(storage: Any, device: str) -> Asleep | None:
    """Copies a storage away and empties it; None when it is empty or small, or borrowed (see `own_weights`)."""
    size = storage.nbytes()
    if size < SMALLEST_BYTES or not storage.resizable():
        return None
    entry = Asleep(storage=storage, num_bytes=size)
    if device == "cuda":
        entry.kept = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        entry.kept.copy_(on_device(storage))
    else:
        entry.file = tempfile.TemporaryFile()  # noqa: SIM115 - lives until the storage wakes
        entry.file.write(on_host(storage))
        entry.file.flush()
    storage.resize_(0)
    return entry


def bring_back(entry: Asleep) -> None:
    """Undoes `put_aside`."""
    entry.storage.resize_(entry.num_bytes)
    if entry.kept is not None:
        on_device(entry.storage).copy_(entry.kept)
        return
    entry.file.seek(0)
    read = entry.file.readinto(on_host(entry.storage))
    entry.file.close()
    if read != entry.num_bytes:
        raise OSError(f"{read} of {entry.num_bytes} bytes came back from the file of a sleeping role")


def on_device(storage: Any) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def on_host(storage: Any) -> Any:
    """A storage of the host as a buffer of bytes. Not through numpy, which would forbid emptying it."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def give_back(device: str) -> None:
    """Returns what allocators keep of freed memory to the device, or to the operating system."""
    if device == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)
