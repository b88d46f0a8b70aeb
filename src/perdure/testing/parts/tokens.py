"""Access tokens: each is kept by its digest until it is dropped, and none is lost or changed."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from perdure.errors import InvalidData
from perdure.protocols import Checkable, Erasure, SessionStore, Token, TokenBook, is_token_book
from perdure.testing.processes import ask_all, processes
from perdure.testing.samples import new_session
from perdure.testing.scene import Contract, in_directory, in_store, refused

NOON = datetime(2025, 6, 15, 12, tzinfo=UTC)


class KeepingStore(Erasure, SessionStore, TokenBook, Checkable, Protocol):
    """A store that keeps tokens beside sessions."""


def token(number: int, owner: str | None = "ada", **given: Any) -> Token:
    """Return a token of its own for each number. A greater number makes a younger token."""
    # A store is given only the digest, never the token.
    digest = hashlib.sha256(f"no secret {number}".encode()).hexdigest()
    given = {"may_write": True, "created_at": NOON + timedelta(seconds=number), **given}
    return Token(digest=digest, owner=owner, **given)


class Tokens(Contract):
    """A token is found by its digest, exactly as it was given, until it is dropped by its id."""

    @in_store
    async def test_a_token_is_found_by_its_digest(self, store: KeepingStore) -> None:
        """A token comes back with its owner, its permission, its expiry and its name."""
        assert isinstance(store, TokenBook)
        assert is_token_book(store)
        # Microseconds, which a database may round.
        expires = NOON + timedelta(days=30, microseconds=7)
        given = [
            token(1),
            token(2, None, may_write=False, name="the night shift"),
            token(3, "o'dd \x00 \\0 münchen 🎈", expires_at=expires, name="a\x00b\n\\"),
        ]
        for each in given:
            assert await store.token(each.digest) is None
            await store.add_token(each)
        assert [await store.token(each.digest) for each in given] == given
        assert await store.token(token(4).digest) is None
        assert [*await store.check()] == []

    @in_store
    async def test_tokens_are_listed_the_oldest_first(self, store: KeepingStore) -> None:
        """Tokens of everybody or of one owner are listed, with expired ones, so that somebody can drop them."""
        assert [*await store.tokens()] == []
        given = [token(n, owner) for n, owner in enumerate(("bob", "ada", None, "ada"))]
        given[1] = token(1, "ada", expires_at=NOON + timedelta(seconds=2))
        for each in reversed(given):
            await store.add_token(each)
        assert [*await store.tokens()] == given
        assert [*await store.tokens("ada")] == [given[1], given[3]]
        assert [*await store.tokens("nobody")] == []
        assert [each.is_expired(NOON + timedelta(seconds=2)) for each in given] == [False, True, False, False]

    @in_store
    async def test_a_token_is_dropped_once(self, store: KeepingStore) -> None:
        """A dropped token is not found any longer, and the others stay."""
        for n in range(3):
            await store.add_token(token(n))
        assert await store.drop_token(token(1).id)
        assert not await store.drop_token(token(1).id)
        assert not await store.drop_token("nobody")
        assert not await store.drop_token("")
        assert await store.token(token(1).digest) is None
        assert [*await store.tokens()] == [token(0), token(2)]
        for n in (0, 2):
            assert await store.drop_token(token(n).id)
        assert [*await store.tokens()] == []
        await store.add_token(token(1))
        assert [*await store.tokens()] == [token(1)]

    @in_store
    async def test_of_those_who_drop_a_token_at_once_one_is_told(self, store: KeepingStore) -> None:
        await store.add_token(token(1))
        told = await asyncio.gather(*(store.drop_token(token(1).id) for _ in range(5)))
        assert sorted(told) == [False] * 4 + [True]

    @in_store
    async def test_a_token_is_kept_once(self, store: KeepingStore) -> None:
        """A second token of the same digest is refused, whatever else it says, and the first one stays."""
        await store.add_token(token(1))
        for other in (token(1), token(1, None), token(1, may_write=False)):
            with refused(InvalidData):
                await store.add_token(other)
        assert [*await store.tokens()] == [token(1)]

    @in_store
    async def test_an_owners_tokens_are_nobody_elses(self, store: KeepingStore) -> None:
        """An owner's list has that owner's tokens only: none without an owner, and none of similar names."""
        others = [token(1, "bob"), token(3, None), token(4, "ad"), token(5, "adam")]
        hers = [token(0), token(2, expires_at=NOON + timedelta(days=1))]
        for each in (hers[0], *others, hers[1]):
            await store.add_token(each)
        assert [*await store.tokens("ada")] == hers
        for each in hers:
            assert await store.drop_token(each.id)
        assert [*await store.tokens("ada")] == []
        assert [*await store.tokens()] == others
        assert [*await store.check()] == []

    @in_store
    async def test_tokens_stay_while_sessions_go(self, store: KeepingStore) -> None:
        """Tokens belong to the store: erasing a session and `gc` leave them alone."""
        await store.create(new_session("Hello", id="a", owner="ada"))
        await store.add_token(token(1))
        await store.delete("a")
        await store.gc()
        assert [*await store.tokens()] == [token(1)]

    @in_store
    async def test_tokens_that_are_added_at_once_are_all_kept(self, store: KeepingStore) -> None:
        await asyncio.gather(*(store.add_token(token(n)) for n in range(20)))
        assert [*await store.tokens()] == [token(n) for n in range(20)]

    @in_directory
    async def test_tokens_outlast_the_store_that_was_open(self, where: Path) -> None:
        if not self.shared:
            return
        async with self.open_store(where) as store:
            await store.add_token(token(1))
        async with self.open_store(where) as store:
            assert await store.token(token(1).digest) == token(1)
            assert await store.drop_token(token(1).id)
        async with self.open_store(where) as store:
            assert await store.token(token(1).digest) is None

    @in_directory
    async def test_processes_that_add_tokens_at_once_lose_none(self, where: Path) -> None:
        """Processes that add tokens at once lose none, and no process finds a token that another has dropped."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            async with processes(self, where, "none", "one", "two") as racers:
                for _ in range(10):
                    assert [answer["did"] for answer in await ask_all(racers, "add_token")] == ["one", "two"]
                found = [*await store.tokens()]
                assert sorted(each.owner for each in found) == ["one"] * 10 + ["two"] * 10
                assert await store.drop_token(found[0].id)
                assert (await racers[0].ask("count_tokens"))["did"] == 19
            assert [*await store.check()] == []
