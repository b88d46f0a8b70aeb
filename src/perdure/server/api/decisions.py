"""Decide on calls that wait: for a person, or for an answer from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec

from perdure.server.api.messages import checked_wait
from perdure.server.call import Answer, Call
from perdure.sessions.json_forms import of_reply
from perdure.sessions.reply import Reply


class Approval(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which pending calls are meant, by their digests or ids: all of them without."""

    calls: list[str] | None = None
    wait: float = 60.0


class Denial(Approval, kw_only=True):
    reason: str


class CallAnswers(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What calls that are made outside have come to, by their ids or digests."""

    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    wait: float = 60.0


async def approve(call: Call) -> Answer:
    """Let pending tool calls be made, and the run continue."""
    asked: Approval = call.body
    return await _decided(call, call.sessions.approve(call.session_id, asked.calls))


async def deny(call: Call) -> Answer:
    """Keep pending tool calls from being made; the model is told why, and the run continues."""
    asked: Denial = call.body
    return await _decided(call, call.sessions.deny(call.session_id, asked.reason, asked.calls))


async def answer(call: Call) -> Answer:
    """Hand in what calls that are made outside have come to, and let the run continue."""
    asked: CallAnswers = call.body
    return await _decided(call, call.sessions.answer(call.session_id, asked.answers, errors=asked.errors))


async def _decided(call: Call, run: Awaitable[Reply[Any]]) -> Answer:
    wait = checked_wait(call, call.body.wait)
    return Answer(of_reply(await asyncio.wait_for(asyncio.shield(run), wait or None)))
