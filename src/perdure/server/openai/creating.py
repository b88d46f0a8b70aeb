"""Begin a response: in a new session, in the session of the response before it, in a fork of that, or by a decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from perdure.actions.definition import ChangeDefinition
from perdure.actions.inbox import Inbox, under_way
from perdure.actions.metadata import WriteMetadata
from perdure.actions.waiting import not_active
from perdure.errors import InvalidData, PendingCallsChanged, RunInterrupted, SessionBusy, SessionConflict
from perdure.model.definition import AgentDefinition
from perdure.model.execution import PendingCall
from perdure.model.ids import SessionId, now
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import Action, FindsMessages
from perdure.server.call import Call
from perdure.server.making import used_for_another
from perdure.server.openai.asking import Asked, CreateResponse, in_progress
from perdure.server.openai.errors import invalid, not_found
from perdure.server.openai.finding import KEPT, Found, find, journal_of, look_for, outcome_of, reached
from perdure.server.openai.ids import ResponseId, handled, key_of, session_of
from perdure.server.openai.inputs import Given
from perdure.server.problems import Problem
from perdure.sessions.sessions import Sessions

_CONTINUED = "openai_continued_by"
"""The metadata key of the request that continues a session. Writing it takes the session's newest version."""


class Beginning:
    """One request that begins a response."""

    def __init__(self, call: Call, asked: Asked, given: Given) -> None:
        self._call = call
        self._sessions: Sessions = call.sessions
        self._asked = asked
        self._given = given
        self._is_repeatable = call.key is not None
        self._key = key_of(call.key, call.caller.owner)
        self._name = f"v1-{self._key}" if self._is_repeatable else None
        """The id of a session that the request makes, if the same request has to find it again."""

    async def begin(self) -> ResponseId:
        """Leave the messages in a session, for a worker. They are durable when this returns."""
        wanted = self._asked.wanted
        known = await self._begun_before() if self._is_repeatable else None
        if known is not None:
            return known
        if self._given.compaction is not None and (wanted.previous_response_id or self._asked.conversation):
            raise invalid("input", "a compaction stands for all that was said before; leave the other out")
        if self._asked.conversation is not None:
            return await self._in_conversation(self._asked.conversation)
        if wanted.previous_response_id is not None:
            return await self._continued(wanted.previous_response_id)
        if self._given.compaction is not None:
            return await self._from_handle(self._given.compaction)
        self._require_no_decision("no response that waits is named; give its `previous_response_id`")
        chat = await self._sessions.open(self._name, self._agent, on_change="keep")
        return await self._left_with(chat.id)

    async def _begun_before(self) -> ResponseId | None:
        """Return the response that the same request has begun. Raise InvalidData if its key was used for another."""
        for session_id in await self._places():
            found = await look_for(self._sessions, ResponseId(session_id, self._key))
            if found is None or found.refusal is not None:  # one that was taken back may be asked for again
                continue
            if found.kept.get("request", self._asked.digest) != self._asked.digest:
                raise used_for_another()
            return found.id
        return None

    async def _places(self) -> list[SessionId]:
        """Return the sessions in which the key may have been used: those that the request names or makes, and others.

        A message that was sent is found in any session, by its id. One that still waits in another session is not.
        """
        wanted, sessions = self._asked.wanted, self._sessions
        previous = None if wanted.previous_response_id is None else ResponseId.of(wanted.previous_response_id)
        named = [None if self._asked.conversation is None else session_of(self._asked.conversation)]
        named += [None if previous is None else previous.session]
        if self._name is not None and await sessions.exists(self._name):
            named.append((await sessions.info(self._name)).id)
        if isinstance(sessions.store, FindsMessages):
            named += [place.session_id for place in await sessions.find(self._key)]
        return list(dict.fromkeys(each for each in named if each is not None))

    @property
    def _agent(self) -> AgentDefinition:
        return self._asked.agent or next(iter(self._call.service.agents.values()))

    async def _left_with(self, session_id: SessionId) -> ResponseId:
        """Leave the messages in a session."""
        messages, kept = self._given.messages, {"at": now().timestamp(), **self._asked.kept}
        if not messages:
            raise invalid("input", "there is nothing to answer")
        # A message that cannot be sent is found later by this id.
        messages = [replace(messages[0], id=self._key), *messages[1:]]
        try:
            await self._sessions.enqueue(
                session_id, messages, key=self._key, any_role=True, metadata={KEPT: kept}, **self._asked.options
            )
        except InvalidData as error:
            raise renamed(error) from None
        return ResponseId(session_id, self._key)

    async def _in_conversation(self, given: str) -> ResponseId:
        session_id = session_of(given)
        info = None if session_id is None else await reached(self._sessions, session_id)
        if info is None:
            raise not_found("Conversation", given)
        session = await self._sessions.session(info.id)
        pending = _pending(session)
        if pending and (self._given.decides or not await self._is_under_way(info.id)):
            return await self._decided(session, pending)
        if self._given.decides:
            return await self._decided_last(session)
        await self._require_taking(session)
        await self._give_agent(session)
        return await self._left_with(info.id)

    async def _require_taking(self, session: AgentSession) -> None:
        """Raise SessionNotActive if a session is closed: a message would wait until somebody opens it."""
        if session.status is not SessionStatus.ACTIVE and not await self._is_under_way(session.id):
            raise not_active(session)

    async def _give_agent(self, session: AgentSession) -> None:
        """Give a session the agent that the client names. Another request may do so at the same time."""
        change = self._change_of(session)
        if change is None:
            return
        try:
            await self._sessions.execute(session.id, change)
        except SessionBusy:
            # The other request may have given it the same agent.
            if self._change_of(await self._sessions.session(session.id)) is not None:
                raise

    async def _decided_last(self, session: AgentSession) -> ResponseId:
        """Return the response that the same decision has begun in a conversation before."""
        execution, journal = session.state.execution, journal_of(self._sessions)
        runs = [] if execution is None else await journal.runs(session.id, run=execution.execution_id)
        for run in runs:
            entries = await journal.read(session.id, run=run.loop_id)
            starts = [entry.body for entry in entries if entry.kind == "agent_start" and entry.body.get("resumed")]
            for start in reversed(starts):
                waited = await self._sessions.session(session.id, start["base_version"])
                if run.first.body.get("key") and _is_same(start, self._given, _pending(waited)):
                    return ResponseId(session.id, str(run.first.body["key"][0]), waited.version)
        raise invalid("input", "it has outputs or approvals, and no call of this conversation waits")

    async def _continued(self, given: str) -> ResponseId:
        previous = await find(self._sessions, given)
        if previous.state != "over":
            raise in_progress(given)
        outcome = await outcome_of(self._sessions, previous)
        if outcome is None:
            raise invalid("previous_response_id", "that response was never begun; continue the one before it")
        pending = _pending(outcome.session)
        if pending:
            return await self._decided(outcome.session, pending, previous)
        self._require_no_decision("no call of that response waits")
        return await self._left_with(await self._place_behind(previous))

    async def _place_behind(self, previous: Found) -> SessionId:
        """Return the session in which a response is continued: its own if it is the newest there, or else a fork."""
        own = previous.info.id
        if self._is_repeatable and await self._is_known_in(own):
            return own
        if not await self._has_taken(previous):
            return await self._forked(own, previous.version)
        await self._give_agent(await self._sessions.session(own))
        return own

    async def _has_taken(self, previous: Found) -> bool:
        """Take the newest version of a session for this request. Return False if it is older, or taken already."""
        if previous.info.version != previous.version or not await self._is_free(previous.info.id):
            return self._is_repeatable and await self._had_taken(previous.info.id)
        await self._require_taking(await self._sessions.session(previous.info.id))
        try:
            # A conflict is not retried: a newer version belongs to another request, and this one gets a fork.
            await self._sessions.expecting(previous.version).execute(
                previous.info.id, WriteMetadata(_CONTINUED, self._key), on_conflict="raise"
            )
        except (SessionConflict, SessionBusy, RunInterrupted):
            return self._is_repeatable and await self._had_taken(previous.info.id)
        return True

    async def _had_taken(self, session_id: SessionId) -> bool:
        """Tell whether the same request has taken a session before, and has said nothing there yet."""
        metadata: Mapping[str, Any] = (await self._sessions.session(session_id)).state.metadata
        return metadata.get(_CONTINUED) == self._key

    async def _is_known_in(self, session_id: SessionId) -> bool:
        journal = journal_of(self._sessions)
        if await journal.find_key(session_id, self._key) is not None:
            return True
        return await under_way(journal, session_id, self._key) is not None

    async def _is_free(self, session_id: SessionId) -> bool:
        """Tell whether nothing waits in a session."""
        return await Inbox(journal_of(self._sessions), session_id).first_waiting() is None

    async def _is_under_way(self, session_id: SessionId) -> bool:
        """Tell whether a run is continued already, though the session still shows what it waited for."""
        journal = journal_of(self._sessions)
        return await journal.is_claimed(session_id) or await journal.is_interrupted(session_id)

    async def _forked(self, session_id: SessionId, version: int) -> SessionId:
        """Return a fork of a session as of a version, or the fork that the same request has made before."""
        name = self._name
        if name is None or not await self._sessions.exists(name):
            try:
                name = (await self._sessions.fork(session_id, name, version=version)).id
            except SessionConflict:
                # With a name, the same request has made the fork in this moment.
                if name is None:
                    raise
        fork = await self._sessions.session(name)
        await self._give_agent(fork)
        return fork.id

    async def _from_handle(self, handle: str) -> ResponseId:
        """Continue a compacted conversation in a fork, so that it can be continued many times."""
        place = handled(handle)
        info = None if place is None else await reached(self._sessions, place[0])
        if place is None or info is None:
            raise not_found("Compaction", handle)
        self._require_no_decision("no call waits there")
        return await self._left_with(await self._forked(info.id, place[1]))

    def _change_of(self, session: AgentSession) -> Action | None:
        """Return the change to the agent that the client names, if a session has another one."""
        agent = self._asked.agent
        return None if agent is None or agent.name == session.info.agent_name else ChangeDefinition(agent)

    def _require_no_decision(self, why: str) -> None:
        if self._given.decides:
            raise invalid("input", f"it has outputs or approvals, and {why}")

    async def _decided(
        self, session: AgentSession, pending: tuple[PendingCall, ...], previous: Found | None = None
    ) -> ResponseId:
        """Continue the run that waits in a session with what the client has decided."""
        given = self._given
        if not given.decides or given.messages:
            names = ", ".join(leaf.name for call in pending for leaf in call.leaves)
            raise invalid("input", f"calls wait ({names}); give their outputs or approvals first, and nothing else")
        response = ResponseId(session.id, await self._key_of_run(session), session.version)
        self._require_same_terms(session)
        # The session has a newer version, so its calls were decided on before.
        if previous is not None and previous.info.version != session.version:
            return await self._decided_before(response, session, pending)
        try:
            await self._sessions.settle(
                session.id, approve=given.approved, deny=given.denied, answers=given.answers, wait=False
            )
        except (PendingCallsChanged, SessionBusy, SessionConflict, RunInterrupted):  # another request has decided
            return await self._decided_before(response, session, pending)
        except InvalidData as error:
            raise invalid("input", error.problem) from None
        return response

    async def _decided_before(
        self, response: ResponseId, session: AgentSession, pending: tuple[PendingCall, ...]
    ) -> ResponseId:
        """Return the response that the same decision has begun. Other outputs for the same calls begin a fork."""
        found = await look_for(self._sessions, response)
        if found is not None and _is_same(found.entries[0].body, self._given, pending):
            return response
        waiting = {call.id for call in pending if call.external}
        if self._given.approved or self._given.denied or waiting != self._given.answers.keys():
            raise Problem(409, "DecidedBefore", "Somebody else has decided on these calls. Read the response again.")
        results = [
            Message.tool(each.id, self._given.answers[each.id], name=each.name) for each in pending if each.external
        ]
        fork = await self._forked(session.id, session.version)
        self._given = replace(self._given, messages=results)
        return await self._left_with(fork)

    async def _key_of_run(self, session: AgentSession) -> str:
        execution = session.state.execution
        assert execution is not None
        (run,) = await journal_of(self._sessions).runs(session.id, run=execution.execution_id)
        key = run.first.body.get("key")
        if not key:
            raise Problem(409, "NotAResponse", "What waits here was not asked for as a response. Decide with /api.")
        return str(key[0])

    def _require_same_terms(self, session: AgentSession) -> None:
        """Refuse terms that differ from those of the run that a decision continues."""
        asked, execution = self._asked, session.state.execution
        assert execution is not None
        own = "a decision continues its run, which keeps its own; leave it out, or give the same"
        specs = {tool.spec.name: tool.spec for tool in asked.tools}
        if specs and specs != {spec.name: spec for spec in execution.external_tools}:
            raise invalid("tools", own)
        if asked.wanted.instructions and asked.wanted.instructions != execution.instructions:
            raise invalid("instructions", own)
        if asked.output is not None and _plain(asked.output) != _plain(execution.response_format):
            raise invalid("text.format", own)
        if asked.agent is not None and asked.agent.name != session.info.agent_name:
            raise invalid("model", own)
        if asked.model_options is not None and asked.model_options != execution.model_options:
            raise invalid(_first_of(asked.wanted), own)
        if asked.wanted.metadata:
            raise invalid("metadata", "a decision continues its run, which keeps its own; leave it out")


