"""The files that pages are drawn with: one style sheet, and scripts without which everything still works."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib.resources import files

from starlette.responses import Response

from perdure.server.call import Call
from perdure.server.problems import Problem

_KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


async def get_static(call: Call) -> Response:
    """Return a file by its name in a table, so that no path of a request reaches the disk."""
    name = call.path("file")
    found = _all().get(name)
    if found is None:
        raise Problem(404, "NotFound", "No file has that name.")
    kind = _KINDS[name.rpartition(".")[2]]
    tag = f'"{blake2b(found, digest_size=12).hexdigest()}"'
    # Browsers ask each time, so they never show a page with the files of another release.
    headers = {"Cache-Control": "no-cache", "ETag": tag}
    if call.request.headers.get("if-none-match") == tag:
        return Response(None, 304, headers)
    return Response(found, media_type=kind, headers=headers)


@cache
def _all() -> dict[str, bytes]:
    folder = files("perdure.server.pages") / "static"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _KINDS}
