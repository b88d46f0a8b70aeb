"""Images and files of messages, by their hashes."""

from __future__ import annotations

from starlette.responses import Response

from perdure.errors import InvalidData
from perdure.server.call import Call
from perdure.server.problems import Problem

_SHOWN = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""The types that a browser may show. Others, such as SVG and HTML, could run scripts: it saves them as files."""
_OTHER = "application/octet-stream"


async def get_file(call: Call) -> Response:
    """Return the bytes of a file that a message of the session has. Their own beginning decides their type."""
    name = call.path("hash")
    await call.sessions.info(call.session_id)
    try:
        found = await call.sessions.read(call.session_id, name)
    except InvalidData:
        raise Problem(404, "NotFound", "No message of this session has a file with that hash.") from None
    headers = {"Cache-Control": "private, no-cache", "ETag": f'"{name}"'}  # asked each time: it may have been erased
    if call.request.headers.get("if-none-match") == headers["ETag"]:
        return Response(None, 304, headers)
    if found.media_type in _SHOWN:
        return Response(found.data, media_type=found.media_type, headers=headers)
    return Response(
        found.data, media_type=_OTHER, headers={**headers, "Content-Disposition": f'attachment; filename="{name}"'}
    )
