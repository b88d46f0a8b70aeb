"""A directory looked at beneath its sessions: each log's lines, and the document that was made from it."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.errors import CorruptRecord, InvalidSessionFile
from perdure.protocols import Problem
from perdure.stores.file_directory import Directory
from perdure.stores.file_document import document_file, encode_document
from perdure.stores.file_log import SessionLog
from perdure.stores.file_reads import assembled
from perdure.stores.moving import merged
from perdure.stores.renaming import OpenHead
from perdure.stores.rows import Stretch

_LOG = (
    "Restore the file from a backup. Versions whose lines are sound still load; a fork of one of them can go on while "
    "this session is mended."
)
_DOCUMENT = "Delete it: the log beside it holds everything, and the next save writes it anew."
_NO_LOG = "Restore the log from a backup. The document shows the newest version, for people to read."
_REFS = "Do not delete the session it shows, which would erase that part. Copying the store into a new one mends it."


def check(directory: Directory) -> list[Problem]:
    found: list[Problem] = []
    for stem in (*directory.ids(), *sorted(directory.remainders())):
        with directory.locked({stem.partition("@")[0]}):  # a writer between its log and its document is no damage
            found += _session(directory, stem)
    return found


def _session(directory: Directory, stem: str) -> Iterator[Problem]:
    session_id = stem.partition("@")[0]
    try:
        log = directory.log(stem)
    except CorruptRecord as error:
        yield Problem(session_id, error.position, error.reason, _LOG)
        return
    for damage in log.damage:
        yield Problem(session_id, damage.position, damage.reason, _LOG)
    if session_id != stem:
        return
    yield from _document(directory, log)
    if not log.damage:
        yield from _refs(log)


def _document(directory: Directory, log: SessionLog) -> Iterator[Problem]:
    name = document_file(log.stem)
    try:
        header = directory.document(log.stem)
    except InvalidSessionFile as error:
        yield Problem(log.stem, name, error.reason, _DOCUMENT)
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
    except CorruptRecord:
        return True  # which is reported by those who read the session
    return directory.folder.read(document_file(log.stem)) == made


def _refs(log: SessionLog) -> Iterator[Problem]:
    """What the session shows of others has to be on record, since deletions go by that."""
    met: set[Stretch] = set()

    def meet(key: int | str, start: int, stop: int) -> int | str:
        met.add((key, start, stop))
        return key

    try:
        for version, raw in log.heads.items():
            OpenHead(raw, log.stem, version, log.values.__getitem__).renamed(meet)
    except (CorruptRecord, KeyError):
        return  # which is reported by those who read the session
    noted = merged(log.refs)
    for key, start, stop in merged(met):
        if not log.owns(key) and not any(key == k and low <= start and stop <= high for k, low, high in noted):
            what = "the session shows it, and that is not noted where deletions look"
            yield Problem(log.stem, f"messages {start} to {stop} of log {key}", what, _REFS)
