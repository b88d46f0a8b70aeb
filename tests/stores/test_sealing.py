"""Encryption at rest: what is on disk, who can read it, and the error when a key is missing."""

from __future__ import annotations

import inspect
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace
from tests import postgres_server
from tests.crash.addresses import NAMES
from tests.stores.sealed_scene import (
    MASTER,
    OWNER,
    PHOTO,
    WORD,
    bytes_in,
    bytes_in_schema,
    opened,
    ring_in,
    say_everything,
    told,
    urls,
)

from perdure import (
    AgentDefinition,
    ConfigurationError,
    CorruptRecord,
    FileKeyRing,
    ForkSession,
    InjectMessage,
    KeyForgotten,
    KeyMissing,
    KeyUnavailable,
    Media,
    MemoryStore,
    Message,
    Retention,
    SessionHeld,
    SessionId,
    SessionNotFound,
    SessionRuntime,
    SqliteStore,
    UpdateTask,
    WrongKey,
    connect,
    redacting,
)
from perdure.archive.checking import fsck
from perdure.archive.copying import copy
from perdure.archive.repairing import repair
from perdure.codec import hash_of_bytes
from perdure.errors import InvalidData
from perdure.protocols import Entry, Timer, keys_of
from perdure.stores.format.rows import hash_of
from perdure.testing.outcomes import Outcome, note

AGENT = AgentDefinition("birds", system_prompt=f"You know the {WORD}.")
ROUNDS = 10_000 if os.environ.get("PERDURE_TORTURE") else 200
# The tables with sealed rows, and the columns that tell these rows apart.
BODIES = {
    "msg": "log, pos",
    "head": "sid, version",
    "value": "hash",
    "batch": "sid, last",
    "inbox": "sid, seq",
    "timer": "timer",
    "blob": "hash",
    "key": "sid, name",
}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    postgres_server.give_back(tmp_path)


def store_in(where: Path, ring: FileKeyRing | None, **options: Any) -> SqliteStore:
    return SqliteStore(where / "sessions.db", keys=ring, **options)


async def spoken(store: Any, session_id: str = "a", owner: str | None = OWNER, *texts: str) -> Any:
    runtime = SessionRuntime(store)
    await runtime.create(AGENT, session_id=session_id, owner=owner)
    said = [Message.user(text) for text in texts or (f"a {WORD}",)]
    return await runtime.execute(session_id, InjectMessage(*said))


async def texts_of(store: Any, session_id: str = "a") -> list[str]:
    return [message.text for message in (await store.load(session_id)).state.messages]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_word_is_nowhere_on_disk(where: Path, kind: str) -> None:
    """No file, write-ahead log, row or index has the word, nor anything that would confirm a guess of it.

    The same store without keys has it in many places, so the search for it can find it.
    """
    ring = ring_in(where)
    async with opened(urls(where)[kind], ring) as sessions:
        _, fork = await say_everything(sessions)
        held = bytes_in(where) if kind == "sqlite" else bytes_in_schema(where)
        assert [*await texts_of(sessions.store, fork)][-1] == f"It is a {WORD}."
    held |= {f"{name} once closed": body for name, body in bytes_in(where).items()}
    found = [(name, each) for name, body in held.items() for each in told() if each in body]
    assert found == []
    plain = where / "plain"
    plain.mkdir()
    try:
        async with opened(urls(plain)[kind], None) as sessions:
            await say_everything(sessions)
            bare = bytes_in(plain) if kind == "sqlite" else bytes_in_schema(plain)
    finally:
        postgres_server.give_back(plain)
    missed = sum(1 for each in told()[::2] if any(each in body for body in bare.values()))
    assert missed == 2, "the control finds the word and the hash of the file"
    outcome = {"attack": "canary word searched for on disk", "store": f"{NAMES[kind]}, sealed", "rounds": len(held)}
    control = {"control": "no keys", "control_rounds": len(bare), "control_failures": missed}
    note(Outcome(failures=len(found), **outcome, **control))  # type: ignore[arg-type]  # as its fields are typed


