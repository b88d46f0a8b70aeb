"""Keys for encryption at rest, in a file of their own: data keys, each wrapped by a master key.

The file is not part of any store, nor of its backups. When an owner's data key is destroyed here, all that was sealed
with it is erased everywhere.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from hmac import digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.errors import ConfigurationError, InvalidData, KeyForgotten, KeyMissing, StoreError, WrongKey
from perdure.model.ids import now
from perdure.model.session import check_owner
from perdure.protocols import DataKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MASTER = "PERDURE_MASTER_KEY"
"""The environment variable that holds the master keys for the command line, the newest first, with commas between."""
_SIZE = 32
# The size that AES-GCM is made for: with any other, the nonce would have to be hashed first.
_NONCE = 12
_FORMAT = 1
_LOOK_AGAIN = 0.5
"""Seconds after which the file is checked for changes by another process, such as a key that it has forgotten."""


def new_master() -> str:
    """Return a new random master key, in the form that an environment variable or a file holds."""
    return urlsafe_b64encode(os.urandom(_SIZE)).decode()


class KeyInfo(msgspec.Struct, frozen=True):
    """The public part of a data key."""

    id: str
    owner: str | None
    made: str
    master: str
    """The id of the master key that wraps it."""


class _Wrapped(msgspec.Struct, frozen=True):
    id: str
    owner: str | None
    made: str
    master: str
    wrapped: str


class _Gone(msgspec.Struct, frozen=True):
    """The rest of a forgotten key. Not even its owner is kept."""

    id: str
    at: str


class _Ring(msgspec.Struct, frozen=True):
    keys: list[_Wrapped] = []
    forgotten: list[_Gone] = []
    format: int = _FORMAT


class _Master:
    """A master key. It wraps data keys, and is never stored."""

    def __init__(self, secret: bytes) -> None:
        # Derived under different texts, so that the id, which is stored, tells nothing about the key that wraps.
        self.id = digest(secret, b"perdure master id", "sha256")[:4].hex()
        self._cipher = cipher(digest(secret, b"perdure wrap", "sha256"))

    def wrap(self, key_id: str, owner: str | None, secret: bytes) -> str:
        nonce = os.urandom(_NONCE)
        return urlsafe_b64encode(nonce + self._cipher.encrypt(nonce, secret, _bound(key_id, owner))).decode()

    def unwrap(self, key: _Wrapped, path: Path) -> bytes:
        from cryptography.exceptions import InvalidTag  # optional: only encryption needs the package

        try:
            raw = b64decode(key.wrapped, altchars=b"-_", validate=True)
            return self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], _bound(key.id, key.owner))
        except (InvalidTag, ValueError):
            raise StoreError(f"Key {key.id} in {path} is damaged. Restore that file from a backup.") from None


def _bound(key_id: str, owner: str | None) -> bytes:
    # The tag covers this: a wrapped key that is moved under another id or owner in the file does not open.
    return msgspec.json.encode(["perdure data key", key_id, owner])


class FileKeyRing:
    """A key ring in a file, which any number of processes may share.

    `master` is the master key of 32 bytes or more, or the name of an environment variable that holds one in base64.
    Give several to rotate, the newest first: it wraps new data keys.

    The file must exist, unless `create` is set. A ring made by mistake, beside the right one, would seal data with keys
    that nobody backs up.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, master: bytes | str | Sequence[bytes | str], create: bool = False
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise InvalidData("$.path", "a key ring is a file; give its path")
        self.path = Path(path)
        if not create and not self.path.exists():
            raise ConfigurationError(
                f"No key ring is at {self.path}. Make one with `perdure keys new {self.path}`, or "
                "`FileKeyRing(path, master=…, create=True)`; if there was one, restore it from a backup."
            )
        given = [*master] if isinstance(master, list | tuple) else [master]
        self._masters = [_Master(secret) for each in given for secret in _secrets(each, self.path)]
        if not self._masters:
            raise ConfigurationError("A key ring needs a master key: `FileKeyRing(path, master=…)`.")
        # Reentrant: `_made` changes the file and then opens the key, without letting another thread in between.
        self._lock = threading.RLock()
        self._ring = _Ring()
        self._seen: tuple[int, ...] | None = None
        self._looked = float("-inf")
        self._opened: dict[str, DataKey] = {}
        self._by_owner: dict[str | None, list[_Wrapped]] = {}
        self._losses = 0
        if create:
            self._make()

    def __repr__(self) -> str:
        return f"FileKeyRing({str(self.path)!r})"

    def current(self, owner: str | None) -> DataKey:
        """Return the key for what an owner writes now. Make one if there is none."""
        self._look()
        keys = self._by_owner.get(owner)
        return self._open(keys[-1]) if keys else self._made(owner, renews=False)

    def first(self, owner: str | None) -> DataKey | None:
        """Return the oldest key of an owner, or None."""
        self._look()
        keys = self._by_owner.get(owner)
        return self._open(keys[0]) if keys else None

    def find(self, key_id: bytes) -> DataKey:
        """Return a key by its id. Raise KeyMissing, KeyForgotten or WrongKey if it cannot be used."""
        self._look()
        name = key_id.hex()
        found = self._opened.get(name)
        if found is not None:
            return found
        wanted = self._wrapped(name)
        if wanted is None:  # another process may have made it just now
            self._look(surely=True)
            wanted = self._wrapped(name)
        if wanted is not None:
            return self._open(wanted)
        for gone in self._ring.forgotten:
            if gone.id == name:
                raise KeyForgotten(name, gone.at)
        raise KeyMissing(name)

    def _wrapped(self, name: str) -> _Wrapped | None:
        return next((each for each in self._ring.keys if each.id == name), None)

    def owners(self) -> Sequence[str | None]:
        """Return the owners that have a key."""
        self._look()
        return [*self._by_owner]

    def keys(self) -> Sequence[KeyInfo]:
        """Return the public part of the keys, the oldest first."""
        self._look(surely=True)
        return [KeyInfo(each.id, each.owner, each.made, each.master) for each in self._ring.keys]

    def forgotten(self) -> Sequence[tuple[str, str]]:
        """Return the ids of forgotten keys, each with the time at which it was forgotten."""
        self._look(surely=True)
        return [(each.id, each.at) for each in self._ring.forgotten]

    def renew(self, owner: str | None) -> DataKey:
        """Make a new key for an owner. New rows are sealed with it, and older rows open as before.

        Raise InvalidData for an owner without a key: it is most often mistyped.
        """
        return self._made(owner, renews=True)

    def rotate(self) -> int:
        """Wrap all data keys with the newest master key. Return how many were wrapped with another.

        No stored row changes. Afterwards this file does not need the older master keys.
        """
        newest = self._masters[0]

        def wrapped_again(ring: _Ring) -> _Ring:
            keys = [
                each
                if each.master == newest.id
                else _Wrapped(
                    each.id, each.owner, each.made, newest.id, newest.wrap(each.id, each.owner, self._open(each).secret)
                )
                for each in ring.keys
            ]
            return _Ring(keys, ring.forgotten)

        before = self._changed(wrapped_again)
        return sum(each.master != newest.id for each in before.keys)

    def forget(self, owner: str | None) -> int:
        """Destroy all keys of an owner. Return how many there were. This erases all that they have sealed.

        A backup of this file still has the keys: destroy it too.
        """
        check_owner(owner)
        at = _time(now())

        def without(ring: _Ring) -> _Ring:
            gone = [_Gone(each.id, at) for each in ring.keys if each.owner == owner]
            return (
                _Ring([each for each in ring.keys if each.owner != owner], [*ring.forgotten, *gone]) if gone else ring
            )

        before = self._changed(without, overwrites=True)
        return sum(each.owner == owner for each in before.keys)

    def losses(self) -> int:
        """Return how many keys this object has opened and can no longer find, because they were forgotten."""
        self._look()
        return self._losses

    def _make(self) -> None:
        """Make the file if it does not exist."""
        with self._lock, _locked(self.path):
            if not self.path.exists():
                _write(self.path, _Ring())

    def _made(self, owner: str | None, *, renews: bool) -> DataKey:
        """Return a new key for an owner, or the one that another process has just made."""
        newest, key_id, secret = self._masters[0], os.urandom(8).hex(), os.urandom(_SIZE)
        added = _Wrapped(key_id, owner, _time(now()), newest.id, newest.wrap(key_id, owner, secret))

        def with_key(ring: _Ring) -> _Ring:
            # Looked at again under the lock: another process may have made one since, or forgotten it.
            has_key = any(each.owner == owner for each in ring.keys)
            if renews and not has_key:
                whose = "the key that sessions without an owner share" if owner is None else f"a key of {owner!r}"
                raise InvalidData("$.owner", f"{self.path} does not have {whose}; the first write makes it")
            if not renews and has_key:
                return ring
            self._require_own(ring)
            return _Ring([*ring.keys, added], ring.forgotten)

        with self._lock:
            self._changed(with_key)
            return self._open(self._by_owner[owner][-1])

    def _require_own(self, ring: _Ring) -> None:
        """Raise WrongKey if no master key that was given has wrapped a key of the ring.

        Else an owner could write with a wrong master key, and nobody with the right one could read it.
        """
        masters = {each.master for each in ring.keys}
        if masters and masters.isdisjoint(each.id for each in self._masters):
            raise WrongKey(ring.keys[0].id, ring.keys[0].master)

    def _open(self, key: _Wrapped) -> DataKey:
        found = self._opened.get(key.id)
        if found is None:
            master = next((each for each in self._masters if each.id == key.master), None)
            if master is None:
                raise WrongKey(key.id, key.master)
            found = self._opened[key.id] = DataKey(bytes.fromhex(key.id), master.unwrap(key, self.path))
        return found

    def _look(self, *, surely: bool = False) -> None:
        """Read the file again if it has changed. Without `surely`, check it at most every half second."""
        if not surely and time.monotonic() < self._looked + _LOOK_AGAIN:
            return
        with self._lock:
            self._looked = time.monotonic()
            seen = _identity(self.path)
            if seen != self._seen or seen is None:
                self._take(_read(self.path), seen)

    def _take(self, ring: _Ring, seen: tuple[int, ...] | None) -> None:
        self._ring, self._seen = ring, seen
        by_owner: dict[str | None, list[_Wrapped]] = {}
        for each in ring.keys:
            by_owner.setdefault(each.owner, []).append(each)
        self._by_owner = by_owner
        known = {each.id for each in ring.keys}
        for gone in self._opened.keys() - known:  # a forgotten key must not stay usable in memory
            del self._opened[gone]
            self._losses += 1

    def _changed(self, change: Callable[[_Ring], _Ring], *, overwrites: bool = False) -> _Ring:
        """Change the file, one process at a time. Return its content from before."""
        # The lock of threads first, as in `_made`: in the other order, two threads could wait for each other for ever.
        with self._lock, _locked(self.path):
            before = _read(self.path)
            after = change(before)
            if after is not before:
                _write(self.path, after, overwrites=overwrites)
            self._looked = time.monotonic()
            self._take(after, _identity(self.path))
            return before


