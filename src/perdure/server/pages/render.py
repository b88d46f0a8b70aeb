"""Pages made of templates. All that was stored is hostile: the templates escape it, and nothing is marked as safe."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse

from perdure.server.call import Call


@cache
def templates() -> Environment:
    """Return the environment of all templates. A name that is missing is an error, not a hole in the page."""
    loader = PackageLoader("perdure.server.pages", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def page(call: Call, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page. Every template knows who asks, whether they may change anything, and where it is."""
    known = {"may_write": call.is_signed_in and call.caller.may_write, "path": call.request.url.path}
    return HTMLResponse(templates().get_template(template).render(**known, **values), status)