async def test_names_tell_nothing_of_what_they_name(where: Path) -> None:
    """Values and files are named with a key: the same content of two owners has two names, and neither is its hash."""
    photo = Message.user("look", Media("image/png", data=PHOTO))
    async with store_in(where, ring_in(where)) as store:
        for owner in ("ada", "bob"):
            runtime = SessionRuntime(store)
            await runtime.create(AGENT, session_id=owner, owner=owner)
            saved = await runtime.execute(owner, InjectMessage(photo))
            (part,) = [each for each in saved.state.messages[0].parts if isinstance(each, Media)]
            key = hash_of_bytes(PHOTO)
            assert (part.hash, part.size) == (key, len(PHOTO))
            assert await store.attachments(owner, [key]) == {key: PHOTO}
    db = apsw.Connection(str(where / "sessions.db"))
    names = {table: [row[0] for row in db.execute(f"SELECT hash FROM {table}")] for table in ("value", "blob")}
    assert [len(each) for each in names.values()] == [2, 2]
    assert hash_of(b"") not in names["value"]
    assert hash_of_bytes(PHOTO) not in names["blob"]
    assert all(name.startswith("~") for each in names.values() for name in each)


async def test_another_store_of_the_process_reads_nothing_without_keys(where: Path) -> None:
    """Keys belong to the store that they were given to, and to no other."""
    async with store_in(where, ring_in(where)) as store:
        await spoken(store)
        async with store_in(where, None) as other:
            with pytest.raises(KeyMissing) as missing:
                await other.load("a")
            assert missing.value.session_id == "a"
            with pytest.raises(KeyMissing):  # it would be the first unsealed one
                await spoken(other, "b")
            assert not await other.exists("b")
            assert "keys" in missing.value.advice
        assert await texts_of(store) == [f"a {WORD}"]


@pytest.mark.parametrize("body", ["X'00'", "X'7b7d'", "zeroblob(length(body))"])
@pytest.mark.parametrize("tables", [("head",), ("msg",), ("head", "msg")], ids="+".join)
async def test_a_damaged_row_does_not_hide_that_a_store_is_sealed(
    where: Path, tables: tuple[str, ...], body: str
) -> None:
    """Without keys a new session is refused, although its newest head or message has lost its mark, or both have."""
    async with store_in(where, ring_in(where)) as store:
        await spoken(store)
        await spoken(store, "b")
    db = apsw.Connection(str(where / "sessions.db"))
    if "head" in tables:
        db.execute(f"UPDATE head SET body = {body} WHERE sid = (SELECT max(sid) FROM head)")
    if "msg" in tables:
        db.execute(f"UPDATE msg SET body = {body} WHERE log = (SELECT max(log) FROM msg)")
    db.close()
    async with store_in(where, None) as other:
        with pytest.raises(KeyMissing):
            await spoken(other, "c")
        assert not await other.exists("c")


