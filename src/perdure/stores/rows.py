"""How a session becomes rows and comes back: shared by every store.

A row of a log is one message; a head is one version. What is large in a head, or the same in many, stands once in a
table of values under the hash of its bytes.
"""

from __future__ import annotations

import hashlib
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, NotLoaded, SessionConflict
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionState
from perdure.model.ids import new_id
from perdure.model.message import Message
from perdure.model.said import pointing, whole
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentContext, AgentState
from perdure.model.step import AgentStep, StepExecution
from perdure.model.transcript import LogRef, Piece, Span, Tape, Transcript, every_span
from perdure.model.value import EMPTY, Value
from perdure.protocols import NOTHING_WRITTEN, JournalEntry, RunOnRecord, StoredAt
from perdure.stores.live import LRU
from perdure.stores.packing import unpack

INLINE = 256
PREFIX = 32

Values = dict[str, bytes]
Stretch = tuple[int | str, int, int]
Slot = tuple[Tape, int]


def checksum(body: bytes, *place: int) -> int:
    """A checksum of bytes at a place, so that a row that has moved is as wrong as one that has changed."""
    seed = 0
    for number in place:
        seed = (seed_of(seed) + number) & 0xFFFFFFFF
    return zlib.crc32(body, seed)


def seed_of(number: int) -> int:
    """What the checksums of all that stands under a number begin with."""
    return (number * 1000003) & 0xFFFFFFFF


def hash_of(body: bytes) -> str:
    """A name for bytes: 128 bits, in 22 characters."""
    return urlsafe_b64encode(hashlib.blake2b(body, digest_size=16).digest())[:22].decode()


def operation_id() -> str:
    """A mark by which a writer whose answer was lost can tell its own write from another's."""
    return new_id()[-12:]


class Head(Value, frozen=True):
    """One version of a session, as it is stored. A part over INLINE bytes is named by hash in `hashed`."""

    info: AgentSessionInfo
    definition: str
    state: msgspec.Raw
    op: str
    parts: dict[str, msgspec.Raw] = {}
    hashed: dict[str, str] = {}
    format: int = codec.FORMAT


class _InfoOfHead(msgspec.Struct, frozen=True):
    info: AgentSessionInfo
    format: int = codec.FORMAT


def transcripts_of(state: AgentState) -> Iterator[Transcript]:
    """The state's transcript, then the views that its execution's steps name."""
    yield state.transcript
    for step in _steps(state.execution):
        yield step.input_messages
        yield step.output_messages


def _steps(execution: ExecutionState | None) -> Iterator[AgentStep]:
    if execution is not None:
        for done in execution.step_executions:
            yield done.step
        if execution.current_step is not None:
            yield execution.current_step


def is_at_hand(session: AgentSession) -> bool:
    """Whether all that a load would read is in memory: what the view shows, and what the last run put out."""
    shown = [session.state.transcript, *(step.output_messages for step in _steps(session.state.execution))]
    return all(span.tape.items is not None for transcript in shown for span in transcript.spans())


