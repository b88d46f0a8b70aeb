"""Applies redactors to all texts of a value: a message, an event, a session, an item of an inbox.

The model is sent what is stored, so a text is redacted once, where it comes in. The store that a connection writes to
does it again for everything (see `stores.redacting`): what was missed before is not stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from operator import is_
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from perdure.errors import ConfigurationError, InvalidData, RedactionFailed
from perdure.model.checks import expect_several
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionBudget
from perdure.model.message import REDACTIONS, Media, Message, Text, Thinking
from perdure.model.step import InferenceResponse
from perdure.model.transcript import Block, Span, Tape, Transcript
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, ErrorRecord, FrozenDict, FrozenList, kind_of, plain_text
from perdure.redaction.redactors import Redactor, failures_of
from perdure.redaction.streams import Stream, TextStream, WholeText

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
TextFunction = Callable[[str], str]
Counts = dict[str, int]
WITHHELD = "[withheld: a redactor has failed]"
"""The text in place of an error's text that could not be redacted."""
_MOST_KNOWN = 2_000
_MOST_CHARACTERS = 1_000_000
_MOST_DEFINITIONS = 64
_SMALLEST_NUMBER = 10**12
"""Smaller numbers are not searched: with fewer digits, they are not card numbers."""
_TEXTUAL = re.compile(r"text/|application/(json|xml|yaml|toml)\b|[^;]+\+(json|xml|yaml)\b", re.IGNORECASE)
"""The types of files whose bytes are a text."""


