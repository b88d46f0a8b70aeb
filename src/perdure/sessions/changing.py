"""Change what a session shows, and whether it is open."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from perdure.errors import InvalidData
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import Timer, is_queue
from perdure.sessions.attaching import Sent, message_of
from perdure.sessions.chat import Chat
from perdure.sessions.reach import Reach
from perdure.sessions.timing import UNTIL, due_at


class Changing(Reach):
    """The verbs that make a new version without running an agent, and those that make a session from another."""

    async def inject(self, session_id: str, message: object, *parts: Sent) -> None:
        """Append a message, or a list of them, without running the agent. `parts` follow a single one.

        Each is a Message, a dict `{role, content, …}`, or an item of OpenAI's Responses API. A single one may be a
        text, which counts as the user's.
        """
        from perdure.actions.transcript import InjectMessage

        given = message if isinstance(message, list | tuple) else (_said_by_user(message),)
        if any(isinstance(each, str) for each in given):
            raise InvalidData("$.message", "each of several messages needs a role: {'role': 'user', 'content': …}")
        if parts and len(given) != 1:
            raise InvalidData("$.parts", "they go with one message; give each of several messages its own")
        said = [await message_of(Message.of(given[0]), parts)] if parts else given
        await self.execute(session_id, InjectMessage(*said))

    async def trim(self, session_id: str, keep_last: int) -> int:
        """Show only the last messages, `keep_last` of them. Return how many are shown then.

        A few more are shown where a tool call would lose its result.
        """
        from perdure.actions.transcript import TrimTranscript

        return _length(await self.execute(session_id, TrimTranscript(keep_last)))

    async def compact(self, session_id: str, **options: Any) -> int:
        """Show a summary, or less, of older messages. Return how many are shown then.

        The `options` are the fields of `CompactionOptions`.
        """
        from perdure.actions.compact import CompactTranscript

        return _length(await self.execute(session_id, CompactTranscript(loops=self.loops, **options)))

    async def uncompact(self, session_id: str, block_id: str | None = None) -> int:
        """Show again what the newest compaction covers, or the one with a `block_id`. Return the number shown."""
        from perdure.actions.compact import UncompactTranscript

        return _length(await self.execute(session_id, UncompactTranscript(block_id)))

    async def reset(self, session_id: str) -> None:
        """Show nothing of what was said so far."""
        from perdure.actions.transcript import ResetTranscript

        await self.execute(session_id, ResetTranscript())

    async def undo(self, session_id: str) -> int:
        """Take back the last change of what is shown. Return how many messages are shown then."""
        from perdure.actions.transcript import Undo

        return _length(await self.execute(session_id, Undo()))

    async def rewind(self, session_id: str, to: int | str) -> int:
        """Go back `to` a version, by its number, or a message, by its id. Return how many messages are shown then."""
        from perdure.actions.transcript import Rewind

        return _length(await self.execute(session_id, Rewind(to)))

    async def suspend(self, session_id: str, *, until: datetime | None = None) -> None:
        """Close a session to messages until it is resumed: by hand, or by a worker at the time `until`."""
        from perdure.actions.lifecycle import SuspendSession

        found = (await self.info(session_id)).id
        if until is not None:  # first: a timer that a kill leaves behind does nothing to an open session
            await self._queue().set_timer(Timer(found, UNTIL, due_at(until, "$.until")), replace=True)
        await self.execute(found, SuspendSession())
        if until is None:
            await self._forget_until(found)

    async def resume(self, session_id: str) -> None:
        """Open a session that was suspended, completed or failed."""
        from perdure.actions.lifecycle import ResumeSession

        await self.execute(session_id, ResumeSession())
        await self._forget_until((await self.info(session_id)).id)

    async def _forget_until(self, session_id: SessionId) -> None:
        """Drop the timer that would resume a session: the last decision counts."""
        if is_queue(self.runtime.journal):
            await self._queue().drop_timer(session_id, UNTIL)

    async def rename(self, session_id: str, name: str | None) -> None:
        """Give a session a `name` for people, or none."""
        from perdure.actions.metadata import RenameSession

        await self.execute(session_id, RenameSession(name))

    async def delete(self, session_id: str) -> None:
        """Hide a session from lists, and the sessions of its sub-agents with it. `restore` takes that back."""
        from perdure.actions.lifecycle import DeleteSession

        await self.execute(session_id, DeleteSession())

    async def restore(self, session_id: str) -> None:
        """Take the deletion of a session back. What was erased cannot be restored."""
        from perdure.actions.lifecycle import RestoreSession

        await self.execute(session_id, RestoreSession())

    async def fork(
        self,
        src: str,
        dst: str | None = None,
        *,
        at: int | str | None = None,
        version: int | None = None,
        loop: str | None = None,
    ) -> Chat:
        """Make a session that begins where the session `src` is, and return its handle.

        Its id is `dst`, or a new one. It begins at the other's end, or `at` a message: at a number of messages, or
        after a message with an id. With a `version` it begins at an older version. With a `loop`, the id of a run, it
        begins where that run ended, even on a branch that was not selected.
        """
        from perdure.actions.fork import ForkSession

        action = ForkSession(at=at, dst=None if dst is None else self._named(dst), loop=loop)
        if loop is not None and version is not None:
            raise InvalidData("$.version", "a loop says itself which version it began from; give loop= or version=")
        made = await self.runtime.branch(await self._reach(src), action, version=version)
        return self._handle(made.id)

    async def adopt(self, session_id: str, branch: str) -> None:
        """Show from now on what a fork of the session shows. `branch` is the fork's id."""
        from perdure.actions.adopt import AdoptBranch

        await self.execute(session_id, AdoptBranch(await self._reach(branch)))

    def _handle(self, session_id: SessionId) -> Chat:
        raise NotImplementedError


def _said_by_user(message: object) -> object:
    if not isinstance(message, str):
        return message
    if not message.strip():
        raise InvalidData("$.message", "the message is blank; give a text")
    return Message.user(message)


def _length(session: AgentSession) -> int:
    return len(session.state.transcript)
