"""Redacts a text that comes in pieces. What may become part of a secret is held back until more has come.

The pieces that are given out add up to the redacted whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.redaction.redactors import Redactor, failures_of

CONTEXT = 8
"""The characters before a place that a pattern may read, for example for a boundary of a word."""
FRAGMENT = 8
"""The most characters held back that may be given out when another text comes in between."""
_LOOK_EACH_TIME = 256


class TextStream:
    """A text on its way through one redactor."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self._text = ""
        """The text that is held back, after a few characters of its context."""
        self._from = 0
        """The first place where a match may begin."""
        self._told = 0
        """The end of the text that was given out."""
        self._enough = 0
        """The length at which the text is searched again: a long text is not searched for each new character."""

    def feed(self, piece: str) -> str:
        """Take a piece, and return what can be given out by now."""
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
        # Again when it has grown by an eighth: all searches together then take time in proportion to the text.
        self._enough = len(self._text) + held // 8 if held > _LOOK_EACH_TIME else 0
        return given

    def flush(self) -> str:
        """Return the rest of the text, which is whole now."""
        is_idle = self._from == self._told == len(self._text)
        given = "" if is_idle else self._given_out(len(self._text), is_whole=True)
        self._text, self._from, self._told, self._enough = "", 0, 0, 0
        return given

    def fragment(self) -> str:
        """Return what is held back if it is short: then it is at most the beginning of a secret.

        The next piece is searched together with it.
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
            # The match reaches into what would be held back: only the text behind it has to be judged.
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
    """A text on its way through a function that needs all of it."""

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
    """A text on its way through several redactors, one after the other."""

    def __init__(self, stages: Sequence[TextStream | WholeText]) -> None:
        self._stages = stages

    def feed(self, piece: str) -> str:
        """Take a piece, and return what can be given out by now."""
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
