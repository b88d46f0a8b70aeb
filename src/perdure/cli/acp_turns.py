"""One prompt of an editor: from the message to the end of the run, with a person's permissions in between."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from acp.interfaces import Client
from acp.schema import AllowedOutcome, PermissionOption, PromptResponse, Usage

from perdure.cli.acp_updates import Updates, said, waiting_call
from perdure.errors import InputRefused
from perdure.model.execution import PendingCall
from perdure.model.ids import SessionId, new_id
from perdure.model.loop_events import AgentStart
from perdure.model.message import Message
from perdure.model.stop import StopReason
from perdure.model.usage import Usage as Used
from perdure.server.feeds import Feeds
from perdure.sessions.reply import Reply
from perdure.sessions.sessions import Sessions

T = TypeVar("T")
_ALLOW, _REJECT = "allow", "reject"
_OPTIONS = [
    PermissionOption(option_id=_ALLOW, name="Allow", kind="allow_once"),
    PermissionOption(option_id=_REJECT, name="Reject", kind="reject_once"),
]
_REJECTED = "The user has rejected it."
_STOPS: dict[StopReason | None, Any] = {
    StopReason.USER_REQUESTED: "cancelled",
    StopReason.LENGTH: "max_tokens",
    StopReason.TOKEN_LIMIT_REACHED: "max_tokens",
    StopReason.STEPS_LIMIT_REACHED: "max_turn_requests",
    StopReason.CONTENT_FILTER: "refusal",
}


class Turn:
    """A prompt, and the run that answers it."""

    def __init__(
        self, sessions: Sessions, feeds: Feeds, editor: Client, session_id: SessionId, data: Mapping[str, Any]
    ) -> None:
        self._sessions = sessions
        self._feeds = feeds
        self._editor = editor
        self._id = session_id
        self._data = data
        self._is_cancelled = False
        self._run: str | None = None
        """The id of the run that the editor is told about. None until it has begun."""

    async def take(self, message: Message) -> PromptResponse:
        """Send a message. An earlier run that was killed, or waits for a decision, is finished first."""
        waiting = await self._brought_up()
        if waiting is not None:
            await self._decided(waiting)
        if self._is_cancelled:
            return PromptResponse(stop_reason="cancelled")
        try:
            reply = await self._decided(await self._sent(message))
        except InputRefused as error:
            await self._editor.session_update(self._id, said(error.reason))
            return PromptResponse(stop_reason="refusal")
        for call in reply.pending_calls if not self._is_cancelled else ():
            await self._editor.session_update(self._id, said(f"The result of {call.name} is waited for from outside."))
        stopped = "cancelled" if self._is_cancelled else _STOPS.get(reply.stop_reason, "end_turn")
        return PromptResponse(stop_reason=stopped, usage=_usage(reply.session.state.usage))

    async def cancel(self) -> None:
        """Stop the run of this prompt. If it has not begun, it is stopped when it does. Other runs continue."""
        self._is_cancelled = True
        if self._run is not None:
            await self._sessions.cancel(self._id, run=self._run)

    async def _brought_up(self) -> Reply[Any] | None:
        """Continue a run that was killed. Return the reply that waits for permission, or None if nothing waits."""
        view = await self._sessions.view(self._id)
        if view.activity in ("killed", "left"):
            after = await self._feeds.end_of(self._id)
            report = await self._heard(Updates(run=_run_of(view.cursor)), after, self._sessions.recover(self._id))
            for error in report.errors:
                raise error
            view = await self._sessions.view(self._id)
        return Reply(view.session) if view.activity == "waiting" else None

    async def _sent(self, message: Message) -> Reply[Any]:
        # A key of its own: the run's start names it, which tells this run from others in the session.
        key, after = new_id(), await self._feeds.end_of(self._id)
        run = await self._sessions.start(self._id, message, key=key, when_busy="queue", context_data=self._data)
        return await self._heard(Updates(key=key), after, run.result())

    async def _decided(self, reply: Reply[Any]) -> Reply[Any]:
        """Ask about calls that need permission, until there are none. A cancelled question stays open."""
        while calls := [call for call in reply.pending_calls if not call.external]:
            decisions = await self._asked(calls)
            if decisions is None:
                self._is_cancelled = True
                return reply
            execution, after = reply.session.state.execution, await self._feeds.end_of(self._id)
            assert execution is not None  # whose calls these are
            run = await self._sessions.start_settle(self._id, **decisions)
            reply = await self._heard(Updates(run=execution.execution_id), after, run.result())
        return reply

    async def _asked(self, calls: Sequence[PendingCall]) -> dict[str, Any] | None:
        """Return a person's decisions about calls as they were shown. Return None if the person cancelled."""
        approve: list[PendingCall] = []
        deny: dict[str, str] = {}
        for call in calls:
            if self._is_cancelled:
                return None
            answer = (await self._editor.request_permission(self._id, waiting_call(call), _OPTIONS)).outcome
            if not isinstance(answer, AllowedOutcome):
                return None
            if answer.option_id == _ALLOW:
                approve.append(call)
            else:
                deny[call.digest] = _REJECTED
        return {"approve": approve, "deny": deny}

    async def _heard(self, updates: Updates, after: int, work: Coroutine[Any, Any, T]) -> T:
        """Tell the editor about a run until its end. Return the result of `work`."""
        self._run = updates.run
        answer = asyncio.ensure_future(work)
        try:
            async with aclosing(self._feeds.until(self._id, after, answer)) as news:
                async for each in news:
                    for update in updates.hear(each):
                        await self._editor.session_update(self._id, update)
                    self._run = updates.run
                    # A cancellation that came before the run had begun could not name it.
                    if self._is_cancelled and isinstance(each, AgentStart) and each.loop_id == self._run:
                        await self._sessions.cancel(self._id, run=self._run)
            return answer.result()
        finally:
            answer.cancel()


def _run_of(cursor: str | None) -> str | None:
    from perdure.sessions.cursors import Place

    return None if cursor is None else Place.of(cursor).run


def _usage(used: Used) -> Usage:
    return Usage(
        total_tokens=used.total_tokens,
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        thought_tokens=used.reasoning_tokens,
        cached_read_tokens=used.cache_read_tokens,
        cached_write_tokens=used.cache_write_tokens,
    )
