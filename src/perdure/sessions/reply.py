"""The answer of an agent: complete, or piece by piece."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import msgspec

from perdure.errors import InvalidData
from perdure.loop.response_format import Form, final_value
from perdure.model.execution import PendingCall
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.stop import StopReason
from perdure.model.usage import Usage
from perdure.model.value import brief
from perdure.sessions.cursors import Place

T = TypeVar("T")


class Reply(msgspec.Struct, Generic[T], frozen=True):
    """The result of sending a message: the session as it was saved, and the facts about its run.

    `Reply[City]` is a reply whose `value` is a `City`.
    """

    session: AgentSession
    """The session as it was saved."""
    queued: bool = False
    """True if the answer is still to come. The message waits for another run, is being answered, or its run was left to
    a worker."""
    used_before: Usage = Usage()
    """The usage of the run before this call continued it."""
    form: Form | None = None
    """The form that the answer was asked for in: a JSON schema, and the type that it stands for if that is known."""
    running: bool = False
    """True if a run is answering the message just now. If not, a `queued` message waits for its turn."""

    @property
    def text(self) -> str:
        """The text of the answer. Without an answer, it is what the run had said last before it was stopped."""
        return self.message.text if self.message is not None else ""

    @property
    def message(self) -> Message | None:
        """The message that `text` is from, or None if there is none."""
        if self.queued:
            return None
        state = self.session.state
        if state.final_response is not None:
            return state.final_response
        said = [message for message in state.current_response if message.role == "assistant"]
        return said[-1] if said else None

    @property
    def usage(self) -> Usage:
        """The usage of this call. The whole run's usage, also from before an approval, is `session.state.usage`.

        Under a repeated `key` it is the usage of the first call. So do not add up replies: `info.usage` has the sum.
        """
        return Usage() if self.queued else self.session.state.usage - self.used_before

    @property
    def stop_reason(self) -> StopReason | None:
        """The reason why the run stopped, or None if the answer is still to come."""
        return None if self.queued else self.session.state.stop_reason

    @property
    def value(self) -> T:
        """The answer as the type that was asked for, or as plain data for a JSON schema or an unknown type.

        It raises InvalidData if the answer is still to come, or if it is not JSON since nothing was asked for.
        """
        if self.queued:
            raise InvalidData("$", f"the message {self._state}, so it has no answer yet")
        value: T = final_value(self.session.state, None if self.form is None else self.form.kind)
        return value

    @property
    def _state(self) -> str:
        return "is being answered" if self.running else "waits for another run, or for a worker"

    @property
    def pending_calls(self) -> tuple[PendingCall, ...]:
        """The tool calls that wait for a person's approval. A sub-agent's call has the calls that it waits for."""
        execution = self.session.state.execution
        return execution.pending_calls if execution and not self.queued else ()

    @property
    def is_incomplete(self) -> bool:
        """Return whether the answer was cut off: by a cancellation, a time or length limit, a filter, or a failure."""
        return self.message is not None and self.message.is_incomplete

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """Return the answer in a few words, as a notebook shows it. The whole state would be pages long."""
        if self.queued:
            return "<Reply queued>"
        waits = ", ".join(call.name for call in self.pending_calls)
        ended = f"waits for {waits}" if waits else self.stop_reason.value if self.stop_reason is not None else "stopped"
        return f"<Reply {brief(self.text)}, {ended}, {self.usage.total_tokens} tokens>"


class Chunk(str):
    """A piece of an answer's text. The last one of a stream is empty, and has the whole reply."""

    __slots__ = ("offset", "place", "reply", "restarts")
    reply: Reply[Any] | None
    """The whole reply, in the last chunk alone."""
    restarts: bool
    """True if an answer begins again: what comes behind the first `offset` characters of the run is void."""
    offset: int
    """The number of characters of the run before it."""
    place: Place | None
    """The place in the run where it ends, which `cursor` gives as a text."""

    def __new__(
        cls,
        text: str = "",
        *,
        reply: Reply[Any] | None = None,
        restarts: bool = False,
        offset: int = 0,
        place: Place | None = None,
    ) -> Self:
        chunk = super().__new__(cls, text)
        chunk.reply = reply
        chunk.restarts = restarts
        chunk.offset = offset
        chunk.place = place
        return chunk

    @property
    def cursor(self) -> str | None:
        """The place behind it, for `follow(after=…)`. It is None if no run was needed, since the key had its answer."""
        return None if self.place is None else self.place.cursor
