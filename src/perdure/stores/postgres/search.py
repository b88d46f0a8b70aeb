"""The search for messages in PostgreSQL: how their words are indexed, and how the index is asked for them.

A save only notes its messages as not indexed yet. A search first brings the index up to date. The server then finds the
messages with the words, and ranks them with its own `ts_rank_cd`. Only the best of them are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from perdure import codec
from perdure.errors import InvalidData, InvalidSessionId, KeyMissing, KeyUnavailable
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.protocols import SearchHit
from perdure.stores.format.rows import checksum
from perdure.stores.jobs.finding import MOST_PLACES, number_of
from perdure.stores.postgres.link import Link, Queries
from perdure.stores.postgres.rows import LOG_IS_SOUND, PLAIN, plain, restored
from perdure.stores.sealing import Root, Sealing
from perdure.stores.search import MOST_RANKED, Lent, Place, Query, Term, age, attributed, show, text_of, words_of

# Other statements always look up rows by keys. A search is planned for the words that it asks for.
_PLANNED = """
    SELECT set_config(name, value, true) FROM (VALUES
        ('plan_cache_mode', 'force_custom_plan'), ('enable_bitmapscan', 'on'), ('enable_hashjoin', 'on'),
        ('jit', 'off'), ('work_mem', '16MB')
    ) AS wanted (name, value)
"""
_SPARE = 20
Terms = tuple[Term, ...]
_MOST_LOGS = 1_000
# Each word weighs the same in every place. The last 1 divides the rank by the logarithm of the text's length.
_RANK = "ts_rank_cd('{1, 1, 1, 1}', word.words, %(words)s::tsquery, 1)"
_LOGS = """
    WITH RECURSIVE line (sid, next, is_own) AS (
        SELECT sid, line, true FROM session WHERE id = %s
        UNION SELECT session.sid, session.line, false FROM session JOIN line ON session.sid = line.next
    )
    SELECT log.log FROM log JOIN session ON session.sid = log.sid WHERE session.id = %s
    UNION SELECT ref.log FROM ref JOIN line ON line.sid = ref.child WHERE line.is_own OR ref.since IS NULL
"""
# The logs of the owner's sessions, and logs that they show of sessions that are gone or have forgotten something.
_LOGS_OF_OWNER = """
    WITH RECURSIVE line (sid, next, is_own) AS (
        SELECT sid, line, true FROM session WHERE owner = %(owner)s
        UNION SELECT session.sid, session.line, false FROM session JOIN line ON session.sid = line.next
    )
    SELECT log.log FROM log JOIN session ON session.sid = log.sid
    WHERE session.owner = %(owner)s AND session.status <> 'deleted'
    UNION ALL
    SELECT ref.log FROM ref JOIN (SELECT sid, bool_or(is_own) AS is_own FROM line GROUP BY sid) AS line
        ON line.sid = ref.child
    WHERE (line.is_own OR ref.since IS NULL) AND NOT EXISTS (
        SELECT 1 FROM log JOIN session AS own ON own.sid = log.sid WHERE log.log = ref.log AND own.status <> 'deleted'
            AND NOT EXISTS (SELECT 1 FROM ref AS kept WHERE kept.child = log.sid AND kept.log = log.log)
    ) LIMIT %(most)s
"""
_OWNERS_OF_LOGS = f"""
    SELECT DISTINCT session.owner FROM ({_LOGS}) AS shown JOIN log ON log.log = shown.log
    JOIN session ON session.sid = log.sid
"""
_OWNER = """
    SELECT coalesce(
        (SELECT session.owner FROM log JOIN session ON session.sid = log.sid WHERE log.log = %(log)s),
        (SELECT session.owner FROM ref JOIN session ON session.sid = ref.child
            WHERE ref.log = %(log)s AND session.owner IS NOT NULL ORDER BY session.sid LIMIT 1))
