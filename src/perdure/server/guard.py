"""A guard that every request passes before it is routed, and every response on its way out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.server.gate import Gate
from perdure.server.problems import Problem
from perdure.server.settings import Settings

_log = logging.getLogger("perdure.server")
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send forms with `Origin: null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""The headers of every response."""
PROBE = "/healthz"
"""The path for probes, which ask by an address that may change. It tells nothing, so any name may be used."""
_LONGEST_NUMBER = 18
"""The most digits of a length. Python refuses to read thousands of them."""
_BEFOREHAND = {"Access-Control-Allow-Methods": "GET, POST, PUT, DELETE", "Access-Control-Max-Age": "600"}
_ALLOWED = "authorization, content-type, idempotency-key, if-match, last-event-id"


class Guard:
    """The outermost part of the service. `is_open` tells which paths need no token, `is_page` which are for people.

    `tell` makes the response to an error, in the form that the path's clients read.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        gate: Gate,
        *,
        is_open: Callable[[str], bool],
        is_page: Callable[[str], bool],
        tell: Callable[[Exception, str], Response],
    ) -> None:
        self._app = app
        self._settings = settings
        self._gate = gate
        self._is_open = is_open
        self._is_page = is_page
        self._tell = tell
        self._hosts = settings.known_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # 1008 is "policy violation". No route speaks WebSocket.
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Outgoing(send, self._granted(Headers(scope=scope)))
        try:
            if await self._passes(scope):
                await self._app(scope, _Bounded(receive, self._settings.limits.body), out)
            else:
                await _Empty(204, _BEFOREHAND)(scope, receive, out)
        except Exception as error:  # it concerns this request only: others continue
            # The status is out, so the client cannot be told any more.
            if out.has_begun:
                _log.error("a response broke off", exc_info=error)
                return
            response = error.response() if isinstance(error, SignIn) else self._tell(error, scope["path"])
            await response(scope, receive, out)

    async def _passes(self, scope: Scope) -> bool:
        """Return False for a browser's preflight request. Raise a Problem for a request that is not let in."""
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        if path != PROBE:
            self._require_host(headers)
        # Before the token is checked: browsers send none with a preflight request.
        if self._asks_beforehand(headers, method):
            return False
        self._require_own_page(headers, method, path)
        self._require_known_body(headers, method, path)
        address = scope["client"][0] if scope.get("client") else None
        caller = await self._gate.caller(headers, address)
        if caller is None and not self._is_open(path):
            if self._is_page(path) and method in SAFE:
                raise SignIn(path, scope["query_string"].decode("latin-1"))
            raise Problem(401, "TokenNeeded", _TOKEN_NEEDED, headers={"WWW-Authenticate": "Bearer"})
        if caller is not None and not caller.may_write and method not in SAFE and not self._is_open(path):
            raise Problem(403, "ReadOnlyToken", "This token may only read. Ask with one that may write.")
        scope.setdefault("state", {})["caller"] = caller
        return True

    def _require_host(self, headers: Headers) -> None:
        """Refuse names that another party's DNS can point at this machine (DNS rebinding)."""
        given = headers.getlist("host")
        name = given[0].lower() if len(given) == 1 else ""
        # An IPv6 address has colons of its own, and ends with a bracket.
        name = name[: name.rindex(":")] if ":" in name and not name.endswith("]") else name
        if name not in self._hosts:
            raise Problem(
                421, "HostNotAllowed", "This service is not known by that name. Start it with --known-as NAME."
            )

    def _require_own_page(self, headers: Headers, method: str, path: str) -> None:
        """Refuse what another site's page makes a browser send. This includes streams: a page could hold them open."""
        is_stream = "text/event-stream" in headers.get("accept", "")
        if method in SAFE and not is_stream:
            return
        origin = headers.get("origin")
        is_granted = origin in self._settings.origins and not self._is_page(path)
        if is_granted:
            return
        is_own = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
        if not is_own or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Problem(403, "OriginNotAllowed", "Pages of other sites cannot use this service. See --allow-origin.")

    def _require_known_body(self, headers: Headers, method: str, path: str) -> None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > _LONGEST_NUMBER or int(length) > self._settings.limits.body:
            raise too_large(self._settings.limits.body)
        has_body = int(length) > 0 or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        wanted = FORM if self._is_page(path) else JSON
        if method not in SAFE and has_body and kind != wanted:
            raise Problem(415, "UnknownContentType", f"Send {wanted}, and say so in Content-Type.")

    def _granted(self, headers: Headers) -> Mapping[str, str]:
        """Return the headers that let a page of another allowed origin read the response."""
        origin = headers.get("origin")
        if origin is None or origin not in self._settings.origins:
            return {}
        # `Vary` keeps caches from giving the response to pages of other origins.
        exposed = "ETag, Location, Retry-After"
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": exposed, "Vary": "Origin"}

    def _asks_beforehand(self, headers: Headers, method: str) -> bool:
        return method == "OPTIONS" and headers.get("origin") in self._settings.origins


class SignIn(Exception):
    """A page was asked for by a browser that is not signed in."""

    def __init__(self, path: str, query: str) -> None:
        super().__init__(path)
        self._next = f"{path}?{query}" if query else path

    def response(self) -> Response:
        """Return the redirect to the page on which a browser signs in."""
        return Response(None, 303, {"Location": f"/login?next={quote(self._next, safe='/')}"})


_TOKEN_NEEDED = "Send a token: `Authorization: Bearer …`. `perdure token new OWNER` makes one."


def too_large(limit: int) -> Problem:
    return Problem(413, "BodyTooLarge", f"A request can have at most {limit} bytes.", facts={"limit": limit})


class _Empty:
    """A response without a body."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._headers = {**headers, "Access-Control-Allow-Headers": _ALLOWED}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


class _Bounded:
    """A receiver that counts a request's bytes. A client may tell no length, or a wrong one."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._most:
            raise too_large(self._most)
        return message


class _Outgoing:
    """A sender that adds the headers that all responses have."""

    def __init__(self, send: Send, granted: Mapping[str, str]) -> None:
        self._send = send
        self._granted = granted
        self.has_begun = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            for name, value in {**HEADERS, **self._granted}.items():
                headers[name] = value
            # What was said does not belong in a cache.
            headers.setdefault("Cache-Control", "no-store")
        await self._send(message)
