"""A session as lines of JSON, and back. A line that has changed since it was written is refused, with its number."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, BinaryIO, NamedTuple, NoReturn

import msgspec

from perdure import codec
from perdure.errors import InvalidData, InvalidSessionId
from perdure.model.ids import SessionId
from perdure.protocols import ArchivedSession, Entry
from perdure.stores.jobs.archive.archived import first_version

FORMAT = 1
# A value has at most MAX_BYTES, and a file fewer, even in base64. So every line of an export is shorter than this.
_LONGEST = 2 * codec.MAX_BYTES
_LINES_AT_ONCE = 1_024
_NOTHING = msgspec.Raw(b"null")
# The errors for bytes that are not JSON, or that nest too deep.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A line of the file. `name` and `at` say where in the session its body belongs."""

    kind: str
    name: str = ""
    at: int = 0
    body: msgspec.Raw = _NOTHING


_CONVERSATION = re.compile(rb'\s*(\[|\{\s*"(messages|role|type)")')
"""The beginning of a file of messages in OpenAI's form: an array, or an object in each line."""


class _First(msgspec.Struct, frozen=True):
    perdure: str
    format: int


class _Facts(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The facts in a session's first line."""

    owners: dict[str, float] = {}
    interrupted: bool = False


def message_count(archived: ArchivedSession) -> int:
    return sum(len(rows) for logs in (archived.logs, archived.lent) for rows in logs.values())


class Pages:
    """References to the messages of an archived session, kept after the session itself is dropped.

    If 100,000 messages are freed at once, every thread waits for up to 200 ms. `let_go` frees them page by page.
    """

    def __init__(self, archived: ArchivedSession) -> None:
        rows = (body for logs in (archived.logs, archived.lent) for log in logs.values() for body in log.values())
        self._pages = list(iter(lambda: list(islice(rows, _LINES_AT_ONCE)), []))

    async def let_go(self) -> None:
        """Free the messages, unless they are still in use elsewhere. After each page, other tasks have their turn."""
        while self._pages:
            self._pages.pop()
            await asyncio.sleep(0)


def encode_session(archived: ArchivedSession) -> Iterator[bytes]:
    """Yield a session's lines, page by page, so that a long one is never in memory twice."""
    digest, count = hashlib.blake2b(digest_size=16), 0
    lines = map(_encoded, _parts(archived))
    while page := list(islice(lines, _LINES_AT_ONCE)):
        raw = b"".join(page)
        digest.update(raw)
        count += len(page)
        yield raw
    yield _encoded(_end(count, digest.hexdigest()))


def _parts(archived: ArchivedSession) -> Iterator[Line]:
    facts = _Facts(dict(archived.owners), archived.interrupted)
    yield Line("session", str(archived.session_id), body=msgspec.Raw(msgspec.json.encode(facts)))
    for name, raw in sorted(archived.values.items()):
        yield Line("value", name, body=msgspec.Raw(raw))
    yield from _messages("message", archived.logs)
    for version, raw in enumerate(archived.heads, first_version(archived)):
        yield Line("version", at=version, body=msgspec.Raw(raw))
    for kind, entries in (("entry", archived.entries), ("inbox", archived.inbox)):
        for seq, entry in enumerate(entries, 1):
            yield Line(kind, at=seq, body=msgspec.Raw(codec.encode(entry)))
    for name, (key_digest, version) in sorted(archived.keys.items()):
        yield Line("key", name, version, msgspec.Raw(msgspec.json.encode(key_digest)))
    yield from _messages("lent", archived.lent)
    for name, raw in sorted(archived.blobs.items()):
        yield Line("blob", name, len(raw), msgspec.Raw(msgspec.json.encode(raw)))


def _messages(kind: str, logs: Mapping[str, Mapping[int, bytes]]) -> Iterator[Line]:
    for name, rows in sorted(logs.items()):
        for at in sorted(rows):
            yield Line(kind, name, at, msgspec.Raw(rows[at]))


def _encoded(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _end(lines: int, digest: str) -> Line:
    return Line("end", at=lines, body=msgspec.Raw(msgspec.json.encode(digest)))


def first_line() -> bytes:
    return msgspec.json.encode(_First("export", FORMAT)) + b"\n"


def last_line(sessions: int) -> bytes:
    return _encoded(Line("close", at=sessions))


class Found(NamedTuple):
    """A session that was read, and its place in the file."""

    archived: ArchivedSession
    where: str
    size: int


def read_sessions(file: BinaryIO) -> Iterator[Found]:
    """Yield the sessions of a file. Raise InvalidData at the first line that has changed or is missing."""
    lines = _Lines(file)
    _check_first(lines)
    count = 0
    while (line := lines.next()).kind == "session":
        yield _read_session(lines, line)
        count += 1
    if line.kind != "close":
        lines.refuse(f"a session begins with a line of the kind 'session', not {line.kind!r}")
    if line.at != count:
        lines.refuse(f"the file should hold {line.at} sessions, and holds {count}")
    if not lines.is_over():
        lines.refuse("the file continues after its last line")


def _check_first(lines: _Lines) -> None:
    if _CONVERSATION.match(lines.peek()):
        problem = "this is a conversation, not a file that perdure has exported"
        raise InvalidData("line 1", f"{problem}. Import it with format='openai', or --format openai in a shell")
    raw = lines.raw()
    try:
        first = msgspec.json.decode(raw, type=_First)
    except _UNREADABLE:
        lines.refuse("this is not a file that perdure has exported")
    if first.perdure != "export":
        lines.refuse("this is not a file that perdure has exported")
    if first.format != FORMAT:
        lines.refuse(f"format {first.format} is not one this release reads (1 to {FORMAT}); a newer perdure may")


class _Lines:
    """The lines of a file, counted."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.number = 0
        self.last = b""
        self._peeked = b""
        self.begin()

    def peek(self) -> bytes:
        """Return the first line. `raw` returns it again."""
        self._peeked = self._file.readline(_LONGEST + 1)
        return self._peeked

    def raw(self) -> bytes:
        self.number += 1
        raw, self._peeked = self._peeked or self._file.readline(_LONGEST + 1), b""
        if not raw.endswith(b"\n"):
            cut = len(raw) <= _LONGEST
            self.refuse(
                "the file ends here, before it is complete" if cut else "the line is longer than any perdure writes"
            )
        return raw

    def begin(self) -> None:
        """Begin the checksum of a session's lines. The line that was read last is the first."""
        self.start, self.size = self.number, len(self.last)
        self._digest = hashlib.blake2b(self.last, digest_size=16)

    def sum_up(self) -> None:
        """Add the line that was read last to the checksum."""
        self._digest.update(self.last)

    def is_summed_up(self) -> bool:
        """Tell whether the line that was read last has the right number of lines, and the right checksum."""
        return self.last == _encoded(_end(self.number - self.start, self._digest.hexdigest()))

    def next(self) -> Line:
        raw = self.last = self.raw()
        self.size += len(raw)
        try:
            return msgspec.json.decode(raw, type=Line)
        except _UNREADABLE as error:
            self.refuse(f"it cannot be read: {error}")

    def is_over(self) -> bool:
        self.number += 1
        return self._file.read(1) == b""

    def refuse(self, problem: str) -> NoReturn:
        raise InvalidData(f"line {self.number}", f"{problem}. Export it again; nothing from this line on was taken in")


def _read_session(lines: _Lines, first: Line) -> Found:
    lines.begin()
    draft = _Draft(lines, first)
    while (line := lines.next()).kind != "end":
        lines.sum_up()
        draft.take(line)
    if not lines.is_summed_up():
        lines.refuse(f"the lines of session {first.name!r} do not match their checksum")
    return Found(draft.archived(), f"lines {lines.start} to {lines.number}", lines.size)


class _Draft:
    """A session whose lines are being read."""

    def __init__(self, lines: _Lines, first: Line) -> None:
        self._lines = lines
        self._id = self._sound(lambda: SessionId(first.name))
        self._facts = self._sound(lambda: msgspec.json.decode(first.body, type=_Facts))
        self._values: dict[str, bytes] = {}
        self._blobs: dict[str, bytes] = {}
        self._logs: dict[str, dict[str, dict[int, bytes]]] = {"message": {}, "lent": {}}
        self._in_turn: dict[str, list[Any]] = {"version": [], "entry": [], "inbox": []}
        self._keys: dict[str, tuple[str, int]] = {}
        self._first_version = 1

    def take(self, line: Line) -> None:
        body = bytes(line.body)
        match line.kind:
            case "value":
                self._values[line.name] = body
            case "message" | "lent":
                rows = self._logs[line.kind].setdefault(line.name, {})
                if line.at < 0 or line.at in rows:
                    self._lines.refuse(f"there cannot be a message {line.at} here")
                rows[line.at] = self._sound(lambda: self._message(body))
            case "blob":
                self._blobs[line.name] = self._sound(lambda: msgspec.json.decode(body, type=bytes))
            case "version" | "entry" | "inbox":
                before = self._in_turn[line.kind]
                if line.kind == "version" and not before:
                    self._first_version = max(line.at, 1)  # older ones were forgotten, as the newest says
                following = len(before) + (self._first_version if line.kind == "version" else 1)
                if line.at != following:
                    self._lines.refuse(f"{line.kind} {following} should stand here, not {line.at}")
                before.append(body if line.kind == "version" else self._sound(lambda: codec.decode(Entry, body)))
            case "key":
                digest = self._sound(lambda: msgspec.json.decode(body, type=str))
                self._keys[line.name] = (digest, line.at)
            case _:
                self._lines.refuse(f"{line.kind!r} is not a part of a session that this release knows")

    def _message(self, raw: bytes) -> bytes:
        """Return a message as it is stored. Earlier releases have exported files within their messages."""
        kept, attachments = codec.detached_raw(codec.encode_message(codec.decode_message(raw)))
        self._blobs |= {each.hash: each.body for each in attachments if each.body is not None}
        return kept

    def _sound(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (InvalidData, InvalidSessionId, *_UNREADABLE) as error:
            self._lines.refuse(str(error))

    def archived(self) -> ArchivedSession:
        return ArchivedSession(
            session_id=self._id,
            heads=tuple(self._in_turn["version"]),
            values=self._values,
            logs=self._logs["message"],
            lent=self._logs["lent"],
            blobs=self._blobs,
            owners=self._facts.owners,
            entries=tuple(self._in_turn["entry"]),
            inbox=tuple(self._in_turn["inbox"]),
            keys=self._keys,
            interrupted=self._facts.interrupted,
        )
