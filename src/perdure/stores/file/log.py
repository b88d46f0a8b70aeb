"""The log of one session as a file: lines of JSON, each with its number and checksum, appended and never changed.

The last line of an operation says how many lines it has (`commit`). Without it the others do not count. What follows
the last whole operation is torn: its writer died before it could acknowledge it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.protocols import Key
from perdure.stores.claims import Holder
from perdure.stores.format.rows import Stretch, checksum

_SEAL = b'{"crc":"%08x",'
_SEAL_LENGTH = len(_SEAL % 0)
# A power cut can leave zeros where bytes should be. One flipped bit never makes two zero bytes.
_UNWRITTEN = b"\0\0"
_KEY = re.compile(
    r"(?P<base>(?P<owner>[A-Za-z0-9][A-Za-z0-9._-]{0,199})@(?P<birth>[0-9]{1,20}))(?:/(?P<name>.+))?", re.DOTALL
)


class LogKey(NamedTuple):
    """The name of a log: `id@birth` for a session's own, `id@birth/loop` for a branch's.

    The birth tells a session from an earlier one with the same id, so that no caller is shown a stranger's text.
    """

    base: str
    owner: str
    birth: int
    name: str

    @classmethod
    def parse(cls, key: int | str) -> LogKey | None:
        found = _KEY.fullmatch(str(key))
        return found and cls(found["base"], found["owner"], int(found["birth"]), found["name"] or "")


_NOTHING = msgspec.Raw(b"null")
_NO_TIMER = b"null"


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line: its number, the operation's length if it is the last one, and its content. `at` and `name` say where."""

    n: int = 0
    commit: int = 0
    kind: str = ""
    name: str = ""
    at: int = 0
    body: msgspec.Raw = _NOTHING


class _OfRun(msgspec.Struct, frozen=True):
    """The part of an entry that names its run."""

    run: str = ""


class Held(msgspec.Struct, frozen=True):
    """A claim as the log has it."""

    holder: Holder
    expires: float


def line(kind: str, name: str = "", at: int = 0, body: bytes | None = None) -> Line:
    """Return a line that does not have a place in a log yet."""
    return Line(kind=kind, name=name, at=at, body=_NOTHING if body is None else msgspec.Raw(body))


# The format of a log that contains a `line` (see jobs/lines.py). A release that does not know of them must take the log
# for damaged. It then goes by all that the heads show, and erases none of that.
WITH_LINE = 2


def opening(key: str, format: int = codec.FORMAT, mark: str = "") -> Line:
    """Return the first line of a log. In a rewritten log it has a mark, so the new log is not taken for the old."""
    return line("log", key, body=msgspec.json.encode({"format": format, **({"rewritten": mark} if mark else {})}))


def encode_operation(lines: Sequence[Line], first: int) -> bytes:
    """Return the bytes of lines that count together or not at all."""
    numbered = [replace(each, n=number) for number, each in enumerate(lines, first)]
    numbered[-1] = replace(numbered[-1], commit=len(lines))
    return b"".join(map(_sealed, numbered))


def _sealed(numbered: Line) -> bytes:
    # The checksum is the first field of the object, and covers all that follows it up to the newline.
    rest = msgspec.json.encode(numbered)[1:]
    return (_SEAL % checksum(rest)) + rest + b"\n"


_line_decoder = msgspec.json.Decoder(Line)


def _opened(raw: bytes) -> Line | None:
    """Return a line from its bytes; None if these are damaged."""
    rest = raw[_SEAL_LENGTH:]
    if not raw.startswith(_SEAL % checksum(rest)):
        return None
    try:
        return _line_decoder.decode(b"{" + rest)
    except msgspec.MsgspecError:
        return None


def rewritten(raw: bytes, mark: str, change: Callable[[Line], Line]) -> bytes:
    """Return operations with some lines changed. A mark in the first keeps the new log from being taken for the old."""
    changed: list[bytes] = []
    for start, stop in _line_ends(raw):
        each = _opened(raw[start:stop])
        assert each is not None, "a log that is damaged is not rewritten"
        if each.kind == "log":
            told = {**codec.decode_plain(bytes(each.body)), "rewritten": mark}
            each = replace(each, body=msgspec.Raw(msgspec.json.encode(told)))
        changed.append(_sealed(change(each)))
    return b"".join(changed)


