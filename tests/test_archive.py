"""Sessions in a file: another store imports them whole, and refuses any part of a damaged or false file."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import stories
from tests.stories import KINDS, account, ledger_loops, opened

from perdure import (
    FileStore,
    InvalidData,
    MemoryStore,
    Message,
    SendMessage,
    SessionBusy,
    SessionConflict,
    SessionId,
    SessionNotFound,
    SessionRuntime,
    SqliteStore,
    StoreError,
    connect,
    recover,
)
from perdure.archive import MoveReport, export_sessions, fsck, import_sessions
from perdure.archive.lines import encode_session, first_line, last_line
from perdure.model.ids import use
from perdure.protocols import Archive, ArchivedSession, Entry
from perdure.testing import FrozenClock
from perdure.testing.samples import fork, new_session, note, say, texts

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all


async def exported(store: Any, *ids: str) -> bytes:
    file = io.BytesIO()
    await export_sessions(store, file, ids or None)
    return file.getvalue()


async def imported(store: Any, raw: bytes) -> MoveReport:
    return await import_sessions(store, io.BytesIO(raw))


def test_every_store_is_an_archive(tmp_path: Path) -> None:
    """All of perdure's stores export and import sessions."""
    stores = (MemoryStore(), FileStore(tmp_path / "files"), SqliteStore(tmp_path / "a.db"))
    assert all(isinstance(store, Archive) for store in stores)


@pytest.mark.parametrize(("one", "other"), [("memory", "sqlite"), ("sqlite", "file"), ("file", "memory")])
async def test_what_was_exported_is_imported_whole(tmp_path: Path, one: str, other: str) -> None:
    """This covers versions, loops and links; either store writes the same file, and a second import changes nothing."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened(one, tmp_path / "one") as source, opened(other, tmp_path / "other") as target:
            await stories.tell(source, clock)
            path, done = tmp_path / "all.jsonl", list[int]()
            report = await export_sessions(source, path, progress=lambda count, of: done.append(count))
            assert done == list(range(1, 12))
            assert (report.sessions, report.bytes) == (11, path.stat().st_size)
            assert path.stat().st_mode & 0o077 == 0
            assert all(json.loads(line) for line in path.read_bytes().splitlines())
            taken = await import_sessions(target, path)
            assert (taken.sessions, taken.skipped, taken.messages) == (11, 0, report.messages)
            assert await account(target) == await account(source)
            assert (await import_sessions(target, path)).skipped == 11
            assert await exported(target) == path.read_bytes()
            assert (await fsck(target)).problems == ()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_run_is_recovered_where_it_was_taken_to(tmp_path: Path, kind: str) -> None:
    """The record and the lapsed claim are moved too, so no completed step is made again."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with MemoryStore() as source, opened(kind, tmp_path) as target:
            await stories.tell(source, clock)
            await imported(target, await exported(source))
            assert sorted(await target.lapsed()) == ["killed", "killed-early"]
            report = await recover(SessionRuntime(target), ledger_loops())
            assert sorted(report.resumed) == ["killed", "killed-early"]
            for session_id in report.resumed:
                session = await target.load(session_id)
                assert texts(session)[-1] == "done"
                results = [result for message in session.state.messages for result in message.tool_results]
                assert sorted(result.call_id[:2] for result in results) == ["c1", "c2", "c3", "c4", "c5"]
            assert (await fsck(target)).problems == ()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_imported_session_goes_on_like_any_other(tmp_path: Path, kind: str) -> None:
    """It can be sent to, forked and erased; its idempotency keys still hold."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with MemoryStore() as source, opened(kind, tmp_path) as target:
            await stories.tell(source, clock)
            await imported(target, await exported(source))
            runtime = SessionRuntime(target)
            before = await target.load("talk")
            again = await runtime.execute("talk", SendMessage("Do it.", ledger_loops(), key="first"))
            assert (again.version, (await target.load("talk")).version) == (2, before.version)
            session = await runtime.execute("talk", SendMessage("More?", ledger_loops(["No."])))
            assert (session.version, texts(session)[-2:]) == (before.version + 1, ["More?", "No."])
            shown = texts(await target.load("a-fork"))
            await target.delete("talk")
            assert texts(await target.load("a-fork")) == shown
            await target.create(fork(await target.load("a-fork"), id="late"))
            assert (await fsck(target)).problems == ()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_goes_without_its_parent(tmp_path: Path, kind: str) -> None:
    """The parent's part of its view goes along; it can continue, and be exported and imported again."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened(kind, tmp_path / "a") as source, opened(kind, tmp_path / "b") as target:
            await stories.tell(source, clock)
            raw = await exported(source, "a-fork-of-it")
            assert (await imported(target, raw)).sessions == 1
            assert (await imported(target, raw)).skipped == 1
            assert texts(await target.load("a-fork-of-it")) == texts(await source.load("a-fork-of-it"))
            assert (await fsck(target)).problems == ()
            async with MemoryStore() as third:
                await imported(third, await exported(target))
                assert texts(await third.load("a-fork-of-it")) == texts(await source.load("a-fork-of-it"))
            await target.create(fork(await target.load("a-fork-of-it"), id="below"))
            async with opened(kind, tmp_path / "c") as fourth:
                await imported(fourth, await exported(target))
                assert texts(await fourth.load("below")) == texts(await source.load("a-fork-of-it"))
                assert (await fsck(fourth)).problems == ()
            session = await target.save(say(await target.load("a-fork-of-it"), "on"))
            assert texts(session)[-1] == "on"
            await imported(target, await exported(source, "talk", "a-fork"))
            assert (await fsck(target)).problems == ()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_is_linked_to_its_parent_only_if_that_is_the_same(tmp_path: Path, kind: str) -> None:
    """A parent with another history in the target is not linked."""
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        await source.create(new_session("one", "two", id="parent"))
        await imported(target, await exported(source))
        await source.save(say(await source.load("parent"), "three here"))
        await target.save(say(await target.load("parent"), "three there"))
        await source.create(fork(await source.load("parent"), id="child"))
        await imported(target, await exported(source, "child"))
        assert texts(await target.load("child")) == ["one", "two", "three here"]
        assert texts(await target.load("parent")) == ["one", "two", "three there"]


