"""The inspector's part of the table of routes."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.server.pages.static_files import get_static
from perdure.server.routes import Route


def page_routes() -> Iterator[Route]:
    yield Route("GET", "/static/{file}", get_static, "A file of the inspector's", access="open", face="page")
