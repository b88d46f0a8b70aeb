"""Master keys: they wrap data keys, and come from variables or files, never from a store."""

from __future__ import annotations

import os
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator
from hmac import digest
from pathlib import Path

import msgspec

from perdure.errors import ConfigurationError, StoreError
from perdure.keys.ciphers import cipher
from perdure.keys.ring_file import Wrapped

MASTER = "PERDURE_MASTER_KEY"
"""The environment variable that holds the master keys for the command line, the newest first, with commas between."""
SIZE = 32
"""The bytes of a key, and the fewest of a master key."""
# The size that AES-GCM is made for: with any other, the nonce would have to be hashed first.
_NONCE = 12


def new_master() -> str:
    """Return a new random master key, in the form that an environment variable or a file holds."""
    return urlsafe_b64encode(os.urandom(SIZE)).decode()


class Master:
    """A master key. It wraps data keys, and is never stored."""

    def __init__(self, secret: bytes) -> None:
        # Derived under different texts, so that the id, which is stored, tells nothing about the key that wraps.
        self.id = digest(secret, b"perdure master id", "sha256")[:4].hex()
        self._cipher = cipher(digest(secret, b"perdure wrap", "sha256"))

    def wrap(self, key_id: str, owner: str | None, secret: bytes) -> str:
        nonce = os.urandom(_NONCE)
        return urlsafe_b64encode(nonce + self._cipher.encrypt(nonce, secret, _bound(key_id, owner))).decode()

    def unwrap(self, key: Wrapped, path: Path) -> bytes:
        from cryptography.exceptions import InvalidTag  # optional: only encryption needs the package

        try:
            raw = b64decode(key.wrapped, altchars=b"-_", validate=True)
            return self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], _bound(key.id, key.owner))
        except (InvalidTag, ValueError):
            raise StoreError(f"Key {key.id} in {path} is damaged. Restore that file from a backup.") from None


def _bound(key_id: str, owner: str | None) -> bytes:
    # The tag covers this: a wrapped key that is moved under another id or owner in the file does not open.
    return msgspec.json.encode(["perdure data key", key_id, owner])


def secrets_of(given: object, ring: Path) -> Iterator[bytes]:
    """Yield the given master key, or all that an environment variable holds, for a ring that may exist already."""
    if isinstance(given, bytes):
        yield _long_enough(given, "the master key")
        return
    if not isinstance(given, str):
        raise ConfigurationError("A master key is given as bytes, or as the name of an environment variable.")
    held = os.environ.get(given, "")
    if not held.strip() and ring.exists():  # a new master key would not open it
        raise ConfigurationError(
            f"The environment variable {given} holds no master key. "
            f"Give the one that {ring} was made with, or the newest since: `export {given}=…`.",
        )
    if not held.strip():
        raise ConfigurationError(
            f"The environment variable {given} holds no master key. "
            f"Make one: `export {given}=$(perdure keys master)`, and keep a copy of it in a safe place."
        )
    yield from master_keys(held, given)


def master_keys(text: str, where: str) -> list[bytes]:
    """Return the master keys that a file or a variable holds in base64, with commas or line ends between them."""
    found = [_decoded(each, where) for each in text.replace(",", " ").split()]
    return [_long_enough(each, f"the master key in {where}") for each in found]


def _decoded(text: str, where: str) -> bytes:
    try:
        # Both alphabets of base64 are accepted: other tools write + and / where `new_master` writes - and _.
        return b64decode(text.replace("+", "-").replace("/", "_"), altchars=b"-_", validate=True)
    except ValueError:
        raise ConfigurationError(f"The master key in {where} is not base64. `perdure keys master` makes one.") from None


def _long_enough(secret: bytes, what: str) -> bytes:
    if len(secret) < SIZE:
        raise ConfigurationError(
            f"A master key has {SIZE} random bytes or more; {what} has {len(secret)}. `perdure keys master` makes one."
        )
    return secret
