"""Redaction: the content of messages is replaced for good, wherever a store has it.

A message stands in one row of a log, and every version and fork shows that row. What else may tell of it: summaries
that cover it, steps and events that tell of its tool calls, errors of its runs, the inbox, and a session's own notes.
A store opens its rows as a `Bench`; what is done there is the same for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.ids import SessionId
from perdure.model.transcript import Block, LogRef, Span, Tape, Transcript, every_span
from perdure.model.value import brief, clean_text
from perdure.protocols import Entry
from perdure.stores.blocks import BlocksAtHand
from perdure.stores.hashes import Values, hash_of
from perdure.stores.heads import INLINE
from perdure.stores.rows import operation_id

MARK = "redacted"
"""The key in a message's metadata that says that its content has been replaced, and the kind of entry that tells so."""
# A shorter text of a message is not looked for in others' texts: it could stand there by chance.
_SHORTEST = 8

Log = int | str
Places = dict[Log, set[int]]


class Row(NamedTuple):
    """A message in its log."""

    log: Log
    position: int
    body: bytes


class Version(NamedTuple):
    """One version of a session: its head, and the values that it names by hash."""

    number: int
    raw: bytes
    values: Mapping[str, bytes]


class Bench(Protocol):
    """A store's rows, opened for one redaction. Sessions are named by their ids."""

    def history(self, session_id: str) -> Iterable[Row]:
        """All messages in a session's logs, and those of others' that it shows; SessionNotFound if there is none."""
        ...

    def row(self, log: Log, position: int) -> bytes: ...

    def concerned(self, places: Places) -> Collection[str]:
        """The sessions whose logs hold one of these messages or that show one, and all forks of these."""
        ...

    def require_free(self, session_id: str) -> None:
        """Raise SessionBusy while a session is being run."""
        ...

    def versions(self, session_id: str) -> Iterable[Version]: ...

    def entries(self, session_id: str) -> Sequence[Entry]: ...

    def inbox(self, session_id: str) -> Sequence[Entry]: ...

    def replace(self, rows: Sequence[Row], sessions: Sequence[Redone]) -> None:
        """Write it all."""
        ...


class Redone(NamedTuple):
    """A session with what is to be replaced in it, and the entry that tells of it.

    It is given a further version, unless a run of its was interrupted: who loaded it before cannot save over this.
    """

    session_id: str
    versions: Sequence[Version]
    """Those that are changed."""
    entries: Mapping[int, Entry]
    """Those that are changed, by their places in the record, from 0."""
    inbox: Mapping[int, Entry]
    told: Entry


class Request(NamedTuple):
    """A redaction that was asked for, checked."""

    session_id: SessionId
    ids: tuple[str, ...]
    replacement: str

    @classmethod
    def of(cls, session_id: str, message_ids: Sequence[str], replacement: str) -> Request:
        if isinstance(message_ids, str) or not isinstance(message_ids, Iterable):
            kind = type(message_ids).__name__
            raise InvalidData("$.message_ids", f"expected several ids, got a {kind}; write [message.id]")
        ids = tuple(dict.fromkeys(message_ids))
        for place, each in enumerate(ids):
            if not isinstance(each, str):
                raise InvalidData(f"$.message_ids[{place}]", f"a message's id is a text, not {brief(each)}")
        if not isinstance(replacement, str) or not replacement.strip() or len(replacement) > 1000:
            raise InvalidData("$.replacement", f"give a text of 1 to 1000 characters; got {brief(replacement)}")
        return cls(SessionId(session_id), ids, clean_text(replacement))


def redact(bench: Bench, request: Request, at: datetime) -> int:
    """Replace the content of messages; how many were not replaced before."""
    work = _Redaction(request.ids, request.replacement)
    work.find(bench, request.session_id)
    sessions = work.find_summaries(bench)
    for session_id in sessions:
        bench.require_free(session_id)
    if not work.rows:
        return 0
    for session_id in sessions:
        work.find_runs(bench.entries(session_id))
    told = Entry(MARK, {"at": at.isoformat().replace("+00:00", "Z"), "message_ids": list(request.ids)})
    redone = [
        Redone(
            session_id,
            list(work.changed_versions(bench.versions(session_id))),
            work.changed_entries(bench.entries(session_id)),
            work.changed_entries(bench.inbox(session_id)),
            told,
        )
        for session_id in sessions
    ]
    bench.replace(list(work.rows.values()), redone)
    return len(work.fresh)


