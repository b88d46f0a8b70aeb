"""The simulated disk keeps synced data, and may lose or tear all other; the recorder notes a process's calls."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.testing.disk import Disk, Kind, Operation, Switch, is_available, preloaded, read_recording, write_files

needs_compiler = pytest.mark.skipif(not is_available(), reason="needs Linux and a C compiler")
STATES = 400


def op(kind: Kind, path: str = "", *, inode: int = 0, place: int = 0, data: bytes = b"", other: str = "") -> Operation:
    return Operation(kind, 1 if kind in SYNCS and path else 0, path, other, 1, inode, place, data)


SYNCS = (Kind.SYNC_BEGIN, Kind.SYNC_END)


def synced(token: int, *, path: str = "", inode: int = 0) -> list[Operation]:
    return [op(kind, path, inode=inode, place=token) for kind in SYNCS]


def states(operations: Iterable[Operation], **options: object) -> list[dict[str, bytes]]:
    disk = Disk(**options)  # type: ignore[arg-type]  # as they are given
    for operation in operations:
        disk.apply(operation)
    return [disk.after_cut(random.Random(seed)) for seed in range(STATES)]


WRITTEN = [op(Kind.CREATE, "f", inode=1), op(Kind.WRITE, inode=1, data=b"x" * 2000)]


def test_what_was_synced_is_there() -> None:
    """File and name are there in every state, whole."""
    kept = [*WRITTEN, *synced(1, inode=1), *synced(2, path=".")]
    assert {str(state) for state in states(kept)} == {str({"f": b"x" * 2000})}


def test_a_file_whose_directory_was_not_synced_may_have_no_name() -> None:
    """Its content was synced, but it cannot be found."""
    found = states([*WRITTEN, *synced(1, inode=1)])
    assert {len(state) for state in found} == {0, 1}
    assert {state["f"] for state in found if state} == {b"x" * 2000}


def test_what_was_not_synced_is_there_or_torn_or_missing() -> None:
    """Missing sectors are zeros, or the file is shorter."""
    contents = {state["f"] for state in states([*WRITTEN, *synced(1, path=".")])}
    assert {b"", b"x" * 2000, bytes(2000), bytes(512) + b"x" * 1488} <= contents
    assert all(len(content) in (0, 2000) for content in contents)


def test_what_is_written_while_a_sync_goes_on_is_not_promised() -> None:
    """A sync covers only writes before it began."""
    begin, end = synced(1, inode=1)
    late = op(Kind.WRITE, inode=1, place=2000, data=b"y")
    contents = {state["f"] for state in states([*WRITTEN, *synced(2, path="."), begin, late, end])}
    assert contents == {b"x" * 2000, b"x" * 2000 + b"y", b"x" * 2000 + b"\0"}


def test_a_rename_loses_neither_file() -> None:
    """The name is that of the old file or the new one, and a renamed file has a name."""
    new = [op(Kind.CREATE, "f.tmp", inode=2), op(Kind.WRITE, inode=2, data=b"new"), *synced(3, inode=2)]
    before = [*WRITTEN, *synced(1, inode=1), *new, *synced(2, path=".")]
    found = states([*before, op(Kind.RENAME, "f.tmp", other="f")])
    assert {state["f"] for state in found} == {b"x" * 2000, b"new"}
    assert all(b"new" in state.values() for state in found)


def test_syncs_that_are_ignored_do_nothing() -> None:
    """A control can be made of any recording."""
    kept = [*WRITTEN, *synced(1, inode=1), *synced(2, path=".")]
    found = states(kept, ignored=lambda path, is_directory: is_directory)
    assert {len(state) for state in found} == {0, 1}


SCRIPT = """
import os, sys
from perdure.testing.disk import Switch
os.chdir(sys.argv[1])
os.mkdir("d")
handle = os.open("d/f", os.O_RDWR | os.O_CREAT)
os.write(handle, b"one")
os.pwrite(handle, b"two", 10)
os.fsync(handle)
Switch().mark(b"told")
os.ftruncate(handle, 5)
directory = os.open("d", os.O_RDONLY)
os.rename("f", "g", src_dir_fd=directory, dst_dir_fd=directory)
os.fsync(directory)
os.unlink("d/g")
with Switch().failing("write", {error}, pattern="d/*", after=1):
    other = os.open("d/h", os.O_WRONLY | os.O_CREAT)
    os.write(other, b"a")
    try:
        os.write(other, b"b")
    except OSError as error:
        Switch().mark(str(error.errno).encode())
"""


@needs_compiler
def test_a_process_is_watched(tmp_path: Path) -> None:
    """Names, bytes, syncs and marks are noted in order; a call fails at the given place."""
    where, log = tmp_path / "disk", tmp_path / "log"
    where.mkdir()
    script = SCRIPT.replace("{error}", str(errno.ENOSPC))
    environment = {**preloaded(where, log), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script, str(where)], env=environment, check=True)
    found = read_recording(log)
    told = [(each.kind.name, each.path, each.other, each.data) for each in found]
    assert told == [
        ("MKDIR", "d", "", b""),
        ("CREATE", "d/f", "", b""),
        ("WRITE", "", "", b"one"),
        ("WRITE", "", "", b"two"),
        ("SYNC_BEGIN", "", "", b""),
        ("SYNC_END", "", "", b""),
        ("MARK", "", "", b"told"),
        ("TRUNCATE", "", "", b""),
        ("RENAME", "d/f", "d/g", b""),
        ("SYNC_BEGIN", "d", "", b""),
        ("SYNC_END", "d", "", b""),
        ("UNLINK", "d/g", "", b""),
        ("CREATE", "d/h", "", b""),
        ("WRITE", "", "", b"a"),
        ("MARK", "", "", str(errno.ENOSPC).encode()),
    ]
    disk = Disk()
    for operation in found[:7]:
        disk.apply(operation)
    assert disk.files() == {"d/": b"", "d/f": b"one" + bytes(7) + b"two"}
    write_files(disk.files(), tmp_path / "copy")
    assert (tmp_path / "copy" / "d" / "f").read_bytes() == b"one" + bytes(7) + b"two"


def test_a_process_that_is_not_watched_is_told_so() -> None:
    """A switch works only in a process that was started for it."""
    with pytest.raises(ConfigurationError, match="not watched"):
        Switch()
