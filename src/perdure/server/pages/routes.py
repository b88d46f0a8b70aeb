"""The inspector's part of the table of routes."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.server.pages.run import RunQuery, get_run
from perdure.server.pages.static_files import get_static
from perdure.server.routes import Route


def page_routes() -> Iterator[Route]:
    yield Route("GET", "/static/{file}", get_static, "A file of the inspector's", access="open", face="page")
    yield from _work_pages()


def _work_pages() -> Iterator[Route]:
    """Yield what ran, what waits, and what it cost."""
    yield Route("GET", "/sessions/{session}/runs/{run}", get_run, "A run, step by step", RunQuery, face="page")
