"""Plain text as the offline driver reads it: words, numbers, quotations, pairs, and what follows a preposition.

Every pattern has bounds and only the start of a text is looked at, so that no text can hold up a run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

LONGEST = 2_000  # a plain request is short; what comes after this many characters is not looked at

Number = int | float


def vocabulary(listed: str) -> frozenset[str]:
    """A set of words that are written one after the other."""
    return frozenset(listed.split())


PREPOSITIONS = vocabulary("in for of about on at to from with by named called regarding")
LEADING = vocabulary(
    "please can could would will you kindly i want need like look up lookup search find get fetch show tell give ask "
    "check me us my for what who where when which how is are was the a an do does did of about it now to"
)
_TRAILING = vocabulary("please today now tomorrow thanks right is")
_ARTICLES = vocabulary("the a an my")
_LINKS = vocabulary("is are of number no id named called equals")
_SUFFIXES = vocabulary("id number no name key code")

_WORD = re.compile(r"\w+")
_CONTRACTED = re.compile(r"\b(what|who|where|when|how|it|that|name|today)['’]s\b")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_NUMBER = re.compile(r"(?<![\w.])-?[0-9]{1,15}(?:\.[0-9]{1,15})?(?!\w|\.[0-9])")
_QUOTED = re.compile(r"\"([^\"\n]{1,500})\"|“([^”\n]{1,500})”|`([^`\n]{1,500})`|(?<!\w)'([^'\n]{1,500})'(?!\w)")
_PAIR = re.compile(
    r"(?<![\w])([A-Za-z_]\w{0,63})\s{0,4}[:=](?!//)\s{0,4}(?:\"([^\"\n]{0,500})\"|'([^'\n]{0,500})'|([^\s,;\"']{1,200}))"
)
_TOKEN = re.compile(r"[\w'’.:@/+#&%°$€£-]+|[,;?!\n]")
_STOPS = frozenset(",;?!\n")


class Tail(NamedTuple):
    """What follows a preposition: up to the next one, and up to the end of the phrase."""

    preposition: str
    text: str
    whole: str


class Reading:
    """What a request offers for filling in values. Numbers, quotations and tails are used up as they are taken."""

    def __init__(self, text: str, *, names: Iterable[str] | None = None, subject: str | None = None) -> None:
        self.text = without_thousands(text[:LONGEST])
        self.subject = shortened(self.text if subject is None else subject, 200)
        self.plain = plain(self.text)
        self.numbers: list[Number] = [as_number(found) for found in _NUMBER.findall(self.text)]
        self.quoted = ["".join(found) for found in _QUOTED.findall(self.text)]
        self._pairs: dict[str, str] = {}
        self._names = None if names is None else {name.lower() for name in names}
        self._tokens = list(_phrases(_PAIR.sub(self._read_pair, self.text)))
        self.tails = list(_tails(self._tokens))
        self._has_rest = not self.tails

    def mentions(self, words: str) -> bool:
        """Whether these words stand in the text, one after the other."""
        wanted = plain(words)
        return bool(wanted) and f" {wanted} " in f" {self.plain} "

    def named(self, name: str) -> str | None:
        """The value that the text gives to a name: `name=value`, `name: value`, or the words that follow it."""
        given = self._pairs.get(name.lower())
        return self._after(split_name(name)) if given is None else given

    def count_of(self, name: str) -> str | None:
        """The word before a name, as in `2 passengers`."""
        wanted = [stem(word) for word in split_name(name)]
        known = [stem(token.lower()) for token in self._tokens]
        for place in range(1, len(known) - len(wanted) + 1):
            if known[place : place + len(wanted)] == wanted:
                return self._tokens[place - 1]
        return None

    def use_up(self, value: object) -> None:
        """Take out what has been understood by name, so that it is not taken for something else as well."""
        if value in self.numbers and not isinstance(value, bool):
            self.numbers.remove(value)
        self.tails = [tail for tail in self.tails if tail.text != value]
        self.quoted = [quoted for quoted in self.quoted if quoted != value]

    def take_tail(self, preferred: Collection[str]) -> str:
        """What follows one of the preferred prepositions, else whichever comes first; it is used up."""
        ranked = sorted(self.tails, key=lambda tail: tail.preposition not in preferred)
        if ranked:
            self.tails.remove(ranked[0])
        return ranked[0].text if ranked else ""

    def take_subject(self, ignored: Collection[str]) -> str:
        """What the request is about: all that follows `for` or `about`, else all of it but for how it begins."""
        asked = next((tail for tail in self.tails if tail.preposition in ("for", "about")), None)
        self._has_rest = self._has_rest or (asked is None and bool(self.tails))
        self.tails.clear()
        return asked.whole if asked else self.rest(ignored)

    def rest(self, ignored: Collection[str]) -> str:
        """The first phrase without the words that lead up to what is wanted; once, and if nothing else was taken."""
        if not self._has_rest:
            return ""
        self._has_rest = False
        phrase = list(_until_stop(self._tokens))
        while phrase and (phrase[0].lower() in LEADING or stem(phrase[0].lower()) in ignored):
            phrase.pop(0)
        return _trimmed(phrase)

    def _read_pair(self, pair: re.Match[str]) -> str:
        """Keep a pair whose key is wanted, and take it out of the text."""
        key = pair[1].lower()
        if self._names is not None and key not in self._names:
            return pair[0]
        self._pairs[key] = pair[2] or pair[3] or pair[4] or ""
        return "\n"

    def _after(self, name: list[str]) -> str | None:
        lowered = [token.lower() for token in self._tokens]
        for words in (name, name[:-1] if name and name[-1] in _SUFFIXES else []):
            for place in range(len(lowered) - len(words)) if words else ():
                if lowered[place : place + len(words)] == words:
                    found = _value_from(self._tokens[place + len(words) :])
                    if found:
                        return found
        return None


def plain(text: str) -> str:
    """The words alone, in lower case, with one space between them."""
    return " ".join(_WORD.findall(_CONTRACTED.sub(r"\1 is", text.lower())))


def split_name(name: str) -> list[str]:
    """The words of a name, however it is written: get_order, get-order, getOrder."""
    return _WORD.findall(_CAMEL.sub(" ", name).replace("_", " ").lower())


def stem(word: str) -> str:
    """A word without the s of its plural."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def stems(words: Iterable[str]) -> set[str]:
    return {stem(word) for word in words}


