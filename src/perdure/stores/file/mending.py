"""Repair of what follows from the logs of a directory: documents, and the hints that workers use."""

from __future__ import annotations

from contextlib import suppress

from perdure.errors import CorruptRecord, UnreadableFile
from perdure.protocols import Problem
from perdure.stores.file import hints
from perdure.stores.file.check import faults
from perdure.stores.file.desk import Desk
from perdure.stores.file.directory import Directory
from perdure.stores.file.document import document_file, encode_document


def mendable(directory: Directory, desk: Desk) -> list[Problem]:
    """Return what is wrong and can be rebuilt. A document without a log is kept: it is all that is left."""
    found = faults(directory, desk)
    damaged = {problem.session_id for problem in found if not _follows(problem)}
    return [problem for problem in found if _follows(problem) and problem.session_id not in damaged]


def mend(directory: Directory, desk: Desk) -> list[Problem]:
    """Make again what is wrong, each file whole or not at all. Return what was mended."""
    mended = []
    for problem in mendable(directory, desk):
        assert problem.session_id is not None, "each belongs to a session"
        kind = problem.where.partition("/")[0]
        if kind in (hints.WAITING, hints.TIMERS):
            hints.give(directory.folder, kind, problem.session_id)
            mended.append(problem)
        elif write_document(desk, problem.session_id):
            mended.append(problem)
    return mended


def _follows(problem: Problem) -> bool:
    if problem.session_id is None or problem.what == "it has no log":
        return False
    kind = problem.where.partition("/")[0]
    return kind in (hints.WAITING, hints.TIMERS) or problem.where == document_file(problem.session_id)


def write_document(desk: Desk, session_id: str) -> bool:
    """Write a session's document again from its log. Return False if the log is damaged, or has no version."""
    with suppress(CorruptRecord, UnreadableFile), desk.looking({session_id}):
        log = desk.look(session_id).log
        if log.damage or log.version == 0:
            return False
        made = encode_document(desk.assembled(session_id), log)
        desk.directory.folder.replace(document_file(session_id), made)
        return True
    return False
