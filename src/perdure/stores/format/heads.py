"""Heads: a head is one version of a session. It names large parts, and parts that many heads share, by hash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionState, ExecutionStatus
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentContext, AgentState
from perdure.model.tool_refs import dehydrated, hydrated
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, Value
from perdure.protocols import SessionHead
from perdure.stores.cache import LRU, CachedSession, StoredMetadata
from perdure.stores.format.blocks import BlocksApart, BlocksAtHand, names_in, stored_name
from perdure.stores.format.metadata import apart_in, parts_of, put_together, stored_metadata
from perdure.stores.format.packing import unpack
from perdure.stores.format.rows import Namer, Stretch, Values, check_row, hash_of
from perdure.stores.format.settled import Settled

INLINE = 256
INLINE_RUN = 2048
"""The most bytes of a run that is written into the first head with it. Later heads, and longer runs, name it by hash.
Most runs are in one head alone, and a row of their own with its indexes takes four pages more."""
# A prefix of pieces ends at a multiple of this, so that a growing transcript names the same prefix again.
PREFIX = 32
FORMAT = 3
"""The newest format of a head: it has values of the metadata that are stored apart. A head without any is in the second
format if it names a block. Otherwise it is in the first, which every release reads."""
_WITH_BLOCKS = 2
_BLOCK = "block "
"""The beginning of the names of blocks in `hashed`. A number follows."""


class Head(Value, frozen=True):
    """One version of a session, as it is stored. `hashed` names a part over INLINE bytes, or a run over INLINE_RUN.

    It also names large values of the metadata, and the blocks of its views, which may name further blocks.
    """

    info: AgentSessionInfo
    definition: str
    state: msgspec.Raw
    op: str
    parts: dict[str, msgspec.Raw] = {}
    hashed: dict[str, str] = {}
    format: int = codec.FORMAT


class _NewHead(Value, frozen=True):
    """A head about to be written: a `Head` whose state is not in bytes yet."""

    info: AgentSessionInfo
    definition: str
    state: AgentState
    op: str
    parts: dict[str, msgspec.Raw] = {}
    hashed: dict[str, str] = {}
    format: int = codec.FORMAT


class _InfoOfHead(msgspec.Struct, frozen=True):
    info: AgentSessionInfo
    format: int = codec.FORMAT


class _RanState(msgspec.Struct, frozen=True):
    """The part of a state that tells whether its session has run."""

    execution_count: int = 0


class Ran(msgspec.Struct, frozen=True):
    """The part of a run that names it, and tells whether it continues."""

    execution_id: str
    status: str = ""

    @property
    def is_waiting(self) -> bool:
        """True if the run waits for a person, and continues then."""
        return self.status == ExecutionStatus.IN_PROGRESS


class _SpawnedInfo(msgspec.Struct, frozen=True):
    spawn_ref: Any = None


class _SpawnedHead(msgspec.Struct, frozen=True):
    """The part of a head that tells whether its session is a sub-agent's."""

    info: _SpawnedInfo


def encode_head(
    session: AgentSession,
    op: str,
    *,
    tells_of_new_run: bool = False,
    at_hand: CachedSession | None = None,
    name_of: Namer = hash_of,
) -> tuple[bytes, Values, StoredMetadata | None]:
    """Return the head of a settled session, the values that it names, and its metadata.

    The version at hand has to be in the store: large values of the metadata that are the same there are left out.
    """
    blocks = BlocksApart(name_of)
    inline_run = INLINE_RUN if tells_of_new_run else INLINE
    values: Values = {}
    parts: dict[str, msgspec.Raw] = {}
    hashed: dict[str, str] = {}
    metadata = None
    if session.state.context.metadata:
        metadata, values = stored_metadata(session.state.context.metadata, at_hand, name_of)
        if metadata.apart:
            hashed = parts_of(metadata.apart)
    for name, raw in _parts_of(session, metadata, blocks):
        if len(raw) > (inline_run if name == "execution" else INLINE) and name != "transcript":
            hashed[name] = key = name_of(raw)
            values[key] = raw
        else:
            parts[name] = msgspec.Raw(raw)
    named = blocks.names()
    if named:
        hashed |= numbered(named)
        values |= blocks.values()
    definition, raw = _definition_stored(session.definition, name_of)
    values[definition] = raw
    format = _WITH_BLOCKS if named else codec.FORMAT
    if metadata is not None and metadata.apart:
        format = FORMAT
    head = _NewHead(session.info, definition, _slim(session.state), op, parts, hashed, format)
    # One call checks and encodes a head in which nothing is wrong. Otherwise the slow way finds what it is.
    body = None if session.unknown else codec.encode_if_sound(head)
    return body or _joined_head(head, session.unknown), values, metadata


