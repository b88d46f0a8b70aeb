"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from perdure.server.problems import Problem

_UNKNOWN_FIELD = re.compile("unknown field `(.+?)`")
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def as_openai(problem: Problem) -> Response:
    """Return a problem as a response."""
    return Response(
        msgspec.json.encode({"error": body_of(problem)}), problem.status, problem.headers, "application/json"
    )


def body_of(problem: Problem) -> dict[str, Any]:
    """Return the error object of a problem."""
    default = "server_error" if problem.status >= 500 else "invalid_request_error"
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", problem.title).lower()
    kind = _TYPES.get(problem.status, default)
    return {"message": problem.detail, "type": kind, "param": _param_of(problem), "code": code}


def _param_of(problem: Problem) -> str | None:
    """Return the parameter that is wrong, as clients name it."""
    param = problem.facts.get("param", problem.facts.get("path"))
    if not isinstance(param, str):
        return None
    unknown = _UNKNOWN_FIELD.search(str(problem.facts.get("problem", "")))
    return ".".join(filter(None, (param.removeprefix("$").lstrip("."), unknown[1] if unknown else ""))) or None


def not_found(what: str, given: str) -> Problem:
    """Return the Problem for an unknown id. An id of another owner's gets the same."""
    # The id is cut, since it is a text of any length that a client has chosen.
    return Problem(404, "NotFound", f"{what} with id '{given[:200]}' not found.")


def unsupported(param: str, why: str) -> Problem:
    """Return the Problem for a parameter that cannot be followed. Parameters are never ignored."""
    return Problem(422, "UnsupportedParameter", f"'{param}' cannot be followed: {why}", facts={"param": param})


def invalid(param: str, why: str) -> Problem:
    """Return the Problem for a parameter that is wrong."""
    return Problem(422, "InvalidParameter", f"'{param}': {why}", facts={"param": param})
