"""The inspector's part of the table of routes."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.server.pages.approvals import ApprovalsQuery, Decision, get_approvals, post_decision
from perdure.server.pages.cost import CostQuery, get_cost
from perdure.server.pages.diff import DiffQuery, get_diff
from perdure.server.pages.run import RunQuery, get_run
from perdure.server.pages.static_files import get_static
from perdure.server.pages.workers import (
    Nothing,
    TimerName,
    WorkersQuery,
    get_workers,
    post_drop,
    post_drop_timer,
    post_retry,
)
from perdure.server.routes import Handler, Route


def page_routes() -> Iterator[Route]:
    yield Route("GET", "/static/{file}", get_static, "A file of the inspector's", access="open", face="page")
    yield from _work_pages()


def _work_pages() -> Iterator[Route]:
    """Yield what ran, what waits, and what it cost."""
    yield Route("GET", "/sessions/{session}/runs/{run}", get_run, "A run, step by step", RunQuery, face="page")
    yield Route("GET", "/diff", get_diff, "Two sessions or versions side by side", DiffQuery, face="page")
    yield Route("GET", "/approvals", get_approvals, "All calls that wait", ApprovalsQuery, face="page")
    yield Route(
        "POST", "/approvals/{session}", post_decision, "Decide on a call", body=Decision, access="write", face="page"
    )
    yield Route("GET", "/workers", get_workers, "The work that is left to workers", WorkersQuery, face="page")
    forms: tuple[tuple[str, Handler, type, str], ...] = (
        ("retry", post_retry, Nothing, "Open a parked session"),
        ("drop", post_drop, Nothing, "Take back what waits"),
        ("drop-timer", post_drop_timer, TimerName, "Take back what is to be sent later"),
    )
    for verb, handler, body, summary in forms:
        path = f"/workers/{{session}}/{verb}"
        yield Route("POST", path, handler, summary, body=body, access="write", face="page")
    yield Route("GET", "/cost", get_cost, "What runs have cost", CostQuery, face="page")
