"""Lists of items, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import msgspec

from perdure.server.openai.errors import invalid
from perdure.server.openai.items import Item


class ListQuery(msgspec.Struct, kw_only=True):
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """The id of the item after which the page begins."""


class ListForm(TypedDict):
    object: str
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


def page_of(items: Sequence[Item], asked: ListQuery, most: int) -> ListForm:
    """Return a page of items. Raise a Problem if it is too long, or begins after an item that is not there."""
    if not 1 <= asked.limit <= most:
        raise invalid("limit", f"expected 1 to {most}, got {asked.limit}")
    ordered = list(items) if asked.order == "asc" else list(items)[::-1]
    if asked.after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == asked.after]
        if not places:
            raise invalid("after", "no item here has that id")
        ordered = ordered[places[-1] + 1 :]
    page = ordered[: asked.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(ordered) > len(page)}
