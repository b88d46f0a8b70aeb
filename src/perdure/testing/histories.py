"""Clients that use one store at the same time, and the history of what they did.

Each client loads, saves, forks, erases, claims, appends and takes over, at random but by a seed. It notes when each
operation began and ended, and its answer. `SessionModel` defines what operations do when they are done one at a time.

Run as `python -m perdure.testing.histories`, the module is one client of a race between processes: see `play_apart`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from perdure.errors import PerdureError, SessionConflict, SessionLocked
from perdure.model.session import AgentSession
from perdure.protocols import Claim, Entry
from perdure.testing import samples
from perdure.testing.linearizability import Operation, Verdict, check
from perdure.testing.race import load_class

_LEASE = 600.0
"""Long enough that no claim lapses by itself in a history: the time that a client takes must not matter."""
_READY = b"ready\n"
History = Sequence[tuple[str, Operation]]
"""Operations, each with the id of its session."""


class Held(NamedTuple):
    """The state of a session in the model."""

    versions: tuple[tuple[str, ...], ...] = ()
    """The texts that each version shows. Without a version, the session does not exist."""
    record: tuple[str, ...] = ()
    epoch: int | None = None
    """The number of the claim that is held on the session."""
    holder: str = ""
    """The client whose claim it is."""
    lapsed: bool = False
    last_epoch: int = 0
    used: frozenset[int] = frozenset()
    """The numbers of claims on sessions of this id that were erased."""

    @property
    def shown(self) -> tuple[str, ...]:
        return self.versions[-1]

    @property
    def version(self) -> int:
        return len(self.versions)


_ABSENT = Held()


class SessionModel:
    """The effect of a history's operations on one session."""

    def first(self) -> Held:
        return _ABSENT

    def after(self, state: Held, operation: Operation) -> Iterable[Held]:
        verb: Callable[..., Iterable[tuple[tuple[Any, ...], Held]]] = getattr(self, f"_{operation.verb}")
        known = None if operation.is_open else operation.answer
        for answer, reached in verb(state, known, *operation.given):
            if known is None or tuple(known) == answer:
                yield reached

    def _create(self, state: Held, known: Any, shown: Sequence[str]) -> Iterable[tuple[tuple[Any, ...], Held]]:
        if state.version:
            yield ("SessionConflict",), state
        else:
            yield ("ok", 1), Held((tuple(shown),), used=state.used)

    def _load(self, state: Held, known: Any) -> Iterable[tuple[tuple[Any, ...], Held]]:
        yield (("ok", state.version, *state.shown) if state.version else ("none",)), state

    def _load_version(self, state: Held, known: Any, version: int) -> Iterable[tuple[tuple[Any, ...], Held]]:
        is_there = 0 < version <= state.version
        yield (("ok", version, *state.versions[version - 1]) if is_there else ("none",)), state

    def _read(self, state: Held, known: Any) -> Iterable[tuple[tuple[Any, ...], Held]]:
        yield (("ok", *state.record) if state.version else ("SessionNotFound",)), state

    def _erase(self, state: Held, known: Any) -> Iterable[tuple[tuple[Any, ...], Held]]:
        if not state.version:
            yield ("SessionNotFound",), state
        elif state.epoch is not None and not state.lapsed:
            yield ("SessionBusy",), state
        else:
            yield ("ok",), Held(used=state.used | {state.last_epoch})

    def _save(self, state: Held, known: Any, base: int, shown: Sequence[str]) -> Iterable[tuple[tuple[Any, ...], Held]]:
        if (
            not state.version or state.shown[0] != shown[0]
        ):  # the session that was loaded is gone, and so is what it says
            yield ("SessionNotFound",), state
            yield ("SessionConflict",), state
        if state.epoch is not None:
            yield (("RunInterrupted",) if state.lapsed else ("SessionBusy",)), state
        if state.version and not _follows(state, base, shown):
            yield ("SessionConflict",), state
        elif state.version and state.epoch is None:
            yield ("ok", base + 1), state._replace(versions=(*state.versions, tuple(shown)))

    def _claim(
        self, state: Held, known: Any, base: int, said: str, take_over: bool, client: str
    ) -> Iterable[tuple[tuple[Any, ...], Held]]:
        if not state.version:
            yield ("SessionNotFound",), state
            return
        if state.epoch is not None and not state.lapsed:
            yield ("SessionBusy",), state
            return
        if state.epoch is not None and not take_over:
            yield ("RunInterrupted",), state
            return
        if state.version != base:
            yield ("SessionConflict",), state
            return
        # The store chooses the number. It has to be greater than any before, and never one of an erased session's last
        # claim: otherwise the holder of that one could write. A claim without an answer is never named.
        epoch = state.last_epoch + 1 if known is None else known[1] if known[0] == "ok" else 0
        if epoch > state.last_epoch and (known is None or epoch not in state.used):
            claimed = state._replace(epoch=epoch, holder=client, lapsed=False, last_epoch=epoch)
            yield ("ok", epoch), claimed._replace(record=(*state.record, said))

    def _end(self, state: Held, known: Any, client: str) -> Iterable[tuple[tuple[Any, ...], Held]]:
        """Yield the state after a process has ended: the claims that it held lapse."""
        if state.epoch is not None and state.holder == client:
            yield ("ok",), state._replace(lapsed=True)

    def _append(self, state: Held, known: Any, epoch: int, said: str) -> Iterable[tuple[tuple[Any, ...], Held]]:
        if state.epoch == epoch:
            yield ("ok",), state._replace(record=(*state.record, said), lapsed=False)
        else:
            yield ("ClaimLost",), state

    def _release(
        self, state: Held, known: Any, epoch: int, interrupted: bool
    ) -> Iterable[tuple[tuple[Any, ...], Held]]:
        if state.epoch != epoch:
            yield ("ok",), state
        else:
            yield ("ok",), state._replace(epoch=epoch if interrupted else None, lapsed=interrupted)

    def _save_claimed(
        self, state: Held, known: Any, epoch: int, base: int, shown: Sequence[str], said: str
    ) -> Iterable[tuple[tuple[Any, ...], Held]]:
        if not state.version or state.shown[0] != shown[0]:
            yield ("SessionNotFound",), state
        if state.epoch != epoch:
            yield ("ClaimLost",), state
        elif not _follows(state, base, shown):
            yield ("SessionConflict",), state
        else:
            kept = state._replace(versions=(*state.versions, tuple(shown)), record=(*state.record, said))
            yield ("ok", base + 1), kept._replace(epoch=None, lapsed=False)