"""
_OLDEST = "SELECT size FROM word ORDER BY number LIMIT 1"
_NEWEST = "SELECT size FROM word ORDER BY number DESC LIMIT 1"
_READ = f"""
    SELECT msg.log, msg.pos, msg.crc, msg.body,
        EXISTS (SELECT 1 FROM ref WHERE ref.child = log.sid AND ref.log = log.log),
        session.id, session.agent, session.status, session.owner
    FROM unnest(%s::bigint[], %s::bigint[]) AS best (log, pos)
    JOIN msg ON msg.log = best.log AND msg.pos = best.pos
    LEFT JOIN log ON log.log = msg.log LEFT JOIN session ON session.sid = log.sid
    WHERE log.log IS NULL OR {LOG_IS_SOUND}
"""
# The sessions with rows for a log, and those whose lines lead to one.
_LENT = """
    WITH RECURSIVE showing (log, start, stop, sid, since) AS (
        SELECT log, start, stop, child, since FROM ref WHERE log = ANY (%s)
        UNION SELECT showing.log, showing.start, showing.stop, session.sid, NULL
        FROM session JOIN showing ON session.line = showing.sid
        WHERE showing.since IS NULL
    )
    SELECT showing.log, showing.start, showing.stop, session.id, session.agent, session.status, session.owner
    FROM showing JOIN session ON session.sid = showing.sid ORDER BY session.sid
"""

_NAMED = "SELECT log, pos FROM word WHERE named = %s ORDER BY number DESC LIMIT %s"
# The number of the advisory lock for indexing, "perf" in ASCII.
_LOCK = 0x70657266
_STRETCHES_AT_ONCE = 500
_MESSAGES_AT_ONCE = 2_000
_STRETCH = 100
# PostgreSQL's own bounds: 2 KB for a word, 1 MB for a whole message, the highest place, and the places of one word.
_LONGEST_WORD = 200
_MOST_BYTES = 1_000_000
_LAST_PLACE = 16_383
_MOST_PLACES = 255

_ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))"
_UNINDEXED = f"""
    DELETE FROM unindexed WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM (
            SELECT ctid, sum(stop - start) OVER (ROWS UNBOUNDED PRECEDING) - (stop - start) AS before
            FROM (SELECT ctid, start, stop FROM unindexed LIMIT {_STRETCHES_AT_ONCE}) AS first
        ) AS counted WHERE before < {_MESSAGES_AT_ONCE}
    )) RETURNING log, start, stop
"""
# In the order of the rows on disk, which is nearly that of saving: the newest messages get the highest numbers.
_EVERYTHING = f"""
    INSERT INTO unindexed (log, start, stop)
    SELECT log, min(pos), max(pos) + 1 FROM msg GROUP BY log, pos / {_STRETCH} ORDER BY max(ctid)
"""
_NAMELESS = f"""
    INSERT INTO unindexed (log, start, stop)
    SELECT log, min(pos), max(pos) + 1 FROM word WHERE named IS NULL GROUP BY log, pos / {_STRETCH} ORDER BY max(number)
"""
# An erasure of one of these messages waits until its words are in the index, which then go with it.
_MESSAGES = "SELECT pos, crc, body FROM msg WHERE log = %s AND pos >= %s AND pos < %s ORDER BY pos FOR KEY SHARE"
_INSERT = """
    INSERT INTO word (log, pos, named, size, whole, words)
    SELECT log, pos, named, size, whole, words::tsvector
    FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::integer[], %s::boolean[], %s::text[])
        AS new (log, pos, named, size, whole, words)
    ON CONFLICT (log, pos) DO UPDATE
        SET named = excluded.named, size = excluded.size, whole = excluded.whole, words = excluded.words