def _joined_head(head: _NewHead, unknown: Mapping[str, Any]) -> bytes:
    """Return the bytes of a head, joined from parts that are checked one by one. They are read as a `Head`."""
    if unknown:
        codec.encode_json(unknown)
    format = None if head.format == codec.FORMAT else head.format
    optional = {"parts": head.parts, "hashed": head.hashed, "format": format}
    return codec.join(
        {
            **unknown,
            "info": msgspec.Raw(codec.encode(head.info)),
            "definition": head.definition,
            "state": msgspec.Raw(codec.encode(head.state, stored_name)),
            "op": head.op,
            **{name: part for name, part in optional.items() if part},
        }
    )


def numbered(blocks: Iterable[str]) -> dict[str, str]:
    """Return the blocks that a head's views name, as entries of its `hashed`."""
    return {f"{_BLOCK}{number}": name for number, name in enumerate(blocks, 1)}


def is_block(part: str) -> bool:
    """Tell whether a name in `hashed` is that of a block."""
    return part.startswith(_BLOCK)


# By identity, since to hash a definition is to walk through all of it. An entry keeps its definition, and so the id.
_definitions: LRU[tuple[int, Namer], tuple[AgentDefinition, str, bytes]] = LRU(256)


def _definition_stored(definition: AgentDefinition, name_of: Namer) -> tuple[str, bytes]:
    """Return a definition's name and bytes. They are cached, since every save of every session names a definition."""
    key = (id(definition), name_of)
    kept = _definitions.get(key)
    if kept is None or kept[0] is not definition:
        raw = codec.encode(definition)
        kept = (definition, name_of(raw), raw)
        _definitions.keep(key, kept)
    return kept[1:]


_BLANK = AgentState()


def _slim(state: AgentState) -> AgentState:
    """Return the state without the parts that are stored by themselves.

    A blank context has to be the default object itself, or else the encoder would not leave it out.
    """
    unknown = state.context.unknown
    return replace(state, context=AgentContext(unknown=unknown) if unknown else _BLANK.context, execution=None)


def _parts_of(session: AgentSession, metadata: StoredMetadata | None, blocks: BlocksApart) -> list[tuple[str, bytes]]:
    state, context = session.state, session.state.context
    parts = [*_parts_of_view(context.transcript, blocks)]
    if metadata is not None:
        parts.append(("metadata", metadata.rest))
    if context.system_prompt != session.definition.system_prompt:
        parts.append(("system_prompt", codec.encode(context.system_prompt)))
    if context.response_format is not None:
        codec.check_json(context.response_format, "$.state.response_format")
        parts.append(("response_format", codec.encode(context.response_format)))
    if state.execution is not None:
        parts.append(("execution", codec.encode(dehydrated(state.execution), stored_name, blocks.dump)))
    return parts


def _parts_of_view(view: Transcript, blocks: BlocksApart) -> tuple[tuple[str, bytes], ...]:
    known = view.found if isinstance(view.found, Settled) else None
    if known is not None and known.parts is not None:
        return known.parts
    pieces = joined(codec.dump_pieces(view.pieces, stored_name, blocks.dump))
    kept = prefix_length(pieces)
    given = {"prefix": pieces[:kept], "transcript": pieces[kept:]}
    parts = tuple((name, msgspec.json.encode(some)) for name, some in given.items() if some)
    if known is not None:
        known.parts = parts
    return parts


def prefix_length(pieces: list[Any]) -> int:
    """Return the number of stored pieces that go into a part of their own, as they do not change from save to save."""
    if len(pieces) == 1 and type(pieces[0]) is list:
        return 0
    return max(len(pieces) - len(pieces) % PREFIX if len(pieces) > PREFIX else 0, _end_of_blocks(pieces))


