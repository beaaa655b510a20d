"""What one push carries: every tensor's name, shape, dtype and place, cut into buckets. Pure."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Alignment of a tensor inside a bucket, bytes: enough for any dtype view and for vector loads.
ALIGN_BYTES = 256
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a bucket: its full shape, and its byte range [offset, offset + nbytes) in the bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    tensors: tuple[TensorSpec, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All buckets of a push, in sending order."""

    buckets: tuple[Bucket, ...]

    @property
    def max_bucket_bytes(self) -> int:
        return max(bucket.nbytes for bucket in self.buckets)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[TensorSpec]:
        for bucket in self.buckets:
            yield from bucket.tensors

    def fingerprint(self) -> str:
        """Hash of names, shapes, dtypes and places: sender and receiver must agree on it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Manifest":
        """Inverse of `to_dict`; lists may have become tuples on the way, or the reverse."""
        return Manifest(
            buckets=tuple(
                Bucket(
                    tensors=tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in bucket["tensors"]),
                    nbytes=bucket["nbytes"],
                )
                for bucket in data["buckets"]
            )
        )


def block_of(name: str) -> str:
    """The prefix up to the first numbered component: `model.layers.3.mlp.up_proj.weight` -> `model.layers.3`.

    Inference engines fuse neighbours of one block (q, k, v; gate, up), so a block is the smallest unit of a push.
    A name without a number is its own block.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name


def plan_buckets(shapes: Mapping[str, tuple[int, ...]], dtype: str, bucket_bytes: int) -> Manifest:
    """Buckets of about `bucket_bytes` that never cut a block; a block larger than that is a bucket of its own."""
    blocks: dict[str, list[str]] = {}
    for name in shapes:
        blocks.setdefault(block_of(name), []).append(name)
    buckets: list[Bucket] = []
    tensors: list[TensorSpec] = []
    used = 0

    def close() -> None:
        nonlocal tensors, used
        if tensors:
            buckets.append(Bucket(tensors=tuple(tensors), nbytes=used))
        tensors, used = [], 0

    for names in blocks.values():
        sizes = [math.prod(shapes[name]) * ITEM_BYTES[dtype] for name in names]
        if used + sum(map(aligned, sizes)) > bucket_bytes:
            close()
        for name, size in zip(names, sizes, strict=True):
            tensors.append(TensorSpec(name=name, dtype=dtype, shape=tuple(shapes[name]), offset=used, nbytes=size))
            used += aligned(size)
    close()
    return Manifest(buckets=tuple(buckets))


def aligned(nbytes: int) -> int:
    """nbytes rounded up to a multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def differences(manifest: Manifest, expected: Mapping[str, tuple[int, ...]], tied: frozenset[str]) -> list[str]:
    """What keeps `manifest` from being a whole update of a model with tensors `expected` (name -> shape).

    `tied` names may be missing: they alias another tensor. Empty when the update is whole.
    """
    sent = {tensor.name: tensor.shape for tensor in manifest.tensors()}
    problems = [f"{name}: the engine's model has no such tensor" for name in sent if name not in expected]
    problems += [f"{name}: missing from the update" for name in expected if name not in sent and name not in tied]
    problems += [
        f"{name}: shape {shape} sent, {tuple(expected[name])} expected"
        for name, shape in sent.items()
        if name in expected and tuple(expected[name]) != shape
    ]
    return problems