def _follows(state: Held, base: int, shown: Sequence[str]) -> bool:
    """Tell whether a save is based on the session that is there.

    A session that was erased and created again begins with another text.
    """
    return state.version == base and state.shown[0] == shown[0]


def verdicts(history: History) -> Mapping[str, Verdict[Held]]:
    """Check the history of each session separately."""
    apart: dict[str, list[Operation]] = defaultdict(list)
    for session_id, operation in history:
        apart[session_id].append(operation)
    return {session_id: check(operations, SessionModel()) for session_id, operations in apart.items()}


def broken(history: History) -> Sequence[str]:
    """Return a text for each session of a history whose answers no order explains."""
    return [f"{key}: {verdict}" for key, verdict in verdicts(history).items() if not verdict.is_linearizable]


class LosesUpdates:
    """A store from which a protection was taken away: a save does not compare versions, and the last writer wins."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def save(self, session: AgentSession, **given: Any) -> AgentSession:
        try:
            saved: AgentSession = await self._store.save(session, **given)
        except SessionConflict:
            newest = await self._store.load(session.id)
            if newest is None or given.get("claim") is not None:
                raise
            state = newest.state.with_transcript(session.state.transcript)
            saved = await self._store.save(newest.with_state(state), **given)
        return saved


class Client:
    """A client that does one operation after the other to a few sessions, by a seed, and notes each of them."""

    def __init__(
        self, store: Any, name: str, seed: str, session_ids: Sequence[str], note: Callable[[str, Operation], None]
    ) -> None:
        self._store = store
        self._name = name
        self._random = random.Random(seed)
        self._ids = session_ids
        self._note = note
        self._count = 0
        self._loaded: dict[str, AgentSession] = {}
        self._claims: dict[str, Claim] = {}
        # Weights. Erasing is rare: after it, most of what the clients know is refused.
        self._verbs = {
            self._load: 20,
            self._load_version: 6,
            self._save: 22,
            self._create: 8,
            self._fork: 6,
            self._read: 8,
            self._claim: 12,
            self._append: 16,
            self._save_claimed: 14,
            self._release: 10,
            self._erase: 2,
        }

    async def act(self, times: int) -> None:
        for _ in range(times):
            (verb,) = self._random.choices([*self._verbs], [*self._verbs.values()])
            key = self._random.choice(self._ids)
            if verb in (self._save, self._claim, self._fork) and self._random.random() < 0.7:
                await self._load(key)  # otherwise most of what it knows is old, and is refused
            await verb(key)
            if self._random.random() < 0.3:
                await asyncio.sleep(self._random.random() / 500)

    async def _load(self, key: str) -> None:
        await self._do(key, "load", (), self._loaded_by(key, None))

    async def _load_version(self, key: str) -> None:
        version = self._random.randint(1, 6)
        await self._do(key, "load_version", (version,), self._loaded_by(key, version))

    async def _loaded_by(self, key: str, version: int | None) -> tuple[Any, ...]:
        session = await self._store.load(key, version)
        if session is None:
            return ("none",)
        if version is None:
            self._loaded[key] = session
        return ("ok", session.version, *samples.texts(session))

    async def _create(self, key: str) -> None:
        new = samples.new_session(self._word(), id=key)
        await self._do(key, "create", (samples.texts(new),), self._created(new))

    async def _created(self, new: AgentSession) -> tuple[Any, ...]:
        self._loaded[new.id] = await self._store.create(new)
        return ("ok", self._loaded[new.id].version)

    async def _fork(self, key: str) -> None:
        """Fork a session under an id of its own, then load the fork: it must show what was loaded of the parent."""
        parent = self._loaded.get(key)
        if parent is None:
            return
        child_id = f"fork-{self._name}-{self._count}"
        child = samples.fork(parent, id=child_id)
        # A parent that was erased in the meantime cannot be forked. That is another promise, checked elsewhere.
        given = (samples.texts(child),)
        began = time.monotonic_ns()
        try:
            await self._store.create(child)
        except PerdureError:
            return
        self._note(child_id, Operation(self._name, "create", given, began, time.monotonic_ns(), ("ok", 1)))
        await self._load(child_id)

    async def _save(self, key: str) -> None:
        session = self._loaded.get(key)
        if session is not None:
            said = samples.say(session, self._word())
            await self._do(key, "save", (session.version, samples.texts(said)), self._saved(said))

    async def _saved(self, said: AgentSession, **given: Any) -> tuple[Any, ...]:
        self._loaded[said.id] = await self._store.save(said, **given)
        return ("ok", self._loaded[said.id].version)

    async def _read(self, key: str) -> None:
        await self._do(key, "read", (), self._recorded(key))

    async def _recorded(self, key: str) -> tuple[Any, ...]:
        return ("ok", *(entry.kind for entry in await self._store.read(key)))

    async def _claim(self, key: str) -> None:
        session = self._loaded.get(key)
        if session is not None:
            word, take_over = self._word(), self._random.random() < 0.5
            given = (session.version, word, take_over, self._name)
            await self._do(key, "claim", given, self._claimed(session, word, take_over))

    async def _claimed(self, session: AgentSession, word: str, take_over: bool) -> tuple[Any, ...]:
        given: dict[str, Any] = {"version": session.version, "owner": self._name, "lease": _LEASE}
        entries = [Entry(word)]
        claim, _ = await self._store.claim(session.id, entries=entries, take_over=take_over, **given)
        self._claims[session.id] = claim
        return ("ok", claim.epoch)

    async def _append(self, key: str) -> None:
        claim = self._claims.get(key)
        if claim is not None:
            word = self._word()
            await self._do(key, "append", (claim.epoch, word), self._appended(claim, word))

    async def _appended(self, claim: Claim, word: str) -> tuple[Any, ...]:
        await self._store.append(claim, entries=[Entry(word)])
        return ("ok",)

    async def _release(self, key: str) -> None:
        claim = self._claims.get(key)
        if claim is not None:
            interrupted = self._random.random() < 0.5
            await self._do(key, "release", (claim.epoch, interrupted), self._released(claim, interrupted))

    async def _released(self, claim: Claim, interrupted: bool) -> tuple[Any, ...]:
        await self._store.release(claim, interrupted=interrupted)
        return ("ok",)

    async def _save_claimed(self, key: str) -> None:
        session, claim = self._loaded.get(key), self._claims.get(key)
        if session is not None and claim is not None:
            said, word = samples.say(session, self._word()), self._word()
            given = (claim.epoch, session.version, samples.texts(said), word)
            await self._do(key, "save_claimed", given, self._saved(said, claim=claim, entries=[Entry(word)]))

    async def _erase(self, key: str) -> None:
        await self._do(key, "erase", (), self._erased(key))

    async def _erased(self, key: str) -> tuple[Any, ...]:
        await self._store.delete(key)
        return ("ok",)

    def _word(self) -> str:
        self._count += 1
        return f"{self._name}-{self._count}"

    async def _do(self, key: str, verb: str, given: tuple[Any, ...], doing: Awaitable[tuple[Any, ...]]) -> None:
        """Carry out an operation, and note its answer. Now and then it is cancelled, and the outcome is unknown."""
        began = time.monotonic_ns()
        # Noted before it begins: if the process is killed meanwhile, the operation is an open one.
        self._note(key, Operation(self._name, verb, given, began))
        task = asyncio.ensure_future(doing)
        if self._random.random() < 0.03:
            await asyncio.sleep(self._random.random() / 1000)
            task.cancel()
        try:
            answer = await task
        except asyncio.CancelledError:
            return
        except SessionLocked:
            return  # somebody held the file's lock for too long; whether it was written is not told
        except SessionConflict:
            answer = ("SessionConflict",)
        except PerdureError as error:
            answer = (type(error).__name__,)
        self._note(key, Operation(self._name, verb, given, began, time.monotonic_ns(), answer))


class Notes:
    """A history under way. Each operation is noted when it begins, and again when it has an answer."""

    def __init__(self) -> None:
        self._operations: dict[tuple[str, int], tuple[str, Operation]] = {}

    def note(self, session_id: str, operation: Operation) -> None:
        # The answer replaces the open operation: a client begins one at a time, by a clock that never goes back.
        self._operations[operation.client, operation.began] = (session_id, operation)

    def note_end(self, client: str) -> None:
        """Note that a client's process has ended, some time after it began its last operation."""
        mine = [each for each in self._operations.values() if each[1].client == client]
        last = max((operation.began for _, operation in mine), default=0)
        # One for each session, since each has a history of its own. The times differ because they are keys.
        for place, key in enumerate({session_id for session_id, _ in mine}, 1):
            self.note(key, Operation(client, "end", (client,), last + place))

    def history(self) -> History:
        return [*self._operations.values()]


