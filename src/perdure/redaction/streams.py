"""Redacts a text that comes in pieces: what may become part of a secret is held back until more has come.

The pieces that are given out add up to what the whole text is redacted to.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.redaction.redactors import Redactor, failures_of

CONTEXT = 8
"""How many characters before a place a pattern may look at, as a boundary of a word does."""
FRAGMENT = 8
"""As many characters of what is held back may be told while something else is told in between."""
_LOOK_EACH_TIME = 256


class TextStream:
    """A text on its way through one redactor."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self._text = ""
        """What is held back, behind a few characters that are its context."""
        self._from = 0
        """Where a match may begin."""
        self._told = 0
        """Up to where the text was given out."""
        self._enough = 0
        """How long the text has to be for another look: what is held back long is not looked at for each character."""

    def feed(self, piece: str) -> str:
        """Take a piece; return what can be given out by now."""
        is_idle = self._from == self._told == len(self._text)
        text = self._text = self._text + piece
        if len(text) < self._enough:
            return ""
        held_from = self.redactor.held_from(text, self._from)
        if is_idle and held_from == len(text) and not self.redactor.may_be_in(text):  # as most pieces are
            self._text = text[-CONTEXT:]
            self._from = self._told = len(self._text)
            return piece
        given = self._given_out(held_from)
        held = len(self._text) - self._from
        self._enough = len(self._text) + held // 8 if held > _LOOK_EACH_TIME else 0
        return given

    def flush(self) -> str:
        """Return the rest of the text, which is whole now."""
        is_idle = self._from == self._told == len(self._text)
        given = "" if is_idle else self._given_out(len(self._text), is_whole=True)
        self._text, self._from, self._told, self._enough = "", 0, 0, 0
        return given

    def fragment(self) -> str:
        """Return what is held back if it is short: it can be no more than the beginning of a secret.

        What comes next is looked at together with it.
        """
        short = self._text[self._told :]
        if len(short) > FRAGMENT:
            return ""
        self._told = len(self._text)
        return short

    def _given_out(self, held_from: int, *, is_whole: bool = False) -> str:
        text, pieces = self._text, list[str]()
        while self.redactor.may_be_in(text):
            found = self.redactor.next_match(text, self._from)
            if found is None or found[0] >= held_from:
                break
            if found[1] == len(text) and not is_whole:  # it may have more to it
                held_from = found[0]
                break
            pieces += [text[self._told : found[0]], self.redactor.replacement]
            self._from, self._told = found[1], max(self._told, found[1])
            if held_from < found[1]:
                held_from = len(text) if is_whole else self.redactor.held_from(text, found[1])
        pieces.append(text[self._told : held_from])
        self._told = max(self._told, held_from)
        self._from = max(self._from, held_from)
        self._shorten()
        return "".join(pieces)

    def _shorten(self) -> None:
        cut = max(0, min(self._from, self._told) - CONTEXT)
        self._text, self._from, self._told = self._text[cut:], self._from - cut, self._told - cut


class WholeText:
    """A text on its way through a function that has to see all of it."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self._pieces: list[str] = []

    def feed(self, piece: str) -> str:
        self._pieces.append(piece)
        return ""

    def flush(self) -> str:
        text, self._pieces = "".join(self._pieces), []
        return self.redactor.apply(text)[0]

    def fragment(self) -> str:
        return ""


class Stream:
    """A text on its way through several redactors, one behind the other."""

    def __init__(self, stages: Sequence[TextStream | WholeText]) -> None:
        self._stages = stages

    def feed(self, piece: str) -> str:
        """Take a piece; return what can be given out by now."""
        for stage in self._stages:
            with failures_of(stage.redactor):
                piece = stage.feed(piece)
        return piece

    def flush(self) -> str:
        """Return the rest, once the text is whole."""
        rest = ""
        for stage in self._stages:
            with failures_of(stage.redactor):
                rest = stage.feed(rest) + stage.flush()
        return rest

    def fragment(self) -> str:
        """Return what is held back if it is only a few characters."""
        rest = ""
        for stage in self._stages:
            with failures_of(stage.redactor):
                rest = stage.feed(rest) + stage.fragment()
        return rest