@pytest.mark.parametrize("kind", KINDS)
async def test_sessions_that_show_each_other_are_moved(tmp_path: Path, kind: str) -> None:
    """A session that has adopted a fork's view shows the fork's log, and the fork shows the session's."""
    async with opened(kind, tmp_path / "a") as source, opened(kind, tmp_path / "b") as target:
        parent = await source.create(new_session("one", "two", id="parent"))
        child = await source.create(fork(parent, id="child"))
        child = await source.save(say(child, "three"))
        adopted = parent.with_state(parent.state.with_transcript(child.state.transcript))
        await source.save(adopted)
        raw = await exported(source)
        assert (await imported(target, raw)).sessions == 2
        assert (await imported(target, raw)).skipped == 2
        assert texts(await target.load("parent")) == texts(await target.load("child")) == ["one", "two", "three"]
        assert (await fsck(target)).problems == ()


@pytest.mark.parametrize("kind", KINDS)
async def test_another_session_of_the_same_id_is_a_conflict(tmp_path: Path, kind: str) -> None:
    """No session is overwritten, even by an earlier version of itself."""
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        await source.create(new_session("hello", id="same"))
        raw = await exported(source)
        await imported(target, raw)
        await target.save(note(await target.load("same"), "changed", True))
        with pytest.raises(SessionConflict, match="'same' is in this store already"):
            await imported(target, raw)
        assert (await target.load("same")).version == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_under_way_does_not_move(tmp_path: Path, kind: str) -> None:
    """Otherwise it would be recovered there while it runs here. Once its claim is released, it moves."""
    async with opened(kind, tmp_path) as store:
        session = await store.create(new_session("hello", id="busy"))
        claim, _ = await store.claim("busy", version=1, owner="runner 7")
        with pytest.raises(SessionBusy, match="being run by runner 7"):
            await exported(store)
        await store.release(claim)
        assert session.id in (await exported(store)).decode()


async def test_unknown_ids_are_refused() -> None:
    """No file is written for them."""
    async with MemoryStore() as store:
        with pytest.raises(SessionNotFound):
            await exported(store, "nobody")


