"""The suite of LangGraph, with PerdureSaver in place of its SQLite savers: plain, encrypting, sync and async."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from suite import Suite

_TIMED = "counts how soon pieces arrive, in tenths of a second; fails with LangGraph's own saver on a busy machine too"

SUITES = (
    Suite(
        "langgraph",
        "langgraph",
        ("tests",),
        bar=1_010,
        excused={
            "tests/test_pregel.py::test_stream_subgraphs_during_execution[*": _TIMED,
            "tests/test_pregel.py::test_stream_buffering_single_node[*": _TIMED,
        },
        arguments=("-k", "sqlite", "--timeout", "300"),
        environment={"NO_DOCKER": "true"},
        minutes=30,
    ),
)


def pytest_configure() -> None:
    """Put PerdureSaver where the tests look for SqliteSaver and AsyncSqliteSaver."""
    import langgraph.checkpoint.sqlite as sqlite
    import langgraph.checkpoint.sqlite.aio as sqlite_aio

    from perdure.adapters.langgraph import PerdureSaver

    class Sync(PerdureSaver):
        @classmethod
        @contextmanager
        def from_conn_string(cls, conn_string: str) -> Iterator[PerdureSaver]:
            with tempfile.TemporaryDirectory() as where:
                saver = PerdureSaver(store=f"sqlite:///{where}/threads.db")
                yield saver
                saver._home.shared.close()

    class Async(PerdureSaver):
        @classmethod
        @asynccontextmanager
        async def from_conn_string(cls, conn_string: str) -> AsyncIterator[PerdureSaver]:
            with Sync.from_conn_string(conn_string) as saver:
                yield saver

    swapped: Any = (sqlite, sqlite_aio)
    swapped[0].SqliteSaver, swapped[1].AsyncSqliteSaver = Sync, Async
