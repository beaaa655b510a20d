"""The trainer's end of a push: copies one bucket of live weights into the ring and signs it."""

from collections.abc import Mapping

import torch

from weightsync.channels.shm import Ring, checksum, views
from weightsync.manifest import Manifest


class Sender:
    """Owns the ring of one trainer rank."""

    def __init__(self, manifest: Manifest, num_slots: int):
        self.manifest = manifest
        self.ring = Ring(manifest.max_bucket_bytes, min(num_slots, max(2, len(manifest.buckets))))

    def pack(self, bucket_index: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copies the bucket's tensors into slot bucket_index % num_slots; returns the checksum of its bytes."""
        bucket = self.manifest.buckets[bucket_index]
        slot = self.ring.slot(bucket_index % self.ring.num_slots)
        for name, view in views(slot, bucket):
            view.copy_(tensors[name])
        return checksum(slot, bucket.nbytes)
