"""Access tokens at rest: a damaged place opens nothing, and nothing is left of erased tokens."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure import CorruptRecord, FileStore, InvalidData, SqliteStore
from perdure.archive import copy, fsck
from perdure.protocols import Token
from perdure.stores.format.rows import checksum
from perdure.testing.parts.tokens import token

from .files import bytes_in, flip


async def furnished(where: Path, count: int = 3) -> Path:
    """Return the file of tokens of a new directory that has some."""
    async with FileStore(where) as store:
        for number in range(count):
            await store.add_token(token(number))
    return where / ".tokens"


def resealed(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a file of tokens with other contents, and the checksum that fits them."""
    plain = json.loads(raw)
    change(plain)
    rows = json.dumps(plain["rows"], separators=(",", ":")).encode()
    plain |= {"crc": f"{checksum(rows):08x}", "rows": None}
    return json.dumps(plain, separators=(",", ":")).encode().replace(b"null", rows)


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "no tokens": lambda raw: b"{}",
    "a list": lambda raw: b"[]",
    "cut short": lambda raw: raw[: len(raw) // 2],
    "one fewer": lambda raw: raw.replace(b"[" + raw.split(b"],[")[0].partition(b"[[")[2] + b"],", b"", 1),
    "another owner": lambda raw: raw.replace(b'"ada"', b'"eve"'),
    "an operator": lambda raw: raw.replace(b'"ada"', b"null"),
    "of a later format": lambda raw: raw.replace(b'"format":1', b'"format":2'),
    "with more to say": lambda raw: raw.replace(b'"format":1', b'"format":1,"limits":{}'),
    "no text": lambda raw: b"\xff" + raw,
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_damaged_file_of_tokens_opens_nothing(tmp_path: Path, wrong: str) -> None:
    """Everybody who asks gets an error that says what to do; the file stays as it is, and fsck names it."""
    path = await furnished(tmp_path)
    sound = path.read_bytes()
    damaged = WRONG[wrong](sound)
    assert damaged != sound
    path.write_bytes(damaged)
    async with FileStore(tmp_path) as store:
        asked = (
            *(store.token(token(0).digest), store.token(token(9).digest), store.tokens()),
            *(store.add_token(token(9)), store.drop_token(token(0).id), store.tokens("ada")),
        )
        for each in asked:
            with pytest.raises(CorruptRecord, match=r"\.tokens is damaged: .*remove it and make new tokens"):
                await each
        assert path.read_bytes() == damaged
        (problem,) = (await fsck(store)).problems
        assert (problem.session_id, problem.where) == (None, ".tokens")
        assert "remove it and make new tokens" in problem.repair
        path.write_bytes(sound)
        assert await store.token(token(0).digest) == token(0)


async def test_every_bit_of_the_file_counts(tmp_path: Path) -> None:
    """A flipped bit is damage, or makes no difference: it never gives another token, or one fewer."""
    path = await furnished(tmp_path, count=1)
    async with FileStore(tmp_path) as store:
        for place in range(len(path.read_bytes())):
            flip(path, place, place % 8)
            with suppress(CorruptRecord):
                assert [*await store.tokens()] == [token(0)]
            flip(path, place, place % 8)


async def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Somebody else's tokens would be taken for the store's own."""
    path = await furnished(tmp_path / "theirs")
    async with FileStore(tmp_path / "ours") as store:
        (tmp_path / "ours" / ".tokens").symlink_to(path)
        with pytest.raises(CorruptRecord, match="symbolic link"):
            await store.token(token(0).digest)


async def test_a_field_of_a_later_release_is_refused(tmp_path: Path) -> None:
    """It may say that something is forbidden."""
    path = await furnished(tmp_path, count=1)
    path.write_bytes(resealed(path.read_bytes(), lambda plain: plain["rows"][0][3].update(only_from="10.0.0.0/8")))
    async with FileStore(tmp_path) as store:
        with pytest.raises(CorruptRecord, match="only_from"):
            await store.token(token(0).digest)
        assert await store.drop_token(token(0).id)
        assert not path.exists()


async def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = await furnished(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_reading_waits_for_no_lock(tmp_path: Path) -> None:
    """A service looks a token up for every request; a process stopped in a change does not hold it up."""
    await furnished(tmp_path, count=1)
    with (tmp_path / ".tokens.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        async with asyncio.timeout(5), FileStore(tmp_path, lock_timeout=60.0) as store:
            assert await store.token(token(0).digest) == token(0)
            assert [*await store.tokens()] == [token(0)]
            assert [*await store.check()] == []


async def test_a_change_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the answers stay the same."""
    path = await furnished(tmp_path, count=1)
    before = path.read_bytes()
    async with FileStore(tmp_path) as store:
        folder = store._engine._desk.directory.folder  # type: ignore[union-attr]
        with monkeypatch.context() as patched:
            patched.setattr(folder, "put_in_place", lambda name: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await store.add_token(token(1))
        assert path.read_bytes() == before
        assert await store.token(token(1).digest) is None
        await store.add_token(token(1))
        assert [*await store.tokens()] == [token(0), token(1)]


@pytest.mark.parametrize("kind", ["sqlite", "file"])
async def test_nothing_of_a_dropped_token_is_left(tmp_path: Path, kind: str) -> None:
    """No byte of it is left, although pages were filled and split before."""
    stores: dict[str, Callable[[], Any]] = {
        "sqlite": lambda: SqliteStore(tmp_path / "sessions.db"),
        "file": lambda: FileStore(tmp_path / "sessions"),
    }
    async with stores[kind]() as store:
        for number in range(120):
            owner, name = ("zanzibar", "her telephone") if number % 3 == 0 else ("ada", None)
            await store.add_token(token(number, owner, name=name))
        hers = [token(number, "zanzibar").id for number in range(0, 120, 3)]
        if kind == "file":  # as a killed writer leaves it
            (tmp_path / "sessions" / ".tokens.tmp").write_bytes(b"zanzibar")
        assert b"zanzibar" in bytes_in(tmp_path)
        assert [await store.drop_token(each) for each in hers] == [True] * 40
        for trace in (b"zanzibar", b"telephone", *(each.encode() for each in hers)):
            assert trace not in bytes_in(tmp_path)
        assert len(await store.tokens()) == 80
        assert [*await store.check()] == []


async def test_the_last_token_of_a_directory_goes_with_its_file(tmp_path: Path) -> None:
    path = await furnished(tmp_path, count=2)
    path.with_name(".tokens.tmp").write_bytes(b"left by a killed writer")
    async with FileStore(tmp_path) as store:
        assert [await store.drop_token(token(number).id) for number in range(2)] == [True, True]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".tokens")] == [".tokens.lock"]


