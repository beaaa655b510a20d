"""Memory of one GPU between processes on it: slots that other processes map by CUDA's handles."""

import pickle
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import reduce_tensor

from weightsync.plan import Bucket, PlanError


@dataclass(frozen=True, kw_only=True)
class DeviceAddress:
    """How another process on the same GPU opens the slots; `uuid` names the GPU, whatever number it has there."""

    uuid: str
    handles: bytes


class DeviceRing:
    """`num_slots` slots of `slot_bytes` each on this process's current GPU."""

    def __init__(self, slot_bytes: int, num_slots: int):
        self._slots = [torch.zeros(slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(num_slots)]
        self.address = DeviceAddress(uuid=uuid_here(), handles=pickle.dumps([reduce_tensor(s) for s in self._slots]))

    def connect(self) -> None:
        """As weightsync.channels.channel.Outlet: readers open the memory by themselves."""

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Outlet."""

    def slot(self, index: int) -> torch.Tensor:
        """Bytes [slot_bytes] of one slot, on the GPU."""
        return self._slots[index]

    def send(self, index: int, reader: int, bucket: Bucket) -> None:
        """As weightsync.channels.channel.Outlet. Waits for the copies: another process knows nothing of this stream."""
        torch.cuda.current_stream().synchronize()

    def end(self, version: int) -> None:
        """As weightsync.channels.channel.Outlet."""

    def close(self) -> None:
        self._slots = []


class DeviceRingReader:
    """A worker's side. Raises PlanError on another GPU than the rank's."""

    def __init__(self, address: DeviceAddress):
        if address.uuid != uuid_here():
            raise PlanError(
                f"sync.channel=ipc between GPU {address.uuid} of a policy rank and GPU {uuid_here()} of an engine: "
                "both must be on one GPU; use sync.channel=shm or collective"
            )
        self._slots: list[torch.Tensor] = [rebuild(*args) for rebuild, args in pickle.loads(address.handles)]

    def begin(self, version: int, modules: Collection[str] | None) -> None:
        """As weightsync.channels.channel.Inlet."""

    def receive(self, slot: int, bucket: Bucket, memory: torch.Tensor) -> torch.Tensor:
        """As weightsync.channels.channel.Inlet: bytes on the GPU."""
        return self._slots[slot]


def uuid_here() -> str:
    """The name of this process's current GPU."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
