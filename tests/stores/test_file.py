"""Behaviour of the file store alone: its files, its locks, and what erasure leaves of them."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.stores.files import (
    AFTER_ERASURES,
    ENVIRONMENT,
    OF_THE_STORE,
    bytes_in,
    files_in,
    flip,
    lines_of,
    log_of,
    names,
    needs_proc,
    small,
)

from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidData,
    InvalidSessionFile,
    SessionBusy,
    SessionConflict,
    SessionLocked,
    SessionNotFound,
    StoreError,
)
from perdure.model import ids
from perdure.model.definition import AgentDefinition
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Span, Tape, Transcript
from perdure.protocols import Entry, Key
from perdure.stores.file import FileStore
from perdure.stores.folder import Folder
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import FrozenClock
from perdure.testing.samples import fork, new_session, note, say, show, texts


class TestLayout:
    """Files that people can read, that only their owner can."""

    async def test_a_session_is_three_files(self, tmp_path: Path) -> None:
        """Document, log and lock stand side by side, and nothing else is left lying."""
        async with FileStore(tmp_path / "d") as store:
            await store.save(say(await store.create(small("Hi")), "Yo"))
        assert names(tmp_path / "d") == OF_THE_STORE | {"s.json", "s.jsonl", "s.lock"}

    async def test_the_document_is_json_with_its_header_first(self, tmp_path: Path) -> None:
        """The second line is the header; the whole file is a session's document, and reads back as the same session."""
        async with FileStore(tmp_path) as store:
            session = await store.save(say(await store.create(small("Hi", "Hé")), "Yo"))
        raw = (tmp_path / "s.json").read_text()
        second = raw.splitlines()[1]
        assert second.startswith('"info": {')
        assert second.endswith("},")
        assert json.loads("{" + second[:-1] + "}")["info"] == {"version": 2, **session.to_dict()["info"]}
        document = json.loads(raw)
        assert texts(AgentSession.from_dict(document)) == ["Hi", "Hé", "Yo"]
        assert AgentSession.from_dict(document).state == session.state

    async def test_the_log_is_lines_of_json(self, tmp_path: Path) -> None:
        """Messages, heads, values and entries are in the log in the order in which they were written."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            claim, _ = await store.claim("s", version=1, owner="ann", entries=[Entry("start")])
            await store.save(say(session, "Yo"), claim=claim)
            await store.create(fork(session, id="f"))
        kinds = [json.loads(each)["kind"] for each in lines_of(tmp_path)]
        assert kinds == ["log", "message", "value", "head", "claim", "event", "message", "release", "head"]
        assert [json.loads(each)["kind"] for each in lines_of(tmp_path, "f.jsonl")] == ["log", "value", "ref", "head"]

    async def test_only_the_owner_may_read(self, tmp_path: Path) -> None:
        """The directory is 0700 and each file 0600, whatever the umask allows."""
        before = os.umask(0)
        try:
            async with FileStore(tmp_path / "a" / "b") as store:
                parent = await store.create(small("Hi"))
                await store.create(fork(parent, id="f"))
                await store.delete("s")
        finally:
            os.umask(before)
        where = tmp_path / "a" / "b"
        assert stat.S_IMODE(where.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in where.iterdir()} == {0o600}

    async def test_a_listing_reads_first_lines_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A list reads about a page of each session, however long the conversations are."""
        async with FileStore(tmp_path) as store:
            for number in range(3):
                await store.create(small(*["word " * 1000] * 50, id=f"s{number}"))
        read = 0
        pread = os.pread

        def counted(handle: int, length: int, offset: int) -> bytes:
            nonlocal read
            found = pread(handle, length, offset)
            read += len(found)
            return found

        async with FileStore(tmp_path) as store:
            monkeypatch.setattr(os, "pread", counted)
            assert [info.id for info in await store.list()] == ["s2", "s1", "s0"]
        assert 0 < read < 3 * 8192

    async def test_files_that_are_none_of_ours_are_left_alone(self, tmp_path: Path) -> None:
        """Strangers' files are not listed and not deleted with a session, whatever their names."""
        strangers = {"README", "a b.json", ".hidden.json", "s.torn-x", "s.json.bak", "s-2.txt", "x@y.jsonl"}
        for name in strangers:
            (tmp_path / name).write_text("mine")
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            page = await store.list()
            assert (page.all(), page.damaged) == ((session.info,), ())
            await store.delete("s")
        assert names(tmp_path) == strangers | AFTER_ERASURES

    @pytest.mark.parametrize("wrong", [-1, float("nan"), "soon", None])
    def test_a_time_out_is_a_number_of_seconds(self, wrong: Any) -> None:
        """Anything else is refused before the store touches a file."""
        with pytest.raises(InvalidData, match="lock_timeout"):
            FileStore("somewhere", lock_timeout=wrong)
        with pytest.raises(InvalidData, match="directory"):
            FileStore("")

    async def test_it_has_to_be_open(self, tmp_path: Path) -> None:
        """Before `async with`, twice inside it, and after a fork of the process, the store raises an error."""
        store = FileStore(tmp_path)
        with pytest.raises(StoreError, match="not open"):
            await store.load("s")
        async with store:
            with pytest.raises(StoreError, match="open already"):
                await store.__aenter__()
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="directory"):
            await FileStore(tmp_path / "file").__aenter__()


