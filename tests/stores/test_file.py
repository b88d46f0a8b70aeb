"""What is particular to the file store: its files, and what becomes of them when writers die and bits flip."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

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
from perdure.protocols import Entry
from perdure.stores.file import FileStore
from perdure.stores.file_log import encode_operation, line
from perdure.testing.clock import FrozenClock
from perdure.testing.samples import fork, new_session, note, say, show, texts

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
SMALL = AgentDefinition("a")


def small(*said: str, id: str = "s") -> AgentSession:
    return new_session(*said, id=id, definition=SMALL)


def log_of(session: AgentSession) -> LogRef:
    """The log in which a session's last message stands."""
    ref = [*session.state.transcript.spans()][-1].tape.ref
    assert ref is not None
    return ref


def names(where: Path, ending: str = "") -> set[str]:
    return {path.name for path in where.iterdir() if path.name.endswith(ending)}


def files_in(where: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in where.iterdir()}


def bytes_in(where: Path) -> bytes:
    return b"\0".join(files_in(where).values())


def lines_of(where: Path, name: str = "s.jsonl") -> list[bytes]:
    return (where / name).read_bytes().splitlines(keepends=True)


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Change one bit where it stands; the second time it is as before."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


class TestLayout:
    """Files that people can read, that only their owner can."""

    async def test_a_session_is_three_files(self, tmp_path: Path) -> None:
        """Document, log and lock stand side by side, and nothing else is left lying."""
        async with FileStore(tmp_path / "d") as store:
            await store.save(say(await store.create(small("Hi")), "Yo"))
        assert names(tmp_path / "d") == {".perdure", ".perdure.lock", "s.json", "s.jsonl", "s.lock"}

    async def test_the_document_is_json_with_its_header_first(self, tmp_path: Path) -> None:
        """The second line is the header; the whole is a session's document, which makes the same session."""
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
        """Messages, heads, values and entries stand there in the order in which they were written."""
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
        """However long the conversations, a list reads a page or so of each session."""
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
        """Strangers' files neither show in a list nor go with a session, whatever they are called."""
        strangers = {"README", "a b.json", ".hidden.json", "s.torn-x", "s.json.bak", "s-2.txt", "x@y.jsonl"}
        for name in strangers:
            (tmp_path / name).write_text("mine")
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            page = await store.list()
            assert (page.all(), page.damaged) == ((session.info,), ())
            await store.delete("s")
        assert names(tmp_path) == strangers | {".perdure", ".perdure.lock"}

    @pytest.mark.parametrize("wrong", [-1, float("nan"), "soon", None])
    def test_a_time_out_is_a_number_of_seconds(self, wrong: Any) -> None:
        """Anything else is refused before a file is touched."""
        with pytest.raises(InvalidData, match="lock_timeout"):
            FileStore("somewhere", lock_timeout=wrong)
        with pytest.raises(InvalidData, match="directory"):
            FileStore("")

    async def test_it_has_to_be_open(self, tmp_path: Path) -> None:
        """Before `async with`, twice inside it, and after a fork of the process, the store says so."""
        store = FileStore(tmp_path)
        with pytest.raises(StoreError, match="not open"):
            await store.load("s")
        async with store:
            with pytest.raises(StoreError, match="open already"):
                await store.__aenter__()
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="directory"):
            await FileStore(tmp_path / "file").__aenter__()


class TestDocument:
    """The log is the truth; the document is made from it, and has to be readable."""

    @pytest.mark.parametrize("bad", [b"", b"{}", b"not JSON", b"[]\n", b"\xff\xfe", b'{"info": {}}', b"{\n\n\n\n\n"])
    async def test_an_unreadable_document_is_invalid(self, tmp_path: Path, bad: bytes) -> None:
        """Loading names path and reason, a list reports it, versions still load, and the next save heals it."""
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
        """Readable is not editable: a change by hand is noticed, not taken up."""
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
        """Without its log a session is damaged, not empty: it cannot be loaded, written or replaced, but erased."""
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
        """A document that was removed is made anew by the next write, even one that makes no version."""
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
        """Claims that have run out are listed, the oldest session's first; given back ones and damaged ones are not."""
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
        """A document is made from the log up to its version; the claim behind that is still seen."""
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
                await store.save(session)
                assert await store.lapsed() == []


