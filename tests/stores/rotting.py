"""Helpers for the attacks of bit rot: stores with a bit of everything in them, and spies that note what is read."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from perdure.model.ids import use
from perdure.stores.file import FileStore
from perdure.stores.sqlite import SqliteStore, worker
from perdure.testing.clock import FrozenClock
from perdure.testing.rot.attack import Attack, Hurt, OpenStore, RottenFiles, Traces, forget_claims
from perdure.testing.rot.furnishing import CROWD, furnish
from perdure.testing.rot.questions import Answers, Question, answers_of, questions_of
from perdure.testing.samples import say

PAGE = 4096
CROWD_IN_FILES = 20
"""A list reads each of them; more of them would test nothing else."""
THE_CROWD = {f"crowd-{number:03d}{end}" for number in range(CROWD) for end in ("", "-child")}
LEFT_TO_CHECK = ("list", "names", "queue", "lenient", "notes")
"""The kinds of questions that an index or a note answers: only a check notices a row that is lost."""
KINDS = ("main", "search", "wal", "file")
UNPROTECTED = {
    "session": ("expires", "priority", "since", "epoch", "taken"),
    "run": ("first_pos", "end_pos"),
    "meta": ("value", "erasures", "uid"),
    "rate": ("name", "until"),
}
"""Columns whose values are stored nowhere else. docs/reliability.md names them."""


class Scene(NamedTuple):
    """A closed store with a bit of everything, and its answers."""

    where: Path
    open_store: OpenStore
    clock: FrozenClock
    questions: list[Question]
    right: Answers
    traces: Traces | None


def open_sqlite(where: Path) -> SqliteStore:
    return SqliteStore(where / "s.db")


def open_files(where: Path) -> FileStore:
    return FileStore(where / "d")


async def furnished(kind: str, where: Path, *, traced: bool = True) -> Scene:
    """Return a scene in an empty directory, for the damage of one kind of file."""
    open_store: OpenStore = open_files if kind == "file" else open_sqlite
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with open_store(where) as store:
            await furnish(store, crowd=CROWD_IN_FILES if kind == "file" else CROWD)
            orders = ("created",) if kind == "file" else ("created", "updated")
            questions = await questions_of(store, crowd=THE_CROWD, orders=orders)
            for question in questions:  # the first question builds indexes that are there from now on
                if question.kind == "lenient":
                    await question.ask(store)
            forget_claims(store)
        if kind == "wal":
            await _leave_log(where)
    clock = FrozenClock(clock())
    with use(clock=clock):
        files = RottenFiles(where)
        async with open_store(where) as store:
            right = await answers_of(store, questions)
            forget_claims(store)
        await files.heal()
        traces = None
        if traced and kind != "wal":
            asked = [each for each in questions if each.kind != "check"]
            spy = watch_files if kind == "file" else watch_pages
            traces = await Traces.taken(open_store, where, asked, spy)
            await files.heal()
    return Scene(where, open_store, clock, questions, right, traces)


async def _leave_log(where: Path) -> None:
    """Leave some commits in the log, as a killed process does."""
    before, worker.IDLE_SECONDS = worker.IDLE_SECONDS, 600.0
    try:
        async with open_sqlite(where) as store:
            for number in range(12):
                session = await store.load("long")
                assert session is not None
                await store.save(say(session, f"in the log {number}", "x" * 2_000))
            shutil.copytree(where, where.with_name(f"{where.name}-copy"))
            forget_claims(store)
    finally:
        worker.IDLE_SECONDS = before
    shutil.rmtree(where)
    copy = where.with_name(f"{where.name}-copy")
    (copy / "s.db-shm").unlink()
    copy.rename(where)


def hits(kind: str) -> Callable[[str], bool]:
    names = {"main": {"s.db"}, "search": {"s.db-search"}, "wal": {"s.db-wal", "s.db-mark"}}
    return (lambda name: True) if kind == "file" else names[kind].__contains__


class RottenDatabase(RottenFiles):
    """The file of a SQLite store. Damage to unprotected columns alone is left out, as in PostgreSQL."""

    def __init__(self, where: Path, **options: Any) -> None:
        super().__init__(where, **options)
        self._rows = _rows_with_unprotected(where)

    async def hurt(self, rng: random.Random) -> Hurt | None:
        hurt = await super().hurt(rng)
        try:
            rows = _rows_with_unprotected(self.where)
        except (apsw.Error, UnicodeDecodeError):
            return hurt
        # Equal where it counts, and different elsewhere.
        if rows != self._rows and [each[0] for each in rows] == [each[0] for each in self._rows]:
            await self.heal()
            return None
        return hurt


class RottenLogs(RottenFiles):
    """The files of a file store. Zeros at the end of a log are left out: a power cut leaves them, too."""

    async def hurt(self, rng: random.Random) -> Hurt | None:
        hurt = await super().hurt(rng)
        if any(each.read_bytes().endswith(b"\0\0") for each in self.where.rglob("*.jsonl")):
            await self.heal()
            return None
        return hurt


def _rows_with_unprotected(where: Path) -> list[tuple[Any, Any]]:
    """Return each row of the tables with unprotected columns in two parts: the protected columns, and the others."""
    found = []
    db = apsw.Connection(f"file:{where / 's.db'}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        for table, columns in UNPROTECTED.items():
            named = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
            for row in db.execute(f"SELECT * FROM {table} NOT INDEXED"):
                by_name = list(zip(named, row, strict=True))
                found.append(
                    tuple([pair for pair in by_name if (pair[0] in columns) is bare] for bare in (False, True))
                )
    finally:
        db.close()
    return found


def attack_on(scene: Scene, kind: str) -> Attack:
    key = (lambda name, place: Path(name).name) if kind == "file" else (lambda name, place: (name, place // PAGE))
    damage = {"main": RottenDatabase, "file": RottenLogs}.get(kind, RottenFiles)(scene.where, hit=hits(kind), key=key)
    return Attack(
        *(scene.open_store, scene.where, damage, scene.questions, scene.right),
        traces=scene.traces,
        left_to_check=LEFT_TO_CHECK,
    )


_seen: set[Hashable] = set()


class _SpiedFile(apsw.VFSFile):
    def __init__(self, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name)).name

    def xRead(self, amount: int, offset: int) -> bytes:
        _seen.add((self._name, offset // PAGE))
        return super().xRead(amount, offset)


class _Spy(apsw.VFS):
    """A spy on the pages that SQLite reads."""

    def __init__(self) -> None:
        super().__init__("perdure-spy", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        return _SpiedFile(name, flags)


def watch_pages() -> Callable[[], set[Hashable]]:
    """Note the pages that are read from now on; return a function that returns them and stops the watch."""
    spy = _Spy()
    _seen.clear()

    def seen() -> set[Hashable]:
        apsw.set_default_vfs("unix")  # else any other that is registered may become it
        spy.unregister()
        return set(_seen)

    return seen


_opened: set[Hashable] = set()


def _note_opened(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(given[0], str | bytes):
        path = given[0] if isinstance(given[0], str) else given[0].decode()
        _opened.add(path.rpartition("/")[2])


sys.addaudithook(_note_opened)


def watch_files() -> Callable[[], set[Hashable]]:
    """Note the names of files that are opened from now on."""
    _opened.clear()
    return lambda: set(_opened)


def built(kind: str, where: Path) -> Scene:
    return asyncio.run(furnished(kind, where))