def _first_of(wanted: CreateResponse) -> str:
    names = ("temperature", "top_p", "max_output_tokens", "reasoning")
    return next(name for name in names if getattr(wanted, name) is not None)


def _plain(value: Any) -> Any:
    from perdure.model.value import thawed

    return thawed(value) if value is not None else None


def _pending(session: AgentSession) -> tuple[PendingCall, ...]:
    execution = session.state.execution
    return execution.pending_calls if execution is not None else ()


def _is_same(start: Mapping[str, Any], given: Given, pending: tuple[PendingCall, ...]) -> bool:
    """Tell whether a run was continued with the same decision on calls that waited."""
    digests = {call.id: call.digest for call in pending}
    answers = {each["call"]: each.get("result") for each in start.get("answers") or ()}
    denied = {digests.get(call, call): reason for call, reason in (start.get("denied") or {}).items()}
    return (
        sorted((start.get("approved") or {}).values()) == sorted(given.approved)
        and denied == given.denied
        and answers == given.answers
    )


_PARAMS = {"$.external_tools": "tools", "$.output": "text.format", "$.key": "Idempotency-Key", "$.message": "input"}


def renamed(error: InvalidData) -> Problem:
    """Return an error about a message as a Problem that names the request's parameter."""
    path = next((name for name in _PARAMS if error.path.startswith(name)), None)
    return invalid(error.path.removeprefix("$.") if path is None else _PARAMS[path], error.problem)
