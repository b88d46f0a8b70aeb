"""A disk that has lost its power: the files that it may hold then, of all that POSIX allows.

Everything that was synced is there. Every other piece is there, is missing, or is torn, independently of the others:
sectors of writes, sizes of files, names in directories. Syncing a directory makes its names last, syncing a file its
content.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from perdure.testing.disk.recording import Kind, Operation

# Disks write one or the other of these whole.
SECTORS = (512, 4096)
Ignored = Callable[[str, bool], bool]
"""A function that tells whether a sync does nothing, by its path and whether it is a directory's: for controls."""


class Inode:
    """A file: the content that is certainly on the disk, and the changes since."""

    def __init__(self, content: bytes = b"") -> None:
        self.synced = bytearray(content)
        self.now = bytearray(content)
        self.pending: list[tuple[int, bytes | None]] = []
        """Changes that were not synced: places with the bytes written there, or sizes with None for a truncation."""
        self.settled = 0
        """The number of changes that reached the disk before the pending ones."""
        self.is_mapped = False
        self.path = ""
        """A name of the file, for an `Ignored` that goes by names."""

    def write(self, place: int, data: bytes) -> None:
        if len(self.now) < place:
            self.now.extend(bytes(place - len(self.now)))
        self.now[place : place + len(data)] = data
        self.pending.append((place, data))

    def truncate(self, size: int) -> None:
        if size < len(self.now):
            del self.now[size:]
        else:
            self.now.extend(bytes(size - len(self.now)))
        self.pending.append((size, None))

    def sync(self, count: int) -> None:
        """Put the first `count` changes, counted from the beginning, on the disk for good."""
        count = max(0, count - self.settled)
        for change in self.pending[:count]:
            _apply(self.synced, *change)
        del self.pending[:count]
        self.settled += count

    def after_cut(self, chance: random.Random) -> bytes:
        """Return content that the file may be left with."""
        content, sizes = bytearray(self.synced), [len(self.synced)]
        # One luck for the whole file: if each write had its own, all or none of them would hardly ever be lost.
        luck = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for place, data in self.pending:
            if data is not None:
                sizes.append(max(sizes[-1], place + len(data)))
                _write_torn(content, place, data, luck, chance)
            elif chance.random() < luck:  # a size and what is cut off, or added, change together
                sizes = [place]
                _apply(content, place, None)
        if self.is_mapped:
            # What is written through memory is in no recording, and reaches the disk at any time: its content is
            # unknown.
            return chance.randbytes(len(self.now))
        # A size is kept apart from the content, and may reach the disk before it. Bytes that were never written are
        # zeros.
        size = chance.choice((sizes[0], sizes[-1], chance.choice(sizes)))
        del content[size:]
        return bytes(content) + bytes(size - len(content))


class Folder:
    """A directory: the names that are certainly in it, and the changes of names since."""

    def __init__(self) -> None:
        self.synced: dict[str, Inode | Folder] = {}
        self.now: dict[str, Inode | Folder] = {}
        self.pending: list[tuple[str, Inode | Folder | None, str]] = []
        """Changes of names: the name, what it names now (or None), and the new name if it was renamed within here."""
        self.settled = 0

    def put(self, name: str, what: Inode | Folder | None, moved_to: str = "") -> None:
        if what is None:
            self.now.pop(name, None)
        else:
            self.now[name] = what
        self.pending.append((name, what, moved_to))

    def sync(self, count: int) -> None:
        """Make the first `count` changes, counted from the beginning, last."""
        count = max(0, count - self.settled)
        for name, what, _ in self.pending[:count]:
            if what is None:
                self.synced.pop(name, None)
            else:
                self.synced[name] = what
        del self.pending[:count]
        self.settled += count

    def after_cut(self, chance: random.Random) -> dict[str, Inode | Folder]:
        """Return names that may be left. A name that has changed has any state that it had since the sync."""
        left = dict(self.synced)
        luck = chance.choice((0.0, 0.5, 0.9, 1.0))
        times = Counter(name for name, _, _ in self.pending)
        reached = {name: count if chance.random() < luck else chance.randint(0, count) for name, count in times.items()}
        self._keep_moved(reached)
        seen = Counter[str]()
        for name, what, _ in self.pending:
            seen[name] += 1
            if seen[name] <= reached[name]:
                if what is None:
                    left.pop(name, None)
                else:
                    left[name] = what
        return left

    def _keep_moved(self, reached: dict[str, int]) -> None:
        """Keep at least one name of each file that was renamed: no file system loses both."""
        # Repeated, since the new name may have been renamed in its turn.
        again = True
        while again:
            again, seen = False, Counter[str]()
            for name, _, moved_to in self.pending:
                seen[name] += 1
                wanted = seen[moved_to] + 1
                if moved_to and reached[name] >= seen[name] and reached[moved_to] < wanted:
                    reached[moved_to], again = wanted, True


