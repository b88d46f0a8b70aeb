"""The table of routes as an OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, TypedDict

import msgspec

from perdure import __version__
from perdure.server.routes import Route

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
_HEADERS = {
    "Idempotency-Key": "The same key again is the same request: nothing is done twice.",
    "If-Match": 'The version that the session must have, such as "7"; 412 if it has another.',
}


class ProblemForm(TypedDict, total=False):
    """The form of every error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str


def document_of(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document that describes routes. Pages for people are left out."""
    told = [route for route in routes if route.face != "page"]
    types = [ProblemForm, *_types_of(told)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(map(_key, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in told:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "perdure", "version": __version__, "description": "Sessions for LLM agents that last."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _key(kind: Any) -> int:
    return id(kind)


def _types_of(routes: Iterable[Route]) -> list[Any]:
    found: dict[int, Any] = {}
    for route in routes:
        for kind in (route.body, route.gives):
            if kind is not None:
                found[id(kind)] = kind
    return list(found.values())


def _operation(route: Route, schemas: dict[int, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_in_path(route), *_in_query(route), *_in_headers(route)],
        "responses": _responses(route, schemas),
    }
    if route.body is not None:
        said["requestBody"] = {"content": {"application/json": {"schema": schemas[_key(route.body)]}}}
    if route.access == "open":
        said["security"] = []
    return said


def _in_path(route: Route) -> list[dict[str, Any]]:
    names = [found[0] for found in _PARAMETER.findall(route.path)]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _in_query(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    _, components = msgspec.json.schema_components([route.query], ref_template=_REF)
    schema = components[route.query.__name__]
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": kind}
        for name, kind in schema["properties"].items()
    ]


def _in_headers(route: Route) -> list[dict[str, Any]]:
    taken = {"Idempotency-Key": route.takes_key, "If-Match": route.is_bound}
    return [
        {"name": name, "in": "header", "description": _HEADERS[name], "schema": {"type": "string"}}
        for name, is_taken in taken.items()
        if is_taken
    ]


def _responses(route: Route, schemas: dict[int, Any]) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": schemas[_key(ProblemForm)]}}
    content: dict[str, Any] = {}
    if route.gives is not None:
        content["application/json"] = {"schema": schemas[_key(route.gives)]}
    if route.is_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    good: dict[str, Any] = {"description": HTTPStatus(route.status).phrase}
    if content:
        good["content"] = content
    others = {str(status): {"description": told} for status, told in route.also.items()}
    return {str(route.status): good, **others, "default": {"description": "A problem.", "content": problem}}