def _end_of_blocks(pieces: list[Any]) -> int:
    """Return the place after the last block if the blocks are large, since they do not change from save to save."""
    end = max((place for place, piece in enumerate(pieces, 1) if isinstance(piece, dict | msgspec.Raw)), default=0)
    return end if end and len(msgspec.json.encode(pieces[:end])) > 2 * INLINE else 0


def joined(pieces: Iterable[Any]) -> list[Any]:
    """Return stored pieces, with neighbours in one log joined. So a head has the same form in every store."""
    found: list[Any] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, list) and isinstance(last, list) and last[0] == piece[0] and last[2] == piece[1]:
            last[2] = piece[2]
        else:
            found.append(piece)
    return found


class StoredHead:
    """A head that was read, from which the session is rebuilt."""

    def __init__(self, raw: bytes, session_id: str, version: int) -> None:
        self.raw = raw
        self._where = (session_id, f"head {version}")
        self._named: dict[str, list[str]] = {}
        try:
            self.head = codec.decode(Head, raw)
            codec.check_format(self.head.format, FORMAT)
        except InvalidData as error:
            raise CorruptRecord(*self._where, str(error)) from None
        found = self.head.info
        if (found.id, found.version) != (session_id, version):
            raise CorruptRecord(*self._where, f"it is head {found.version} of session {found.id!r}")

    def hashes(self, values: Mapping[str, bytes] = EMPTY) -> list[str]:
        """Return the values that the session is made of, as far as those at hand tell. Blocks name further ones."""
        found = dict.fromkeys([self.head.definition, *self.head.hashed.values()])
        todo = [key for part, key in self.head.hashed.items() if is_block(part)]
        while todo:
            key = todo.pop()
            inner = [each for each in self._named_by(key, values) if each not in found]
            found |= dict.fromkeys(inner)
            todo += inner
        return list(found)

    def _named_by(self, key: str, values: Mapping[str, bytes]) -> list[str]:
        if key in values and key not in self._named:
            try:
                self._named[key] = names_in(codec.decode_plain(values[key]))
            except InvalidData as error:
                raise CorruptRecord(self._where[0], f"value {key}", str(error)) from None
        return self._named.get(key, [])

    def wanted(self, values: Mapping[str, bytes], last: int | None = None) -> list[Stretch]:
        """Return the stretches of logs that the session shows: its view or the end of it, and its last run's output."""
        with self._damage():
            found = [*_shown(self._pieces(values), values)]
            if last is not None:
                found = _end_of(found, last)
            execution = self._part("execution", values)
            if execution is not None:
                found += _outputs(codec.decode_plain(execution), values)
        return found

    def unread(self, values: Mapping[str, bytes]) -> list[str]:
        """Return the missing values without which the messages of the view are not known.

        The pieces of a long view have to be read before it is known which blocks are among them.
        """
        prefix = self.head.hashed.get("prefix")
        if prefix is not None and prefix not in values:
            return [prefix]
        with self._damage():
            return [piece for piece in self._pieces(values) if isinstance(piece, str) and piece not in values]

    def run(self, values: Mapping[str, bytes]) -> Ran | None:
        """Return the run that is in this version, or None."""
        with self._damage():
            execution = self._part("execution", values)
            return None if execution is None else msgspec.json.decode(execution, type=Ran)

    def shown(self, values: Mapping[str, bytes]) -> list[Stretch]:
        """Return the stretches of logs that the view shows."""
        with self._damage():
            return [*_shown(self._pieces(values), values)]

    def named_beside_view(self) -> list[str]:
        """Return the names of the values that the definition and the metadata are made of."""
        whole = (key for part, key in self.head.hashed.items() if part == "metadata")
        return [self.head.definition, *whole, *self.apart.values()]

    @property
    def apart(self) -> dict[str, str]:
        """The names of the values of the metadata that are stored apart, by their keys."""
        return apart_in(self.head.hashed)

    def stored_metadata(self, values: Mapping[str, bytes]) -> StoredMetadata | None:
        """Return the metadata as the head has it; None if the session has none."""
        rest = self._part("metadata", values)
        return None if rest is None else StoredMetadata(rest, self.apart)

    def metadata(self, values: Mapping[str, bytes]) -> Mapping[str, Any]:
        with self._damage():
            found = self._decoded("metadata", values, EMPTY)
            if not isinstance(found, Mapping):
                raise InvalidData("$.metadata", "it is not an object")
            return put_together(found, self.apart, values)

    def without_view(
        self, values: Mapping[str, bytes], definitions: MutableMapping[str, AgentDefinition]
    ) -> SessionHead:
        """Return the session without its view. Definitions that are decoded are added to those at hand."""
        key = self.head.definition
        with self._damage():
            if key not in definitions:
                definitions[key] = codec.decode(AgentDefinition, values[key])
        return SessionHead(self.head.info, definitions[key], self.metadata(values))

    @property
    def usage(self) -> Usage | None:
        """The usage of all runs of the session so far; None if an older release did not count it."""
        with self._damage():
            ran = msgspec.json.decode(self.head.state, type=_RanState).execution_count
        return Usage() if self.head.info.usage is None and not ran else self.head.info.usage

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Raise CorruptRecord for any error in the data of a head."""
        # Plain values are walked here without a check of their types, so damage shows as any of these errors.
        try:
            yield
        except (InvalidData, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptRecord(*self._where, str(error)) from None

    def session(
        self, values: Mapping[str, bytes], span_of: codec.SpanOf, definition: AgentDefinition | None = None
    ) -> AgentSession:
        block_of = BlocksAtHand(values, span_of)
        try:
            if definition is None:
                definition = codec.decode(AgentDefinition, values[self.head.definition])
            state = codec.decode(AgentState, bytes(self.head.state), span_of)
            context = replace(
                state.context,
                transcript=Transcript(codec.load_pieces(self._pieces(values), span_of, block_of)),
                metadata=self.metadata(values),
                system_prompt=self._decoded("system_prompt", values, definition.system_prompt),
                response_format=self._decoded("response_format", values, None),
            )
            execution = self._part("execution", values)
            run = None if execution is None else hydrated(codec.decode(ExecutionState, execution, span_of, block_of))
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


def unpacked_head(body: bytes, crc: int | None, session_id: str, sid: int, version: int) -> bytes:
    """Return a head's JSON. Raise CorruptRecord unless its row is what was written."""
    where = f"head {version}"
    check_row(body, crc, session_id, where, sid, version)
    try:
        return unpack(body)
    except InvalidData as error:
        raise CorruptRecord(session_id, where, str(error)) from None


