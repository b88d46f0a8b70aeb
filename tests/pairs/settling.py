"""After a pair: everything that was begun is ended, as people and a restarted service would do it."""

from __future__ import annotations

from tests.pairs.steps import repeat, ring, say
from tests.pairs.world import LEASE_AND_MORE, Process, World, named, pending_in

from perdure import PerdureError, ResumeSession, RunFailed, SessionStatus
from perdure.workers import advance

CLOSED = (SessionStatus.COMPLETED, SessionStatus.FAILED)
ROUNDS = 8
MOST_QUEUED = 200
"""More items than a process that is killed after a second has left in the inbox."""
SHORT = 60
"""The number of looks whether the living have done their work, where claims of the dead may never lapse."""


async def settle(world: World, *, has_died: bool = False) -> None:
    """Recover killed runs, open closed sessions, decide waiting calls, and let everything queued be sent."""
    await world.wait_for_background()
    has_died |= any(each.wire.is_dead for each in world.processes)
    has_lost_its_store = has_died or any(each.wire.has_failed for each in world.processes)
    has_failed = has_lost_its_store or any(each.hook.has_raised for each in world.processes)
    for process in world.processes:
        process.heal()
    if has_lost_its_store:
        await world.idle(SHORT)
    else:
        await _require_no_claim(world)
    world.clock.advance(LEASE_AND_MORE if has_failed else 0)
    at = await world.process()
    await _recover(world, at)
    await _work(world, at)
    was_shut = await _is_shut(world)
    await _end_all(world, at)
    await _require_empty_inbox(world, is_excused=has_failed or was_shut)
    await _use(world, at)
    await _repeat_keys(world, at)
    await _end_all(world, at)


async def _end_all(world: World, at: Process) -> None:
    """Decide calls that wait for a person, and let a worker send the messages behind them, until none waits."""
    for _ in range(MOST_QUEUED):
        for session_id in (world.main, *world.model.forks):
            await _end(world, at, session_id)
        await world.idle()
        session = await world.shown()
        if session is None or not (pending_in(session) or await world.waiting_in(world.main)):
            return
        if session.status is SessionStatus.DELETED:
            return
        await _work(world, at)
    world.model.note("broken", what=f"5: runs of {world.main} still wait after {MOST_QUEUED} were brought to their end")


async def _work(world: World, at: Process) -> None:
    """End schedules, let all delayed messages come due, and look at each session as a worker does."""
    for timer in await world.look.timers():
        if timer.cron is not None:
            await world.look.drop_timer(timer.session_id, timer.name)
    await ring(world, at)
    for session_id in (world.main, *world.model.forks):
        await world.tolerate("work", _advance(at, session_id))


async def _advance(at: Process, session_id: str) -> None:
    await advance(at.sessions, session_id)


async def _require_no_claim(world: World) -> None:
    """Require that no claim is left once nobody works. Queued messages may still be sent for a moment."""
    await world.idle()
    for process in world.processes:
        if not process.is_gone:  # a session that waits for a person looks idle while the queued message is being noted
            await process.sessions.runtime.idle()
    if await world.look.exists(world.main) and await world.look.is_claimed(world.main):
        world.model.note("broken", what="6: a claim stands though nobody works, and nothing has failed")
        world.clock.advance(LEASE_AND_MORE)


async def _is_shut(world: World) -> bool:
    session = await world.shown()
    return session is not None and session.status in CLOSED


async def _recover(world: World, at: Process) -> None:
    report = await at.sessions.recover()
    for session_id, reason in report.failed:
        world.model.note("broken", what=f"5: {session_id} cannot be recovered: {reason}")
    for session_id in report.busy:
        world.model.note("broken", what=f"6: {session_id} is busy when it is to be recovered")


async def _end(world: World, at: Process, session_id: str) -> None:
    """Decide the calls that wait in a session, whatever the outcome, and open it again if it was closed."""
    for _ in range(ROUNDS):
        session = await world.look.load(session_id)
        if session is None or session.status is SessionStatus.DELETED:
            return
        if session.status in CLOSED or (session.status is SessionStatus.SUSPENDED and not pending_in(session)):
            if await world.tolerate("resume", _resume(at, session_id)) is not None:
                return
            continue
        if not pending_in(session):
            return
        await world.tolerate("decide", _decide(world, at, session_id))
    world.model.note("broken", what=f"5: {session_id} still waits after {ROUNDS} decisions")


async def _resume(at: Process, session_id: str) -> None:
    await at.sessions.execute(session_id, ResumeSession())


async def _decide(world: World, at: Process, session_id: str) -> None:
    if world.chance.random() < 0.5:
        calls = await world.approve_as_seen(session_id)
        await at.sessions.approve(session_id, world.chance.choice((None, named(calls))))
    else:
        await at.sessions.deny(session_id, f"no {world.new_word('d')}")


async def _require_empty_inbox(world: World, *, is_excused: bool) -> None:
    """Require that messages left with a run have been sent by now, unless a run failed or the session is shut."""
    await world.idle()
    session = await world.shown()
    if session is None or is_excused or session.status is not SessionStatus.ACTIVE:
        return
    if await world.waiting_in(world.main):
        world.model.note("broken", what="1: a message still waits in the inbox of an idle session")


async def _use(world: World, at: Process) -> None:
    """Send a message to an active session, whatever it has been through; queued messages are sent with it."""
    session = await world.shown()
    if session is None or session.status is not SessionStatus.ACTIVE:
        return
    try:
        await say(world, at, world.new_text())
    except RunFailed:
        return
    except PerdureError as error:
        world.model.note("broken", what=f"6: an active session takes no message: {type(error).__name__}: {error}")
    await world.idle()
    await _end(world, at, world.main)


async def _repeat_keys(world: World, at: Process) -> None:
    """Send under every key once more, and once again: the second answer costs nothing and equals the first."""
    for name in world.model.keys:
        session = await world.shown()
        if session is None or session.status is not SessionStatus.ACTIVE:
            return
        asked = at.mind.requests
        error = await world.tolerate(name, _answered(world, at, name))
        if isinstance(error, RunFailed) and at.mind.requests == asked:
            world.model.note("broken", what=f"7: {name} fails for ever: its run failed, and is not run again")
        if error is None:
            await _end(world, at, world.main)
            await _repeat_once_more(world, at, name)


async def _repeat_once_more(world: World, at: Process, name: str) -> None:
    before, asked = world.model.answers[name][-1], at.mind.requests
    error = await world.tolerate(name, _answered(world, at, name))
    session = await world.shown()
    if error is not None and not before.is_final:
        return  # it was stopped, and may be run again
    if error is not None:
        world.model.note("broken", what=f"7: {name} was answered, and then: {type(error).__name__}: {error}")
    elif before.is_final and at.mind.requests > asked:
        world.model.note("broken", what=f"7: {name} was answered, and is run again")
    elif world.model.answers[name][-1].waits and session is not None and not pending_in(session):
        world.model.note("broken", what=f"7: {name} is answered with calls that wait, and nothing waits")


async def _answered(world: World, at: Process, name: str) -> None:
    await repeat(world, at, name)
