"""The content: one turn of four messages, the same for every library, which makes messages of its own from it."""

from __future__ import annotations

from dataclasses import dataclass

TEXT = "The quick brown fox jumps over the lazy dog. " * 11
TOOL = "look_up"
MESSAGES = 4


@dataclass(frozen=True)
class Turn:
    """A question, a tool call, its result, and the answer: 2 KB of text."""

    number: int

    @property
    def question(self) -> str:
        return f"Question {self.number}. {TEXT}"

    @property
    def call_id(self) -> str:
        return f"call-{self.number}"

    @property
    def arguments(self) -> dict[str, str]:
        return {"query": f"Query {self.number}. {TEXT}"}

    @property
    def result(self) -> str:
        return f"Result {self.number}. {TEXT}"

    @property
    def answer(self) -> str:
        return f"Answer {self.number}. {TEXT}"
