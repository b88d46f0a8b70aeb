"""The holder of a claim, and the check whether its process is still running."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from zlib import crc32

import msgspec

_BOOT = "/proc/sys/kernel/random/boot_id"
_SELF = "/proc/self/stat"
_NAMESPACE = "/proc/self/ns/pid"
# The largest that `os.kill` takes. A damaged row may have any number.
_MOST_PID = 2**31 - 1


class Holder(msgspec.Struct, frozen=True):
    """A claim's holder as it is stored: a name for people, and the process it lives in."""

    owner: str
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""
    since: float = 0.0
    """The time at which the claim was taken, by the holder's clock; 0 if an older release has taken it."""
    sum: int = 0
    """A checksum of the other fields, or 0 from an older release. A flipped bit must not look like an ended process."""

    @classmethod
    def here(cls, owner: str, since: float = 0.0) -> Holder:
        """Return a holder in this process."""
        pid = os.getpid()
        made = cls(owner, boot_id(), _pid_namespace(), pid, _own_start(pid), since)
        return msgspec.structs.replace(made, sum=made._checksum())

    @property
    def is_sound(self) -> bool:
        """True if the checksum fits, or if an older release stored none."""
        return self.sum in (0, self._checksum())

    def _checksum(self) -> int:
        told = (self.owner, self.boot, self.namespace, self.pid, self.started, self.since)
        return crc32(repr(told).encode(errors="surrogatepass")) or 1  # 0 says that there is none

    @property
    def is_gone(self) -> bool:
        """True if the holder was a process of this machine that has ended; False also if that is not known."""
        if not (self.boot and self.started) or not 0 < self.pid <= _MOST_PID:
            return False
        if (self.boot, self.namespace) != (boot_id(), _pid_namespace()):
            return False
        return _has_ended(self.pid, self.started)


class Look:
    """One check of many claims, which looks up each holder's process once."""

    def __init__(self) -> None:
        self._gone: dict[tuple[str, str, int, str], bool] = {}

    def finds_gone(self, holder: Holder) -> bool:
        process = (holder.boot, holder.namespace, holder.pid, holder.started)
        if process not in self._gone:
            self._gone[process] = holder.is_gone
        return self._gone[process]


def boot_id() -> str:
    """Return the id of this start of the machine, or "" while it cannot be read."""
    try:
        return _read_once(_BOOT)
    except OSError:
        return ""


@functools.cache
def _read_once(path: str) -> str:
    # `cache` does not store a failure: a process may be out of file handles now, and have some later.
    return Path(path).read_text().strip()


def _pid_namespace() -> str:
    """Return the pid namespace that this process was started in, or "" while that cannot be read."""
    try:
        return _link_once(_NAMESPACE)
    except OSError:
        return ""


@functools.cache
def _link_once(path: str) -> str:
    return os.readlink(path)


def _own_start(pid: int) -> str:
    """Return the time at which this process began, or "" while that cannot be read."""
    try:
        return _start_once(pid)
    except OSError:
        return ""


@functools.cache
def _start_once(pid: int) -> str:
    return _started(_stat(f"/proc/{pid}/stat")) or ""


def _forget() -> None:
    """Forget what a process has read about itself: its child may be in another namespace, with the same pid there."""
    _link_once.cache_clear()
    _start_once.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _has_ended(pid: int, started: str) -> bool:
    """Tell whether a process is known to have ended. An error other than "no such process" does not count."""
    try:
        fields = _stat(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return _can_look() and not _answers(pid)
    except OSError:
        return False
    return len(fields) > 19 and _started(fields) != started


def _stat(path: str) -> list[str]:
    # The command comes before, in brackets. It may have spaces and brackets of its own.
    return Path(path).read_text().rpartition(")")[2].split()


def _started(fields: list[str]) -> str | None:
    """Return the time at which a process began, in the kernel's own ticks; None if it has ended."""
    # Field 22 of the file, counted from 3. A zombie has ended: it holds nothing, though its pid is not yet free.
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else None


def _can_look() -> bool:
    """Tell whether /proc shows processes at all. It may not be mounted."""
    try:
        return bool(_stat(_SELF))
    except OSError:
        return False


def _answers(pid: int) -> bool:
    """Tell whether a process exists that /proc does not show, as under `hidepid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # this process may not signal it, so it exists
        return True
    return True