class TestDamage:
    """A flipped bit is an error that names the place, never a wrong answer."""

    @pytest.mark.parametrize("name", [".perdure", "s.json", "s.jsonl"])
    def test_a_flipped_bit_anywhere(self, tmp_path: Path, name: str) -> None:
        """Whatever byte of whatever file has changed, each answer is right or an error that says so."""
        asyncio.run(_flip_everywhere(tmp_path, name))

    async def test_a_log_cut_short_is_noticed(self, tmp_path: Path) -> None:
        """A log that ends before what its document was made from has lost something, and says so."""
        async with FileStore(tmp_path) as store:
            session = await store.save(say(await store.create(small("Hi")), "Yo"))
        lines = lines_of(tmp_path)
        for count in range(len(lines)):
            (tmp_path / "s.jsonl").write_bytes(b"".join(lines[:count]))
            async with FileStore(tmp_path) as store:
                for version in (None, 2):
                    with pytest.raises(CorruptRecord):
                        await store.load("s", version)
                assert [error.session_id for error in (await store.list()).damaged] == ["s"]
        (tmp_path / "s.jsonl").write_bytes(b"".join(lines))
        async with FileStore(tmp_path) as store:
            assert await store.load("s") == session

    async def test_lines_that_were_lost_moved_or_repeated_are_noticed(self, tmp_path: Path) -> None:
        """Each line has its number: taking one out, or two of them in another order, is damage."""
        async with FileStore(tmp_path) as store:
            await store.save(say(await store.create(small("Hi")), "Yo"))
        lines = lines_of(tmp_path)
        spoiled = [lines[:place] + lines[place + 1 :] for place in range(len(lines) - 1)]
        spoiled += [[*lines[:place], lines[place], *lines[place:]] for place in range(len(lines))]
        spoiled += [[*lines[:1], *lines[2:0:-1], *lines[3:]], [*lines[:2], b"\n", *lines[2:]]]
        for bad in spoiled:
            (tmp_path / "s.jsonl").write_bytes(b"".join(bad))
            async with FileStore(tmp_path) as store:
                with pytest.raises(CorruptRecord):
                    await store.load("s")

    async def test_versions_before_the_damage_stay_readable(self, tmp_path: Path) -> None:
        """The newest version is refused, with the place; older ones load; nothing is written behind the damage."""
        async with FileStore(tmp_path) as store:
            first = await store.create(small("Hi"))
            await store.save(say(first, "Yo"))
            other = await store.create(small("fine", id="other"))
        place = (tmp_path / "s.jsonl").read_bytes().index(b"Yo")
        flip(tmp_path / "s.jsonl", place)
        before = (tmp_path / "s.jsonl").read_bytes()
        async with FileStore(tmp_path) as store:
            with pytest.raises(CorruptRecord, match=r"byte \d+ of s.jsonl") as caught:
                await store.load("s")
            assert caught.value.session_id == "s"
            assert await store.load("s", 1) == first
            with pytest.raises(CorruptRecord):
                await store.load("s", 2)
            for write in (
                lambda: store.save(say(first, "no")),
                lambda: store.claim("s", version=1, owner="ann"),
                lambda: store.post("s", Entry("steer")),
            ):
                with pytest.raises(CorruptRecord):
                    await write()
            assert (tmp_path / "s.jsonl").read_bytes() == before
            assert other.info in (await store.list()).all()

    async def test_a_fork_reads_what_is_whole_of_a_damaged_parent(self, tmp_path: Path) -> None:
        """Damage to what a fork does not show is none of its business, and it can still be saved."""
        async with FileStore(tmp_path) as store:
            parent = await store.create(small("Hi"))
            child = await store.create(fork(parent, id="f"))
            await store.save(say(parent, "Yo"))
        raw = (tmp_path / "s.jsonl").read_bytes()
        flip(tmp_path / "s.jsonl", raw.index(b"Yo"))
        async with FileStore(tmp_path) as store:
            assert await store.load("f") == child
            await store.save(say(child, "more"))
            assert texts(await store.load("f")) == ["Hi", "more"]
        flip(tmp_path / "s.jsonl", raw.index(b"Hi"))
        async with FileStore(tmp_path) as store:
            with pytest.raises(CorruptRecord, match="message 0 of log s@"):
                await store.load("f")

    async def test_what_is_at_hand_is_saved_beside_a_damaged_parent(self, tmp_path: Path) -> None:
        """A fork in memory loses nothing because its parent's file went bad meanwhile."""
        async with FileStore(tmp_path) as store:
            parent = await store.create(small("Hi"))
            child = await store.create(fork(parent, id="f"))
            flip(tmp_path / "s.jsonl", (tmp_path / "s.jsonl").read_bytes().index(b"Hi"))
        async with FileStore(tmp_path) as store:
            saved = await store.save(say(child, "more"))
            assert (saved.version, texts(saved)) == (2, ["Hi", "more"])
            assert texts(AgentSession.from_dict(json.loads((tmp_path / "f.json").read_bytes()))) == ["Hi", "more"]

    async def test_a_damaged_session_can_be_erased(self, tmp_path: Path) -> None:
        """Wherever it is damaged, deletion works, and its fork keeps what can still be read."""
        async with FileStore(tmp_path / "whole") as store:
            parent = await store.create(small("Hi", "Yo"))
            child = await store.create(fork(parent, id="f"))
        lines = lines_of(tmp_path / "whole")
        for number, spoiled in enumerate(lines):
            where = tmp_path / str(number)
            where.mkdir()
            for name, raw in files_in(tmp_path / "whole").items():
                (where / name).write_bytes(raw)
            flip(where / "s.jsonl", sum(map(len, lines[:number])) + len(spoiled) // 2)
            async with FileStore(where) as store:
                await store.delete("s")
                assert not await store.exists("s")
                if b'"message"' in spoiled:
                    with pytest.raises(CorruptRecord):
                        await store.load("f")
                else:
                    assert await store.load("f") == child

    async def test_a_damaged_fork_keeps_what_it_showed(self, tmp_path: Path) -> None:
        """Where the line that notes what a fork shows is damaged, its heads say it again."""
        async with FileStore(tmp_path) as store:
            parent = await store.create(small("Hi", "Yo"))
            child = await store.create(fork(parent, id="f"))
        place = (tmp_path / "f.jsonl").read_bytes().index(b'"ref"') + 2
        flip(tmp_path / "f.jsonl", place)
        async with FileStore(tmp_path) as store:
            await store.delete("s")
            assert await store.load("f", 1) == child
            flip(tmp_path / "f.jsonl", place)
            assert await store.load("f") == child

    async def test_a_log_of_a_newer_format_is_not_guessed_at(self, tmp_path: Path) -> None:
        """A log that a later release has written in another way is refused, with the reason."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            newer = encode_operation([line("log", str(log_of(session).key), body=b'{"format":99}')], 1)
            rest = lines_of(tmp_path)[1:]
            (tmp_path / "s.jsonl").write_bytes(newer + b"".join(rest))
            with pytest.raises(CorruptRecord, match="format 99"):
                await store.load("s")


async def _flip_everywhere(where: Path, name: str) -> None:
    async with FileStore(where) as store:
        session = await store.create(small("Hi"))
        await store.create(fork(session, id="f"))
        await store.save(say(session, "Yo"))
        await store.post("s", Entry("steer"))
        truth = await _answers(store, name)
    assert "damaged" not in truth.values()
    for place in range((where / name).stat().st_size):
        for bit in range(8) if TORTURE else [place % 8]:
            flip(where / name, place, bit)
            found = await _answers_of(where, name)
            wrong = {what: found[what] for what in found if found[what] not in ("damaged", truth[what])}
            assert not wrong, f"bit {bit} of byte {place} of {name}"
            assert "damaged" in found.values(), f"nobody noticed bit {bit} of byte {place} of {name}"
            flip(where / name, place, bit)


async def _answers_of(where: Path, name: str) -> dict[str, Any]:
    try:
        async with FileStore(where) as store:
            return await _answers(store, name)
    except StoreError:
        return {"load": "damaged"}


async def _answers(store: FileStore, name: str) -> dict[str, Any]:
    """What the store says of a session, with "damaged" where it says that."""
    looks: dict[str, Callable[[], Awaitable[Any]]] = {"load": lambda: store.load("s")}
    if name == "s.json" or TORTURE:
        looks |= {"list": lambda: _listed(store)}
    if name == "s.jsonl" or TORTURE:
        looks |= {"first": lambda: store.load("s", 1), "fork": lambda: store.load("f", 1)}
    if TORTURE:
        looks |= {"second": lambda: store.load("s", 2), "inbox": lambda: store.read("s", inbox=True)}
    return {what: await _answer(look) for what, look in looks.items()}


async def _answer(look: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await look()
    except (CorruptRecord, InvalidSessionFile):
        return "damaged"


async def _listed(store: FileStore) -> Any:
    page = await store.list()
    return "damaged" if page.damaged else page.all()


class TestTornTails:
    """An operation that was not finished never was; its bytes are set aside, not lost."""

    async def test_a_tail_cut_at_any_byte_is_ignored(self, tmp_path: Path) -> None:
        """Readers see the last whole operation; the next writer sets the rest aside and goes on behind it."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            document, whole = (tmp_path / "s.json").read_bytes(), (tmp_path / "s.jsonl").read_bytes()
            await store.save(say(session, "Yo"))
        tail = (tmp_path / "s.jsonl").read_bytes()[len(whole) :]
        for length in range(1, len(tail), 1 if TORTURE else 29):
            (tmp_path / "s.json").write_bytes(document)
            (tmp_path / "s.jsonl").write_bytes(whole + tail[:length])
            async with FileStore(tmp_path) as store:
                assert await store.load("s") == session
                assert (await store.list()).all() == (session.info,)
                assert (tmp_path / "s.jsonl").stat().st_size == len(whole) + length
                await store.save(say(session, "instead"))
                assert texts(await store.load("s")) == ["Hi", "instead"]
            (torn,) = names(tmp_path) - {".perdure", ".perdure.lock", "s.json", "s.jsonl", "s.lock"}
            assert torn == "s.torn-1"
            assert (tmp_path / torn).read_bytes() == tail[:length]
            (tmp_path / torn).unlink()

    async def test_torn_tails_do_not_replace_each_other(self, tmp_path: Path) -> None:
        """Each gets a number of its own, and an erasure takes them all."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            for number in (1, 2):
                with (tmp_path / "s.jsonl").open("ab") as log:
                    log.write(b'{"crc":"torn %d' % number)
                session = await store.save(session)
            assert [(tmp_path / f"s.torn-{n}").read_bytes()[-1:] for n in (1, 2)] == [b"1", b"2"]
            await store.delete("s")
        assert names(tmp_path) == {".perdure", ".perdure.lock"}

    async def test_zeros_that_a_power_cut_has_left_are_torn(self, tmp_path: Path) -> None:
        """Bytes that were never written, at the end or before a last page that was, are no damage."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            document, whole = (tmp_path / "s.json").read_bytes(), (tmp_path / "s.jsonl").read_bytes()
            await store.save(say(session, "Yo"))
        tail = (tmp_path / "s.jsonl").read_bytes()[len(whole) :]
        for torn in (bytes(len(tail)), tail[:40] + bytes(len(tail) - 40), bytes(60) + tail[60:]):
            (tmp_path / "s.json").write_bytes(document)
            (tmp_path / "s.jsonl").write_bytes(whole + torn)
            async with FileStore(tmp_path) as store:
                assert await store.load("s") == session
                assert texts(await store.save(say(session, "instead"))) == ["Hi", "instead"]

    async def test_zeros_before_what_was_kept_are_damage(self, tmp_path: Path) -> None:
        """Where a later operation stands whole, nothing before it can have been unfinished."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            for kind in ("one", "two", "three"):
                await store.post("s", Entry(kind))
        raw = (tmp_path / "s.jsonl").read_bytes()
        for kind in (b"one", b"two"):
            start = raw.rindex(b"\n", 0, raw.index(kind)) + 1
            (tmp_path / "s.jsonl").write_bytes(raw[:start] + bytes(20) + raw[start + 20 :])
            async with FileStore(tmp_path) as store:
                with pytest.raises(CorruptRecord):
                    await store.load("s")
                assert [error.session_id for error in (await store.list()).damaged] == ["s"]
                assert await store.load("s", 1) == session

    async def test_a_create_that_was_not_finished_is_none(self, tmp_path: Path) -> None:
        """The id is free, nothing is listed, and the session can be created."""
        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
        raw = (tmp_path / "s.jsonl").read_bytes()
        (tmp_path / "s.json").unlink()
        (tmp_path / "s.jsonl").write_bytes(raw[:-20])
        async with FileStore(tmp_path) as store:
            assert await store.load("s") is None
            assert await store.exists("s") is False
            page = await store.list()
            assert (page.all(), page.damaged) == ((), ())
            with pytest.raises(SessionNotFound):
                await store.post("s", Entry("steer"))
            session = await store.create(small("anew"))
            assert await store.load("s") == session
            assert names(tmp_path) >= {"s.torn-1"}


class TestFailingDisk:
    """What the disk refuses is not kept, and a failed fsync is the end."""

    async def test_short_writes_are_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk that takes seven bytes at a time gets them all."""
        write = os.write
        monkeypatch.setattr(os, "write", lambda handle, body: write(handle, bytes(body[:7])))
        async with FileStore(tmp_path) as store:
            session = await store.save(say(await store.create(small("Hi")), "Yo"))
            assert await store.load("s") == session

    @pytest.mark.parametrize("room", [0, 100, 900, 1300, 1900, 2300])
    async def test_a_full_disk_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
    ) -> None:
        """Wherever the room runs out, the save is refused, no byte of it is left, and the next one passes."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            before = files_in(tmp_path)
            with monkeypatch.context() as disk:
                disk.setattr(os, "write", _disk_with_room(room))
                with pytest.raises(StoreError, match="No space"):
                    await store.save(say(session, "Yo" * 500))
            assert files_in(tmp_path) == before
            assert await store.load("s") == session
            assert (await store.save(say(session, "Yo" * 500))).version == 2

    async def test_a_disk_that_takes_nothing_is_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write that returns 0 ends in an error, not in an endless loop."""
        async with FileStore(tmp_path) as store:
            with monkeypatch.context() as disk:
                disk.setattr(os, "write", lambda handle, body: 0)
                with pytest.raises(StoreError, match="No space"):
                    await store.create(small("Hi"))
            assert not await store.exists("s")

    @pytest.mark.parametrize("call", [1, 2, 3])
    async def test_a_failed_fsync_poisons_the_store(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
    ) -> None:
        """From then on every verb is a StoreError; another opening finds one whole version."""
        calls = 0

        def fsync(handle: int) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with monkeypatch.context() as disk:
                disk.setattr(os, "fsync", fsync)
                with pytest.raises(StoreError, match="synced"):
                    await store.save(say(session, "Yo"))
            for verb in (lambda: store.load("s"), lambda: store.list(), lambda: store.save(session)):
                with pytest.raises(StoreError, match="refuses more"):
                    await verb()
        async with FileStore(tmp_path) as store:
            assert texts(await store.load("s")) == (["Hi"] if call < 3 else ["Hi", "Yo"])

    async def test_the_log_is_on_disk_before_the_document_is_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Document synced, log appended and synced, document renamed, directory synced: in this order."""
        steps: list[str] = []
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with monkeypatch.context() as watched:
                for verb in ("write", "fsync", "rename"):
                    watched.setattr(os, verb, _watched(verb, getattr(os, verb), steps))
                await store.save(say(session, "Yo"))
        assert steps == [
            *("write s.json.tmp", "fsync s.json.tmp"),
            *("write s.jsonl", "fsync s.jsonl"),
            *("rename s.json.tmp", f"fsync {tmp_path.name}"),
        ]

    async def test_the_version_is_kept_whatever_becomes_of_the_document(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is in the log is saved: a rename that fails is made good by the next write."""

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with monkeypatch.context() as disk:
                disk.setattr(os, "rename", refuse)
                session = await store.save(say(session, "Yo"))
            assert await store.load("s") == session
            assert (await store.list()).all() == (session.info,)
            await store.post("s", Entry("steer"))
        assert names(tmp_path, ".tmp") == set()
        assert json.loads((tmp_path / "s.json").read_bytes())["info"]["version"] == 2