"""


async def search(link: Link, query: Query, sealing: Sealing) -> list[SearchHit]:
    if not query.terms:
        return []
    await _require_form(link, sealing)
    await index(link, sealing)
    return await link.transact(lambda: _find(query, sealing), snapshot=True)


async def _require_form(link: Link, sealing: Sealing) -> None:
    """Require words in the index of a store without keys, and tokens that stand for words in one with keys.

    Messages that were indexed before there were keys have their words in it, and the lowest numbers. It is rebuilt.
    """
    row = await link.row(_OLDEST if sealing.is_on else _NEWEST)
    is_blind = row is not None and row[0] < 0
    if is_blind and not sealing.is_on:
        raise KeyMissing(None, has_ring=False)
    if row is not None and sealing.is_on and not is_blind:
        await link.transact_in_thread(_forget_all)


async def named(link: Link, message_id: str, sealing: Sealing) -> list[tuple[int, int]]:
    """Return the logs and positions where messages with an id may be, the newest first."""
    if await link.row("SELECT 1 FROM word WHERE named IS NULL LIMIT 1") is not None:
        await link.transact_in_thread(_renew_nameless)
    await index(link, sealing)
    return await link.rows(_NAMED, (number_of(message_id), MOST_PLACES))


def _renew_nameless() -> Queries[None]:
    """Note as not indexed yet what an earlier release has indexed without ids."""
    yield _ONE_AT_A_TIME, (_LOCK,)
    yield _NAMELESS, ()


def _find(query: Query, sealing: Sealing) -> Queries[list[SearchHit]]:
    """Return the best hits. If too many of them may not be shown to the caller, go through all."""
    yield _PLANNED, ()
    asked = (yield from _blind_terms(query, sealing)) if sealing.is_on else [query.terms]
    if not asked:
        return []
    statement, parameters = yield from _ranking(query, asked)
    hits: list[SearchHit] = []
    passed = 0
    for most in (query.limit + _SPARE, MOST_RANKED):
        ranked = yield statement, {**parameters, "passed": passed, "most": most}
        for start in range(0, len(ranked), query.limit):
            hits += yield from _looked_at(ranked[start : start + query.limit], query, sealing)
            if len(hits) >= query.limit:
                return hits[: query.limit]
        if len(ranked) < most:
            break
        passed += len(ranked)
    return hits


def _blind_terms(query: Query, sealing: Sealing) -> Queries[list[Terms]]:
    """Return the tokens of the terms for each owner whose messages are asked about. A hit may match any owner's."""
    owners: set[str | None] = {query.owner}
    if query.session_id is not None:
        rows = yield _OWNERS_OF_LOGS, (query.session_id, query.session_id)
        owners = {None if owner is None else restored(owner) for (owner,) in rows}
    elif query.owner is None:
        assert sealing.ring is not None
        owners = {*sealing.ring.owners()}
    roots = [root for owner in owners if (root := sealing.known_root(owner)) is not None]
    return [tuple(Term(tuple(root.words(term.words))) for term in query.terms) for root in roots]


class _Filter(NamedTuple):
    joins: str
    condition: str
    values: dict[str, Any]


def _filter(query: Query) -> Queries[_Filter]:
    """Return the condition that keeps out others' messages, so that many of these do not hide the caller's own."""
    if query.session_id is not None:
        return _in_logs((yield _LOGS, (query.session_id, query.session_id)))
    if query.owner is not None:
        owner = {"owner": plain(query.owner)}
        # With a list of logs, the planner knows how much of the index they are. With a join it does not.
        rows = yield _LOGS_OF_OWNER, {**owner, "most": _MOST_LOGS + 1}
        if len(rows) <= _MOST_LOGS:
            return _in_logs(rows)
        joins = "LEFT JOIN log ON log.log = word.log LEFT JOIN session ON session.sid = log.sid"
        condition = "(session.owner = %(owner)s OR session.sid IS NULL OR session.status = 'deleted')"
        return _Filter(joins, condition, owner)
    return _Filter("", "true", {})


