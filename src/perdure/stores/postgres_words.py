"""The words of messages in PostgreSQL: how they are indexed, and how the index is asked for them.

What is written is only noted as not indexed yet; whoever searches brings the index up to date before.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.stores.format.rows import checksum
from perdure.stores.postgres_archive import Db, first_row, rows_of
from perdure.stores.postgres_link import Link
from perdure.stores.search import Term, text_of, words_of

_LOCK = 0x70657266
_STRETCHES_AT_ONCE = 500
_MESSAGES_AT_ONCE = 2_000
_STRETCH = 100
# PostgreSQL's own bounds: 2 KB for a word, 1 MB for all of a message, its highest place, and the places of one word.
_LONGEST_WORD = 200
_MOST_BYTES = 1_000_000
_LAST_PLACE = 16_383
_MOST_PLACES = 255

_UNINDEXED = f"""
    DELETE FROM unindexed WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM (
            SELECT ctid, sum(stop - start) OVER (ROWS UNBOUNDED PRECEDING) - (stop - start) AS before
            FROM (SELECT ctid, start, stop FROM unindexed LIMIT {_STRETCHES_AT_ONCE}) AS first
        ) AS counted WHERE before < {_MESSAGES_AT_ONCE}
    )) RETURNING log, start, stop
"""
# In the order in which they lie there: nearly that in which they were saved, which is how the newest are known.
_EVERYTHING = f"""
    INSERT INTO unindexed (log, start, stop)
    SELECT log, min(pos), max(pos) + 1 FROM msg GROUP BY log, pos / {_STRETCH} ORDER BY max(ctid)
"""
# A message that is erased meanwhile waits until the index of it is there, to go with it.
_MESSAGES = "SELECT pos, crc, body FROM msg WHERE log = %s AND pos >= %s AND pos < %s ORDER BY pos FOR KEY SHARE"
_INSERT = """
    INSERT INTO word (log, pos, size, whole, words)
    SELECT log, pos, size, whole, words::tsvector
    FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::boolean[], %s::text[])
        AS new (log, pos, size, whole, words)
    ON CONFLICT (log, pos) DO UPDATE SET size = excluded.size, whole = excluded.whole, words = excluded.words
"""


async def index(link: Link, *, anew: bool = False, progress: Callable[[int, int], None] | None = None) -> int:
    """Have everything indexed that was committed before, or all of it `anew`; how many messages that were."""
    if anew:
        await link.whole(_forget_all)
    lacking = 0 if progress is None else await _lacking(link)
    done = 0
    while await link.row("SELECT 1 FROM unindexed LIMIT 1") is not None:
        done += await link.whole(_index_some)
        if progress is not None:
            progress(done, max(done, lacking))
    return done


async def _lacking(link: Link) -> int:
    """How many messages are not indexed yet."""
    return int((await link.row("SELECT coalesce(sum(stop - start), 0)::bigint FROM unindexed"))[0])


def _one_at_a_time(db: Db) -> None:
    db.execute("SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))", (_LOCK,))


def _forget_all(db: Db) -> None:
    """Empty the index, and note all messages as not indexed yet."""
    _one_at_a_time(db)
    db.execute("DELETE FROM word")
    db.execute("DELETE FROM unindexed")
    db.execute(_EVERYTHING)


def _index_some(db: Db) -> int:
    """Index some of what is not indexed yet, and say how many messages. Who waits finds it done."""
    _one_at_a_time(db)
    indexed: dict[tuple[int, int], tuple[int, bool, str]] = {}
    for log, start, stop in rows_of(db, _UNINDEXED):
        for pos, crc, body in rows_of(db, _MESSAGES, log, start, stop):
            message = decoded(log, pos, crc, body)
            if message is not None:
                indexed[log, pos] = vector_of(message)
    if indexed:
        columns = zip(*((*key, *vector) for key, vector in indexed.items()), strict=True)
        db.execute(_INSERT, [list(column) for column in columns])
    return len(indexed)


def decoded(log: int, pos: int, crc: int, body: bytes) -> Message | None:
    """A message, or None if it is damaged: then others are found all the same."""
    try:
        return codec.decode_message(body) if checksum(body, log, pos) == crc else None
    except InvalidData:
        return None


def vector_of(message: Message) -> tuple[int, bool, str]:
    """How many words a message has, whether all of their places are in its vector, and the vector as it is written."""
    words = words_of(text_of(message))
    places: dict[str, list[int]] = {}
    room, whole = _MOST_BYTES, len(words) <= _LAST_PLACE
    for place, word in enumerate((each[:_LONGEST_WORD] for each in words), 1):
        found = places.get(word)
        # A place takes two bytes; a new word itself, how many places it has, and what aligns them.
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
    return len(words), whole, " ".join(f"{_quoted(word)}:{','.join(map(str, at))}" for word, at in places.items())


def forget(db: Db, log: int, pos: int) -> None:
    """Have a message that was replaced indexed anew."""
    if first_row(db, "DELETE FROM word WHERE log = %s AND pos = %s RETURNING 1", log, pos) is not None:
        db.execute("INSERT INTO unindexed (log, start, stop) VALUES (%s, %s, %s)", (log, pos, pos + 1))


def lexemes(term: Term) -> list[str]:
    """A tsquery for each of a term's words."""
    last = len(term.words) - 1
    return [_lexeme(word, term.prefix and place == last) for place, word in enumerate(term.words)]


def _lexeme(word: str, is_stem: bool) -> str:
    return _quoted(word[:_LONGEST_WORD]) + (":*" if is_stem or len(word) > _LONGEST_WORD else "")


def _quoted(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def all_words(terms: tuple[Term, ...]) -> str:
    """A tsquery for the messages that have all words of all terms."""
    return " & ".join(dict.fromkeys(each for term in terms for each in lexemes(term)))


def all_phrases(terms: tuple[Term, ...]) -> str:
    """A tsquery for those among them, as far as their vectors are whole, whose phrases stand together."""
    return " & ".join(f"({' <-> '.join(lexemes(term))})" for term in terms)
