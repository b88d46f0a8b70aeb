"""What a search costs once all is indexed, and what it costs to save where people search."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_core import AGENT, store_in
from benchmarks.harness import Figure, Side, interleaved, ms
from perdure import AgentSession, AgentSessionInfo, AgentState, Message, SessionId, SqliteStore

SESSIONS = MESSAGES = 1_000
MATCHES = 10_000
# One message in so many has the word; together they make the most matches that are all ranked.
EVERY = SESSIONS * MESSAGES // MATCHES


def new_session(messages: list[Message]) -> AgentSession:
    info = AgentSessionInfo(SessionId.generate(), AGENT.name)
    return AgentSession(info, AGENT, AgentState.of(AGENT).with_messages(*messages))


def text(draw: random.Random, vocabulary: list[str], number: int) -> str:
    """Ordinary words, the commonest of them very common; and now and then a rare one."""
    words = [vocabulary[int(len(vocabulary) ** draw.random()) - 1] for _ in range(12)]
    rare = "needle" if number % EVERY == 0 else "thimble" if number % (2 * EVERY) == 1 else ""
    return " ".join((*words, "common", rare))


async def fill(store: SqliteStore) -> str:
    """1,000 sessions of 1,000 messages; the id of the last."""
    draw = random.Random(1)
    vocabulary = [f"word{number}" for number in range(20_000)]
    for session in range(SESSIONS):
        first = session * MESSAGES
        said = [Message.user(text(draw, vocabulary, first + place)) for place in range(MESSAGES)]
        last = await store.create(new_session(said))
    return last.id


async def search_figures(folder: Path) -> list[Figure]:
    figures = []
    async with store_in(folder) as store:
        last = await fill(store)
        start = time.perf_counter()
        await store.search("needle")
        built = f"index built in {time.perf_counter() - start:.0f} s"
        queries: dict[str, tuple[str, dict[str, Any]]] = {
            "one word in 10,000 messages": ("needle", {}),
            "that word and one in all messages": ("needle common", {}),
            "the two side by side": ('"common needle"', {}),
            "a word in all messages, the newest 10,000 ranked": ("common", {}),
            "a word in all messages, in one session": ("common", {"session_id": last}),
            "a word that begins so, in 10,000 messages": ("need*", {}),
        }
        for name, (query, options) in queries.items():
            times = []
            for _ in range(15):
                start = time.perf_counter()
                hits = await store.search(query, **options)
                times.append(time.perf_counter() - start)
            detail = f"{len(hits)} hits, median of 15; {built}"
            figures.append(Figure(f"search: {name}", statistics.median(times) * 1000, 50, unit="ms", detail=detail))
    return figures


async def save_figures(folder: Path) -> list[Figure]:
    """Saving beside somebody who searches now and then, against saving where nobody ever did."""
    draw = random.Random(2)
    vocabulary = [f"word{number}" for number in range(20_000)]
    async with store_in(folder / "searched") as searched, store_in(folder / "plain") as plain:
        sides = []
        for store in (searched, plain):
            session = await store.create(new_session([Message.user("hello needle")]))
            sides.append(_saving(store, session, draw, vocabulary))
        await searched.search("needle")
        with_search, without = await interleaved(*sides, rounds=300)
        await searched.search("needle")
    detail = f"{ms(with_search)} over {ms(without)}"
    return [Figure("a save with an index beside the store over one without", with_search / without, 1.1, detail=detail)]


def _saving(store: SqliteStore, session: AgentSession, draw: random.Random, vocabulary: list[str]) -> Side:
    async def save() -> None:
        nonlocal session
        said = [Message.user(text(draw, vocabulary, 7)) for _ in range(4)]
        session = await store.save(session.with_state(session.state.with_messages(*said)))

    return save


async def figures() -> list[Figure]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp))
    try:
        return [*await save_figures(folder / "saves"), *await search_figures(folder / "searches")]
    finally:
        shutil.rmtree(folder)
