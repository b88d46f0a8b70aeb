"""Erasing a session from a directory: nothing of it is left but the messages that other sessions show.

Those go into a remainder, a log under the deleted one's key. It shrinks with those who show it, and goes with the last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from perdure.errors import SessionNotFound
from perdure.stores.file_directory import Directory
from perdure.stores.file_document import document_file
from perdure.stores.file_folder import temporary
from perdure.stores.file_intent import intent_file
from perdure.stores.file_log import Line, LogKey, SessionLog, encode_operation, line, log_file, opening
from perdure.stores.file_writes import require_free

Shown = Mapping[str, set[int]]


def delete(directory: Directory, session_id: str, at: float) -> None:
    """Erase a session. Whoever has a remainder is locked too, so that nobody begins to show it meanwhile."""
    ids: set[str] = {session_id}
    while True:
        with directory.locked(ids):
            owners = {base.partition("@")[0] for base in directory.remainders()}
            if owners <= ids:
                return _delete_locked(directory, session_id, at)
        ids |= owners


def _delete_locked(directory: Directory, session_id: str, at: float) -> None:
    is_there, log = directory.exists(session_id), directory.log(session_id)
    require_free(log, at)
    shown = _shown_by_others(directory, session_id)
    for base in _bases_of(session_id, shown) - directory.remainders() if is_there else ():
        _keep(directory, base, _shown_lines(base, log, shown))
    folder = directory.folder
    folder.remove(document_file(session_id), intent_file(session_id), *leftovers(directory, session_id))
    folder.sync()
    # The session is gone when its log is. Killed before that, a deletion can be repeated; killed after it, the next
    # deletion, even one that finds nothing to delete, trims what was left too long.
    folder.remove(log.file)
    _trim_remainders(directory, shown)
    folder.sync()
    directory.forget_all()
    if not is_there:
        raise SessionNotFound(session_id)


def gc(directory: Directory) -> int:
    """Erase what deletions that were killed have left, and nobody shows; how many messages that were."""
    ids: set[str] = set()
    while True:
        with directory.locked(ids):
            owners = {base.partition("@")[0] for base in directory.remainders()}
            if owners <= ids:
                erased = _trim_remainders(directory, _shown_by_others(directory, None)) if owners else 0
                if erased:
                    directory.folder.sync()
                    directory.forget_all()
                return erased
        ids |= owners


def _shown_by_others(directory: Directory, session_id: str | None) -> Shown:
    """For each log, the positions that versions of other sessions show."""
    shown: dict[str, set[int]] = {}
    for other in directory.ids():
        if other != session_id:
            for key, start, stop in directory.log(other).shown():
                shown.setdefault(str(key), set()).update(range(start, stop))
    return shown


def _bases_of(session_id: str, shown: Shown) -> set[str]:
    """The logs of a session, by the keys that others have: its own first line may be damaged."""
    return {found.base for found in map(LogKey.parse, shown) if found and found.owner == session_id}


def _shown_lines(base: str, log: SessionLog, shown: Shown) -> list[Line]:
    """The messages of a log that somebody shows, as lines for a log of their own."""
    kept: list[Line] = []
    for name, rows in log.messages.items():
        positions = shown.get(f"{base}/{name}" if name else base, set())
        kept += [line("message", name, at, body) for at, body in rows.items() if at in positions]
    return kept


def _keep(directory: Directory, base: str, lines: list[Line]) -> None:
    if lines:
        directory.folder.replace(log_file(base), encode_operation([opening(base), *lines], 1))
    else:
        directory.folder.remove(log_file(base), temporary(log_file(base)))


def _trim_remainders(directory: Directory, shown: Shown) -> int:
    """Erase from remainders what nobody shows; how many messages that were."""
    erased = 0
    for base in directory.remainders():
        log = directory.log(base)
        lines = _shown_lines(base, log, shown)
        held = sum(map(len, log.messages.values()))
        if not lines or len(lines) < held:
            erased += held - len(lines)
            _keep(directory, base, lines)
    return erased


def leftovers(directory: Directory, session_id: str) -> list[str]:
    """What killed writers of a session may have left lying."""
    left = re.compile(rf"{re.escape(session_id)}(\.torn-[0-9]+|\.jsonl?\.tmp|@[0-9]+\.jsonl\.tmp)")
    return [name for name in directory.folder.names() if left.fullmatch(name)]
