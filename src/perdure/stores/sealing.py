"""Sealed bodies: rows as the tables of a store with keys keep them, and as jobs see them.

A sealed body is a mark, the id of its key, a nonce, and the text with its tag. The text begins with the checksum that
the job has made of the body and its place, so a row that was moved is noticed. The column `crc` has a checksum of the
sealed bytes, which says nothing about the text.
"""

from __future__ import annotations

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from hmac import digest
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgspec

from perdure.errors import InvalidData, KeyMissing
from perdure.protocols import DataKey, Key, KeyRing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MARK = b"\x02"
"""The first byte of a sealed body. JSON and packed bodies begin with other bytes."""
_ID, _NONCE, _TAG, _CRC = 8, 12, 16, 4
_NONCE_AT = 1 + _ID
_TEXT_AT = _NONCE_AT + _NONCE
_SHORTEST = _TEXT_AT + _TAG
WITH_CRC = frozenset({"msg", "head", "batch", "inbox", "sketch", "timer"})
NAMED = frozenset({"value", "blob"})
"""The tables whose rows have a name instead of a place. The tag covers the name."""
_AAD: Mapping[str, bytes] = {table: f"perdure 1 {table}".encode() for table in (*WITH_CRC, *NAMED, "key")}
KEYED = "~"
"""The first character of names that are made with a key. No hash contains it."""


class Tampered(Exception):
    """Raised for a sealed body that is not what was written."""


class StoredName(str):
    """The name of a file in a sealed table. `plain` is the hash that messages use for it."""

    __slots__ = ("plain",)
    plain: str


def plain_name(name: str) -> str:
    """Return the hash that messages use for a file."""
    return name.plain if isinstance(name, StoredName) else name


def is_sealed(body: object) -> bool:
    return type(body) is bytes and body[:1] == MARK and len(body) >= _SHORTEST


def key_of(body: bytes) -> bytes:
    """Return the id of the key that a body is sealed with."""
    return body[1:_NONCE_AT]


class _Cipher(NamedTuple):
    """A key at hand, and the first bytes of all bodies that it seals."""

    key: DataKey
    gcm: AESGCM
    start: bytes


class Root:
    """The source of an owner's names and words. It is the oldest of the owner's keys, so that they never change."""

    def __init__(self, key: DataKey) -> None:
        self.key = key
        # A secret for each use, so that no use says anything about another.
        self._names = digest(key.secret, b"perdure names", "sha256")
        self._words = digest(key.secret, b"perdure words", "sha256")
        self._files = digest(key.secret, b"perdure files", "sha256")

    def name_of(self, body: bytes) -> str:
        """Return a name for bytes: 128 bits, in 23 characters. Without the key it says nothing about them."""
        made = blake2b(body, digest_size=16, key=self._names).digest()
        return KEYED + urlsafe_b64encode(made)[:22].decode()

    def word(self, word: str) -> str:
        """Return the token for a word in an index: 64 bits, in 16 characters."""
        return blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8, key=self._words).hexdigest()

    def words(self, words: Iterable[str]) -> list[str]:
        known: dict[str, str] = {}
        return [known.get(each) or known.setdefault(each, self.word(each)) for each in words]

    def file_name(self, plain: str) -> StoredName:
        """Return the name for a file in the tables. With the key, it can be turned back into the hash."""
        made = self._blocks().encryptor().update(bytes.fromhex(plain))
        found = StoredName(KEYED + urlsafe_b64encode(self.key.id + made).decode().rstrip("="))
        found.plain = plain
        return found

    def file_hash(self, raw: bytes) -> str:
        return str(self._blocks().decryptor().update(raw).hex())

    def _blocks(self) -> Any:
        # Imported late, here and below: it comes with an extra, which a store without keys does not need.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        # A hash is two blocks that look random and never repeat: no mode hides more of them, or can be turned back.
        return Cipher(algorithms.AES(self._files), modes.ECB())

    def key_name(self, name: str) -> str:
        """Return the name for an idempotency key in the tables."""
        made = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16, key=self._words).digest()
        return KEYED + urlsafe_b64encode(made)[:22].decode()


