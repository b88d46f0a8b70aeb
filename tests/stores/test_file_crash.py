"""A file store on a disk that fails, in a process that is killed, on a machine that loses its power."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.stores.files import (
    AFTER_ERASURES,
    AFTER_GROUPS,
    ENVIRONMENT,
    files_in,
    lines_of,
    names,
    needs_proc,
    small,
)
from tests.stores.killed import act

from perdure.archive import fsck
from perdure.errors import (
    SessionNotFound,
    StoreError,
    UnreadableFile,
)
from perdure.model.session import AgentSession
from perdure.protocols import Change, Entry
from perdure.stores.file import FileStore
from perdure.stores.file.group import Growth, encoded
from perdure.testing.samples import fork, new_session, say, show, texts


class TestFailingDisk:
    """A refused write is not kept, and after a failed fsync the store refuses everything."""

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
        """Wherever the disk becomes full, the save is refused, none of its bytes are left, and the next one passes."""
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
        """From then on every verb raises StoreError; a store that is opened afterwards finds one whole version."""
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

    @needs_proc
    async def test_the_log_is_on_disk_before_the_document_is_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The order: document synced, log appended and synced, document renamed, directory synced."""
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

    @pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
    @pytest.mark.parametrize("call", ["open", "pread", "stat", "listdir"])
    async def test_what_cannot_be_read_is_not_called_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
    ) -> None:
        """A failed read does not show what is on the disk: it raises StoreError."""
        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
        async with FileStore(tmp_path) as store:
            monkeypatch.setattr(os, call, _refusal(code))
            of_all = (store.list, store.check, store.lapsed) if call in ("stat", "listdir") else ()
            of_one = (store.load, store.dump, store.is_interrupted) if call != "listdir" else ()
            for verb in (*of_all, *(partial(each, "s") for each in of_one)):
                with pytest.raises(StoreError, match=os.strerror(code)):
                    await verb()
            if call not in ("stat", "listdir"):
                assert [type(error) for error in (await store.list()).damaged] == [UnreadableFile]
            monkeypatch.undo()
            assert await store.load("s") is not None

    @pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
    @pytest.mark.parametrize("name", ["bad.json", "bad.jsonl"])
    async def test_a_file_that_cannot_be_read_stops_no_other_session(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
    ) -> None:
        """A list names it in `damaged`, fsck reports it, and every verb that needs it raises UnreadableFile."""
        async with FileStore(tmp_path) as store:
            good, _ = [await store.create(new_session("Hi", id=each)) for each in ("good", "bad")]
            opening = os.open
            refuse = _refusal(code)
            monkeypatch.setattr(os, "open", lambda path, *a, **k: (refuse if path == name else opening)(path, *a, **k))
            page = await store.list()
            assert [info.id for info in page] == ["good"]
            assert [(type(error), Path(error.path).name) for error in page.damaged] == [(UnreadableFile, name)]
            assert await store.lapsed() == []
            assert await store.ids_with_prefix("") == ["bad", "good"]
            assert "good" in [hit.session_id for hit in await store.search("Hi")]
            assert await store.load("good") == good
            for verb in (store.load, store.dump) if name == "bad.jsonl" else (store.load,):
                with pytest.raises(UnreadableFile, match=f"{name} could not be read .{os.strerror(code)}"):
                    await verb("bad")
            for report in (await fsck(store), await fsck(store, session_id="bad")):
                assert {os.strerror(code)} == {problem.what for problem in report.problems}
                assert all("permissions" in each.repair or "mend it" in each.repair for each in report.problems)
            monkeypatch.undo()
            assert (await fsck(store)).is_sound

    async def test_a_process_without_handles_calls_no_file_unreadable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A fault that affects every file is not blamed on one: a list raises StoreError."""
        async with FileStore(tmp_path) as store:
            await store.create(small("Hi"))
            monkeypatch.setattr(os, "open", _refusal(errno.EMFILE))
            with pytest.raises(StoreError) as caught:
                await store.list()
            assert not isinstance(caught.value, UnreadableFile)

    @pytest.mark.parametrize("call", ["open", "stat"])
    async def test_a_directory_that_may_not_be_entered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        """Opening the store raises StoreError, which names the directory."""
        monkeypatch.setattr(os, call, _refusal(errno.EACCES))
        with pytest.raises(StoreError, match=f"{tmp_path} cannot be used .* Permission denied"):
            await FileStore(tmp_path).__aenter__()

    async def test_the_version_is_kept_whatever_becomes_of_the_document(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A version in the log is saved: if the rename fails, the next write makes the document again."""
        async with FileStore(tmp_path) as store:
            session = await store.create(small("Hi"))
            with monkeypatch.context() as disk:
                disk.setattr(os, "rename", _refusal(errno.EIO))
                session = await store.save(say(session, "Yo"))
            assert await store.load("s") == session
            assert (await store.list()).all() == (session.info,)
            await store.post("s", Entry("steer"))
        assert names(tmp_path, ".tmp") == set()
        assert json.loads((tmp_path / "s.json").read_bytes())["info"]["version"] == 2


