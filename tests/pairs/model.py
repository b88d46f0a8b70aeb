"""The small reference model: what a world was sent, has shown and has done, as facts to compare with promises."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WORD = re.compile(r"\b[wtd]\d+x\d+\b")
"""A word that occurs nowhere else: `w` is a caller's, `t` is the model's, `d` is the reason of a denial."""


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
    """True if a result of this very call was on record when it was made."""
    approved: bool


class Answered(NamedTuple):
    """The answer to a key."""

    version: int
    text: str
    is_final: bool
    """True if its run is over and was not stopped: a later answer is the same one."""
    waits: bool
    """True if it names calls that wait for a person."""


TEMPERED = 0.25
"""The temperature of runs that ask the model with options of their own."""


class Model:
    """Facts, each noted as it happens. With a `sink` they outlive the process that notes them."""

    def __init__(self, sink: Path | None = None) -> None:
        self.said: dict[str, set[str]] = defaultdict(set)
        self.heard: dict[str, set[str]] = defaultdict(set)
        """Words that were streamed to somebody, even if the answer never ended."""
        self.noted: dict[str, set[str]] = defaultdict(set)
        """Words that were put on record without a claim."""
        self.redacted: set[str] = set()
        self.doubtful: set[str] = set()
        """Words that were to be redacted, and sessions that were to be erased: both may be gone, or not."""
        self.erased: set[str] = set()
        self.forks: list[str] = []
        self.made: list[Made] = []
        self.approved: set[tuple[str, str, str]] = set()
        self.keys: dict[str, str] = {}
        self.tempered: set[str] = set()
        """The words of texts whose runs ask the model with options of their own."""
        self.answers: dict[str, list[Answered]] = defaultdict(list)
        self.broken: list[str] = []
        """Promises that were broken during the case."""
        self._sink = sink

    def note(self, fact: str, **facts: Any) -> None:
        """Add a fact, on disk first."""
        if self._sink is not None:
            with self._sink.open("a") as file:
                file.write(json.dumps({"fact": fact, **facts}) + "\n")
        getattr(self, f"_note_{fact}")(**facts)

    def read(self, lines: Iterable[str]) -> None:
        """Add the facts that another process has noted; the last line may be cut off."""
        for line in lines:
            if line.endswith("\n"):
                facts: Mapping[str, Any] = json.loads(line)
                getattr(self, f"_note_{facts['fact']}")(**{k: v for k, v in facts.items() if k != "fact"})

    def lasting(self, session: str) -> set[str]:
        """Return the words that a session's history has to show."""
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
    """The views that a session has shown, in order: undo goes back along them, a step at a time."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, ...]] | None = None
        """None while it is not known: two verbs at once may come in either order."""
        self.version = 0

    def follow(self, version: int, view: tuple[str, ...]) -> None:
        """Add the next version, made by any verb except undo."""
        if self.version == 0:
            self.stack = []
        if self.stack is not None and (not self.stack or self.stack[-1] != view):
            self.stack.append(view)
        self.version = version

    def undo(self, version: int) -> tuple[str, ...] | None:
        """Remove the last view. Return the one before it, or None if none is left or it is not known."""
        self.version = version
        if self.stack is None or len(self.stack) < 2:
            return None
        self.stack.pop()
        return self.stack[-1]

    @property
    def can_undo(self) -> bool:
        return self.stack is not None and len(self.stack) > 1

    def lose(self) -> None:
        """Forget what undo goes back to."""
        self.stack = None