def _in_logs(rows: list[Any]) -> _Filter:
    return _Filter("", "word.log = ANY (%(logs)s::bigint[])", {"logs": [log for (log,) in rows]})


def _ranking(query: Query, asked: Sequence[Terms] = ()) -> Queries[tuple[str, dict[str, Any]]]:
    """Return the statement that ranks the newest messages with all the words, and its parameters."""
    filter = yield from _filter(query)
    asked = asked or [query.terms]
    parameters: dict[str, Any] = {
        "words": _any_of(map(all_words, asked)),
        "phrases": _any_of(map(all_phrases, asked)),
        **filter.values,
    }
    together = "AND (NOT word.whole OR word.words @@ %(phrases)s::tsquery)"
    statement = f"""
        SELECT log, pos, score FROM (
            SELECT word.log, word.pos, word.number, {_RANK} AS score
            FROM word {filter.joins}
            WHERE word.words @@ %(words)s::tsquery AND {filter.condition}
                {together if any(len(term.words) > 1 for term in query.terms) else ""}
            ORDER BY word.number DESC LIMIT {MOST_RANKED}
        ) AS newest
        ORDER BY score DESC, number DESC LIMIT %(most)s OFFSET %(passed)s
    """
    return statement, parameters


def _looked_at(ranked: list[Any], query: Query, sealing: Sealing) -> Queries[list[SearchHit]]:
    """Return the hits among the ranked messages, the best first."""
    scores = {(log, pos): score for log, pos, score in ranked}
    rows = yield _READ, ([log for log, _ in scores], [pos for _, pos in scores])
    lent: dict[int, list[Lent]] = {}
    # A session with `ref` rows for its own log has forgotten something. The rows then say which session shows what.
    gone = sorted({row[0] for row in rows if row[4] or row[7] in (None, SessionStatus.DELETED)})
    for log, start, stop, *info in (yield _LENT, (gone,)) if gone else ():
        if (child := _info(*info)) is not None:
            lent.setdefault(log, []).append(Lent(start, stop, child))
    found: list[tuple[float, Place]] = []
    for log, pos, crc, body, is_in_part, *info in rows:
        message = decoded(log, pos, crc, body, sealing)
        if message is not None:
            whose = _info(*info) if info[0] is not None and not is_in_part else None
            places = attributed(whose, [(pos, message)], lent.get(log, ()), query)
            found += ((scores[log, pos], place) for place in places)
    found.sort(key=lambda each: (each[0], age(each[1])), reverse=True)
    return [hit for score, place in found if (hit := show(place, query.terms, score))]


def _info(session_id: str, agent: str, status: str, owner: str | None) -> AgentSessionInfo | None:
    """Return a header with the fields that a search needs; None if they are damaged, which a check reports."""
    whose = None if owner is None else restored(owner)
    try:
        return AgentSessionInfo(SessionId(session_id), restored(agent), status=SessionStatus(status), owner=whose)
    except (ValueError, InvalidSessionId):
        return None


async def index(
    link: Link, sealing: Sealing, *, rebuild: bool = False, progress: Callable[[int, int], None] | None = None
) -> int:
    """Index all that was committed before. With `rebuild`, empty the index first. Return how many messages."""
    if rebuild:
        await link.transact_in_thread(_forget_all)
    lacking = 0 if progress is None else await _lacking(link)
    done = 0
    while await link.row("SELECT 1 FROM unindexed LIMIT 1") is not None:
        done += await link.transact_in_thread(partial(_index_some, sealing))
        if progress is not None:
            progress(done, max(done, lacking))
    return done


async def _lacking(link: Link) -> int:
    """Return how many messages are not indexed yet."""
    return int((await link.row("SELECT coalesce(sum(stop - start), 0)::bigint FROM unindexed"))[0])


def _forget_all() -> Queries[None]:
    """Empty the index, and note all messages as not indexed yet."""
    yield _ONE_AT_A_TIME, (_LOCK,)
    for statement in ("DELETE FROM word", "DELETE FROM unindexed", _EVERYTHING):
        yield statement, ()


