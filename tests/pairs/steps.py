"""The verbs of a pair. Each is done through the public API; its result is noted as a fact."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any

from tests.pairs.model import TEMPERED, words_in
from tests.pairs.world import LEASE_AND_MORE, Process, World, named, pending_in

from perdure import (
    ClearSession,
    CompleteSession,
    DeleteSession,
    FailSession,
    Message,
    ModelOptions,
    Reply,
    ResumeSession,
    RunFailed,
    SessionStatus,
    StopReason,
    ToolCall,
)
from perdure.loop.compaction.draft import MARK
from perdure.protocols import Entry
from perdure.workers import InboxDispatcher, advance
from perdure.workers.timers import Bell

Step = Callable[[World, Process], Awaitable[None]]

_SOON = timedelta(seconds=5)
FAULTS = ("hook", "store", "dies")
"""Faults that are not verbs of their own: each is armed, and strikes the verb beside it."""


# Talking


async def say(world: World, at: Process, text: str, session_id: str | None = None, **options: Any) -> Reply:
    """Send a text. Once that returns, or says that the run has failed, the text is acknowledged."""
    session_id = session_id or world.main
    try:
        reply = await at.sessions.send(session_id, text, **options)
    except RunFailed:
        world.model.note("said", session=session_id, words=sorted(words_in(text)))
        raise
    world.model.note("said", session=session_id, words=sorted(words_in(text) | words_in(reply.text)))
    return reply


async def send(world: World, at: Process) -> None:
    work = say(world, at, world.new_text())
    if world.chance.random() < 0.85:
        await work
    else:
        await _leave_early(world, work)


async def temper(world: World, at: Process) -> None:
    """Send a text whose run, wherever it is continued, asks the model with options of its own."""
    text = world.new_text()
    world.model.note("tempered", words=sorted(words_in(text)))
    await say(world, at, text, model_options=ModelOptions(temperature=TEMPERED))


async def _leave_early(world: World, work: Any) -> None:
    """Cancel a request after a while, as a client does that goes away."""
    task = asyncio.create_task(work)
    await world.wait_turns(world.chance.randint(0, 60))
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        world.story.append("(its caller went away)")


async def stream(world: World, at: Process) -> None:
    text, most = world.new_text(), world.chance.choice((1, 2, 3, 99))
    heard = ""
    async with aclosing(at.sessions.stream(world.main, text)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            heard += chunk
            if chunk.reply is not None:
                world.model.note("said", session=world.main, words=sorted(words_in(text + chunk.reply.text)))
            most -= 1
            if not most:
                break
    world.model.note("heard", session=world.main, words=sorted(words_in(heard)))


async def queue(world: World, at: Process) -> None:
    await say(world, at, world.new_text(), when_busy="queue")


async def steer(world: World, at: Process) -> None:
    await say(world, at, world.new_text(), when_busy="steer")


async def key(world: World, at: Process) -> None:
    """Send under a key: under a new one, or an old request once more."""
    keys = world.model.keys
    if not keys or world.chance.random() < 0.3:
        world.model.note("key", key=f"key-{len(keys)}", text=world.new_text())
    name = world.chance.choice([*keys])
    await repeat(world, at, name, when_busy=world.chance.choice(("raise", "queue")))


async def repeat(world: World, at: Process, name: str, **options: Any) -> Reply:
    """Send the message that belongs to a key under it, and note the answer."""
    reply = await say(world, at, world.model.keys[name], key=name, **options)
    if not reply.queued:
        is_final = not reply.pending_calls and reply.stop_reason is StopReason.COMPLETED
        facts = {"version": reply.session.version, "text": reply.text, "waits": bool(reply.pending_calls)}
        world.model.note("answered", key=name, is_final=is_final, **facts)
    return reply


async def inject(world: World, at: Process) -> None:
    message = Message.user(world.new_text())
    await at.sessions.inject(world.main, message)
    world.model.note("said", session=world.main, words=sorted(words_in(message.text)))


async def cancel(world: World, at: Process) -> None:
    await at.sessions.cancel(world.main)


# Leaving messages to workers


async def enqueue(world: World, at: Process) -> None:
    text = world.new_text()
    await at.sessions.enqueue(world.main, text, priority=world.chance.randint(0, 2))
    world.model.note("said", session=world.main, words=sorted(words_in(text)))


async def later(world: World, at: Process) -> None:
    """Leave a message for later. Then take it back, let its time come, or do nothing."""
    text = world.new_text()
    queued = await at.sessions.enqueue(world.main, text, at=world.clock() + _SOON)
    world.model.note("said", session=world.main, words=sorted(words_in(text)))
    match world.chance.choice(("drop", "ring", "ring", "leave")):
        case "drop":
            world.model.note("in_doubt", what=next(iter(words_in(text))))
            await queued.drop()
        case "ring":
            await ring(world, at)


async def schedule(world: World, at: Process) -> None:
    """Schedule a message for every minute, let some minutes pass, and end that most of the time."""
    await at.sessions.schedule("news", world.new_text(), cron="* * * * *", session_id=world.main)
    for _ in range(world.chance.randint(0, 2)):
        await ring(world, at)
    if world.chance.random() < 0.6:
        await at.sessions.unschedule("news", world.main)


async def pause(world: World, at: Process) -> None:
    await at.sessions.suspend(world.main, until=world.clock() + _SOON)
    if world.chance.random() < 0.5:
        await ring(world, at)


async def work(world: World, at: Process) -> None:
    """Look at the session as a worker does."""
    await advance(at.sessions, world.main)


async def ring(world: World, at: Process) -> None:
    """Ring timers that are due within two minutes: the clock stays, or others' claims would lapse."""
    bell = Bell(at.wire, InboxDispatcher(at.wire), at.sessions.runtime.execute)  # type: ignore[arg-type]
    for timer in await at.wire.due((world.clock() + timedelta(minutes=2)).timestamp()):  # type: ignore[attr-defined]
        if await bell._rung(timer) and timer.entry is not None:
            world.model.note("said", session=timer.session_id, words=sorted(words_in(str(timer.entry.body))))


