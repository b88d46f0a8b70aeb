"""The traces of messages: the ids of their calls, runs and blocks, and their texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.model.message import CONTINUES
from perdure.protocols import Entry, JournalEntry

MARK = "redacted"
"""The key in a message's metadata for content that was replaced. It is also the kind of the entry that says so."""
IN_PART = "in part"
"""The value of that key if only what the message quoted of others was replaced."""

# A shorter text of a message is not searched for in other texts: it could be there by chance.
_SHORTEST = 8


class Traces:
    """The known traces of messages that are replaced. By these, everything that tells of the messages is found."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids: set[str] = set(ids)
        self.calls: set[str] = set()
        self.results: set[str] = set()
        self.runs: set[str] = set()
        self.blocks: set[str] = set()
        self.other_blocks: set[str] = set()
        self.secrets: set[str] = set()
        self.said: set[str] = set()
        """The texts of the messages, short ones too. They are compared with texts that are copies by their nature."""

    def learn(self, plain: Mapping[str, Any]) -> None:
        """Learn the traces of a message that will be replaced."""
        self.ids.add(plain["id"])
        for part in plain.get("parts", ()):
            if part.get("type") == "tool_call":
                self.calls.add(part["id"])
            elif part.get("type") == "tool_result":
                self.results.add(part["call_id"])
        run = plain.get("metadata", {}).get("execution_id")
        if isinstance(run, str):
            self.runs.add(run)
        if not is_replaced(plain):
            texts = {each for each in _texts(plain.get("parts", ())) if len(each.strip()) >= _SHORTEST}
            self.secrets |= {spelled for each in texts for spelled in _spellings(each)}
            said = (part.get("text") for part in plain.get("parts", ()) if part.get("type") == "text")
            self.said |= {each for each in said if isinstance(each, str) and each.strip()}

    def find_runs(self, entries: Iterable[Entry | JournalEntry]) -> None:
        """Find the runs that have put these messages on record."""
        for entry in entries:
            if entry.kind == "message_end" and entry.run and entry.body["message"]["id"] in self.ids:
                self.runs.add(entry.run)

    def made_by_unsaved(self, entries: Iterable[Entry | JournalEntry]) -> set[str]:
        """Return the ids of messages that were made by compactions with blocks that are in no version."""
        known = self.blocks | self.other_blocks
        told = [entry.body for entry in entries if entry.kind == "compaction"]
        shown = [part for body in told if body["block"]["id"] not in known for part in body.get("shown", ())]
        return {part["message"]["id"] for part in shown if part.get("message")}

    def tells(self, made: Mapping[str, Any]) -> bool:
        """Tell whether a message made for a block may tell of those replaced. With calls, it needs one of theirs."""
        parts = made.get("parts", ())
        calls = {part.get("id") for part in parts if part.get("type") == "tool_call"}
        calls |= {part.get("call_id") for part in parts if part.get("type") == "tool_result"}
        return not calls or bool(calls & (self.calls | self.results))

    def is_listed_in(self, note: Mapping[str, Any]) -> bool:
        """Tell whether a note lists the calls of a run that has made one of those replaced."""
        return note.get("metadata", {}).get(CONTINUES) in self.runs


def is_replaced(plain: Mapping[str, Any]) -> bool:
    """Tell whether a message's content has been replaced before."""
    return plain.get("metadata", {}).get(MARK) is True


def is_hidden(plain: Mapping[str, Any]) -> bool:
    """Tell whether a message has nothing but what a framework keeps for itself. None of it is ever shown."""
    parts = plain.get("parts", ())
    return bool(parts) and all(part.get("type") == ENVELOPE for part in parts)


def _spellings(text: str) -> tuple[str, ...]:
    """Return a text as it is, and as JSON spells it: arguments of calls are often JSON that is kept as a text."""
    return text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a message's parts, without the names and ids that stay."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        kind = value.get("type")
        if kind == ENVELOPE:
            return  # the names and marks of a framework: to replace them everywhere would break its items
        stays = {"tool_call": _CALL_KEEPS, "tool_result": _RESULT_KEEPS}.get(kind, _KEEPS) if kind else ()
        for key, each in value.items():
            if key not in stays:
                yield from _texts(each)


ENVELOPE = "envelope"
_KEEPS = ("type", "provider", "media_type")
_CALL_KEEPS = ("type", "name", "id", "provider")
_RESULT_KEEPS = ("type", "call_id", "name", "is_error")
