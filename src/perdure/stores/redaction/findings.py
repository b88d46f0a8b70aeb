"""The messages to replace, and the summaries that cover them, as they are found in a store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.model.transcript import Block, every_span
from perdure.redaction.replacement import Replacement
from perdure.redaction.traces import Traces, is_replaced
from perdure.stores.jobs.redaction.blocks import BlocksMet, blocks_of, stretch_of
from perdure.stores.jobs.redaction.held import Log, Places, Row
from perdure.stores.redaction.bench import Bench


class Findings:
    """The rows that are to be replaced, as far as they are known."""

    def __init__(self, ids: Sequence[str], traces: Traces, replacement: Replacement) -> None:
        self._wanted = ids
        self._traces = traces
        self._replacement = replacement
        self.rows: dict[tuple[Log, int], Row] = {}
        self.fresh: set[str] = set()
        self._places: Places = {}

    def find(self, bench: Bench, session_id: str) -> None:
        """Find the messages that were asked for; InvalidData if there is one that the session has not."""
        found = self._collect(bench.history(session_id), self._wanted)
        missing = [each for each in self._wanted if each not in found]
        if missing:
            problem = f"session {session_id!r} has no message {missing[0]!r} in its history; nothing was replaced"
            raise InvalidData("$.message_ids", problem)

    def _collect(self, rows: Iterable[Row], wanted: Collection[str]) -> set[str]:
        """Take the messages of these ids. Return the ids that were found."""
        found: set[str] = set()
        for row, plain in _named(rows, wanted):
            found.add(plain["id"])
            self._take(row, plain)
        return found

    def _take(self, row: Row, plain: dict[str, Any]) -> None:
        """Replace a message, and learn what else may tell of it."""
        self._places.setdefault(row.log, set()).add(row.position)
        self._traces.learn(plain)
        if is_replaced(plain):
            return
        # Other stores decode and encode it, and have to come to the same bytes.
        body = codec.encode_message(codec.convert(Message, self._replacement.message(plain)))
        self.rows[row.log, row.position] = Row(row.log, row.position, body)
        if plain["id"] in self._wanted:
            self.fresh.add(plain["id"])

    def find_summaries(self, bench: Bench) -> list[str]:
        """Find what compaction blocks show in place of the messages, in every session that has such a block."""
        seen: set[str] = set()
        while True:
            before = sum(map(len, self._places.values()))
            sessions = sorted(bench.concerned(self._places))
            for session_id in sessions:
                if session_id not in seen:
                    # one that came from elsewhere has a copy of what it shows in a log of its own
                    seen.add(session_id)
                    self._collect(bench.history(session_id), self._wanted)
            met = BlocksMet()
            for session_id in sessions:
                for version in bench.versions(session_id):
                    for block in met.new_ones(blocks_of(version)):
                        self._look_at(bench, block)
            for session_id in sessions:
                self._look_beyond_versions(bench, session_id)
            if sum(map(len, self._places.values())) == before:
                return sessions

    def _look_beyond_versions(self, bench: Bench, session_id: str) -> None:
        """Find summaries that are on record only: a run that was killed has not saved the view that shows them.

        Such a record does not tell which messages a summary covers, so it may tell of any.
        """
        made = self._traces.made_by_unsaved(bench.entries(session_id))
        for row, plain in _named(bench.history(session_id), made) if made else ():
            if row.position not in self._places.get(row.log, ()) and self._traces.tells(plain):
                self._take(row, plain)

    def _look_at(self, bench: Bench, block: Block) -> None:
        covered = [stretch_of(span) for span in every_span(block.covered)]
        if not any(start <= position < stop for log, start, stop in covered for position in self._places.get(log, ())):
            self._traces.other_blocks.add(block.id)
            return
        self._traces.blocks.add(block.id)
        for log, start, stop in map(stretch_of, block.shown):
            for position in range(start, stop):
                is_original = any(each == log and low <= position < high for each, low, high in covered)
                if not is_original and position not in self._places.get(log, ()):
                    body = bench.row(log, position)
                    plain = codec.decode_plain(body)
                    if self._traces.tells(plain):
                        self._take(Row(log, position, body), plain)


def _named(rows: Iterable[Row], ids: Collection[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The messages of these ids, each with its content. Only rows that mention an id are decoded."""
    needles = [msgspec.json.encode(each) for each in ids]
    for row in rows:
        if any(needle in row.body for needle in needles):
            plain = codec.decode_plain(row.body)
            if plain.get("id") in ids:
                yield row, plain
