"""The inspector's part of the table of routes."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.server.pages import login, session_list, session_live, session_page, session_verbs
from perdure.server.pages.static_files import get_static
from perdure.server.routes import Route

_SESSION = "/sessions/{session}"


def page_routes() -> Iterator[Route]:
    yield from _signing_in()
    yield Route("GET", "/static/{file}", get_static, "A file of the inspector's", access="open", face="page")
    yield Route("GET", "/", session_list.list_sessions, "The list of sessions", session_list.ListQuery, face="page")
    yield from _session_routes()


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