async def test_a_row_that_says_more_than_was_written_is_damage(tmp_path: Path) -> None:
    """A changed flag, owner or end is noticed in SQLite too."""
    async with SqliteStore(tmp_path / "s.db") as store:
        await store.add_token(token(1, "ada", may_write=False))
    for change in (
        "body = replace(CAST(body AS TEXT), 'false', 'true')",
        "owner = NULL",
        "crc = crc + 1",
        "body = x'7b7d'",
    ):
        db = apsw.Connection(str(tmp_path / "s.db"))
        before = db.execute("SELECT digest, id, owner, crc, body FROM token").fetchall()
        db.execute(f"UPDATE token SET {change.replace('body = replace(', 'body = CAST(replace(')}"
                   f"{' AS BLOB)' if 'replace' in change else ''}")  # fmt: skip
        db.close()
        async with SqliteStore(tmp_path / "s.db") as store:
            with pytest.raises(CorruptRecord, match="perdure token revoke"):
                await store.token(token(1).digest)
        db = apsw.Connection(str(tmp_path / "s.db"))
        db.execute("DELETE FROM token")
        db.executemany("INSERT INTO token VALUES (?, ?, ?, ?, ?)", before)
        db.close()


async def test_a_copy_has_no_tokens(tmp_path: Path) -> None:
    """Tokens open only the store that they were made for."""
    async with SqliteStore(tmp_path / "a.db") as source, FileStore(tmp_path / "b") as target:
        await source.add_token(token(1))
        await copy(source, target)
        assert [*await target.tokens()] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "0" * 63),
        ("digest", "F" * 64),
        ("digest", None),
        ("owner", ""),
        ("owner", 5),
        ("owner", "half \ud800"),
        ("may_write", 1),
        ("created_at", datetime(2025, 1, 1)),
        ("created_at", "2025-01-01"),
        ("expires_at", datetime(2025, 1, 1)),
        ("expires_at", 5.0),
        ("expires_at", datetime(2025, 1, 1, tzinfo=UTC)),
        ("expires_at", datetime(2024, 12, 31, tzinfo=UTC)),
        ("name", " "),
        ("name", "x" * 501),
        ("name", "half \ud800"),
        ("name", 5),
    ],
)
def test_a_token_is_checked_when_it_is_made(field: str, value: Any) -> None:
    good = {"digest": "0" * 64, "owner": "ada", "may_write": True, "created_at": datetime(2025, 1, 1, tzinfo=UTC)}
    with pytest.raises(InvalidData, match=field) as caught:
        Token(**{**good, field: value})
    assert caught.value.path == f"$.{field}"


def test_a_secret_that_is_given_for_a_digest_is_not_repeated() -> None:
    """The error does not contain it, since errors end up in logs."""
    with pytest.raises(InvalidData) as caught:
        Token(digest="pdr_secret", owner=None, may_write=True, created_at=datetime.now(UTC))
    assert "pdr_secret" not in str(caught.value)
