"""The small reference model: what a world was told and shown, and has done, as facts to compare promises with."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WORD = re.compile(r"\b[wtd]\d+x\d+\b")
"""A word that occurs nowhere else: `w` a caller has said, `t` the model has, `d` is the reason of a denial."""


def words_in(text: str) -> set[str]:
    return set(WORD.findall(text))


class Made(NamedTuple):
    """A tool call as the outside world has seen it."""

    tool: str
    session: str
    execution: str
    call: str
    arguments: str
    recorded: bool
    """Whether a result of this very call was on record when it was made."""
    approved: bool


class Answered(NamedTuple):
    """What a key was answered with."""

    version: int
    text: str
    is_final: bool
    """Whether its run is over and was not stopped: a later answer is the same one."""
    waits: bool
    """Whether it tells of calls that wait for a person."""


TEMPERED = 0.25
"""The temperature with which runs ask the model that have one of their own."""


class Model:
    """Facts, each noted as it happens. With a `sink` they outlive the process that notes them."""

    def __init__(self, sink: Path | None = None) -> None:
        self.said: dict[str, set[str]] = defaultdict(set)
        self.heard: dict[str, set[str]] = defaultdict(set)
        """What was streamed to somebody, whether or not the answer came to its end."""
        self.noted: dict[str, set[str]] = defaultdict(set)
        """What was put on record without a claim."""
        self.redacted: set[str] = set()
        self.doubtful: set[str] = set()
        """Words that were to be redacted, and sessions that were to be erased: both may be gone, or not."""
        self.erased: set[str] = set()
        self.forks: list[str] = []
        self.made: list[Made] = []
        self.approved: set[tuple[str, str, str]] = set()
        self.keys: dict[str, str] = {}
        self.tempered: set[str] = set()
        """The words of texts whose runs ask the model in their own way."""
        self.answers: dict[str, list[Answered]] = defaultdict(list)
        self.broken: list[str] = []
        """Promises that were seen to be broken on the way."""
        self._sink = sink

    def note(self, fact: str, **facts: Any) -> None:
        """Take in a fact, on disk first."""
        if self._sink is not None:
            with self._sink.open("a") as file:
                file.write(json.dumps({"fact": fact, **facts}) + "\n")
        getattr(self, f"_note_{fact}")(**facts)

    def read(self, lines: Iterable[str]) -> None:
        """Take in the facts that another process has noted; the last line may be cut off."""
        for line in lines:
            if line.endswith("\n"):
                facts: Mapping[str, Any] = json.loads(line)
                getattr(self, f"_note_{facts['fact']}")(**{k: v for k, v in facts.items() if k != "fact"})

    def lasting(self, session: str) -> set[str]:
        """The words that a session's history has to show."""
        is_gone = session in self.erased or session in self.doubtful
        return set() if is_gone else (self.said[session] | self.heard[session]) - self.redacted - self.doubtful

    def may_pay(self, session: str, call: str, arguments: str) -> bool:
        return (session, call, arguments) in self.approved

    def _note_said(self, session: str, words: list[str]) -> None:
        self.said[session] |= set(words)

    def _note_heard(self, session: str, words: list[str]) -> None:
        self.heard[session] |= set(words)

    def _note_noted(self, session: str, words: list[str]) -> None:
        self.noted[session] |= set(words)

    def _note_in_doubt(self, what: str) -> None:
        self.doubtful.add(what)

    def _note_redacted(self, word: str) -> None:
        self.redacted.add(word)

    def _note_erased(self, session: str) -> None:
        self.erased.add(session)

    def _note_forked(self, session: str) -> None:
        self.forks.append(session)

    def _note_made(self, **call: Any) -> None:
        self.made.append(Made(**call))

    def _note_approved(self, session: str, call: str, arguments: str) -> None:
        self.approved.add((session, call, arguments))

    def _note_tempered(self, words: list[str]) -> None:
        self.tempered |= set(words)

    def _note_key(self, key: str, text: str) -> None:
        self.keys[key] = text

    def _note_answered(self, key: str, **answer: Any) -> None:
        self.answers[key].append(Answered(**answer))

    def _note_broken(self, what: str) -> None:
        self.broken.append(what)


class Views:
    """What a session has shown, one view behind the other: undo goes back along them, a step at a time."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, ...]] | None = None
        """None while it is not known: two verbs at once may come in either order."""
        self.version = 0

    def follow(self, version: int, view: tuple[str, ...]) -> None:
        """Take in the next version, whatever has made it, unless that was an undo."""
        if self.version == 0:
            self.stack = []
        if self.stack is not None and (not self.stack or self.stack[-1] != view):
            self.stack.append(view)
        self.version = version

    def undo(self, version: int) -> tuple[str, ...] | None:
        """Take the last view off; return the one before it, None if there is none or it is not known."""
        self.version = version
        if self.stack is None or len(self.stack) < 2:
            return None
        self.stack.pop()
        return self.stack[-1]

    @property
    def can_undo(self) -> bool:
        return self.stack is not None and len(self.stack) > 1

    def lose(self) -> None:
        """Know no longer what undo goes back to."""
        self.stack = None
