"""Long lists of sessions, page after page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, Unpack

from perdure.errors import CorruptRecord, KeyUnavailable
from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo, SessionInfoList
from perdure.protocols import Filters

_PAGE = 1000  # the most that a page of a list may hold


class Listing(Protocol):
    """A verb that lists sessions, such as `store.list` or `sessions.headers`."""

    async def __call__(self, **filters: Unpack[Filters]) -> SessionInfoList: ...


async def pages(listing: Listing, **filters: Unpack[Filters]) -> AsyncIterator[SessionInfoList]:
    """Yield the pages of a list one by one. The newest sessions come first."""
    wanted: Filters = {"limit": _PAGE, **filters}
    while True:
        page = await listing(**wanted)
        yield page
        if page.next is None:
            return
        wanted["after"] = page.next


async def all_infos(listing: Listing, **filters: Unpack[Filters]) -> list[AgentSessionInfo]:
    """Return every header of a list, the newest first. Damaged ones are left out."""
    return [info async for page in pages(listing, **filters) for info in page]


def unread_ids(page: SessionInfoList) -> list[SessionId]:
    """Return the sessions of a page whose headers cannot be read: they are damaged, or sealed with a missing key."""
    unread = [each.session_id for each in page.damaged if isinstance(each, CorruptRecord | KeyUnavailable)]
    return [SessionId(each) for each in unread if each is not None]
