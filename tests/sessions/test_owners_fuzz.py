"""Owners who try what belongs to another see nothing of it: every verb, with every secret.

Bob has one of everything. Two others, who have nothing but a session of their own, call each verb side by side: one
with an id, hash, key, cursor or word of Bob's, the other with one that nobody has. Both have to get the same answer,
and Bob's sessions have to be the same afterwards, byte for byte.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import postgres_server

import perdure
from perdure import (
    AdoptBranch,
    AgentDefinition,
    AgentSession,
    Chat,
    FileStore,
    ForkSession,
    InjectMessage,
    LongestAnswer,
    Media,
    MemoryStore,
    Message,
    PerdureError,
    PostgresStore,
    RecoveryReport,
    Reply,
    SendMessage,
    SendParallel,
    SessionId,
    Sessions,
    SqliteStore,
    ToolCall,
    codec,
    tool,
)
from perdure.archive.moving import MoveReport
from perdure.model.ids import mark_of, new_id
from perdure.model.session import SessionInfoList
from perdure.sessions.cursors import Place
from perdure.sessions.keeping import ErasureReceipt
from perdure.sessions.reply import Chunk
from perdure.testing import ScriptedDriver

pytestmark = pytest.mark.sample(2)  # make torture runs all

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda where: MemoryStore(),
    "file": lambda where: FileStore(where / "sessions"),
    "sqlite": lambda where: SqliteStore(where / "s.db"),
    "postgres": lambda where: PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where)),
}
SECRET = "zanzibar"
IMAGE = bytes(range(256)) * 32
HELPER = AgentDefinition("helper", system_prompt="helper")
CLERK = AgentDefinition("bobs-clerk")


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


def answer(request: Any) -> Any:
    asked = request.messages[-1].text
    if request.step or request.system_prompt == "helper":
        return f"done, {SECRET}"
    if "pay" in asked:
        return ToolCall("pay", {"amount": 7})
    return ToolCall("helper", {"prompt": f"Help with {SECRET}."}) if "help" in asked else f"About {asked}"


@asynccontextmanager
async def connected(kind: str, where: Path) -> AsyncIterator[Sessions]:
    async with perdure.connect(
        STORES[kind](where), driver=ScriptedDriver(answer), tools=[pay], subagents=[HELPER], compaction=None
    ) as app:
        yield app


@dataclass(frozen=True)
class Secrets:
    """Secrets by kind: those of somebody that others could try, and as many that nobody has."""

    real: Mapping[str, Sequence[Any]]
    none: Mapping[str, Sequence[Any]]

    def pairs(self, kind: str) -> list[tuple[Any, Any]]:
        return list(zip(self.real[kind], self.none[kind], strict=True))


async def bobs_estate(app: Sessions) -> Secrets:
    """Give Bob a session of every sort, and return everything by which it could be reached."""
    bob = app.of("bob")
    chat = await bob.open("bobs-chat", CLERK, tags=["bobs-tag"])
    chunks = [chunk async for chunk in chat.stream(SECRET, Media("image/png", data=IMAGE), key="bobs-key")]
    await chat.send(f"more {SECRET}")
    await chat.compact(compact_strategy="truncate", keep_last=1)
    session = await chat.session()
    await chat.fork("bobs-fork")
    await (await bob.open("bobs-boss")).send(f"help with {SECRET}")
    waiting = await (await bob.open("bobs-waiting")).send(f"pay for {SECRET}")
    await bob.open("bobs-parallel")
    await bob.execute("bobs-parallel", SendParallel(SECRET, app.loops, configs=["a", "b"], strategy=LongestAnswer()))
    await (await bob.open("bobs-hidden")).inject({"role": "user", "content": SECRET})
    await bob.delete("bobs-hidden")
    killed = await bob.open("bobs-killed")
    await app.runtime.journal.claim(killed.id, version=1, owner="another process", lease=0.1)  # type: ignore[union-attr]
    await bob.enqueue("bobs-fork", SECRET, at=NEXT_YEAR, key="bobs-later")
    await bob.schedule("bobs-digest", SECRET, cron="0 7 * * MON", session_id="bobs-fork")
    loops = [loop.loop_id for name in ("bobs-chat", "bobs-parallel") for loop in (await bob.record(name)).loops]
    every = [*await bob.list(), *await bob.list(status="deleted")]
    assert len(every) == 8  # with the sub-agent's
    names = sorted(info.id for info in every)
    plain = [name.removeprefix(mark_of("bob")) for name in names]
    calls = [waiting.pending_calls[0], waiting.pending_calls[0].id, waiting.pending_calls[0].digest]
    return Secrets(
        {
            "id": [*names, *plain],
            "message": [message.id for message in await chat.history()],
            "loop": loops,
            "block": [piece.id for piece in session.state.transcript.pieces if hasattr(piece, "covered")],
            "call": calls,
            "key": ["bobs-key", "bobs-later"],
            "hash": [codec.hash_of_bytes(IMAGE)],
            "cursor": [chunks[0].cursor, chunks[-1].cursor],
            "word": [SECRET],
            "owner": ["bob"],
            "tag": ["bobs-tag"],
            "agent": ["bobs-clerk"],
            "page": [(await bob.list(limit=2)).next],
            "file": [await exported(bob, "bobs-hidden")],
            "nothing": [None],
        },
        {
            "id": [*(SessionId.under("dan", name) for name in plain), *(f"{name}-not" for name in plain)],
            "message": [new_id() for _ in await chat.history()],
            "loop": [new_id() for _ in loops],
            "block": [new_id()],
            "call": [msgspec.structs.replace(calls[0], id=new_id()), new_id(), "0" * 32],
            "key": ["nobodys-key", "nobodys-later"],
            "hash": ["0" * 64],
            "cursor": [Place(new_id()).cursor, Place(new_id()).ended().cursor],
            "word": ["nowhere"],
            "owner": ["dan"],
            "tag": ["nobodys-tag"],
            "agent": ["nobodys-clerk"],
            "page": [await place_of_nobody(app)],
            "file": [await file_of_nobody(app)],
            "nothing": [None],
        },
    )


async def exported(sessions: Sessions, name: str) -> bytes:
    file = io.BytesIO()
    await sessions.export(file, [name])
    return file.getvalue()


async def place_of_nobody(app: Sessions) -> str | None:
    """Return the end of a page of sessions that are gone."""
    for name in ("1", "2", "3"):
        await app.of("dan").open(name)
    page = await app.of("dan").list(limit=2)
    await app.erase_owner("dan")
    return page.next


async def file_of_nobody(app: Sessions) -> bytes:
    """Return the file of a session that is gone, and that was like Bob's."""
    dan = app.of("dan")
    await (await dan.open("dans-hidden")).inject({"role": "user", "content": SECRET})
    await dan.delete("dans-hidden")
    file = await exported(dan, "dans-hidden")
    await app.erase_owner("dan")
    return file


