"""Ranking what a SQLite store's index finds: the newest messages that have the words, the best of them first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple

import apsw

from perdure import codec
from perdure.errors import InvalidData, KeyUnavailable
from perdure.protocols import SearchHit
from perdure.stores.format.rows import checksum
from perdure.stores.jobs.saving import is_log_sound
from perdure.stores.sealing import Sealing
from perdure.stores.search import MOST_RANKED, Place, Query, Term, show, weight
from perdure.stores.sqlite.schema import first_row, rows_of

_MOST_LOGS = 200
_DIGITS = 9
"""The digits that a score is rounded to. A sum depends on the order of its terms: with more, equals would differ."""
_MOST_MISSED = 100
"""The number of messages without the common words after which the index is asked which messages have them."""


class Scorer:
    """BM25, row by row. FTS5's own first counts all messages with each word, which for a common one is far too slow.

    It runs ten thousand times for a query. So it takes no more steps than it needs, and repeats `search.score`.
    """

    def __init__(self, db: apsw.Connection) -> None:
        self._having: Sequence[int] = ()
        self._phrases = 0
        self._is_one = False
        self._weights: list[float] | None = None
        self._all = 0.0
        self._total = 1
        self._flat = self._slope = 0.0
        db.register_fts5_function("score_one", self._one)
        db.register_fts5_function("score_many", self._many)

    def function_for(self, having: Sequence[int], terms: int, others: int) -> str:
        """Return the SQL function for a match of `terms` terms, and of `others` phrases that are not terms.

        The first terms are weighed. `having` says how many messages have each of these.
        """
        self._having, self._phrases, self._weights = having, terms + others, None
        self._is_one = terms == 1
        return "score_one" if self._is_one else "score_many"

    def unit(self, having: int) -> float:
        """Return the factor for scores: a lone term's weight, which changes no order and may not be known before."""
        return self._weight(having) if self._is_one else 1.0

    def _weight(self, having: int) -> float:
        # BM25 with k1 = 1.2 and b = 0.75, as in `search.score`; 2.2 is k1 + 1.
        return 2.2 * weight(self._total, having)

    def _look_at_all(self, api: Any) -> list[float]:
        """Return the weights of the terms. They need the whole index, to which only a scored row gives access."""
        self._total = max(api.row_count, 1)
        mean = max(api.column_total_size(0) / self._total, 1.0)
        self._flat, self._slope = 1.2 * 0.25, 1.2 * 0.75 / mean
        self._weights = [self._weight(number) for number in self._having]
        self._all = sum(self._weights)
        return self._weights

    def _one(self, api: Any, *_: Any) -> float:
        if self._weights is None:
            self._look_at_all(api)
        count: int = api.inst_count - self._phrases + 1
        length: int = api.column_size(0)
        return count / (count + self._flat + self._slope * length)

    def _many(self, api: Any, *_: Any) -> float:
        weights = self._weights or self._look_at_all(api)
        damping: float = self._flat + self._slope * api.column_size(0)
        if api.inst_count == self._phrases:  # each of them once, as is most often the case
            return round(self._all / (1 + damping), _DIGITS)
        total = 0.0
        for at, each in enumerate(weights):
            count = len(api.phrase_locations(at)[0])
            total += each * count / (count + damping)
        return round(total, _DIGITS)


