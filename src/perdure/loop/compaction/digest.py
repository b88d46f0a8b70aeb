"""Notes on a conversation by fixed rules, for sessions whose model is the offline one."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.loop.compaction.draft import shortened
from perdure.loop.compaction.summary import Charge
from perdure.loop.tokens import by_characters
from perdure.model.definition import ModelConfig
from perdure.model.message import Message, Text
from perdure.model.usage import Usage

FIRST, LAST, CHARS = 10, 30, 120


class Digest:
    """Notes that quote how each message begins. Of many, only the first and the last are quoted; tool output is not."""

    model = ModelConfig("offline")
    is_language_model = False

    async def summarise(
        self, messages: Sequence[Message], charge: Charge, *, output_chars: int | None = None, step: int = 0
    ) -> str:
        lines = [line for message in messages if (line := _line(message))]
        left_out = len(lines) - FIRST - LAST
        if left_out > 0:
            lines[FIRST:-LAST] = [f"[… {left_out} messages left out]"]
        notes = "\n".join(lines) or f"{len(messages)} messages without text."
        read = sum(by_characters(message.text) for message in messages)
        charge(Usage(input_tokens=read, output_tokens=by_characters(notes)))
        return notes


def _line(message: Message) -> str:
    text = " ".join("".join(part.text for part in message.parts if isinstance(part, Text)).split())
    return f"{message.role}: {shortened(text, CHARS)}" if text else ""
