"""Ranking by the SQLite store's index, compared with a model that looks at every message."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from perdure.model.message import Message
from perdure.protocols import SearchHit
from perdure.stores.search import Place, Query, counts_of, score, show, weight
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite import ranking as sqlite_ranking
from perdure.testing.samples import new_session

# From a word that is nearly everywhere to one that is nowhere.
VOCABULARY = ["the"] * 40 + ["tea"] * 12 + ["team"] * 6 + ["pot"] * 3 + ["kettle", "lid"]
TERMS = [
    "the",
    "tea",
    "team",
    "pot",
    "kettle",
    "lid",
    "spoon",
    "te*",
    "th*",
    "k*",
    '"the tea"',
    '"tea the"',
    '"the te"*',
]


class Said(NamedTuple):
    session_id: str
    owner: str
    position: int
    message: Message


def best(said: Sequence[Said], query: Query, most: int) -> list[SearchHit]:
    """Return the expected hits for messages in the order in which they were saved."""
    counted = [counts_of(each.message, query.terms) for each in said]
    having = [min(sum(1 for counts, _ in counted if counts[at]), most + 1) for at in range(len(query.terms))]
    weighed = [at for at, number in enumerate(having) if number <= most] or list(range(len(having)))
    weights = [weight(len(said), having[at]) for at in weighed]
    mean = sum(size for _, size in counted) / len(said)
    found = [
        (score(weights, [counts[at] for at in weighed], size, mean), each)
        for each, (counts, size) in zip(said, counted, strict=True)
        if all(counts) and query.owner in (None, each.owner) and query.session_id in (None, each.session_id)
    ]
    newest = found[-most:][::-1]
    ranked = sorted(newest, key=lambda each: -round(each[0], 9))
    shown = [show(Place(each.session_id, each.message, each.position), query.terms, value) for value, each in ranked]
    return [hit for hit in shown if hit is not None][: query.limit]


def drawn_text(draw: random.Random) -> str:
    return " ".join(draw.choices(VOCABULARY, k=draw.randint(1, 9)))


@pytest.mark.parametrize(("most", "missed"), [(10_000, 100), (60, 100), (60, 3), (12, 1), (3, 2)])
async def test_hits_are_those_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, missed: int
) -> None:
    """The hits have the same order, scores and snippets as the model's, however common the words of a query are."""
    monkeypatch.setattr(sqlite_ranking, "MOST_RANKED", most)
    monkeypatch.setattr(sqlite_ranking, "_MOST_MISSED", missed)
    draw = random.Random(most * 1000 + missed)
    said: list[Said] = []
    async with SqliteStore(tmp_path / "sessions.db") as store:
        for _ in range(12):
            whose = draw.choice(["ann", "bob"])
            session = await store.create(new_session(*(drawn_text(draw) for _ in range(20)), owner=whose))
            messages = enumerate(session.state.messages)
            said += (Said(session.id, whose, position, message) for position, message in messages)
        for _ in range(120):
            text, owner, session_id, limit = query = drawn_query(draw, said)
            found = await store.search(text, owner=owner, session_id=session_id, limit=limit)
            wanted = best(said, Query.of(*query), most)
            assert [plain(hit) for hit in found] == [plain(hit) for hit in wanted], query
            assert [hit.score for hit in found] == pytest.approx([hit.score for hit in wanted], abs=2e-6), query


def drawn_query(draw: random.Random, said: Sequence[Said]) -> tuple[str, str | None, str | None, int]:
    text = " ".join(draw.sample(TERMS, k=draw.choice([1, 1, 2, 2, 3, 4])))
    owner = draw.choice([None, None, "ann", "carl"])
    session_id = draw.choice([None, None, draw.choice(said).session_id])
    return text, owner, session_id, draw.choice([1, 5, 20, 1000])


def plain(hit: SearchHit) -> tuple[object, ...]:
    return hit.session_id, hit.position, hit.message_id, hit.snippet, hit.matches
