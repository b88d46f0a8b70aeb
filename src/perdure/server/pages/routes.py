"""The inspector's part of the table of routes."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.server.pages import (
    approvals,
    cost,
    diff,
    login,
    run,
    session_list,
    session_live,
    session_page,
    session_verbs,
    workers,
)
from perdure.server.pages.static_files import get_static
from perdure.server.routes import Handler, Route

_SESSION = "/sessions/{session}"


def page_routes() -> Iterator[Route]:
    yield from _signing_in()
    yield Route("GET", "/static/{file}", get_static, "A file of the inspector's", access="open", face="page")
    yield Route("GET", "/", session_list.list_sessions, "The list of sessions", session_list.ListQuery, face="page")
    yield from _session_routes()
    yield from _work_routes()


def _session_routes() -> Iterator[Route]:
    yield Route(
        "GET", _SESSION, session_page.get_session, "The page of a session", session_page.SessionQuery, face="page"
    )
    yield Route(
        "GET",
        f"{_SESSION}/blocks/{{block}}",
        session_page.get_block,
        "What a compaction covers",
        session_page.BlockQuery,
        face="page",
    )
    yield Route(
        "GET",
        f"{_SESSION}/live",
        session_live.follow_session,
        "What happens in a session, as rows of its page",
        session_live.LiveQuery,
        face="page",
        is_stream=True,
    )
    for handler, form in session_verbs.VERBS.items():
        name = handler.__name__
        yield Route(
            "POST",
            f"{_SESSION}/{name}",
            handler,
            f"A form of the page of a session: {name}",
            body=form,
            status=303,
            access="write",
            face="page",
        )


def _signing_in() -> Iterator[Route]:
    yield Route("GET", "/login", login.get_login, "Sign in", login.LoginQuery, access="open", face="page")
    yield Route("POST", "/login", login.post_login, "Sign in", body=login.LoginForm, access="open", face="page")
    yield Route("POST", "/logout", login.post_logout, "Sign out", body=login.Nothing, access="open", face="page")


def _work_routes() -> Iterator[Route]:
    """Yield the pages of what ran, what waits, and what it cost."""
    pages: tuple[tuple[str, Handler, type, str], ...] = (
        (f"{_SESSION}/runs/{{run}}", run.get_run, run.RunQuery, "A run, step by step"),
        ("/diff", diff.get_diff, diff.DiffQuery, "Two sessions or versions side by side"),
        ("/approvals", approvals.get_approvals, approvals.ApprovalsQuery, "All calls that wait"),
        ("/workers", workers.get_workers, workers.WorkersQuery, "The work that is left to workers"),
        ("/cost", cost.get_cost, cost.CostQuery, "What runs have cost"),
    )
    for path, handler, query, summary in pages:
        yield Route("GET", path, handler, summary, query, face="page")
    forms: tuple[tuple[str, Handler, type, str], ...] = (
        ("/approvals/{session}", approvals.post_decision, approvals.Decision, "Decide on a call that waits"),
        ("/workers/{session}/retry", workers.post_retry, workers.Nothing, "Open a parked session"),
        ("/workers/{session}/drop", workers.post_drop, workers.Nothing, "Take back what waits"),
        ("/workers/{session}/drop-timer", workers.post_drop_timer, workers.TimerName, "Take back what is delayed"),
    )
    for path, handler, body, summary in forms:
        yield Route("POST", path, handler, summary, body=body, status=303, access="write", face="page")