@pytest.mark.parametrize("kind", [FileStore, lambda where: MemoryStore()])
async def test_a_key_that_utf_8_cannot_carry_is_refused(tmp_path: Path, kind: Any) -> None:
    """A lone surrogate in a key is InvalidData, and nothing is saved."""
    async with kind(tmp_path) as store:
        session = await store.create(small("Hi"))
        with pytest.raises(InvalidData, match="surrogate"):
            await store.save(session, key=Key("\ud800", "digest"))
        assert (await store.load("s")).version == 1


class TestDocument:
    """The log is the truth; the document is made from it, and has to be readable."""

    @pytest.mark.parametrize("bad", [b"", b"{}", b"not JSON", b"[]\n", b"\xff\xfe", b'{"info": {}}', b"{\n\n\n\n\n"])
    async def test_an_unreadable_document_is_invalid(self, tmp_path: Path, bad: bytes) -> None:
        """Loading names path and reason, a list reports it, older versions still load, and the next save heals it."""
        async with FileStore(tmp_path) as store:
            first = await store.create(small("Hi"))
            second = await store.save(say(first, "Yo"))
            other = await store.create(small("fine", id="other"))
            (tmp_path / "s.json").write_bytes(bad)
            with pytest.raises(InvalidSessionFile) as caught:
                await store.load("s")
            assert caught.value.path == str(tmp_path / "s.json")
            assert caught.value.reason
            page = await store.list()
            assert page.all() == (other.info,)
            assert [type(error) for error in page.damaged] == [InvalidSessionFile]
            assert [await store.load("s", version) for version in (1, 2)] == [first, second]
            third = await store.save(say(second, "again"))
            assert await store.load("s") == third

    async def test_a_document_that_was_edited_is_invalid(self, tmp_path: Path) -> None:
        """A person may read a document but not edit it: an edit is noticed and not taken up."""
        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
            raw = (tmp_path / "s.json").read_text()
            (tmp_path / "s.json").write_text(raw.replace('"Hi"', '"Ho"'))
            with pytest.raises(InvalidSessionFile, match="checksum"):
                await store.load("s")

    async def test_a_strangers_document_is_invalid(self, tmp_path: Path) -> None:
        """A document under another session's name, or of an earlier session of that name, is not believed."""
        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
            old = (tmp_path / "s.json").read_bytes()
            await store.create(small("other", id="other"))
            (tmp_path / "s.json").write_bytes((tmp_path / "other.json").read_bytes())
            with pytest.raises(InvalidSessionFile, match="other"):
                await store.load("s")
            await store.delete("s")
            await store.create(small("anew"))
            (tmp_path / "s.json").write_bytes(old)
            with pytest.raises(InvalidSessionFile, match="another log"):
                await store.load("s")

    async def test_a_document_alone_is_no_session(self, tmp_path: Path) -> None:
        """Without its log a session is damaged, not empty: it can be erased, but not loaded, written or replaced."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            (tmp_path / "s.jsonl").unlink()
            for verb in (
                lambda: store.load("s"),
                lambda: store.load("s", 1),
                lambda: store.save(session),
                lambda: store.read("s"),
                lambda: store.claim("s", version=1, owner="ann"),
            ):
                with pytest.raises(CorruptRecord):
                    await verb()
            with pytest.raises(SessionConflict):
                await store.create(small("anew"))
            assert await store.exists("s")
            assert [error.session_id for error in (await store.list()).damaged] == ["s"]
            await store.delete("s")
            assert (await store.create(small("anew"))).version == 1

    async def test_without_its_document_a_session_is_whole(self, tmp_path: Path) -> None:
        """The next write makes a removed document again, even a write that makes no version."""
        async with FileStore(tmp_path) as store:
            session = await store.save(say(await store.create(small("Hi")), "Yo"))
            for write in (lambda: store.post("s", Entry("steer")), lambda: store.save(session)):
                (tmp_path / "s.json").unlink()
                assert await store.load("s") == session
                assert (await store.list()).all() == (session.info,)
                await write()
                assert json.loads((tmp_path / "s.json").read_bytes())["info"]["id"] == "s"

    async def test_a_document_behind_its_log_is_made_anew(self, tmp_path: Path) -> None:
        """The log's version wins for load and list; the next write renews the document."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            old = (tmp_path / "s.json").read_bytes()
            session = await store.save(say(session, "Yo").with_tags(["vip"]))
            (tmp_path / "s.json").write_bytes(old)
        async with FileStore(tmp_path) as store:
            assert await store.load("s") == session
            assert (await store.list(tag="vip")).all() == (session.info,)
            await store.claim("s", version=2, owner="ann")
            assert json.loads((tmp_path / "s.json").read_bytes())["info"]["version"] == 2


