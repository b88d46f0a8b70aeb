"""The inspector's part of the table of routes."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.server.pages import login
from perdure.server.pages.static_files import get_static
from perdure.server.routes import Route


def page_routes() -> Iterator[Route]:
    yield from _signing_in()
    yield Route("GET", "/static/{file}", get_static, "A file of the inspector's", access="open", face="page")


def _signing_in() -> Iterator[Route]:
    yield Route("GET", "/login", login.get_login, "Sign in", login.LoginQuery, access="open", face="page")
    yield Route("POST", "/login", login.post_login, "Sign in", body=login.LoginForm, access="open", face="page")
    yield Route("POST", "/logout", login.post_logout, "Sign out", body=login.Nothing, access="open", face="page")
