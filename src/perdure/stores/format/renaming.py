"""Heads with other names for their logs, for a move between stores. No message is read, and no session is rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionState
from perdure.model.session import AgentSessionInfo
from perdure.model.state import AgentState
from perdure.stores.format.blocks import BlocksAtHand, names_in
from perdure.stores.format.heads import INLINE, StoredHead, is_block, joined, numbered, prefix_length
from perdure.stores.format.rows import Namer, Values, hash_of

Rename = Callable[[int | str, int, int], int | str]
"""A function from a stretch of a log to the log's other name."""
_IN_ORDER = ("prefix", "transcript", "metadata", "system_prompt", "response_format", "execution")
_BY_HASH = ("op", "parts", "hashed")


class OpenHead:
    """A stored head, and all values that it names by hash."""

    def __init__(self, raw: bytes, stored: StoredHead, values: Mapping[str, bytes]) -> None:
        head = stored.head
        self.info: AgentSessionInfo = head.info
        self._where = (head.info.id, f"head {head.info.version}")
        self._plain: dict[str, Any] = codec.decode_plain(raw)
        self._values = values
        self._definition = values[head.definition]
        self._parts = {name: bytes(part) for name, part in head.parts.items()}
        self._parts |= {name: values[key] for name, key in head.hashed.items() if not is_block(name)}
        self._blocks = [key for name, key in head.hashed.items() if is_block(name)]

    def renamed(self, blocks: RenamedBlocks) -> tuple[bytes, Values]:
        """Return the same head over logs of other names, and the values that it names then.

        Values of blocks that earlier versions have named already are left out.
        """
        with _damage(*self._where):
            return self._renamed(blocks)

    def _renamed(self, blocks: RenamedBlocks) -> tuple[bytes, Values]:
        name_of = blocks.name_value
        values = {name_of(self._definition): self._definition}
        parts: dict[str, msgspec.Raw] = {}
        hashed: dict[str, str] = {}
        blocks.begin(self._values)
        renamed = {**self._parts, **self._renamed_parts(blocks)}
        for name in (*_IN_ORDER, *(each for each in self._parts if each not in _IN_ORDER)):
            raw = renamed.get(name)
            if raw is None:
                continue
            if len(raw) > INLINE and name != "transcript":
                hashed[name] = name_of(raw)
                values[hashed[name]] = raw
            else:
                parts[name] = msgspec.Raw(raw)
        hashed |= numbered(blocks.name_of(key) for key in self._blocks)
        values |= blocks.new
        head = {name: item for name, item in self._plain.items() if name not in _BY_HASH}
        if "definition" in head:
            head["definition"] = name_of(self._definition)
        head |= {"op": "", **({"parts": parts} if parts else {}), **({"hashed": hashed} if hashed else {})}
        return codec.join(head), values

    def _renamed_parts(self, blocks: RenamedBlocks) -> dict[str, bytes | None]:
        pieces = joined(blocks.pieces(self._pieces()))
        kept = prefix_length(pieces)
        made: dict[str, bytes | None] = {
            "prefix": msgspec.json.encode(pieces[:kept]) if kept else None,
            "transcript": msgspec.json.encode(pieces[kept:]) if pieces[kept:] else None,
        }
        if "execution" in self._parts:
            execution = codec.decode_plain(self._parts["execution"])
            for step in _steps(execution):
                for name in ("input_messages", "output_messages"):
                    if name in step:
                        step[name] = joined(blocks.pieces(step[name]))
            made["execution"] = msgspec.json.encode(execution)
        return made

    def _pieces(self) -> list[Any]:
        return [
            piece for name in ("prefix", "transcript") for piece in codec.decode_plain(self._parts.get(name, b"[]"))
        ]

    def check(self, span_of: codec.SpanOf, block_of: BlocksAtHand, definitions: dict[str, AgentDefinition]) -> None:
        """Raise CorruptRecord unless the whole head can be read. Known blocks and definitions are not read again."""
        with _damage(*self._where):
            key = self._plain["definition"]
            if key not in definitions:
                definitions[key] = codec.decode(AgentDefinition, self._definition)
            codec.decode(AgentState, msgspec.json.encode(self._plain["state"]), span_of)
            codec.load_pieces(self._pieces(), span_of, block_of)
            if "execution" in self._parts:
                codec.decode(ExecutionState, self._parts["execution"], span_of, block_of)
            for name in self._parts.keys() - {"prefix", "transcript", "execution"}:
                codec.decode_plain(self._parts[name])


@contextmanager
def _damage(session_id: str, where: str) -> Iterator[None]:
    """Raise CorruptRecord for any error in the data of a head."""
    try:
        yield
    except (InvalidData, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecord(session_id, where, str(error)) from None


def _steps(execution: Any) -> Iterator[Any]:
    for done in execution.get("step_executions", ()):
        yield done["step"]
    if execution.get("current_step"):
        yield execution["current_step"]


class RenamedBlocks:
    """Pieces over logs of other names, and the blocks that they name, whose names change as well.

    One object serves all versions of a session, so that a block that many of them show is renamed once.
    """

    def __init__(self, rename: Rename, name_of: Namer = hash_of) -> None:
        self.name_value = name_of
        """The function that names values. All of them get new names."""
        self.new: Values = {}
        """The values of the blocks that were renamed since `begin`."""
        self._rename = rename
        self._before: Mapping[str, bytes] = {}
        self._names: dict[str, str] = {}
        self._fresh: list[str] = []

    @property
    def met(self) -> Container[str]:
        """The blocks that have other names already."""
        return self._names.keys()

    def begin(self, values: Mapping[str, bytes]) -> None:
        """Begin with a version. Its blocks are among these values, except for those that were met before."""
        self.new, self._before, self._fresh = {}, values, []

    def take_back(self) -> None:
        """Forget the new names since `begin`, so that these blocks are renamed again."""
        for name in self._fresh:
            del self._names[name]

    def pieces(self, pieces: Iterable[Any]) -> list[Any]:
        return [self._piece(piece) for piece in pieces]

    def _piece(self, piece: Any) -> Any:
        """Return a piece over logs of other names."""
        # Blocks within a block are stored flat among what it covers, so this recursion has at most two levels.
        if isinstance(piece, str):
            return self.name_of(piece)
        if not isinstance(piece, dict):
            log, start, stop = piece
            return [self._rename(log, start, stop), start, stop]
        inside = {name: self.pieces(piece[name]) for name in ("covered", "shown") if name in piece}
        return {**piece, **inside}

    def name_of(self, block: str) -> str:
        """Return the other name of a block, made after those of all blocks within it."""
        todo, opened = [block], set[str]()
        while todo:
            if todo[-1] in self._names:
                todo.pop()
                continue
            plain = codec.decode_plain(self._before[todo[-1]])
            missing = [name for name in names_in(plain) if name not in self._names]
            if missing:
                if todo[-1] in opened:
                    raise ValueError("a block covers itself")
                opened.add(todo[-1])
                todo += missing
                continue
            raw = msgspec.json.encode(self._piece(plain))
            self._fresh.append(todo[-1])
            name = self._names[todo.pop()] = self.name_value(raw)
            self.new[name] = raw
        return self._names[block]