class Placement:
    """The messages of a session that a store does not have yet, and, once it knows, where they go."""

    def __init__(self, session: AgentSession, origin: str, written: Mapping[str, StoredAt] = NOTHING_WRITTEN) -> None:
        self._session = session
        self._origin = origin
        self._places: dict[Slot, StoredAt | None] = {}
        self.new: list[bytes] = []
        self.new_messages: list[Message] = []
        for transcript in transcripts_of(session.state):
            for span in every_span(transcript.pieces):
                if not self._is_stored(span):
                    self._meet(span, written)

    def _is_stored(self, span: Span) -> bool:
        return span.tape.ref is not None and span.tape.ref.origin == self._origin

    def _meet(self, span: Span, written: Mapping[str, StoredAt]) -> None:
        if span.tape.items is None:
            raise NotLoaded(f"log {span.tape.ref.key if span.tape.ref else '?'} of another store")
        for position, message in enumerate(span.messages(), start=span.start):
            slot = (span.tape, position)
            if slot in self._places:
                continue
            if not isinstance(message, Message):
                raise InvalidData("$.transcript", f"expected a Message, got {type(message).__name__}")
            self._places[slot] = written.get(message.id)
            if self._places[slot] is None:
                self.new.append(codec.encode_message(message))
                self.new_messages.append(message)

    def settle(self, log: LogRef, start: int) -> AgentSession:
        """The session with every message at its place in a log; new ones stand from `start` on."""
        if not self._places:
            return self._session
        home = Tape(self.new_messages, log, start)
        if self._is_one_turn():
            return self._with_turn(Span(home, start, home.end))
        spans = self._written_spans()
        for slot, place in self._places.items():
            if place is None:
                spans[slot] = Span(home, start, start + 1)
                start += 1
        state = map_transcripts(self._session.state, lambda transcript: self._settled(transcript, spans))
        return replace(self._session, state=state)

    def _written_spans(self) -> dict[Slot, Span]:
        """Where messages that were written ahead stand: neighbours in a log are on one tape, so that their spans join.

        Otherwise each step of a run would name every message before it one by one.
        """
        written = [(place, slot) for slot, place in self._places.items() if place is not None]
        tapes: dict[LogRef, Tape] = {}
        spans: dict[Slot, Span] = {}
        for place, slot in sorted(written, key=lambda each: each[0].position):
            tape = tapes.get(place.log)
            if tape is None or place.position > tape.end:
                tape = tapes[place.log] = Tape([], place.log, place.position)
            if place.position == tape.end and tape.items is not None:  # else the same message, met on another tape
                tape.items.extend(slot[0].read(slot[1], slot[1] + 1))
            spans[slot] = Span(tape, place.position, place.position + 1)
        return spans

    def _is_one_turn(self) -> bool:
        """Whether all that is new stands in the last piece of the transcript, as it does after most actions."""
        pieces = self._session.state.transcript.pieces
        if self._session.state.execution is not None or not pieces or not isinstance(pieces[-1], Span):
            return False
        if not len(pieces[-1]) == len(self.new) == len(self._places):
            return False
        return all(isinstance(piece, Span) and self._is_stored(piece) for piece in pieces[:-1])

    def _with_turn(self, turn: Span) -> AgentSession:
        state = self._session.state
        transcript = Transcript((*state.transcript.pieces[:-1], turn))
        return replace(self._session, state=replace(state, context=replace(state.context, transcript=transcript)))

    def _settled(self, transcript: Transcript, spans: Mapping[Slot, Span]) -> Transcript:
        return Transcript(self._settled_pieces(transcript.pieces, spans))

    def _settled_pieces(self, pieces: Iterable[Piece], spans: Mapping[Slot, Span]) -> Iterator[Piece]:
        """Not by recursion: each compaction may cover the one before, without end."""
        settled: list[Piece] = []
        todo: list[tuple[Piece, int | None]] = [(piece, None) for piece in reversed(tuple(pieces))]
        while todo:
            piece, first = todo.pop()
            if isinstance(piece, Span):
                settled += self._settled_span(piece, spans)
            elif first is None:
                todo.append((piece, len(settled)))
                todo += [(covered, None) for covered in reversed(piece.covered)]
            else:
                shown = Transcript(chain.from_iterable(self._settled_span(span, spans) for span in piece.shown))
                covered = Transcript(settled[first:])
                settled[first:] = [replace(piece, covered=covered.pieces, shown=shown.pieces)]
        return iter(settled)

    def _settled_span(self, span: Span, spans: Mapping[Slot, Span]) -> Iterable[Span]:
        if self._is_stored(span):
            return (span,)
        return (spans[span.tape, position] for position in range(span.start, span.stop))


def map_transcripts(state: AgentState, change: Callable[[Transcript], Transcript]) -> AgentState:
    """The state with every transcript in it changed; times stay as they are."""
    context = replace(state.context, transcript=change(state.transcript))
    return replace(state, context=context, execution=_map_execution(state.execution, change))


def _map_execution(
    execution: ExecutionState | None, change: Callable[[Transcript], Transcript]
) -> ExecutionState | None:
    if execution is None:
        return None

    def step(given: AgentStep) -> AgentStep:
        return replace(
            given, input_messages=change(given.input_messages), output_messages=change(given.output_messages)
        )

    done: tuple[StepExecution, ...] = tuple(replace(each, step=step(each.step)) for each in execution.step_executions)
    current = None if execution.current_step is None else step(execution.current_step)
    return replace(execution, step_executions=done, current_step=current)


