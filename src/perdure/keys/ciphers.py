"""The cipher of everything that is sealed. Its package is an extra, so it is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def cipher(key: bytes) -> AESGCM:
    """Return AES-GCM under a key. Raise ConfigurationError if the library for it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigurationError(
            "Encryption needs the package cryptography. Install it: pip install 'perdure[encryption]'."
        ) from None
    return AESGCM(key)
