"""Claims of processes that are gone: only a process that is known to have ended is taken for gone."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.stores import claims
from perdure.stores.claims import Holder, Look


@contextmanager
def no_handles() -> Iterator[None]:
    """Leave this process without a free file handle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for handle in held:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def nothing_read_yet() -> None:
    claims._read_once.cache_clear()
    claims._start_once.cache_clear()
    claims._link_once.cache_clear()


@contextmanager
def another() -> Iterator[Holder]:
    """Return a holder in another process that lives."""
    script = (
        "import msgspec, sys; from perdure.stores.claims import Holder;"
        "print(msgspec.json.encode(Holder.here('other')).decode(), flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield msgspec.json.decode(process.stdout.readline(), type=Holder)


def failing(monkeypatch: pytest.MonkeyPatch, error: OSError, fails: Callable[[str], bool]) -> None:
    """Make reads of some files fail."""
    read = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if fails(str(path)):
            raise error
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)


def test_a_process_that_has_ended_is_gone() -> None:
    """A holder is gone as soon as its process has ended, and not before."""
    with another() as holder:
        assert not holder.is_gone
    assert holder.is_gone


def test_a_look_at_many_claims_looks_for_each_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads each process once, however many claims it holds. A new look reads it again."""
    read: list[str] = []
    failing(monkeypatch, OSError(), lambda path: bool(read.append(path)))
    with another() as holder:
        look, mine = Look(), [Holder.here(f"run {number}", since=number) for number in range(20)]
        assert not any(look.finds_gone(each) for each in (*mine, holder))
        assert len([path for path in read if path.endswith("/stat")]) <= 3  # one of them, and of its own start
    assert not look.finds_gone(holder)
    assert Look().finds_gone(holder)
    assert not any(Look().finds_gone(each) for each in mine)


def test_a_live_holder_is_not_gone_for_one_without_handles() -> None:
    """A process without a free file handle cannot look, and takes nobody for dead."""
    with another() as holder:
        with no_handles():
            assert not holder.is_gone
        assert not holder.is_gone


def test_a_claim_taken_without_handles_is_not_a_dead_ones() -> None:
    """A holder that could not read its own start time is not taken for gone afterwards."""
    with no_handles():
        holder = Holder.here("me")
    assert not holder.is_gone
    assert Holder.here("me").boot, "an id that could not be read is read again"
    assert not msgspec.structs.replace(Holder.here("me"), started="").is_gone


def test_a_start_time_once_read_is_known_without_handles() -> None:
    """A process keeps what it has read about itself, and needs no file handle for it later."""
    before = Holder.here("me")
    with no_handles():
        assert Holder.here("me") == before


def test_a_process_reads_of_itself_once_and_its_child_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim does not read /proc again. A fork does: it may be in another namespace, under the same number."""
    looks: list[str] = []
    read, link = Path.read_text, os.readlink
    monkeypatch.setattr(Path, "read_text", lambda path: looks.append(str(path)) or read(path))
    monkeypatch.setattr(os, "readlink", lambda path: looks.append(str(path)) or link(path))
    first = Holder.here("me")
    assert looks
    looks.clear()
    assert Holder.here("me") == first
    assert looks == []
    script = (
        "import os; from perdure.stores import claims; mine = claims.Holder.here('me')\n"
        "if not (child := os.fork()):\n"
        "    known = claims._link_once.cache_info().currsize + claims._start_once.cache_info().currsize\n"
        "    its = claims.Holder.here('me')\n"
        "    os._exit(0 if known == 0 and (its.pid, its.started) != (mine.pid, mine.started) else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_an_error_says_nothing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """An error other than "no such process" does not say that a process has ended."""
    with another() as holder:
        failing(monkeypatch, OSError(number, "no"), lambda path: path == f"/proc/{holder.pid}/stat")
        assert not holder.is_gone


def test_a_process_that_is_hidden_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `hidepid` another user's process is not in /proc; a signal finds it."""
    with another() as holder:
        failing(monkeypatch, FileNotFoundError(), lambda path: path == f"/proc/{holder.pid}/stat")
        assert not holder.is_gone

        def forbidden(pid: int, signal: int) -> None:
            raise PermissionError(errno.EPERM, "no")

        monkeypatch.setattr(os, "kill", forbidden)
        assert not holder.is_gone


def test_nobody_is_gone_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc that shows not even this process says nothing about others."""
    with another() as holder:
        assert not holder.is_gone
    failing(monkeypatch, FileNotFoundError(), lambda path: path.endswith("/stat"))
    assert not holder.is_gone


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**70])
def test_a_pid_that_no_process_can_have_is_unknown(pid: int) -> None:
    """A stored pid that no process can have says nothing."""
    assert not msgspec.structs.replace(Holder.here("me"), pid=pid).is_gone
