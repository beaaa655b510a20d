"""Seeds that derive from what they are for, so that no two samples share one and a resume repeats none."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A 31-bit seed from what names a sample uniquely, such as (purpose, run seed, position, sample)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
