"""docs/record.md lists every event that a subscriber gets, with its fields."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec

from perdure.model.events import SessionEvent
from perdure.model.loop_events import AnyLoopEvent, LoopEvent

PAGE = (Path(__file__).parents[1] / "docs" / "record.md").read_text(encoding="utf-8")
RUNS, SESSIONS = typing.get_args(AnyLoopEvent), typing.get_args(SessionEvent)


def listed() -> dict[str, tuple[str, list[str]]]:
    """Return the type and the fields of each event on the page."""
    section = PAGE.partition("### All events\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return {
        name.strip(" `"): (tag.strip(" `"), re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", fields)))
        for name, tag, _, fields in rows
    }


def facts_of(event: type[msgspec.Struct], shared: tuple[str, ...]) -> tuple[object, list[str]]:
    hidden = {*shared, "unknown"}
    return event.__struct_config__.tag, [name for name in event.__struct_fields__ if name not in hidden]


def test_every_event_is_listed_with_its_fields() -> None:
    """They are in the order of their declaration; a new or removed event fails here until the page has the change."""
    wanted = {event.__name__: facts_of(event, LoopEvent.__struct_fields__) for event in RUNS}
    wanted |= {event.__name__: facts_of(event, ()) for event in SESSIONS}
    assert listed() == wanted


def test_the_fields_that_all_events_of_a_run_have_are_named() -> None:
    shared = PAGE.partition("### All events\n")[2].partition("| event |")[0]
    assert set(LoopEvent.__struct_fields__) - {"unknown"} <= set(re.findall(r"`(\w+)`", shared))