class TestFailingGroup:
    """Sessions that are saved together are taken back together."""

    @pytest.mark.parametrize("room", [0, 700, 2000, 4000, 6000, 8000, 9000])
    async def test_a_full_disk_changes_none_of_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
    ) -> None:
        """Wherever the disk becomes full, the save is refused, none of its bytes are left, and the next one passes."""
        async with FileStore(tmp_path) as store:
            old = [await store.create(small("Hi", id=each)) for each in ("a", "b")]
            changes = [*(Change(say(each, "Yo" * 500)) for each in old), Change(small("new", id="c"))]
            before = files_in(tmp_path)
            with monkeypatch.context() as disk:
                disk.setattr(os, "write", _disk_with_room(room))
                with pytest.raises(StoreError, match="No space"):
                    await store.save_all(changes)
            after = files_in(tmp_path)
            assert {name: after[name] for name in after.keys() - AFTER_GROUPS} == before
            assert [await store.load(each.id) for each in old] == old
            assert [each.version for each in await store.save_all(changes)] == [2, 2, 1]

    @pytest.mark.parametrize("call", range(1, 13))
    async def test_a_failed_fsync_leaves_all_of_them_or_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
    ) -> None:
        """The store refuses more, and a store opened afterwards finds both sessions at one version."""
        calls = 0

        def fsync(handle: int) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        async with FileStore(tmp_path) as store:
            old = [await store.create(small("Hi", id=each)) for each in ("a", "b")]
            with monkeypatch.context() as disk, suppress(StoreError):
                disk.setattr(os, "fsync", fsync)
                await store.save_all([Change(say(each, "Yo")) for each in old])
        async with FileStore(tmp_path) as store:
            assert len({info.version for info in await store.list()}) == 1
            assert await store.check() == []
        assert ".group" not in names(tmp_path)

    def test_whoever_comes_first_finishes_what_was_decided(self, tmp_path: Path) -> None:
        """A store that is open while another process is killed sees the whole group, whatever its first question is."""
        asyncio.run(_prepare_family(tmp_path / "before"))
        left = files_in(_left_by_killed_group(tmp_path))
        for first in ("load", "list", "exists", "save", "delete", "check", "previews"):
            where = _restored(tmp_path / first, files_in(tmp_path / "before"))
            asyncio.run(_ask_first(where, left, first))

    async def test_a_damaged_group_is_reported(self, tmp_path: Path) -> None:
        """Every session loads unchanged, fsck reports the file, and the next group replaces it."""
        async with FileStore(tmp_path) as store:
            old = [await store.create(small("Hi", id=each)) for each in ("a", "b")]
            _restored(tmp_path, {".group": b"00000000 {}"})
            assert [await store.load(each.id) for each in old] == old
            (problem,) = await store.check()
            assert (problem.session_id, problem.where) == (None, ".group")
            assert "Remove it" in problem.repair
            await store.save_all([Change(say(each, "Yo")) for each in old])
            assert await store.check() == []

    @pytest.mark.parametrize("kept", [slice(0, 0), slice(0, 40), slice(40, None), slice(None)])
    async def test_a_growth_that_a_power_cut_has_torn_is_made_whole(self, tmp_path: Path, kept: slice) -> None:
        """Part of the growth is on the disk, the rest is zeros: all sessions of the group still change."""
        async with FileStore(tmp_path) as store:
            old = [await store.create(small("Hi", id=each)) for each in ("a", "b")]
            before = files_in(tmp_path)
            await store.save_all([Change(say(each, "Yo")) for each in old])
            after = files_in(tmp_path)
        steps = [
            Growth(name[0], name, len(before[name]), after[name][len(before[name]) :])
            for name in ("a.jsonl", "b.jsonl")
        ]
        torn = bytearray(len(steps[0].body))
        torn[kept] = steps[0].body[kept]
        where = _restored(tmp_path / "cut", {name: before[name] for name in before if not name.endswith(".lock")})
        _restored(where, {"a.jsonl": before["a.jsonl"] + bytes(torn), ".group": encoded(steps)})
        async with FileStore(where) as store:
            assert [texts(await store.load(each.id)) for each in old] == [["Hi", "Yo"]] * 2
            assert await store.check() == []

    async def test_a_release_that_knows_no_groups_has_written_meanwhile(self, tmp_path: Path) -> None:
        """A log that another release has written to meanwhile is not overwritten."""
        async with FileStore(tmp_path) as store:
            a, b = [await store.create(small("Hi", id=each)) for each in ("a", "b")]
            end = len(files_in(tmp_path)["a.jsonl"])
            kept = await store.save(say(a, "elsewhere"))
            left = encoded([Growth("a", "a.jsonl", end, b"stale"), Growth("b", "b.jsonl", 9, b"x")])
            _restored(tmp_path, {".group": left})
            assert [await store.load(each.id) for each in (a, b)] == [kept, b]
        assert ".group" not in names(tmp_path)