class Sealing:
    """The sealing and opening of bodies with the keys of a ring. Without a ring it only tells what is sealed."""

    def __init__(self, ring: KeyRing | None = None) -> None:
        self.ring = ring
        self._ciphers: dict[bytes, _Cipher] = {}
        self._roots: dict[bytes, Root] = {}

    @property
    def is_on(self) -> bool:
        return self.ring is not None

    @property
    def losses(self) -> int:
        """The number of keys that were used here and are forgotten. What was read before it has grown is stale."""
        return 0 if self.ring is None else self.ring.losses()

    def drop_keys(self) -> None:
        """Drop all keys at hand. Those that are not forgotten are asked for again."""
        self._ciphers.clear()
        self._roots.clear()

    def _cipher(self, key: DataKey) -> _Cipher:
        known = self._ciphers.get(key.id)
        if known is None or known.key is not key:
            from perdure.keys.ciphers import cipher

            gcm = cipher(digest(key.secret, b"perdure seal", "sha256"))
            known = self._ciphers[key.id] = _Cipher(key, gcm, MARK + key.id)
        return known

    def _found(self, key_id: bytes) -> _Cipher:
        if self.ring is None:
            raise KeyMissing(key_id.hex(), has_ring=False)
        return self._cipher(self.ring.find(key_id))

    def seal(
        self, table: str, owner: str | None, body: bytes, crc: int | None = None, name: str = "", key: bytes = b""
    ) -> bytes:
        """Return a body sealed with the owner's key, or with the key that has the id `key`."""
        assert self.ring is not None
        known = self._cipher(self.ring.find(key) if key else self.ring.current(owner))
        nonce = os.urandom(_NONCE)
        text = body if crc is None else (crc & 0xFFFFFFFF).to_bytes(_CRC, "big") + body
        return known.start + nonce + known.gcm.encrypt(nonce, text, _aad(table, name))

    def open(self, table: str, body: bytes, name: str = "") -> tuple[bytes, int | None]:
        """Return the body within a sealed one, and its checksum if its table has one.

        Raise Tampered if it was changed, or the ring's error if the key cannot be had.
        """
        known = self._found(key_of(body))
        try:
            text = known.gcm.decrypt(body[_NONCE_AT:_TEXT_AT], body[_TEXT_AT:], _aad(table, name))
        except _invalid_tag():
            raise Tampered from None
        if table not in WITH_CRC:
            return text, None
        return text[_CRC:], int.from_bytes(text[:_CRC], "big")

    def opened(self, table: str, body: Any, crc: Any = None, name: str = "") -> tuple[Any, Any]:
        """Return a body and its checksum as jobs see them. A changed body gets a checksum that never matches."""
        # A file under its plain hash was never sealed, even if its bytes look like it.
        if not is_sealed(body) or (table == "blob" and not name.startswith(KEYED)):
            is_lost = table in NAMED and name.startswith(KEYED) and type(body) is bytes
            return (b"", crc) if is_lost else (body, crc)  # a body under a keyed name is always sealed
        try:
            return self.open(table, body, name)
        except Tampered:
            return body, -1
        except KeyMissing:
            if crc is None or crc32(body) == crc:
                raise
            return body, -1  # the id of the key has changed since it was written

    def opened_rows(self, table: str, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return rows that end with a checksum and a body as jobs see them. Most of them have the same key."""
        aad, start, decrypt = _AAD[table], b"", None
        found: list[tuple[Any, ...]] = []
        for row in rows:
            body = row[-1]
            if not is_sealed(body):
                found.append(row)
                continue
            if decrypt is None or body[:_NONCE_AT] != start:
                try:
                    decrypt, start = self._found(key_of(body)).gcm.decrypt, body[:_NONCE_AT]
                except KeyMissing:
                    if crc32(body) == row[-2]:
                        raise
                    found.append((*row[:-2], -1, body))  # the id of the key has changed since it was written
                    continue
            try:
                text = decrypt(body[_NONCE_AT:_TEXT_AT], body[_TEXT_AT:], aad)
                found.append((*row[:-2], int.from_bytes(text[:_CRC], "big"), text[_CRC:]))
            except _invalid_tag():
                found.append((*row[:-2], -1, body))
        return found

    def sealed_row(self, table: str, owner: str | None, crc: int | None, body: bytes) -> tuple[int, bytes]:
        """Return the checksum and the body of a row as the table keeps them."""
        sealed = self.seal(table, owner, body, crc or 0)
        return crc32(sealed), sealed

    def sealed_rows(self, table: str, owner: str | None, rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return rows that end with a checksum and a body, sealed."""
        return [(*row[:-2], *self.sealed_row(table, owner, row[-2], row[-1])) for row in rows]

    def root(self, owner: str | None) -> Root:
        """Return the source of an owner's names. A key is made if there is none."""
        assert self.ring is not None
        found = self.ring.first(owner)
        if found is None:
            self.ring.current(owner)  # it makes one
            found = self.ring.first(owner)
        assert found is not None, "one was made"
        return self._root(found)

    def known_root(self, owner: str | None) -> Root | None:
        """Return the source of an owner's names. Return None if the owner has no key, and so no sealed names."""
        found = None if self.ring is None else self.ring.first(owner)
        return None if found is None else self._root(found)

    def roots(self) -> list[Root]:
        """Return the sources of all owners' names."""
        owners: Sequence[str | None] = () if self.ring is None else self.ring.owners()
        return [root for owner in owners if (root := self.known_root(owner)) is not None]

    def _root(self, key: DataKey) -> Root:
        known = self._roots.get(key.id)
        if known is None or known.key is not key:
            known = self._roots[key.id] = Root(key)
        return known

    def file_name(self, stored: str) -> str:
        """Return a file's name together with its plain hash. Raise the ring's error if the key cannot be had."""
        if not stored.startswith(KEYED):
            return stored
        raw = _decoded(stored)
        if self.ring is None:
            raise KeyMissing(raw[:_ID].hex(), has_ring=False)
        found = StoredName(stored)
        found.plain = self._root(self.ring.find(raw[:_ID])).file_hash(raw[_ID:])
        return found

    def sealed_key(self, owner: str | None, key: Key, crc: int | None) -> tuple[str, str, int]:
        """Return the name, the digest and the checksum of an idempotency key's row."""
        name = self.root(owner).key_name(key.name)
        text = msgspec.json.encode([(crc or 0) & 0xFFFFFFFF, key.name, key.digest])
        sealed = self.seal("key", owner, text, name=name)
        return name, KEYED + urlsafe_b64encode(sealed).decode().rstrip("="), crc32(sealed)

    def opened_key(self, name: Any, digest: Any, crc: Any) -> tuple[Any, Any, Any]:
        """Return the columns of an idempotency key's row as jobs see them."""
        if type(name) is not str or type(digest) is not str or not (name.startswith(KEYED) and len(digest) > 64):
            return name, digest, crc
        if not digest.startswith(KEYED):
            return name, digest, -1
        try:
            sealed = _decoded(digest)
            if not is_sealed(sealed):
                return name, digest, -1
            text, _ = self.open("key", sealed, name)
            inner, plain, told = msgspec.json.decode(text, type=tuple[int, str, str])
        except (Tampered, InvalidData, msgspec.MsgspecError):
            return name, digest, -1
        # An engine that protects the row by itself returns None, and -1 if it was changed.
        return plain, told, crc if crc in (None, -1) else inner


def _invalid_tag() -> type[Exception]:
    # Imported when a row does not open: a process that opens a store without keys may not have the library.
    from cryptography.exceptions import InvalidTag

    return InvalidTag


def _aad(table: str, name: str) -> bytes:
    return b"%b/%b" % (_AAD[table], name.encode()) if name else _AAD[table]


def _decoded(stored: str) -> bytes:
    text = stored[len(KEYED) :]
    try:
        raw = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        raw = b""
    # The decoder skips foreign characters and ignores spare bits of the last one. Only one spelling is accepted.
    if urlsafe_b64encode(raw).decode().rstrip("=") != text:
        raise InvalidData("$", "not a name that was made with a key")
    return raw