def consolidate(session: AgentSession) -> AgentSession:
    """The same session on fewer tapes: what a save has put behind a tape's end moves onto it.

    To be called only once the save is durable: a tape must never hold what the log does not.
    """
    pieces: list[Piece] = []
    for piece in session.state.transcript.pieces:
        last = pieces[-1] if pieces else None
        if isinstance(last, Span) and isinstance(piece, Span) and _follows(last, piece):
            assert last.tape.items is not None
            last.tape.items.extend(piece.messages())
            pieces[-1] = Span(last.tape, last.start, piece.stop)
        else:
            pieces.append(piece)
    if len(pieces) == len(session.state.transcript.pieces):
        return session
    context = replace(session.state.context, transcript=Transcript(pieces))
    return replace(session, state=replace(session.state, context=context))


def _follows(last: Span, span: Span) -> bool:
    return (
        last.tape is not span.tape
        and last.tape.ref is not None
        and last.tape.ref == span.tape.ref
        and last.tape.items is not None
        and span.tape.items is not None
        and last.tape.end == last.stop == span.start
    )


def encode_head(session: AgentSession, op: str) -> tuple[bytes, Values]:
    """The head of a settled session, and the values it names by hash."""
    values: Values = {}

    def by_hash(raw: bytes) -> str:
        key = hash_of(raw)
        values[key] = raw
        return key

    parts: dict[str, msgspec.Raw] = {}
    hashed: dict[str, str] = {}
    for name, raw in _parts_of(session):
        if len(raw) > INLINE and name != "transcript":
            hashed[name] = by_hash(raw)
        else:
            parts[name] = msgspec.Raw(raw)
    if session.unknown:
        codec.encode_json(session.unknown)
    head = {
        **session.unknown,
        "info": msgspec.Raw(codec.encode(session.info)),
        "definition": by_hash(encode_definition(session.definition)),
        "state": msgspec.Raw(codec.encode(_slim(session.state), _stored_name)),
        "op": op,
        **({"parts": parts} if parts else {}),
        **({"hashed": hashed} if hashed else {}),
    }
    # What stands in it has been checked part by part; a `Head` is what it is read as.
    return codec.join(head), values


_definitions: LRU[int, tuple[AgentDefinition, bytes]] = LRU(256)


def encode_definition(definition: AgentDefinition) -> bytes:
    """A definition's bytes, kept: sessions share definitions, and each of their saves names one."""
    kept = _definitions.recall(id(definition))
    if kept is None or kept[0] is not definition:
        kept = (definition, codec.encode(definition))
        _definitions.keep(id(definition), kept)
    return kept[1]


_BLANK = AgentState()


def _slim(state: AgentState) -> AgentState:
    """The state without what stands in parts of its own. A blank context must be the default itself to be left out."""
    unknown = state.context.unknown
    return replace(state, context=AgentContext(unknown=unknown) if unknown else _BLANK.context, execution=None)


def _parts_of(session: AgentSession) -> Iterator[tuple[str, bytes]]:
    state = session.state
    pieces = _numbered(state.transcript.pieces)
    kept = max(len(pieces) - len(pieces) % PREFIX if len(pieces) > PREFIX else 0, _end_of_blocks(pieces))
    if kept:
        yield "prefix", msgspec.json.encode(pieces[:kept])
    if pieces[kept:]:
        yield "transcript", msgspec.json.encode(pieces[kept:])
    if state.metadata:
        codec.check_json(state.metadata, "$.state.metadata")
        yield "metadata", codec.encode(state.metadata)
    if state.context.system_prompt != session.definition.system_prompt:
        yield "system_prompt", codec.encode(state.context.system_prompt)
    if state.context.response_format is not None:
        codec.check_json(state.context.response_format, "$.state.response_format")
        yield "response_format", codec.encode(state.context.response_format)
    if state.execution is not None:
        yield "execution", codec.encode(pointing(state.execution), _stored_name)


def _end_of_blocks(pieces: list[Any]) -> int:
    """Where the last block ends, if blocks are large: they stay as they are from save to save."""
    end = max((place for place, piece in enumerate(pieces, 1) if isinstance(piece, dict)), default=0)
    return end if end and len(msgspec.json.encode(pieces[:end])) > 2 * INLINE else 0


def _numbered(pieces: Iterable[Piece]) -> list[Any]:
    """Pieces as they are stored: neighbours in one log are one, whatever tapes they stand on."""
    plain: list[Any] = []
    for piece in codec.dump_pieces(tuple(pieces), _stored_name):
        last = plain[-1] if plain else None
        if isinstance(piece, list) and isinstance(last, list) and last[0] == piece[0] and last[2] == piece[1]:
            last[2] = piece[2]
        else:
            plain.append(piece)
    return plain