async def test_a_file_that_cannot_be_written_or_read_is_a_store_error(tmp_path: Path) -> None:
    """The error names the path, and no unfinished file is left."""
    async with MemoryStore() as store:
        with pytest.raises(StoreError, match="no-such-directory"):
            await export_sessions(store, tmp_path / "no-such-directory" / "file.jsonl")
        with pytest.raises(StoreError, match=r"missing\.jsonl"):
            await import_sessions(store, tmp_path / "missing.jsonl")
        await store.create(new_session("x", id="busy"))
        await store.claim("busy", version=1, owner="me")
        with pytest.raises(SessionBusy):
            await export_sessions(store, tmp_path / "file.jsonl")
        assert os.listdir(tmp_path) == []


async def a_file() -> bytes:
    async with MemoryStore() as store:
        first = await store.create(new_session("one", "two", id="first"))
        await store.save(note(first, "long", "y" * 300))
        await store.create(fork(await store.load("first"), id="second"))
        return await exported(store)


def _without(kind: str) -> Callable[[list[Any]], list[Any]]:
    return lambda lines: [line for line in lines if line.get("kind") != kind]


def resealed(lines: list[dict[str, Any]]) -> bytes:
    """Return lines with correct checksums, as a forger makes them: their content must be checked as well."""
    from perdure.archive.lines import _encoded, _end

    raw, block = b"", list[bytes]()
    for line in lines:
        body = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if line.get("kind") == "session":
            block = []
        if line.get("kind") == "end":
            digest = hashlib.blake2b(b"".join(block), digest_size=16).hexdigest()
            raw += b"".join(block) + _encoded(_end(len(block), digest))
            block = []
        elif line.get("kind") in (None, "close"):
            raw += body
        else:
            block.append(body)
    return raw