def as_number(digits: str) -> Number:
    return float(digits) if "." in digits else int(digits)


def without_thousands(text: str) -> str:
    return _THOUSANDS.sub("", text)


def shortened(text: str, length: int) -> str:
    """A text on one line, and no longer than this."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def _phrases(text: str) -> Iterator[str]:
    """Words and stops; a full stop at the end of a word is a stop of its own."""
    for token in _TOKEN.findall(text):
        bare = token.rstrip(".")
        if bare:
            yield bare
        if bare != token:
            yield "\n"


def _tails(tokens: list[str]) -> Iterator[Tail]:
    for place, token in enumerate(tokens):
        if token.lower() in PREPOSITIONS:
            phrase = list(_until_stop(tokens[place + 1 :]))
            tail = Tail(token.lower(), _trimmed(_until_preposition(phrase)), _trimmed(phrase))
            if tail.text:
                yield tail


def _until_stop(tokens: Iterable[str]) -> Iterator[str]:
    for token in tokens:
        if token in _STOPS:
            return
        yield token


def _until_preposition(tokens: Iterable[str]) -> Iterator[str]:
    for token in tokens:
        if token.lower() in PREPOSITIONS:
            return
        yield token


def _value_from(tokens: list[str]) -> str:
    while tokens and tokens[0].lower() in _LINKS:
        tokens = tokens[1:]
    return _trimmed(_until_preposition(_until_stop(tokens[:12])))


def _trimmed(tokens: Iterable[str]) -> str:
    words = list(tokens)
    while words and words[0].lower() in _ARTICLES:
        words.pop(0)
    while words and words[-1].lower() in _TRAILING:
        words.pop()
    return " ".join(words).strip("'’\"")
