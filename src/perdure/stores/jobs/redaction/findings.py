"""Finding the messages to replace, and the summaries that cover them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

from perdure import codec
from perdure.aio import in_turns
from perdure.errors import InvalidData, SessionNotFound
from perdure.model.message import CONTINUES, Message
from perdure.redaction.replacement import Replacement
from perdure.redaction.traces import ENVELOPE, Traces, is_hidden, is_replaced
from perdure.stores.engine import Job
from perdure.stores.jobs.claiming import Facts, facts_of
from perdure.stores.jobs.record import read_by_batch
from perdure.stores.jobs.redaction.blocks import BlocksMet, MetBlock, stretch_of
from perdure.stores.jobs.redaction.copies import copies_of
from perdure.stores.jobs.redaction.held import Held, Row, concerned, message_at, messages_at, messages_of, own_messages
from perdure.stores.jobs.redaction.places import Log, Places
from perdure.stores.jobs.redaction.request import Request


class Findings:
    """The rows to replace, as far as they are known."""

    def __init__(self, request: Request, traces: Traces, replacement: Replacement) -> None:
        self._request = request
        self._traces = traces
        self._replacement = replacement
        self.rows: dict[tuple[Log, int], Row] = {}
        self.fresh: set[str] = set()
        self.facts: dict[str, Facts] = {}
        """The facts about the sessions concerned, from before anything else of them was read."""
        self._places = Places()
        self._copied: set[Log] = set()
        """The logs whose copies were looked for."""
        self._sessions: list[str] = []

    def find(self) -> Job[None]:
        """Find the messages that were asked for. Raise InvalidData if the session does not have one of them.

        Raise SessionNotFound if the session was erased while it was read.
        """
        session_id, wanted = self._request.session_id, self._request.ids
        yield from self._note_facts(session_id)
        found = yield from self._collect(session_id, wanted)
        missing = [each for each in wanted if each not in found]
        if missing:
            if (yield from facts_of(session_id)).sid is None:
                raise SessionNotFound(session_id)
            problem = f"session {session_id!r} has no message {missing[0]!r} in its history; nothing was replaced"
            raise InvalidData("$.message_ids", problem)

    def _collect(self, session_id: str, wanted: Collection[str]) -> Job[set[str]]:
        """Take the messages with these ids in a session. Return the ids that were found."""
        found: set[str] = set()
        for row, plain in (yield from messages_of(session_id, wanted)):
            found.add(plain["id"])
            self._take(row, plain)
        return found

    def _take(self, row: Row, plain: dict[str, Any]) -> None:
        """Replace a message, and learn where else its content may be."""
        self._places.add(row.log, row.position)
        self._traces.learn(plain)
        if is_replaced(plain):
            return
        # In canonical form: another store that decodes and encodes the message has to get the same bytes.
        body = codec.encode_message(codec.convert(Message, self._replacement.message(plain)))
        self.rows[row.log, row.position] = Row(row.log, row.position, body)
        if plain["id"] in self._request.ids:
            self.fresh.add(plain["id"])

    def find_summaries(self, held: Held) -> Job[list[str]]:
        """Find the summaries that compaction blocks show in place of the messages. Return the sessions concerned.

        A summary may be in a log that further sessions show, and further blocks may cover it. So this repeats until
        nothing new is found.
        """
        seen: set[str] = set()
        while True:
            before = len(self._places)
            yield from self._find_copies()
            sessions = self._sessions = yield from concerned(self._places)
            for session_id in sessions:
                if session_id not in seen:
                    yield from self._note_facts(session_id)
                    # A session from another store has a copy of what it shows in a log of its own.
                    seen.add(session_id)
                    yield from self._collect(session_id, self._request.ids)
                    yield from self._find_notes(session_id)
            yield from self._look_at_versions(held, sessions)
            for session_id in sessions:
                yield from self._look_beyond_versions(session_id)
            if len(self._places) == before:
                break
        for session_id in sessions:
            yield from self._find_quotes(session_id)
        return sessions

    def _find_notes(self, session_id: str) -> Job[None]:
        """Take the notes in a session's own logs that list the calls of the messages. A summary may cover one, too."""
        if not self._traces.calls:
            return
        for row in (yield from own_messages(session_id, CONTINUES)):
            plain = codec.decode_plain(row.body)
            if (row.log, row.position) not in self._places and self._traces.is_listed_in(plain):
                self._take(row, plain)

    def _find_quotes(self, session_id: str) -> Job[None]:
        """Take the hidden messages in a session's own logs that quote the messages. Frameworks keep copies in them."""
        if not self.rows:
            return
        for row in (yield from own_messages(session_id, ENVELOPE)):
            plain = codec.decode_plain(row.body)
            if (row.log, row.position) in self.rows or not is_hidden(plain):
                continue
            changed = self._replacement.hidden(plain)
            if changed is not None:
                body = codec.encode_message(codec.convert(Message, changed))
                self.rows[row.log, row.position] = Row(row.log, row.position, body)

    def _find_copies(self) -> Job[None]:
        """Take the same messages in copies of the logs that have them."""
        for log in self._places.logs():
            if log in self._copied:
                continue
            self._copied.add(log)
            for copy in (yield from copies_of(log)):
                for row in (yield from messages_at(copy, self._places.in_log(log))):
                    plain = codec.decode_plain(row.body)
                    if plain.get("id") in self._request.ids:  # otherwise it is another log of the same name
                        self._take(row, plain)

    def _note_facts(self, session_id: str) -> Job[None]:
        if session_id not in self.facts:
            self.facts[session_id] = yield from facts_of(session_id)

    def still_hold(self) -> Job[bool]:
        """Tell whether nothing has changed since it was read. After the sessions are locked, nothing can change."""
        for session_id, facts in self.facts.items():
            if (yield from facts_of(session_id)) != facts:
                return False
        return self._sessions == (yield from concerned(self._places))

    def _look_at_versions(self, held: Held, sessions: Collection[str]) -> Job[None]:
        met = BlocksMet(held.values)
        for session_id in sessions:
            blocks: set[str] = set()
            for head in in_turns((yield from held.heads(session_id))):
                version = yield from held.version(session_id, head, blocks)
                for block in met.new_ones(version):
                    yield from self._look_at(block)

    def _look_beyond_versions(self, session_id: str) -> Job[None]:
        """Find summaries that are on record only, because a killed run has not saved the view that shows them.

        Such a record does not say which messages a summary covers, so it may cover any.
        """
        batches = yield from read_by_batch(session_id)
        made = self._traces.made_by_unsaved(chain.from_iterable(batches))
        for row, plain in (yield from messages_of(session_id, made)) if made else ():
            if (row.log, row.position) not in self._places and self._traces.tells(plain):
                self._take(row, plain)

    def _look_at(self, met: MetBlock) -> Job[None]:
        block, covered = met
        if not any(map(self._places.touch, covered)):
            self._traces.other_blocks.add(block.id)
            return
        self._traces.blocks.add(block.id)
        for log, start, stop in map(stretch_of, block.shown):
            for position in range(start, stop):
                is_original = any(each == log and low <= position < high for each, low, high in covered)
                if not is_original and (log, position) not in self._places:
                    row = yield from message_at(log, position)
                    plain = codec.decode_plain(row.body)
                    if self._traces.tells(plain):
                        self._take(row, plain)