def find(
    index: apsw.Connection,
    scorer: Scorer,
    db: apsw.Connection,
    query: Query,
    asked: Sequence[Term],
    sealing: Sealing,
) -> list[SearchHit]:
    """Return the best of the messages that have all terms. `asked` has the terms as the index has them.

    A word that is nearly everywhere tells nothing about a message. So only the rarer ones are weighed, if there are
    any. They leave few enough messages to rank, and reading one of those shows whether it has the other words too.
    """
    filters = _filters(db, query)
    if filters is None:
        return []
    terms = [_phrase(term) for term in asked]
    is_lone = len(terms) == 1 and not filters
    spread = [_Spread(0)] if is_lone else [_spread(index, each) for each in terms]
    plan = _Plan.of(terms, spread)
    function = scorer.function_for([each.having for each in plan.weighed], len(plan.asked), len(filters))
    found = rows_of(
        index,
        f"SELECT {function}(message), rowid FROM message WHERE message MATCH ? ORDER BY rowid DESC LIMIT ?",
        (_match(plan.asked, filters), MOST_RANKED + 1),
    )
    unit = scorer.unit(len(found) if is_lone else plan.weighed[0].having)
    del found[MOST_RANKED:]
    found.sort(key=itemgetter(0), reverse=True)  # a stable sort: equals stay in their order, the newest first
    candidates = _Candidates(index, found, _match(terms, filters), is_sure=len(plan.asked) == len(terms))
    return _best(db, candidates, query, unit, sealing)


def _match(terms: Iterable[str], filters: Sequence[str]) -> str:
    return " AND ".join((f"text : ({' AND '.join(terms)})", *filters))


class _Spread(NamedTuple):
    """The number of messages with a term, up to one more than are ever ranked; and in that case its rowid."""

    having: int
    last: int = 0

    @property
    def is_rare(self) -> bool:
        return self.having <= MOST_RANKED

    @property
    def is_everywhere(self) -> bool:
        """Return whether the term is so common that asking the index for it costs more than it saves."""
        return not self.is_rare and self.having * 2 > self.last


def _spread(index: apsw.Connection, phrase: str) -> _Spread:
    match = f"text : {phrase}"
    last = first_row(index, "SELECT rowid FROM message WHERE message MATCH ? LIMIT 1 OFFSET ?", (match, MOST_RANKED))
    if last is not None:
        return _Spread(MOST_RANKED + 1, last[0])
    (having,) = first_row(index, "SELECT count(*) FROM message WHERE message MATCH ?", (match,))
    return _Spread(having)


class _Plan(NamedTuple):
    """The terms that the index is asked for. Those that are weighed come first."""

    asked: list[str]
    weighed: list[_Spread]

    @classmethod
    def of(cls, terms: Sequence[str], spread: Sequence[_Spread]) -> _Plan:
        known = list(zip(terms, spread, strict=True))
        rare = [(term, each) for term, each in known if each.is_rare]
        if not rare:
            return cls(list(terms), list(spread))
        others = [term for term, each in known if not each.is_rare and not each.is_everywhere]
        return cls([term for term, _ in rare] + others, [each for _, each in rare])


def _phrase(term: Term) -> str:
    # Words are letters and digits only. Still, a quotation mark in one would turn a user's text into syntax.
    words = " ".join(term.words).replace('"', "")
    return f'"{words}" *' if term.prefix else f'"{words}"'


def owner_token(owner: str) -> str:
    return "o" + blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# The session's own logs, and logs of which it or its line shows something, if their own session does not show them.
# That session is gone, hidden, or has forgotten something. Rows of `ref` then say which session shows what.
_LOGS = """
    WITH RECURSIVE line (sid, next, is_own) AS (
        SELECT sid, line, 1 FROM session WHERE id = ?1
        UNION SELECT session.sid, session.line, 0 FROM session JOIN line ON session.sid = line.next
    )
    SELECT log.log FROM log JOIN session USING (sid) WHERE session.id = ?1
    UNION SELECT ref.log FROM ref JOIN line ON line.sid = ref.child
    WHERE (is_own OR ref.since IS NULL)
        AND NOT EXISTS (
            SELECT 1 FROM log JOIN session USING (sid) WHERE log.log = ref.log AND status <> 'deleted'
            AND NOT EXISTS (SELECT 1 FROM ref AS own WHERE own.child = log.sid AND own.log = log.log)
        )
"""


