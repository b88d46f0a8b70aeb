"""Searching a directory: every log in it is read. A damaged session is left out; a list is what reports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, UnreadableFile
from perdure.model.message import Message
from perdure.model.session import AgentSessionInfo
from perdure.stores.file_directory import Directory
from perdure.stores.format.heads import decode_info
from perdure.stores.search import Lent, Place, Query, attributed


def places(directory: Directory, query: Query) -> Iterator[Place]:
    """Every message of every log, with the session that it is said to be of."""
    infos: dict[str, AgentSessionInfo] = {}
    shown: list[tuple[int, str, Lent]] = []
    for session_id in directory.ids():
        with suppress(CorruptRecord, UnreadableFile, InvalidData):
            log = directory.log(session_id)
            if log.version:
                infos[session_id] = info = decode_info(log.heads[log.version], session_id, log.version)
                shown += [(log.birth, str(key), Lent(start, stop, info)) for key, start, stop in log.shown()]
    lent: dict[str, list[Lent]] = {}
    # Of those that show what is left of an erased session, the oldest here is said to have it, as in every store.
    for _, key, stretch in sorted(shown, key=lambda each: each[0]):
        lent.setdefault(key, []).append(stretch)
    for stem in (*infos, *sorted(directory.remainders())):
        with suppress(CorruptRecord, UnreadableFile):
            log = directory.log(stem)
            for name, rows in log.messages.items():
                yield from attributed(infos.get(stem), _read(rows), lent.get(log.key_of(name), ()), query)


def _read(rows: Mapping[int, bytes]) -> Iterator[tuple[int, Message]]:
    for position, body in rows.items():
        with suppress(InvalidData):
            yield position, codec.decode_message(body)
