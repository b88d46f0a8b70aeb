"""A store's rows as redaction sees them, and what it is given back to write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from perdure.protocols import Entry
from perdure.stores.jobs.redaction.held import Log, Places, Row
from perdure.stores.jobs.redaction.versions import Version


class Bench(Protocol):
    """A store's rows, opened for one redaction. Sessions are named by their ids."""

    def history(self, session_id: str) -> Iterable[Row]:
        """All messages in a session's logs, and those of others' that it shows; SessionNotFound if there is none."""
        ...

    def row(self, log: Log, position: int) -> bytes: ...

    def concerned(self, places: Places) -> Collection[str]:
        """The sessions whose logs hold one of these messages or that show one, and all forks of these."""
        ...

    def require_free(self, session_id: str) -> None:
        """Raise SessionBusy while a session is being run."""
        ...

    def versions(self, session_id: str) -> Iterable[Version]: ...

    def entries(self, session_id: str) -> Sequence[Entry]: ...

    def inbox(self, session_id: str) -> Sequence[Entry]: ...

    def replace(self, rows: Sequence[Row], sessions: Sequence[Redone]) -> None:
        """Write it all."""
        ...


class Redone(NamedTuple):
    """A session with what is to be replaced in it, and the entry that tells of it.

    It is given a further version, unless a run of its was interrupted: who loaded it before cannot save over this.
    """

    session_id: str
    versions: Sequence[Version]
    """Those that are changed."""
    entries: Mapping[int, Entry]
    """Those that are changed, by their places in the record, from 0."""
    inbox: Mapping[int, Entry]
    told: Entry
