"""The messages to replace, and the summaries that cover them, as they are found in a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.transcript import Block, every_span
from perdure.stores.redaction.bench import Bench, Log, Places, Row
from perdure.stores.redaction.blocks import BlocksMet, blocks_of, stretch_of
from perdure.stores.redaction.replacement import Replacement
from perdure.stores.redaction.traces import Traces, is_replaced


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
        self._traces.learn(plain)
        if is_replaced(plain):
            return
        body = msgspec.json.encode(self._replacement.message(plain))
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
                    self._collect(bench.history(session_id))
            met = BlocksMet()
            for session_id in sessions:
                for version in bench.versions(session_id):
                    for block in met.new_ones(blocks_of(version)):
                        self._look_at(bench, block)
            if sum(map(len, self._places.values())) == before:
                return sessions

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
