"""The history of a turn in which new answers replace those on record."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.model.loop_events import AnyLoopEvent, InputRejected, MessageEnd
from perdure.model.message import Message
from perdure.model.transcript import Transcript
from perdure.replay.story import PlayedTurn


class Retold:
    """A turn on record, and the messages of its replay."""

    def __init__(self, turn: PlayedTurn, replayed: Sequence[AnyLoopEvent]) -> None:
        self._loop_id = turn.loop_id
        asked = {message.id for message in turn.asked}
        self._said = {message.id for message in _said(turn.events) if message.id not in asked}
        self.new = [message for message in _said(replayed) if message.id not in asked]

    def places_in(self, view: Sequence[Message]) -> tuple[int, int] | None:
        """Return the start and end of the run on record within a view, or None if the view does not show all of it."""
        places = [place for place, message in enumerate(view) if message.id in self._said]
        return (places[0], places[-1] + 1) if places and len(places) == len(self._said) else None


def retold(view: Transcript, turns: Sequence[Retold]) -> tuple[Transcript, list[Message]] | None:
    """Return the beginning of a view that stays, and the messages behind it with the new answers among them.

    Return None if nothing changes. A run of which the view shows only a part, or a summary, stays as it is.
    """
    messages = list(view)
    first = len(messages)
    for turn in turns:
        found = turn.places_in(messages)
        if found is not None:
            start, stop = found
            messages[start:stop] = turn.new
            first = min(first, start)
    if first >= len(view):
        return None
    return view.cut(0, first), messages[first:]


def _said(events: Sequence[AnyLoopEvent]) -> list[Message]:
    refused = {name for event in events if isinstance(event, InputRejected) for name in event.message_ids}
    said = [event.message for event in events if isinstance(event, MessageEnd)]
    return [message for message in said if message.id not in refused and not message.is_superseded]