async def _while_running(world: World, at: Process) -> None:
    """Begin a slow run, most of the time, and wait until it is under way."""
    if world.is_at_work or world.chance.random() < 0.3:
        return
    world.begin_in_background(_said(world, at, world.new_text("slow")))
    for _ in range(100):
        await world.take_time()
        if not world.is_at_work or await world.look.is_claimed(world.main):
            return


async def _said(world: World, at: Process, text: str, session_id: str | None = None) -> None:
    await say(world, at, text, session_id)


async def _with_something_said(world: World, at: Process) -> None:
    session = await world.shown()
    if session is not None and session.status is SessionStatus.ACTIVE and len(session.state.messages) < 3:
        await _said(world, at, world.new_text())


# Deciding


async def approve(world: World, at: Process, *, wait: bool = True) -> None:
    """Approve what is seen: all of it, or one call. Nobody can approve what is seen in a closed session."""
    session = await world.shown()
    calls = pending_in(session) if session else []
    if session is not None and session.status in (SessionStatus.ACTIVE, SessionStatus.SUSPENDED):
        calls = await world.approve_as_seen(world.main)
    await at.sessions.approve(world.main, _chosen(world, calls) or ["nothing"], wait=wait)


async def deny(world: World, at: Process, *, wait: bool = True) -> None:
    session = await world.shown()
    calls = _chosen(world, pending_in(session) if session else [])
    await at.sessions.deny(world.main, f"no {world.new_word('d')}", calls or None, wait=wait)


async def resolve(world: World, at: Process) -> None:
    """Settle all that is seen in one step: approve some of it, deny the rest; now and then, leave the run to others."""
    session = await world.shown()
    calls = pending_in(session) if session else []
    if session is not None and session.status in (SessionStatus.ACTIVE, SessionStatus.SUSPENDED):
        calls = await world.approve_as_seen(world.main)
    approved = [call for call in calls if world.chance.random() < 0.6]
    denied = {getattr(call, "digest", call.id): f"no {world.new_word('d')}" for call in calls if call not in approved}
    given: dict[str, Any] = {"approve": named(approved), "deny": denied}
    await at.sessions.settle(
        world.main, **given if calls else {"approve": ["nothing"]}, wait=world.chance.random() < 0.6
    )


async def decide(world: World, at: Process) -> None:
    """Decide, and leave the run to others."""
    await (approve if world.chance.random() < 0.7 else deny)(world, at, wait=False)


