"""Heads: sessions without their messages."""

from __future__ import annotations

from typing import Any, Protocol

from perdure.errors import InvalidData, InvalidSessionId
from perdure.model.definition import AgentDefinition
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import Heads, SessionHead
from perdure.testing.parts.journal import JournaledStore
from perdure.testing.samples import fork, new_session, note, run_of, say
from perdure.testing.scene import Contract, in_store, refused

# One value of more than 4 KB, which is stored apart from the rest of the metadata.
LARGE = {"channel": "x" * 5_000, "list": [*range(300)], "nested": {"é\x00": [None, True, 1.5, {"a": "b" * 300}]}}


class HeadedStore(JournaledStore, Heads, Protocol):
    """A store that reads heads."""


class Heading(Contract):
    """A head has what a load has, except for the messages."""

    @in_store
    async def test_heads_are_what_a_load_tells(self, store: HeadedStore) -> None:
        """A head has the header, the definition and the metadata. Heads come in the order of the ids, each once."""
        assert isinstance(store, Heads)
        other = AgentDefinition("writer", system_prompt="Write. " * 100, metadata={"team": "south"})
        kept = [
            await store.create(new_session(id="empty")),
            await store.create(new_session("a", "b", id="small", owner="ann", tags=("vip",))),
            await store.create(_with(new_session("a", id="large", definition=other).with_name("Named"), LARGE)),
        ]
        kept.append(await store.save(run_of(kept[1])))
        kept.append(await store.create(fork(kept[2], id="fork")))
        kept.append(await store.save(note(kept[2], "more", "y" * 3_000)))
        newest = {str(session.id): session for session in kept}
        asked = ["large", "nobody", "fork", "small", "empty", "large"]
        found = await store.heads(asked)
        assert [*found] == ["large", "fork", "small", "empty"]
        assert found == {key: _head(newest[key]) for key in found}
        assert found.damaged == {}
        assert found["large"].metadata["list"] == LARGE["list"]
        assert await store.heads([]) == await store.heads(["nobody"]) == {}

    @in_store
    async def test_heads_are_those_of_the_newest_versions(self, store: HeadedStore) -> None:
        """A head is that of the newest version, as soon as it is saved, until the session is erased."""
        session = await store.create(new_session("a", id="it"))
        for number in range(4):
            session = await store.save(note(say(session, "b"), "number", number))
            assert await store.heads(["it"]) == {"it": _head(session)}
        hidden = await store.save(session.with_status(SessionStatus.DELETED))
        assert await store.heads(["it"]) == {"it": _head(hidden)}
        await store.delete("it")
        assert await store.heads(["it"]) == {}

    @in_store
    async def test_a_session_that_is_run_has_its_last_head(self, store: HeadedStore) -> None:
        session = await store.create(note(new_session("a", id="it"), "k", "v"))
        claim, _ = await store.claim("it", version=1, owner="ann")
        assert await store.heads(["it"]) == {"it": _head(session)}
        await store.release(claim, interrupted=True)
        assert await store.heads(["it"]) == {"it": _head(session)}

    @in_store
    async def test_many_heads_are_read_at_once(self, store: HeadedStore) -> None:
        kept = [await store.create(note(new_session(id=f"s{n}"), "number", [n] * 200)) for n in range(120)]
        found = await store.heads([f"s{n}" for n in range(200)])
        assert found == {session.id: _head(session) for session in kept}

    @in_store
    async def test_heads_of_wrong_ids_are_refused(self, store: HeadedStore) -> None:
        """A text in place of several ids is refused, and so is an invalid id."""
        with refused(InvalidData):
            await store.heads("it")
        with refused(InvalidSessionId):
            await store.heads(["it", "../it"])


def _head(session: AgentSession) -> SessionHead:
    return SessionHead(session.info, session.definition, session.state.metadata)


def _with(session: AgentSession, metadata: dict[str, Any]) -> AgentSession:
    for key, value in metadata.items():
        session = note(session, key, value)
    return session