def _filters(db: apsw.Connection, query: Query) -> list[str] | None:
    """Return further conditions on a match; None if nothing can meet them."""
    filters: list[str] = []
    if query.owner is not None:
        filters.append(f"place : {owner_token(query.owner)}")
    if query.session_id is not None:
        logs = rows_of(db, _LOGS, (str(query.session_id),))
        if not logs:
            return None
        if len(logs) <= _MOST_LOGS:
            filters.append(f"place : ({' OR '.join(f'l{log}' for (log,) in logs)})")
    return filters


class _Candidates:
    """Ranked messages, one after the other. If many lack a term, the index is asked which messages have all."""

    def __init__(self, index: apsw.Connection, ranked: Sequence[tuple[float, int]], match: str, is_sure: bool) -> None:
        self._index, self._ranked, self._match = index, ranked, match
        self._left = None if is_sure else _MOST_MISSED
        self._having: set[int] | None = None

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return (each for each in self._ranked if self._having is None or each[1] in self._having)

    def missed(self) -> None:
        """Note that the last message lacks a term."""
        if self._left is None:
            return
        self._left -= 1
        if not self._left:
            self._left = None
            self._having = {
                rowid
                for (rowid,) in rows_of(self._index, "SELECT rowid FROM message WHERE message MATCH ?", (self._match,))
            }


def _best(db: apsw.Connection, candidates: _Candidates, query: Query, unit: float, sealing: Sealing) -> list[SearchHit]:
    """Return the first of the ranked messages that exist and may be shown. Scores are multiplied by `unit`."""
    hits: list[SearchHit] = []
    owners: dict[int, Any] = {}
    for value, rowid in candidates:
        row = first_row(db, "SELECT log, pos, crc, body FROM msg WHERE rowid = ?", (rowid,))
        session_id = None if row is None else _attributed(db, owners, row[0], row[1], query)
        if session_id is None:
            continue
        with suppress(InvalidData, KeyUnavailable):  # a load reports a damaged message, or a key that is gone
            body, crc = sealing.opened("msg", row[3], row[2])
            if checksum(body, *row[:2]) != crc:
                continue
            hit = show(Place(session_id, codec.decode_message(body), row[1]), query.terms, value * unit)
            if hit is None:
                candidates.missed()
            else:
                hits.append(hit)
        if len(hits) == query.limit:
            break
    return hits


# The sessions with a row for the message, and those whose lines lead to one.
_SHOWN_BY = """
    WITH RECURSIVE showing (sid, since) AS (
        SELECT child, since FROM ref WHERE log = ?1 AND start <= ?2 AND stop > ?2
        UNION SELECT session.sid, NULL FROM session JOIN showing ON session.line = showing.sid
        WHERE showing.since IS NULL
    )
    SELECT id, owner FROM showing JOIN session USING (sid) WHERE status <> 'deleted'
        AND (?3 IS NULL OR owner = ?3) AND (?4 IS NULL OR id = ?4) ORDER BY sid LIMIT 1
"""


_OF_LOG = """
    SELECT id, owner, sid, log.name, crc FROM log JOIN session USING (sid) WHERE log.log = ? AND status <> 'deleted'
        AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.child = log.sid AND ref.log = log.log)
"""


def _owner_of(db: apsw.Connection, log: int) -> tuple[str, str | None] | None:
    """Return the session that owns a log, and its owner. None if the row is damaged, since it may be another's."""
    row = first_row(db, _OF_LOG, (log,))
    return None if row is None or not is_log_sound(log, *row[2:]) else (row[0], row[1])


def _attributed(db: apsw.Connection, owners: dict[int, Any], log: int, pos: int, query: Query) -> str | None:
    """Return the session that a message is attributed to, if the query asks for that session."""
    if log not in owners:
        owners[log] = _owner_of(db, log)
    found = owners[log] or first_row(db, _SHOWN_BY, (log, pos, query.owner, query.session_id))
    if found is None or query.owner not in (None, found[1]) or query.session_id not in (None, found[0]):
        return None
    return str(found[0])
