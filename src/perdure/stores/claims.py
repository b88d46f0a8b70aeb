"""Who holds a claim, and whether they are still there."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec


class Holder(msgspec.Struct, frozen=True):
    """A claim's holder as it is stored: a name for people, and the process it lives in."""

    owner: str
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""

    @classmethod
    def here(cls, owner: str) -> Holder:
        """A holder in this process."""
        return cls(owner, _boot_id(), _pid_namespace(), os.getpid(), _start_time(os.getpid()) or "")

    @property
    def is_gone(self) -> bool:
        """Whether the holder was a process of this machine that has ended. False where that cannot be told."""
        if not self.boot or (self.boot, self.namespace) != (_boot_id(), _pid_namespace()):
            return False
        return _start_time(self.pid) != self.started


@functools.cache
def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """When a process began, in the kernel's own ticks; None if there is no such process."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended: it holds nothing, though its pid is not yet free.
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
