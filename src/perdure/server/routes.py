"""One table of routes: the app and its OpenAPI document are both made of it, so neither can miss one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import Response

from perdure.server.call import Answer, Call

Access = Literal["open", "read", "write"]
"""The callers that may ask: everybody, every caller, or a caller that may change things."""
Face = Literal["api", "openai", "agui", "page", "health"]
"""The clients of a route, which decide the form of its errors."""
Handler = Callable[[Call], Awaitable[Answer | Response | object]]


@dataclass(frozen=True)
class Route:
    """A path and a method, what they take and give, and the function that answers."""

    method: str
    path: str
    handler: Handler
    summary: str
    query: type | None = None
    """The struct of the query's parameters."""
    body: type | None = None
    """The struct of the JSON body, or of a page's form."""
    gives: Any = None
    """The type of the JSON that comes back, or None if it is not JSON."""
    status: int = 200
    also: Mapping[int, str] = field(default_factory=dict)
    """Further statuses that are not problems, and what they mean."""
    access: Access = "read"
    face: Face = "api"
    is_bound: bool = False
    """True if `If-Match` binds it to a version. For programs that header is refused elsewhere, not ignored."""
    takes_key: bool = False
    """True if a repeated request is known by its `Idempotency-Key`. Other POSTs of programs refuse one."""
    is_stream: bool = False
    """True if it gives a stream of events when the request's Accept asks for one."""

    @property
    def name(self) -> str:
        """A name for programs, made of the method and the path's words."""
        words = [word.strip("{}").partition(":")[0] for word in self.path.split("/") if word]
        return "_".join([self.method.lower(), *words]).replace(".", "_").replace("-", "_")
