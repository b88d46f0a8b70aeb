"""One request, read: who asks, of which sessions, and with what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request

from perdure.codec import check_json
from perdure.errors import InvalidData
from perdure.model.value import brief
from perdure.server.problems import Problem

if TYPE_CHECKING:
    from perdure.server.gate import Caller
    from perdure.server.routes import Route
    from perdure.server.service import Service
    from perdure.sessions.sessions import Sessions

_MOST_IN_KEY = 200
_PROGRAMS = ("api", "openai", "agui")
"""The faces whose requests are refused if they ask for more than can be followed."""
_MOST_FIELDS = 100


def encoded(value: Any) -> bytes:
    """Return JSON. Ids are written as texts: msgspec does not do that by itself for a subclass of str."""
    return msgspec.json.encode(value, enc_hook=str)


class Answer(msgspec.Struct, frozen=True):
    """The result of a handler, if it is more than the JSON of a 200."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = {}


class Call:
    """A request to a handler."""

    def __init__(self, service: Service, request: Request, caller: Caller | None, query: Any, body: Any) -> None:
        self.service = service
        self.request = request
        self._caller = caller
        self.query = query
        """The query's parameters, as the struct that the route names."""
        self.body = body
        """The body, as the struct that the route names."""

    @property
    def caller(self) -> Caller:
        assert self._caller is not None  # the guard lets nobody else through to a route that needs a caller
        return self._caller

    @property
    def is_signed_in(self) -> bool:
        return self._caller is not None

    @property
    def sessions(self) -> Sessions:
        """The sessions that the caller reaches, on condition of the version that `If-Match` names."""
        sessions, expected = self.service.sessions_of(self.caller), self.expected
        return sessions if expected is None else sessions.expecting(expected)

    @property
    def session_id(self) -> str:
        return self.path("session")

    def path(self, name: str) -> str:
        """Return a part of the path."""
        found: str = self.request.path_params[name]
        return found

    @property
    def expected(self) -> int | None:
        """The version that the session must have, by `If-Match`, or None if the request does not say."""
        given = self.request.headers.get("if-match")
        if given is None or given == "*":
            return None
        number = given.strip().removeprefix("W/").strip('"')
        # 18 digits always fit into 64 bits. A longer number could not be a version.
        if not number.isdecimal() or len(number) > 18:
            raise InvalidData("If-Match", f'expected one version, such as "7", got {brief(given)}')
        return int(number)

    @property
    def key(self) -> str | None:
        """The key by which a repeated request is known, by `Idempotency-Key`."""
        given = self.request.headers.get("idempotency-key")
        if given is None:
            return None
        if not 0 < len(given) <= _MOST_IN_KEY or not given.isprintable():
            raise InvalidData("Idempotency-Key", f"expected 1 to {_MOST_IN_KEY} characters that can be printed")
        return given

    @property
    def wants_stream(self) -> bool:
        return "text/event-stream" in self.request.headers.get("accept", "")


async def read_call(service: Service, route: Route, request: Request) -> Call:
    """Read a request as its route describes it. Raise InvalidData that says what is wrong with it, and where."""
    caller = getattr(request.state, "caller", None)
    if route.face in _PROGRAMS:
        _require_followed(route, request)
    query = None if route.query is None else _converted(_flat(request), route.query)
    try:
        async with asyncio.timeout(service.settings.limits.patience):
            return Call(service, request, caller, query, await _body_of(route, request))
    except TimeoutError:
        # The connection cannot be used again: the rest of the body may still come.
        raise Problem(408, "BodyTooSlow", "The body did not come in time.", headers={"Connection": "close"}) from None


def _require_followed(route: Route, request: Request) -> None:
    """Refuse headers and parameters that this request cannot follow, though others can."""
    if not route.is_bound and "if-match" in request.headers:
        raise InvalidData("If-Match", "this request is not bound to a version; leave it out")
    if not route.takes_key and route.method == "POST" and "idempotency-key" in request.headers:
        raise InvalidData("Idempotency-Key", "this request is done again if it is repeated; leave it out")
    for name in request.query_params if route.query is None else ():
        raise InvalidData(f"$.{brief(name)}", "this request has no parameters in its address; leave it out")


async def _body_of(route: Route, request: Request) -> Any:
    if route.body is None:
        return None
    if route.face == "page":
        return _converted(_form_in(await request.body()), route.body, may_have_more=True)
    return decoded(await request.body() or b"{}", route.body)


def _form_in(raw: bytes) -> dict[str, str]:
    """Return the fields of a form. Our forms have few, and to read very many would block the event loop."""
    try:
        return dict(parse_qsl(raw.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise InvalidData("$", f"a form has at most {_MOST_FIELDS} fields") from None


def decoded(raw: bytes, kind: Any) -> Any:
    """Return JSON as a type. Raise a Problem if it is not JSON, or InvalidData if it is too deep or of another form."""
    try:
        plain = msgspec.json.decode(raw)
        # The conversion does not look into fields that take any JSON.
        check_json(plain)
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Problem(400, "NotJson", "The body is not JSON.") from None
    except RecursionError:
        raise InvalidData("$", "nested too deep") from None


def _flat(request: Request) -> dict[str, Any]:
    """Return the query's parameters. Raise InvalidData if one is given twice, since either could be meant."""
    given = request.query_params.multi_items()
    flat = dict(given)
    if len(flat) < len(given):
        raise InvalidData("$", "a parameter is given twice")
    return flat


def _converted(given: Mapping[str, Any], kind: type, *, may_have_more: bool = False) -> Any:
    known = _names_in(kind)
    for name in () if may_have_more else given:
        if name not in known:
            raise InvalidData(f"$.{brief(name)}", f"this parameter is not known; there are: {', '.join(sorted(known))}")
    try:
        return msgspec.convert({name: value for name, value in given.items() if name in known}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from None


@cache
def _names_in(kind: type) -> frozenset[str]:
    """Return the parameters that a struct has. They are cached, since evaluating every annotation takes long."""
    return frozenset(each.encode_name for each in msgspec.structs.fields(kind))


def invalid(error: msgspec.ValidationError, kind: Any) -> InvalidData:
    """Return msgspec's error as one of perdure's own, which lists the values or fields that are allowed."""
    problem, at, path = str(error).partition(" - at `")
    place = path.rstrip("`") if at else "$"
    choices = _choices_at(kind, place.removeprefix("$."), is_field="unknown field" in problem)
    return InvalidData(place, f"{problem}; there are: {', '.join(choices)}" if choices else problem)


def _choices_at(kind: Any, name: str, *, is_field: bool) -> list[str]:
    """Return a struct's fields, or the values that one of them allows. Return nothing for a deeper place."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return []
    if is_field:
        return sorted(_names_in(kind)) if name == "$" else []
    found = [each.type for each in msgspec.structs.fields(kind) if each.encode_name == name]
    parts = [part for each in found for part in (each, *get_args(each))]
    return [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
