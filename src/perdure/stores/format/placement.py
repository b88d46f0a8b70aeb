"""The places of a session's messages in a store's logs, and the stretches of others' logs that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple

from msgspec.structs import replace

from perdure import codec
from perdure.errors import InvalidData, NotLoaded
from perdure.model.execution import ExecutionState
from perdure.model.message import Message, Text
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.step import AgentStep, StepExecution
from perdure.model.transcript import Block, LogRef, Piece, Span, Tape, Transcript
from perdure.protocols import NOTHING_WRITTEN, StoredAt
from perdure.stores import checked
from perdure.stores.format.blocks import is_known_in, stored, unsettled_spans
from perdure.stores.format.rows import Stretch
from perdure.stores.format.settled import Settled, settled_in

Slot = tuple[Tape, int]


class Placement:
    """The messages of a session that a store does not have yet, and their places once these are known."""

    def __init__(self, session: AgentSession, origin: str, written: Mapping[str, StoredAt] = NOTHING_WRITTEN) -> None:
        self._session = session
        self._origin = origin
        self._places: dict[Slot, StoredAt | None] = {}
        self._met: dict[Tape, tuple[int, int]] = {}
        """The last stretch of each tape that was met. Each step of a run shows the messages of earlier steps again."""
        self.new: list[bytes] = []
        self.new_messages: list[Message] = []
        self.attachments: list[tuple[int, codec.Attachment]] = []
        """The files that new messages name by their hash, each with its message's place among the new ones."""
        turn = self._turn_at_the_end() if not written else None
        self._is_one_turn = turn is not None
        if turn is not None:
            for message in turn.messages():
                self._add(message)
            return
        for transcript in transcripts_of(session.state):
            for span in unsettled_spans(transcript.pieces, origin) if settled_in(transcript, origin) is None else ():
                self._meet(span, written)

    @property
    def moves(self) -> bool:
        """True if any message gets a place in a log: a new one, or one that was written ahead."""
        return self._is_one_turn or bool(self._places)

    def _is_stored(self, span: Span) -> bool:
        return span.tape.ref is not None and span.tape.ref.origin == self._origin

    def _meet(self, span: Span, written: Mapping[str, StoredAt]) -> None:
        start, stop = self._met.get(span.tape, (0, 0))
        if start <= span.start and span.stop <= stop:
            return
        if span.tape.items is None:
            raise NotLoaded(f"log {span.tape.ref.key if span.tape.ref else '?'} of another store")
        self._met[span.tape] = span.start, span.stop
        for position, message in enumerate(span.messages(), start=span.start):
            slot = (span.tape, position)
            if slot in self._places:
                continue
            stored_at = written.get(message.id) if isinstance(message, Message) else None
            self._places[slot] = None if stored_at is None else checked.place(stored_at)
            if stored_at is None:
                self._add(message)

    def _add(self, message: Message) -> None:
        if not isinstance(message, Message):
            raise InvalidData("$.transcript", f"expected a Message, got {type(message).__name__}")
        # Most are one text, which is seen here: a call for each message would slow every save.
        if (len(message.parts) != 1 or type(message.parts[0]) is not Text) and codec.has_attachments(message):
            message, found = codec.detached(message)
            self.attachments += [(len(self.new), each) for each in found]
        raw, settled = codec.encode_settled(message)
        self.new.append(raw)
        self.new_messages.append(settled)

    def settle(self, log: LogRef, start: int) -> AgentSession:
        """Return the session with every message at its place in a log. New messages begin at `start`."""
        if not self.moves:
            return self._session
        home = Tape(self.new_messages, log, start)
        if self._is_one_turn:
            return self._with_turn(Span(home, start, start + len(self.new_messages)))
        places = self._written_places()
        for slot, place in self._places.items():
            if place is None:
                places[slot] = home, start
                start += 1
        moves = _moves_of(places)
        state = map_transcripts(self._session.state, lambda transcript: self._settled(transcript, moves))
        return replace(self._session, state=state)

    def _written_places(self) -> dict[Slot, Slot]:
        """Return the places of messages that were written ahead. Neighbours in a log are on one tape.

        So their spans can be joined. Otherwise each step of a run would name every message before it one by one.
        """
        written = [(place, slot) for slot, place in self._places.items() if place is not None]
        tapes: dict[LogRef, Tape] = {}
        places: dict[Slot, Slot] = {}
        for place, slot in sorted(written, key=lambda each: each[0].position):
            tape = tapes.get(place.log)
            if tape is None or place.position > tape.end:
                tape = tapes[place.log] = Tape([], place.log, place.position)
            if place.position == tape.end and tape.items is not None:  # else the same message, met on another tape
                tape.items.extend(map(_as_loaded, slot[0].read(slot[1], slot[1] + 1)))
            places[slot] = tape, place.position
        return places

    def _turn_at_the_end(self) -> Span | None:
        """Return the last piece of the transcript if it has all new messages, as after most actions; else None."""
        pieces = self._session.state.transcript.pieces
        if self._session.state.execution is not None or not pieces or not isinstance(pieces[-1], Span):
            return None
        turn = pieces[-1]
        if turn.tape.ref is not None or turn.tape.items is None:
            return None
        return turn if all(map(self._is_settled, pieces[:-1])) else None

    def _is_settled(self, piece: Piece) -> bool:
        """Tell whether a piece is known to be in the store as it is."""
        return self._is_stored(piece) if isinstance(piece, Span) else is_known_in(piece, self._origin)

    def _with_turn(self, turn: Span) -> AgentSession:
        state = self._session.state
        transcript = state.transcript.with_last(turn)
        return replace(self._session, state=replace(state, context=replace(state.context, transcript=transcript)))

    def _settled(self, transcript: Transcript, moves: Moves) -> Transcript:
        return Transcript(self._settled_pieces(transcript.pieces, moves))

    def _settled_pieces(self, pieces: Iterable[Piece], moves: Moves) -> Iterator[Piece]:
        """Return pieces with their messages in logs."""
        # No recursion: each compaction may cover the one before, deeper than Python's stack.
        settled: list[Piece] = []
        todo: list[tuple[Piece, int | None]] = [(piece, None) for piece in reversed(tuple(pieces))]
        while todo:
            piece, first = todo.pop()
            if isinstance(piece, Span):
                settled += self._settled_span(piece, moves)
            elif first is not None:
                settled[first:] = [self._settled_block(piece, settled[first:], moves)]
            elif self._is_settled(piece):
                settled.append(piece)
            else:
                todo.append((piece, len(settled)))
                todo += [(covered, None) for covered in reversed(piece.covered)]
        return iter(settled)

    def _settled_block(self, block: Block, covered: list[Piece], moves: Moves) -> Block:
        """Return a block with its messages in logs. If nothing in it has moved, it is the same object.

        So its stored form, which is kept on the object, need not be built again.
        """
        shown = [*chain.from_iterable(self._settled_span(span, moves) for span in block.shown)]
        if _are_same(covered, block.covered) and _are_same(shown, block.shown):
            return block
        return replace(block, covered=Transcript(covered).pieces, shown=Transcript(shown).pieces)

    def _settled_span(self, span: Span, moves: Moves) -> Iterable[Span]:
        if self._is_stored(span):
            return (span,)
        return [move.of(span) for move in moves[span.tape] if move.start < span.stop and span.start < move.stop]