def _stored_name(span: Span) -> int | str:
    if span.tape.ref is None:
        raise InvalidData("$", "a head can only name messages that are in a log")
    return span.tape.ref.key


class StoredHead:
    """A head that has been read, on its way to being a session again."""

    def __init__(self, raw: bytes, session_id: str, version: int) -> None:
        self._where = (session_id, f"head {version}")
        try:
            self.head = codec.decode(Head, raw)
            codec.check_format(self.head.format)
        except InvalidData as error:
            raise CorruptRecord(*self._where, str(error)) from None
        found = self.head.info
        if (found.id, found.version) != (session_id, version):
            raise CorruptRecord(*self._where, f"it is head {found.version} of session {found.id!r}")

    def hashes(self) -> list[str]:
        """The values it takes to rebuild the session."""
        return [self.head.definition, *self.head.hashed.values()]

    def wanted(self, values: Mapping[str, bytes]) -> list[Stretch]:
        """The stretches of logs that the session shows: its view, and its last run's output."""
        try:
            found = [*_shown(self._pieces(values))]
            execution = self._part("execution", values)
            if execution is not None:
                found += _outputs(codec.decode_plain(execution))
        except (InvalidData, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptRecord(*self._where, str(error)) from None
        return found

    def session(
        self, values: Mapping[str, bytes], span_of: codec.SpanOf, definition: AgentDefinition | None = None
    ) -> AgentSession:
        try:
            if definition is None:
                definition = codec.decode(AgentDefinition, values[self.head.definition])
            state = codec.decode(AgentState, bytes(self.head.state), span_of)
            context = replace(
                state.context,
                transcript=Transcript(codec.load_pieces(self._pieces(values), span_of)),
                metadata=self._decoded("metadata", values, EMPTY),
                system_prompt=self._decoded("system_prompt", values, definition.system_prompt),
                response_format=self._decoded("response_format", values, None),
            )
            execution = self._part("execution", values)
            run = None if execution is None else whole(codec.decode(ExecutionState, execution, span_of))
        except (InvalidData, KeyError, ValueError) as error:
            raise CorruptRecord(*self._where, str(error)) from None
        state = replace(state, context=context, execution=run)
        return AgentSession(self.head.info, definition, state, unknown=self.head.unknown)

    def _part(self, name: str, values: Mapping[str, bytes]) -> bytes | None:
        if name in self.head.hashed:
            return values[self.head.hashed[name]]
        return bytes(self.head.parts[name]) if name in self.head.parts else None

    def _decoded(self, name: str, values: Mapping[str, bytes], default: Any) -> Any:
        raw = self._part(name, values)
        return default if raw is None else codec.decode_plain(raw)

    def _pieces(self, values: Mapping[str, bytes]) -> list[Any]:
        return [*self._decoded("prefix", values, []), *self._decoded("transcript", values, [])]


def unpacked_head(body: bytes, crc: int, session_id: str, sid: int, version: int) -> bytes:
    """A head's JSON; CorruptRecord unless its row is what was written."""
    where = f"head {version}"
    check_row(body, crc, session_id, where, sid, version)
    try:
        return unpack(body)
    except InvalidData as error:
        raise CorruptRecord(session_id, where, str(error)) from None


def page_start(after: str | None) -> int | None:
    """The number that a page's `next` stands for."""
    if after is None:
        return None
    if not after.isdecimal() or len(after) > 18:
        raise InvalidData("$.after", f"{after!r} is not a page's `next`")
    return int(after)


def decode_info(raw: bytes, session_id: str, version: int) -> AgentSessionInfo:
    """The header in a head, without the rest of it."""
    try:
        return codec.decode(_InfoOfHead, raw).info
    except InvalidData as error:
        raise CorruptRecord(session_id, f"head {version}", str(error)) from None


def _shown(pieces: Iterable[Any]) -> Iterator[Stretch]:
    for piece in pieces:
        if isinstance(piece, Mapping):
            yield from _shown(piece["shown"])
        else:
            log, start, stop = piece
            yield log, start, stop


def _outputs(execution: Mapping[str, Any]) -> Iterator[Stretch]:
    for done in execution.get("step_executions", ()):
        yield from _shown(done["step"]["output_messages"])
    if execution.get("current_step"):
        yield from _shown(execution["current_step"]["output_messages"])


class Shelf:
    """The tapes at hand for one load: those of a session known from before, and what is read in addition."""

    def __init__(self, origin: str, known: AgentSession | None = None) -> None:
        self._origin = origin
        self._tapes: dict[int | str, list[Tape]] = {}
        self._unread: dict[int | str, Tape] = {}
        if known is not None:
            for transcript in transcripts_of(known.state):
                for span in every_span(transcript.pieces):
                    self._keep(span.tape)

    def _keep(self, tape: Tape) -> None:
        if tape.ref is not None and tape.ref.origin == self._origin and tape.items is not None:
            tapes = self._tapes.setdefault(tape.ref.key, [])
            if not any(tape is other for other in tapes):
                tapes.append(tape)

    def missing(self, wanted: Iterable[Stretch]) -> list[Stretch]:
        """What has to be read, merged and in order."""
        merged: list[list[Any]] = []
        for log, start, stop in sorted(wanted, key=lambda stretch: (str(stretch[0]), stretch[1])):
            if merged and merged[-1][0] == log and start <= merged[-1][2]:
                merged[-1][2] = max(merged[-1][2], stop)
            else:
                merged.append([log, start, stop])
        gaps = [(log, self._known_up_to(log, start), stop) for log, start, stop in merged]
        return [gap for gap in gaps if gap[1] < gap[2]]

    def _known_up_to(self, log: int | str, start: int) -> int:
        return max((t.end for t in self._tapes.get(log, ()) if t.base <= start <= t.end), default=start)

    def put(self, log: int | str, start: int, messages: list[Message]) -> None:
        """Messages that were read from a log: onto the tape that ends there, or a new one."""
        touching = [tape for tape in self._tapes.get(log, ()) if tape.base <= start <= tape.end]
        # Of several the one that begins first: it holds all that is known of the stretch that was wanted.
        tape = min(touching, key=attrgetter("base"), default=None)
        if tape is None or tape.items is None:
            self._keep(Tape(messages, LogRef(self._origin, log), start))
        else:
            tape.items.extend(messages[tape.end - start :])

    def span(self, log: int | str, start: int, stop: int) -> Span:
        for tape in self._tapes.get(log, ()):
            if tape.base <= start and stop <= tape.end:
                return Span(tape, start, stop)
        return Span(self._unread.setdefault(log, Tape(None, LogRef(self._origin, log))), start, stop)


def check_row(body: bytes, crc: int, session_id: str | None, position: str, *place: int) -> None:
    """Raise CorruptRecord unless a row matches its checksum."""
    try:
        matches = checksum(body, *place) == crc
    except TypeError:  # damage can change a column's type, too
        matches = False
    if not matches:
        raise CorruptRecord(session_id, position, "its checksum does not match")


def decode_row(body: bytes, session_id: str | None, position: str) -> Message:
    try:
        return codec.decode_message(body)
    except InvalidData as error:
        raise CorruptRecord(session_id, position, str(error)) from None


def foreign_stretches(session: AgentSession, own: LogRef) -> set[Stretch]:
    """The stretches of other sessions' logs that a settled session names, covered ones too."""
    found: set[Stretch] = set()
    for transcript in transcripts_of(session.state):
        for span in every_span(transcript.pieces):
            if span.tape.ref != own:
                assert span.tape.ref is not None
                found.add((span.tape.ref.key, span.start, span.stop))
    return found


def another_session(session: AgentSession) -> SessionConflict:
    """The session in the store has this one's id and version, and is another: created at another time."""
    return SessionConflict(
        session.id,
        session.version,
        session.version,
        f"Session {session.id!r} has been erased and created anew since this one was loaded. Nothing was saved. "
        "Load it again and repeat the action, or create this one under another id.",
    )


def runs_in(
    entries: Iterable[JournalEntry],
    stretch_of: Callable[[str], tuple[LogRef, int, int]],
    *,
    limit: int | None = None,
    before: int | None = None,
    run: str | None = None,
) -> list[RunOnRecord]:
    """The runs in a record that is read whole, for stores that keep no index of them."""
    ends: dict[str, tuple[JournalEntry, JournalEntry]] = {}
    for entry in entries:
        if entry.run is not None and run in (None, entry.run):
            ends[entry.run] = (ends.get(entry.run, (entry, entry))[0], entry)
    asked = [(loop, first, last) for loop, (first, last) in ends.items() if before is None or first.seq < before]
    chosen = asked if limit is None else asked[max(0, len(asked) - limit) :]
    return [RunOnRecord(loop, first, last, *stretch_of(loop)) for loop, first, last in chosen]