class _Redaction:
    """What is to be replaced, as far as it is known."""

    def __init__(self, ids: Sequence[str], replacement: str) -> None:
        self._wanted = ids
        self._text = replacement
        self.rows: dict[tuple[Log, int], Row] = {}
        self.fresh: set[str] = set()
        self._places: Places = {}
        self._ids: set[str] = set(ids)
        self._calls: set[str] = set()
        self._results: set[str] = set()
        self._runs: set[str] = set()
        self._blocks: set[str] = set()
        self._other_blocks: set[str] = set()
        self._secrets: set[str] = set()

    def find(self, bench: Bench, session_id: str) -> None:
        """Find the messages that were asked for; InvalidData if there is one that the session has not."""
        found = self._collect(bench.history(session_id))
        missing = [each for each in self._wanted if each not in found]
        if missing:
            problem = f"session {session_id!r} has no message {missing[0]!r} in its history; nothing was replaced"
            raise InvalidData("$.message_ids", problem)

    def _collect(self, rows: Iterable[Row]) -> set[str]:
        """Take those of the messages that were asked for; their ids."""
        found: set[str] = set()
        needles = [msgspec.json.encode(each) for each in self._wanted]
        for row in rows:
            if any(needle in row.body for needle in needles):
                plain = codec.decode_plain(row.body)
                if plain.get("id") in self._wanted:
                    found.add(plain["id"])
                    self._take(row, plain)
        return found

    def _take(self, row: Row, plain: dict[str, Any]) -> None:
        """Replace a message, and learn what else may tell of it."""
        self._places.setdefault(row.log, set()).add(row.position)
        self._ids.add(plain["id"])
        for part in plain.get("parts", ()):
            if part.get("type") == "tool_call":
                self._calls.add(part["id"])
            elif part.get("type") == "tool_result":
                self._results.add(part["call_id"])
        tags = plain.get("metadata", {})
        if isinstance(tags.get("execution_id"), str):
            self._runs.add(tags["execution_id"])
        if tags.get(MARK) is True:
            return
        self._secrets |= {each for each in _texts(plain.get("parts", ())) if len(each.strip()) >= _SHORTEST}
        self.rows[row.log, row.position] = Row(row.log, row.position, msgspec.json.encode(self._message(plain)))
        if plain["id"] in self._wanted:
            self.fresh.add(plain["id"])

    def find_summaries(self, bench: Bench) -> list[str]:
        """Find what compaction blocks show in place of the messages, in every session that has such a block."""
        seen: set[str] = set()
        while True:
            before = sum(map(len, self._places.values()))
            sessions = sorted(bench.concerned(self._places))
            for session_id in sessions:
                if (
                    session_id not in seen
                ):  # one that came from elsewhere has a copy of what it shows in a log of its own
                    seen.add(session_id)
                    self._collect(bench.history(session_id))
            met = _BlocksMet()
            for session_id in sessions:
                for version in bench.versions(session_id):
                    for block in met.new_ones(_blocks_of(version)):
                        self._look_at(bench, block)
            if sum(map(len, self._places.values())) == before:
                return sessions

    def _look_at(self, bench: Bench, block: Block) -> None:
        covered = [_stretch(span) for span in every_span(block.covered)]
        if not any(start <= position < stop for log, start, stop in covered for position in self._places.get(log, ())):
            self._other_blocks.add(block.id)
            return
        self._blocks.add(block.id)
        for log, start, stop in map(_stretch, block.shown):
            for position in range(start, stop):
                is_original = any(each == log and low <= position < high for each, low, high in covered)
                if not is_original and position not in self._places.get(log, ()):
                    body = bench.row(log, position)
                    plain = codec.decode_plain(body)
                    if self._tells(plain):
                        self._take(Row(log, position, body), plain)

    def _tells(self, made: Mapping[str, Any]) -> bool:
        """Whether a message made for a block may tell of those replaced; one with calls only, if of the same calls."""
        parts = made.get("parts", ())
        calls = {part.get("id") for part in parts if part.get("type") == "tool_call"}
        calls |= {part.get("call_id") for part in parts if part.get("type") == "tool_result"}
        return not calls or bool(calls & (self._calls | self._results))

    def find_runs(self, entries: Iterable[Entry]) -> None:
        """Find the runs that have put these messages on record."""
        for entry in entries:
            if entry.kind == "message_end" and entry.run and entry.body["message"]["id"] in self._ids:
                self._runs.add(entry.run)

    def changed_versions(self, versions: Iterable[Version]) -> Iterator[Version]:
        for version in versions:
            plain = codec.decode_plain(version.raw)
            if values := self._head(plain, version.values):
                yield Version(version.number, msgspec.json.encode(plain), values)

    def _head(self, plain: dict[str, Any], values: Mapping[str, bytes]) -> Values:
        """Replace what a head says; the values that it names then, or none if it says nothing of the kind."""
        before = msgspec.json.encode(plain)
        kept = dict(values)
        for holder, field in ((plain["info"], "name"), (plain["state"], "task")):
            if isinstance(holder.get(field), str):
                holder[field] = self._scrubbed(holder[field])
        parts, hashed = plain.setdefault("parts", {}), plain.setdefault("hashed", {})
        for name, change in (("metadata", self._scrubbed), ("execution", self._execution)):
            part = codec.decode_plain(values[hashed[name]]) if name in hashed else parts.get(name)
            if part is None or (changed := change(part)) == part:
                continue
            raw = msgspec.json.encode(changed)
            kept.pop(hashed.pop(name, ""), None)
            parts.pop(name, None)
            if len(raw) > INLINE:
                hashed[name] = hash_of(raw)
                kept[hashed[name]] = raw
            else:
                parts[name] = changed
        for name in ("parts", "hashed"):
            if not plain[name]:
                del plain[name]
        return kept if msgspec.json.encode(plain) != before else {}

    def _execution(self, plain: Any) -> Any:
        return self._walked(plain, is_touched=plain.get("execution_id") in self._runs)

    def changed_entries(self, entries: Sequence[Entry]) -> dict[int, Entry]:
        changed: dict[int, Entry] = {}
        for place, entry in enumerate(entries):
            body = self._entry(entry)
            if body != entry.body:
                changed[place] = Entry(entry.kind, body, entry.run)
        return changed

    def _entry(self, entry: Entry) -> Any:
        is_touched = entry.run in self._runs
        body = self._walked(entry.body, is_touched=is_touched)
        if entry.kind == "compaction":
            return self._compaction(body)
        if entry.kind == "input_rejected":
            return {**body, "reason": self._text if is_touched else self._scrubbed(body["reason"])}
        return body

    def _compaction(self, body: dict[str, Any]) -> dict[str, Any]:
        """What tells of a block that covers a message; one that no version has may cover any."""
        block = body["block"]
        if block["id"] in self._other_blocks - self._blocks:
            return body
        shown = [
            {**part, "message": self._message(part["message"])} if self._is_new(part) else part
            for part in body.get("shown", ())
        ]
        summary = {"summary": self._text} if block.get("summary") else {}
        return {**body, "block": {**block, **summary}, **({"shown": shown} if shown else {})}

    def _is_new(self, part: Mapping[str, Any]) -> bool:
        return bool(part.get("message")) and self._tells(part["message"])

    def _walked(self, value: Any, *, is_touched: bool) -> Any:
        """Plain data with all replaced that tells of the messages, be it in a step, an event or an inbox."""
        if isinstance(value, list):
            return [self._walked(each, is_touched=is_touched) for each in value]
        if not isinstance(value, dict):
            return value
        if _is_in(value.get("id"), self._ids) and value.get("parts"):
            return self._message(value)
        if isinstance(value.get("type"), str) and isinstance(value.get("message"), str):
            return self._error(value, is_touched=is_touched)
        changed = {key: self._walked_under(key, each, is_touched=is_touched) for key, each in value.items()}
        if "call" in changed and isinstance(changed["call"], dict):
            return self._execution_of_tool(changed)
        if value.get("type") == "tool_call" and _is_in(value.get("id"), self._calls) and value.get("name"):
            return self._call(value)
        for key in _FREE_TEXT & changed.keys():
            changed[key] = self._scrubbed(changed[key])
        if is_touched and changed.get("rejection"):
            changed["rejection"] = self._text
        return changed

    def _walked_under(self, key: str, value: Any, *, is_touched: bool) -> Any:
        if key in _TOLD_BY_TOOLS:  # data of any form: no error or message, though it may look like one
            return self._scrubbed(value) if is_touched else value
        return self._walked(value, is_touched=is_touched)

    def _execution_of_tool(self, plain: dict[str, Any]) -> dict[str, Any]:
        """A tool's execution, with its result replaced if that of its message is."""
        if not _is_in(plain["call"].get("id"), self._results):
            return plain
        changed = dict(plain)
        if changed.get("result") not in (None, _POINTS_AT_MESSAGE):
            changed["result"] = self._text
        if isinstance(changed.get("error"), dict):
            changed["error"] = self._error(changed["error"], is_touched=True)
        return changed

    def _call(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: plain[name] for name in ("type", "name", "id", "provider") if name in plain}
        return {**kept, "arguments": {MARK: self._text}} if plain.get("arguments") else kept

    def _error(self, plain: Mapping[str, Any], *, is_touched: bool) -> dict[str, Any]:
        """An error on record. What went wrong in a run of the messages may quote any piece of them."""
        if is_touched:
            return {**{name: each for name, each in plain.items() if name != "traceback"}, "message": self._text}
        return {name: each if name == "type" else self._scrubbed(each) for name, each in plain.items()}

    def _message(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """A message without its content. All that was text, thought, seen or opaque is one text."""
        parts: list[dict[str, Any]] = []
        is_said = False
        for part in plain.get("parts", ()):
            if part.get("type") == "tool_call":
                parts.append(self._call(part))
            elif part.get("type") == "tool_result":
                kept = {name: part[name] for name in ("type", "call_id", "name", "is_error") if name in part}
                parts.append({**kept, "content": self._text})
            elif not is_said:
                is_said = True
                parts.append({"type": "text", "text": self._text})
        kept = {name: plain[name] for name in ("format", "role", "id") if name in plain}
        tags = {**self._scrubbed(plain.get("metadata", {})), MARK: True}
        return {**kept, **({"parts": parts} if parts else {}), "metadata": tags}

    def _scrubbed(self, value: Any) -> Any:
        """Plain data with every text of the messages replaced that is quoted in it whole."""
        if isinstance(value, str):
            for secret in sorted(self._secrets, key=len, reverse=True):
                value = value.replace(secret, self._text)
            return value
        if isinstance(value, list):
            return [self._scrubbed(each) for each in value]
        if isinstance(value, dict):
            return {key: self._scrubbed(each) for key, each in value.items()}
        return value


_FREE_TEXT = {"message", "progress", "metadata", "denied", "rejection", "strategy", "configs"}
_TOLD_BY_TOOLS = {"result", "arguments"}
_POINTS_AT_MESSAGE = {"$said": True}


def _is_in(key: Any, known: set[str]) -> bool:
    return isinstance(key, str) and key in known


def _texts(value: Any) -> Iterator[str]:
    """The texts in a message's parts, without the names and ids that stay."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        kind = value.get("type")
        stays = {"tool_call": _CALL_KEEPS, "tool_result": _RESULT_KEEPS}.get(kind, _KEEPS) if kind else ()
        for key, each in value.items():
            if key not in stays:
                yield from _texts(each)


_KEEPS = ("type", "provider", "media_type")
_CALL_KEEPS = ("type", "name", "id", "provider")
_RESULT_KEEPS = ("type", "call_id", "name", "is_error")


def _blocks_of(version: Version) -> Iterator[Block]:
    """Every compaction block in a version, those of its steps' views too."""
    if b'"covered"' not in version.raw and not any(b'"covered"' in each for each in version.values.values()):
        return
    plain = codec.decode_plain(version.raw)
    block_of = BlocksAtHand(version.values, _span_of)
    for name in ("prefix", "transcript", "execution"):
        hashed = plain.get("hashed", {}).get(name)
        part = codec.decode_plain(version.values[hashed]) if hashed else plain.get("parts", {}).get(name)
        for pieces in _piece_lists(part):
            yield from Transcript(codec.load_pieces(pieces, _span_of, block_of)).blocks()


class _BlocksMet:
    """Tells blocks that were not met before from those that stand in many versions, as most do."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def new_ones(self, blocks: Iterable[Block]) -> Iterator[Block]:
        numbers: dict[int, int] = {}
        for block in reversed(list(blocks)):  # those within come first
            covered = [_stretch(each) if isinstance(each, Span) else numbers[id(each)] for each in block.covered]
            key = (block.id, *covered, None, *map(_stretch, block.shown))
            is_new = key not in self._numbers
            numbers[id(block)] = self._numbers.setdefault(key, len(self._numbers))
            if is_new:
                yield block


def _piece_lists(part: Any) -> Iterator[list[Any]]:
    """The lists of pieces in a part of a head: the part itself, or the views in a run's steps."""
    if isinstance(part, list):
        yield part
    elif isinstance(part, dict):
        for done in (*part.get("step_executions", ()), {"step": part.get("current_step") or {}}):
            for view in ("input_messages", "output_messages"):
                yield done["step"].get(view) or []


def _span_of(log: Log, start: int, stop: int) -> Span:
    return Span(Tape(None, LogRef("", log)), start, stop)


def _stretch(span: Span) -> tuple[Log, int, int]:
    assert span.tape.ref is not None
    return span.tape.ref.key, span.start, span.stop


def next_version(raw: bytes, at: datetime) -> bytes:
    """The newest head as the head of a further version."""
    plain = codec.decode_plain(raw)
    plain["info"] |= {"version": plain["info"]["version"] + 1, "updated_at": at.isoformat().replace("+00:00", "Z")}
    plain["op"] = operation_id()
    return msgspec.json.encode(plain)