class TestLapsed:
    """Runs that were killed are found without reading what was said."""

    async def test_lapsed_claims_are_found_behind_the_documents(self, tmp_path: Path) -> None:
        """Lapsed claims are listed, the oldest session's first. Released claims and damaged sessions are not listed."""
        clock = FrozenClock()
        async with FileStore(tmp_path) as store:
            with ids.use(clock=clock):
                for name in ("c", "b", "a", "held", "free", "bad"):
                    await store.create(small("Hi", id=name))
                    claim, _ = await store.claim(name, version=1, owner="ann", lease=1000.0 if name == "held" else 10.0)
                    if name == "free":
                        await store.release(claim)
                flip(tmp_path / "bad.jsonl", (tmp_path / "bad.jsonl").stat().st_size - 9)
                assert await store.lapsed() == []
                clock.advance(11)
                assert await store.lapsed() == ["c", "b", "a"]

    async def test_a_document_made_during_a_run_does_not_hide_it(self, tmp_path: Path) -> None:
        """A document is made from the log up to its version; the claim behind it is still seen."""
        clock = FrozenClock()
        async with FileStore(tmp_path) as store:
            with ids.use(clock=clock):
                session = await store.create(small("Hi"))
                claim, _ = await store.claim("s", version=1, owner="ann", lease=10.0)
                (tmp_path / "s.json").unlink()
                await store.append(claim, messages=[Message.user("Yo")])
                assert (tmp_path / "s.json").exists()
                clock.advance(11)
                assert await store.lapsed() == ["s"]
                assert (await store.list()).all() == (session.info,)
                await store.save(session, claim=claim)
                assert await store.lapsed() == []

    async def test_sessions_that_nobody_has_touched_are_not_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A look for lapsed claims reads only the logs that changed since the last one, in this store or another."""
        clock = FrozenClock()
        opened: list[str] = []
        reading = Folder.reading
        monkeypatch.setattr(Folder, "reading", lambda self, name: opened.append(name) or reading(self, name))
        async with FileStore(tmp_path) as store, FileStore(tmp_path) as other:
            with ids.use(clock=clock):
                for number in range(5):
                    await store.create(small("Hi", id=f"s{number}"))
                assert await store.lapsed() == []
                opened.clear()
                assert await store.lapsed() == []
                assert [name for name in opened if name.endswith(".jsonl")] == []
                claim, _ = await other.claim("s3", version=1, owner="ann", lease=10.0)
                assert await store.lapsed() == []
                clock.advance(11)
                assert await store.lapsed() == ["s3"]
                await other.release(claim)
                assert await store.lapsed() == []
                opened.clear()
                assert await store.lapsed() == []
                assert [name for name in opened if name.endswith(".jsonl")] == []


class TestLocks:
    """One writer per session, and nobody waits for ever."""

    async def test_a_held_lock_times_out(self, tmp_path: Path) -> None:
        """Writers of that session get an error that names the lock; readers and other sessions continue."""
        async with FileStore(tmp_path, lock_timeout=0.05) as store:
            session = await store.create(small("Hi"))
            other = await store.create(small("fine", id="other"))
            with _held(tmp_path / "s.lock"):
                for write in (
                    lambda: store.save(session),
                    lambda: store.delete("s"),
                    lambda: store.claim("s", version=1, owner="ann"),
                    lambda: store.post("s", Entry("steer")),
                    lambda: store.create(fork(session, id="f")),
                ):
                    with pytest.raises(SessionLocked, match=r"s\.lock") as caught:
                        await write()
                    assert (caught.value.session_id, caught.value.timeout) == ("s", 0.05)
                assert await store.load("s") == session
                assert len(await store.list()) == 2
                await store.save(other)
            assert (await store.save(session)).version == 2
            assert not await store.exists("f")

    async def test_a_writer_waits_for_the_lock(self, tmp_path: Path) -> None:
        """A write waits for the lock, within the time-out."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with _held(tmp_path / "s.lock"):
                saving = asyncio.create_task(store.save(session))
                await asyncio.sleep(0.05)
                assert not saving.done()
            assert (await saving).version == 2

    async def test_a_locked_session_holds_up_no_other(self, tmp_path: Path) -> None:
        """Requests for other sessions are carried out at once, while three posts to a locked session wait."""
        async with FileStore(tmp_path, lock_timeout=30.0) as store:
            session, other = await store.create(small("Hi")), await store.create(small("fine", id="other"))
            with _held(tmp_path / "s.lock"):
                posts = [asyncio.create_task(store.post("s", Entry("steer", {"n": n}))) for n in range(3)]
                forking = asyncio.create_task(store.create(fork(session, id="f")))
                await asyncio.sleep(0.02)
                async with asyncio.timeout(10):
                    assert await store.load("other") == other
                    claim, _ = await store.claim("other", version=1, owner="ann")
                    await store.heartbeat(claim)
                    await store.save(say(other, "more"), claim=claim)
                    assert await store.load("s") == session
                assert not any(task.done() for task in (*posts, forking))
            assert await asyncio.gather(*posts) == [1, 2, 3], "in the order in which they were handed in"
            assert (await forking).id == "f"

    async def test_what_waits_for_a_lock_is_carried_out_before_the_store_closes(self, tmp_path: Path) -> None:
        """Leaving the block waits for the requests that were made, locked or not."""
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(FileStore(tmp_path))
            await store.create(small("Hi"))
            with _held(tmp_path / "s.lock"):
                post = asyncio.create_task(store.post("s", Entry("steer")))
                await asyncio.sleep(0.02)
                closing = asyncio.create_task(stack.aclose())
                await asyncio.sleep(0.02)
                assert not closing.done()
            await closing
            assert await post == 1

    async def test_the_lock_is_never_replaced(self, tmp_path: Path) -> None:
        """The lock stays the same file as long as the session is there."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            before = (tmp_path / "s.lock").stat().st_ino
            claim, _ = await store.claim("s", version=1, owner="ann")
            await store.save(say(session, "Yo"), claim=claim)
            assert (tmp_path / "s.lock").stat().st_ino == before

    async def test_who_waited_for_an_erased_session_locks_its_successor(self, tmp_path: Path) -> None:
        """If a lock is deleted while a writer waits for it, the writer does not enter beside the new lock's holder."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with ExitStack() as new:
                with _held(tmp_path / "s.lock"):
                    saving = asyncio.create_task(store.save(session))
                    await asyncio.sleep(0.05)
                    new.enter_context(_held(tmp_path / "new.lock"))
                    (tmp_path / "new.lock").replace(tmp_path / "s.lock")
                await asyncio.sleep(0.05)
                assert not saving.done()
            assert (await saving).version == 2

    async def test_no_lock_is_left_for_a_session_that_is_not_there(self, tmp_path: Path) -> None:
        """A write to a missing session leaves no file behind."""
        async with FileStore(tmp_path) as store:
            for verb in (
                lambda: store.save(say(small("Hi"), "Yo")),
                lambda: store.delete("s"),
                lambda: store.post("s", Entry("steer")),
            ):
                with pytest.raises(SessionNotFound):
                    await verb()
        assert names(tmp_path) == AFTER_ERASURES

    @needs_proc
    async def test_nothing_is_left_open(self, tmp_path: Path) -> None:
        """After `async with` there is neither a thread nor a handle more than before, whatever went wrong inside."""
        threads, handles = threading.active_count(), len(os.listdir("/proc/self/fd"))
        async with FileStore(tmp_path, lock_timeout=0) as store:
            session = await store.create(small("Hi"))
            flip(tmp_path / "s.json", 40)
            with _held(tmp_path / "s.lock"), pytest.raises(SessionLocked):
                await store.load("s")
            with pytest.raises(InvalidSessionFile):
                await store.load("s")
            saving = asyncio.create_task(store.save(session))
            await asyncio.sleep(0)
            saving.cancel()
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == handles
        assert json.loads((tmp_path / "s.json").read_bytes())["info"]["version"] == 2