async def play(stores: Sequence[Any], *, clients: int, operations: int, sessions: int, seed: str) -> History:
    """Let clients use handles of one store at the same time in this process, and return the history."""
    notes, ids = Notes(), [f"s{number}" for number in range(sessions)]
    started = [
        Client(stores[place % len(stores)], f"c{place}", f"{seed}/{place}", ids, notes.note) for place in range(clients)
    ]
    await asyncio.gather(*(client.act(operations) for client in started))
    return notes.history()


async def play_apart(
    contract: object,
    where: Path,
    *,
    clients: int,
    operations: int,
    sessions: int,
    seed: str,
    kills: int = 0,
    is_control: bool = False,
) -> History:
    """Let clients in processes of their own use one store, kill some of them, and return the history.

    With `is_control` they use it as `LosesUpdates`.
    """
    kind = type(contract)
    task = (inspect.getfile(kind), kind.__module__, kind.__qualname__, str(where))
    numbers = (str(operations), str(sessions), *(["control"] if is_control else []))
    notes, chance = Notes(), random.Random(seed)
    doomed = set(chance.sample(range(clients), kills))
    all_ready = asyncio.Barrier(clients)  # otherwise those that are started first are done before the last has begun

    async def play_one(place: int) -> None:
        enough = chance.randrange(4, max(5, operations)) if place in doomed else 0
        async with _client(*task, f"c{place}", f"{seed}/{place}", *numbers) as client:
            await client.begin(all_ready)
            await client.listen(notes, kill_after=enough)
        notes.note_end(f"c{place}")

    async with asyncio.TaskGroup() as together:
        for place in range(clients):
            together.create_task(play_one(place))
    return notes.history()


