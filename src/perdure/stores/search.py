"""Searching messages: the terms of a query, the words of a message, the ranking and the snippets.

Every store reads queries and words in the same way, so that all find the same. Words are folded: no case, no accents.
"""

from __future__ import annotations

import re
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from heapq import nlargest
from itertools import islice, takewhile
from math import log
from operator import itemgetter
from typing import Any, NamedTuple

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.model.ids import SessionId
from perdure.model.message import Media, Message, Text, ToolCall, ToolResult
from perdure.model.session import AgentSessionInfo, SessionStatus, check_owner
from perdure.model.value import brief
from perdure.protocols import SearchHit
from perdure.stores.engine import Job, Select
from perdure.stores.format.heads import decode_info, unpacked_head
from perdure.stores.jobs.loading import is_message_sound

MOST_RANKED = 10_000
_MOST_HITS = 1_000
# No real query needs more than this, and a very long one would keep all others waiting.
_MOST_TERMS = 32
_MOST_WORDS = 32
_LONGEST_QUERY = 4_000
# Scripts written without spaces: each letter is a word, so that any piece of a text can be found.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[^\W_][\u0300-\u036f]*)+")
_TERM = re.compile(r'"(?P<quoted>[^"]*)"(?P<stem>\*?)|(?P<plain>[^\s"]+|")')
_BEFORE, _AROUND = 50, 200


class Term(NamedTuple):
    """Words that have to follow each other. If it is a `prefix`, the last one is only the beginning of a word."""

    words: tuple[str, ...]
    prefix: bool = False


class Query(NamedTuple):
    """A checked search. Without terms it finds nothing."""

    terms: tuple[Term, ...]
    owner: str | None
    session_id: str | None
    limit: int

    @property
    def has_prefixes(self) -> bool:
        """True if it asks for the beginning of a word."""
        return any(term.prefix for term in self.terms)

    @classmethod
    def of(cls, text: str, owner: str | None, session_id: str | None, limit: int) -> Query:
        if not isinstance(text, str) or not text.strip():
            raise InvalidData("$.text", f"give some words to search for; got {brief(text)}")
        check_owner(owner)
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MOST_HITS:
            raise InvalidData("$.limit", f"a search gives 1 to {_MOST_HITS} messages, not {brief(limit)}")
        return cls(_terms(text), owner, None if session_id is None else SessionId(session_id), limit)


def _terms(text: str) -> tuple[Term, ...]:
    found: dict[Term, None] = {}
    for match in _TERM.finditer(text[:_LONGEST_QUERY]):
        said = match["plain"] if match["quoted"] is None else match["quoted"]
        words = tuple(words_of(said))[:_MOST_WORDS]
        if words:
            is_stem = bool(match["stem"]) if match["quoted"] is not None else said.endswith("*")
            found[Term(words, is_stem)] = None
    return tuple(found)[:_MOST_TERMS]


def text_of(message: Message) -> str:
    """Return the text of a message that can be searched: its own, and that of tool calls and their results."""
    return "\n".join(filter(None, map(_text_of_part, message.parts)))


def _text_of_part(part: Any) -> str:
    if isinstance(part, Text | ToolResult):
        return part.text
    if isinstance(part, ToolCall):
        return " ".join((part.name, *_leaves(part.arguments)))
    return (part.name or "") if isinstance(part, Media) else ""


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif value is not None:
        yield str(value)


def words_of(text: str) -> list[str]:
    """Return the words of a text, folded, in order."""
    if text.isascii():  # the usual case, without Python code for each word
        return _ASCII_WORD.findall(text.lower())
    return [_folded(match[0]) for match in _WORD.finditer(text)]


_ASCII_WORD = re.compile(r"[a-z0-9]+")


def _folded(word: str) -> str:
    if word.isascii():
        return word.lower()
    # Twice, as in Unicode's caseless matching: folding the case may give letters that can be decomposed again.
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", word).casefold())
    return "".join(letter for letter in plain if not unicodedata.combining(letter)) or word


class Place(NamedTuple):
    """A message with its position, and the session that a hit names for it."""

    session_id: str
    message: Message
    position: int


class Lent(NamedTuple):
    """A stretch of a log that a session other than its owner shows."""

    start: int
    stop: int
    info: AgentSessionInfo


def attributed(
    owner: AgentSessionInfo | None, messages: Iterable[tuple[int, Message]], lent: Sequence[Lent], query: Query
) -> Iterator[Place]:
    """Yield messages of one log as its owner's, or if that is gone or hidden, as those of another that shows them."""
    if owner is not None and not is_gone(owner):
        if _is_asked_for(owner, query):
            yield from (Place(owner.id, message, position) for position, message in messages)
        return
    asked = [each for each in lent if each.info.status is not SessionStatus.DELETED and _is_asked_for(each.info, query)]
    for position, message in messages if asked else ():
        for each in asked:
            if each.start <= position < each.stop:
                yield Place(each.info.id, message, position)
                break


