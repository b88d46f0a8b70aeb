"""An answer that may be cut off: what has been streamed of it, kept until the whole is there."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.loop.tokens import TokenEstimator, by_characters
from perdure.model.message import Message
from perdure.model.step import AgentStep, InferenceResponse
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.protocols import Delta, ModelRequest, OnDelta

INCOMPLETE = "incomplete"
"""The key in a message's metadata, and the finish reason, that mark an answer which was cut off."""


class CutOffAnswer:
    """The text of an answer so far. Thinking and half a tool call are left out: no provider takes them back."""

    def __init__(self, step_id: str, message_id: str) -> None:
        self._step_id = step_id
        self._message_id = message_id
        self._pieces: list[str] = []
        self._request: ModelRequest | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def listening(self, request: ModelRequest, tell: OnDelta) -> OnDelta:
        """Return what a driver is to call with each piece: it is kept here, and told."""
        self._request = request
        self._pieces.clear()

        async def on_delta(delta: Delta) -> None:
            if delta.kind == "restart":
                self._pieces.clear()
            elif delta.kind == "text":
                self._pieces.append(delta.text)
            await tell(delta)

        return on_delta

    def step(self, given: Transcript) -> AgentStep:
        """Return the step that the answer amounts to. Its tokens are estimated: no provider has told them."""
        message = Message.assistant(self.text, id=self._message_id, metadata={INCOMPLETE: True})
        response = InferenceResponse(finish_reason=INCOMPLETE, usage=self._estimate())
        return replace(AgentStep.of([message], input=given, response=response), id=self._step_id)

    def _estimate(self) -> Usage:
        asked = TokenEstimator().request(self._request) if self._request is not None else 0
        return Usage(input_tokens=asked, output_tokens=by_characters(self.text))
