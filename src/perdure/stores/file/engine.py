"""The tables in a directory of files. One thread works there, and drives jobs one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from perdure.aio import aside, finish_despite_cancel
from perdure.errors import (
    CorruptRecord,
    InvalidSessionFile,
    PerdureError,
    SessionConflict,
    StoreError,
)
from perdure.model.ids import now
from perdure.model.session import SessionInfoList
from perdure.protocols import Problem
from perdure.stores.engine import Change, Engine, Fetch, Job, Kind, T, drive
from perdure.stores.file import group, hints
from perdure.stores.file.commit import commit
from perdure.stores.file.desk import Desk, MoreLocks
from perdure.stores.file.directory import Directory, cut_short, owner_of
from perdure.stores.file.document import Header, document_file
from perdure.stores.file.listing import list_sessions
from perdure.stores.file.log import SessionLog
from perdure.stores.file.pledge import intent_file, read_intent, sessions_with_hint, sessions_with_intent
from perdure.stores.file.thread import FileThread
from perdure.stores.folder import Turn
from perdure.stores.jobs.listing import Page
from perdure.stores.jobs.loading import Load
from perdure.stores.jobs.saving import Keep

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit, Landing, Outline

_NOT_OPEN = "This store is not open. Use it inside `async with FileStore(directory) as store:`."


class FileEngine(Engine):
    """An engine that keeps the tables as lines of logs. Readers hold no lock, but check seeming damage under it."""

    kind = "file"
    key_of_log = str
    packs = False

    def __init__(self, path: Path, lock_timeout: float) -> None:
        self._path = path
        self._timeout = lock_timeout
        self._thread: FileThread | None = None
        self._desk: Desk | None = None
        self.last_jobs: Sequence[Callable[[], Job[Any]]] = ()
        """The jobs to be done when the store is closed, if they can be done at once."""

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise StoreError("This store is open already.")
        thread = FileThread(f"perdure files {self._path.name}")
        directory = await thread.open(self._path, self._timeout)
        self._thread, self._desk, self.origin = thread, Desk(directory), directory.origin
        return self

    async def __aexit__(self, *_: object) -> None:
        thread, self._thread, self.origin = self._thread, None, ""
        if thread is None:
            return
        if thread.is_inherited:  # a forked child has no thread, and its parent uses the directory
            thread.let_go()
            return
        last = [_Task(each, "write", now().timestamp()) for each in self.last_jobs]
        self.last_jobs = ()
        await finish_despite_cancel(thread.close(lambda directory: self._do_at_once(directory, last)))

    def _do_at_once(self, directory: Directory, tasks: Iterable[_Task]) -> None:
        for task in tasks:
            # A deadline in the past: a lock that is not free fails the task at once.
            with suppress(PerdureError, OSError), directory.folder.taking(Turn(deadline=0.0)):
                self._drive(task)

    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        return cast(T, await self._ask(_Task(job, kind, now().timestamp())))

    async def run_past_damage(self, job: Callable[[], Job[T]]) -> T:
        """Drive a job that reads, with the lines that are sound."""
        return cast(T, await self._ask(_Task(job, "read", now().timestamp(), lambda desk: None)))

    async def run_if_free(self, job: Callable[[], Job[Any]], kind: Kind) -> None:
        """Run a job, or do nothing if a session that it concerns is locked or damaged."""
        task = _Task(job, kind, now().timestamp())
        await self._opened.run(lambda directory: self._do_at_once(directory, [task]), patient=True)

    async def commit(self, change: Change) -> Any:
        try:
            return await self._ask(_Task(change.job, "write", now().timestamp()), change.finish)
        except CorruptRecord:
            if isinstance(change, Keep) and change.is_new and await self.exists(change.session_id):
                raise SessionConflict(change.session_id, 0, None) from None  # a damaged session exists, too
            raise

    async def fetch(self, load: Fetch[T]) -> T | None:
        assert isinstance(load, Load)
        session_id, version = load.session_id, load.version
        task = _Task(load.job, "read", now().timestamp(), lambda desk: _require_whole(desk, session_id, version))
        return cast("T | None", await self._ask(task))

    async def list(self, page: Page) -> SessionInfoList:
        """Return a page of a list, with what is damaged."""
        return cast(SessionInfoList, await self._opened.run(lambda directory: list_sessions(directory, page)))

    async def exists(self, session_id: str) -> bool:
        """Tell whether there is a session, sound or damaged."""
        return cast(bool, await self._opened.run(lambda directory: directory.exists(session_id)))

    async def sweep(self, session_id: str) -> None:
        """Remove what a killed writer or deletion has left of a session that does not exist."""
        await self._opened.run(lambda directory: _sweep(directory, session_id))

    async def forget_survey(self) -> None:
        """Make the next caller that asks what waits look at all sessions."""
        await self._opened.run(lambda directory: hints.forget_survey(directory.folder))

    async def pledged(self) -> Sequence[str]:
        """Return the sessions with a redaction that was cut short, or is under way."""
        names: list[str] = await self._opened.run(lambda directory: list(sessions_with_intent(directory.folder)))
        return names

    async def hinted(self) -> Sequence[str]:
        """Return the sessions with a hint of such a redaction, without a search. Some may be finished."""
        names: list[str] = await self._opened.run(lambda directory: sessions_with_hint(directory.folder))
        return names

    def pledge_of(self, session_id: str) -> bytes | None:
        """Return the request of an unfinished redaction in a session, for a job that has locked the session."""
        assert self._desk is not None
        return read_intent(self._desk.directory.folder, session_id)

    async def faults(self) -> Sequence[Problem]:
        from perdure.stores.file.check import faults

        def look(directory: Directory) -> Sequence[Problem]:
            assert self._desk is not None
            return faults(directory, self._desk)

        return cast("Sequence[Problem]", await self._opened.run(look, patient=True))

    async def mend(self, *, dry_run: bool) -> Sequence[Problem]:
        from perdure.stores.file.mending import mend, mendable

        def look(directory: Directory) -> Sequence[Problem]:
            assert self._desk is not None
            return (mendable if dry_run else mend)(directory, self._desk)

        return cast("Sequence[Problem]", await self._opened.run(look, patient=True))

    async def copy_out(self, deposit: Deposit) -> Outline:
        from perdure.stores.file.copying import copy_out

        self._opened.check_process()
        return await aside(copy_out, self._path, self._timeout, deposit)

    def landing(self) -> Landing:
        from perdure.stores.file.copying import FileLanding

        return FileLanding(self._path, self._timeout, lambda path: FileEngine(path, self._timeout))

    @property
    def _opened(self) -> FileThread:
        if self._thread is None:
            raise StoreError(_NOT_OPEN)
        return self._thread

    async def _ask(self, task: _Task, finish: Callable[[Any], Any] | None = None) -> Any:
        return await self._opened.run(lambda _: self._drive(task), finish=finish)

    def _drive(self, task: _Task) -> Any:
        """Drive a job. Repeat it until all sessions that it concerns are locked."""
        assert self._desk is not None
        ids, is_sure = set[str](), False
        while True:
            try:
                return task.attempt(self._desk, ids)
            except MoreLocks as more:
                ids |= more.needed
                self._desk.directory.settle()
            except (CorruptRecord, InvalidSessionFile):
                # A writer may have been at work, so it is read again under the locks.
                concerned = {owner_of(stem) for stem in self._desk.looked_at} - ids
                # Under the locks no writer can be at work: then it is damage.
                if is_sure or self._desk.has_seen_all or not concerned:
                    raise
                ids |= concerned
                is_sure = True


class _Task:
    """A job, and how to drive it. `before` looks at the files first."""

    def __init__(
        self, job: Callable[[], Job[Any]], kind: Kind, at: float, before: Callable[[Desk], object] | None = None
    ) -> None:
        self._job = job
        self._kind = kind
        self._at = at
        self._before = before

    def attempt(self, desk: Desk, ids: set[str]) -> Any:
        """Drive the job with some sessions locked."""
        is_strict = self._kind != "erase" and self._before is None
        with ExitStack() as locks:
            locks.callback(desk.end)
            desk.begin(locks, ids, self._at, self._kind, is_strict=is_strict)
            if self._before is not None:
                self._before(desk)
            result = drive(self._job(), desk.answer)
            if self._kind == "erase":
                # Noted twice: what is read during the erasure has to count as read before it, too.
                desk.directory.note_erasure()
                # A group that was never decided contains texts, perhaps those that are erased here.
                group.clear(desk.directory.folder, desk.directory.lock_timeout)
                commit(desk, result)
                desk.directory.note_erasure()
            elif self._kind == "write":
                commit(desk, result)
            return result


def _require_whole(desk: Desk, session_id: str, version: int | None) -> None:
    """Raise an error unless a session's log and the document made from it are sound and belong together.

    A version may be loaded if the log has all its lines, even if other versions are damaged.
    """
    directory = desk.directory
    desk.looked_at.add(session_id)
    header = directory.document(session_id) if version is None else None
    log = desk.look(session_id).log
    if version not in log.heads:
        _require_together(directory, log, header or directory.document(session_id))


def _require_together(directory: Directory, log: SessionLog, header: Header | None) -> None:
    if log.damage:
        raise log.damage[0]
    if header is None:
        return
    if log.version and log.key != header.key:
        raise InvalidSessionFile(directory.path_of(log.stem), f"it was made from another log, {header.key}")
    if header.info.version > log.version or header.end > log.end:
        raise cut_short(log, header)


def _sweep(directory: Directory, session_id: str) -> None:
    with directory.locked({session_id}):
        log = directory.log(session_id)
        if not directory.has(log):
            directory.folder.remove(intent_file(session_id), *directory.leftovers(session_id))
            directory.folder.remove(document_file(session_id), log.file)
            directory.folder.sync()