def is_gone(owner: AgentSessionInfo | None) -> bool:
    """Tell whether a session is erased or hidden. Hits then name other sessions that show its messages."""
    return owner is None or owner.status is SessionStatus.DELETED


def _is_asked_for(info: AgentSessionInfo, query: Query) -> bool:
    return query.owner in (None, info.owner) and query.session_id in (None, info.id)


def everywhere(query: Query) -> Job[list[SearchHit]]:
    """Return the best hits by reading all messages, for engines without an index.

    Damaged messages and sessions are left out. A list reports them.
    """
    if not query.terms:
        return []
    ranking = Ranking(query)
    infos: dict[int, AgentSessionInfo | None] = {}
    heirs: dict[int, list[int]] = {}
    for sid, session_id, version, line in (yield Select("session", ("sid", "id", "version", "line"), order="sid")):
        infos[sid] = yield from _info_of(sid, session_id, version)
        heirs.setdefault(line, []).append(sid)
    shown: dict[int | str, list[Any]] = {}
    for key, *row in (yield Select("ref", ("log", "child", "start", "stop", "since"))):
        shown.setdefault(key, []).append(row)
    for key, sid in (yield Select("log", ("log", "sid"), order="log")):
        owner = infos.get(sid)
        if owner is not None or sid not in infos:
            if any(child == sid for child, *_ in shown.get(key, ())):
                owner = None  # it has forgotten some of its log, and its own rows say what it still has
            if owner is not None and not is_gone(owner) and not _is_asked_for(owner, query):
                continue
            lent = _lent(shown.get(key, ()), infos, heirs) if is_gone(owner) else ()
            rows = yield Select("msg", ("pos", "crc", "body"), {"log": key}, order="pos", lenient=True)
            ranking.add(attributed(owner, _read(key, rows), lent, query))
    return ranking.best()


def _lent(
    rows: Iterable[Any], infos: Mapping[int, AgentSessionInfo | None], heirs: Mapping[int, Sequence[int]]
) -> list[Lent]:
    """Return the stretches of a log that sessions show. The oldest session comes first, and is named in hits."""
    found: list[tuple[int, Lent]] = []
    for child, start, stop, since in rows:
        # A row without a `since` is handed down: all forks whose line leads to this session show it, too.
        showing, todo = {child}, [child] if since is None else []
        while todo:
            young = [sid for sid in heirs.get(todo.pop(), ()) if sid not in showing]
            showing.update(young)
            todo += young
        for sid in showing:
            if (info := infos.get(sid)) is not None:
                found.append((sid, Lent(start, stop, info)))
    return [lent for _, lent in sorted(found, key=itemgetter(0))]


def _info_of(sid: int, session_id: str, version: int) -> Job[AgentSessionInfo | None]:
    """Return the header of a session; None if it is damaged."""
    heads = yield Select("head", ("crc", "body"), {"sid": sid, "version": version}, lenient=True)
    try:
        ((crc, body),) = heads
        return decode_info(unpacked_head(body, crc, session_id, sid, version), session_id, version)
    except (ValueError, CorruptRecord):
        return None


def _read(key: int | str, rows: Iterable[tuple[int, int | None, bytes]]) -> Iterator[tuple[int, Message]]:
    for position, crc, body in rows:
        with suppress(InvalidData):
            if is_message_sound(key, position, crc, body):
                yield position, codec.decode_message(body)


def rank(places: Iterable[Place], query: Query) -> list[SearchHit]:
    """Return the best hits by reading all messages, for stores without an index."""
    if not query.terms:
        return []
    ranking = Ranking(query)
    ranking.add(places)
    return ranking.best()


class Ranking:
    """A ranking of all messages, read one by one, which keeps those that a query asks for."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._counted: list[tuple[Place, list[int], int]] = []
        self._total = 0
        self._length = 0

    def add(self, places: Iterable[Place]) -> None:
        for place in places:
            counts, size = counts_of(place.message, self._query.terms)
            self._total += 1
            self._length += size
            if all(counts):
                self._counted.append((place, counts, size))

    def best(self) -> list[SearchHit]:
        """Return the best hits, best first."""
        terms, total = self._query.terms, self._total
        newest = nlargest(MOST_RANKED, self._counted, key=lambda each: age(each[0]))
        weights = [weight(total, sum(1 for _, counts, _ in newest if counts[at])) for at in range(len(terms))]
        mean = self._length / total if total else 1.0
        scored = [(score(weights, counts, size, mean), place) for place, counts, size in newest]
        best = nlargest(self._query.limit, scored, key=lambda each: (each[0], age(each[1])))
        return [hit for value, place in best if (hit := show(place, terms, value))]


def age(place: Place) -> tuple[str, int]:
    """Return a value that is greater for newer messages. Perdure's own ids are in the order of time."""
    return place.message.id if created_at(place.message.id) else "", place.position