class TestClosing:
    """Leaving the block ends what the store holds, in any process and at any time."""

    async def test_claims_lapse_when_the_store_is_closed(self, tmp_path: Path) -> None:
        """A run whose store was closed cannot write any more, so that others may take it over at once."""
        async with FileStore(tmp_path) as other:
            async with FileStore(tmp_path) as store:
                for name in ("kept", "saved", "released", "lost"):
                    await store.create(small("Hi", id=name))
                claims = {name: (await store.claim(name, version=1, owner="ann"))[0] for name in await _ids(tmp_path)}
                await store.save(await store.load("saved"), claim=claims["saved"])
                await store.release(claims["released"])
                await store.release(claims["lost"])
                await other.claim("lost", version=1, owner="ben")
                assert await other.lapsed() == []
            assert await other.lapsed() == ["kept"]
            assert await other.is_interrupted("kept")
            assert await other.is_claimed("lost")

    async def test_closing_that_is_cancelled_is_seen_through(self, tmp_path: Path) -> None:
        """A cancelled closing still ends the thread and closes the handle."""
        threads = threading.active_count()
        store = await FileStore(tmp_path).__aenter__()
        await store.create(small("Hi"))
        with _held(tmp_path / "s.lock"):
            post = asyncio.create_task(store.post("s", Entry("steer")))
            await asyncio.sleep(0.02)
            closing = asyncio.create_task(store.__aexit__())
            await asyncio.sleep(0.02)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert threading.active_count() == threads
        assert await post == 1

    async def test_a_forked_child_may_leave_the_block(self, tmp_path: Path) -> None:
        """A forked child has no thread to wait for; the parent's store is not affected."""
        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
            child = os.fork()
            if child == 0:
                with suppress(StopIteration):
                    store.__aexit__().send(None)
                    os._exit(1)
                os._exit(0)
            assert await asyncio.to_thread(_status_of, child) == 0
            assert await store.load("s") is not None

    async def test_nothing_is_logged_of_a_write_whose_caller_has_gone(self, tmp_path: Path) -> None:
        """A refused write whose caller was cancelled is not logged."""
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            claim, _ = await store.claim("s", version=1, owner="ann")
            await store.release(claim)
            with _held(tmp_path / "s.lock"):
                saving = asyncio.create_task(store.save(session, claim=claim))
                await asyncio.sleep(0.02)
                saving.cancel()
                await asyncio.gather(saving, return_exceptions=True)
        del saving
        gc.collect()
        await asyncio.sleep(0)
        assert told == []


