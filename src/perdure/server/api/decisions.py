"""Decide on calls that wait: for a person, or for an answer from outside.

A decision is on record in one commit, and a worker continues the run. The caller waits for that, or leaves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from perdure.server.api.answers import checked_wait, reply_of_run
from perdure.server.call import Answer, Call
from perdure.sessions.reply import Reply

Decide = Callable[[], Awaitable[Reply[Any]]]


class Approval(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The pending calls that are meant, by their digests or ids. Without `calls`, all of them are."""

    calls: list[str] | None = None
    wait: float = 60.0


class Denial(Approval, kw_only=True):
    reason: str = "denied"


class CallAnswers(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Results of calls that are made outside, by the ids or digests of the calls."""

    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    wait: float = 60.0


async def approve(call: Call) -> Answer:
    """Let pending tool calls be made, and the run continue."""
    asked: Approval = call.body
    return await _decided(call, lambda: call.sessions.approve(call.session_id, asked.calls, wait=False))


async def deny(call: Call) -> Answer:
    """Keep pending tool calls from being made. The model is told why, and the run continues."""
    asked: Denial = call.body
    return await _decided(call, lambda: call.sessions.deny(call.session_id, asked.reason, asked.calls, wait=False))


async def answer(call: Call) -> Answer:
    """Hand in the results of calls that are made outside, and let the run continue."""
    asked: CallAnswers = call.body
    answers, errors = asked.answers, asked.errors
    return await _decided(call, lambda: call.sessions.answer(call.session_id, answers, errors=errors, wait=False))


async def _decided(call: Call, decide: Decide) -> Answer:
    wait = checked_wait(call, call.body.wait)
    session = (await decide()).session
    assert session.state.execution is not None  # its calls were decided on
    return await reply_of_run(call, session.id, session.state.execution.execution_id, wait, is_new=True)
