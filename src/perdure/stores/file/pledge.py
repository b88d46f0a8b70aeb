"""A redaction that is under way in a directory, written down before the first of several logs is replaced.

`{id}.redaction` stands beside a session from then until the last one is. Found later, the redaction was cut short, and
what is left to do can be done from it: it names messages, and holds nothing of their content.

`.redactions/{id}` is there at least as long. It is only a hint, by which the next open finds what was cut short without
looking through the directory. Releases that did not know of it have left notes without one, which `gc` finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from perdure.errors import CorruptRecord
from perdure.stores.folder import Folder
from perdure.stores.format.rows import checksum

_FILE = re.compile(r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]{0,199})\.redaction")

_BEGUN = ".redactions"


def intent_file(session_id: str) -> str:
    return f"{session_id}.redaction"


def write_intent(folder: Folder, session_id: str, body: bytes) -> None:
    give_hint(folder, session_id)
    folder.replace(intent_file(session_id), b"%08x %b\n" % (checksum(body), body))


def give_hint(folder: Folder, session_id: str) -> None:
    """Have the next open look at a session."""
    folder.flag(_BEGUN, session_id)


def read_intent(folder: Folder, session_id: str) -> bytes | None:
    """Return what was begun in a session; None if all was finished, CorruptRecord if it is damaged."""
    raw = folder.read(intent_file(session_id))
    if raw is None:
        return None
    body = raw[9:-1]
    if raw != b"%08x %b\n" % (checksum(body), body):
        raise CorruptRecord(session_id, intent_file(session_id), "its checksum does not match")
    return body


def remove_intent(folder: Folder, session_id: str) -> None:
    if folder.size(intent_file(session_id)) is not None:
        folder.remove(intent_file(session_id))
        folder.sync()
    folder.remove(f"{_BEGUN}/{session_id}")


def sessions_with_hint(folder: Folder) -> list[str]:
    """Return the sessions in which a redaction may be unfinished, without looking through the directory."""
    return folder.flags(_BEGUN)


def sessions_with_intent(folder: Folder) -> Iterator[str]:
    """Return the sessions in which a redaction was begun, and was cut short or is under way."""
    return (found["id"] for found in map(_FILE.fullmatch, sorted(folder.names())) if found)
