"""Titles of sessions on pages."""

from __future__ import annotations

from perdure.model.ids import SessionId
from perdure.sessions.sessions import Sessions


async def title_of(sessions: Sessions, session_id: SessionId, otherwise: str) -> str:
    """Return the title that lists show of a session: its name or its beginning, or else the text `otherwise`."""
    listed = await sessions.list(id=session_id, limit=1)
    return next((each.title for each in listed if each.title), None) or otherwise