def decode_info(raw: bytes, session_id: str, version: int) -> AgentSessionInfo:
    """Return the header in a head, without the rest of it."""
    try:
        return codec.decode(_InfoOfHead, raw).info
    except InvalidData as error:
        raise CorruptRecord(session_id, f"head {version}", str(error)) from None


def was_spawned(body: bytes | None) -> int:
    """Return 1 if a stored head belongs to a sub-agent's session; 0 if not, or if it is damaged."""
    try:
        info = msgspec.json.decode(unpack(body or b""), type=_SpawnedHead).info
    except (InvalidData, msgspec.MsgspecError, UnicodeDecodeError):
        return 0
    return int(info.spawn_ref is not None)


def _shown(pieces: Iterable[Any], values: Mapping[str, bytes]) -> Iterator[Stretch]:
    for piece in pieces:
        if isinstance(piece, Mapping):
            yield from _shown(piece["shown"], values)
        elif isinstance(piece, str):
            yield from _shown(codec.decode_plain(values[piece])["shown"], {})
        else:
            log, start, stop = piece
            yield log, start, stop


def _end_of(stretches: list[Stretch], last: int) -> list[Stretch]:
    """Return the end of a view: stretches with `last` messages."""
    found: list[Stretch] = []
    for log, start, stop in reversed(stretches):
        if last <= 0:
            break
        found.append((log, max(start, stop - last), stop))
        last -= stop - start
    return found[::-1]


def _outputs(execution: Mapping[str, Any], values: Mapping[str, bytes]) -> Iterator[Stretch]:
    for done in execution.get("step_executions", ()):
        yield from _shown(done["step"]["output_messages"], values)
    if execution.get("current_step"):
        yield from _shown(execution["current_step"]["output_messages"], values)
