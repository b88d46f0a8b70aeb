"""Decisions of a front end on calls that wait: answers to interrupts, and results of its own tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from perdure.errors import InvalidData
from perdure.model.execution import PendingCall
from perdure.server.agui.inputs import ResumeEntry, ToolMessage
from perdure.server.agui.messages import text_of
from perdure.server.problems import Problem

_CANCELLED = "It was cancelled by the user."
_DENIED = "No reason was given."


class Decisions(msgspec.Struct):
    """Decisions on calls, by their digests or ids: the arguments of `Sessions.settle`."""

    approve: list[str] = []
    deny: dict[str, str] = {}
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def take(self, entry: ResumeEntry, call: PendingCall, path: str) -> None:
        """Add the answer to an interrupt."""
        name, payload = entry.interrupt_id, entry.payload
        if call.external:
            if entry.status == "cancelled":
                self.errors[name] = _CANCELLED
            else:
                self.answers[name] = payload
        elif entry.status == "cancelled":
            self.deny[name] = _CANCELLED
        elif _is_approval(payload, path):
            self.approve.append(name)
        else:
            self.deny[name] = str(payload.get("reason") or _DENIED) if isinstance(payload, dict) else _DENIED


def decisions_in(
    resume: Sequence[ResumeEntry], results: Iterable[ToolMessage], calls: Iterable[PendingCall]
) -> Decisions:
    """Return what a front end has decided about pending calls. Raise a Problem if one of them no longer waits."""
    # A sub-agent's calls are approved together with its caller's call, and answered from outside one by one.
    waiting = {leaf.digest: leaf for call in calls for leaf in (call, *call.leaves)}
    decisions = Decisions()
    for place, entry in enumerate(resume):
        if entry.interrupt_id not in waiting:
            what = "Nothing waits under that id any more. Send `messages: []` alone to see how the thread stands."
            raise Problem(409, "InterruptClosed", what, facts={"interrupt": entry.interrupt_id})
        decisions.take(entry, waiting[entry.interrupt_id], f"$.resume[{place}]")
    for message in results:
        if message.error is None:
            decisions.answers[message.tool_call_id] = text_of(message)
        else:
            decisions.errors[message.tool_call_id] = message.error
    return decisions


def _is_approval(payload: Any, path: str) -> bool:
    if isinstance(payload, bool):
        return payload
    if not isinstance(payload, dict) or not isinstance(payload.get("approved"), bool):
        raise InvalidData(f"{path}.payload", 'expected {"approved": true}, or {"approved": false, "reason": "…"}')
    # To ignore edited arguments, for example, would approve another call than the front end means.
    for name in payload.keys() - {"approved", "reason"}:
        raise InvalidData(
            f"{path}.payload.{name}", "a call is approved as it was shown; deny it, and say what is wrong"
        )
    approved: bool = payload["approved"]
    return approved