@pytest.mark.parametrize(
    "change",
    [
        _without("message"),
        _without("value"),
        _without("version"),
        lambda lines: [{**line, "at": 5} if line.get("kind") == "version" else line for line in lines],
        lambda lines: [{**line, "name": "third"} if line.get("kind") == "session" else line for line in lines],
        lambda lines: [{**line, "name": "../x"} if line.get("kind") == "session" else line for line in lines],
        lambda lines: [{**line, "name": "other"} if line.get("kind") == "message" else line for line in lines],
        lambda lines: [{**line, "body": [1, 2]} if line.get("kind") == "message" else line for line in lines],
        lambda lines: [{**line, "body": "x"} if line.get("kind") == "version" else line for line in lines],
        lambda lines: [{**line, "kind": "verse"} if line.get("kind") == "message" else line for line in lines],
        lambda lines: [{**line, "more": 1} if line.get("kind") == "value" else line for line in lines],
        lambda lines: [{**line, "body": {"a": 1}} if line.get("kind") == "value" else line for line in lines],
        lambda lines: [line for line in lines if line.get("kind") == "session" or "perdure" in line],
        lambda lines: [lines[0], *[line for line in lines if line.get("kind") == "close"]],
        lambda lines: [{**lines[0], "format": 2}, *lines[1:]],
        lambda lines: [{**lines[0], "perdure": "poem"}, *lines[1:]],
        lambda lines: [*lines, lines[-1]],
    ],
)
async def test_a_file_that_lies_is_refused(change: Callable[[list[Any]], list[Any]]) -> None:
    """It is refused though its checksums are right. The error names lines, and the store is unchanged."""
    lines = [json.loads(line) for line in (await a_file()).splitlines()]
    async with MemoryStore() as store:
        assert (await imported(store, resealed(lines))).sessions == 2
    async with MemoryStore() as store:
        with pytest.raises(InvalidData, match="line"):
            await imported(store, resealed(change(lines)))
        for info in await store.list():
            assert texts(await store.load(info.id)) == ["one", "two"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_cut_short_gives_whole_sessions_or_none(tmp_path: Path, kind: str) -> None:
    """This holds for a cut at any line; and the whole file can be imported after it."""
    raw = await a_file()
    lines = raw.splitlines(keepends=True)
    for count in range(len(lines)):
        async with opened(kind, tmp_path / str(count)) as store:
            for part in (b"".join(lines[:count]), b"".join(lines[:count]) + lines[count][:-2]):
                with pytest.raises(InvalidData, match=r"line \d+"):
                    await imported(store, part)
            found = [info.id for info in await store.list()]
            assert found in ([], ["first"], ["second", "first"])
            await imported(store, raw)
            assert (await fsck(store)).problems == ()


async def test_a_flipped_bit_is_refused() -> None:
    """This holds for a bit anywhere in the file."""
    raw = await a_file()
    for place in range(0, len(raw), 7):
        altered = bytearray(raw)
        altered[place] ^= 4
        async with MemoryStore() as store:
            with pytest.raises(InvalidData, match="line"):
                await imported(store, bytes(altered))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_archive_that_is_not_whole_changes_nothing(tmp_path: Path, kind: str) -> None:
    """A caller's mistake is found before any write."""
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        await source.create(new_session("one", id="it"))
        await source.create(fork(await source.load("it"), id="child"))
        archived = await source.dump("it")
        fields = {name: getattr(archived, name) for name in ArchivedSession.__struct_fields__}
        for wrong in ({"logs": {}}, {"values": {}}, {"heads": ()}, {"keys": {"k": ("d", 7)}}, {"logs": {"x": {}}}):
            with pytest.raises(InvalidData):
                await target.restore(ArchivedSession(**{**fields, **wrong}))
        with pytest.raises(SessionNotFound):
            await target.restore(await source.dump("child"))
        assert len(await target.list()) == 0
        assert await target.restore(archived)
        assert await target.restore(await source.dump("child"))


@pytest.mark.parametrize("kind", KINDS)
async def test_no_file_shows_one_owner_what_another_was_told(tmp_path: Path, kind: str) -> None:
    """A file could name any session as part of its view: a part that it does not contain is refused."""
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        victim = await target.create(new_session("a secret", id="victim", owner="bob"))
        like = new_session("anything", id="victim", owner="bob")
        like = await source.create(replace(like, info=replace(victim.info, version=0)))
        hers = SessionId.under("alice", "child")
        child = fork(like, id=hers)
        await source.create(replace(child, info=replace(child.info, owner="alice")))
        archived = await source.dump(hers)
        decoy = {"victim/other": {0: b'{"role":"user","parts":[{"type":"text","text":"x"}],"id":"m"}'}}
        for lent in ({}, decoy):
            raw = b"".join((first_line(), *encode_session(replace(archived, lent=lent)), last_line(1)))
            with pytest.raises(InvalidData, match="shows parts of victim"):
                await import_sessions(target, io.BytesIO(raw), owner="alice")
        assert not await target.exists(hers)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_import_for_an_owner_tells_nothing_of_ids_that_others_have(tmp_path: Path, kind: str) -> None:
    """An id without the owner's prefix is refused in the same words, taken or not."""
    said = []
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        await target.create(new_session("a secret", id="taken", owner="bob"))
        for session_id in ("taken", "free"):
            await source.create(new_session("mine", id=session_id, owner="alice"))
            file = io.BytesIO()
            await export_sessions(source, file, [session_id])
            file.seek(0)
            with pytest.raises(InvalidData) as refused:
                await import_sessions(target, file, owner="alice")
            said.append(str(refused.value).replace(session_id, "ID"))
        assert said[0] == said[1]
        assert not await target.exists("free")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [2, 10**12, 2**63 - 1, 2**64])
async def test_positions_that_no_log_has_are_refused(tmp_path: Path, kind: str, at: int) -> None:
    """This holds for its own logs, which have no gaps, for parents' logs in the file, and for its versions' spans."""
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        parent = await source.create(new_session("one", id="it"))
        await source.create(say(fork(parent, id="child"), "two"))
        own, alone = await source.dump("it"), await source.dump("child", alone=True)
        wrong = [replace(own, logs={"it": {**own.logs["it"], at: own.logs["it"][0]}})]
        if at > 2:
            wrong.append(replace(alone, lent={"it": {**alone.lent["it"], at: alone.lent["it"][0]}}))
            heads = (alone.heads[0].replace(b'["it",0,1]', b'["it",0,%d]' % at),)
            assert heads != alone.heads
            wrong.append(replace(await source.dump("child"), heads=heads))
        for each in wrong:
            with pytest.raises(InvalidData):
                await target.restore(each)
        assert len(await target.list()) == 0


