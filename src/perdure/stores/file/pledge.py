"""A redaction that is under way in a directory, written down before the first of several logs is replaced.

`{id}.redaction` is kept beside a session from then until the last log is replaced. If it is found later, the redaction
was cut short, and can be finished from it. It names messages, and contains nothing of their text.

`.redactions/{id}` exists at least as long. It is only a hint, by which the next open finds an interrupted redaction
without a search through the directory. Older releases have left notes without a hint, which `gc` finds.
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
    # The hint first: killed in between, it leaves a hint to look into, and not a note that no open finds.
    give_hint(folder, session_id)
    folder.replace(intent_file(session_id), b"%08x %b\n" % (checksum(body), body))


def give_hint(folder: Folder, session_id: str) -> None:
    """Make the next open look at a session."""
    folder.flag(_BEGUN, session_id)


def read_intent(folder: Folder, session_id: str) -> bytes | None:
    """Return the note of a redaction in a session; None if it has none. Raise CorruptRecord if it is damaged."""
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
        # Before the hint goes: a note that came back after a power cut would be one without a hint.
        folder.sync()
    folder.remove(f"{_BEGUN}/{session_id}")


def sessions_with_hint(folder: Folder) -> list[str]:
    """Return the sessions in which a redaction may be unfinished, without a search through the directory."""
    return folder.flags(_BEGUN)


def sessions_with_intent(folder: Folder) -> Iterator[str]:
    """Yield the sessions with a redaction that was cut short, or is under way."""
    return (found["id"] for found in map(_FILE.fullmatch, sorted(folder.names())) if found)
