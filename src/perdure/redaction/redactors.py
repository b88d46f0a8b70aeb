"""Redactors, which find secrets in a text before it is stored, and the few that are shipped.

Every shipped pattern takes time in proportion to the text. A run of characters that a pattern may read is bounded, or
is begun at its first character only. No text makes it read the same run again and again.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from typing import Any, Final

from perdure.errors import ConfigurationError, InvalidData, RedactionFailed
from perdure.model.checks import expect, expect_count, expect_function, expect_text

Check = Callable[[str], bool]


class failures_of:
    """A context that raises RedactionFailed for a redactor's error. It is a class: a generator is ten times slower."""

    __slots__ = ("_redactor",)

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # It is a user's function, like a tool. What it says of the failure may quote the secret.
        if isinstance(error, Exception) and not isinstance(error, RedactionFailed):
            raise RedactionFailed(self._redactor.name, f"raised {type(error).__name__}") from None


class Redactor:
    """A pattern, with the text that replaces what it finds.

    The `name` is counted in messages' metadata. The `pattern` is a regular expression. Without a `replacement`, what it
    finds becomes `[redacted:name]`. `check` decides on each match, for example by a checksum. `span` is the length of
    the longest match: a stream is held back by that many characters. Without it, an answer is streamed once it is
    whole. `hints` are texts, and every match contains at least one. If none of them is in a text, the pattern is not
    tried. They are made of ASCII letters, digits, spaces and `-_.@+` only, which JSON never escapes.

    A redactor is applied to its own results too, so its replacement must not match its pattern.
    """

    def __init__(
        self,
        name: str,
        pattern: str | re.Pattern[str],
        replacement: str | None = None,
        *,
        check: Check | None = None,
        span: int | None = None,
        hints: Iterable[str] = (),
    ) -> None:
        self.name: Final = expect_text(name, "$.name", blank=False)
        self.pattern: Final = _compiled(pattern)
        shown = f"[redacted:{name}]" if replacement is None else replacement
        self.replacement: Final = expect_text(shown, "$.replacement")
        self.check: Final = None if check is None else expect_function(check, "$.check")
        if span is not None:
            expect_count(span, "$.span", least=1)
        self.span: Final = span
        self.hints: Final = _checked_hints(hints)
        self._by_letter = _by_rarest_letter(self.hints)
        if self.next_match(self.replacement, 0) is not None:
            problem = "the pattern finds something in the replacement, which would be replaced again and again"
            raise InvalidData("$.replacement", problem)

    def may_be_in(self, text: str) -> bool:
        """Tell whether a `text` may have a match. What holds for a text holds for the JSON that it is part of."""
        if not self.hints:
            return True
        for letter, hints in self._by_letter:
            if letter in text:  # one letter is found ten times as fast as three
                for hint in hints:
                    if hint in text:
                        return True
        return False

    def held_from(self, text: str, start: int) -> int:
        """Return the first place in a `text` from `start` on where a match may begin, for which more text is needed."""
        return start if self.span is None else max(start, len(text) - self.span)

    def next_match(self, text: str, start: int) -> tuple[int, int] | None:
        """Return the first match in a `text` from `start` on that has to be replaced."""
        while start <= len(text) and (found := self.pattern.search(text, start)) is not None:
            first, last = found.span()
            if last > first and (self.check is None or self.check(found.group())):
                return first, last
            start = first + 1  # a secret may begin inside a match that was rejected
        return None

    def apply(self, text: str) -> tuple[str, int]:
        """Return a `text` with all matches replaced, and how many there were."""
        if not self.may_be_in(text):
            return text, 0
        pieces, end, count = list[str](), 0, 0
        while (found := self.next_match(text, end)) is not None:
            pieces += [text[end : found[0]], self.replacement]
            end, count = found[1], count + 1
        return ("".join((*pieces, text[end:])), count) if count else (text, 0)

    def __repr__(self) -> str:
        return f"<Redactor {self.name}>"


