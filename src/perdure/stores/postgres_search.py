"""Searching messages in PostgreSQL: the server ranks what has the words, and only the best are read and looked at.

What ranks them is BM25, as in every store. The server knows it but for phrases and beginnings of words, where it takes
a good guess; the best by that are then put in order by what they really say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.protocols import SearchHit
from perdure.stores.postgres_link import Connection, Link
from perdure.stores.postgres_rows import LOG_IS_SOUND, plain, restored
from perdure.stores.postgres_words import all_phrases, all_words, decoded, index, lexemes
from perdure.stores.search import MOST_RANKED, Lent, Place, Query, Term, age, attributed, counts_of, score, show, weight

# Other statements look up rows by keys, come what may; these are planned for what they ask for.
_PLANNED = """
    SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SET LOCAL plan_cache_mode = force_custom_plan;
    SET LOCAL enable_bitmapscan = on; SET LOCAL enable_hashjoin = on; SET LOCAL jit = off; SET LOCAL work_mem = '16MB'
"""
_SPARE = 20
_MOST_LOGS = 1_000
_MOST_COUNTED = 8
"""The server counts so many words in each message; those of a longer query are counted when it is looked at."""
_ALL = "1.644934::double precision"
_DAMPING = "0.3::double precision + 0.9::double precision * size / greatest(mean, 1)"

_LOGS = """
    SELECT log.log FROM log JOIN session ON session.sid = log.sid WHERE session.id = %s
    UNION SELECT ref.log FROM ref JOIN session ON session.sid = ref.child WHERE session.id = %s
"""
# Those of the owner's sessions, and those that they show of sessions that are gone.
_LOGS_OF_OWNER = """
    SELECT log.log FROM log JOIN session ON session.sid = log.sid
    WHERE session.owner = %(owner)s AND session.status <> 'deleted'
    UNION ALL
    SELECT ref.log FROM ref JOIN session ON session.sid = ref.child
    WHERE session.owner = %(owner)s AND NOT EXISTS (
        SELECT 1 FROM log JOIN session AS own ON own.sid = log.sid WHERE log.log = ref.log AND own.status <> 'deleted'
    ) LIMIT %(most)s
"""
_READ = f"""
    SELECT msg.log, msg.pos, msg.crc, msg.body, session.id, session.agent, session.status, session.owner
    FROM unnest(%s::bigint[], %s::bigint[]) AS best (log, pos)
    JOIN msg ON msg.log = best.log AND msg.pos = best.pos
    LEFT JOIN log ON log.log = msg.log LEFT JOIN session ON session.sid = log.sid
    WHERE log.log IS NULL OR {LOG_IS_SOUND}
"""
_LENT = """
    SELECT ref.log, ref.start, ref.stop, session.id, session.agent, session.status, session.owner
    FROM ref JOIN session ON session.sid = ref.child WHERE ref.log = ANY (%s) ORDER BY session.sid
"""


async def search(link: Link, query: Query) -> list[SearchHit]:
    if not query.terms:
        return []
    await index(link)

    async def find(connection: Connection) -> list[SearchHit]:
        async with connection.transaction():
            await connection.execute(_PLANNED, prepare=False)
            return await _find(connection, query)

    return await link.read(find)


async def _find(connection: Connection, query: Query) -> list[SearchHit]:
    """The best hits. Some may turn out not to be shown to who asks: then all are gone through."""
    weights = await _weights(connection, query.terms)
    statement, parameters = await _ranking(connection, query, weights)
    hits: list[SearchHit] = []
    passed = 0
    for most in (query.limit + _SPARE, MOST_RANKED):
        ranked = await _fetch(connection, statement, {**parameters, "passed": passed, "most": most})
        for start in range(0, len(ranked), query.limit):
            hits += await _looked_at(connection, ranked[start : start + query.limit], query, weights)
            if len(hits) >= query.limit:
                return hits[: query.limit]
        if len(ranked) < most:
            break
        passed += len(ranked)
    return hits


async def _weights(connection: Connection, terms: tuple[Term, ...]) -> list[float]:
    """What each term weighs. How many messages have it is what the planner expects: to count them would take long."""
    total = max((await _fetch(connection, "SELECT reltuples FROM pg_class WHERE oid = 'word'::regclass", ()))[0][0], 1)
    found = []
    for term in terms:
        asked = "EXPLAIN (FORMAT JSON) SELECT FROM word WHERE words @@ %s::tsquery"
        ((plan,),) = await _fetch(connection, asked, (all_words((term,)),))
        found.append(weight(int(total), int(plan[0]["Plan"]["Plan Rows"])))
    return found


class _Filter(NamedTuple):
    joins: str
    condition: str
    values: dict[str, Any]


async def _filter(connection: Connection, query: Query) -> _Filter:
    """What keeps out others' messages, so that those who ask find their own however many there are of others."""
    if query.session_id is not None:
        rows = await _fetch(connection, _LOGS, (query.session_id, query.session_id))
        return _in_logs(rows)
    if query.owner is not None:
        owner = {"owner": plain(query.owner)}
        # Given the logs, the planner knows how much of the index they are; it cannot know that of a join.
        rows = await _fetch(connection, _LOGS_OF_OWNER, {**owner, "most": _MOST_LOGS + 1})
        if len(rows) <= _MOST_LOGS:
            return _in_logs(rows)
        joins = "LEFT JOIN log ON log.log = word.log LEFT JOIN session ON session.sid = log.sid"
        condition = "(session.owner = %(owner)s OR session.sid IS NULL OR session.status = 'deleted')"
        return _Filter(joins, condition, owner)
    return _Filter("", "true", {})