class SessionLog:
    """The result of the operations of one log.

    `stem` is the name of its file without the ending. `end` and `lines` are its length, and `newest` is its length
    after the operation that made the newest version.
    """

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.key = ""
        self.end = 0
        self.torn = False
        self.damage: list[CorruptRecord] = []
        self.heads: dict[int, bytes] = {}
        self.values: dict[str, bytes] = {}
        self.messages: dict[str, dict[int, bytes]] = {}
        self.events: list[bytes] = []
        self.inbox: list[bytes] = []
        self.taken = 0
        self.priority = 0
        self.since: float | None = None
        """The time since which the inbox has something waiting; None if an older release has posted it.

        `priority` says how urgent that is.
        """
        self.timers: dict[str, tuple[int, float, bytes]] = {}
        """Timers by name: their numbers, when they are due, and what they hold."""
        self.keys: dict[str, tuple[Key, int]] = {}
        self.refs: dict[Stretch, int] = {}
        """The stretches of others' logs that it shows, each with its first version; 0 stands for the first of all."""
        self.line = ""
        """The key of its line, if it has one."""
        self.runs: dict[str, tuple[int, int | None]] = {}
        """The stretches of runs' messages, if they were noted. None as the end stands for a run that went on since."""
        self.epoch = 0
        self.held: Held | None = None
        self.lines = 0
        self.newest = (0, 0)
        self._first = self._last = b""

    @classmethod
    def from_middle(cls, stem: str, key: str, end: int, lines: int) -> SessionLog:
        """Return a log of which only the part after `end` is going to be read."""
        log = cls(stem)
        log.key, log.end, log.lines = key, end, lines
        return log

    @property
    def file(self) -> str:
        return log_file(self.stem)

    @property
    def version(self) -> int:
        """Return the newest version; 0 if it has none."""
        return next(reversed(self.heads), 0)

    @property
    def birth(self) -> int:
        """Return the time of its birth in nanoseconds; 0 if its first line is damaged."""
        found = LogKey.parse(self.key)
        return found.birth if found else 0

    def key_of(self, name: str) -> str:
        """Return the key of the main log or of a branch."""
        return f"{self.key}/{name}" if name else self.key

    def end_of(self, name: str) -> int:
        """Return the position after the last message of the main log or of a branch."""
        return next(reversed(self.messages.get(name, {})), -1) + 1

    def shown(self) -> Iterator[Stretch]:
        """Yield the stretches of others' logs that this session shows. If lines are damaged, its heads say it again."""
        yield from self.refs
        if self.damage:
            yield from self.named()

    def named(self) -> Iterator[Stretch]:
        """Yield all stretches that its heads name, those of its own log included."""
        for raw in (*self.heads.values(), *self.values.values()):
            yield from _stretches(codec.decode_plain(raw))

    def encode(self, lines: Sequence[Line]) -> bytes:
        """Return the bytes of an operation that is appended to this log."""
        return encode_operation(lines, self.lines + 1)

    def is_beginning_of(self, handle: int) -> bool:
        """Tell whether a file begins with what is known here. Logs only grow, so that part need not be read again."""
        # The first line has a mark that each rewriting changes. The last line's number and checksum tell the length.
        return (
            self._first != b""
            and os.pread(handle, len(self._first), 0) == self._first
            and os.pread(handle, len(self._last), self.end - len(self._last)) == self._last
        )

    def feed(self, tail: bytes) -> None:
        """Take in the file's content from `end` on."""
        base, waiting, hole = self.end, list[Line](), False
        expected: int | None = self.lines + 1
        if base == 0:
            self._first = tail[: tail.find(b"\n") + 1]
        for start, stop in _line_ends(tail):
            found = _opened(tail[start:stop])
            if found is None:
                expected = None
                # Zeros are a power cut's if they are in the last operation, and damage if another one follows.
                if _UNWRITTEN in tail[start:stop]:
                    hole = True
                else:
                    self._note(base + start, "its checksum does not match")
                continue
            if expected not in (None, found.n):
                self._note(base + start, f"it is line {found.n}, and line {expected} should stand here")
            expected = found.n + 1
            waiting.append(found)
            if found.commit:
                if hole and stop + 1 == len(tail) and found.n - found.commit == self.lines:
                    break
                if hole:
                    self._note(base + start, "the lines before it are missing")
                self._commit(waiting, base + stop + 1, tail[start : stop + 1])
                waiting, hole = [], False
        self._look_at_end(tail, base)
        if self.damage:
            self._save_what_can_be_read(waiting)

    def _look_at_end(self, tail: bytes, base: int) -> None:
        rest = tail[tail.rfind(b"\n") + 1 :]
        # A line is sealed without its newline: if all else of it is right, it was not torn but damaged there.
        if rest and _opened(rest[:-1]) is not None:
            self._note(base + len(tail) - 1, "the end of a line is not what was written")
        self.torn = self.end < base + len(tail)

    def _save_what_can_be_read(self, waiting: list[Line]) -> None:
        """Take in lines of an operation that ends in damage. If the key's line is damaged, guess the key from heads."""
        self._apply_all(waiting)
        if not self.key:
            named = (
                LogKey.parse(key) for raw in self.heads.values() for key, _, _ in _stretches(codec.decode_plain(raw))
            )
            self.key = next((found.base for found in named if found and found.owner == self.stem), "")

    def _commit(self, lines: list[Line], end: int, last: bytes) -> None:
        self._apply_all(lines)
        self.end, self._last, self.lines = end, last, lines[-1].n
        if any(each.kind == "head" for each in lines):
            self.newest = (self.end, self.lines)

    def _apply_all(self, lines: list[Line]) -> None:
        for each in lines:
            try:
                self._apply(each)
            except (msgspec.MsgspecError, InvalidData) as error:
                self._note(self.end, f"line {each.n} cannot be read: {error}")

    def _note(self, place: int, reason: str) -> None:
        self.damage.append(CorruptRecord(self.stem, f"at byte {place} of {self.file}", reason))

    def _apply(self, each: Line) -> None:
        body = bytes(each.body)
        match each.kind:
            case "log":
                codec.check_format(codec.decode_plain(body)["format"], WITH_LINE)
                found = LogKey.parse(each.name)
                # Epochs begin with the birth, so that a claim on an erased session is not one on its successor.
                self.key, self.epoch = each.name, found.birth if found else 0
            case "message":
                self.messages.setdefault(each.name, {})[each.at] = body
            case "value":
                self.values[each.name] = body
            case "head":
                self.heads[each.at] = body
            case "event":
                self.events.append(body)
                if self.runs and (run := msgspec.json.decode(body, type=_OfRun).run) in self.runs:
                    self.runs[run] = (self.runs[run][0], None)
            case "run":
                self.runs[each.name] = msgspec.json.decode(body, type=tuple[int, int])
            case "inbox":
                self.inbox.append(body)
            case "taken":
                self.taken = max(self.taken, each.at)
            case "waits":
                self.priority, self.since = each.at, msgspec.json.decode(body, type=float)
            case "timer":
                self.timers.pop(each.name, None)
                if body != _NO_TIMER:
                    due, held = msgspec.json.decode(body, type=tuple[float, msgspec.Raw])
                    self.timers[each.name] = (each.at, due, bytes(held))
            case "key":
                self.keys[each.name] = (Key(each.name, msgspec.json.decode(body, type=str)), each.at)
            case "ref":
                stretch = (each.name, *msgspec.json.decode(body, type=tuple[int, int]))
                self.refs[stretch] = min(each.at, self.refs.get(stretch, each.at))
            case "line":
                self.line = each.name
            case "claim":
                self.epoch, self.held = each.at, msgspec.json.decode(body, type=Held)
            case "beat" if self.held is not None and each.at == self.epoch:
                self.held = replace(self.held, expires=msgspec.json.decode(body, type=float))
            case "release" if each.at == self.epoch:
                self.held = None


def log_file(stem: str) -> str:
    return f"{stem}.jsonl"


def _line_ends(tail: bytes) -> Iterator[tuple[int, int]]:
    start = 0
    while (stop := tail.find(b"\n", start)) >= 0:
        yield start, stop
        start = stop + 1


def _stretches(plain: Any) -> Iterator[Stretch]:
    """Yield all parts of plain data that have the form of a span."""
    if isinstance(plain, dict):
        plain = list(plain.values())
    if isinstance(plain, list):
        match plain:
            case [str() as key, int() as start, int() as stop]:
                yield key, start, stop
            case _:
                for item in plain:
                    yield from _stretches(item)
