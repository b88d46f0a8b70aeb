"""A session told in plain lists: the model that the state machine compares every store with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any


class Cover:
    """A compaction: it shows some messages in place of those that it covers."""

    def __init__(self, covered: View, shown: Iterable[str], born: int) -> None:
        self.covered = covered
        self.shown = tuple(shown)
        self.born = born


View = tuple["str | Cover", ...]
"""The messages that a model is shown: ids of messages, and covers."""


def shown(view: View) -> list[str]:
    return [each for item in view for each in (item.shown if isinstance(item, Cover) else (item,))]


def held(view: View) -> Iterator[str]:
    """Return every message that a view names, covered ones before those that stand for them."""
    for item in view:
        if isinstance(item, Cover):
            yield from held(item.covered)
            yield from item.shown
        else:
            yield item


def cut(view: View, start: int, stop: int) -> View:
    """Return messages `start` to `stop` of a view. A cover that is cut through becomes plain messages."""
    kept: list[str | Cover] = []
    place = 0
    for item in view:
        ids = item.shown if isinstance(item, Cover) else (item,)
        inside = [each for at, each in enumerate(ids, place) if start <= at < stop]
        kept += [item] if len(inside) == len(ids) else inside
        place += len(ids)
    return tuple(kept)


def covered(view: View, new: list[str], born: int) -> View:
    """Return a view once a compaction has made it show other messages: the end that both share stays outside."""
    before = shown(view)
    same = 0
    while same < min(len(before) - 1, len(new)) and new[-1 - same] == before[-1 - same]:
        same += 1
    stop = _edge(view, len(before) - same)
    outside = len(before) - stop
    inner, outer = cut(view, 0, stop), cut(view, stop, len(before))
    return (Cover(inner, new[: len(new) - outside], born), *outer)


def _edge(view: View, place: int) -> int:
    passed = 0
    for item in view:
        if passed >= place:
            break
        passed += len(item.shown) if isinstance(item, Cover) else 1
    return passed


def uncovered(view: View) -> View | None:
    """Return a view without its newest cover; None if it has none."""
    covers = [item for item in view if isinstance(item, Cover)]
    if not covers:
        return None
    newest = max(covers, key=lambda cover: cover.born)
    return tuple(each for item in view for each in (newest.covered if item is newest else (item,)))


class NaiveSession:
    """A session's views by version, the views that undo goes back to, and all that was said."""

    def __init__(self, session_id: str, view: View = (), said: Iterable[str] = (), parent: str | None = None) -> None:
        self.id = session_id
        self.parent = parent
        self.versions: list[View] = [view]
        self.first = 1
        """The oldest version that is kept."""
        self.steps: list[tuple[View, int]] = [(view, 1)]
        """The views that undo goes back to, and the versions that first had them."""
        self.said: list[str] = list(dict.fromkeys(said))

    @property
    def view(self) -> View:
        return self.versions[-1]

    def becomes(self, view: View, *new: str) -> None:
        """Add the next version; new messages are said at the end."""
        self.versions.append(view)
        self.said += new
        if view != self.steps[-1][0]:
            self.steps.append((view, len(self.versions)))

    def undo(self) -> bool:
        if len(self.steps) == 1:
            return False
        self.steps.pop()
        self.versions.append(self.steps[-1][0])
        return True

    @property
    def kept(self) -> list[View]:
        """Return the views of the versions that are kept."""
        return self.versions[self.first - 1 :]

    def forget(self, before: int) -> None:
        """Keep the versions from one on, and add one that says so. Undo goes back as far as these show."""
        self.first = before
        left = [place for place, (_, version) in enumerate(self.steps) if version >= before]
        lowest = left[0] if left else len(self.steps) - 1
        if left and lowest and self.steps[lowest][1] > before:
            lowest -= 1
        self.steps = self.steps[lowest:]
        self.becomes(self.view)

    def holds(self, message_id: str) -> bool:
        """Return True if a message is in the log, or if a kept version shows or covers it."""
        return message_id in self.said or any(message_id in held(view) for view in self.kept)

    def twin(self) -> NaiveSession:
        made = copy(self)
        made.versions, made.steps, made.said = [*self.versions], [*self.steps], [*self.said]
        return made


class NaiveStore:
    """Sessions by id, and the content of every message, as plain data."""

    def __init__(self) -> None:
        self.sessions: dict[str, NaiveSession] = {}
        self.messages: dict[str, dict[str, Any]] = {}
        self.words: dict[str, str] = {}
        """A word that only this message has, by the message's id."""
        self.redacted: set[str] = set()
        self.changed: set[str] = set()
        """Messages that a redaction may have changed, and that were not compared since."""

    def mark(self, message_id: str) -> str | None:
        """Return the strategy that made a message; None if somebody said it."""
        found: str | None = self.messages[message_id].get("metadata", {}).get("compaction")
        return found

    def unmarked(self, ids: Iterable[str]) -> list[str]:
        return [each for each in ids if self.mark(each) is None]

    def safe_cut(self, ids: list[str], at: int) -> int:
        """Return the nearest place at or before `at` that parts no tool's result from its call."""
        calls = {call: place for place, each in enumerate(ids) for call in self._parts(each, "tool_call", "id")}
        results = [
            (call, place) for place, each in enumerate(ids) for call in self._parts(each, "tool_result", "call_id")
        ]
        pairs = [(calls[call], place) for call, place in results if calls.get(call, place) < place]
        at = max(at, 0)
        while any(call < at <= result for call, result in pairs):
            at -= 1
        return at

    def _parts(self, message_id: str, kind: str, field: str) -> list[str]:
        return [part[field] for part in self.messages[message_id]["parts"] if part["type"] == kind]

    def forks(self, session_id: str) -> list[str]:
        return [each.id for each in self.sessions.values() if each.parent == session_id]

    def is_fork(self, branch: NaiveSession, session_id: str) -> bool:
        parent = branch.parent
        while parent is not None and parent != session_id:
            parent = self.sessions[parent].parent if parent in self.sessions else None
        return parent == session_id

    def any_session(self, which: int, wanted: Callable[[NaiveSession], bool] = lambda _: True) -> NaiveSession | None:
        found = [each for each in self.sessions.values() if wanted(each)]
        return found[which % len(found)] if found else None
