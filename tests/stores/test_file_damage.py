"""A file store whose bits flip, and whose writers die in the middle of a line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stores.files import (
    AFTER_ERASURES,
    OF_THE_STORE,
    TORTURE,
    files_in,
    flip,
    lines_of,
    log_of,
    names,
    small,
)

from perdure.errors import (
    CorruptRecord,
    InvalidSessionFile,
    SessionNotFound,
    StoreError,
)
from perdure.model.session import AgentSession
from perdure.protocols import Entry
from perdure.stores.file import FileStore
from perdure.stores.file.log import encode_operation, line
from perdure.testing.samples import fork, say, texts


class TestDamage:
    """A flipped bit is an error that names the place, never a wrong answer."""

    @pytest.mark.parametrize("name", [".perdure", "s.json", "s.jsonl"])
    def test_a_flipped_bit_anywhere(self, tmp_path: Path, name: str) -> None:
        """Whichever byte of whichever file has changed, each answer is right or an error that says so."""
        asyncio.run(_flip_everywhere(tmp_path, name))

    async def test_a_log_cut_short_is_noticed(self, tmp_path: Path) -> None:
        """A log that ends earlier than its document says has lost something, and raises an error that says so."""
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
        """Each line has its number: a missing line, or two that are swapped, are damage."""
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
        """The newest version raises an error with the place; older ones load; nothing is written behind the damage."""
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
        """Damage to messages that a fork does not show does not affect it, and it can still be saved."""
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
        """A fork in memory loses nothing when its parent's file is damaged meanwhile."""
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
        """If the line that notes what a fork shows is damaged, the fork's heads still say it."""
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
        """A log in a later release's format is refused, with the reason."""
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
    for place in range(0, (where / name).stat().st_size, 1 if TORTURE else 7):
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
    """Return the store's answers about a session, with "damaged" for each error of damage."""
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
    """An unfinished operation never happened; its bytes are set aside, not lost."""

    async def test_a_tail_cut_at_any_byte_is_ignored(self, tmp_path: Path) -> None:
        """Readers see the last whole operation; the next writer sets the rest aside and continues behind it."""
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
            (torn,) = names(tmp_path) - OF_THE_STORE - {"s.json", "s.jsonl", "s.lock"}
            assert torn == "s.torn-1"
            assert (tmp_path / torn).read_bytes() == tail[:length]
            (tmp_path / torn).unlink()

    async def test_torn_tails_do_not_replace_each_other(self, tmp_path: Path) -> None:
        """Each torn tail gets a number of its own, and an erasure removes them all."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            for number in (1, 2):
                with (tmp_path / "s.jsonl").open("ab") as log:
                    log.write(b'{"crc":"torn %d' % number)
                session = await store.save(session)
            assert [(tmp_path / f"s.torn-{n}").read_bytes()[-1:] for n in (1, 2)] == [b"1", b"2"]
            await store.delete("s")
        assert names(tmp_path) == AFTER_ERASURES

    async def test_zeros_that_a_power_cut_has_left_are_torn(self, tmp_path: Path) -> None:
        """Bytes that were never written, at the end or before the last page that was, are not damage."""
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
        """An operation that has a later whole operation behind it cannot be unfinished."""
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
