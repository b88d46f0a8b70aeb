"""Errors as clients get them: `application/problem+json` (RFC 9457), with a stable type for each kind."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from perdure.errors import DriverError, InvalidData, PerdureError, SessionBusy, SessionConflict
from perdure.model.ids import new_id

_log = logging.getLogger("perdure.server")
_TYPE = "urn:perdure:problem:"
_SOON = 2
"""Seconds after which a request that met a busy session can be repeated."""
STATUS: dict[str, int] = {
    "SessionNotFound": 404,
    "VersionForgotten": 410,
    "SessionConflict": 409,
    "SessionBusy": 409,
    "OwnerBusy": 429,
    "QueueFull": 429,
    "SessionHeld": 409,
    "SessionLocked": 503,
    "SessionNotActive": 409,
    "IllegalStatusChange": 409,
    "InvalidSessionId": 422,
    "InvalidData": 422,
    "PendingCallsChanged": 409,
    "CorruptRecord": 500,
    "KeyUnavailable": 500,
    "KeyForgotten": 410,
    "InvalidSessionFile": 500,
    "StoreError": 503,
    "DriverError": 502,
    "RateLimited": 429,
    "InputRefused": 422,
    "ToolError": 502,
    "ToolUnavailable": 501,
    "ConfigurationError": 501,
    "AgentStop": 502,
    "PerdureError": 500,
}
"""The status of each error of `perdure.errors`. One that is not named has the status of its base class."""
_FACTS = {
    name: name for name in ("session_id", "version", "oldest", "expected", "found", "agent", "limit", "retry_after")
}
_FACTS |= {"current": "current", "wanted": "wanted", "allowed": "allowed", "status": "session_status"}
"""The attributes of errors that a program can decide by. A claim's holder and a file's path are not for clients."""


class Problem(Exception):
    """A request that is refused, or that failed, as its client is told."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        *,
        facts: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail
        self.facts = dict(facts or {})
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return type_of(self.title)

    def response(self) -> Response:
        """Return the problem as a response."""
        said = {**self.facts, "type": self.type, "title": self.title, "status": self.status, "detail": self.detail}
        return Response(msgspec.json.encode(said, enc_hook=str), self.status, self.headers, "application/problem+json")


def type_of(title: str) -> str:
    """Return the URI of a kind of problem."""
    return _TYPE + re.sub(r"(?<=[a-z])(?=[A-Z])", "-", title).lower()


def status_of(kind: type[BaseException]) -> int:
    """Return the HTTP status of a kind of error."""
    return next((STATUS[each.__name__] for each in kind.__mro__ if each.__name__ in STATUS), 500)


def problem_of(error: Exception, *, if_match: bool = False) -> Problem:
    """Return an error as the Problem for its client. With `if_match`, a conflict is the client's own condition."""
    if isinstance(error, Problem):
        return error
    status, title = status_of(type(error)), type(error).__name__
    # 501 and 502 are about agents, tools and models. Their sentences are for the client.
    if not isinstance(error, PerdureError) or (status >= 500 and status not in (501, 502)):
        return _unexpected(error, status, title)
    if if_match and isinstance(error, SessionConflict):
        status = 412
    return Problem(status, title, str(error), facts=_facts_of(error), headers=_headers_of(error, status))


def _unexpected(error: Exception, status: int, title: str) -> Problem:
    """Log what went wrong, and return a Problem that says only where to look. Paths and DSNs stay in the log."""
    number = new_id()
    _log.error("request failed, problem %s", number, exc_info=error)
    is_ours = isinstance(error, PerdureError)
    detail = f"{HTTPStatus(status).phrase}. The server's log tells more under {number}."
    headers = {"Retry-After": str(_SOON)} if status == 503 else {}
    return Problem(status, title if is_ours else "InternalError", detail, facts={"problem": number}, headers=headers)


def _facts_of(error: PerdureError) -> dict[str, Any]:
    if isinstance(error, InvalidData):
        return {"path": error.path, "problem": error.problem}
    if isinstance(error, DriverError):  # its `status` is the provider's
        return {}
    found = {name: getattr(error, attribute, None) for attribute, name in _FACTS.items()}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float | tuple)}


def _headers_of(error: PerdureError, status: int) -> dict[str, str]:
    if status != 429 and not isinstance(error, SessionBusy):
        return {}
    # 0 would make clients repeat the request without a pause.
    return {"Retry-After": str(max(1, round(getattr(error, "retry_after", _SOON))))}