class Redaction:
    """The redactors of `connect(redact=…)`. It keeps nothing of what they have taken out of a text."""

    def __init__(self, redactors: Sequence[Redactor | TextFunction]) -> None:
        self._redactors = tuple(each if isinstance(each, Redactor) else _Function(each) for each in redactors)
        self._known: set[str] = set()
        """Texts as redactors have left them. One that comes again is not searched again."""
        self._characters = 0
        self.definitions: dict[int, AgentDefinition] = {}
        """Definitions that were searched, by their ids in memory."""

    @classmethod
    def of(cls, given: Iterable[Redactor | TextFunction] | Redaction | None) -> Redaction | None:
        """Return the redaction with these redactors; None without any. Raise ConfigurationError for anything else."""
        if given is None or isinstance(given, Redaction):
            return given
        redactors = expect_several(given, "$.redact")
        for place, each in enumerate(redactors):
            if isinstance(each, type) or not (isinstance(each, Redactor) or callable(each)):
                raise ConfigurationError(
                    f"redact[{place}] is {kind_of(each)}. Give a Redactor, or a function from text to text; "
                    "perdure.redactors.DEFAULT has several."
                )
        return cls(redactors) if redactors else None

    def text(self, text: str, counts: Counts | None = None) -> str:
        """Return a text without what redactors find in it. Raise RedactionFailed if one of them fails."""
        if text in self._known or text == WITHHELD or _is_id(text):
            return text
        for each in self._redactors:
            with failures_of(each):
                text, count = each.apply(text)
            if count and counts is not None:
                counts[each.name] = counts.get(each.name, 0) + count
        self._remember(text)
        return text

    def is_known(self, text: str) -> bool:
        """Tell whether a text is known to have nothing in it that redactors would replace."""
        return text in self._known

    def learn(self, text: str) -> None:
        """Remember a text that a stream has redacted as a whole."""
        if text not in self._known:
            self._remember(text)

    def _remember(self, text: str) -> None:
        self._characters += len(text)
        if len(self._known) >= _MOST_KNOWN or self._characters > _MOST_CHARACTERS:
            # Emptied at once: it is only a cache.
            self._known, self._characters = set(), len(text)
        self._known.add(text)

    def may_touch(self, json: str) -> bool:
        """Tell whether a redactor may find something in the texts of a JSON document."""
        return any(each.may_be_in(json) for each in self._redactors)

    def stream(self) -> Stream:
        """Return a stream, which redacts one text in pieces."""
        return Stream([(WholeText if isinstance(each, _Function) else TextStream)(each) for each in self._redactors])

    def message(self, message: Message) -> Message:
        """Return a message without what redactors find in it. Its metadata says how often each found something."""
        if len(message.parts) == 1 and type(message.parts[0]) is Text and not message.metadata:
            part, counts = message.parts[0], Counts()
            text = self.text(part.text, counts)
            return message if text == part.text else replace(message, **_counted(message, (Text(text),), counts))
        return _Walk(self).message(message)

    def messages(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        return tuple(map(self.message, messages))

    def value(self, value: T) -> T:
        """Return a value with all its texts redacted, however deep. It is itself if there is nothing to redact.

        Ids and names stay.
        """
        walked: T = _Walk(self).value(value)
        return walked

    def counted(self, value: T) -> tuple[T, dict[str, int]]:
        """Return the same, and how often each redactor has replaced something."""
        walked: T = _Walk(self, counts := Counts()).value(value)
        return walked, counts

    def error(self, error: ErrorRecord) -> ErrorRecord:
        """Return an error for the record. What a redactor fails on is withheld: a run has to be able to end."""
        try:
            return self.value(error)
        except RedactionFailed:
            return replace(error, message=WITHHELD, traceback=None)

    def told(self, text: str) -> str:
        """Return a text for listeners. It is withheld if a redactor fails on it."""
        try:
            return self.text(text)
        except RedactionFailed:
            return WITHHELD

    def heard(self, event: Any) -> Any:
        """Return an event for listeners. A text that a redactor fails on is withheld."""
        try:
            return self.value(event)
        except RedactionFailed:
            changes = {name: WITHHELD for name in ("error", "reason") if isinstance(getattr(event, name, None), str)}
            if not changes:
                raise
            return replace(event, **changes)

    def refuse(self, name: str | None, path: str) -> None:
        """Raise InvalidData if a redactor finds something in a name: the thing could not be found under another."""
        if name is not None and self.text(plain_text(name)) != name:
            raise InvalidData(path, "a redactor finds a secret in it, and names are stored as they are; use another")


class _Function(Redactor):
    """A caller's function over texts. How much of a text it needs is not known, so it is given whole texts only."""

    def __init__(self, function: TextFunction) -> None:
        # A pattern that matches nothing: only the function finds something.
        super().__init__(getattr(function, "__name__", type(function).__name__), "(?!)")
        self._function = function

    def apply(self, text: str) -> tuple[str, int]:
        made = self._function(text)
        if not isinstance(made, str):
            raise RedactionFailed(self.name, f"returned {kind_of(made)}, not a str")
        return plain_text(made), int(made != text)


def _is_id(text: str) -> bool:
    """Tell whether a text has the form of our ids. These are in most values, and must stay for references to hold."""
    return len(text) == 36 and text[8] == text[13] == text[18] == text[23] == "-" and text.isascii() and _is_hex(text)


def _is_hex(text: str) -> bool:
    return not text.translate(_HEX)


_HEX = {ord(each): None for each in "0123456789abcdef-"}
_FIELDS = """
id session_id loop_id agent_id execution_id step_id message_id message_ids call_id parent_loop_id parent_id
parent_agent_id parent_session_id tool_call_id child_session_id loop_ids run key posted digest hash signature
media_type provider role status owner tags agent_name format response_id config spawn_ref child children lineage
adopted log logs by takes_back approved answered call at kind type source redactions
"""
_NAMES = frozenset(_FIELDS.split())
"""Fields of values that name something. Nothing that was said is in them."""
_SAID = {("ToolExecution", "call"), ("ToolExecutionStart", "call")}
_NAMED = {("AgentDefinition", "name"), ("ModelConfig", "name"), ("ExternalToolSpec", "name"), ("AgentEnd", "messages")}
"""Fields of these values that name something, and messages that were redacted when they were told."""
_TAGS = frozenset(("agent_id", "execution_id", "step_id", "is_trace", "incomplete", "superseded", REDACTIONS))
"""The keys that runs put into the metadata of messages."""
_SKIPPED = frozenset({int, float, bool, bytes, datetime, type(None), Usage, ExecutionBudget, InferenceResponse})
"""Kinds of values without texts that were said."""


@cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the fields of a kind of value that may hold texts."""
    names = [(kind.__name__, field) for field in kind.__struct_fields__]
    return tuple(each[1] for each in names if each in _SAID or (each[1] not in _NAMES and each not in _NAMED))


class _Walk:
    """One walk through a value. What is unchanged is returned itself: nothing is copied in vain."""

    def __init__(self, redaction: Redaction, counts: Counts | None = None) -> None:
        self._redaction = redaction
        self._counts = counts
        self._tapes: dict[int, Tape] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            return self._redaction.text(value, self._counts)
        if kind in _SKIPPED:
            return value if kind is not int or -_SMALLEST_NUMBER < value < _SMALLEST_NUMBER else self._number(value)
        if kind is Message:
            return self.message(value)
        if kind is Media:
            return self._media(value)
        if isinstance(value, msgspec.Struct):
            return self._definition(value) if isinstance(value, AgentDefinition) else self._struct(value)
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            return self._several(value)
        if kind is Transcript:
            return self._transcript(value)
        return self._mapping(value) if isinstance(value, Mapping) else value

    def _number(self, value: int) -> Any:
        text = str(value)
        made = self._redaction.text(text, self._counts)
        return value if made == text else made

    def message(self, message: Message) -> Message:
        first = message.parts[0] if len(message.parts) == 1 else None
        if type(first) is Text and message.metadata.keys() <= _TAGS and self._redaction.is_known(first.text):
            return message
        walk = _Walk(self._redaction, counts := Counts())
        parts = walk._several(message.parts)
        metadata = message.metadata
        if not metadata.keys() <= _TAGS:
            metadata = walk._mapping(metadata)
        if parts is message.parts and metadata is message.metadata:
            return message
        return replace(message, **_counted(replace(message, metadata=metadata), parts, counts))

    def _definition(self, value: AgentDefinition) -> AgentDefinition:
        """Return a definition, redacted. It is the same in all versions of a session, and is searched once."""
        known = self._redaction.definitions
        if known.get(id(value)) is value:
            return value
        made = self._struct(value)
        if len(known) >= _MOST_DEFINITIONS:
            known.clear()
        known[id(made)] = made  # with the object itself: while it is kept here, no other has its id
        return made

    def _struct(self, value: S) -> S:
        changes = {}
        for name in _fields_of(type(value)):
            was = getattr(value, name)
            if was is None or was is EMPTY or was == ():
                continue
            made = self.value(was)
            if made is not was:
                changes[name] = made
        if not changes:
            return value
        if type(value) is Thinking:
            changes["signature"] = None  # the signature is of the text as it was
        return replace(value, **changes)

    def _media(self, value: Media) -> Media:
        """Return a file, redacted. Its bytes are searched if they are a text in UTF-8."""
        made = self._struct(value)
        if value.data is None or not _TEXTUAL.match(value.media_type):
            return made
        try:
            text = value.data.decode()
        except UnicodeDecodeError:
            return made
        redacted = self._redaction.text(text, self._counts)
        return made if redacted == text else replace(made, data=redacted.encode())

    def _mapping(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        made: dict[str, Any] = {}
        is_same = True
        for key, each in value.items():
            name = self._redaction.text(key, self._counts) if type(key) is str else key
            # Two keys may become one text, and the value of neither must be lost.
            while name is not key and name in made:
                name += "'"
            made[name] = self.value(each)
            is_same = is_same and name == key and made[name] is each
        if is_same:
            return value
        return FrozenDict(made) if type(value) is FrozenDict else made

    def _several(self, value: Any) -> Any:
        made = [self.value(each) for each in value]
        if all(map(is_, made, value)):
            return value
        if type(value) is FrozenList:
            return FrozenList(made)
        return tuple(made) if isinstance(value, tuple) else made

    def _transcript(self, view: Transcript) -> Transcript:
        pieces = self._pieces(view.pieces)
        return view if pieces is view.pieces else Transcript(pieces)

    def _pieces(self, pieces: tuple[Any, ...]) -> tuple[Any, ...]:
        made = tuple([self._piece(each) for each in pieces])
        return pieces if all(map(is_, made, pieces)) else made

    def _piece(self, piece: Any) -> Any:
        if isinstance(piece, Block):
            covered, shown = self._pieces(piece.covered), self._pieces(piece.shown)
            is_same = covered is piece.covered and shown is piece.shown
            return piece if is_same else replace(piece, covered=covered, shown=shown)
        tape = piece.tape
        # What a store has was redacted when it was written, or written before redaction was asked for.
        if tape.ref is not None or tape.items is None:
            return piece
        found = self._tapes.get(id(tape))
        if found is None:
            items = self._several(tape.items)
            found = self._tapes[id(tape)] = tape if items is tape.items else Tape(items, None, tape.base)
        return piece if found is tape else Span(found, piece.start, piece.stop)


def _counted(message: Message, parts: tuple[Any, ...], counts: Counts) -> dict[str, Any]:
    """Return the changes of a message: its parts, and its metadata with how often something was replaced."""
    before = message.metadata.get(REDACTIONS)
    total: dict[str, Any] = dict(before) if isinstance(before, Mapping) else {}
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count
    return {"parts": parts, "metadata": {**message.metadata, REDACTIONS: total}}