def best_of(hits: Iterable[SearchHit], limit: int) -> list[SearchHit]:
    """Return the best of hits from several searches."""
    return nlargest(limit, hits, key=_merit)


def _merit(hit: SearchHit) -> tuple[float, str, int]:
    return hit.score, hit.message_id if hit.created_at else "", hit.position


def counts_of(message: Message, terms: Sequence[Term]) -> tuple[list[int], int]:
    """Return the number of times that a message has each term, and the number of its words."""
    words = words_of(text_of(message))
    return [_count(words, term) for term in terms], len(words)


def _count(words: Sequence[str], term: Term) -> int:
    return sum(1 for _ in _places_of(words, term))


def _places_of(words: Sequence[str], term: Term) -> Iterator[int]:
    end = len(words) - len(term.words) + 1
    if term.prefix and len(term.words) == 1:
        yield from (at for at, word in enumerate(words) if word.startswith(term.words[0]))
        return
    at = 0
    while at < end:
        try:
            at = words.index(term.words[0], at, end)
        except ValueError:
            return
        if _matches(words, at, term):
            yield at
        at += 1


def _matches(words: Sequence[str], at: int, term: Term) -> bool:
    last = at + len(term.words) - 1
    ends = words[last].startswith(term.words[-1]) if term.prefix else words[last] == term.words[-1]
    return ends and all(words[at + place] == word for place, word in enumerate(term.words[:-1]))


def weight(total: int, having: int) -> float:
    """Return the weight of a term, which is greater for a rarer one."""
    return log(1.0 + (max(total - having, 0) + 0.5) / (having + 0.5))


def score(weights: Sequence[float], counts: Sequence[int], length: int, mean: float) -> float:
    """Return the BM25 score of a message. It grows with the number of hits, and falls with the message's length."""
    # The usual constants: k1 = 1.2, b = 0.75; and 2.2 is k1 + 1.
    damping = 1.2 * (0.25 + 0.75 * length / mean)
    return sum(each * count * 2.2 / (count + damping) for each, count in zip(weights, counts, strict=True))


def show(place: Place, terms: Sequence[Term], value: float) -> SearchHit | None:
    """Return the hit for a message; None if it lacks one of the terms after all."""
    text = text_of(place.message)
    words = words_of(text)
    firsts = [next(_places_of(words, term), len(words)) for term in terms]
    if not firsts or len(words) in firsts:
        return None
    first = min(firsts)
    start, stop = _window(text, next(_word_spans(text, first))[0])
    snippet = ("…" if start else "") + text[start:stop] + ("…" if stop < len(text) else "")
    shift = start - (1 if start else 0)
    spans = takewhile(lambda span: span[1] <= stop, _word_spans(text, first))
    inside = tuple((low - shift, high - shift) for low, high in _asked_for(list(spans), words[first:], terms))
    message = place.message
    made = created_at(message.id)
    return SearchHit(
        SessionId(place.session_id), message.id, message.role, snippet, inside, round(value, 6), place.position, made
    )


def _word_spans(text: str, first: int) -> Iterator[tuple[int, int]]:
    """Return the spans of a text's words, beginning with the word number `first`."""
    pattern = _ASCII_SPAN if text.isascii() else _WORD
    return (match.span() for match in islice(pattern.finditer(text), first, None))


_ASCII_SPAN = re.compile(r"[A-Za-z0-9]+")


def _asked_for(
    spans: Sequence[tuple[int, int]], words: Sequence[str], terms: Sequence[Term]
) -> Iterator[tuple[int, int]]:
    """Return the given spans whose words are part of a term. A long text has many more words than are shown."""
    near = words[: len(spans) + _MOST_WORDS]
    hit = {at + step for term in terms for at in _places_of(near, term) for step in range(len(term.words))}
    return (span for at, span in enumerate(spans) if at in hit)


def _window(text: str, first: int) -> tuple[int, int]:
    """Return the bounds of a snippet around a place, cut between words where a space is near."""
    start = max(0, first - _BEFORE)
    if start:
        space = text.find(" ", start, first)
        start = start if space < 0 else space + 1
    stop = min(len(text), start + _AROUND)
    if stop < len(text):
        space = text.rfind(" ", first + 1, stop)
        stop = stop if space < first + _BEFORE else space
    return start, stop


def created_at(message_id: str) -> datetime | None:
    """Return the time in an id of version 7; None if it is another id."""
    try:
        found = uuid.UUID(message_id)
    except ValueError:
        return None
    try:
        # The first 48 of its 128 bits are the milliseconds since 1970.
        return datetime.fromtimestamp((found.int >> 80) / 1000, UTC) if found.version == 7 else None
    except (ValueError, OverflowError):  # a year that Python's calendar does not have
        return None
