"""A directory looked at beneath its sessions: each log's lines and what they add up to, and the document beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from perdure.errors import CorruptRecord, InvalidSessionFile, UnreadableFile
from perdure.protocols import Problem
from perdure.stores.file.directory import Directory
from perdure.stores.file.document import document_file, encode_document
from perdure.stores.file_intent import intent_file, read_intent, sessions_with_intent
from perdure.stores.file.log import LogKey, SessionLog, log_file
from perdure.stores.file_reads import assembled
from perdure.stores.format.rows import Stretch, hash_of
from perdure.stores.moving import LENT
from perdure.stores.noted import Noted, without, wrong_notes

_LOG = (
    "Restore the file from a backup. Versions whose lines are sound still load; a fork of one of them can go on while "
    "this session is mended."
)
_DOCUMENT = "Delete it: the log beside it holds everything, and the next save writes it anew."
_NO_LOG = "Restore the log from a backup. The document shows the newest version, for people to read."
_COPY = "Nothing that was said is touched by it. Copying the store into a new one writes it anew."
_LEFT_OVER = "Run `perdure gc`, which erases what nobody shows."
_CUT_SHORT = "Run `perdure gc`, which finishes it."
_UNREADABLE = "Nothing is known of what it holds. Check its permissions and the disk, then check again."
_NO_REQUEST = "A redaction was cut short. Remove this file, and redact the same messages again."


def check(directory: Directory) -> list[Problem]:
    remainders = sorted(directory.remainders())
    found: list[Problem] = []
    shown: list[Stretch] = []
    for stem in (*directory.ids(), *remainders):
        with directory.locked({_owner(stem)}):  # a writer between its log and its document is no damage
            found += _session(directory, stem, shown)
    for stem in remainders:
        # What cannot be read is reported by now, and without it nobody knows what is shown.
        with directory.locked({_owner(stem)}), suppress(CorruptRecord, UnreadableFile):
            found += list(_remainder(directory, stem, shown))
    for session_id in sessions_with_intent(directory.folder):
        with directory.locked({session_id}):
            found += _unfinished(directory, session_id)
    return found


def _unfinished(directory: Directory, session_id: str) -> Iterator[Problem]:
    """A redaction that was cut short: some of the sessions concerned may still have what was to go."""
    try:
        begun = read_intent(directory.folder, session_id)
    except CorruptRecord as error:
        yield Problem(session_id, error.position, error.reason, _NO_REQUEST)
        return
    except UnreadableFile as error:
        yield Problem(session_id, intent_file(session_id), error.reason, _UNREADABLE)
        return
    if begun is not None:  # else it was under way, and is over by now
        what = f"a redaction of {len(begun.ids)} messages was cut short"
        yield Problem(session_id, intent_file(session_id), what, _CUT_SHORT)


def _owner(stem: str) -> str:
    return stem.partition("@")[0]


def _session(directory: Directory, stem: str, shown: list[Stretch]) -> Iterator[Problem]:
    session_id = _owner(stem)
    try:
        log = directory.log(stem)
    except CorruptRecord as error:
        yield Problem(session_id, error.position, error.reason, _LOG)
        return
    except UnreadableFile as error:
        yield Problem(session_id, log_file(stem), error.reason, _UNREADABLE)
        return
    for damage in log.damage:
        yield Problem(session_id, damage.position, damage.reason, _LOG)
    shown += log.shown()
    if session_id != stem:
        return
    yield from _document(directory, log)
    if not log.damage and log.version:
        yield from _sums(log)
        yield from _notes(log)


def _document(directory: Directory, log: SessionLog) -> Iterator[Problem]:
    name = document_file(log.stem)
    try:
        header = directory.document(log.stem)
    except InvalidSessionFile as error:
        yield Problem(log.stem, name, error.reason, _DOCUMENT)
        return
    except UnreadableFile as error:
        yield Problem(log.stem, name, error.reason, _UNREADABLE)
        return
    if header is None or log.damage:
        return  # one that is missing is made anew by the next save
    if log.version == 0:
        yield Problem(log.stem, name, "there is no log to it", _NO_LOG)
    elif header.key != log.key:
        yield Problem(log.stem, name, "it was made from another log", _DOCUMENT)
    elif header.info.version > log.version or header.end > log.end:
        yield Problem(log.stem, log.file, "it does not hold all that the document was made from", _LOG)
    elif header.info.version == log.version and not _says_what_the_log_says(directory, log):
        yield Problem(log.stem, name, "it does not say what the log says", _DOCUMENT)


def _says_what_the_log_says(directory: Directory, log: SessionLog) -> bool:
    try:
        made = encode_document(assembled(directory, log, log.version), log)
    except (CorruptRecord, UnreadableFile):
        return True  # which is reported by those who read the session
    return directory.folder.read(document_file(log.stem)) == made


def _sums(log: SessionLog) -> Iterator[Problem]:
    """What the lines of a log come to, each sound by itself."""
    key = LogKey.parse(log.key)
    if key is None or key.owner != log.stem or key.name:
        yield Problem(log.stem, log.file, f"it is the log of {log.key!r}", _LOG)
    elif log.epoch < key.birth:
        yield Problem(log.stem, "its epoch", "it is out of the session's range", _COPY)
    if sorted(log.heads) != list(range(1, len(log.heads) + 1)) or log.version != len(log.heads):
        yield Problem(log.stem, "its versions", "they are not numbered from 1 on", _LOG)
    for name, rows in log.messages.items():
        # A log that holds others' messages on their behalf has only those that are shown.
        if not name.startswith(LENT) and list(rows) != list(range(len(rows))):
            yield Problem(log.stem, f"log {log.key_of(name)}", "its messages are not numbered from 0 on", _LOG)
    if log.taken > len(log.inbox):
        what = "it is noted to be taken to where it does not reach, so that what is posted would not be heard"
        yield Problem(log.stem, "how far its inbox is taken", what, _COPY)
    for name, (_, version) in log.keys.items():
        if version not in log.heads:
            yield Problem(log.stem, f"idempotency key {name!r}", f"there is no version {version}", _COPY)
    for name, body in log.values.items():
        if hash_of(body) != name:
            yield Problem(log.stem, f"value {name}", "its hash does not match", _LOG)


def _notes(log: SessionLog) -> Iterator[Problem]:
    """What the session shows of others has to be on record, since deletions go by that."""
    own = {log.key_of(name) for name in ("", *log.messages)}
    try:
        yield from wrong_notes(
            log.stem, log.heads, log.values.__getitem__, Noted(own, list(log.refs), log.values.keys())
        )
    except (CorruptRecord, KeyError):
        return  # which is reported by those who read the session


def _remainder(directory: Directory, stem: str, shown: list[Stretch]) -> Iterator[Problem]:
    """What is left of an erased session has to be shown by somebody."""
    log = directory.log(stem)
    held = [(log.key_of(name), at, at + 1) for name, rows in log.messages.items() for at in rows]
    if not any(True for _ in without(held, shown)):
        return
    now_shown = [stretch for each in directory.ids() for stretch in directory.log(each).shown()]
    for key, start, stop in without(held, now_shown):  # looked at again: another may have begun to show it meanwhile
        what = f"messages {start} to {stop} of {key} are left of an erased session, and nobody shows them"
        yield Problem(None, log_file(stem), what, _LEFT_OVER)
