"""The versions of a session as a list: newest first, in pages, without their messages."""

from __future__ import annotations

from typing import Any

from perdure.errors import InvalidData, InvalidSessionId, SessionNotFound
from perdure.model.definition import AgentDefinition
from perdure.model.session import AgentSession
from perdure.protocols import SessionHead
from perdure.testing.samples import new_session, note, say
from perdure.testing.scene import Contract, in_store, refused

_LARGE = {"notes": ["a rather long note"] * 50}


def head_of(session: AgentSession) -> SessionHead:
    """Return the head of a version, as a list has it."""
    return SessionHead(session.info, session.definition, session.state.metadata)


class VersionLists(Contract):
    """`versions` lists the versions that `load` loads."""

    @in_store
    async def test_versions_are_listed_newest_first(self, store: Any) -> None:
        """Each version has the header, the definition and the metadata that it was saved with."""
        kept = [await store.create(new_session("Hello"))]
        kept.append(await store.save(note(kept[-1], "ticket", "OPS-142")))
        kept.append(await store.save(say(kept[-1], "Where is order 7?")))
        kept.append(await store.save(note(kept[-1], "all", _LARGE)))
        kept.append(await store.save(kept[-1].with_definition(AgentDefinition("sales")).with_name("Order 7")))
        kept.append(await store.save(kept[-1].suspended()))
        assert list(await store.versions(kept[0].id)) == [head_of(each) for each in reversed(kept)]

    @in_store
    async def test_versions_come_in_pages(self, store: Any) -> None:
        """`before` continues behind the last version of a page."""
        session = await store.create(new_session())
        for number in range(2, 8):
            session = await store.save(note(session, "number", number))
        pages, before = list[list[int]](), None
        while page := [head.info.version for head in await store.versions(session.id, before=before, limit=3)]:
            pages.append(page)
            before = page[-1]
        assert pages == [[7, 6, 5], [4, 3, 2], [1]]
        assert [head.info.version for head in await store.versions(session.id, before=99, limit=1)] == [7]
        assert list(await store.versions(session.id, before=1)) == []
        assert list(await store.versions(session.id, before=0)) == []

    @in_store
    async def test_only_a_session_that_is_there_has_versions(self, store: Any) -> None:
        """An unknown session is refused, and so is an erased one."""
        session = await store.create(new_session("Hello"))
        await store.delete(session.id)
        for gone in (session.id, "nobody"):
            with refused(SessionNotFound):
                await store.versions(gone)
        with refused(InvalidSessionId):
            await store.versions("../up")

    @in_store
    async def test_a_page_is_asked_for_by_whole_numbers(self, store: Any) -> None:
        """A limit or version that is not a whole number in range is refused, also if there is nothing to list."""
        await store.create(new_session("Hello", id="one"))
        for odd in ({"limit": 0}, {"limit": -1}, {"limit": 1.5}, {"limit": None}, {"before": -1}, {"before": "2"}):
            for name in ("one", "nobody"):
                with refused(InvalidData):
                    await store.versions(name, **odd)
