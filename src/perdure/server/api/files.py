"""Images and files of messages, by their hashes."""

from __future__ import annotations

from starlette.responses import Response

from perdure.errors import InvalidData
from perdure.model.message import Media
from perdure.server.call import Call
from perdure.server.problems import Problem
from perdure.sessions.attaching import type_by_beginning

_SHOWN = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""The types that a browser may show. Others, such as SVG and HTML, could run scripts: it saves them as files."""
_OTHER = "application/octet-stream"


async def get_file(call: Call) -> Response:
    """Return the bytes of a file that a message of the session has. Their own beginning decides their type."""
    name = call.path("hash")
    await call.sessions.info(call.session_id)
    try:
        body = (await call.sessions.read(call.session_id, Media(_OTHER, hash=name, size=0))).data
    except InvalidData:
        raise Problem(404, "NotFound", "No message of this session has a file with that hash.") from None
    assert body is not None  # it was asked for by its hash
    kind = type_by_beginning(body)
    headers = {"Cache-Control": "private, no-cache", "ETag": f'"{name}"'}  # asked each time: it may have been erased
    if call.request.headers.get("if-none-match") == headers["ETag"]:
        return Response(None, 304, headers)
    if kind in _SHOWN:
        return Response(body, media_type=kind, headers=headers)
    return Response(
        body, media_type=_OTHER, headers={**headers, "Content-Disposition": f'attachment; filename="{name}"'}
    )
