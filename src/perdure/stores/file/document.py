"""The file that people read: a session's current version as one JSON document, with a header first.

Its first four lines are the header, which has its own checksum, so that a listing reads nothing else. The log is the
truth. This file is made from the log, and says from how much of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from perdure import codec
from perdure.errors import InvalidData, InvalidSessionFile
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.stores.file.log import SessionLog
from perdure.stores.format.rows import checksum

HEADER_LINES = 4
_OURS = ("info", "log", "header_crc", "crc")


class Header(NamedTuple):
    """The part of a document that a listing shows, and the log that it was made from, with its length then."""

    info: AgentSessionInfo
    key: str
    end: int
    lines: int


class _Log(msgspec.Struct, frozen=True):
    key: str
    end: int
    lines: int


def document_file(session_id: str) -> str:
    return f"{session_id}.json"


def encode_document(session: AgentSession, log: SessionLog) -> bytes:
    """Return the document of a session's newest version. A claim, which the log has after that, is not in it."""
    made_from = msgspec.json.encode(_Log(log.key, *log.newest))
    # Put together by hand: the header has to be exactly HEADER_LINES lines, whatever is in it.
    header = b'{\n"info": %b,\n"log": %b,\n' % (codec.encode(session.info), made_from)
    body = b"".join(_entry(name, value) for name, value in codec.to_dict(session).items() if name not in _OURS)
    return _closed(header + _seal("header_crc", header) + body)


def _entry(name: str, value: Any) -> bytes:
    return b"%b: %b,\n" % (msgspec.json.encode(name), msgspec.json.format(msgspec.json.encode(value), indent=1))


def _seal(name: str, over: bytes) -> bytes:
    return b'"%b": "%08x",\n' % (name.encode(), checksum(over))


def _closed(body: bytes) -> bytes:
    return body + b'"crc": "%08x"\n}\n' % checksum(body)


_CLOSING = len(_closed(b""))


def check_document(raw: bytes, path: Path) -> Header:
    """Return the header of a whole document. Raise InvalidSessionFile if any byte of the document has changed."""
    if _closed(raw[:-_CLOSING]) != raw:
        raise InvalidSessionFile(path, _fault(raw))
    return read_header(raw.split(b"\n", HEADER_LINES)[:HEADER_LINES], path)


def _fault(raw: bytes) -> str:
    if not raw:
        return "it is empty"
    try:
        codec.decode_plain(raw)
    except InvalidData as error:
        return error.problem
    return "its checksum does not match, so it was not perdure that wrote it last"


def read_header(lines: list[bytes], path: Path) -> Header:
    """Return the header from the first lines of a document."""
    header = b"".join(each + b"\n" for each in lines[:-1])
    if len(lines) != HEADER_LINES or lines[-1] + b"\n" != _seal("header_crc", header):
        raise InvalidSessionFile(path, "its header's checksum does not match")
    try:
        info = codec.decode(AgentSessionInfo, lines[1].removeprefix(b'"info": ').removesuffix(b","))
        log = codec.decode(_Log, lines[2].removeprefix(b'"log": ').removesuffix(b","))
    except InvalidData as error:
        raise InvalidSessionFile(path, f"its header is of a form this release does not read: {error}") from None
    return Header(info, log.key, log.end, log.lines)
