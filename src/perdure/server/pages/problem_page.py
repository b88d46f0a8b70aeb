"""Errors as pages: perdure's own sentence, the status that fits, and a way back."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from perdure.server.guard import SAFE
from perdure.server.pages.render import filled
from perdure.server.problems import problem_of


def problem_page(error: Exception, request: Request) -> Response:
    """Return the page for an error. A conflict of a change that was bound to a version has the status 412."""
    is_change = request.method not in SAFE
    problem = problem_of(error, if_match=is_change)
    back = request.path_params.get("session") if is_change else None
    html = filled(
        "problem.html",
        may_write=False,
        is_signed_in=False,
        is_operator=False,
        path="",
        status=problem.status,
        phrase=HTTPStatus(problem.status).phrase,
        detail=problem.detail,
        is_change=is_change,
        back="/" if back is None else f"/sessions/{quote(back)}",
    )
    return HTMLResponse(html, problem.status, problem.headers)
