"""Access tokens: a secret opens what its token allows, until it is revoked or expires, and is stored nowhere."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import ConfigurationError, CorruptRecord, FileStore, InvalidData, MemoryStore, SqliteStore
from perdure.model import ids
from perdure.protocols import Token
from perdure.server.tokens import digest_of, holder_of, new_token, token_book
from perdure.testing import FrozenClock

NOON = datetime(2025, 6, 15, 12, tzinfo=UTC)


@pytest.fixture
def clock() -> Iterator[FrozenClock]:
    clock = FrozenClock(NOON)
    with ids.use(clock=clock):
        yield clock


async def test_a_new_token_is_recognised_by_its_secret(clock: FrozenClock) -> None:
    """It has everything that it was made for, among any number of tokens."""
    async with MemoryStore() as store:
        secret, made = await new_token(store, "ada")
        assert re.fullmatch("pdr_[A-Za-z0-9_-]{43}", secret)
        assert made == Token(digest=digest_of(secret), owner="ada", may_write=True, created_at=NOON)
        until = NOON + timedelta(days=30)
        other, reads = await new_token(store, None, may_write=False, expires_at=until, name="the dashboard")
        assert (reads.owner, reads.may_write, reads.expires_at, reads.name) == (None, False, until, "the dashboard")
        assert await holder_of(store, secret) == made
        assert await holder_of(store, other) == reads
        assert [*await store.tokens()] == sorted([made, reads], key=lambda each: each.id)


def test_a_digest_is_the_sha256_of_a_secret() -> None:
    assert digest_of("pdr_x") == hashlib.sha256(b"pdr_x").hexdigest()
    assert re.fullmatch("[0-9a-f]{64}", digest_of("half \ud800"))


async def test_no_two_secrets_are_the_same() -> None:
    async with MemoryStore() as store:
        made = [await new_token(store, "ada") for _ in range(200)]
        assert len({secret for secret, _ in made}) == len({token.id for _, token in made}) == 200


async def test_a_token_ends_when_it_expires(clock: FrozenClock) -> None:
    """It ends exactly at that time."""
    async with MemoryStore() as store:
        secret, made = await new_token(store, "ada", expires_at=NOON + timedelta(seconds=10))
        clock.advance(9.999)
        assert await holder_of(store, secret) == made
        clock.advance(0.001)
        assert await holder_of(store, secret) is None
        assert [*await store.tokens()] == [made]


async def test_a_revoked_token_opens_nothing() -> None:
    async with MemoryStore() as store:
        secret, made = await new_token(store, "ada")
        assert await store.drop_token(made.id)
        assert await holder_of(store, secret) is None


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "pdr_", "x" * 47, "pdr_" + "x" * 42, "pdr_" + "x" * 44, "pdr_" + "x" * 42 + "é", "pdr_" + "x" * 42 + "="),
        *("pdr_" + "x" * 43 + "\n", " pdr_" + "x" * 43, "PDR_" + "x" * 43, "pdr_" + "\ud800" * 43, "0" * 64, "x\x00"),
        *(None, 5, b"pdr_" + b"x" * 43, ["pdr_"]),
    ],
)
async def test_what_does_not_look_like_a_secret_is_nobodys(wrong: Any) -> None:
    """The store is not even asked."""
    assert await holder_of(None, wrong) is None  # type: ignore[arg-type]


async def test_a_secret_that_was_never_given_out_is_nobodys() -> None:
    async with MemoryStore() as store:
        _, made = await new_token(store, "ada")
        assert await holder_of(store, "pdr_" + "x" * 43) is None
        assert await holder_of(store, made.digest) is None
        assert await holder_of(store, made.id) is None


async def test_a_book_that_answers_with_another_token_is_not_believed() -> None:
    """A store may compare texts without regard to case, or by their beginning."""

    class Careless(MemoryStore):
        async def token(self, digest: str) -> Token | None:
            found = await super().token(digest)
            return found and replace(found, digest="0" * 64)

    async with Careless() as store:
        secret, _ = await new_token(store, "ada")
        assert await holder_of(store, secret) is None


@pytest.mark.parametrize(
    ("owner", "given", "path"),
    [
        ("", {}, "$.owner"),
        (5, {}, "$.owner"),
        ("half \ud800", {}, "$.owner"),
        ("ada", {"expires_at": NOON}, "$.expires_at"),
        ("ada", {"expires_at": NOON - timedelta(days=1)}, "$.expires_at"),
        ("ada", {"expires_at": datetime(2125, 1, 1)}, "$.expires_at"),
        ("ada", {"expires_at": 30}, "$.expires_at"),
        ("ada", {"may_write": "no"}, "$.may_write"),
        ("ada", {"name": ""}, "$.name"),
    ],
)
async def test_what_is_wrong_makes_no_token(clock: FrozenClock, owner: Any, given: dict[str, Any], path: str) -> None:
    async with MemoryStore() as store:
        with pytest.raises(InvalidData) as caught:
            await new_token(store, owner, **given)
        assert caught.value.path == path
        assert "pdr_" not in str(caught.value)
        assert [*await store.tokens()] == []


@pytest.mark.parametrize("kind", [SqliteStore, FileStore])
async def test_a_secret_is_kept_nowhere(
    tmp_path: Path, kind: type[SqliteStore | FileStore], caplog: pytest.LogCaptureFixture
) -> None:
    """It is in no file of the store, in no log, and not in the shown form of a token."""
    with caplog.at_level(logging.DEBUG):
        async with kind(tmp_path / "store") as store:
            secret, made = await new_token(store, "ada")
            assert await holder_of(store, secret) == made
            kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())  # noqa: ASYNC240
    assert made.digest.encode() in kept
    for part in (secret, secret[4:]):
        assert part.encode() not in kept
        assert part not in caplog.text + repr(made)


async def test_a_damaged_token_is_an_error_and_not_nobodys(tmp_path: Path) -> None:
    """A service can tell its operator, and admits nobody."""
    async with FileStore(tmp_path) as store:
        secret, _ = await new_token(store, "ada")
        (tmp_path / ".tokens").write_bytes(b"{}")
        with pytest.raises(CorruptRecord) as caught:
            await holder_of(store, secret)
        assert secret not in str(caught.value)


async def test_a_store_without_tokens_is_named(tmp_path: Path) -> None:
    async with MemoryStore() as store:
        assert token_book(store) is store
    with pytest.raises(ConfigurationError, match=r"object does not keep access tokens.*sqlite:///"):
        token_book(object())
