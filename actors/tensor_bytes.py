"""Bytes of tensors in this process: those that live now, and the most that live at once while something runs.

On a GPU the allocator counts them. On a CPU nobody does: there, every operation's results are watched.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def live_bytes(device: str) -> int:
    """Bytes of all tensors of this process on `device`; storages that several tensors share count once."""
    if device == "cuda":
        return int(torch.cuda.memory_allocated())
    return sum(storage.nbytes() for storage in live_storages().values())


def live_storages() -> dict[int, Any]:
    """Every CPU storage that a Python tensor refers to, by its identity."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage._cdata] = storage
    return found


def peak_bytes(work: Callable[[], T], device: str) -> tuple[T, int]:
    """What `work` returns, and the most bytes of tensors that lived at once while it ran."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return work(), int(torch.cuda.max_memory_allocated())
    watch = Watch()
    with watch:
        result = work()
    return result, watch.peak


class Watch(TorchDispatchMode):
    """Counts storages from the operation that makes them until they are freed. Slows small operations several times."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for storage in live_storages().values():
            self._note(storage)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code be compiled and run under it: else torch.compile refuses to be called."""
        return True

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self.sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key)
        if known != size:  # ZeRO-3 resizes storages in place
            self.sizes[key] = size
            self.now += size - (known or 0)
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._note(leaf.untyped_storage())
        return result
