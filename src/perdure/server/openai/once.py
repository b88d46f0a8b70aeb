"""Responses that are not kept: `store: false`. They are answered in this process, and nothing is left of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace
from starlette.responses import Response

from perdure.aio import finish_despite_cancel
from perdure.errors import InvalidData, RunFailed
from perdure.model.ids import SessionId, new_id, now
from perdure.model.loop_events import MessageEnd, MessageUpdate, ToolExecutionEnd, ToolExecutionStart
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.usage import Usage
from perdure.server.call import Answer, Call
from perdure.server.feeds import News, Piece
from perdure.server.openai.asking import Asked
from perdure.server.openai.creating import renamed
from perdure.server.openai.errors import invalid, unsupported
from perdure.server.openai.finding import KEPT, Found, Outcome
from perdure.server.openai.ids import ResponseId
from perdure.server.openai.inputs import Given
from perdure.server.openai.streams import sent
from perdure.server.openai.telling import Telling, Told


async def answered_once(call: Call, asked: Asked, given: Given) -> Answer | Response:
    """Answer an input without a session."""
    if not call.service.runs_here:
        raise unsupported("store", "no agent is run by this service, so that a worker has to find it; leave it out")
    if given.decides or given.compaction is not None or not given.messages:
        raise invalid("input", "a response that is not kept answers messages alone")
    once = _Once(call, asked, given)
    if asked.wanted.stream:
        return sent(call, once.told(), is_kept=False)
    return Answer([event async for event in once.told()][-1]["response"])


class _Once:
    """A response that is not kept."""

    def __init__(self, call: Call, asked: Asked, given: Given) -> None:
        self._call = call
        self._asked = asked
        self._given = given
        self._agent = asked.agent or next(iter(call.service.agents.values()))
        tools = [
            {name: getattr(tool.spec, name) for name in ("name", "description", "parameters")} for tool in asked.tools
        ]
        self._terms = {**asked.options, "external_tools": tools, "metadata": {KEPT: asked.kept}}
        # Clients expect an id, though nothing can be found by this one.
        self._id = ResponseId(SessionId(new_id()), new_id())

    async def told(self) -> AsyncGenerator[Told, None]:
        """Yield the events of the response. Its run ends if the client leaves."""
        found = self._found()
        telling = Telling(found)
        telling.response["store"] = False
        for each in telling.opening():
            yield each
        work = asyncio.ensure_future(self._answered())
        try:
            async with aclosing(self._heard(work)) as news:
                async for heard in news:
                    telling.run = heard.run if isinstance(heard, Piece) else heard.loop_id
                    for each in telling.hear(heard) if isinstance(heard, Piece) else telling.take(heard):
                        yield each
            for each in telling.end(found, Outcome(await work, Usage())):
                yield each
        finally:
            work.cancel()
            await finish_despite_cancel(_over(work))

    async def _heard(self, work: asyncio.Future[AgentSession]) -> AsyncGenerator[News, None]:
        """Yield the events of the run until it is over."""
        ear = _Ear(self._given.messages[0].id)
        tap = self._call.sessions._connection.events.wiretap(ear.hear)
        work.add_done_callback(lambda _: ear.news.put_nowait(None))
        try:
            while (news := await ear.news.get()) is not None:
                yield news
        finally:
            tap.cancel()

    async def _answered(self) -> AgentSession:
        try:
            reply = await self._call.sessions.run(
                self._given.messages, self._agent, any_role=True, **self._asked.options
            )
        except RunFailed as error:
            if error.session is None:
                raise
            failed: AgentSession = error.session
            return failed
        except InvalidData as error:
            raise renamed(error) from None
        return reply.session

    def _found(self) -> Found:
        at = now()
        info = AgentSessionInfo(id=self._id.session, agent_name=self._agent.name, created_at=at, updated_at=at)
        return Found(id=self._id, info=info, state="running", asked=self._terms)


class _Ear:
    """A listener that picks one run of all in this process: the one that answers a message."""

    def __init__(self, message_id: str) -> None:
        self.news: asyncio.Queue[News | None] = asyncio.Queue()
        self._answers = message_id
        self._run: str | None = None
        self._place = 0
        """The number of events heard so far: each has a place, as if it were on a record."""
        self._piece = Piece("", "", 0, 0, "")

    def hear(self, event: object) -> None:
        if self._run is None and isinstance(event, MessageEnd) and event.message.id == self._answers:
            self._run = event.loop_id
        if self._run is None or getattr(event, "loop_id", None) != self._run:
            return
        if isinstance(event, MessageUpdate):
            self._hear_piece(event)
        elif isinstance(event, MessageEnd | ToolExecutionStart | ToolExecutionEnd):
            self._place += 1
            self.news.put_nowait(replace(event, cursor=self._place))

    def _hear_piece(self, event: MessageUpdate) -> None:
        """Take a piece of a text that is being written. A text that begins again is another attempt."""
        before = self._piece
        if event.message_id != before.message:
            before = Piece(event.loop_id, event.message_id, 0, 0, "")
        if event.kind == "restart":
            self._piece = Piece(event.loop_id, event.message_id, before.attempt + 1, 0, "")
        elif event.kind == "text":
            start = before.start + len(before.text)
            self._piece = replace(before, start=start, text=event.text)
            self.news.put_nowait(self._piece)


async def _over(work: asyncio.Future[AgentSession]) -> None:
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()  # fetched, or asyncio would log it; a client that is still there has got it
