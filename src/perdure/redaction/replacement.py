"""The text that replaces messages, and how it is put into everything that tells of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from perdure.model.loop_events import KINDS
from perdure.protocols import SCHEDULE, Entry
from perdure.redaction.traces import ENVELOPE, IN_PART, MARK, Traces, is_replaced

DERIVED = "$derived"
"""The key in an object of a session's metadata that marks it as made from messages: it can be made again.

A redaction drops the whole object: it may quote any piece of them.
"""


class Replacement:
    """A text in place of messages, as far as their traces are known by then."""

    def __init__(self, text: str, traces: Traces) -> None:
        self._text = text
        self._traces = traces

    def message(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message without its content. Text, thoughts, files and opaque data together become one text.

        An envelope is removed. It leaves the text only if nothing else does.
        """
        parts: list[dict[str, Any]] = []
        is_said = False
        given = plain.get("parts", ())
        for part in [part for part in given if part.get("type") != ENVELOPE] or given:
            if part.get("type") == "tool_call":
                parts.append(self._call(part))
            elif part.get("type") == "tool_result":
                kept = {name: part[name] for name in ("type", "call_id", "name", "is_error") if name in part}
                parts.append({**kept, "content": self._text})
            elif not is_said:
                is_said = True
                parts.append({"type": "text", "text": self._text})
        kept = {name: plain[name] for name in ("format", "role", "id") if name in plain}
        tags = {**self.scrubbed(plain.get("metadata", {})), MARK: True}
        return {**kept, **({"parts": parts} if parts else {}), "metadata": tags}

    def hidden(self, plain: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a hidden message without what it quotes of the messages; None if it quotes nothing.

        A framework keeps copies there for itself, such as the last prompt. The rest of it stays.
        """
        parts = [{**part, "body": self._body(part.get("body"))} for part in plain["parts"]]
        if parts == plain["parts"]:
            return None
        tags = plain.get("metadata", {})
        return {**plain, "parts": parts, "metadata": {**tags, MARK: tags.get(MARK) or IN_PART}}

    def _body(self, body: Any) -> Any:
        """Return what an envelope keeps, without the quotes in it. It may be JSON as a text."""
        try:
            value = json.loads(body) if isinstance(body, str) else body
        except ValueError:
            return self._unquoted(body)
        changed = self._unquoted(value)
        if not isinstance(body, str):
            return changed
        # Compared as texts: NaN equals nothing.
        return body if _as_json(changed, body) == _as_json(value, body) else _as_json(changed, body)

    def _unquoted(self, value: Any) -> Any:
        """Return data without the texts that equal one of the messages', or quote one that is not short."""
        if isinstance(value, str):
            return self._text if value in self._traces.said else self.scrubbed(value)
        if isinstance(value, list):
            return [self._unquoted(each) for each in value]
        if isinstance(value, dict):
            return {key: self._unquoted(each) for key, each in value.items()}
        return value

    def execution(self, plain: Any) -> Any:
        """Return a run as a version has it, with what its steps tell of the messages replaced."""
        return self.walked(plain, is_touched=plain.get("execution_id") in self._traces.runs)

    def changed_entries(self, entries: Iterable[Entry]) -> dict[int, Entry]:
        changed: dict[int, Entry] = {}
        for place, entry in enumerate(entries):
            body = self._entry(entry)
            if body != entry.body:
                changed[place] = Entry(entry.kind, body, entry.run)
        return changed

    def item(self, item: Entry, *, is_repeated: bool = False) -> Entry:
        """Return an item of an inbox, or of a timer, without what it tells of the messages.

        The messages of a schedule have other ids each time. They are found by their text.
        """
        body = self._entry(item)
        if item.kind == "queue" and "messages" in body and (is_repeated or str(body.get("key")).startswith(SCHEDULE)):
            sent = [self.message(each) if self._repeats(each) else each for each in body["messages"]]
            body = {**body, "messages": sent}
        return Entry(item.kind, body, item.run)

    def _repeats(self, plain: Mapping[str, Any]) -> bool:
        texts = [part.get("text") for part in plain.get("parts", ()) if part.get("type") == "text"]
        return any(text in self._traces.said for text in texts)

    def _entry(self, entry: Entry) -> Any:
        if entry.kind not in _KNOWN:  # of any form: neither error nor message, even if it looks like one
            return self.scrubbed(entry.body)
        return self.told(entry.kind, entry.body, is_touched=entry.run in self._traces.runs)

    def told(self, kind: str, body: Any, *, is_touched: bool) -> Any:
        """Return what an event tells, with the messages and all that may tell of them replaced."""
        body = self.told_later(kind, body, is_touched=is_touched)
        if kind == "compaction":
            return self._compaction(body)
        if kind == "input_rejected":
            return {**body, "reason": self._text if is_touched else self.scrubbed(body["reason"])}
        return body

    def told_later(self, kind: str, body: Any, *, is_touched: bool = False) -> Any:
        """Return what an event after the redaction tells. Only what names the messages is replaced."""
        if kind == "unknown_event":
            return {**body, **({"body": self.scrubbed(body["body"])} if "body" in body else {})}
        body = self.walked(body, is_touched=is_touched)
        if kind == "agent_start" and body.get("answers"):
            return {**body, "answers": [self._answer(each) for each in body["answers"]]}
        if kind == "message_update" and _is_in(body.get("message_id"), self._traces.ids):
            return {**body, "text": self._text}
        if kind == "tool_execution_update" and _is_in(body.get("call_id"), self._traces.calls | self._traces.results):
            return {**body, "progress": self._text}
        return body

    def _compaction(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a compaction's event, changed if its block may cover a message: one in no version may cover any."""
        block = self.block(body["block"])
        if block is body["block"]:
            return body
        shown = [
            {**part, "message": self.message(part["message"])} if self._is_new(part) else part
            for part in body.get("shown", ())
        ]
        return {**body, "block": block, **({"shown": shown} if shown else {})}

    def block(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return a block without its summary; itself if it is known to cover none of the messages."""
        if plain["id"] in self._traces.other_blocks - self._traces.blocks:
            return plain
        return {**plain, **({"summary": self._text} if plain.get("summary") else {})}

    def _is_new(self, part: Mapping[str, Any]) -> bool:
        return bool(part.get("message")) and self._traces.tells(part["message"])

    def walked(self, value: Any, *, is_touched: bool) -> Any:
        """Return plain data with all replaced that tells of the messages, be it in a step, an event or an inbox."""
        if isinstance(value, list):
            return [self.walked(each, is_touched=is_touched) for each in value]
        if not isinstance(value, dict):
            return value
        if _is_in(value.get("id"), self._traces.ids) and value.get("parts"):
            return value if is_replaced(value) else self.message(value)
        if isinstance(value.get("type"), str) and isinstance(value.get("message"), str):
            return self._error(value, is_touched=is_touched)
        changed = {key: self._walked_under(key, each, is_touched=is_touched) for key, each in value.items()}
        if "call" in changed and isinstance(changed["call"], dict):
            return self._execution_of_tool(changed)
        if value.get("type") == "tool_call" and _is_in(value.get("id"), self._traces.calls) and value.get("name"):
            return self._call(value)
        for key in _FREE_TEXT & changed.keys():
            changed[key] = self.scrubbed(changed[key])
        if is_touched and changed.get("rejection"):
            changed["rejection"] = self._text
        return changed

    def _walked_under(self, key: str, value: Any, *, is_touched: bool) -> Any:
        if key == "stop_signals" and isinstance(value, list):
            return [self._signal(each, is_touched=is_touched) for each in value]
        if key == "denied" and isinstance(value, dict):
            return {call: self._reason(call, each, is_touched=is_touched) for call, each in value.items()}
        if key in _TOLD_BY_TOOLS:  # data of any form: neither error nor message, even if it looks like one
            return self.scrubbed(value) if is_touched else value
        return self.walked(value, is_touched=is_touched)

    def _execution_of_tool(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return a tool's execution, with its result replaced if that of its message is."""
        if not _is_in(plain["call"].get("id"), self._traces.results):
            return plain
        changed = dict(plain)
        # A result that refers to its message is replaced there.
        if changed.get("result") not in (None, _POINTS_AT_MESSAGE):
            changed["result"] = self._text
        if isinstance(changed.get("error"), dict):
            changed["error"] = self._error(changed["error"], is_touched=True)
        return changed

    def _answer(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return an answer from outside, without its content if the message that tells the model of it is replaced."""
        return {**plain, "result": self._text} if _is_in(plain.get("call"), self._traces.results) else plain

    def _signal(self, plain: Any, *, is_touched: bool) -> Any:
        """Return a stop signal. What a filter, a guard or an error says about a message may quote any piece of it."""
        if is_touched and isinstance(plain, dict) and plain.get("message") and not plain.get("limit"):
            return {**plain, "message": self._text}
        return self.scrubbed(plain)

    def _reason(self, call: str, reason: Any, *, is_touched: bool) -> Any:
        """Return the reason why a person has denied a call, replaced if it may tell of the messages."""
        is_told = is_touched or call in self._traces.calls | self._traces.results
        return self._text if is_told else self.scrubbed(reason)

    def _call(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call without its arguments. Its fields stay in the order in which they are stored."""
        kept = {name: each for name, each in plain.items() if name in _CALL_KEEPS}
        return {**kept, "arguments": {MARK: self._text}} if plain.get("arguments") else kept

    def _error(self, plain: Mapping[str, Any], *, is_touched: bool) -> dict[str, Any]:
        """Return an error on record. One in a run of the messages may quote any piece of them."""
        if is_touched:
            return {**{name: each for name, each in plain.items() if name != "traceback"}, "message": self._text}
        return {name: each if name == "type" else self.scrubbed(each) for name, each in plain.items()}

    def metadata(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return a session's metadata with the same replaced, and without objects that were made from messages."""
        made = (key for key, each in plain.items() if isinstance(each, dict) and DERIVED in each)
        dropped = set(made)
        return {key: self.scrubbed(each) for key, each in plain.items() if key not in dropped}

    def scrubbed(self, value: Any) -> Any:
        """Return plain data with every text of the messages replaced that is quoted in it whole."""
        if isinstance(value, str):
            # The longest first: one may contain another, and its rest would stay.
            for secret in sorted(self._traces.secrets, key=len, reverse=True):
                value = value.replace(secret, self._text)
            return value
        if isinstance(value, list):
            return [self.scrubbed(each) for each in value]
        if isinstance(value, dict):
            return {key: self.scrubbed(each) for key, each in value.items()}
        return value


_KNOWN = KINDS | {"steer", "queue", "cancel"}
"""The kinds of entries on record and in inboxes that this release writes."""
_CALL_KEEPS = {"type", "name", "arguments", "id", "provider"}
_FREE_TEXT = {"message", "progress", "metadata", "rejection", "strategy", "configs"}
_TOLD_BY_TOOLS = {"result", "arguments"}
_POINTS_AT_MESSAGE = {"$said": True}


_DELETE = "\x7f"


def _as_json(value: Any, like: str) -> str:
    """Return JSON as a text, spelled like another one: with its leading blanks, and with its control characters."""
    blanks = like[: len(like) - len(like.lstrip(" "))]
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not _is_utf8(text):  # half a character can only be stored as an escape
        text = json.dumps(value, separators=(",", ":"))
        text = text.replace(json.dumps(_DELETE)[1:-1], _DELETE) if _DELETE in like else text
    return blanks + text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_in(key: Any, known: set[str]) -> bool:
    return isinstance(key, str) and key in known