async def test_what_is_nested_without_end_is_refused() -> None:
    """This holds in any place of a file; the error names the line."""
    async with MemoryStore() as source, MemoryStore() as target:
        await source.create(new_session("one", id="it"))
        first, session, *rest = (await exported(source)).splitlines(keepends=True)
        deep = b"[" * 100_000 + b"]" * 100_000
        for lines in (
            [first[:-2] + b',"x":' + deep + b"}\n", session, *rest],
            [first, b'{"kind":"session","name":"it","body":' + deep + b"}\n", *rest],
            [first, session, b'{"kind":"value","name":"x","body":' + deep + b"}\n", *rest],
            [first, session, b'{"kind":"entry","at":1,"body":{"kind":"x","body":' + deep + b"}}\n", *rest],
        ):
            with pytest.raises(InvalidData, match=r"line \d"):
                await imported(target, b"".join(lines))
        assert len(await target.list()) == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_entries_of_any_form_are_brought_over(tmp_path: Path, kind: str) -> None:
    """A record may hold entries that only their writer understands."""
    entries = (
        Entry("agent_start", {"messages": 5}, "a"),
        Entry("message_end", {"message": {"id": 7}, "shown": 7}, "a"),
        Entry("agent_start", "no object", "b"),
    )
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        await source.create(new_session("one", id="it"))
        assert await target.restore(replace(await source.dump("it"), entries=entries))
        found = await target.read("it")
        assert [(each.kind, each.body, each.run) for each in found] == [(e.kind, e.body, e.run) for e in entries]
        assert [run.loop_id for run in await target.runs("it")] == ["a", "b"]


async def test_an_export_follows_no_link(tmp_path: Path) -> None:
    """An attacker who guesses the unfinished file's name gains nothing; two exports at once use different names."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "out.jsonl"
    (tmp_path / f"out.jsonl.{os.getpid()}.tmp").symlink_to(precious)
    async with MemoryStore() as store:
        await store.create(new_session("one"))
        await asyncio.gather(*(export_sessions(store, path) for _ in range(3)))
        assert await exported(store) == path.read_bytes()
    assert (precious.read_text(), path.is_symlink()) == ("mine", False)


@pytest.mark.parametrize("name", ["pipe", "link"])
async def test_an_export_replaces_no_device(tmp_path: Path, name: str) -> None:
    """A superuser that names /dev/null or /dev/stdout would lose it. A pipe and a link to a file are tested instead."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    path = tmp_path / name
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        for format in ("perdure", "markdown"):
            with pytest.raises(StoreError, match="not a regular file") as refused:
                await sessions.export(path, format=format)  # type: ignore[arg-type]  # it is one
            assert "Name another file" in refused.value.advice
    assert ((tmp_path / "pipe").is_fifo(), (tmp_path / "link").is_symlink()) == (True, True)
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


@pytest.mark.parametrize("kind", KINDS)
async def test_two_that_bring_in_the_same_session_do_not_collide(tmp_path: Path, kind: str) -> None:
    """One writes it, the others find it there."""
    async with MemoryStore() as source, opened(kind, tmp_path) as target:
        await source.create(new_session("one", id="it"))
        archived = await source.dump("it")
        assert sorted(await asyncio.gather(*(target.restore(archived) for _ in range(5)))) == [False] * 4 + [True]
        assert (await target.load("it")).version == 1


async def test_what_this_release_does_not_know_is_kept() -> None:
    """Fields of a newer release go through an export unchanged."""
    async with MemoryStore() as source, MemoryStore() as target:
        session = new_session("one", id="it")
        message = Message("user", (), "m1", unknown={"mood": "calm"})
        session = session.with_state(session.state.with_messages(message))
        await source.create(session)
        raw = (await exported(source)).replace(b'"op":""', b'"op":"","aura":7')
        lines = [json.loads(line) for line in raw.splitlines()]
        await imported(target, resealed(lines))
        assert b'"aura":7' in await exported(target)
        assert b'"mood":"calm"' in await exported(target)


async def test_an_import_reads_much_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many short reads, a thread would keep others from their turns, and block the event loop."""
    path, reads = tmp_path / "all.jsonl", list[int]()

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            reads.append(len(buffer))
            return super().readinto(buffer)

    def opened_to_count(name: str, mode: str, buffering: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
        return io.BufferedReader(Counted(name, mode), buffering)

    async with MemoryStore() as source, MemoryStore() as target:
        await source.create(new_session(*["many words " * 100] * 2_000, id="it"))
        size = (await export_sessions(source, path)).bytes
        monkeypatch.setattr("perdure.archive.moving.open", opened_to_count, raising=False)
        assert (await import_sessions(target, path)).sessions == 1
    assert size > 2_000_000
    assert len(reads) <= size // 1_000_000 + 2
