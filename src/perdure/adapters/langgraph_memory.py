"""A memory in a `BaseStore` of LangGraph, for agents whose memories are kept there. It uses that store's search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from perdure.adapters.extras import extra

with extra("langgraph"):
    from langgraph.store.base import BaseStore, SearchItem

from perdure.loop.memory import call_of
from perdure.model.checks import expect, expect_count, expect_text
from perdure.model.ids import new_id
from perdure.model.session import check_owner
from perdure.model.value import EMPTY, thawed
from perdure.protocols import Remembered

_PAGE, _MOST = 100, 1_000


class LangGraphMemory:
    """A memory in a `BaseStore`, with a namespace for each owner.

        recall(LangGraphMemory(InMemoryStore(index={…})))

    A store with an index ranks by meaning. In a store without one, texts with a word of the query are found among the
    first 1,000 that it lists. `erase_owner` does not erase what is kept there: see `forget`.
    """

    def __init__(self, store: BaseStore, *, namespace: Sequence[str] = ("perdure", "memory")) -> None:
        self._store = expect(store, BaseStore, "$.store")  # type: ignore[type-abstract]  # any of its subclasses
        self._namespace = tuple(namespace)

    async def remember(self, text: str, *, owner: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> str:
        """Keep a text under the ids of the call in its metadata, or else under a new id. Return the key."""
        expect_text(text, "$.text", blank=False)
        call = call_of(metadata)
        # A call that is carried out again replaces what it has kept.
        key = new_id() if call is None else f"call-{'/'.join(str(each) for each in call if each is not None)}"
        await self._store.aput(self._of(owner), key, {"text": text, "metadata": thawed(dict(metadata))})
        return key

    async def recall(self, query: str, *, owner: str | None = None, limit: int = 10) -> Sequence[Remembered]:
        """Return what the store finds in the owner's namespace."""
        expect_text(query, "$.query", blank=False)
        expect_count(limit, "$.limit", least=1)
        found = await self._store.asearch(self._of(owner), query=query, limit=limit)
        if found and all(item.score is None for item in found):  # it has no index, and has not looked at the query
            found = await self._with_words(query, owner)
        return [_remembered(item) for item in found if isinstance(item.value.get("text"), str)][:limit]

    async def forget(self, owner: str | None = None) -> int:
        """Erase all that is remembered of an owner. Return the number of texts erased."""
        count, namespace = 0, self._of(owner)
        # Always the first page: the texts before it have been erased.
        while found := await self._store.asearch(namespace, limit=_PAGE):
            for item in found:
                await self._store.adelete(item.namespace, item.key)
            count += len(found)
        return count

    async def _with_words(self, query: str, owner: str | None) -> list[SearchItem]:
        words, found = {word.casefold() for word in query.split()}, list[SearchItem]()
        for start in range(0, _MOST, _PAGE):
            page = await self._store.asearch(self._of(owner), limit=_PAGE, offset=start)
            found += page
            if len(page) < _PAGE:
                break
        fits = {id(item): sum(word in str(item.value.get("text")).casefold() for word in words) for item in found}
        return sorted((item for item in found if fits[id(item)]), key=lambda item: (-fits[id(item)], item.key))

    def _of(self, owner: str | None) -> tuple[str, ...]:
        """Return the namespace of an owner. It never equals that of texts without an owner."""
        check_owner(owner)
        # A label must not have a dot, which `quote` leaves as it is.
        whose = ("nobody",) if owner is None else ("owner", quote(owner, safe="").replace(".", "%2E"))
        return (*self._namespace, *whose)


def _remembered(item: SearchItem) -> Remembered:
    metadata = item.value.get("metadata") or {}
    session_id = metadata.get("session_id")
    return Remembered(
        text=item.value["text"],
        session_id=session_id if isinstance(session_id, str) else None,
        message_id=item.key,
        created_at=item.created_at,
        score=item.score,
        metadata=metadata,
    )