class Disk:
    """The files below one directory while operations are done to them, one after the other.

        disk = Disk(before)                       # files that are there for certain at the beginning
        for operation in operations:
            disk.apply(operation)
        files = disk.after_cut(random.Random(7))  # one of the states in which a power cut may leave them

    With `ignored`, the syncs of some files or directories do nothing.
    """

    def __init__(self, before: Mapping[str, bytes] = {}, *, ignored: Ignored | None = None) -> None:
        self._ignored = ignored
        self._root = Folder()
        self._inodes: dict[int, Inode] = {}
        self._syncs: dict[int, tuple[Inode | Folder, int]] = {}
        for path, content in before.items():
            inode = Inode(content)
            inode.path = path
            self._folder_of(path, make=True).synced[PurePosixPath(path).name] = inode
            self._folder_of(path).now[PurePosixPath(path).name] = inode

    def know(self, path: str, number: int) -> None:
        """Set the number that the recording uses for a file that was there at the beginning."""
        found = self._folder_of(path).now[PurePosixPath(path).name]
        assert isinstance(found, Inode)
        self._inodes[number] = found

    def apply(self, operation: Operation) -> None:
        """Do a recorded operation."""
        path, name = operation.path, PurePosixPath(operation.path).name
        match operation.kind:
            case Kind.CREATE:
                # Two processes may both record that they created the file: each looks for it before it opens it.
                if name not in (folder := self._folder_of(path)).now:
                    inode = self._inodes[operation.inode] = Inode()
                    inode.path = path
                    folder.put(name, inode)
            case Kind.WRITE:
                inode = self._inodes[operation.inode]
                inode.write(operation.place, operation.data)
                # DURABLE in recorder.c: the file was opened with O_DSYNC, so a write is its own sync.
                if operation.flags & 1:
                    inode.sync(inode.settled + len(inode.pending))
            case Kind.TRUNCATE:
                self._inodes[operation.inode].truncate(operation.place)
            case Kind.SYNC_BEGIN:
                # A sync covers what was written before it began. What is written while it runs may or may not be
                # covered.
                what = self._folder(path) if operation.flags & 1 else self._inodes[operation.inode]
                self._syncs[operation.place] = (what, what.settled + len(what.pending))
            case Kind.SYNC_END:
                self._end_sync(operation)
            case Kind.RENAME:
                self._rename(path, operation.other)
            case Kind.LINK:
                found = self._folder_of(path).now[name]
                self._folder_of(operation.other).put(PurePosixPath(operation.other).name, found)
            case Kind.UNLINK | Kind.RMDIR:
                self._folder_of(path).put(name, None)
            case Kind.MKDIR:
                self._folder_of(path).put(name, Folder())
            case Kind.MAP:
                self._inodes[operation.inode].is_mapped = True
            case Kind.MARK:
                pass

    def after_cut(self, chance: random.Random) -> dict[str, bytes]:
        """Return files that may be left, by path. A directory is a path that ends in a slash."""
        left: dict[str, bytes] = {}
        self._gather(self._root, "", chance, {}, left)
        return left

    def files(self) -> dict[str, bytes]:
        """Return the files as a process sees them if the power stays on."""
        left: dict[str, bytes] = {}
        self._gather(self._root, "", None, {}, left)
        return left

    def _gather(
        self,
        folder: Folder,
        prefix: str,
        chance: random.Random | None,
        known: dict[int, bytes],
        left: dict[str, bytes],
    ) -> None:
        names = folder.now if chance is None else folder.after_cut(chance)
        for name, what in sorted(names.items()):
            if isinstance(what, Folder):
                left[f"{prefix}{name}/"] = b""
                self._gather(what, f"{prefix}{name}/", chance, known, left)
            else:  # two names of one file show the same
                if id(what) not in known:
                    known[id(what)] = bytes(what.now) if chance is None else what.after_cut(chance)
                left[prefix + name] = known[id(what)]

    def _end_sync(self, operation: Operation) -> None:
        what, count = self._syncs.pop(operation.place)
        path = operation.path if isinstance(what, Folder) else what.path
        if self._ignored is None or not self._ignored(path, isinstance(what, Folder)):
            what.sync(count)

    def _rename(self, old: str, new: str) -> None:
        source, target = self._folder_of(old), self._folder_of(new)
        before, after = PurePosixPath(old).name, PurePosixPath(new).name
        found = source.now[before]
        if isinstance(found, Inode):
            found.path = new
        source.put(before, None, after if source is target else "")
        target.put(after, found)

    def _folder_of(self, path: str, *, make: bool = False) -> Folder:
        return self._folder(str(PurePosixPath(path).parent), make=make)

    def _folder(self, path: str, *, make: bool = False) -> Folder:
        folder = self._root
        for name in PurePosixPath(path).parts if path not in ("", ".") else ():
            if make and name not in folder.now:
                folder.now[name] = folder.synced[name] = Folder()
            inner = folder.now[name]
            assert isinstance(inner, Folder)
            folder = inner
        return folder


def write_files(files: Mapping[str, bytes], where: Path) -> None:
    """Write files below a directory, which is made."""
    where.mkdir(parents=True)
    for path, content in files.items():
        if path.endswith("/"):
            (where / path).mkdir(mode=0o700)
        else:
            (where / path).write_bytes(content)


def _apply(content: bytearray, place: int, data: bytes | None) -> None:
    if data is None:
        if place < len(content):
            del content[place:]
        else:
            content.extend(bytes(place - len(content)))
        return
    if len(content) < place:
        content.extend(bytes(place - len(content)))
    content[place : place + len(data)] = data


def _write_torn(content: bytearray, place: int, data: bytes, luck: float, chance: random.Random) -> None:
    """Write those sectors of a write that were lucky."""
    if luck == 1.0:
        _apply(content, place, data)
        return
    sector, at = chance.choice(SECTORS), 0
    while at < len(data):
        end = min(len(data), at + sector - (place + at) % sector)
        if chance.random() < luck:
            _apply(content, place + at, data[at:end])
        at = end