_NEW = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
"""An id that was made on the way, and differs at each call."""
Call = Callable[[Sessions, str, Any], Any]
"""A call of a verb with a secret, by somebody who has a session of this name."""


NEXT_YEAR = datetime.now(UTC) + timedelta(days=365)


def _media(it: str) -> Media:
    return Media("image/png", hash=it, size=len(IMAGE))


def _name(call: Any) -> str:
    """Return the id of a call, as it may have been shown."""
    return str(getattr(call, "id", call))


def _on_id(verb: str, *given: Any, **named: Any) -> tuple[str, Call]:
    return "id", lambda who, mine, it: getattr(who, verb)(it, *given, **named)


def _nothing(verb: str, *given: Any, **named: Any) -> tuple[str, Call]:
    return "nothing", lambda who, mine, it: getattr(who, verb)(*given, **named)


def _narrowed(verb: str, kind: str, filter: str) -> tuple[str, Call]:
    return kind, lambda who, mine, it: getattr(who, verb)(**{filter: it})


PROBES: dict[str, list[tuple[str, Call]]] = {
    "open": [_on_id("open"), _on_id("open", CLERK), _on_id("open", CLERK, on_change="take")],
    "exists": [_on_id("exists")],
    "info": [_on_id("info")],
    "session": [_on_id("session"), _on_id("session", 1)],
    "versions": [_on_id("versions"), _on_id("versions", before=2, limit=1)],
    "snapshot": [_on_id("snapshot")],
    "view": [_on_id("view")],
    "length": [_on_id("length")],
    "history": [_on_id("history")],
    "record": [_on_id("record"), _on_id("record", limit=1)],
    "loop": [_on_id("loop", "x"), ("loop", lambda who, mine, it: who.loop(mine, it))],
    "events": [_on_id("events"), _on_id("events", after=1), _on_id("events", last=1)],
    "ancestry": [_on_id("ancestry")],
    "read": [_on_id("read", _media("0" * 64)), ("hash", lambda who, mine, it: who.read(mine, _media(it)))],
    "diff": [
        *[_on_id("diff", "mine"), ("id", lambda who, mine, it: who.diff(mine, it))],
        ("id", lambda who, mine, it: who.diff(it, it)),
    ],
    "search": [
        ("word", lambda who, mine, it: who.search(it)),
        ("word", lambda who, mine, it: who.search(it, session_id=mine)),
        ("id", lambda who, mine, it: who.search(SECRET, session_id=it)),
    ],
    "find": [("message", lambda who, mine, it: who.find(it)), ("message", lambda who, mine, it: who.find(it, limit=1))],
    **{
        verb: [
            *[_narrowed(verb, "id", name) for name in ("id", "parent")],
            *[_narrowed(verb, name, name) for name in ("owner", "tag", "agent")],
            _narrowed(verb, "page", "after"),
            _nothing(verb, status="deleted"),
            _nothing(verb, status="suspended", order="updated"),
        ]
        for verb in ("list", "headers")
    },
    "send": [
        *[_on_id("send", "hi"), _on_id("send", "hi", when_busy="queue"), _on_id("send", "hi", when_busy="steer")],
        ("id", lambda who, mine, it: who.send(it, "hi", key="bobs-key")),
        ("key", lambda who, mine, it: who.send(mine, SECRET, key=it)),
        ("hash", lambda who, mine, it: who.send(mine, "hi", _media(it))),
        ("hash", lambda who, mine, it: who.send(mine, "hi", _media(it), when_busy="queue")),
    ],
    "start": [_on_id("start", "hi"), ("hash", lambda who, mine, it: who.start(mine, "hi", _media(it)))],
    "stream": [_on_id("stream", "hi"), ("hash", lambda who, mine, it: who.stream(mine, "hi", _media(it)))],
    "enqueue": [
        *[_on_id("enqueue", "hi"), _on_id("enqueue", "hi", at=NEXT_YEAR), _on_id("enqueue", "hi", key="bobs-key")],
        ("key", lambda who, mine, it: who.enqueue(mine, SECRET, key=it)),
        ("hash", lambda who, mine, it: who.enqueue(mine, "hi", _media(it))),
        ("hash", lambda who, mine, it: who.enqueue(mine, "hi", _media(it), at=NEXT_YEAR)),
    ],
    "schedule": [
        ("id", lambda who, mine, it: who.schedule("digest", "hi", cron="0 7 * * MON", session_id=it)),
        ("id", lambda who, mine, it: who.schedule(it, "hi", cron="0 7 * * MON")),
    ],
    "schedules": [_on_id("schedules"), _nothing("schedules")],
    "unschedule": [_on_id("unschedule"), ("id", lambda who, mine, it: who.unschedule("digest", it))],
    "timers": [_on_id("timers"), _nothing("timers")],
    "queue": [_nothing("queue")],
    "unpark": [_on_id("unpark")],
    "drop_waiting": [_on_id("drop_waiting")],
    "drop_timer": [_on_id("drop_timer", "bobs-later"), ("key", lambda who, mine, it: who.drop_timer(mine, it))],
    "result": [_on_id("result", "bobs-key"), ("key", lambda who, mine, it: who.result(mine, it))],
    "follow": [
        *[_on_id("follow"), ("cursor", lambda who, mine, it: who.follow(mine, after=it))],
        ("cursor", lambda who, mine, it: who.follow("bobs-chat", after=it)),
    ],
    "retry": [_on_id("retry"), ("key", lambda who, mine, it: who.retry(mine, key=it))],
    "start_retry": [_on_id("start_retry")],
    "stream_retry": [_on_id("stream_retry")],
    "run": [_nothing("run", "hi")],
    "approve": [
        *[_on_id("approve"), _on_id("approve", wait=False)],
        ("call", lambda who, mine, it: who.approve(mine, [it])),
        ("call", lambda who, mine, it: who.approve(mine, [it], wait=False)),
    ],
    "deny": [
        *[_on_id("deny", "no"), _on_id("deny", "no", wait=False)],
        ("call", lambda who, mine, it: who.deny(mine, "no", [it])),
    ],
    "answer": [
        *[_on_id("answer", {"c": 1}), _on_id("answer", {"c": 1}, wait=False)],
        ("call", lambda who, mine, it: who.answer(mine, {_name(it): 1})),
        ("call", lambda who, mine, it: who.answer(mine, {_name(it): 1}, wait=False)),
    ],
    "settle": [
        *[_on_id("settle", approve=["c"]), _on_id("settle", deny={"c": "no"}, wait=False)],
        ("call", lambda who, mine, it: who.settle(mine, approve=[_name(it)])),
        ("call", lambda who, mine, it: who.settle(mine, answers={_name(it): 1})),
    ],
    "start_settle": [
        _on_id("start_settle", approve=["c"]),
        ("call", lambda who, mine, it: who.start_settle(mine, deny={_name(it): "no"})),
    ],
    "stream_answer": [
        _on_id("stream_answer", {"c": 1}),
        ("call", lambda who, mine, it: who.stream_answer(mine, {_name(it): 1})),
    ],
    "stream_approve": [_on_id("stream_approve"), ("call", lambda who, mine, it: who.stream_approve(mine, [it]))],
    "stream_deny": [_on_id("stream_deny", "no"), ("call", lambda who, mine, it: who.stream_deny(mine, "no", [it]))],
    "cancel": [_on_id("cancel")],
    "recover": [_on_id("recover"), _nothing("recover")],
    "execute": [
        _on_id("execute", perdure.ResetTranscript()),
        ("id", lambda who, mine, it: who.execute(mine, AdoptBranch(it))),
        ("id", lambda who, mine, it: who.execute(mine, ForkSession(dst=it))),
        ("loop", lambda who, mine, it: who.execute(mine, ForkSession(loop=it))),
        ("hash", lambda who, mine, it: who.execute(mine, InjectMessage(Message.user("hi", _media(it))))),
        ("key", lambda who, mine, it: who.execute(mine, SendMessage(SECRET, who.loops, key=it))),
    ],
    "inject": [
        _on_id("inject", {"role": "user", "content": "hi"}),
        ("hash", lambda who, mine, it: who.inject(mine, {"role": "user", "content": "hi"}, _media(it))),
    ],
    "trim": [_on_id("trim", 1)],
    "compact": [_on_id("compact")],
    "uncompact": [_on_id("uncompact"), ("block", lambda who, mine, it: who.uncompact(mine, it))],
    "reset": [_on_id("reset")],
    "undo": [_on_id("undo")],
    "rewind": [_on_id("rewind", 1), ("message", lambda who, mine, it: who.rewind(mine, it))],
    "suspend": [_on_id("suspend"), _on_id("suspend", until=NEXT_YEAR)],
    "resume": [_on_id("resume")],
    "rename": [_on_id("rename", "mine now")],
    "delete": [_on_id("delete")],
    "restore": [_on_id("restore")],
    "fork": [
        *[_on_id("fork"), _on_id("fork", "other"), ("id", lambda who, mine, it: who.fork(mine, it))],
        ("message", lambda who, mine, it: who.fork(mine, at=it)),
        ("loop", lambda who, mine, it: who.fork(mine, loop=it)),
    ],
    "adopt": [_on_id("adopt", "mine"), ("id", lambda who, mine, it: who.adopt(mine, it))],
    "new_session": [_on_id("new_session")],
    "close": [_on_id("close")],
    "subscribe": [_on_id("subscribe", print)],
    "export": [
        ("id", lambda who, mine, it: who.export(io.BytesIO(), [it])),
        ("id", lambda who, mine, it: who.export(io.BytesIO(), [mine, it], format="openai")),
        ("id", lambda who, mine, it: who.export(io.BytesIO(), [it], format="markdown", history=True)),
        ("nothing", lambda who, mine, it: who.export(io.BytesIO())),
    ],
    "import_": [("file", lambda who, mine, it: who.import_(io.BytesIO(it)))],
    "forget": [_on_id("forget", before=2)],
    "redact": [_on_id("redact", ["x"]), ("message", lambda who, mine, it: who.redact(mine, [it]))],
    "erase": [_on_id("erase")],
    "erase_owner": [("owner", lambda who, mine, it: who.erase_owner(it)), _nothing("erase_owner")],
    "purge": [_nothing("purge", status="deleted"), _nothing("purge", status="active")],
    "gc": [_nothing("gc")],
    "of": [("owner", lambda who, mine, it: who.of(it))],
    "expecting": [("id", lambda who, mine, it: who.expecting(1).rename(it, "mine now"))],
}
# The arguments of a handle's verbs, beside the session that the handle stands for.
GIVEN: dict[str, Any] = {
    "message": {"role": "user", "content": "hi"},
    "keep_last": 1,
    "to": 1,
    "branch": "mine",
    "other": "mine",
    "message_ids": ["x"],
    "before": 2,
    "reason": "no",
    "text": SECRET,
    "name": "a name",
    "key": "bobs-key",
    "part": _media("0" * 64),
    "idle": 0.0,
    "rule": perdure.Retention(versions=3),
    "case": "x",
}
OPEN_ENDED = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def verbs_of(kind: type) -> set[str]:
    return {name for name, found in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_no_verb_is_forgotten() -> None:
    """A new verb needs a line in PROBES: what of another owner's could somebody try with it?"""
    assert set(PROBES) == verbs_of(Sessions)
    # A handle's verbs are those of its session, which are called with its id.
    assert verbs_of(Chat) - set(PROBES) == {"check_and_rotate"}


async def outcome(who: Sessions, made: Callable[[], Any], it: Any) -> str:
    """Return the outcome of a call, in words that name neither the caller nor what it tried."""
    try:
        found = made()
        if inspect.isasyncgen(found):
            told = [described(each) async for each in found]
        else:
            told = described(await found if inspect.isawaitable(found) else found)
        text = f"returned {told}"
    except PerdureError as error:
        text = f"{type(error).__name__}: {error}"
    hidden = {mark_of(str(who.owner)): "<mark>", repr(str(who.owner)): "<owner>"}
    hidden |= dict.fromkeys(named_in(it), "<it>")
    for name in sorted(hidden, key=len, reverse=True):
        text = text.replace(name, hidden[name])
    return _NEW.sub("<new>", text)


def named_in(it: Any) -> list[str]:
    """Return the texts by which an answer may name what was tried."""
    if isinstance(it, bytes):
        return [f"{mark_of('bob')}bobs-hidden", f"{mark_of('dan')}dans-hidden"]
    return [it] if isinstance(it, str) else [it.id] if it is not None else []


def described(value: Any) -> Any:
    """Return the content of an answer, without ids and times, which no two sessions share."""
    match value:
        case None | bool() | int() | str():
            return value
        case Chat():
            return "a chat", value.id
        case Reply():
            return "a reply", value.text, value.queued
        case Chunk():
            return "a chunk", value.text, None if value.reply is None else value.reply.text
        case AgentSession():
            return "a session", [message.text for message in value.state.messages]
        case Mapping():
            return {key: described(each) for key, each in value.items() if key != "id"}
        case MoveReport():
            return value.sessions, value.skipped, value.messages
        case ErasureReceipt():
            return len(value.erased), len(value.left)
        case Sequence() | SessionInfoList():
            return [described(each) for each in value]
        case RecoveryReport():
            return [*value.resumed, *value.suspended, *value.errors]
    return type(value).__name__


class Probing:
    """Two owners who call the same verbs: one with Bob's secrets, one with secrets that nobody has."""

    def __init__(self, app: Sessions, number: int) -> None:
        self.spy, self.control = app.of(f"spy-{number}"), app.of(f"con-{number}")

    async def prepare(self) -> None:
        """Give each a session of its own."""
        for who in (self.spy, self.control):
            await (await who.open("mine")).inject([{"role": "user", "content": "hello"}])

    async def compare(self, label: str, call: Callable[[Sessions, Any], Any], real: Any, none: Any) -> None:
        told = await outcome(self.spy, partial(call, self.spy, real), real)
        expected = await outcome(self.control, partial(call, self.control, none), none)
        assert told == expected, f"{label} tells of what another has: {real!r}"


async def state_of(app: Sessions, session_ids: Sequence[str]) -> dict[str, Any]:
    """Return all that is stored of sessions, and their headers."""
    headers = {each: (await app.store.list(id=each)).all() for each in session_ids}
    return {each: (headers[each], await app.store.dump(each)) for each in session_ids}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", STORES if TORTURE else ("memory", "sqlite"))
async def test_nothing_of_anothers_is_read_changed_or_revealed(kind: str, tmp_path: Path) -> None:
    """Each verb is tried with each id, hash, key, cursor and word of another owner's."""
    async with connected(kind, tmp_path) as app:
        secrets = await bobs_estate(app)
        await asyncio.sleep(0.15)  # until the claim of the killed run has lapsed
        bobs = [each for each in secrets.real["id"] if each.startswith(mark_of("bob"))]
        heard: list[object] = []
        listening = await app.subscribe(bobs[0], heard.append)
        before = await state_of(app, bobs)
        for number, (verb, probes) in enumerate(PROBES.items()):
            for at, (kind_of_secret, call) in enumerate(probes):
                probing = Probing(app, 100 * number + at)
                await probing.prepare()
                for real, none in secrets.pairs(kind_of_secret):
                    label = f"{verb} (probe {at})"
                    await probing.compare(label, lambda who, it, call=call: call(who, "mine", it), real, none)
            assert await state_of(app, bobs) == before, verb
        assert not heard
        await app.rename(bobs[0], "heard of")
        assert heard  # nobody has closed the sessions that others listen to
        listening.cancel()


@pytest.mark.parametrize("kind", STORES if TORTURE else ("memory", "sqlite"))
async def test_a_session_that_has_anothers_id_as_its_name_leads_nowhere_else(kind: str, tmp_path: Path) -> None:
    """An owner may give a session any name. Every verb on it reaches the owner's own session."""
    async with connected(kind, tmp_path) as app:
        secrets = await bobs_estate(app)
        await asyncio.sleep(0.15)
        pairs = [(real, none) for real, none in secrets.pairs("id") if real.startswith(mark_of("bob"))]
        bobs = [real for real, _ in pairs]
        heard: list[object] = []
        for each in bobs:
            await app.subscribe(each, heard.append)
        before = await state_of(app, bobs)
        for number, verb in enumerate(name for name in PROBES if name not in ("erase_owner", "of")):
            probing = Probing(app, number)
            await probing.prepare()
            for real, none in pairs[:2] + pairs[-2:] if verb != "recover" else pairs:
                await probing.spy.open(real)
                await probing.control.open(none)
                for at, (kind_of_secret, call) in enumerate(PROBES[verb]):
                    if kind_of_secret in ("id", "nothing"):
                        label = f"{verb} (probe {at})"
                        await probing.compare(label, lambda who, it, call=call: call(who, "mine", it), real, none)
            assert await state_of(app, bobs) == before, verb
            assert not heard
        free = {each for each in bobs if not each.endswith("killed")}
        for each in free:
            await app.rename(each, "heard of")
        assert {event.session_id for event in heard} == free  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", STORES if TORTURE else ("memory", "sqlite"))
async def test_a_handle_on_anothers_session_is_a_handle_on_none(kind: str, tmp_path: Path) -> None:
    """No verb returns one, and a handle that is made directly reaches nothing."""
    async with connected(kind, tmp_path) as app:
        secrets = await bobs_estate(app)
        await asyncio.sleep(0.15)
        bobs = [each for each in secrets.real["id"] if each.startswith(mark_of("bob"))]
        before = await state_of(app, bobs)
        probing = Probing(app, 0)
        await probing.prepare()
        for verb in sorted(verbs_of(Chat)):
            for real, none in secrets.pairs("id"):
                await probing.compare(f"Chat.{verb}", partial(call_of_handle, verb), real, none)
            assert await state_of(app, bobs) == before, verb


def call_of_handle(verb: str, who: Sessions, session_id: str) -> Any:
    given = {**GIVEN, "target": io.BytesIO(), "subscriber": print}
    method = getattr(Chat(who, SessionId(session_id)), verb)
    parameters = inspect.signature(method).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in OPEN_ENDED]
    return method(**{name: given[name] for name in needed})