def _chosen(world: World, calls: list[ToolCall]) -> list[Any]:
    return named(calls if not calls or world.chance.random() < 0.7 else [world.chance.choice(calls)])


async def _with_something_to_decide(world: World, at: Process) -> None:
    session = await world.shown()
    is_open = session is not None and session.status is SessionStatus.ACTIVE and not pending_in(session)
    if is_open and world.chance.random() < 0.85:
        await _said(world, at, world.new_text(world.chance.choice(("pay", "clerk"))))


# Changing the view


async def undo(world: World, at: Process) -> None:
    await at.sessions.undo(world.main)


async def rewind(world: World, at: Process) -> None:
    session = await at.sessions.session(world.main)
    ids = [message.id for message in session.state.messages]
    to = world.chance.choice(ids) if ids and world.chance.random() < 0.4 else world.chance.randint(1, session.version)
    await at.sessions.rewind(world.main, to)


async def reset(world: World, at: Process) -> None:
    await at.sessions.reset(world.main)


async def clear(world: World, at: Process) -> None:
    await at.sessions.execute(world.main, ClearSession())


async def fork(world: World, at: Process) -> None:
    session = await at.sessions.session(world.main)
    version = world.chance.choice((None, None, world.chance.randint(1, session.version)))
    made = await at.sessions.fork(world.main, f"fork-{world.new_word()}", version=version)
    world.model.note("forked", session=made.id)
    if world.chance.random() < 0.6:
        await _said(world, at, world.new_text(), made.id)


async def adopt(world: World, at: Process) -> None:
    forks = [each for each in world.model.forks if each not in world.model.erased]
    branch = world.chance.choice(forks) if forks else world.main
    shown = await at.sessions.session(branch)
    await at.sessions.adopt(world.main, branch)
    own = (message for message in shown.state.messages if MARK not in message.metadata)  # nobody said a summary
    said = {word for message in own for word in words_in(message.text)}
    world.model.note("said", session=world.main, words=sorted(said - world.model.redacted))


async def _with_a_fork(world: World, at: Process) -> None:
    if not world.model.forks:
        await fork(world, at)


async def compact(world: World, at: Process) -> None:
    strategy = world.chance.choice(("truncate", "llm", "llm", "observation_mask"))
    await at.sessions.compact(world.main, compact_strategy=strategy, keep_last=world.chance.randint(0, 3))


async def uncompact(world: World, at: Process) -> None:
    await at.sessions.uncompact(world.main)


async def _with_a_summary(world: World, at: Process) -> None:
    if world.chance.random() < 0.7:
        await compact(world, at)


async def redact(world: World, at: Process) -> None:
    """Redact every message that has a word: a caller's text, an answer, or the reason of a denial.

    Messages that were sent under a key are left alone: if one is sent again, its text is there again.
    """
    keyed = words_in(" ".join(world.model.keys.values()))
    history = await at.sessions.history(world.main)
    found: dict[str, list[str]] = {}
    for message in history:
        for word in words_in(message.text) - keyed:
            if {"user": "w", "assistant": "t", "tool": "d"}.get(message.role) == word[0] and not message.tool_calls:
                found.setdefault(word, []).append(message.id)
    word = world.chance.choice(sorted(found)) if found else ""
    world.model.note("in_doubt", what=word)
    await at.sessions.redact(world.main, found.get(word, ["nothing"]))
    world.model.note("redacted", word=word)


async def forget(world: World, at: Process) -> None:
    """Forget some of the older versions. Words said or noted so far may belong to none of the others."""
    session = await world.shown()
    for message in await at.sessions.history(world.main):
        for word in sorted(words_in(message.text)):
            world.model.note("in_doubt", what=word)
    for word in sorted(world.model.noted[world.main]):
        world.model.note("in_doubt", what=word)
    world.views.lose()
    newest = 1 if session is None else session.version
    await at.sessions.forget(world.main, before=world.chance.randint(1, newest + 1))


# A session's life


async def recover(world: World, at: Process) -> None:
    await at.sessions.recover(world.chance.choice((None, world.main)))


