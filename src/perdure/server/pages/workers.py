"""The page of the work that is left to workers: who runs what, what waits, is held, delayed or parked."""

from __future__ import annotations

from datetime import datetime

import msgspec
from starlette.responses import Response

from perdure.model.ids import now
from perdure.protocols import Running, Timer, Waiting
from perdure.server.call import Call
from perdure.server.pages.notices import back_to, notice_of
from perdure.server.pages.render import page
from perdure.server.pages.texts import counted, seconds, shortened
from perdure.sessions.json_forms import moment_of, of_timer
from perdure.sessions.operating import Backlog, ParkedSession
from perdure.sessions.timing import UNTIL

_SHOWN = 100
"""The number of sessions in each list."""


class WorkersQuery(msgspec.Struct, kw_only=True):
    notice: str | None = None


class TimerName(msgspec.Struct, kw_only=True):
    """A form that names a timer."""

    name: str


class Nothing(msgspec.Struct):
    """A form without fields: its path says everything."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is being run, or whose run was interrupted."""

    session_id: str
    owner: str | None
    state: str
    since: datetime | None
    lasts: str


class Process(msgspec.Struct, frozen=True):
    """A process that runs sessions, by the name that it gives itself."""

    holder: str
    work: tuple[Work, ...]

    @property
    def is_alive(self) -> bool:
        return any(each.state == "running" for each in self.work)


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """A session in which messages wait."""

    session_id: str
    owner: str | None
    count: str
    priority: int
    since: datetime
    waits: str


class Later(msgspec.Struct, frozen=True, kw_only=True):
    """A message to be sent at a time."""

    session_id: str
    name: str
    due: datetime
    after: str
    text: str
    again: str
    is_pause: bool


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is parked."""

    session_id: str
    owner: str | None
    reason: str
    tries: str
    since: datetime | None
    count: str
    has_waiting: bool


async def get_workers(call: Call) -> Response:
    """Show the processes with their runs, and the work that is left."""
    found, at = await call.sessions.queue(limit=_SHOWN), now()
    return page(
        call,
        "workers.html",
        notice=notice_of(call.query.notice),
        processes=_processes(found, at),
        waiting=[_left(each, at) for each in found.waiting],
        held=[_left(each, at) for each in found.held],
        delayed=[_later(each, at) for each in found.delayed[:_SHOWN]],
        parked=[_stopped(each) for each in found.parked[:_SHOWN]],
        counts=_counts(found),
        most=_SHOWN,
    )


async def post_retry(call: Call) -> Response:
    """Open a session that was parked. A worker sends what waits there."""
    await call.sessions.unpark(call.session_id)
    return back_to("/workers", "opened")


async def post_drop(call: Call) -> Response:
    """Take back every message that waits in a session."""
    dropped = await call.sessions.drop_waiting(call.session_id)
    return back_to("/workers", "dropped" if dropped else "nothing")


async def post_drop_timer(call: Call) -> Response:
    """Take back a message that would be sent later."""
    is_gone = await call.sessions.drop_timer(call.session_id, call.body.name)
    return back_to("/workers", "timer-dropped" if is_gone else "nothing")


def _counts(found: Backlog) -> list[tuple[str, str, int]]:
    """Return the numbers at the head of the page: a name, the part of the page that tells more, how many."""
    interrupted = sum(run.lapsed for run in found.running)
    return [
        ("running", "running", len(found.running) - interrupted),
        ("interrupted", "running", interrupted),
        ("waiting", "waiting", len(found.waiting)),
        ("held", "held", len(found.held)),
        ("delayed", "delayed", len(found.delayed)),
        ("parked", "parked", len(found.parked)),
    ]


def _processes(found: Backlog, at: datetime) -> list[Process]:
    by_holder: dict[str, list[Work]] = {}
    for run in found.running:
        by_holder.setdefault(run.holder, []).append(_work(run, run.session_id in found.handed_over, at))
    return [Process(holder, tuple(work[:_SHOWN])) for holder, work in sorted(by_holder.items())]


def _work(run: Running, is_handed_over: bool, at: datetime) -> Work:
    since = None if run.since is None else moment_of(run.since)
    state = "running" if not run.lapsed else "handed over" if is_handed_over else "killed"
    return Work(
        session_id=run.session_id,
        owner=run.owner,
        state=state,
        since=since,
        lasts="" if since is None else _since(since, at),
    )


def _left(each: Waiting, at: datetime) -> Left:
    since = moment_of(each.since)
    return Left(
        session_id=each.session_id,
        owner=each.owner,
        count=counted(each.count, "message"),
        priority=each.priority,
        since=since,
        waits=_since(since, at),
    )


def _later(timer: Timer, at: datetime) -> Later:
    due = moment_of(timer.due)
    is_pause = timer.name == UNTIL
    left = (due - at).total_seconds()
    return Later(
        session_id=timer.session_id,
        name=timer.name,
        due=due,
        after=f"in {_lasting(left)}" if left > 0 else "due",
        text="the session is opened again" if is_pause else shortened(of_timer(timer)["text"] or ""),
        again=" ".join(filter(None, (timer.cron, timer.timezone))),
        is_pause=is_pause,
    )


def _stopped(each: ParkedSession) -> Stopped:
    why = each.why
    return Stopped(
        session_id=each.session_id,
        owner=each.owner,
        reason="" if why is None else why.reason,
        tries="" if why is None else counted(why.tries, "try", "tries"),
        since=None if why is None else datetime.fromisoformat(why.at),
        count=counted(each.waiting, "message"),
        has_waiting=each.waiting > 0,
    )


def _since(then: datetime, at: datetime) -> str:
    return _lasting(max(0.0, (at - then).total_seconds()))


def _lasting(span: float) -> str:
    """Return a duration. Messages may wait for days."""
    return f"{span / 86_400:.0f} d" if span >= 2 * 86_400 else seconds(span)
