"""A memory in a `BaseStore` of LangGraph: for those who keep their agents' memories there, with its own search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from perdure.adapters.extras import extra

with extra("langgraph"):
    from langgraph.store.base import BaseStore, SearchItem

from perdure.model.checks import expect, expect_count, expect_text
from perdure.model.ids import new_id
from perdure.model.session import check_owner
from perdure.model.value import EMPTY, thawed
from perdure.protocols import Remembered

_PAGE, _MOST = 100, 1_000


class LangGraphMemory:
    """Remembers and recalls in a `BaseStore`, each owner in a namespace of its own.

        recall(LangGraphMemory(InMemoryStore(index={…})))

    A store with an index ranks by meaning. One without returns everything, of which what has a word of the question is
    taken, among the newest 1,000. What is kept there is not erased by `erase_owner`: see `forget`.
    """

    def __init__(self, store: BaseStore, *, namespace: Sequence[str] = ("perdure", "memory")) -> None:
        self._store = expect(store, BaseStore, "$.store")  # type: ignore[type-abstract]  # any of its subclasses
        self._namespace = tuple(namespace)

    async def remember(self, text: str, *, owner: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> str:
        """Keep a text under an id of its own, or under that of the call in its metadata."""
        expect_text(text, "$.text", blank=False)
        call = metadata.get("call_id")
        key = f"call-{call}" if isinstance(call, str) else new_id()
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
        """Erase all that is remembered of an owner. Return how many texts that were."""
        count, namespace = 0, self._of(owner)
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
        """Return the namespace of an owner. Labels have no dots, and nobody's name is that of those without one."""
        check_owner(owner)
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