def _index_some(sealing: Sealing) -> Queries[int]:
    """Index some of what is not indexed yet, and return how many messages. A caller that waited may find it done."""
    yield _ONE_AT_A_TIME, (_LOCK,)
    indexed: dict[tuple[int, int], tuple[int, int, bool, str]] = {}
    for log, start, stop in (yield _UNINDEXED, ()):
        root = (yield from _root_of(log, sealing)) if sealing.is_on else None
        for pos, crc, body in (yield _MESSAGES, (log, start, stop)):
            message = decoded(log, pos, crc, body, sealing)
            if message is not None:
                indexed[log, pos] = (number_of(message.id), *vector_of(message, root))
    if indexed:
        columns = zip(*((*key, *vector) for key, vector in indexed.items()), strict=True)
        yield _INSERT, tuple(list(column) for column in columns)
    return len(indexed)


def _root_of(log: int, sealing: Sealing) -> Queries[Root]:
    """Return the secret from which the tokens of a log's owner are derived."""
    ((owner,),) = yield _OWNER, {"log": log}
    return sealing.root(None if owner is None else restored(owner))


def decoded(log: int, pos: int, crc: int, body: bytes, sealing: Sealing = PLAIN) -> Message | None:
    """Return a message. Return None if it is damaged or its key is gone, so that others are found all the same.

    Raise KeyMissing for a sealed message if the store has no keys at all.
    """
    try:
        body, crc = sealing.opened("msg", body, crc)
    except KeyUnavailable:
        if not sealing.is_on:
            raise
        return None
    try:
        return codec.decode_message(body) if checksum(body, log, pos) == crc else None
    except InvalidData:
        return None


def vector_of(message: Message, root: Root | None = None) -> tuple[int, bool, str]:
    """Return how many words a message has, whether its vector has all of their places, and the vector as text.

    With keys the vector has tokens for the words, and the number is below 0, which marks such a row.
    """
    words = words_of(text_of(message))
    size = len(words)
    if root is not None:
        words, size = root.words(words), -1 - size
    places: dict[str, list[int]] = {}
    room, whole = _MOST_BYTES, len(words) <= _LAST_PLACE
    for place, word in enumerate((each[:_LONGEST_WORD] for each in words), 1):
        found = places.get(word)
        # A place takes two bytes. A new word takes its own bytes, the count of its places, and the alignment.
        room -= 2 if found else len(word.encode()) + 6
        if room < 0:
            whole = False
            break
        if found is None:
            places[word] = [min(place, _LAST_PLACE)]
        elif len(found) < _MOST_PLACES:
            found.append(min(place, _LAST_PLACE))
        else:
            whole = False
    return size, whole, " ".join(f"{_quoted(word)}:{','.join(map(str, at))}" for word, at in places.items())


def lexemes(term: Term) -> list[str]:
    """Return a tsquery for each of a term's words."""
    last = len(term.words) - 1
    return [_lexeme(word, term.prefix and place == last) for place, word in enumerate(term.words)]


def _lexeme(word: str, is_stem: bool) -> str:
    return _quoted(word[:_LONGEST_WORD]) + (":*" if is_stem or len(word) > _LONGEST_WORD else "")


def _quoted(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _any_of(queries: Iterable[str]) -> str:
    found = [*queries]
    return found[0] if len(found) == 1 else " | ".join(f"({each})" for each in found)


def all_words(terms: Terms) -> str:
    """Return a tsquery for the messages that have all words of all terms."""
    return " & ".join(dict.fromkeys(each for term in terms for each in lexemes(term)))


def all_phrases(terms: Terms) -> str:
    """Return a tsquery for the messages in which the words of a phrase are adjacent. It needs whole vectors."""
    return " & ".join(f"({' <-> '.join(lexemes(term))})" for term in terms)