class _Client:
    """A client in a process of its own, which prints its operations."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name = name
        self._process = process
        self._orders, self._lines = process.stdin, process.stdout

    async def begin(self, all_ready: asyncio.Barrier) -> None:
        """Let it begin when all others are ready, too."""
        assert await self._lines.readline() == _READY, f"client {self._name} could not open the store"
        await all_ready.wait()
        self._orders.write(b"\n")

    async def listen(self, notes: Notes, *, kill_after: int) -> None:
        """Note its operations until it ends. With `kill_after`, kill it after that number of lines."""
        lines = 0
        async for line in self._lines:
            with contextlib.suppress(msgspec.DecodeError):  # the last line of one that was killed
                notes.note(*msgspec.json.decode(line, type=tuple[str, Operation]))
            lines += 1
            if lines == kill_after:
                self._process.kill()
        code = await self._process.wait()
        assert code in ((0, -9) if kill_after else (0,)), f"client {self._name} ended with {code}"


@contextlib.asynccontextmanager
async def _client(*arguments: str) -> AsyncIterator[_Client]:
    """Start a client, and kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.testing.histories", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # A line has all texts that a session shows, which may take more than the 64 KiB that asyncio allows.
        limit=1 << 24,
    )
    try:
        yield _Client(arguments[4], process)
    finally:
        # It may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _main(
    file: str,
    module: str,
    qualname: str,
    where: str,
    name: str,
    seed: str,
    operations: str,
    sessions: str,
    control: str = "",
) -> None:
    contract = load_class(file, module, qualname)()

    def note(session_id: str, operation: Operation) -> None:
        # Not through a buffer: what is noted before a kill has to arrive.
        os.write(1, msgspec.json.encode((session_id, operation)) + b"\n")

    async with contract.open_store(Path(where)) as store:
        os.write(1, _READY)
        await asyncio.to_thread(sys.stdin.readline)
        ids = [f"s{number}" for number in range(int(sessions))]
        await Client(LosesUpdates(store) if control else store, name, seed, ids, note).act(int(operations))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
