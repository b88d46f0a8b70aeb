"""A session under test: processes that work on it through the public API, the bank they charge, and the known facts."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from tests import postgres_server
from tests.pairs.bank import CLERK, TELLER, Bank, canonical
from tests.pairs.mind import ASKS, Mind, Quirk
from tests.pairs.model import Model, Views, words_in
from tests.pairs.wire import Died, Hook, HookRaised, Tamper, Wire

import perdure
from perdure import AgentSession, InvalidData, PerdureError, Sessions, SessionStatus, ToolCall
from perdure.actions.inbox import Inbox
from perdure.model.ids import use
from perdure.protocols import JournalEntry
from perdure.stores.urls import store_of
from perdure.testing import FrozenClock

LEASE_AND_MORE = 61.0
MAIN = "main"


class Process:
    """A connection to the store, as a separate process would have it."""

    def __init__(self, world: World) -> None:
        self.wire = Wire(world.new_store(), Random(world.chance.random()), world.tampers)
        self.hook = Hook()
        self.mind = Mind(world, self.wire.require_alive)
        tools = Bank(world, self.wire.require_alive).tools(in_thread=not world.is_exact)
        self.sessions = connect_hooked(self.wire, self.hook, driver=self.mind, tools=tools, subagents=[CLERK])
        self.has_left = False
        self._is_open = False

    async def open(self) -> None:
        await self.sessions.__aenter__()
        self._is_open = True

    async def leave(self) -> None:
        """Leave in good order, whatever is still under way."""
        self.has_left = True
        await self.sessions.__aexit__(None, None, None)

    @property
    def is_gone(self) -> bool:
        return self.has_left or self.wire.is_dead

    def heal(self) -> None:
        self.wire.heal()
        self.hook.heal()

    @property
    def is_armed(self) -> bool:
        """True if a fault still waits to strike here."""
        return not self.is_gone and (self.wire.is_armed or self.hook.is_armed)

    @property
    def has_failed(self) -> bool:
        return self.wire.has_failed or self.hook.has_raised

    async def close(self) -> None:
        """Release the threads and handles, also those of a dead process, which nobody else knows."""
        if not self._is_open or self.has_left:
            return
        if self.wire.is_dead:
            await self.wire.store.__aexit__(None, None, None)
        else:
            await self.leave()


def connect_hooked(store: Any, hook: Hook, **options: Any) -> Sessions:
    """Connect with a controller; by the runtime, until `connect` takes one itself."""
    if "controller" in inspect.signature(perdure.connect).parameters:
        return perdure.connect(store, controller=hook, **options)  # type: ignore[call-arg]
    sessions = perdure.connect(store, **options)
    sessions.runtime._controller = hook
    return sessions


class World:
    """One case's store, with everything on it. All that is random comes from its seed."""

    def __init__(
        self,
        seed: int,
        kind: str,
        folder: Path,
        *,
        model: Model | None = None,
        tampers: Mapping[str, Tamper] | None = None,
        limit: int = 0,
    ) -> None:
        self.seed = seed
        self.kind = kind
        self.folder = folder
        self.chance = Random(f"world {seed}")
        self.quirk = Quirk(self.chance)
        self.model = model or Model()
        self.tampers = tampers or {}
        self.limit = limit
        """Payments above it need somebody's approval."""
        self.clock = FrozenClock(tick=0.0001)
        self.main = MAIN
        self.processes: list[Process] = []
        self.views = Views()
        self.story: list[str] = []
        """The actions so far, for readers of a failure."""
        self._words = count(1)
        self._ids = count(1)
        self._id_bits = Random(f"ids {seed}")
        self._memory = store_of("memory://")
        self._background: list[asyncio.Task[None]] = []

    # Processes and stores

    def new_store(self) -> Any:
        match self.kind:
            case "memory":
                return self._memory
            case "file":
                return store_of(f"file://{self.folder / 'files'}")
            case "sqlite":
                return store_of(f"sqlite:///{self.folder / 'sessions.db'}")
        return store_of(postgres_server.url_of(self.folder))

    async def begin(self, *, is_new: bool = True) -> None:
        """Open the store, and create the session in it."""
        self.look = Wire(self.new_store(), tampers=self.tampers)
        self.face = perdure.connect(self.look, driver=Mind(self, lambda: None))
        await self.face.__aenter__()
        if is_new:
            process = await self.process()
            await process.sessions.open(self.main, TELLER)

    async def process(self) -> Process:
        """Return a living process: the present one, or a new one."""
        alive = [each for each in self.processes if not each.is_gone]
        return alive[0] if alive else await self.new_process()

    async def second_process(self) -> Process:
        alive = [each for each in self.processes if not each.is_gone]
        return alive[1] if len(alive) > 1 else await self.new_process()

    async def new_process(self) -> Process:
        process = Process(self)
        await process.open()
        self.processes.append(process)
        return process

    async def end(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for process in self.processes:
            await process.close()
        await self.face.__aexit__(None, None, None)
        if self.kind == "postgres":
            schemas = [postgres_server.schema_of(self.folder)]
            await asyncio.to_thread(postgres_server.drop, postgres_server.dsn(), schemas)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_exact(self) -> bool:
        """True if a case plays the same each time: without threads and clocks, only the event loop's turns decide."""
        return self.kind == "memory"

    async def wait_turns(self, turns: int) -> None:
        """Let the event loop turn a few times."""
        for _ in range(turns):
            await asyncio.sleep(0)

    async def take_time(self) -> None:
        """Wait for a moment, in which others continue their work."""
        for _ in range(10 if self.is_exact else 1):
            await asyncio.sleep(0 if self.is_exact else 0.001)

    # What was said and decided

    def new_word(self, kind: str = "w") -> str:
        return f"{kind}{next(self._words)}x{self.seed}"

    def new_text(self, asks: str | None = None) -> str:
        return f"{asks or self.chance.choice(ASKS)} {self.new_word()}"

    def new_id(self) -> str:
        """Return an id in the form of perdure's own, the same in every run of a case."""
        number, random = next(self._ids), self._id_bits.getrandbits(62)
        return str(uuid.UUID(int=(0x019000000000 + number) << 80 | 7 << 76 | 2 << 62 | random))

    async def shown(self) -> AgentSession | None:
        """Return the session as anybody sees it; None if it is gone."""
        return await self.look.load(self.main)

    async def family(self, session_id: str) -> list[AgentSession]:
        """Return a session and its sub-agents' sessions, and theirs."""
        found = await self.look.load(session_id)
        if found is None:
            return []
        children = [each.id for each in await self.look.list(parent=session_id, limit=1000) if each.spawn_ref]
        return [found, *[member for child in children for member in await self.family(child)]]

    async def approve_as_seen(self, session_id: str) -> list[ToolCall]:
        """Note every call that a person sees waiting before approving it. Return those of the session itself."""
        family = await self.family(session_id)
        calls = pending_in(family[0]) if family else []
        shows_all = all(hasattr(call, "waits_for") for call in calls)
        for member in family[:1] if shows_all else family:
            for call in pending_in(member):
                self._approve(member.id, call)
        return calls

    def _approve(self, session_id: str, call: ToolCall) -> None:
        """Note a call as approved; for a sub-agent's call, note the calls that it is shown to wait for."""
        below = getattr(call, "waits_for", ())
        for each in below:
            self._approve(call.session_id, each)  # type: ignore[attr-defined]
        if not below:
            self.model.note("approved", session=session_id, call=call.id, arguments=canonical(call.arguments))

    async def see(self, session_id: str | None = None) -> None:
        """Note the texts of the history: they were shown, so they have to stay."""
        session_id = session_id or self.main
        if await self.look.exists(session_id):
            said = {word for message in await self.face.history(session_id) for word in words_in(message.text)}
            self.model.note("said", session=session_id, words=sorted(said - self.model.redacted))

    async def follow(self) -> None:
        """Add the views of the versions made since."""
        session = await self.shown()
        first = max(self.views.version + 1, session.info.first_version if session else 0)
        for version in range(first, session.version + 1 if session else 0):
            self.views.follow(version, ids_in(await self.look.load(self.main, version)))

    async def compare_undo(self, error: BaseException | None) -> None:
        """Compare an undo's view with the one before the last change; at the first, nothing is left to undo."""
        session = await self.shown()
        if session is None or self.views.stack is None:
            return
        if error is not None:
            if isinstance(error, InvalidData) and self.views.can_undo:
                self.model.note("broken", what="0: undo finds nothing, and there is something to be undone")
            return
        expected, found = self.views.undo(session.version), ids_in(session)
        if found != expected:
            self.model.note("broken", what=f"0: undo shows {len(found)} messages, not the view before the last change")
            self.views.lose()

    # Work

    def begin_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(asyncio.create_task(self.tolerate("background", work)))

    @property
    def is_at_work(self) -> bool:
        return any(not task.done() for task in self._background)

    async def wait_for_background(self) -> None:
        while self.is_at_work:
            await asyncio.wait(self._background)

    async def idle(self, patience: int = 200) -> None:
        """Wait until no run is under way and no message waits, as long as something changes."""
        seen: tuple[int, int, list[int]] | None = None
        left = patience
        while left and (session := await self.shown()) is not None:
            inbox = await self.waiting_in(self.main)
            is_sent = session.status is not SessionStatus.ACTIVE or not inbox
            if is_sent and not await self.look.is_claimed(self.main):
                return
            now = (session.version, len(await self.look.read(self.main)), inbox)
            left = left - 1 if now == seen else patience
            seen = now
            await self.take_time()

    async def waiting_in(self, session_id: str) -> list[int]:
        """Return the numbers of the messages that still wait to be sent. A steering message may overtake others."""
        inbox = await self.look.read(session_id, inbox=True)
        return [entry.seq for entry in inbox if await self._waits(session_id, entry)]

    async def _waits(self, session_id: str, entry: JournalEntry) -> bool:
        return entry.kind == "queue" or (
            entry.kind == "steer" and not await Inbox(self.look, session_id).was_delivered(entry)
        )

    async def tolerate(self, name: str, work: Coroutine[Any, Any, None]) -> BaseException | None:
        """Do something that may be refused. Note a broken promise if it fails in any other way."""
        try:
            await work
        except (PerdureError, HookRaised, Died) as error:
            self.story.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
            return error
        except Exception as error:
            self.story.append(f"{name}: {type(error).__name__}: {error}")
            self.model.note("broken", what=f"0: {name} raised {type(error).__name__}: {str(error)[:200]}")
            return error
        self.story.append(f"{name}: done")
        return None


def ids_in(session: AgentSession) -> tuple[str, ...]:
    """Return the ids of the messages that a session shows."""
    return tuple(message.id for message in session.state.messages)


def pending_in(session: AgentSession) -> list[ToolCall]:
    """Return the calls that wait for a person in a session."""
    execution = session.state.execution
    return list(execution.pending_calls) if execution else []


def named(calls: Iterable[ToolCall]) -> list[Any]:
    """Return calls as a decision names them: as they were shown, or by their ids if those are not accepted."""
    return [call if hasattr(call, "digest") else call.id for call in calls]


@asynccontextmanager
async def opened(world: World, *, is_new: bool = True) -> AsyncIterator[World]:
    """Keep a world open: with its own clock and ids, and runs that look into their inbox often."""
    often = 0.0 if world.is_exact else 0.002
    with _looking_every(often), use(clock=world.clock, ids=world.new_id):
        await world.begin(is_new=is_new)
        try:
            yield world
        finally:
            await world.end()


@contextmanager
def _looking_every(seconds: float) -> Iterator[None]:
    """Let runs look into their inbox every `seconds`. A case lasts milliseconds, and its runs are to be steered too."""
    (module,) = [each for each in map(_module, ("running", "inbox")) if hasattr(each, "LOOK_EVERY")]
    before, module.LOOK_EVERY = module.LOOK_EVERY, seconds
    try:
        yield
    finally:
        module.LOOK_EVERY = before


def _module(name: str) -> Any:
    """Return the module of an action, or None if no module has that name."""
    with suppress(ModuleNotFoundError):
        return import_module(f"perdure.actions.{name}")
    return None
