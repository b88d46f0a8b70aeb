"""Notices that a page shows after a form was sent: one of a few fixed sentences, or what went wrong."""

from __future__ import annotations

from urllib.parse import urlencode

import msgspec
from starlette.responses import RedirectResponse, Response

NOTICES = {
    "approved": "Approved. A worker continues the run.",
    "denied": "Denied. The model is told why, and a worker continues the run.",
    "answered-value": "The answer is on record, as the JSON that it is. A worker continues the run.",
    "answered-text": "The answer is on record, as a text. A worker continues the run.",
    "failed": "It is on record that the call failed, and why. A worker continues the run.",
    "opened": "The session is open again. A worker sends what waits there.",
    "dropped": "What waited was taken back: each message is on record as refused.",
    "nothing": "There was nothing left to take back.",
    "timer-dropped": "It was taken back, and will not be sent.",
}


class Notice(msgspec.Struct, frozen=True):
    """A sentence at the head of a page."""

    text: str
    kind: str = "good"


def notice_of(name: str | None) -> Notice | None:
    """Return the sentence of a name, or None without one. No text of a URL is ever shown on a page."""
    text = NOTICES.get(name or "")
    return None if text is None else Notice(text)


def back_to(path: str, notice: str) -> Response:
    """Return the redirect to a page that says what was done. To reload that page does not do it again."""
    return RedirectResponse(f"{path}?{urlencode({'notice': notice})}", 303)
