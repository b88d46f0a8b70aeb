"""Names for bytes: what is large, or the same in many places, is stored once, under the hash of its bytes."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode

Values = dict[str, bytes]


def hash_of(body: bytes) -> str:
    """A name for bytes: 128 bits, in 22 characters."""
    return urlsafe_b64encode(hashlib.blake2b(body, digest_size=16).digest())[:22].decode()
