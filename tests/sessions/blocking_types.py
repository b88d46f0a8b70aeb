"""The types that a caller of the blocking face sees. mypy checks them, and test_blocking.py runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_type

import perdure
from perdure.model.loop_events import AnyLoopEvent
from perdure.protocols import SearchHit


@dataclass
class City:
    name: str
    people: int


CITY = 'Repeat: {"name": "Bern", "people": 134591}'


def talk() -> None:
    with perdure.connect_blocking("memory://", model="offline") as sessions:
        assert_type(sessions, perdure.BlockingSessions)
        chat = sessions.open("a", tags=["x"])
        assert_type(chat, perdure.BlockingChat)
        assert_type(chat.id, perdure.SessionId)
        assert_type(chat.send("hi"), perdure.Reply[Any])
        assert_type(chat.send(CITY, output=City).value, City)
        assert_type(sessions.run(CITY, output=City).value, City)
        for chunk in chat.stream("hi"):
            assert_type(chunk, perdure.Chunk)
        assert_type(chat.events(), Iterator[AnyLoopEvent])
        branch = chat.fork()
        assert_type(branch, perdure.BlockingChat)
        assert_type(chat.diff(branch), perdure.Diff)
        assert_type(branch.length(), int)
        assert_type(chat.search("hi"), Sequence[SearchHit])
        assert_type(sessions.list(limit=5), perdure.SessionInfoList[perdure.ListedSession])


def start() -> None:
    with perdure.connect_blocking("memory://", model="offline") as sessions:
        run = sessions.open("a").start(CITY, output=City)
        assert_type(run, perdure.BlockingRun[City])
        assert_type(run.stream(), Iterator[perdure.Chunk])
        assert_type(run.result().value, City)
        hers = sessions.of("ada")
        assert_type(hers, perdure.BlockingSessions)
        assert_type(hers.open("b").sessions, perdure.BlockingSessions)
        assert_type(hers.expecting(1).session("b"), perdure.AgentSession)
        queued = hers.open("b").enqueue("later")
        assert_type(queued, perdure.BlockingQueued)
        assert_type(queued.key, str)
        assert_type(queued.reply(timeout=0.01), perdure.Reply[Any] | None)


def mistakes(sessions: perdure.BlockingSessions, chat: perdure.BlockingChat) -> None:
    """Hold the mistakes that a type checker finds: each exception to it would be an error if it were not needed."""
    chat.sent("hi")  # type: ignore[attr-defined]
    chat.send("hi", model_option=None)  # type: ignore[call-overload]
    chat.trim("4")  # type: ignore[arg-type]
    sessions.open(5)  # type: ignore[arg-type]
