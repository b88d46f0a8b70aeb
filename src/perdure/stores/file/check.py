"""Checks of files below their rows: their lines, their names, the documents, and what was cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from perdure.errors import CorruptRecord, InvalidSessionFile, UnreadableFile
from perdure.protocols import Problem
from perdure.stores.engine import T
from perdure.stores.file import hints
from perdure.stores.file.desk import Desk
from perdure.stores.file.directory import Directory, owner_of
from perdure.stores.file.document import document_file, encode_document
from perdure.stores.file.group import GROUP, read_steps
from perdure.stores.file.log import LogKey, SessionLog, log_file
from perdure.stores.file.pledge import intent_file, read_intent, sessions_with_intent
from perdure.stores.jobs.redaction.request import Request

_LOG = (
    "Restore the file from a backup. Versions whose lines are sound still load; a fork of one of them can continue "
    "while this session is repaired."
)
_DOCUMENT = "Delete it: the log beside it holds everything, and the next save writes it again."
_NO_LOG = "Restore the log from a backup. The document shows the newest version, for people to read."
_COPY = "No message is affected. Copying the store into a new one rewrites it."
_CUT_SHORT = "Run `perdure gc`, which finishes it."
_UNREADABLE = "Nothing is known of what it holds. Check its permissions and the disk, then check again."
_NO_GROUP = (
    "A process was killed while it changed several sessions together, and some may be without it. Each is sound by "
    "itself. Remove it when you have looked at them."
)
_HINT = "Run `perdure gc`, which rebuilds it."
_NO_REQUEST = "A redaction was cut short. Remove this file, and redact the same messages again."


def faults(directory: Directory, desk: Desk) -> list[Problem]:
    """Return what is wrong, one session after another, each while no other process writes it."""
    found: list[Problem] = []
    for stem in (*directory.ids(), *sorted(directory.remainders())):
        with desk.looking({owner_of(stem)}):  # under the lock, since a writer's log is ahead of its document
            found += _log(desk, stem)
    begun = _unless_damaged(None, lambda: read_steps(directory.folder), GROUP, _NO_GROUP)
    if isinstance(begun, Problem):
        found.append(begun)
    for session_id in sessions_with_intent(directory.folder):
        with directory.locked({session_id}):  # a redaction that is still running holds it
            found += _unfinished(directory, session_id)
    return found


def _log(desk: Desk, stem: str) -> Iterator[Problem]:
    session_id = owner_of(stem)
    found = _unless_damaged(session_id, lambda: desk.look(stem).log, log_file(stem), _LOG)
    if isinstance(found, Problem):
        yield found
        return
    log = found
    for damage in log.damage:
        yield Problem(session_id, damage.position, damage.reason, _LOG)
    if session_id == stem:
        yield from _document(desk, log)
        if not log.damage and log.version:
            yield from _name(log)
            yield from _hints(desk.directory, log)


def _name(log: SessionLog) -> Iterator[Problem]:
    key = LogKey.parse(log.key)
    if key is None or key.owner != log.stem or key.name:
        yield Problem(log.stem, log.file, f"it is the log of {log.key!r}", _LOG)
    elif log.epoch < key.birth:
        yield Problem(log.stem, "its epoch", "it is out of the session's range", _COPY)


def _hints(directory: Directory, log: SessionLog) -> Iterator[Problem]:
    """Yield the hints that workers lack, once hints were made for all sessions."""
    if hints.is_surveyed(directory.folder):
        for kind in hints.missing(directory.folder, log):
            yield Problem(
                log.stem, f"{kind}/{log.stem}", "it is missing, so that workers do not find the session", _HINT
            )


def _document(desk: Desk, log: SessionLog) -> Iterator[Problem]:
    name = document_file(log.stem)
    try:
        header = desk.directory.document(log.stem)
    except InvalidSessionFile as error:
        yield Problem(log.stem, name, error.reason, _DOCUMENT)
        return
    except UnreadableFile as error:
        yield Problem(log.stem, name, error.reason, _UNREADABLE)
        return
    if header is None or log.damage:
        return  # the next save makes a missing document again
    if log.version == 0:
        yield Problem(log.stem, name, "it has no log", _NO_LOG)
    elif header.key != log.key:
        yield Problem(log.stem, name, "it was made from another log", _DOCUMENT)
    elif header.info.version > log.version or header.end > log.end:
        yield Problem(log.stem, log.file, "it does not hold all that the document was made from", _LOG)
    elif header.info.version == log.version and not _says_what_the_log_says(desk, log):
        yield Problem(log.stem, name, "it does not say what the log says", _DOCUMENT)


def _says_what_the_log_says(desk: Desk, log: SessionLog) -> bool:
    try:
        made = encode_document(desk.assembled(log.stem), log)
    except (CorruptRecord, UnreadableFile):
        return True  # reading the session reports it
    return desk.directory.folder.read(document_file(log.stem)) == made


def _unfinished(directory: Directory, session_id: str) -> Iterator[Problem]:
    """Yield a redaction that was cut short. Some of its sessions may still contain what had to go."""
    name = intent_file(session_id)
    begun = _unless_damaged(session_id, lambda: read_intent(directory.folder, session_id), name, _NO_REQUEST)
    if isinstance(begun, Problem):
        yield begun
    elif begun is not None:  # otherwise it was under way, and has ended meanwhile
        messages = len(Request.of_pledge(session_id, begun).ids)
        what = f"a redaction of {messages} messages was cut short"
        yield Problem(session_id, name, what, _CUT_SHORT)


def _unless_damaged(session_id: str | None, read: Callable[[], T], name: str, repair: str) -> T | Problem:
    """Return what a file contains, or what is wrong with it."""
    try:
        return read()
    except CorruptRecord as error:
        return Problem(session_id, error.position, error.reason, repair)
    except UnreadableFile as error:
        return Problem(session_id, name, error.reason, _UNREADABLE)
