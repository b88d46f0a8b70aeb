"""Keeps what has been streamed of an answer until the whole answer is there: it may be cut off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from perdure.loop.tokens import TokenEstimator, by_characters
from perdure.model.message import Message
from perdure.model.step import AgentStep, InferenceResponse
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.protocols import Delta, ModelRequest, OnDelta

INCOMPLETE = "incomplete"
"""The key in a message's metadata, and the finish reason, that mark an answer which was cut off."""
SUPERSEDED = "superseded"
"""The key in a message's metadata that marks an answer that a crash cut off, and that was asked for again."""


class LostAnswer(msgspec.Struct, frozen=True):
    """The part of an answer that a killed process had received."""

    message_id: str
    text: str


class CutOffAnswer:
    """The text of an answer so far. Thinking and half a tool call are left out: no provider takes them back."""

    def __init__(self, step_id: str, message_id: str) -> None:
        self.step_id = step_id
        self.message_id = message_id
        self.pieces: list[str] = []
        self.restarts = 0
        """The number of times that the model has begun the answer again."""
        self._request: ModelRequest | None = None

    def found(self, text: str, request: ModelRequest) -> Self:
        """Take the text of the answer, which was kept elsewhere, and the request that it answers."""
        self.pieces, self._request = [text], request
        return self

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def listening(self, request: ModelRequest, tell: OnDelta) -> OnDelta:
        """Return the function that a driver calls with each piece. It keeps the piece and passes it on."""
        self._request = request
        # The prompt was too long, and the model is asked again: what it had said until then is void.
        if self.pieces:
            self._begin_again()

        async def on_delta(delta: Delta) -> None:
            if delta.kind == "restart":
                self._begin_again()
            elif delta.kind == "text":
                self.pieces.append(delta.text)
            await tell(delta)

        return on_delta

    def _begin_again(self) -> None:
        if self.pieces:
            self.pieces, self.restarts = [], self.restarts + 1

    def step(self, given: Transcript) -> AgentStep:
        """Return a step with this answer as its output. Its tokens are estimated: no provider has reported them."""
        message = Message.assistant(self.text, id=self.message_id, metadata={INCOMPLETE: True})
        return replace(AgentStep.of([message], input=given, response=self._response()), id=self.step_id)

    def superseded(self, tags: Mapping[str, Any]) -> tuple[Message, InferenceResponse]:
        """Return the message that is kept of it when the model is asked again, and its estimated tokens."""
        metadata = {INCOMPLETE: True, SUPERSEDED: True, **tags}
        return Message.assistant(self.text, id=self.message_id, metadata=metadata), self._response()

    def _response(self) -> InferenceResponse:
        return InferenceResponse(finish_reason=INCOMPLETE, usage=self._estimate())

    def _estimate(self) -> Usage:
        asked = TokenEstimator().request(self._request) if self._request is not None else 0
        return Usage(input_tokens=asked, output_tokens=by_characters(self.text))
