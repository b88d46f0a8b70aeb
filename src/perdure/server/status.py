"""The state of the service: its health, its counts, and a description of its API."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response

from perdure.server.call import Call
from perdure.server.metrics import CONTENT_TYPE
from perdure.server.problems import Problem


async def get_health(call: Call) -> Response:
    """Tell that the process answers, and nothing else."""
    return Response("ok\n", media_type="text/plain")


async def get_readiness(call: Call) -> Response:
    """Tell whether the store answers, and the service is not about to stop."""
    if call.service.closing.is_set():
        return Response("stopping\n", 503, media_type="text/plain")
    # The smallest read that fails if the store does not answer.
    await call.service.sessions.headers(limit=1)
    return Response("ready\n", media_type="text/plain")


async def get_metrics(call: Call) -> Response:
    """Return the service's counts in OpenMetrics' form. They are of all owners together, so no owner may read them."""
    if call.caller.owner != call.service.sessions.owner:
        what = "It counts what everybody does. Ask with a token that reaches all sessions: perdure token new --everyone"
        raise Problem(403, "OperatorNeeded", what)
    backlog = await call.service.sessions.queue(limit=call.service.settings.limits.page)
    gauges: dict[str, tuple[str, float]] = {
        "open_streams": ("Streams that are open.", call.service.open_streams),
        "sessions_waiting": ("Sessions whose messages wait for a worker, 200 at most.", len(backlog.waiting)),
        "sessions_running": ("Sessions that are being run.", sum(not each.lapsed for each in backlog.running)),
        "runs_killed": ("Runs that were killed and wait to be continued.", sum(map(_lapsed, backlog.running))),
        "messages_delayed": ("Messages that are sent later.", len(backlog.delayed)),
        "sessions_parked": ("Sessions that were parked.", len(backlog.parked)),
    }
    return Response("\n".join(call.service.metrics.lines(gauges)) + "\n", media_type=CONTENT_TYPE)


def _lapsed(each: Any) -> bool:
    return bool(each.lapsed)


async def get_openapi(call: Call) -> Response:
    """Return the description of the API."""
    return Response(_document(), media_type="application/json")


@cache
def _document() -> bytes:
    # Imported here, since the table imports this module.
    from perdure.server.openapi import document_of
    from perdure.server.table import ROUTES

    return msgspec.json.encode(document_of(ROUTES))