def _disk_with_room(room: int) -> Callable[[int, bytes], int]:
    write = os.write

    def limited(handle: int, body: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(handle, bytes(body[:room]))
        room -= taken
        return taken

    return limited


def _watched(verb: str, real: Callable[..., Any], steps: list[str]) -> Callable[..., Any]:
    def call(subject: Any, *rest: Any, **options: Any) -> Any:
        name = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else subject
        steps.append(f"{verb} {Path(name).name}")
        return real(subject, *rest, **options)

    return call


class PowerCut:
    """What a disk holds that keeps only what was synced: contents by file, and names by directory."""

    def __init__(self, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._where = where
        self._synced = {path.stat().st_ino: path.read_bytes() for path in where.iterdir()}
        self._names = self._names_now()
        self.states: list[dict[str, bytes]] = []
        for verb in ("fsync", "rename", "unlink"):
            monkeypatch.setattr(os, verb, self._noted(verb, getattr(os, verb)))

    def _names_now(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self._where.iterdir()}

    def _noted(self, verb: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._note()
            real(*arguments, **options)
            if verb == "fsync":
                self._sync(arguments[0])
            gone = self._synced.keys() - {*self._names_now().values(), *self._names.values()}
            for inode in gone:
                del self._synced[inode]
            self._note()

        return call

    def _sync(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path == self._where:
            self._names = self._names_now()
        else:
            self._synced[path.stat().st_ino] = path.read_bytes()

    def _note(self) -> None:
        """The disk after a cut: with the names that were synced, those that were not, and one of those alone."""
        now = self._names_now()
        possible = [self._names, now, *({**self._names, name: now[name]} for name in now)]
        possible += [
            {name: self._names[name] for name in self._names if name != gone}
            for gone in self._names.keys() - now.keys()
        ]
        self.states += [state for state in map(self._state, possible) if state not in self.states]

    def kept(self) -> dict[str, bytes]:
        """What is certain to survive."""
        return self._state(self._names)

    def _state(self, names: dict[str, int]) -> dict[str, bytes]:
        return {name: self._synced.get(inode, b"") for name, inode in names.items()}


class TestPowerCut:
    """What was acknowledged is on the disk, and what was not is whole or not there."""

    @pytest.mark.parametrize("verb", ["create", "save", "append", "delete"])
    def test_the_power_fails_at_any_moment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
        """Whatever had been synced when it failed, the store opens, and after the answer it holds what was asked."""
        where = tmp_path / "d"
        asyncio.run(_prepare_family(where))
        with monkeypatch.context() as disk:
            cut = PowerCut(where, disk)
            asyncio.run(_act(verb, where))
        seen = [asyncio.run(_inspect(_restored(tmp_path / str(n), state), verb)) for n, state in enumerate(cut.states)]
        assert set(seen) == {"before", "after"}
        assert asyncio.run(_inspect(_restored(tmp_path / "kept", cut.kept()), verb)) == "after"


async def _act(verb: str, where: Path) -> None:
    async with FileStore(where) as store:
        parent, child = await store.load("parent"), await store.load("child")
        assert parent is not None
        assert child is not None
        if verb == "create":
            await store.create(say(fork(parent, id="new"), "more"))
        elif verb == "save":
            await store.save(say(child, "more"))
        elif verb == "append":
            await store.claim("child", version=1, owner="ann", lease=-1.0, entries=[Entry("start")])
        else:
            await store.delete("parent")


def _restored(where: Path, state: dict[str, bytes]) -> Path:
    where.mkdir()
    for name, raw in state.items():
        (where / name).write_bytes(raw)
    return where


KILLED = '''
"""Does one thing to copies of a directory, and is killed at the first, second, third … step of it."""
import asyncio, os, shutil, signal, sys
from perdure.protocols import Entry
from perdure.stores.file import FileStore
from perdure.testing.samples import fork, new_session, say

STEPS = ("write", "fsync", "rename", "unlink", "ftruncate")

async def act(verb, where, fatal):
    async with FileStore(where) as store:
        parent = await store.load("parent")
        child = await store.load("child")
        prepare(fatal)
        if verb == "create":
            await store.create(say(fork(parent, id="new"), "more"))
        elif verb == "save":
            await store.save(say(child, "more"))
        elif verb == "append":
            await store.claim("child", version=1, owner="ann", entries=[Entry("start")])
        elif verb == "delete":
            await store.delete("parent")
        elif verb == "delete-child":
            await store.delete("child")

def prepare(fatal):
    taken = 0
    def deadly(name, real):
        def call(*args, **options):
            nonlocal taken
            taken += 1
            if taken == fatal:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return call
    for name in STEPS:
        setattr(os, name, deadly(name, getattr(os, name)))

verb, where = sys.argv[1:]
step = 0
while True:
    step += 1
    shutil.copytree(f"{where}/before", f"{where}/{step}")
    pid = os.fork()
    if pid == 0:
        asyncio.run(act(verb, f"{where}/{step}", step))
        os._exit(0)
    if os.waitpid(pid, 0)[1] != signal.SIGKILL:
        break
print(step)
'''


class TestKilled:
    """A process killed at any step leaves what was before, or what was to be."""

    @pytest.mark.parametrize("verb", ["create", "save", "append", "delete", "delete-child"])
    def test_killed_at_any_step(self, tmp_path: Path, verb: str) -> None:
        """Each session loads as before or as after, others as before, and the next write passes."""
        asyncio.run(_prepare_family(tmp_path / "before"))
        script = tmp_path / "killed.py"
        script.write_text(KILLED)
        steps = int(_python(script, verb, tmp_path).stdout)
        assert steps > 2
        seen = [asyncio.run(_inspect(tmp_path / str(step), verb)) for step in range(1, steps + 1)]
        assert set(seen) == {"before", "after"}
        assert seen[-1] == "after"
        assert seen == sorted(seen, reverse=True), "once it is kept it stays kept"


def _python(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


async def _prepare_family(where: Path) -> None:
    async with FileStore(where) as store:
        parent = await store.create(small("Hi", "secret", id="parent"))
        await store.create(show(fork(parent, id="child"), parent.state.transcript.cut(0, 1)))


async def _inspect(where: Path, verb: str) -> str:
    async with FileStore(where) as store:
        page = await store.list()
        assert page.damaged == ()
        found = {info.id: await store.load(info.id) for info in page}
        assert {key: session.info for key, session in found.items() if session} == {info.id: info for info in page}
        outcome = {
            "create": lambda: "after" if "new" in found else "before",
            "save": lambda: "after" if len(texts(found["child"])) == 2 else "before",
            "append": lambda: "after" if _claimed_by_the_dead(where) else "before",
            "delete": lambda: "before" if "parent" in found else "after",
            "delete-child": lambda: "before" if "child" in found else "after",
        }[verb]()
        if "parent" in found:
            assert texts(found["parent"]) == ["Hi", "secret"]
        if "child" in found:
            assert texts(found["child"])[0] == "Hi"
            saved = await store.save(say(found["child"], "and on"))  # type: ignore[arg-type]
            assert await store.load("child") == saved
        if verb == "create":
            await _finish_create(store, found.get("new"))
        await _erase_all(store, where)
    return outcome


def _claimed_by_the_dead(where: Path) -> bool:
    return any(b'"claim"' in each for each in lines_of(where, "child.jsonl")) and not _is_torn(where)


def _is_torn(where: Path) -> bool:
    last = lines_of(where, "child.jsonl")[-1]
    return not last.endswith(b"\n") or "commit" not in json.loads(last)


async def _finish_create(store: FileStore, created: AgentSession | None) -> None:
    if created is None:
        created = await store.create(small("Hi", "secret", "more", id="new"))
    assert texts(created) == ["Hi", "secret", "more"]


async def _erase_all(store: FileStore, where: Path) -> None:
    """Whatever a killed process has left, deletion after deletion nothing of it stays."""
    for name in ("parent", "child", "new"):
        if await store.exists(name):
            await store.delete(name)
        else:
            with pytest.raises(SessionNotFound):
                await store.delete(name)
    assert names(where) == {".perdure", ".perdure.lock"}


class TestLocks:
    """One writer a session, and nobody waits for ever."""

    async def test_a_held_lock_times_out(self, tmp_path: Path) -> None:
        """Writers of that session are told which lock it was; readers and other sessions go on."""
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
        """Within the time-out it just takes longer."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with _held(tmp_path / "s.lock"):
                saving = asyncio.create_task(store.save(session))
                await asyncio.sleep(0.05)
                assert not saving.done()
            assert (await saving).version == 2

    async def test_the_lock_is_never_replaced(self, tmp_path: Path) -> None:
        """Whatever is written, the lock stays the same file as long as the session is there."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            before = (tmp_path / "s.lock").stat().st_ino
            claim, _ = await store.claim("s", version=1, owner="ann")
            await store.save(say(session, "Yo"), claim=claim)
            assert (tmp_path / "s.lock").stat().st_ino == before

    async def test_who_waited_for_an_erased_session_locks_its_successor(self, tmp_path: Path) -> None:
        """A lock that was deleted while somebody waited for it lets nobody in beside the holder of the new one."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with ExitStack() as new:
                with _held(tmp_path / "s.lock"):
                    saving = asyncio.create_task(store.save(session))
                    await asyncio.sleep(0.05)
                    (tmp_path / "s.lock").unlink()
                    new.enter_context(_held(tmp_path / "s.lock"))
                await asyncio.sleep(0.05)
                assert not saving.done()
            assert (await saving).version == 2

    async def test_no_lock_is_left_for_a_session_that_is_not_there(self, tmp_path: Path) -> None:
        """What finds nothing to write leaves nothing."""
        async with FileStore(tmp_path) as store:
            for verb in (
                lambda: store.save(say(small("Hi"), "Yo")),
                lambda: store.delete("s"),
                lambda: store.post("s", Entry("steer")),
            ):
                with pytest.raises(SessionNotFound):
                    await verb()
        assert names(tmp_path) == {".perdure", ".perdure.lock"}

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


@contextmanager
def _held(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class TestSymlinks:
    """A link is never followed, to read or to write."""

    async def test_a_linked_directory_is_refused(self, tmp_path: Path) -> None:
        """Name the directory itself."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(ConfigurationError, match="symbolic link"):
            await FileStore(tmp_path / "link").__aenter__()
        assert names(tmp_path / "real") == set()

    @pytest.mark.parametrize("name", ["s.json", "s.jsonl", "s.lock", "s.json.tmp", ".perdure"])
    async def test_a_linked_file_is_not_followed(self, tmp_path: Path, name: str) -> None:
        """What the link points to is neither shown nor changed."""
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
        """Something that is no file under a session's name is reported, not waited for."""
        os.mkfifo(tmp_path / "pipe.json")
        (tmp_path / "folder.json").mkdir()
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            page = await store.list()
            assert page.all() == (session.info,)
            assert [type(error) for error in page.damaged] == [InvalidSessionFile] * 2

    async def test_no_name_leads_out_of_the_directory(self, tmp_path: Path) -> None:
        """A log's key that looks like a path is the key of no log."""
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
    """What is deleted is in no file any more, and what others show stays."""

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
        assert names(tmp_path) == {".perdure", ".perdure.lock"}

    async def test_a_fork_of_a_branch_keeps_the_branch(self, tmp_path: Path) -> None:
        """What a run wrote to a log of its own, and a fork shows, is kept; what it wrote beside is not."""
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
        """Under a deleted session's id, no fork is ever shown the successor's text, and each goes on by itself."""
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
        """A remainder that nobody shows any more is found by any deletion, even one that finds no session."""
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
        """SessionBusy, and every file is as it was."""
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
        """Whoever comes first gives the store its id, and all see each other's sessions."""
        told = [_started(OPENS, tmp_path / "d", f"s{number}") for number in range(2)]
        assert [_heard(process) for process in told] == ["ready"] * 2
        for process in told:
            _tell(process, "go")
        origins = {process.communicate(timeout=30)[0].strip() for process in told}
        assert len(origins) == 1
        assert {len(origin) for origin in origins} == {32}
        assert len(asyncio.run(_ids(tmp_path / "d"))) == 2

    def test_a_fork_and_the_deletion_of_its_parent_do_not_race(self, tmp_path: Path) -> None:
        """Whoever comes first, a fork that was created is whole, and one that was refused is not there."""
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
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