class _Known(Redactor):
    """A redactor with known beginnings. A stream is held back only if its text ends with one of them.

    `unfinished` finds such an end. `letters` are all characters in it, except for a word of `word` characters: that is
    before them, and is followed by spaces.
    """

    def __init__(
        self, name: str, pattern: str, *, unfinished: str, letters: str, word: int = 0, **options: Any
    ) -> None:
        super().__init__(name, pattern, **options)
        self._unfinished = re.compile(unfinished)
        self._letters = letters
        self._word = word
        """The number of characters of the word."""

    def held_from(self, text: str, start: int) -> int:
        # Only the last run of such letters is searched: otherwise, a long text would be searched for each beginning.
        run = len(text.rstrip(self._letters))
        if self._word:
            run = len(text[:run].rstrip(" ")) - self._word
        found = self._unfinished.search(text, max(start, run))
        return len(text) if found is None else found.start()


class _Cards(_Known):
    """The redactor of card numbers. No text hints at them, only eight digits in a row, or in two groups."""

    def may_be_in(self, text: str) -> bool:
        # Counting all digits takes a third of the time that the pattern takes to search for some.
        digits = text.encode("utf-8", "surrogatepass").translate(None, _NO_DIGITS)
        return len(digits) >= _FEWEST_DIGITS and _EIGHT_DIGITS.search(text) is not None


_HINT = re.compile("[A-Za-z0-9 _.@+-]+")


def _compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(pattern, re.Pattern):
        if isinstance(pattern.pattern, bytes):
            raise InvalidData("$.pattern", "a redactor works on texts; write the pattern as a str")
        return pattern
    try:
        return re.compile(expect(pattern, str, "$.pattern"))
    except re.error as error:
        raise InvalidData("$.pattern", f"it is not a regular expression: {error}") from None


def _checked_hints(hints: Iterable[str]) -> tuple[str, ...]:
    if isinstance(hints, str):
        raise InvalidData("$.hints", "expected several texts, got one; write ('sk-',)")
    given = tuple(hints)
    for place, hint in enumerate(given):
        if not _HINT.fullmatch(expect_text(hint, f"$.hints[{place}]")):
            raise InvalidData(f"$.hints[{place}]", "a hint is made of ASCII letters, digits, spaces and -_.@+")
    return given