def _status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestRemoved:
    """A directory or log that was removed or replaced under an open store takes no more writes."""

    @pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
    async def test_a_directory_that_is_gone_is_told(self, tmp_path: Path, how: str) -> None:
        """Nothing is acknowledged, and no session is reported as missing."""
        where = tmp_path / "store"
        async with FileStore(where) as store:
            session = await store.create(small("Hi"))
            where.rename(tmp_path / "elsewhere")
            if how == "removed":
                shutil.rmtree(tmp_path / "elsewhere")
            elif how == "replaced":
                shutil.copytree(tmp_path / "elsewhere", where)
            for verb in (
                lambda: store.save(say(session, "more")),
                lambda: store.create(small("Hi", id="new")),
                lambda: store.load("s"),
                lambda: store.list(),
            ):
                with pytest.raises(StoreError, match="removed, renamed or replaced"):
                    await verb()
            assert where.exists() == (how == "replaced")

    @pytest.mark.parametrize("what", ["s.jsonl", ""])
    async def test_what_goes_while_it_is_written_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """The last check comes after the bytes are on the disk."""
        where = tmp_path / "store"
        sync = os.fsync

        def removing(handle: int) -> None:
            sync(handle)
            monkeypatch.setattr(os, "fsync", sync)
            (where / what).rename(tmp_path / "elsewhere")

        async with FileStore(where) as store:
            await store.create(small("Hi"))
            await store.post("s", Entry("steer"))  # the first post also notes that something waits
            monkeypatch.setattr(os, "fsync", removing)
            with pytest.raises(StoreError, match="removed"):
                await store.post("s", Entry("steer"))

    async def test_a_log_that_was_removed_is_not_begun_with_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A log that is removed between the check and the write is not created again."""
        append = Folder.append

        def removing(folder: Folder, name: str, end: int, body: bytes) -> None:
            (tmp_path / name).unlink()
            append(folder, name, end, body)

        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
            monkeypatch.setattr(Folder, "append", removing)
            with pytest.raises(StoreError, match=r"s\.jsonl"):
                await store.post("s", Entry("steer"))
        assert not (tmp_path / "s.jsonl").exists()


@contextmanager
def _held(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class TestSymlinks:
    """A link is never followed, to read or to write."""

    async def test_a_linked_directory_is_refused(self, tmp_path: Path) -> None:
        """The error says to name the directory itself."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(ConfigurationError, match="symbolic link"):
            await FileStore(tmp_path / "link").__aenter__()
        assert names(tmp_path / "real") == set()

    @pytest.mark.parametrize("name", ["s.json", "s.jsonl", "s.lock", "s.json.tmp", ".perdure"])
    async def test_a_linked_file_is_not_followed(self, tmp_path: Path, name: str) -> None:
        """The target of a link is neither shown nor changed."""
        where = tmp_path / "d"
        async with FileStore(where) as store:
            session = await store.create(small("Hi"))
        target = tmp_path / "target"
        if (where / name).exists():
            (where / name).rename(target)
        else:
            target.write_text("untouched")
        (where / name).symlink_to(target)
        before = target.read_bytes()
        outcomes = await asyncio.gather(_outcome(where, session), return_exceptions=True)
        assert target.read_bytes() == before
        expected = {
            "s.json": InvalidSessionFile,
            "s.jsonl": CorruptRecord,
            "s.lock": StoreError,
            "s.json.tmp": AgentSession,
            ".perdure": StoreError,
        }
        assert [type(outcome) for outcome in outcomes] == [expected[name]]

    async def test_a_pipe_holds_nobody_up(self, tmp_path: Path) -> None:
        """A pipe or a directory under a session's name is reported, and nobody waits for it."""
        os.mkfifo(tmp_path / "pipe.json")
        (tmp_path / "folder.json").mkdir()
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            page = await store.list()
            assert page.all() == (session.info,)
            assert [type(error) for error in page.damaged] == [InvalidSessionFile] * 2

    async def test_no_name_leads_out_of_the_directory(self, tmp_path: Path) -> None:
        """A key that looks like a path is never the key of a log."""
        (tmp_path / "outside.jsonl").write_text("secret")
        async with FileStore(tmp_path / "d") as store:
            session = await store.create(small("Hi"))
            ref = log_of(session)
            for key in ("../outside@1", "../outside", "..", "/etc/passwd@1", "s@1/../../outside", 7, ""):
                with pytest.raises(SessionNotFound):
                    await store.messages(LogRef(ref.origin, key), 0, 1)
                view = Transcript([Span(Tape(None, LogRef(ref.origin, key)), 0, 1)])
                with pytest.raises(SessionNotFound):
                    await store.create(show(small(id="f"), view))
            assert names(tmp_path) == {"d", "outside.jsonl"}
            assert not await store.exists("f")