class _Move(NamedTuple):
    """A stretch of a tape, from `start` to `stop`, that moves to position `at` of another tape."""

    start: int
    stop: int
    tape: Tape
    at: int

    def of(self, span: Span) -> Span:
        """Return the new place of a span, as far as it is in the stretch."""
        start, stop = max(self.start, span.start), min(self.stop, span.stop)
        return Span(self.tape, self.at + start - self.start, self.at + stop - self.start)


Moves = Mapping[Tape, Sequence[_Move]]


def _moves_of(places: Mapping[Slot, Slot]) -> Moves:
    """Return the moves of each tape's messages. Neighbours that stay neighbours move together, in one stretch.

    A run's steps show mostly the same messages, each step a few more. One by one, twenty steps would name 400.
    """
    moves: dict[Tape, list[_Move]] = {}
    for (tape, position), (home, at) in sorted(places.items(), key=lambda each: each[0][1]):
        known = moves.setdefault(tape, [])
        last = known[-1] if known else None
        if last is not None and (last.stop, last.tape, last.at + position - last.start) == (position, home, at):
            known[-1] = _Move(last.start, position + 1, home, last.at)
        else:
            known.append(_Move(position, position + 1, home, at))
    return moves


def _as_loaded(message: Message) -> Message:
    """Return a message that was written ahead in the form that every later load returns."""
    if (len(message.parts) != 1 or type(message.parts[0]) is not Text) and codec.has_attachments(message):
        message, _ = codec.detached(message)
    return codec.settled(message)


def _are_same(pieces: Sequence[Piece], others: Sequence[Piece]) -> bool:
    return len(pieces) == len(others) and all(map(is_, pieces, others))


def transcripts_of(state: AgentState) -> Iterator[Transcript]:
    """Yield the state's transcript, then the views that its execution's steps name."""
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
    """Tell whether all that a load would read is in memory: the view's messages, and the last run's output."""
    shown = [session.state.transcript, *(step.output_messages for step in _steps(session.state.execution))]
    return all(map(_is_view_at_hand, shown))


def has_end(view: Transcript, last: int) -> bool:
    """Tell whether the `last` messages of a view are in memory."""
    for span in reversed(tuple(view.spans())):
        if last <= 0:
            break
        if span.tape.items is None:
            return False
        last -= len(span)
    return True


def _is_view_at_hand(view: Transcript) -> bool:
    if isinstance(view.found, Settled) and view.found.is_at_hand:
        return True
    return all(span.tape.items is not None for span in view.spans())


def map_transcripts(state: AgentState, change: Callable[[Transcript], Transcript]) -> AgentState:
    """Return the state with every transcript in it changed. Times stay as they are."""
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


def foreign_stretches(session: AgentSession, own: LogRef) -> set[Stretch]:
    """Return the stretches of other sessions' logs that a settled session names, covered ones too."""
    found: set[Stretch] = set()
    for transcript in transcripts_of(session.state):
        settled = settled_in(transcript, own.origin)
        if settled is not None:
            found |= settled.others(own.key)
            continue
        for piece in transcript.pieces:
            if isinstance(piece, Span) and piece.tape.ref == own:
                continue  # as nearly all are
            for ref, start, stop in _named_by(piece):
                if ref != own:
                    found.add((ref.key, start, stop))
    return found


def own_named(session: AgentSession, own: LogRef) -> set[Stretch]:
    """Return the stretches of its own log that a settled session names, covered ones too."""
    named = (each for view in transcripts_of(session.state) for piece in view.pieces for each in _named_by(piece))
    return {(ref.key, start, stop) for ref, start, stop in named if ref == own}


def _named_by(piece: Piece) -> Iterator[tuple[LogRef, int, int]]:
    if isinstance(piece, Block):
        for ref, intervals in stored(piece).reach.items():
            yield from ((ref, start, stop) for start, stop in intervals)
    else:
        assert piece.tape.ref is not None
        yield piece.tape.ref, piece.start, piece.stop