async def refusals(store: Any, kind: type[KeyUnavailable]) -> None:
    """Assert that every read raises a typed error, and none returns an empty session. Lists continue, and name it."""
    for read in (
        lambda: store.load("a"),
        lambda: store.load("a", 1),
        lambda: store.read("a"),
        lambda: store.read("a", inbox=True),
        lambda: store.versions("a"),
        lambda: store.timers("a"),
        lambda: store.dump("a"),
    ):
        with pytest.raises(kind):
            await read()
    page = await store.list()
    assert [type(each) for each in page.damaged] == [kind]
    assert page.damaged[0].session_id == "a"
    assert (await store.heads(["a"])).damaged.keys() == {"a"}
    assert isinstance((await store.previews(["a"]))["a"].damage, kind)
    assert await store.exists("a")
    report = await fsck(store)
    assert report.problems
    assert all("could not be checked" in problem.what for problem in report.problems)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_key_that_is_not_there_is_a_typed_error(
    where: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key may be missing: no keys (or no library), another ring, another master, or a forgotten key."""
    ring, other = ring_in(where), where / "other"
    other.mkdir()
    wrong = FileKeyRing(where / "keys.json", master=b"another master key, of 32 bytes.")
    async with opened(urls(where)[kind], ring) as sessions:
        store: Any = sessions.store
        await spoken(store)
        await store.note("a", [Entry("note", {"said": WORD})])
        await store.post("a", Entry("note", {"said": WORD}))
        await store.set_timer(Timer(SessionId("a"), "t", 4e9, Entry("note", {"said": WORD})))
    with monkeypatch.context() as without:
        for name in [each for each in sys.modules if each.partition(".")[0] == "cryptography"]:
            without.setitem(sys.modules, name, None)
        async with opened(urls(where)[kind], None) as sessions:
            await refusals(sessions.store, KeyMissing)
            with pytest.raises(KeyMissing):
                await sessions.store.search(WORD)  # type: ignore[attr-defined]  # both can
    for given, error in ((ring_in(other), KeyMissing), (wrong, WrongKey)):
        async with opened(urls(where)[kind], given) as sessions:
            await refusals(sessions.store, error)
    assert ring.forget(OWNER) == 1
    async with opened(urls(where)[kind], ring) as sessions:
        await refusals(sessions.store, KeyForgotten)
        assert await sessions.store.due(5e9) == []  # type: ignore[attr-defined]  # both can
        assert await sessions.store.search(WORD) == []  # type: ignore[attr-defined]  # both can
        await sessions.erase("a")
        assert not await sessions.store.exists("a")
        assert (await fsck(sessions.store)).is_sound


async def test_forgetting_a_key_erases_its_owner_in_a_backup(where: Path) -> None:
    """The copied file is unchanged, and nobody can read the owner's sessions in it. Other owners' are as they were."""
    ring = ring_in(where)
    async with opened(urls(where)["sqlite"], ring) as sessions:
        await spoken(sessions.store, "a", OWNER)
        await spoken(sessions.store, "b", "bob", "of bob")
        await sessions.store.search(WORD)  # type: ignore[attr-defined]  # it can
    backup = where / "backup"
    backup.mkdir()
    for name in ("sessions.db", "sessions.db-search"):
        shutil.copy(where / name, backup / name)
    async with opened(f"sqlite:///{backup / 'sessions.db'}", ring) as sessions:
        assert await texts_of(sessions.store) == [f"a {WORD}"]
    async with opened(urls(where)["sqlite"], ring) as sessions:
        receipt = await sessions.erase_owner(OWNER, forget_key=True)
        assert (receipt.erased, receipt.keys_forgotten, receipt.is_complete) == (("a",), 1, True)
        assert await texts_of(sessions.store, "b") == ["of bob"]
    for given in (ring, FileKeyRing(where / "keys.json", master=MASTER)):
        async with opened(f"sqlite:///{backup / 'sessions.db'}", given) as sessions:
            with pytest.raises(KeyForgotten):
                await sessions.store.load("a")
            assert await texts_of(sessions.store, "b") == ["of bob"]
            assert await sessions.store.search(WORD) == []  # type: ignore[attr-defined]  # it can
    assert WORD.encode() not in b"".join(bytes_in(backup).values())


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_session_at_hand_goes_with_its_key(where: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After another process forgets the key, the memory gives out neither the owner's session nor a fork of it."""
    monkeypatch.setattr("perdure.keys.ring._LOOK_AGAIN", 0.0)
    async with opened(urls(where)[kind], ring_in(where)) as sessions:
        store: Any = sessions.store
        held = await spoken(store, "a", "ada")
        fork = await ForkSession().execute_on(held)
        await store.create(replace(fork, info=replace(fork.info, id=SessionId("b"), owner="bob")))
        assert await texts_of(store, "b") == await texts_of(store, "a") == [f"a {WORD}"]
        await spoken(store, "c", "cleo")
        ring_in(where).forget("ada")
        for session_id in ("a", "b"):
            assert store.glance(session_id) is None
            with pytest.raises(KeyForgotten):
                await store.load(session_id)
            with pytest.raises(KeyForgotten):
                await store.load(session_id, last=1)
        assert await texts_of(store, "c") == [f"a {WORD}"]


async def test_a_save_does_not_bring_a_forgotten_session_back(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that still holds the session may save it. No other load gets the words of the lost key."""
    monkeypatch.setattr("perdure.keys.ring._LOOK_AGAIN", 0.0)
    async with store_in(where, ring_in(where)) as store:
        held = await spoken(store)
        ring_in(where).forget(OWNER)
        await store.save(await UpdateTask("go on").execute_on(held))
        with pytest.raises(KeyForgotten):
            await store.load("a")


async def test_a_key_is_not_forgotten_where_there_are_none(where: Path) -> None:
    """Nothing is erased then, since the caller expects more to be erased."""
    async with opened(urls(where)["sqlite"], None) as sessions:
        await spoken(sessions.store)
        with pytest.raises(ConfigurationError, match="without keys"):
            await sessions.erase_owner(OWNER, forget_key=True)
        assert await sessions.store.exists("a")


async def test_a_store_with_plain_rows_can_go_on_with_keys(where: Path) -> None:
    """Old rows stay readable and new ones are sealed; the search index is rebuilt without the words."""
    async with store_in(where, None) as store:
        await spoken(store)
        assert await store.search(WORD)
    ring = ring_in(where)
    async with store_in(where, ring) as store:
        await SessionRuntime(store).execute("a", InjectMessage(Message.user("a second heronry")))
        assert await texts_of(store) == [f"a {WORD}", "a second heronry"]
        assert [hit.message_id for hit in await store.search(WORD)]
        assert (await fsck(store)).is_sound
    held = bytes_in(where)
    assert b"heronry" not in b"".join(held.values())
    assert WORD.encode() not in held["sessions.db-search"]
    async with store_in(where, ring) as source, SqliteStore(where / "copy.db", keys=ring) as target:
        report = await copy(source, target)
        assert (report.sessions, report.differing) == (1, ())
        assert await texts_of(target) == [f"a {WORD}", "a second heronry"]
    assert WORD.encode() not in (where / "copy.db").read_bytes()


async def test_a_sealed_store_is_copied_into_a_plain_one_and_back(where: Path) -> None:
    """An archive has no keys: a process that can read a store can take everything out."""
    ring = ring_in(where)
    async with opened(urls(where)["sqlite"], ring) as sessions:
        mine, claimed = await say_everything(sessions)
    async with opened(urls(where)["sqlite"], ring) as sessions:
        await sessions.store.delete(claimed)  # its run is over, since its store was closed
        async with SqliteStore(where / "plain.db") as plain, SqliteStore(where / "again.db", keys=ring) as again:
            assert (await copy(sessions.store, plain)).differing == ()  # type: ignore[arg-type]  # it can
            assert (await copy(plain, again)).differing == ()
            whole = [await store.dump(mine) for store in (sessions.store, plain, again)]  # type: ignore[attr-defined]
            assert whole[0] == whole[1] == whole[2]
            for store in (plain, again):
                assert (await fsck(store)).is_sound
                assert await store.attachments(mine, [hash_of_bytes(PHOTO)]) == {hash_of_bytes(PHOTO): PHOTO}
    assert WORD.encode() in (where / "plain.db").read_bytes()
    assert WORD.encode() not in (where / "again.db").read_bytes()


async def test_a_fork_of_another_owners_session_can_be_read_and_goes_with_the_first(where: Path) -> None:
    """It shows the messages under the first owner's key, and its own under its own key."""
    ring = ring_in(where)
    photo = Message.user("look", Media("image/png", data=PHOTO))
    async with store_in(where, ring, cache=0) as store:
        await spoken(store, "a", "ada")
        session = await SessionRuntime(store).execute("a", InjectMessage(photo))
        fork = await ForkSession().execute_on(session)
        await store.create(replace(fork, info=replace(fork.info, id=SessionId("b"), owner="bob")))
        await SessionRuntime(store).execute("b", InjectMessage(Message.user("of bob")))
        assert await texts_of(store, "b") == [f"a {WORD}", "look", "of bob"]
        assert await store.attachments("b", [hash_of_bytes(PHOTO)]) == {hash_of_bytes(PHOTO): PHOTO}
        assert (await fsck(store)).is_sound
        borrowed = Message.user("again", Media("image/png", hash=hash_of_bytes(PHOTO), size=len(PHOTO)))
        await SessionRuntime(store).execute("b", InjectMessage(borrowed))
        assert (await fsck(store)).is_sound
        await store.delete("a")
        assert await texts_of(store, "b") == [f"a {WORD}", "look", "of bob", "again"]
        assert (await fsck(store)).is_sound
        ring.forget("ada")
        with pytest.raises(KeyForgotten):
            await store.load("b")
        await store.delete("b")
        db = apsw.Connection(str(where / "sessions.db"))
        assert [*db.execute("SELECT count(*) FROM msg UNION SELECT count(*) FROM blob")] == [(0,)]


async def test_rotation_and_renewal_change_no_row(where: Path) -> None:
    """With a new master everything opens as before; rows written after a renewal use the new key."""
    ring = ring_in(where)
    async with store_in(where, ring) as store:
        await spoken(store)
        before = (where / "sessions.db").read_bytes()
        new = ring.renew(OWNER)
        rotated = FileKeyRing(where / "keys.json", master=[b"a newer master key, of 32 bytes.", MASTER])
        assert rotated.rotate() == 2
        assert (where / "sessions.db").read_bytes() == before
    async with store_in(where, FileKeyRing(where / "keys.json", master=b"a newer master key, of 32 bytes.")) as store:
        await SessionRuntime(store).execute("a", InjectMessage(Message.user(f"another {WORD}")))
        assert await texts_of(store) == [f"a {WORD}", f"another {WORD}"]
        assert len(await store.search(WORD)) == 2
        assert (await fsck(store)).is_sound
    db = apsw.Connection(str(where / "sessions.db"))
    assert [new.id in bytes(body) for (body,) in db.execute("SELECT body FROM msg ORDER BY pos")] == [False, True]


async def test_a_search_without_an_owner_finds_what_all_have_said(where: Path) -> None:
    """With an owner it finds what that owner has said. It also finds the beginning of a word, by opening messages."""
    async with store_in(where, ring_in(where)) as store:
        for owner in ("ada", "bob", None):
            await spoken(store, f"of-{owner}", owner, f"{owner} has a {WORD}", "and a heron")
        assert {hit.session_id for hit in await store.search(WORD)} == {"of-ada", "of-bob", "of-None"}
        assert {hit.session_id for hit in await store.search(f"{WORD[:4]}*")} == {"of-ada", "of-bob", "of-None"}
        (hit,) = await store.search(f"{WORD[:4]}* bob", owner="bob")
        assert (hit.session_id, hit.snippet) == ("of-bob", f"bob has a {WORD}")
        (hit,) = await store.search(f'"a {WORD}"', owner="bob")
        assert hit.session_id == "of-bob"
        (hit,) = await store.search("heron", session_id="of-None")
        assert hit.session_id == "of-None"
        assert await store.search(WORD, owner="nobody") == []


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_session_is_erased_without_the_keys(where: Path, kind: str) -> None:
    """A process without keys can erase a session; with the keys, search finds what is left."""
    ring = ring_in(where)
    async with opened(urls(where)[kind], ring) as sessions:
        for name in ("a", "b"):
            await spoken(sessions.store, name)
        assert len(await sessions.store.search(WORD)) == 2  # type: ignore[attr-defined]  # both can
    async with opened(urls(where)[kind], None) as sessions:
        await sessions.erase("a")
        await sessions.gc()
    async with opened(urls(where)[kind], ring) as sessions:
        assert [hit.session_id for hit in await sessions.store.search(WORD)] == ["b"]  # type: ignore[attr-defined]
        assert (await fsck(sessions.store)).is_sound


def test_only_stores_that_can_be_sealed_take_keys(where: Path) -> None:
    ring = ring_in(where)
    for url in ("memory://", f"file://{where / 'files'}", MemoryStore()):
        with pytest.raises(ConfigurationError):
            connect(url, keys=ring)
    with pytest.raises(InvalidData):
        store_in(where, "keys.json")  # type: ignore[arg-type]  # which is the point


class Tamperer:
    """An attacker that changes single bytes of sealed rows in a SQLite file, and puts them back."""

    def __init__(self, path: Path, seed: int) -> None:
        self._db = apsw.Connection(str(path))
        self._db.set_busy_timeout(10_000)
        self._db.execute("PRAGMA synchronous = 0")
        self._random = random.Random(seed)
        self._rows = [
            (table, "digest" if table == "key" else "body", key)
            for table, columns in BODIES.items()
            for key in self._db.execute(f"SELECT {columns} FROM {table}")
        ]

    def tables(self) -> set[str]:
        return {table for table, _, _ in self._rows}

    def change(self) -> tuple[str, int]:
        """Change a byte somewhere. Return the table, and the place of the byte."""
        # Each table is chosen equally often, however many rows it has.
        table = self._random.choice(sorted(self.tables()))
        self._row = self._random.choice([row for row in self._rows if row[0] == table])
        _, column, key = self._row
        ((self._before,),) = self._db.execute(f"SELECT {column} FROM {table} {self._where(table)}", key)
        raw = bytearray(self._before.encode() if isinstance(self._before, str) else self._before)
        at = self._random.randrange(len(raw))
        raw[at] ^= self._random.randrange(1, 128 if table == "key" else 256)
        self._write(raw.decode(errors="replace") if table == "key" else bytes(raw))
        return table, at

    def put_back(self) -> None:
        self._write(self._before)

    def _write(self, value: Any) -> None:
        table, column, key = self._row
        self._db.execute(f"UPDATE {table} SET {column} = ? {self._where(table)}", (value, *key))

    def _where(self, table: str) -> str:
        return f"WHERE ({BODIES[table]}) = ({', '.join('?' for _ in BODIES[table].split(','))})"


async def read_everything(store: Any, session_id: str, key: str) -> None:
    """Read everything of a session, as its users do."""
    log, end = await store.log_of(session_id)
    session = await store.load(session_id)
    for version in range(1, session.version + 1):
        await store.load(session_id, version)
    await store.messages(log, 0, end)
    await store.read(session_id)
    await store.read(session_id, inbox=True)
    await store.timers(session_id)
    await store.attachments(session_id, [hash_of_bytes(PHOTO)])
    assert await store.find_key(session_id, key) is not None


async def test_every_changed_byte_is_noticed(where: Path) -> None:
    """Any changed byte of a sealed row raises CorruptRecord, or KeyMissing if it names another key."""
    ring = ring_in(where)
    key = f"request about a {WORD}"
    async with opened(urls(where)["sqlite"], ring) as sessions:
        mine, fork = await say_everything(sessions)
    seed = random.randrange(2**32)
    silent: list[tuple[str, int]] = []
    told_of: list[tuple[str, type[Exception], str | None]] = []
    tamperer = Tamperer(where / "sessions.db", seed)
    assert tamperer.tables() == {*BODIES}
    async with store_in(where, ring, cache=0) as store:
        await store.delete(fork)
        tamperer = Tamperer(where / "sessions.db", seed)
        await read_everything(store, mine, key)
        for _ in range(ROUNDS):
            place = tamperer.change()
            store._values.forget_all()
            store._definitions.forget_all()
            try:
                await read_everything(store, mine, key)
                silent.append(place)
            except (CorruptRecord, KeyMissing) as error:
                told_of.append((place[0], type(error), error.session_id))
            tamperer.put_back()
        await read_everything(store, mine, key)
    note(Outcome(attack="byte of a sealed row changed", store="SQLite, sealed", rounds=ROUNDS, failures=len(silent)))
    assert silent == [], seed
    assert {session_id for _, kind, session_id in told_of if kind is CorruptRecord} <= {mine, None}, seed
    assert {table for table, kind, _ in told_of if kind is KeyMissing} <= {"value", "blob", "key"}, seed


async def test_a_row_that_has_moved_is_noticed(where: Path) -> None:
    """Each row's place is part of what is sealed, so that no two rows can be exchanged."""
    ring = ring_in(where)
    async with store_in(where, ring) as store:
        await spoken(store, "a", OWNER, "pay ada", "pay bob")
    db = apsw.Connection(str(where / "sessions.db"))
    (one, other) = [*db.execute("SELECT rowid, crc, body FROM msg ORDER BY pos")]
    for row, (_, crc, body) in ((one, other), (other, one)):
        db.execute("UPDATE msg SET crc = ?, body = ? WHERE rowid = ?", (crc, body, row[0]))
    db.close()
    async with store_in(where, ring) as store:
        with pytest.raises(CorruptRecord) as damage:
            await store.load("a")
        assert (damage.value.session_id, damage.value.position) == ("a", "message 0 of log 1")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_repair_leaves_files_in_a_sealed_store(where: Path, kind: str) -> None:
    """A file has another name in the tables than in messages, which does not make its note wrong."""
    async with opened(urls(where)[kind], ring_in(where)) as sessions:
        session_id, _ = await say_everything(sessions)
        report = await repair(sessions.store)
        assert (report.found, report.repaired) == ((), ())
        store: Any = sessions.store
        assert await store.attachments(session_id, [hash_of_bytes(PHOTO)]) == {hash_of_bytes(PHOTO): PHOTO}


async def test_a_lost_note_of_a_file_is_repaired_in_a_sealed_store(where: Path) -> None:
    """The note is written again under the name that the file has in the tables."""
    ring = ring_in(where)
    async with store_in(where, ring) as store:
        photo = Media("image/png", data=PHOTO, name="a.png")
        await SessionRuntime(store).create(AGENT, session_id="a", owner=OWNER)
        await SessionRuntime(store).execute("a", InjectMessage(Message.user("look", photo)))
    with apsw.Connection(str(where / "sessions.db")) as db:
        db.execute("DELETE FROM attached")
    async with store_in(where, ring) as store:
        report = await repair(store)
        assert [len(each) for each in (report.found, report.repaired, report.left)] == [2, 1, 0]
        assert await store.attachments("a", [hash_of_bytes(PHOTO)]) == {hash_of_bytes(PHOTO): PHOTO}


async def test_a_repair_without_a_key_leaves_notes_of_files(where: Path) -> None:
    """A message may name a file that another owner's key has sealed. Its note stays until that key is back."""
    ring = ring_in(where)
    photo, named = Media("image/png", data=PHOTO), Media("image/png", hash=hash_of_bytes(PHOTO), size=len(PHOTO))
    async with store_in(where, ring, cache=0) as store:
        await spoken(store, "a", "ada")
        session = await SessionRuntime(store).execute("a", InjectMessage(Message.user("look", photo)))
        fork = await ForkSession().execute_on(session)
        await store.create(replace(fork, info=replace(fork.info, id=SessionId("b"), owner="bob")))
        await SessionRuntime(store).execute("b", InjectMessage(Message.user("again", named)))
    kept = ring.path.read_bytes()
    ring.forget("ada")
    async with store_in(where, ring) as store:
        assert (await repair(store)).repaired == ()
    ring.path.write_bytes(kept)
    async with store_in(where, FileKeyRing(ring.path, master=MASTER)) as store:
        assert (await fsck(store)).problems == ()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_forgotten_key_is_in_nobody_elses_way(where: Path, kind: str) -> None:
    """Timers, the queue, retention and recovery continue without the sealed rows. An owner learns nothing of it."""
    ring = ring_in(where)
    async with opened(urls(where)[kind], ring) as sessions:
        store: Any = sessions.store
        for owner in ("ada", "bob", "cleo"):
            session_id = (await sessions.of(owner).open("a")).id
            for text in ("one", "two", "three"):
                await sessions.of(owner).inject("a", text)
            await store.set_timer(Timer(session_id, "t", 4e9, Entry("note", {"said": WORD})))
            killed = await sessions.of(owner).fork("a", "killed")
            start = Entry("agent_start", {"said": WORD}, f"run-{owner}")
            await store.claim(killed.id, version=1, owner="a process that is killed", entries=[start])
        await store.lapse_claims()
    ring.forget("ada")
    async with opened(urls(where)[kind], ring) as sessions:
        store = sessions.store
        timers = [*await store.timers(limit=1)]
        timers += await store.timers(limit=1, after=timers[-1].id)
        assert [timer.session_id for timer in timers] == [SessionId.under(each, "a") for each in ("bob", "cleo")]
        assert await store.timers(limit=1, after=timers[-1].id) == []
        backlog = await sessions.queue()
        assert (len(backlog.delayed), len(backlog.running)) == (2, 3)
        report = await sessions.apply_retention(Retention(versions=1))
        assert {*report.pruned} == {SessionId.under(each, "a") for each in ("bob", "cleo")}
        theirs = await sessions.of("bob").recover()
        assert not any(isinstance(each, KeyUnavailable) for each in theirs.errors)
        with pytest.raises(SessionNotFound):
            await sessions.of("bob").info(SessionId.under("ada", "a"))
        with pytest.raises(KeyForgotten):
            await sessions.of("ada").info("a")
        own = await sessions.of("ada").recover()
        assert [each for each, _ in own.failed] == [SessionId.under("ada", "killed")]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_key_stays_while_a_held_fork_of_another_owner_needs_it(where: Path, kind: str) -> None:
    """The fork shows messages of the erased session, and a hold keeps all that it shows."""
    async with opened(urls(where)[kind], ring_in(where)) as sessions:
        store: Any = sessions.store
        session = await spoken(store, "a", "ada")
        fork = await ForkSession().execute_on(session)
        await store.create(replace(fork, info=replace(fork.info, id=SessionId("b"), owner="bob", tags=("hold:case",))))
        await spoken(store, "c", "cleo")
        await sessions.hold("c", "case")
        receipt = await sessions.erase_owner("ada", forget_key=True)
        assert (receipt.erased, receipt.held, receipt.keys_forgotten) == (("a",), {"b": "hold:case"}, 0)
        assert not receipt.is_complete
        assert await texts_of(store, "b") == [f"a {WORD}"]
        await sessions.lift_hold("b", "case")
        receipt = await sessions.erase_owner("ada", forget_key=True)
        assert (receipt.held, receipt.keys_forgotten, receipt.is_complete) == ({}, 1, True)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_hold_is_lifted_after_its_key_was_forgotten(where: Path, kind: str) -> None:
    """A ring cannot ask for holds. The hold that is left can be lifted; then the rest of the session is erased."""
    ring = ring_in(where)
    async with opened(urls(where)[kind], ring) as sessions:
        store: Any = sessions.store
        await spoken(store, "a", "ada")
        await spoken(store, "b", "bob")
        for session_id in ("a", "b"):
            await sessions.hold(session_id, "case-7")
        ring.forget("ada")
        with pytest.raises(SessionHeld, match=r"lift_hold\('a', 'case-7'\)"):
            await sessions.erase("a")
        with pytest.raises(InvalidData, match="has no hold 'hold'; it has hold:case-7"):
            await sessions.lift_hold("a")
        with pytest.raises(InvalidData, match="can be read"):
            await store.drop_hold("b", "hold:case-7")
        with pytest.raises(SessionNotFound):
            await store.drop_hold("none", "hold:case-7")
        await sessions.lift_hold("a", "case-7")
        assert await store.holds(["a", "b"]) == {"b": "hold:case-7"}
        assert await sessions.erase("a") == ["a"]


async def test_a_connection_that_redacts_knows_its_keys(where: Path) -> None:
    """Since Python 3.12 a protocol looks for `keys` on the object itself."""
    store = redacting(store_in(where, ring := ring_in(where)), [lambda text: text])
    assert inspect.getattr_static(store, "keys")
    assert keys_of(store) is ring
    assert keys_of(redacting("memory://", [lambda text: text])) is None


async def test_an_export_of_an_owner_leaves_nothing_out(where: Path) -> None:
    """Hidden sessions are in it, and an unreadable one raises an error, as it does for all owners together."""
    ring = ring_in(where)
    async with opened(urls(where)["sqlite"], ring) as sessions:
        mine = sessions.of("ada")
        for name in ("shown", "hidden"):
            await mine.open(name)
        await mine.delete("hidden")
        assert (await mine.export(where / "two.jsonl")).sessions == 2
        assert (await mine.export(where / "one.md", format="markdown")).sessions == 1
    ring.forget("ada")
    async with opened(urls(where)["sqlite"], ring) as sessions:
        for format in ("perdure", "markdown", "openai"):
            with pytest.raises(KeyForgotten):
                await sessions.of("ada").export(where / "none", format=format)  # type: ignore[arg-type]  # it is one
            assert not (where / "none").exists()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_an_owner_without_a_key_erases_nobody_elses_session(where: Path, kind: str) -> None:
    """The erasure spares a session of the same name without an owner, and another owner's session by its id."""
    ring = ring_in(where)
    async with opened(urls(where)[kind], ring) as sessions:
        await sessions.open("a")
        await sessions.of("ada").open("a")
        await sessions.of("bob").open("a")
    ring.forget("ada")
    async with opened(urls(where)[kind], ring) as sessions:
        with pytest.raises(SessionNotFound):
            await sessions.of("bob").erase(SessionId.under("ada", "a"))
        assert await sessions.of("ada").erase("a") == [SessionId.under("ada", "a")]
        assert {info.id for info in await sessions.list()} == {"a", SessionId.under("bob", "a")}
        with pytest.raises(SessionNotFound):
            await sessions.of("ada").erase("a")