async def _outcome(where: Path, session: AgentSession) -> AgentSession:
    async with FileStore(where) as store:
        await store.load("s")
        return await store.save(say(session, "Yo"))


class TestErasure:
    """A deleted session's bytes are gone from every file; what other sessions show stays."""

    async def test_no_byte_is_left(self, tmp_path: Path) -> None:
        """Messages, definition, metadata, entries and torn tails are gone from every file of the directory."""
        async with FileStore(tmp_path) as store:
            definition = AgentDefinition("a", system_prompt="erase-me prompt")
            session = await store.create(new_session("erase-me message", id="s", definition=definition))
            entry = Entry("start", {"said": "erase-me entry"})
            claim, _ = await store.claim("s", version=1, owner="ann", entries=[entry])
            await store.append(claim, messages=[Message.user("erase-me branch")], log="loop")
            await store.save(note(session, "k", "erase-me metadata " * 50), claim=claim)
            await store.post("s", entry)
            for name in ("s.torn-1", "s.torn-17", "s.json.tmp", "s@123.jsonl.tmp"):
                (tmp_path / name).write_text("erase-me")
            await store.create(small("stays", id="s.torn-1"))
            assert b"erase-me" in bytes_in(tmp_path)
            await store.delete("s")
            assert b"erase-me" not in bytes_in(tmp_path)
            assert names(tmp_path, ".json") == {"s.torn-1.json"}
            assert texts(await store.load("s.torn-1")) == ["stays"]

    async def test_forks_keep_only_what_they_show(self, tmp_path: Path) -> None:
        """A remainder holds the messages that forks show, shrinks with the forks, and goes with the last."""
        async with FileStore(tmp_path) as store:
            parent = await store.create(small("erase-0", "erase-1", "erase-2", "erase-3"))
            view = parent.state.transcript
            await store.create(show(fork(parent, id="two"), view.cut(0, 2)))
            await store.create(show(fork(parent, id="three"), view.cut(1, 3)))
            await store.delete("s")
            (remainder,) = {name for name in names(tmp_path, ".jsonl") if "@" in name}
            assert remainder == f"{log_of(parent).key}.jsonl"
            assert _left(tmp_path) == {0, 1, 2}
            assert texts(await store.load("two")) == ["erase-0", "erase-1"]
            await store.delete("two")
            assert _left(tmp_path) == {1, 2}
            assert texts(await store.load("three")) == ["erase-1", "erase-2"]
            await store.delete("three")
            assert _left(tmp_path) == set()
        assert names(tmp_path) == AFTER_ERASURES

    async def test_a_fork_of_a_branch_keeps_the_branch(self, tmp_path: Path) -> None:
        """A message in a run's own log stays if a fork shows it; the run's other messages go."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            claim, _ = await store.claim("s", version=1, owner="ann")
            shown, aside = Message.user("shown"), Message.user("erase-1")
            written = (await store.append(claim, messages=[shown], log="loop/1")).written
            await store.append(claim, messages=[aside], log="loop/1")
            await store.release(claim)
            branch = fork(session, id="f")
            await store.create(branch.with_state(branch.state.with_messages(shown)), written=written)
            await store.delete("s")
            assert texts(await store.load("f")) == ["Hi", "shown"]
        assert _left(tmp_path) == set()

    async def test_a_session_created_anew_is_a_stranger(self, tmp_path: Path) -> None:
        """After a session's id is used again, no fork shows the successor's text, and each fork stays whole."""
        async with FileStore(tmp_path) as store:
            parent = await store.create(small("old-0", "old-1"))
            await store.create(show(fork(parent, id="kept"), parent.state.transcript.cut(0, 1)))
            unsaved = fork(parent, id="unsaved")
            await store.delete("s")
            anew = await store.create(small("new-0", "new-1"))
            assert log_of(anew) != log_of(parent)
            assert texts(await store.load("kept")) == ["old-0"]
            with pytest.raises(SessionNotFound):
                await store.create(unsaved)
            await store.create(fork(anew, id="of-new"))
            await store.delete("s")
            third = await store.create(small("third"))
            assert [texts(await store.load(name)) for name in ("kept", "of-new")] == [["old-0"], ["new-0", "new-1"]]
            await store.delete("kept")
            assert b"old-" not in bytes_in(tmp_path)
            await store.delete("of-new")
            assert b"new-" not in bytes_in(tmp_path)
            assert await store.load("s") == third

    async def test_what_a_killed_deletion_left_goes_with_the_next(self, tmp_path: Path) -> None:
        """Any deletion removes a remainder that nobody shows any more, even one that finds no session."""
        async with FileStore(tmp_path) as store:
            parent = await store.create(small("erase-1"))
            await store.create(fork(parent, id="f"))
            await store.delete("s")
            (tmp_path / "f.json").unlink()
            (tmp_path / "f.jsonl").unlink()
            assert _left(tmp_path) == {1}
            with pytest.raises(SessionNotFound):
                await store.delete("f")
        assert _left(tmp_path) == set()

    async def test_a_claimed_session_stays(self, tmp_path: Path) -> None:
        """A deletion raises SessionBusy, and every file is unchanged."""
        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
            await store.claim("s", version=1, owner="ann")
            before = files_in(tmp_path)
            with pytest.raises(SessionBusy):
                await store.delete("s")
            assert files_in(tmp_path) == before


def _left(where: Path) -> set[int]:
    raw = bytes_in(where)
    return {number for number in range(4) if f"erase-{number}".encode() in raw}


OPENS = """
import asyncio, sys
from perdure.stores.file import FileStore
from perdure.testing.samples import new_session

