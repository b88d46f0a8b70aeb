"""Helpers for the tests of the file store: small sessions, and their files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from perdure.model.definition import AgentDefinition
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef
from perdure.testing.samples import new_session

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
SMALL = AgentDefinition("a")
OF_THE_STORE = {".perdure", ".perdure.lock"}
AFTER_ERASURES = OF_THE_STORE | {".erasures", ".erasures.lock"}
"""The files besides sessions once something was erased."""
AFTER_GROUPS = {".group.lock"}
"""The file that is left once several sessions were changed together."""
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks /proc which file a handle is")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def small(*said: str, id: str = "s") -> AgentSession:
    return new_session(*said, id=id, definition=SMALL)


def log_of(session: AgentSession) -> LogRef:
    """Return the log that holds a session's last message."""
    ref = [*session.state.transcript.spans()][-1].tape.ref
    assert ref is not None
    return ref


def names(where: Path, ending: str = "") -> set[str]:
    return {path.name for path in where.iterdir() if path.name.endswith(ending)}


def files_in(where: Path) -> dict[str, bytes]:
    return {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}


def bytes_in(where: Path) -> bytes:
    return b"\0".join(files_in(where).values())


def lines_of(where: Path, name: str = "s.jsonl") -> list[bytes]:
    return (where / name).read_bytes().splitlines(keepends=True)


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip one bit in place; a second call restores it."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
