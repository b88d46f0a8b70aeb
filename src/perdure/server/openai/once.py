"""Responses that nobody keeps: `store: false`. They are answered in this process, and nothing is left of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from starlette.responses import Response

from perdure.errors import InvalidData, RunFailed
from perdure.model.ids import SessionId, new_id, now
from perdure.model.loop_events import AnyLoopEvent, MessageEnd, ToolExecutionEnd
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.usage import Usage
from perdure.server.call import Answer, Call
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
        return sent(call, once.told())
    return Answer([event async for event in once.told()][-1]["response"])


class _Once:
    """A response that nobody keeps."""

    def __init__(self, call: Call, asked: Asked, given: Given) -> None:
        self._call = call
        self._asked = asked
        self._given = given
        self._agent = asked.agent or next(iter(call.service.agents.values()))
        tools = [
            {name: getattr(tool.spec, name) for name in ("name", "description", "parameters")} for tool in asked.tools
        ]
        self._terms = {**asked.options, "external_tools": tools, "metadata": {KEPT: asked.kept}}
        self._id = ResponseId(SessionId(new_id()), new_id())

    async def told(self) -> AsyncGenerator[Told, None]:
        """Yield the events of the response: the first ones, then all others once it is there."""
        telling = Telling(self._found(None))
        telling.response["store"] = False
        for each in telling.opening():
            yield each
        session = await self._answered()
        found = self._found(session)
        telling.run = found.run
        for event in _events_in(session):
            for each in telling.take(event):
                yield each
        for each in telling.end(found, Outcome(session, Usage())):
            yield each

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

    def _found(self, session: AgentSession | None) -> Found:
        at = now()
        info = AgentSessionInfo(id=self._id.session, agent_name=self._agent.name, created_at=at, updated_at=at)
        execution = None if session is None else session.state.execution
        run = None if execution is None else execution.execution_id
        return Found(id=self._id, info=info, state="running", asked=self._terms, run=run)


def _events_in(session: AgentSession) -> Iterator[AnyLoopEvent]:
    """Yield what a run has told of its answers and calls, as its state has it."""
    execution = session.state.execution
    if execution is None:
        return
    last = (execution.current_step,) if execution.current_step is not None else ()
    place = 0
    for step in (*execution.steps, *last):
        for message in step.output_messages:
            place += 1
            yield MessageEnd(loop_id=execution.execution_id, message=message, cursor=place)
        for done in step.tool_executions:
            place += 1
            yield ToolExecutionEnd(loop_id=execution.execution_id, execution=done, step_id=step.id, cursor=place)