async def main(where, name):
    sys.stdin.readline()
    async with FileStore(where) as store:
        session = await store.create(new_session("Hi", id=name))
        print([*session.state.transcript.spans()][0].tape.ref.origin)

print("ready", flush=True)
asyncio.run(main(*sys.argv[1:]))
"""

FORKS = """
import asyncio, sys
from perdure.errors import PerdureError
from perdure.stores.file import FileStore
from perdure.testing.samples import fork

async def main(where):
    async with FileStore(where) as store:
        print("ready", flush=True)
        for name in iter(sys.stdin.readline, ""):
            parent = await store.load(name.strip())
            print("loaded", flush=True)
            sys.stdin.readline()
            try:
                await store.create(fork(parent, id=f"of-{name.strip()}"))
                print("created", flush=True)
            except PerdureError as error:
                print(type(error).__name__, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class TestProcesses:
    """Several processes share a directory."""

    def test_processes_that_open_a_directory_at_once_agree_on_its_identity(self, tmp_path: Path) -> None:
        """One of them gives the store its id, and both see each other's sessions."""
        told = [_started(OPENS, tmp_path / "d", f"s{number}") for number in range(2)]
        assert [_heard(process) for process in told] == ["ready"] * 2
        for process in told:
            _tell(process, "go")
        origins = {process.communicate(timeout=30)[0].strip() for process in told}
        assert len(origins) == 1
        assert {len(origin) for origin in origins} == {32}
        assert len(asyncio.run(_ids(tmp_path / "d"))) == 2

    def test_a_fork_and_the_deletion_of_its_parent_do_not_race(self, tmp_path: Path) -> None:
        """A fork that was created is whole, and one that was refused is not there, in either order."""
        asyncio.run(_race_forks(tmp_path))


async def _race_forks(where: Path) -> None:
    seen = set()
    async with FileStore(where) as store:
        process = _started(FORKS, where)
        assert _heard(process) == "ready"
        for number in range(12):
            await store.create(small("Hi", "Yo", id=f"p{number}"))
            _tell(process, f"p{number}")
            assert _heard(process) == "loaded"
            _tell(process, "go")
            await asyncio.sleep(number * 0.001)
            await store.delete(f"p{number}")
            answer = _heard(process)
            found = await store.load(f"of-p{number}")
            assert (answer, found and texts(found)) in (("created", ["Hi", "Yo"]), ("SessionNotFound", None))
            seen.add(answer)
        process.communicate(timeout=30)
    assert "created" in seen


def _started(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def _ids(where: Path) -> list[str]:
    async with FileStore(where) as store:
        return [info.id for info in await store.list()]