def _by_rarest_letter(hints: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return hints by a letter that each has: if possible, one that few texts have."""
    groups: dict[str, list[str]] = {}
    for hint in hints:
        groups.setdefault(max(hint, key=_rarity), []).append(hint)
    return tuple((letter, tuple(several)) for letter, several in groups.items())


def _rarity(letter: str) -> int:
    return "@_+-".find(letter) + 4 if letter in "@_+-" else 2 * letter.isupper() + letter.isdigit()


def _begun(*literals: str) -> str:
    """Return a pattern for the beginnings of literals, without the literals themselves, at the end of a text."""
    parts = {literal[:length] for literal in literals for length in range(1, len(literal))}
    return "|".join(re.escape(part) for part in sorted(parts, key=lambda part: (-len(part), part)))


_NO_WORD_BEFORE = "(?<![A-Za-z0-9])"
_KEYS: dict[str, tuple[str, str]] = {
    "sk-": ("[A-Za-z0-9_-]", "{16,}"),  # OpenAI, Anthropic, OpenRouter, DeepSeek
    "sk_live_": ("[A-Za-z0-9]", "{16,}"),  # Stripe
    "sk_test_": ("[A-Za-z0-9]", "{16,}"),
    "rk_live_": ("[A-Za-z0-9]", "{16,}"),
    "rk_test_": ("[A-Za-z0-9]", "{16,}"),
    "ghp_": ("[A-Za-z0-9]", "{30,}"),  # GitHub
    "gho_": ("[A-Za-z0-9]", "{30,}"),
    "ghu_": ("[A-Za-z0-9]", "{30,}"),
    "ghs_": ("[A-Za-z0-9]", "{30,}"),
    "ghr_": ("[A-Za-z0-9]", "{30,}"),
    "github_pat_": ("[A-Za-z0-9_]", "{30,}"),
    "glpat-": ("[A-Za-z0-9_-]", "{20,}"),  # GitLab
    "xoxb-": ("[A-Za-z0-9-]", "{10,}"),  # Slack
    "xoxp-": ("[A-Za-z0-9-]", "{10,}"),
    "xoxa-": ("[A-Za-z0-9-]", "{10,}"),
    "xoxs-": ("[A-Za-z0-9-]", "{10,}"),
    "AKIA": ("[A-Z0-9]", "{16}(?![A-Za-z0-9])"),  # AWS
    "ASIA": ("[A-Z0-9]", "{16}(?![A-Za-z0-9])"),
    "AIza": ("[A-Za-z0-9_-]", "{35}"),  # Google
    "hf_": ("[A-Za-z0-9]", "{30,}"),  # Hugging Face
    "npm_": ("[A-Za-z0-9]", "{36}"),
    "pypi-": ("[A-Za-z0-9_-]", "{40,}"),
    "pdr_": ("[A-Za-z0-9_-]", "{43}"),  # perdure's own access tokens
}
"""The beginnings of well-known keys, the characters that follow, and how many of them."""
# Pieces of these beginnings: every key has one, and few searches tell that a text has none of them.
_FIRST = (
    "sk-",
    "sk_",
    "rk_",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "_pat_",
    "glpat-",
    "xox",
    "AKIA",
    "ASIA",
    "AIza",
    "hf_",
    "npm_",
    "pypi-",
    "pdr_",
)


def _key_pattern() -> str:
    return _NO_WORD_BEFORE + "(?:" + "|".join(re.escape(k) + c + n for k, (c, n) in _KEYS.items()) + ")"


def _key_unfinished() -> str:
    whole = "|".join(f"{re.escape(key)}{letters}*" for key, (letters, _) in _KEYS.items())
    return f"{_NO_WORD_BEFORE}(?:{whole}|{_begun(*_KEYS)})\\Z"


_WORD = string.ascii_letters + string.digits
API_KEYS = _Known("api-key", _key_pattern(), hints=_FIRST, unfinished=_key_unfinished(), letters=_WORD + "_-")
"""Keys and tokens that are known by how they begin: of OpenAI, Anthropic, GitHub, GitLab, AWS, Slack, Stripe, Google,
Hugging Face, npm, PyPI and perdure."""

_BEARERS = ("Bearer ", "bearer ", "BEARER ")
_BEARER = "(?:Bearer|bearer|BEARER)"
_TOKEN = "[A-Za-z0-9._~+/=-]"
BEARER_TOKENS = _Known(
    "bearer-token",
    f"{_NO_WORD_BEFORE}{_BEARER} {{1,4}}{_TOKEN}{{16,}}",
    hints=_BEARERS,
    unfinished=f"{_NO_WORD_BEFORE}(?:{_BEARER} {{1,4}}{_TOKEN}*|{_BEARER}|{_begun('Bearer', 'bearer', 'BEARER')})\\Z",
    letters=_WORD + "._~+/=-",
    word=len("Bearer"),
)
"""The word Bearer with the token that follows it, as in a header of HTTP."""

_URL64 = "[A-Za-z0-9_-]"
WEB_TOKENS = _Known(
    "web-token",
    rf"(?<![A-Za-z0-9_-])eyJ{_URL64}{{8,}}\.eyJ{_URL64}{{8,}}\.{_URL64}{{8,}}",
    hints=("eyJ",),
    unfinished=rf"(?<![A-Za-z0-9_-])(?:eyJ{_URL64}*(?:\.{_URL64}*){{0,2}}|eyJ?|e)\Z",
    letters=_WORD + "_-.",
)
"""JSON Web Tokens."""

_LABEL = "[A-Z0-9 ]{0,40}"
_OPENS = "-----BEGIN "
PRIVATE_KEYS = _Known(
    "private-key",
    rf"-----BEGIN {_LABEL}PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
    rf"(?:-----END {_LABEL}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    hints=("PRIVATE KEY",),
    unfinished=rf"(?:{_OPENS}{_LABEL}-{{0,5}}|{_begun(_OPENS)})\Z",
    letters=string.ascii_uppercase + string.digits + " -",
)
"""Blocks of private keys in PEM form. One without an end is replaced up to the end of the text."""

_NOT_BESIDE = "[A-Za-z0-9]"
_CARD = (
    rf"(?<!{_NOT_BESIDE})(?:[2-6][0-9]{{12,18}}"
    r"|[2-6][0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{1,3})?"
    r"|3[0-9]{3}([ -])[0-9]{6}\2[0-9]{4,5}"
    rf")(?!{_NOT_BESIDE})"
)
_BRANDS = re.compile(
    "4(?:[0-9]{12}|[0-9]{15}|[0-9]{18})"  # Visa
    "|(?:5[1-5][0-9]{2}|222[1-9]|22[3-9][0-9]|2[3-6][0-9]{2}|27[01][0-9]|2720)[0-9]{12}"  # Mastercard
    "|3[47][0-9]{13}"  # American Express
    "|3(?:0[0-5]|[68][0-9])[0-9]{11}"  # Diners Club
    "|(?:6011|65[0-9]{2}|64[4-9][0-9]|62[0-9]{2}|35(?:2[89]|[3-8][0-9]))[0-9]{12,15}"  # Discover, UnionPay, JCB
)
_DOUBLED = {digit: sum(divmod(2 * int(digit), 10)) for digit in "0123456789"}


def _is_card(found: str) -> bool:
    """Tell whether digits have the length and the first digits of a payment card, and its checksum (Luhn)."""
    digits = found.replace(" ", "").replace("-", "")
    if _BRANDS.fullmatch(digits) is None:
        return False
    plain, doubled = digits[-1::-2], digits[-2::-2]
    return (sum(map(int, plain)) + sum(map(_DOUBLED.__getitem__, doubled))) % 10 == 0


_NO_DIGITS = bytes(each for each in range(256) if chr(each) not in string.digits)
_FEWEST_DIGITS = 13
_EIGHT_DIGITS = re.compile("[2-6][0-9]{3}[ -]?[0-9]{4}")
CARD_NUMBERS = _Cards(
    "card-number",
    _CARD,
    check=_is_card,
    unfinished=rf"(?<!{_NOT_BESIDE})[2-6](?:[ -]?[0-9]){{0,18}}[ -]?\Z",
    letters=string.digits + " -",
)
"""Numbers of payment cards, in one piece or in groups, whose checksum is right."""

_LOCAL, _HOST = "[A-Za-z0-9._%+-]", "[A-Za-z0-9-]"
EMAILS = _Known(
    "email",
    rf"(?<!{_LOCAL}){_LOCAL}{{1,64}}@{_HOST}{{1,63}}(?:\.{_HOST}{{1,63}}){{1,8}}",
    hints=("@",),
    unfinished=rf"(?<!{_LOCAL}){_LOCAL}{{1,64}}(?:@(?:{_HOST}{{1,63}}\.){{0,8}}{_HOST}{{0,63}})?\Z",
    letters=_WORD + "._%+-@",
)
"""E-mail addresses. It is not in the default set."""

PHONES = _Known(
    "phone",
    r"(?<![A-Za-z0-9+])\+[1-9](?:[ ().-]{0,2}[0-9]){7,14}(?![A-Za-z0-9])",
    hints=("+",),
    unfinished=r"(?<![A-Za-z0-9+])\+(?:[1-9](?:[ ().-]{0,2}[0-9]){0,14}[ ().-]{0,2})?\Z",
    letters=string.digits + " ().-+",
)
"""Phone numbers in international form, as +47 22 12 34 56. It is not in the default set."""

DEFAULT = (PRIVATE_KEYS, API_KEYS, BEARER_TOKENS, WEB_TOKENS, CARD_NUMBERS)
"""The default set, which `--redact` uses: secrets that give access, and card numbers."""
_NAMED = {each.name: each for each in (*DEFAULT, EMAILS, PHONES)}


def named(*names: str) -> tuple[Redactor, ...]:
    """Return shipped redactors by their `names`; `default` stands for the default set."""
    found: dict[str, Redactor] = {}
    for name in names:
        if name != "default" and name not in _NAMED:
            known = ", ".join(("default", *_NAMED))
            raise ConfigurationError(f"No redactor is named {name!r}. There are: {known}.")
        found |= {each.name: each for each in (DEFAULT if name == "default" else (_NAMED[name],))}
    return tuple(found.values())
