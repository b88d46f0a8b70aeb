"""A key ring in a file: data keys, each wrapped by a master key, which any number of processes may share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from perdure.errors import ConfigurationError, InvalidData, KeyForgotten, KeyMissing, WrongKey
from perdure.keys.masters import MASTER, SIZE, Master, master_keys, secrets_of
from perdure.keys.ring_file import Gone, Ring, Wrapped, identity, locked, read, write
from perdure.model.ids import now
from perdure.model.session import check_owner
from perdure.protocols import DataKey

_LOOK_AGAIN = 0.5
"""Seconds after which the file is checked for changes by another process, such as a key that it has forgotten."""


class KeyInfo(msgspec.Struct, frozen=True):
    """The public part of a data key."""

    id: str
    owner: str | None
    made: str
    master: str
    """The id of the master key that wraps it."""


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
        self._masters = [Master(secret) for each in given for secret in secrets_of(each, self.path)]
        if not self._masters:
            raise ConfigurationError("A key ring needs a master key: `FileKeyRing(path, master=…)`.")
        # Reentrant: `_made` changes the file and then opens the key, without letting another thread in between.
        self._lock = threading.RLock()
        self._ring = Ring.of()
        self._seen: tuple[int, ...] | None = None
        self._looked = float("-inf")
        self._opened: dict[str, DataKey] = {}
        self._by_owner: dict[str | None, list[Wrapped]] = {}
        self._losses = 0
        if create:
            self._make()
        self._look()  # a file that is not a ring is refused here, before a store is opened with it

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

    def _wrapped(self, name: str) -> Wrapped | None:
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

        def wrapped_again(ring: Ring) -> Ring:
            keys = [
                each
                if each.master == newest.id
                else Wrapped(
                    each.id, each.owner, each.made, newest.id, newest.wrap(each.id, each.owner, self._open(each).secret)
                )
                for each in ring.keys
            ]
            return Ring.of(keys, ring.forgotten)

        before = self._changed(wrapped_again)
        return sum(each.master != newest.id for each in before.keys)

    def forget(self, owner: str | None) -> int:
        """Destroy all keys of an owner. Return how many there were. This erases all that they have sealed.

        A backup of this file still has the keys: destroy it too.
        """
        check_owner(owner)
        at = _time(now())

        def without(ring: Ring) -> Ring:
            gone = [Gone(each.id, at) for each in ring.keys if each.owner == owner]
            kept = (each for each in ring.keys if each.owner != owner)
            return Ring.of(kept, [*ring.forgotten, *gone]) if gone else ring

        before = self._changed(without, overwrites=True)
        return sum(each.owner == owner for each in before.keys)

    def losses(self) -> int:
        """Return how many keys this object has opened and can no longer find, because they were forgotten."""
        self._look()
        return self._losses

    def _make(self) -> None:
        """Make the file if it does not exist."""
        with self._lock, locked(self.path):
            if not self.path.exists():
                write(self.path, Ring.of())

    def _made(self, owner: str | None, *, renews: bool) -> DataKey:
        """Return a new key for an owner, or the one that another process has just made."""
        newest, key_id, secret = self._masters[0], os.urandom(8).hex(), os.urandom(SIZE)
        added = Wrapped(key_id, owner, _time(now()), newest.id, newest.wrap(key_id, owner, secret))

        def with_key(ring: Ring) -> Ring:
            # Looked at again under the lock: another process may have made one since, or forgotten it.
            has_key = any(each.owner == owner for each in ring.keys)
            if renews and not has_key:
                whose = "the key that sessions without an owner share" if owner is None else f"a key of {owner!r}"
                raise InvalidData("$.owner", f"{self.path} does not have {whose}; the first write makes it")
            if not renews and has_key:
                return ring
            self._require_own(ring)
            return Ring.of([*ring.keys, added], ring.forgotten)

        with self._lock:
            self._changed(with_key)
            return self._open(self._by_owner[owner][-1])

    def _require_own(self, ring: Ring) -> None:
        """Raise WrongKey if no master key that was given has wrapped a key of the ring.

        Else an owner could write with a wrong master key, and nobody with the right one could read it.
        """
        masters = {each.master for each in ring.keys}
        if masters and masters.isdisjoint(each.id for each in self._masters):
            raise WrongKey(ring.keys[0].id, ring.keys[0].master)

    def _open(self, key: Wrapped) -> DataKey:
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
            seen = identity(self.path)
            if seen != self._seen or seen is None:
                self._take(read(self.path), seen)

    def _take(self, ring: Ring, seen: tuple[int, ...] | None) -> None:
        self._ring, self._seen = ring, seen
        by_owner: dict[str | None, list[Wrapped]] = {}
        for each in ring.keys:
            by_owner.setdefault(each.owner, []).append(each)
        self._by_owner = by_owner
        known = {each.id for each in ring.keys}
        for gone in self._opened.keys() - known:  # a forgotten key must not stay usable in memory
            del self._opened[gone]
            self._losses += 1

    def _changed(self, change: Callable[[Ring], Ring], *, overwrites: bool = False) -> Ring:
        """Change the file, one process at a time. Return its content from before."""
        # The lock of threads first, as in `_made`: in the other order, two threads could wait for each other for ever.
        with self._lock, locked(self.path):
            before = read(self.path)
            after = change(before)
            if after is not before:
                write(self.path, after, overwrites=overwrites)
            self._looked = time.monotonic()
            self._take(after, identity(self.path))
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


def _time(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
