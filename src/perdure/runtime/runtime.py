"""The session runtime: create, and load → action → save, with stages, events and optimistic locking."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from perdure.errors import (
    ClaimConflict,
    ClaimLost,
    ConfigurationError,
    ErasedMeanwhile,
    InvalidData,
    PerdureError,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
)
from perdure.model.checks import expect, expect_method, expect_wait
from perdure.model.definition import AgentDefinition
from perdure.model.events import (
    SessionActionExecuted,
    SessionLoaded,
    SessionLoadFailed,
    SessionSaved,
    SessionSaveFailed,
)
from perdure.model.ids import SessionId, now
from perdure.model.indexed import check_keys
from perdure.model.lineage import SpawnRef
from perdure.model.retention import HOLD_CHANGED, is_hold
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList
from perdure.model.state import AgentState
from perdure.protocols import (
    DEFAULT_TERMS,
    Action,
    ActionContext,
    Answer,
    ClaimingRecord,
    EndsInterruption,
    Entry,
    EventHandler,
    Filters,
    Interrupted,
    Journal,
    Next,
    Repeatable,
    Saving,
    Sequel,
    SessionController,
    SessionStage,
    SessionStore,
    Terms,
)
from perdure.runtime.bus import EventBus
from perdure.runtime.hooks import PassThroughSessionController, SessionHookStack, pass_stage
from perdure.runtime.repository import SessionFactory, SessionRepository
from perdure.runtime.under_way import UnderWay

if TYPE_CHECKING:
    from perdure.model.loop_events import AnyLoopEvent
    from perdure.model.record import LoopRecord, SessionRecord
    from perdure.redaction.texts import Redaction
    from perdure.telemetry.telemetry import Telemetry

OnConflict = Literal["raise", "retry", "fork"]
"""The choices after a save by somebody else: an error, the action again, or its result as a fork."""
_ON_CONFLICT: tuple[OnConflict, ...] = get_args(OnConflict)
# With the doubling pauses of `execute`, these take about a second at most, besides the attempts themselves.
_MOST_ATTEMPTS = 10


class SessionRuntime:
    """A runtime that creates sessions, and changes them by executing actions on them. Reads change nothing."""

    def __init__(
        self,
        store: SessionStore | SessionRepository,
        *,
        controller: SessionController | None = None,
        events: EventHandler | None = None,
        filters: Iterable[str] = (),
        terms: Terms = DEFAULT_TERMS,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._telemetry = telemetry
        self.terms = expect(terms, Terms, "$.terms")
        """The terms of its claims: how long they last, and how many one owner may have at once."""
        self.filters = check_keys(filters)
        """The keys of metadata that lists can be narrowed by: what is saved here is indexed by them."""
        self._repository = store if isinstance(store, SessionRepository) else SessionRepository(store)
        controller = PassThroughSessionController() if controller is None else controller
        SessionHookStack.empty().with_hook(controller)
        self._controller = None if type(controller) is PassThroughSessionController else controller
        self._events = EventBus() if events is None else expect_method(events, "emit", "$.events")
        # Only our own bus tells whether anybody listens. A subclass, or another handler, is given every event.
        self._bus = self._events if type(self._events) is EventBus else None
        self._redaction: Redaction | None = getattr(self._repository.store, "redaction", None)
        self._factory = SessionFactory()
        self.journal: Journal | None = self._repository.journal
        """The store's journal; None if its runs are unrecorded."""
        self._under_way = UnderWay()

    def beside(self, terms: Terms) -> SessionRuntime:
        """Return a runtime with the same store, hooks and events, but other terms for claims. It is closed apart."""
        return SessionRuntime(
            self._repository,
            controller=self._controller,
            events=self._events,
            filters=self.filters,
            terms=terms,
            telemetry=self._telemetry,
        )

    async def close(self, grace: float = 0.0) -> None:
        """Wait for what is under way. What is not done after `grace` seconds is interrupted, to be recovered later."""
        await self._under_way.close(expect_wait(grace, "$.grace"))

    @property
    def is_closing(self) -> bool:
        """Return whether runs are being interrupted because the runtime is being closed."""
        return self._under_way.is_closing

    @contextmanager
    def attending(self, work: asyncio.Future[Any]) -> Iterator[None]:
        """Count work as under way while the block lasts: closing the runtime cancels it, and waits for the block."""
        over = self._under_way.begin()
        try:
            with self._under_way.cancellable(work):
                yield
        finally:
            self._under_way.end(over)

    async def follow(self, sequel: Sequel) -> None:
        """Carry out the sequel of an action, if it is needed, in a task of the runtime's own."""
        await self._under_way.follow(expect_method(sequel, "carry_out", "$.sequel"))

    async def idle(self) -> None:
        """Wait until nothing is under way: no execution, and no queued message that is being sent."""
        await self._under_way.idle()

    async def create(
        self,
        definition: AgentDefinition,
        *,
        seed: AgentState | None = None,
        session_id: str | None = None,
        owner: str | None = None,
        tags: Iterable[str] = (),
        parent: str | None = None,
        spawn: SpawnRef | None = None,
        name: str | None = None,
    ) -> AgentSession:
        """Store a new session as version 1, and return it. It may be a child: see `SessionFactory.create`."""
        made = self._factory.create(
            definition, seed, session_id=session_id, owner=owner, tags=tags, parent=parent, spawn=spawn, name=name
        )
        return await self.add(made)

    async def add(self, session: AgentSession) -> AgentSession:
        """Store a session that was made elsewhere, such as a fork or a sub-agent's, as version 1."""
        return await self._add(expect(session, AgentSession, "$.session"))

    async def _add(
        self, session: AgentSession, saving: Saving | None = None, *, erasures: int | None = None
    ) -> AgentSession:
        """Store a new session. Every session that this runtime creates passes here."""
        session = await self._pass(SessionStage.BEFORE_CREATE, session)
        session = await self._pass(SessionStage.BEFORE_SAVE, session)
        is_kept = False
        try:
            kept = await self._repository.create(self._indexed(session), saving, erasures=erasures)
            is_kept = True
            kept = await self._pass(SessionStage.AFTER_SAVE, kept)
            kept = await self._pass(SessionStage.AFTER_CREATE, kept)
        except Exception as error:
            await self._emit_save_failed(session, error, persisted=is_kept)
            raise
        await self._emit_saved(kept)
        return kept

    async def branch(self, session_id: str, action: Action, *, version: int | None = None) -> AgentSession:
        """Store the new session that an action, such as `ForkSession`, makes of a session as of a version.

        If something is redacted or erased meanwhile, the action is executed again: its result might still show that.
        """
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                return await self._branch(session_id, _require_action(action), version)
            except ErasedMeanwhile:
                if attempt == _MOST_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _branch(self, session_id: str, action: Action, version: int | None) -> AgentSession:
        erasures = await self._repository.erasures()
        session, held = await self.get_session(session_id, version=version), _Held()
        try:
            made = expect(await action.execute_on(session, self._context(held)), AgentSession, "$.action")
            return await self._add(made, erasures=erasures)
        finally:
            await held.leave()

    async def execute(
        self, session_id: str, action: Action, *, on_conflict: OnConflict = "raise", expected: int | None = None
    ) -> AgentSession:
        """Load a session, turn it into the next one with an action, and save that under the next version.

        `on_conflict` is for a save by somebody else meanwhile. "raise" raises SessionConflict. "retry" applies the
        action again if it says that it may be repeated, or has not begun. "fork" keeps its result as a fork. If the
        session does not have the `expected` version, SessionConflict is raised before the action begins.
        """
        if on_conflict not in _ON_CONFLICT:
            raise InvalidData("$.on_conflict", f"expected one of {', '.join(_ON_CONFLICT)}, got {on_conflict!r}")
        _require_action(action)
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                return await self._execute(session_id, action, on_conflict, expected)
            except SessionConflict as conflict:
                is_unspent = isinstance(conflict, ClaimConflict) and conflict.session_id == session_id
                again = on_conflict == "retry" and (is_unspent or _may_be_repeated(action)) and expected is None
                if not again or attempt == _MOST_ATTEMPTS:
                    raise
                # A random pause that doubles: those who met once should not meet again.
                await asyncio.sleep(random.random() * 0.001 * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _execute(
        self, session_id: str, action: Action, on_conflict: OnConflict, expected: int | None
    ) -> AgentSession:
        held = _Held()
        under_way = self._under_way.begin()  # first of all: an action that has only read so far is waited for too
        try:
            before = await self.get_session(session_id)
            if expected is not None and before.version != expected:
                raise SessionConflict(before.id, expected, before.version)
            return await self._applied(action, before, held, on_conflict)
        except (SessionBusy, SessionConflict) as error:
            if self._telemetry is not None and error.session_id == session_id:  # and not a sub-agent's
                self._telemetry.refused(error)
            raise
        finally:
            # Sequels begin before this execution counts as ended: in between, `close` would find nothing under way.
            try:
                for sequel in held.sequels:
                    await self._under_way.follow(sequel)
            finally:
                self._under_way.end(under_way)

    def _context(self, held: _Held) -> ActionContext:
        store, emit = self._repository.store, self._events.emit if self._redaction is None else self._emit
        return ActionContext(store, emit, self.execute, self.add, self.journal, self._under_way, held.hold, self.terms)

    async def _applied(
        self, action: Action, before: AgentSession, held: _Held, on_conflict: OnConflict
    ) -> AgentSession:
        try:
            made = await action.execute_on(before, self._context(held))
        except Interrupted as cancelled:
            with suppress(PerdureError):  # SessionSaveFailed tells of it; the caller waits only for the end
                await self._save(action, before, cancelled.made, held, "raise")
            raise asyncio.CancelledError from None
        except BaseException as error:
            await held.leave()
            if isinstance(error, PerdureError) and not isinstance(error, SessionBusy):
                await self._require_no_killed_run(action, before.id, held, error)
            raise
        if isinstance(made, Answer):
            await held.leave()
            if not isinstance(made.session, AgentSession):
                raise ConfigurationError(f"{type(action).__name__} answered without a session: {made.session!r}.")
            held.follow(made.sequel)
            return made.session
        return await self._save(action, before, made if isinstance(made, Next) else Next(made), held, on_conflict)

    async def _require_no_killed_run(
        self, action: Action, session_id: SessionId, held: _Held, error: PerdureError
    ) -> None:
        """Raise RunInterrupted if the session's run was killed: the error may be gone once that run is recovered."""
        if held.was_claimed or (isinstance(action, EndsInterruption) and action.ends_interruption):
            return
        if self.journal is not None and await self.journal.is_interrupted(session_id):
            raise RunInterrupted(session_id) from error

    async def _save(
        self, action: Action, before: AgentSession, made: Next, held: _Held, on_conflict: OnConflict
    ) -> AgentSession:
        after = made.session
        try:
            after = _checked(action, before, after)
            if self._controller is not None:
                after = await self._pass(SessionStage.AFTER_ACTION, after)
                after = await self._pass(SessionStage.BEFORE_SAVE, after)
            if self._is_heard:
                await self._emit_executed(action, before, after)
            kept = await self._saved(after, made.saving, held, _holds_changed(before.info.tags, after.info.tags))
        except BaseException as error:
            await held.leave()  # a run's work is on record, and waits there to be recovered
            if on_conflict == "fork" and isinstance(error, SessionConflict | ClaimLost):
                return await self._add(after.forked(SessionId.generate(after.info.owner), after.state), made.saving)
            raise
        if self._is_heard:
            await self._emit_saved(kept)
        for event in made.tells:
            await self._emit(event)
        return kept

    async def _saved(
        self, session: AgentSession, saving: Saving | None, held: _Held, notes: Sequence[Entry] = ()
    ) -> AgentSession:
        """Save a session. If that fails, emit SessionSaveFailed, which says whether the version has moved."""
        is_kept = False
        try:
            kept = await self._repository.save(self._indexed(session), saving, notes=notes)
            is_kept = True
            held.was_saved(self._repository.may_be_waited_for(kept.id))
            return kept if self._controller is None else await self._pass(SessionStage.AFTER_SAVE, kept)
        except Exception as error:
            await self._emit_save_failed(session, error, persisted=is_kept)
            raise

    def _indexed(self, session: AgentSession) -> AgentSession:
        return session.with_indexed(self.filters) if self.filters else session

    async def get_session(self, session_id: str, *, version: int | None = None) -> AgentSession:
        """Return a session as of a version, by default the newest."""
        try:
            session = await self._repository.load(session_id, version)
            if self._controller is not None:
                session = await self._pass(SessionStage.AFTER_LOAD, session)
        except Exception as error:
            await self._emit(SessionLoadFailed(str(session_id), str(error), type(error).__name__))
            raise
        if self._is_heard:
            await self._events.emit(SessionLoaded(session.id, session.version, session.status))
        return session

    async def get_session_info(self, session_id: str) -> AgentSessionInfo:
        """Return a session's header. Its transcript is not read, and no event is emitted."""
        return await self._repository.info(session_id)

    async def list_sessions(self, **filters: Unpack[Filters]) -> SessionInfoList:
        """Return a page of headers, the newest first, or by `order="updated"` the last updated first."""
        return await self._repository.list(**filters)

    async def record(self, session_id: str, *, limit: int | None = None, before: int | None = None) -> SessionRecord:
        """Return what ran in a session: the headers of all its loops, or of the newest `limit` before a cursor."""
        # Here and below it is imported late: a process that only sends needs no reader of records.
        from perdure.runtime.record_reader import read_record

        info = await self.get_session_info(session_id)
        return await read_record(self._repository.recorded(), info, limit=limit, before=before)

    async def loop(self, session_id: str, loop_id: str) -> LoopRecord:
        """Return the whole record of one loop: messages, turns, events."""
        from perdure.runtime.record_reader import read_loop

        return await read_loop(self._repository.recorded(), SessionId(session_id), loop_id)

    async def events(
        self, session_id: str, *, after: int | None = None, last: int | None = None, follow: bool = False
    ) -> AsyncIterator[AnyLoopEvent]:
        """Yield the events on a session's record, after a cursor, or the `last` ones. `follow` adds those to come."""
        from perdure.runtime.record_reader import read_events

        async for event in read_events(
            self._repository.recorded(), SessionId(session_id), after=after, last=last, follow=follow
        ):
            yield event

    async def _pass(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        return session if self._controller is None else await pass_stage(self._controller, stage, session)

    async def _emit(self, event: object) -> None:
        """Emit an event. Subscribers hear what is stored, and nothing that redactors would replace."""
        await self._events.emit(event if self._redaction is None else self._redaction.heard(event))

    @property
    def _is_heard(self) -> bool:
        """Return whether an event would reach anybody. One that would not is not made."""
        return self._bus is None or self._bus.has_subscribers

    async def _emit_executed(self, action: Action, before: AgentSession, after: AgentSession) -> None:
        if self._is_heard:
            versions, statuses = (before.version, after.version), (before.status, after.status)
            await self._events.emit(SessionActionExecuted(before.id, type(action).__name__, *versions, *statuses))

    async def _emit_saved(self, session: AgentSession) -> None:
        if self._is_heard:
            await self._events.emit(SessionSaved(session.id, session.version, session.status))

    async def _emit_save_failed(self, session: AgentSession, error: Exception, *, persisted: bool) -> None:
        await self._emit(SessionSaveFailed(session.id, str(error), type(error).__name__, persisted))


class _Held:
    """The claims of an action, and the sequels that follow once these are given back."""

    def __init__(self) -> None:
        self._records: list[ClaimingRecord] = []
        self._may_be_waited_for = True
        self._sequels: list[tuple[ClaimingRecord | None, Sequel]] = []

    def hold(self, record: ClaimingRecord, sequel: Sequel | None = None) -> None:
        self._records.append(record)
        self.follow(sequel, record)

    def follow(self, sequel: Sequel | None, record: ClaimingRecord | None = None) -> None:
        self._sequels += [] if sequel is None else [(record, sequel)]

    def was_saved(self, may_be_waited_for: bool) -> None:
        """Note that the session is saved, which gives its claim back."""
        self._may_be_waited_for = may_be_waited_for

    @property
    def was_claimed(self) -> bool:
        return any(record.was_claimed for record in self._records)

    @property
    def sequels(self) -> list[Sequel]:
        """Return the sequels to carry out. A claim that was refused has none: the holder of the session sees to it."""
        is_due = self._may_be_waited_for
        return [each for record, each in self._sequels if record is None or (record.was_claimed and is_due)]

    async def leave(self) -> None:
        """Give back the claims that no save has ended."""
        for record in self._records:
            await record.leave()


def _holds_changed(before: Sequence[str], after: Sequence[str]) -> Sequence[Entry]:
    """Return the entry for the record if the legal holds among the tags of a session have changed."""
    if before == after:
        return ()
    placed = [tag for tag in after if is_hold(tag) and tag not in before]
    lifted = [tag for tag in before if is_hold(tag) and tag not in after]
    at = now().isoformat().replace("+00:00", "Z")
    return (Entry(HOLD_CHANGED, {"at": at, "placed": placed, "lifted": lifted}),) if placed or lifted else ()


def _require_action(action: Action) -> Action:
    # The same question as `isinstance` with the protocol, at a tenth of its cost.
    if isinstance(action, type) or not callable(getattr(action, "execute_on", None)):
        raise ConfigurationError(f"An action needs an execute_on(session, context) method; {action!r} has none.")
    return action


def _may_be_repeated(action: Action) -> bool:
    return isinstance(action, Repeatable) and action.may_be_repeated


def _checked(action: Action, before: AgentSession, after: AgentSession) -> AgentSession:
    if not isinstance(after, AgentSession):
        raise ConfigurationError(f"{type(action).__name__} must return a session; it returned {type(after).__name__}.")
    if after.id != before.id or after.version != before.version:
        raise ConfigurationError(
            f"{type(action).__name__} returned another session than it was given. Keep what it makes as a new session "
            "with `await runtime.branch(session_id, action)`."
        )
    return after
