"""Pages made of templates. All that was stored is hostile: the templates escape it, and nothing is marked as safe."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from perdure.server.call import Call
from perdure.server.gate import COOKIE
from perdure.server.pages.texts import FILTERS, as_shown


@cache
def templates() -> Environment:
    """Return the environment of all templates. A name that is missing is an error, not a hole in the page."""
    made = Environment(
        loader=PackageLoader("perdure.server.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=as_shown,
        auto_reload=False,
    )
    made.filters.update(FILTERS)
    return made


def prepare() -> None:
    """Compile every template, so that the first visitor does not wait for that."""
    for name in templates().list_templates():
        templates().get_template(name)


def page(call: Call, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page. Every template knows who asks, whether they may change anything, and where it is."""
    return HTMLResponse(filled(template, **_known(call), **values), status)


def filled(template: str, **values: Any) -> str:
    """Return a template filled in."""
    return templates().get_template(template).render(**values)


def is_fragment(request: Request) -> bool:
    """Tell whether a script of ours asks for a part of a page, and not a person for all of it."""
    return "hx-request" in request.headers


def _known(call: Call) -> dict[str, Any]:
    return {
        "may_write": call.is_signed_in and call.caller.may_write,
        "is_signed_in": call.is_signed_in and COOKIE in call.request.cookies,
        "is_operator": call.is_signed_in and call.caller.owner is None,
        "path": call.request.url.path,
    }