def ring_at(path: str, *, create: bool = False) -> FileKeyRing:
    """Return the key ring in a file, with the master keys of the environment, as the command line does.

    They are in the variable PERDURE_MASTER_KEY, or in the file that PERDURE_MASTER_KEY_FILE names.
    """
    named = os.environ.get(f"{MASTER}_FILE", "")
    if not named or os.environ.get(MASTER):
        return FileKeyRing(path, master=MASTER, create=create)
    try:
        text = Path(named).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"The file {named} of {MASTER}_FILE cannot be read ({error.strerror}).") from None
    return FileKeyRing(path, master=master_keys(text, named), create=create)


def cipher(key: bytes) -> AESGCM:
    """Return AES-GCM under a key. Raise ConfigurationError if the library for it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigurationError(
            "Encryption needs the package cryptography. Install it: pip install 'perdure[encryption]'."
        ) from None
    return AESGCM(key)


def _secrets(given: object, ring: Path) -> Iterator[bytes]:
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
    if len(secret) < _SIZE:
        raise ConfigurationError(
            f"A master key has {_SIZE} random bytes or more; {what} has {len(secret)}. `perdure keys master` makes one."
        )
    return secret


def _time(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _identity(path: Path) -> tuple[int, ...] | None:
    # The inode too: each change replaces the file, and two changes may have the same time and size.
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> _Ring:
    while True:
        seen = _identity(path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            what = f"The key ring {path} could not be read ({error.strerror})."
            raise StoreError(f"{what} Check its permissions, or restore it from a backup.") from None
        try:
            ring = msgspec.json.decode(raw, type=_Ring)
        except msgspec.MsgspecError as error:
            if seen != _identity(path):
                continue  # while it was read, it was replaced and the old file overwritten
            raise StoreError(f"The key ring {path} is damaged ({error}). Restore it from a backup.") from None
        if ring.format > _FORMAT:
            raise StoreError(f"The key ring {path} was written by a newer release of perdure. Install that one.")
        return ring


def _write(path: Path, ring: _Ring, *, overwrites: bool = False) -> None:
    """Replace the file as a whole: after a power cut, either the old or the new one is there.

    With `overwrites`, the content of the old file is then overwritten, as far as its disk allows that.
    """
    # One name is enough, since writers hold the lock. A rest of a killed one is truncated.
    temporary = path.with_name(f"{path.name}.new")
    _write_out(temporary, msgspec.json.format(msgspec.json.encode(ring)), os.O_CREAT | os.O_TRUNC)
    # Opened before it is replaced: afterwards the old file has no name.
    old = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC) if overwrites else None
    try:
        os.replace(temporary, path)
        _fsync_directory(path.parent)
        # Last, once the new file is durable: a crash before this leaves a readable ring.
        if old is not None:
            _write_all(old, bytes(os.fstat(old).st_size))
    finally:
        if old is not None:
            os.close(old)


def _write_out(path: Path, raw: bytes, flags: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        _write_all(handle, raw)
    finally:
        os.close(handle)


def _write_all(handle: int, raw: bytes) -> None:
    written = 0
    while written < len(raw):  # on a full disk a write is short, and raises no error
        written += os.write(handle, raw[written:])
    os.fsync(handle)


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(path: Path) -> Iterator[Any]:
    """Hold a lock on a file beside the ring. Unlike the ring, that file is never replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = path.with_name(f"{path.name}.lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"The key ring {path} could not be locked ({error.strerror}). Check the directory.") from None
    try:
        # flock, not lockf: a lock of lockf ends when this process closes any other handle of the file.
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