def _in_logs(rows: list[Any]) -> _Filter:
    return _Filter("", "word.log = ANY (%(logs)s::bigint[])", {"logs": [log for (log,) in rows]})


async def _ranking(connection: Connection, query: Query, weights: list[float]) -> tuple[str, dict[str, Any]]:
    """The statement that ranks the newest messages with all the words, and its parameters."""
    filter = await _filter(connection, query)
    parameters: dict[str, Any] = {"words": all_words(query.terms), "phrases": all_phrases(query.terms), **filter.values}
    together = "AND (NOT word.whole OR word.words @@ %(phrases)s::tsquery)"
    counts, scores = _scores(query.terms, weights, parameters)
    statement = f"""
        SELECT log, pos, mean, {" + ".join(scores)} AS score FROM (
            SELECT *, {_DAMPING} AS damping FROM (
                SELECT *, avg(size) OVER () AS mean FROM (
                    SELECT word.log, word.pos, word.number, word.size::double precision AS size, {", ".join(counts)}
                    FROM word {filter.joins}
                    WHERE word.words @@ %(words)s::tsquery AND {filter.condition}
                        {together if any(len(term.words) > 1 for term in query.terms) else ""}
                    ORDER BY word.number DESC LIMIT {MOST_RANKED}
                ) AS newest
            ) AS measured
        ) AS damped
        ORDER BY score DESC, number DESC LIMIT %(most)s OFFSET %(passed)s
    """
    return statement, parameters


def _scores(terms: tuple[Term, ...], weights: list[float], parameters: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Columns with the count of each term, and what each adds to a score."""
    counts: list[str] = []
    scores: list[str] = []
    counted = 0
    for at, (term, each) in enumerate(zip(terms, weights, strict=True)):
        words = lexemes(term)[-max(_MOST_COUNTED - counted, 1) :]
        if at and counted + len(words) > _MOST_COUNTED:
            break
        names = [f"word{counted + place}" for place in range(len(words))]
        parameters |= dict(zip(names, words, strict=True))
        parameters[f"weight{at}"] = each * 2.2
        pairs = zip(names, words, strict=True)
        counts.append(f"least({', '.join(_count(name, word) for name, word in pairs)}) AS count{at}")
        scores.append(f"%(weight{at})s::double precision * count{at} / (count{at} + damping)")
        counted += len(words)
    return counts, scores


def _count(name: str, lexeme: str) -> str:
    """How often a message has a word, out of the only number that PostgreSQL has for it.

    `ts_rank` of a word that is there n times is the sum of 1/i² up to n over that of all, π²/6; what is missing to 1
    is nearly 1/(n + ½) over π²/6. Of several words with the same beginning it is the sum of theirs: at least so many.
    """
    rank = f"ts_rank('{{1, 1, 1, 1}}', word.words, %({name})s::tsquery)::double precision"
    if lexeme.endswith(":*"):
        return f"greatest({rank} * {_ALL}, 1)"
    return f"round(1 / ({_ALL} * greatest(1 - {rank}, 0.0001)) - 0.5)"


async def _looked_at(connection: Connection, ranked: list[Any], query: Query, weights: list[float]) -> list[SearchHit]:
    """The hits among the ranked messages, the best first."""
    rows = await _fetch(connection, _READ, ([row[0] for row in ranked], [row[1] for row in ranked]))
    lent: dict[int, list[Lent]] = {}
    gone = sorted({row[0] for row in rows if row[6] in (None, SessionStatus.DELETED)})
    for log, start, stop, *info in await _fetch(connection, _LENT, (gone,)) if gone else ():
        lent.setdefault(log, []).append(Lent(start, stop, _info(*info)))
    found: list[tuple[float, Place]] = []
    for log, pos, crc, body, *info in rows:
        message = decoded(log, pos, crc, body)
        if message is not None:
            counts, size = counts_of(message, query.terms)
            value = score(weights, counts, size, max(ranked[0][2], 1.0))
            whose = _info(*info) if info[0] is not None else None
            found += ((value, place) for place in attributed(whose, [(pos, message)], lent.get(log, ()), query))
    found.sort(key=lambda each: (each[0], age(each[1])), reverse=True)
    return [hit for value, place in found if (hit := show(place, query.terms, value))]


def _info(session_id: str, agent: str, status: str, owner: str | None) -> AgentSessionInfo:
    """As much of a header as a search asks about."""
    whose = None if owner is None else restored(owner)
    return AgentSessionInfo(SessionId(session_id), restored(agent), status=SessionStatus(status), owner=whose)


async def _fetch(connection: Connection, statement: str, parameters: Any) -> list[Any]:
    return await (await connection.execute(statement.encode(), parameters, binary=True)).fetchall()
