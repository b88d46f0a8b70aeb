"""One redaction, from finding the messages to writing what stands in for them."""

from __future__ import annotations

from datetime import datetime

from perdure.protocols import Entry
from perdure.redaction.replacement import Replacement
from perdure.redaction.traces import MARK, Traces
from perdure.stores.jobs.redaction.request import Request
from perdure.stores.jobs.redaction.versions import changed_version
from perdure.stores.redaction.bench import Bench, Redone
from perdure.stores.redaction.findings import Findings


def redact(bench: Bench, request: Request, at: datetime) -> int:
    """Replace the content of messages; how many were not replaced before."""
    traces = Traces(request.ids)
    replacement = Replacement(request.replacement, traces)
    found = Findings(request.ids, traces, replacement)
    found.find(bench, request.session_id)
    sessions = found.find_summaries(bench)
    for session_id in sessions:
        bench.require_free(session_id)
    if not found.rows:
        return 0
    for session_id in sessions:
        traces.find_runs(bench.entries(session_id))
    told = Entry(MARK, {"at": at.isoformat().replace("+00:00", "Z"), "message_ids": list(request.ids)})
    redone = [
        Redone(
            session_id,
            [new for old in bench.versions(session_id) if (new := changed_version(replacement, old))],
            replacement.changed_entries(bench.entries(session_id)),
            replacement.changed_entries(bench.inbox(session_id)),
            told,
        )
        for session_id in sessions
    ]
    bench.replace(list(found.rows.values()), redone)
    return len(found.fresh)
