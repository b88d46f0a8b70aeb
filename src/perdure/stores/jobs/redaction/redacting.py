"""One redaction, from finding the messages to writing their replacements."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from perdure.errors import SessionNotFound
from perdure.protocols import Entry
from perdure.redaction.replacement import Replacement
from perdure.redaction.traces import MARK, Traces
from perdure.stores.engine import Job, Lock, Pledge
from perdure.stores.jobs.claiming import require_free
from perdure.stores.jobs.erasing import count_erasure
from perdure.stores.jobs.holding import callers_of, require_unheld
from perdure.stores.jobs.record import read_by_batch
from perdure.stores.jobs.redaction.findings import Findings
from perdure.stores.jobs.redaction.held import Held
from perdure.stores.jobs.redaction.replacing import Replacing, replace_messages
from perdure.stores.jobs.redaction.request import Request
from perdure.stores.jobs.saving import NameOf, Pack, plainly


def redact(
    request: Request, at: datetime, pack: Pack, name_of: NameOf = plainly, *, is_begun: bool = False
) -> Job[int]:
    """Replace the content of messages. Return the number of messages that were not replaced before.

    Everything is read before the lock is taken, since others wait while it is held. If one of the sessions has changed
    by then, everything is read again.
    """
    gone: set[str] = set()
    while True:
        try:
            plan = yield from _planned(request, at, pack, name_of)
        except SessionNotFound as error:
            if error.session_id in (request.session_id, *gone):
                raise
            gone.add(error.session_id)
            continue  # a fork was erased while it was read, and is not concerned any more
        concerned = tuple(dict.fromkeys((request.session_id, *plan.found.facts)))
        callers = yield from callers_of(concerned)
        yield Lock(tuple(dict.fromkeys((*concerned, *callers))), "alone")
        if (yield from plan.found.still_hold()):
            break
    if not is_begun:  # one that was cut short has passed this already, and has to be finished
        yield from require_unheld(concerned)
    if plan.found.rows:
        # Before the first write: an engine whose commit is cut short finishes the redaction by it.
        yield Pledge(request.session_id, request.pledge)
        for replacing in plan.sessions:
            yield from replacing.write()
        yield from replace_messages(plan.found.rows.values(), request.ids)
    # Even if nothing was replaced: messages that are indexed from here on wait until all traces are gone.
    yield from count_erasure()
    return len(plan.found.fresh)


class _Plan(NamedTuple):
    """The replacements to write: messages in logs, and their content elsewhere in sessions."""

    found: Findings
    sessions: list[Replacing]


def _planned(request: Request, at: datetime, pack: Pack, name_of: NameOf) -> Job[_Plan]:
    traces, held = Traces(request.ids), Held()
    replacement = Replacement(request.replacement, traces)
    found = Findings(request, traces, replacement)
    yield from found.find()
    sessions = yield from found.find_summaries(held)
    for session_id in sessions:
        require_free(session_id, found.facts[session_id])
    plan = _Plan(found, [])
    if not found.rows:
        return plan
    for session_id in sessions:
        for entries in (yield from read_by_batch(session_id)):
            traces.find_runs(entries)
    told = Entry(MARK, {"at": at.isoformat().replace("+00:00", "Z"), "message_ids": list(request.ids)})
    for session_id in sessions:
        replacing = Replacing(session_id, found.facts[session_id], replacement, held, pack, name_of)
        yield from replacing.find(told, at)
        plan.sessions.append(replacing)
    return plan
