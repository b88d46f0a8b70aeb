"""One redaction, from finding the messages to writing what stands in for them."""

from __future__ import annotations

from datetime import datetime

from perdure.protocols import Entry
from perdure.redaction.replacement import Replacement
from perdure.redaction.traces import MARK, Traces
from perdure.stores.engine import Job, Lock, Pledge
from perdure.stores.jobs.claiming import facts_of, require_free
from perdure.stores.jobs.erasing import count_erasure
from perdure.stores.jobs.record import read_record
from perdure.stores.jobs.redaction.findings import Findings
from perdure.stores.jobs.redaction.held import Held
from perdure.stores.jobs.redaction.replacing import Replacing, replace_messages
from perdure.stores.jobs.redaction.request import Request
from perdure.stores.jobs.saving import Pack


def redact(request: Request, at: datetime, pack: Pack) -> Job[int]:
    """Replace the content of messages. Return how many were not replaced before."""
    yield Lock((request.session_id,), "alone")
    fresh = yield from _redact(request, at, pack)
    # Even if there was nothing: what is indexed from here on waits until all traces are gone.
    yield from count_erasure()
    return fresh


def _redact(request: Request, at: datetime, pack: Pack) -> Job[int]:
    traces, held = Traces(request.ids), Held()
    replacement = Replacement(request.replacement, traces)
    found = Findings(request, traces, replacement)
    yield from found.find()
    sessions = yield from found.find_summaries(held)
    for session_id in sessions:
        require_free(session_id, (yield from facts_of(session_id)))
    if not found.rows:
        return 0
    for session_id in sessions:
        traces.find_runs((yield from read_record(session_id)))
    told = Entry(MARK, {"at": at.isoformat().replace("+00:00", "Z"), "message_ids": list(request.ids)})
    yield Pledge(request.session_id, request.pledge)
    for session_id in sessions:
        yield from Replacing(session_id, replacement, held, pack).job(told, at)
    yield from replace_messages(found.rows.values(), request.ids)
    return len(found.fresh)
