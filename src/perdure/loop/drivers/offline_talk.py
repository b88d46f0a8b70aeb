"""The small conversation of the offline driver: manners, who it is, and what was said before."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perdure.loop.drivers.offline_text import LONGEST, plain, shortened
from perdure.model.ids import now
from perdure.model.message import Message
from perdure.protocols import ToolSpec

IDENTITY = "I am perdure's offline stand-in, not a language model: I follow fixed rules, without a key or a network."

_SHOWN, _LISTED = 80, 10


class Conversation:
    """What was said before the message that is to be answered."""

    def __init__(self, earlier: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        self._earlier = earlier
        self._tools = tools

    def reply(self, text: str) -> str | None:
        """An answer to manners, to questions about itself, and to questions about what was said; else None."""
        said = plain(text[:LONGEST])
        if not said:
            return "I can only read text, and there is none in your message."
        for pattern, answer in _MANNERS:
            if pattern.fullmatch(said):
                return answer
        if _HELP.fullmatch(said):
            return self._help()
        return self._recalled(said)

    def last_resort(self, text: str, *, is_greeting: bool) -> str:
        """Something to say when nothing else fits."""
        echoed = _ECHO.match(text)
        if echoed:
            return shortened(echoed[1], 500)
        if _SUMMARISE.search(text[:_SHOWN]) and text.count("\n") > 1:
            return _listing("In short", text[:LONGEST].splitlines()[1:])
        name = _name_in(text)
        if name:
            return f"Nice to meet you, {name}."
        if _FACT.search(text[:LONGEST]) and "?" not in text:
            return "I will remember that, as long as it stands in this conversation."
        if is_greeting:
            return _HELLO
        return (
            f"I have no rule and no tool for “{shortened(text, _SHOWN)}”. I am perdure's offline stand-in, not a "
            "language model; ask for help to see what I can do, or choose a model."
        )

    def _help(self) -> str:
        said = f"{IDENTITY} I can work out sums, tell the date and the time, and recall what was said here."
        if not self._tools:
            return f"{said} I have no tools."
        names = ", ".join(tool.name for tool in self._tools[:20])
        return f"{said} I can call these tools: {names}. To be exact, write it out: call {self._tools[0].name} {{…}}"

    def _recalled(self, said: str) -> str | None:
        if _NAME_ASKED.fullmatch(said):
            name = next(filter(None, map(_name_in, self._texts("user")[::-1])), None)
            return f"Your name is {name}." if name else "You have not told me your name."
        fact = _FACT_ASKED.fullmatch(said)
        if fact:
            return self._fact(fact[1])
        about = _ABOUT.fullmatch(said)
        if about:
            found = [text for text in self._texts("user") if about[1] in plain(text[:LONGEST])]
            return _listing(f"About {about[1]} you said", found) if found else f"You said nothing about {about[1]}."
        return self._quoted(said)

    def _fact(self, wanted: str) -> str | None:
        for text in reversed(self._texts("user")):
            for fact in _FACT.finditer(text[:LONGEST]):
                if plain(fact[1]) == wanted:
                    return f"Your {wanted} {fact[2].lower()} {fact[3].strip()}."
        return None

    def _quoted(self, said: str) -> str | None:
        if _FIRST.fullmatch(said):
            return _quotation("The first thing you said was", self._texts("user")[:1])
        if _LAST.fullmatch(said):
            return _quotation("Before this you said", self._texts("user")[-1:])
        if _REPEAT.fullmatch(said):
            return next(iter(self._texts("assistant")[-1:]), "I have not said anything yet.")
        if _RECAP.fullmatch(said):
            return _listing("So far you said", self._texts("user"))
        return None

    def _texts(self, role: str) -> list[str]:
        return [message.text for message in self._earlier if message.role == role and message.text.strip()]


def without_greeting(text: str) -> str:
    """A text without the greeting it opens with, unless that is all there is."""
    rest = _GREETING.sub("", text, count=1)
    return rest if plain(rest[:LONGEST]) else text


def asks_time(text: str) -> bool:
    return bool(_TIME_ASKED.search(plain(text[:LONGEST])))


def told_time(text: str) -> str | None:
    """The date and the time, if that is what a text asks for."""
    if not asks_time(text):
        return None
    time = now()
    return f"It is {time:%A}, {time.day} {time:%B} {time.year}, {time:%H:%M} {time.tzname() or ''}".rstrip() + "."


def _quotation(opening: str, texts: Sequence[str]) -> str:
    return f"{opening}: “{shortened(texts[0], 500)}”" if texts else "You have not said anything before this."


def _listing(opening: str, texts: Sequence[str]) -> str:
    shown = [f"“{shortened(text, _SHOWN)}”" for text in texts if text.strip()]
    if not shown:
        return "Nothing has been said before this."
    more = f"; and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return f"{opening}: {'; '.join(shown[:_LISTED])}{more}."


def _name_in(text: str) -> str | None:
    """The name that somebody gives as their own: one word, and those after it that are written large."""
    given = _NAME.search(text[:LONGEST])
    if given is None:
        return None
    first, *more = given[1].split()
    kept = [first]
    for word in more:
        if not word[:1].isupper():
            break
        kept.append(word)
    return " ".join(kept)


def _any(*phrases: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{phrase})" for phrase in phrases))


_GREETING = re.compile(
    r"^\s{0,9}(?:hi|hello|hey|hiya|howdy|greetings|good (?:morning|afternoon|evening|day))(?: there| again| perdure)?"
    r"(?=[\s,.!:;-]|$)[\s,.!:;-]{0,9}",
    re.IGNORECASE,
)
_HELLO = f"Hello! {IDENTITY}"
_MANNERS = (
    (
        _any(r"(?:hi|hello|hey|hiya|howdy|greetings|good (?:morning|afternoon|evening|day))(?: \w{1,30}){0,2}"),
        _HELLO,
    ),
    (_any(r"(?:many )?thanks?(?: you)?(?: (?:so|very) much| a lot)?(?: for .{1,100})?", "cheers"), "You are welcome."),
    (_any("(?:good ?)?bye(?: bye)?", "see you(?: \\w{1,20})?", "good ?night"), "Goodbye."),
    (_any("how (?:are|do) you(?: do(?:ing)?)?(?: today)?"), f"Well, thank you. {IDENTITY}"),
    (
        _any(
            "(?:who|what)(?: exactly)? are you",
            "are you(?: \\w{1,20}){1,5}",
            "what is your name",
            "(?:what|which) (?:\\w{1,20} )?model (?:are you|is this)",
        ),
        IDENTITY,
    ),
)
_HELP = _any("help(?: me)?", "what (?:can|do) you do", "(?:what|which) tools (?:do|can) you (?:have|use|call)")
_NAME_ASKED = _any(
    "what (?:is|was) my name",
    "who am i",
    "(?:do|can) you (?:know|remember|recall|tell me|say) (?:what )?my name(?: is)?",
)
_FACT_ASKED = _any("(?:what|who|where|when) (?:is|are|was) my ((?:\\w{1,40} ){0,3}\\w{1,40})")
_FACT = re.compile(r"\bmy ((?:\w{1,40} ){0,3}?\w{1,40}) (is|are) ([^.!?\n]{1,200})", re.IGNORECASE)
_ABOUT = _any("what (?:did|have) i (?:say|said|tell you|told you) about (?:the )?(.{1,100})")
_FIRST = _any(
    "what (?:did|have) i (?:say|said|ask|asked)(?: you)?(?: at)? (?:first|the beginning|the start)",
    "what was (?:my first (?:message|question)|the first thing i (?:said|asked))",
)
_LAST = _any(
    "what (?:did|have) i (?:just )?(?:say|said|ask|asked)(?: you)?(?: last| before| just now)?",
    "what was (?:my (?:last|previous) (?:message|question)|the last thing i (?:said|asked))",
)
_REPEAT = _any(
    "(?:please )?(?:repeat|say)(?: that| it)?(?: again)?(?: please)?",
    "again",
    "what did you (?:just )?say(?: last| before)?",
)
_SUMMARISE = re.compile(r"\b(?:summari[sz]e|summary|recap)\b", re.IGNORECASE)
_RECAP = _any(
    "(?:please |can you |could you )?(?:give me a |make a )?(?:summari[sz]e|summary|recap|sum up)"
    "(?: of)?(?: (?:it|that|this|all|everything|what \\w{1,20} \\w{1,20}|so far|the|our|conversation|chat|session|"
    "discussion|please|we|i|you|said)){0,8}",
    "what have we (?:said|talked about|discussed)(?: so far)?",
)
_NAME = re.compile(
    r"\b(?:my name is|my name['’]s|i am called|i'm called|(?:you can |please )?call me)\s{1,9}"
    r"(\w[\w'’-]{0,40}(?: \w[\w'’-]{0,40}){0,3})",
    re.IGNORECASE,
)
_ECHO = re.compile(r"\s{0,9}(?:please )?(?:repeat(?: after me)?|say|echo)\b[\s:]{1,9}(\S.{0,600})", re.IGNORECASE)
_TIME_ASKED = _any(
    r"\b(?:what|which) (?:day|date|time|year|month|weekday)(?: of the (?:week|month))? is (?:it|today)\b",
    r"\bwhat (?:is|are) (?:the )?(?:current )?(?:date|time|day|weekday)(?: and (?:date|time))?(?: today| now| it is)?$",
    r"\bwhat is today(?: is date)?$",
    r"\btoday is date\b",
    r"\b(?:current|today s) (?:date|time|day)\b",
)
