"""The service as an ASGI app: the table of routes behind the guard."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as Served
from starlette.types import ASGIApp

from perdure.server.call import Answer, encoded, read_call
from perdure.server.guard import Guard
from perdure.server.openai.errors import as_openai
from perdure.server.pages.render import prepare
from perdure.server.problems import Problem, problem_of
from perdure.server.routes import Face, Route
from perdure.server.service import Service
from perdure.server.table import ROUTES

Endpoint = Callable[[Request], Awaitable[Response]]
Tell = Callable[[Exception, Request], Response]
_NO_PAGES = ("/api", "/v1", "/agui", "/healthz", "/readyz", "/metrics", "/openapi.json")


def make_app(service: Service, routes: Sequence[Route] = ROUTES) -> ASGIApp:
    """Return the app of a service. Mount it at the root of a host of its own, and nowhere else."""
    app = unguarded(service, routes)
    prepare()
    return Guard(app, service.settings, service.gate, is_open=_opened(routes), is_page=is_page, tell=_told_at)


def unguarded(service: Service, routes: Sequence[Route]) -> ASGIApp:
    """Return the app without its guard, for this process itself: `scope["state"]["caller"]` says who asks."""
    app = Starlette(
        routes=list(_served(service, routes)),
        exception_handlers={HTTPException: _refused},  # a path or a method that is not in the table
    )
    app.router.redirect_slashes = False
    return app


def is_page(path: str) -> bool:
    """Tell whether a path is for people, and not for programs."""
    return not any(path == each or path.startswith(f"{each}/") for each in _NO_PAGES)


def _told_at(error: Exception, path: str) -> Response:
    """Return the response to an error that comes before a route is found, in the form that the path's clients read."""
    problem = problem_of(error)
    return as_openai(problem) if path.startswith("/v1/") else problem.response()


def _opened(routes: Iterable[Route]) -> Callable[[str], bool]:
    """Return a function that tells whether a path needs no token."""
    exact = {route.path for route in routes if route.access == "open" and "{" not in route.path}
    folders = tuple(route.path.partition("{")[0] for route in routes if route.access == "open" and "{" in route.path)
    return lambda path: path in exact or path.startswith(folders) if folders else path in exact


def _served(service: Service, routes: Iterable[Route]) -> Iterable[BaseRoute]:
    for route in routes:
        yield Served(route.path, _endpoint(service, route), methods=[route.method], name=route.name)


def _endpoint(service: Service, route: Route) -> Endpoint:
    async def answer(request: Request) -> Response:
        begun = time.perf_counter()
        response = await _answered(service, route, request)
        service.metrics.count(route.method, route.path, response.status_code, time.perf_counter() - begun)
        return response

    return answer


async def _answered(service: Service, route: Route, request: Request) -> Response:
    try:
        return _as_response(await route.handler(await read_call(service, route, request)), route)
    except Exception as error:  # around a request: each face has its own form of errors
        return _tellers()[route.face](error, request)


def _as_response(made: Any, route: Route) -> Response:
    if isinstance(made, Response):
        return made
    answer = made if isinstance(made, Answer) else Answer(made, route.status)
    if answer.body is None:
        # A 200 would promise a body.
        return Response(None, answer.status if answer.status != 200 else 204, answer.headers)
    return Response(encoded(answer.body), answer.status, answer.headers, "application/json")


def _as_problem(error: Exception, request: Request) -> Response:
    return problem_of(error, if_match="if-match" in request.headers).response()


def _as_openai(error: Exception, request: Request) -> Response:
    return as_openai(problem_of(error))


def _tellers() -> dict[Face, Tell]:
    from perdure.server.pages.problem_page import problem_page

    return {"api": _as_problem, "openai": _as_openai, "agui": _as_problem, "page": problem_page, "health": _as_problem}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = error.headers
    if error.status_code == 405:
        # Starlette's headers name the methods that the path takes.
        problem = Problem(405, "MethodNotAllowed", "This path does not take that method.", headers=headers)
        return _told_at(problem, request.url.path)
    problem = Problem(404, "NotFound", "There is nothing here. See /openapi.json for what there is.")
    if is_page(request.url.path) and "text/html" in request.headers.get("accept", ""):  # as browsers ask
        return _tellers()["page"](problem, request)
    return _told_at(problem, request.url.path)