def _left_by_killed_group(where: Path) -> Path:
    """Return the directory of a store whose writer was killed between two logs of a group."""
    command = [sys.executable, "-m", "tests.stores.killed", "save-all", str(where)]
    steps = int(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
    before = files_in(where / "before")
    for left in (where / str(step) for step in range(1, steps)):
        changed = [name for name in ("child.jsonl", "parent.jsonl") if (left / name).read_bytes() != before[name]]
        if (left / ".group").exists() and len(changed) == 1:
            return left
    raise AssertionError("nobody was killed between two logs")


async def _ask_first(where: Path, left: dict[str, bytes], first: str) -> None:
    async with FileStore(where) as store:
        _restored(where, left)  # the killed process's files appear while this store is open
        verbs: dict[str, Callable[[], Any]] = {
            "load": lambda: store.load("parent"),
            "list": store.list,
            "exists": lambda: store.exists("new"),
            "save": lambda: store.create(small(id="other")),
            "delete": lambda: store.delete("child"),
            "check": store.check,
            "previews": lambda: store.previews(["parent"]),
        }
        found = await verbs[first]()
        assert ".group" not in names(where)
        if first == "exists":
            assert found is True
        elif first == "load":
            assert texts(found)[-1] == "more"
        everybody = {info.id: info.version for info in await store.list()}
        everybody.pop("other", None)
        assert everybody | {"child": 2} == {"parent": 2, "child": 2, "new": 1}
        assert await store.check() == []


def _refusal(code: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


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
    """A disk that keeps only what was synced: contents by file, and names by directory."""

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
        """Note the disk after a cut: with the synced names, the names that were not synced, and one of those alone."""
        now = self._names_now()
        possible = [self._names, now, *({**self._names, name: now[name]} for name in now)]
        possible += [
            {name: self._names[name] for name in self._names if name != gone}
            for gone in self._names.keys() - now.keys()
        ]
        self.states += [state for state in map(self._state, possible) if state not in self.states]

    def kept(self) -> dict[str, bytes]:
        """Return the contents that are certain to survive."""
        return self._state(self._names)

    def _state(self, names: dict[str, int]) -> dict[str, bytes]:
        return {name: self._synced.get(inode, b"") for name, inode in names.items()}


class TestPowerCut:
    """Acknowledged changes are on the disk; all others are whole or not there."""

    @pytest.mark.sample(2)
    @needs_proc
    @pytest.mark.parametrize("verb", ["create", "save", "save-all", "append", "note", "delete", "delete-many"])
    def test_the_power_fails_at_any_moment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
        """Wherever the power fails, the store opens; after the answer it holds the change."""
        where = tmp_path / "d"
        asyncio.run(_prepare_family(where))
        with monkeypatch.context() as disk:
            cut = PowerCut(where, disk)
            asyncio.run(act(verb, where))
        seen = [asyncio.run(_inspect(_restored(tmp_path / str(n), state), verb)) for n, state in enumerate(cut.states)]
        assert set(seen) == {"before", "after"}
        assert asyncio.run(_inspect(_restored(tmp_path / "kept", cut.kept()), verb)) == "after"


def _restored(where: Path, state: dict[str, bytes]) -> Path:
    where.mkdir(exist_ok=True)
    for name, raw in state.items():
        (where / name).write_bytes(raw)
    return where


class TestKilled:
    """A process killed at any step leaves the state before the change, or after it."""

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "verb", ["create", "save", "save-all", "append", "note", "delete", "delete-child", "delete-many"]
    )
    def test_killed_at_any_step(self, tmp_path: Path, verb: str) -> None:
        """Each session loads as before or after the change, others as before, and the next write succeeds."""
        asyncio.run(_prepare_family(tmp_path / "before"))
        command = [sys.executable, "-m", "tests.stores.killed", verb, str(tmp_path)]
        steps = int(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
        assert steps > 2
        seen = [asyncio.run(_inspect(tmp_path / str(step), verb)) for step in range(1, steps + 1)]
        assert set(seen) == {"before", "after"}
        assert seen[-1] == "after"
        assert seen == sorted(seen, reverse=True), "once it is kept it stays kept"

    def test_a_redaction_that_was_killed_is_finished_by_the_next_open(self, tmp_path: Path) -> None:
        """A redaction killed at any step has not begun, or is done in every session once somebody opens the store."""
        asyncio.run(_prepare_family(tmp_path / "before"))
        command = [sys.executable, "-m", "tests.stores.killed", "redact", str(tmp_path)]
        steps = int(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
        seen = [asyncio.run(_shown_by_both(tmp_path / str(step))) for step in range(1, steps + 1)]
        begun = seen.index(("[redacted]", "[redacted]"))
        assert 0 < begun < steps - 4
        assert not [*tmp_path.glob("*/*.redaction"), *tmp_path.glob("*/.redactions/*")]
        assert set(seen[:begun]) == {("Hi", "Hi")}
        assert set(seen[begun:]) == {("[redacted]", "[redacted]")}


async def _shown_by_both(where: Path) -> tuple[str, ...]:
    async with FileStore(where) as store:
        shown = tuple([texts(await store.load(session_id))[0] for session_id in ("parent", "child")])
        assert await store.check() == []
    return shown


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
        noted = len(await store.read("child", run="task")) if "child" in found else 0
        assert noted in (0, 3)
        outcome = {
            "note": lambda: "after" if noted else "before",
            "create": lambda: "after" if "new" in found else "before",
            "save": lambda: "after" if len(texts(found["child"])) == 2 else "before",
            "save-all": lambda: _outcome_of_all(found),
            "append": lambda: "after" if _claimed_by_the_dead(where) else "before",
            "delete": lambda: "before" if "parent" in found else "after",
            "delete-many": lambda: {0: "after", 2: "before"}[len(found)],
            "delete-child": lambda: "before" if "child" in found else "after",
        }[verb]()
        if "parent" in found:
            assert texts(found["parent"])[:2] == ["Hi", "secret"]
        if "child" in found:
            assert texts(found["child"])[0] == "Hi"
            claim, _ = await store.claim("child", version=found["child"].version, owner="ben", take_over=True)
            saved = await store.save(say(found["child"], "and on"), claim=claim)
            assert await store.load("child") == saved
        if verb in ("create", "save-all"):
            await _finish_create(store, found.get("new"))
        await _erase_all(store, where)
    return outcome


def _outcome_of_all(found: Mapping[str, AgentSession | None]) -> str:
    """Return the outcome for sessions that were saved together, which has to be the same for all."""
    kept = {"new" in found, *(texts(found[name])[-1] == "more" for name in ("parent", "child"))}
    assert len(kept) == 1, "some are kept, and others are not"
    return "after" if kept == {True} else "before"


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
    """Delete all sessions: nothing that a killed process has left remains."""
    for name in ("parent", "child", "new"):
        if await store.exists(name):
            await store.delete(name)
        else:
            with pytest.raises(SessionNotFound):
                await store.delete(name)
    assert names(where) - AFTER_ERASURES - AFTER_GROUPS == set()