async def kill_a_run(world: World, at: Process) -> None:
    """Start a process that dies in the middle of a run, and let its claim lapse most of the time."""
    is_found_soon = world.chance.random() < 0.8
    if is_found_soon:
        await world.wait_for_background()
        await world.idle()
    doomed = await world.new_process()
    doomed.wire.die(world.chance)
    await world.tolerate("doomed", _said(world, doomed, world.new_text()))
    doomed.heal()
    world.clock.advance(LEASE_AND_MORE if is_found_soon else 0)


async def _with_a_killed_run(world: World, at: Process) -> None:
    if world.chance.random() < 0.8:
        await kill_a_run(world, at)


async def _with_something_to_do(world: World, at: Process) -> None:
    if world.chance.random() < 0.4:
        await kill_a_run(world, at)
    if world.chance.random() < 0.8:
        await enqueue(world, at)


async def delete(world: World, at: Process) -> None:
    """Erase the session, or hide it."""
    if world.chance.random() < 0.5:
        await at.sessions.execute(world.main, DeleteSession())
        return
    world.model.note("in_doubt", what=world.main)
    await getattr(at.sessions, "erase", at.sessions.delete)(world.main)
    if not await world.look.exists(world.main):
        world.model.note("erased", session=world.main)


async def note(world: World, at: Process) -> None:
    """Put entries on record as an adapter does, in any state of the session."""
    text, task = world.new_text(), f"task-{world.chance.randint(1, 3)}"
    await at.sessions.store.note(world.main, [Entry("acme.note", {"said": text}, task), Entry("acme.note")])
    world.model.note("noted", session=world.main, words=sorted(words_in(text)))


async def complete(world: World, at: Process) -> None:
    await at.sessions.execute(world.main, CompleteSession())


async def fail(world: World, at: Process) -> None:
    await at.sessions.execute(world.main, FailSession())


async def go_on(world: World, at: Process) -> None:
    """Do what comes next in a session: open it, decide the waiting calls, say something."""
    session = await world.shown()
    if session is None or session.status is SessionStatus.DELETED:
        return
    if pending_in(session):
        await (approve if world.chance.random() < 0.7 else deny)(world, at)
    elif session.status is not SessionStatus.ACTIVE:
        await at.sessions.execute(world.main, ResumeSession())
    else:
        await say(world, at, world.new_text())


# Faults


async def hook(world: World, at: Process) -> None:
    at.hook.arm(world.chance)


async def store(world: World, at: Process) -> None:
    at.wire.fail(world.chance)


async def dies(world: World, at: Process) -> None:
    """Die at one of the next calls; now and then, leave in good order in the middle of the work."""
    if world.chance.random() < 0.75:
        at.wire.die(world.chance)
    else:
        world.begin_in_background(_left(world, at))


async def _left(world: World, at: Process) -> None:
    await world.wait_turns(world.chance.randint(1, 150))
    world.story.append("(the process leaves)")
    await at.leave()


VERBS: dict[str, Step] = {
    step.__name__: step
    for step in (
        *(send, stream, queue, steer, approve, deny, cancel, undo, rewind, reset, clear, fork, adopt),
        *(compact, uncompact, redact, forget, recover, delete, complete, fail, key, note, hook, store, dies),
        *(enqueue, later, schedule, pause, work, decide, resolve, temper),
    )
}
"""The 34 verbs whose pairs are tried."""

PREPARED: dict[str, Step] = {
    **dict.fromkeys(("undo", "rewind", "reset", "clear", "fork", "compact", "redact", "forget"), _with_something_said),
    "queue": _while_running,
    "steer": _while_running,
    "cancel": _while_running,
    "approve": _with_something_to_decide,
    "deny": _with_something_to_decide,
    "decide": _with_something_to_decide,
    "resolve": _with_something_to_decide,
    "adopt": _with_a_fork,
    "uncompact": _with_a_summary,
    "recover": _with_a_killed_run,
    "work": _with_something_to_do,
}
"""The steps before a verb, done most of the time, so that it finds something to do."""

BEFORE: dict[Step, int] = {
    **dict.fromkeys((stream, queue, steer, approve, deny, cancel, rewind, reset, clear, fork, adopt), 2),
    **dict.fromkeys((compact, uncompact, redact, forget, key, inject, kill_a_run, note, enqueue, later, schedule), 2),
    decide: 1,
    resolve: 1,
    temper: 1,
    send: 8,
    undo: 4,
    complete: 1,
    fail: 1,
}
"""The steps that a session may have gone through before a pair, and how often."""
