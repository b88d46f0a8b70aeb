"""The controls of attacks: each removes a protection of a store in the calling process.

Each function is given `setattr`, or `monkeypatch.setattr` to undo it later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.model.session import AgentSession
from perdure.protocols import Claim
from perdure.stores import folder
from perdure.stores.file import log
from perdure.stores.format import heads
from perdure.stores.jobs import claiming, loading, record, saving, sketching, timers, tokens
from perdure.stores.jobs.claiming import Facts
from perdure.stores.sqlite import glimpse, sums, wal
from perdure.stores.store import Store

Put = Callable[[Any, str, Any], None]


def without_file_locks(put: Put = setattr) -> None:
    """Write to files without the locks of their sessions."""
    put(folder, "_flock", lambda handle, deadline: True)


def without_versions(put: Put = setattr) -> None:
    """Save a session on top of any newer version."""
    refuse = saving.Keep.refuse

    def refused(self: saving.Keep, facts: Facts) -> None:
        if not self.is_new and facts.sid is not None:
            self.session = AgentSession.reconstitute(self.session, version=facts.version, updated_at=self.at)
            self.version = facts.version + 1
        refuse(self, facts)

    put(saving.Keep, "refuse", refused)


def without_message_checksums(put: Put = setattr) -> None:
    """Accept any message's row without its checksum."""
    put(loading, "_are_sound", lambda *_: True)
    put(glimpse, "FEW", -1)  # a short read checks more than checksums


def without_row_checksums(put: Put = setattr) -> None:
    """Accept any row without its checksum. Only reads work then."""
    without_message_checksums(put)
    put(heads, "check_row", lambda *_: None)
    for name in ("batch_checksum", "entry_checksum", "key_checksum"):
        put(record, name, lambda *_: _Anything())
    for module, name in ((timers, "_checksum"), (sketching, "_checksum"), (tokens, "checksum")):
        put(module, name, lambda *_: _Anything())


class _Anything:
    """Equals any value."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def without_line_checksums(put: Put = setattr) -> None:
    """Accept each line of a session's log that can be decoded."""

    def opened(raw: bytes) -> log.Line | None:
        with suppress(msgspec.MsgspecError):
            return log._line_decoder.decode(b"{" + raw[log._SEAL_LENGTH :])
        return None

    put(log, "_opened", opened)


def without_page_checksums(put: Put = setattr) -> None:
    """Accept each page of the search index."""
    put(sums, "is_sound", lambda *_: True)


def without_marks(put: Put = setattr) -> None:
    """Accept the write-ahead log as SQLite does."""
    put(wal, "require_sound_log", lambda *_: None)


def without_checks(put: Put = setattr) -> None:
    """Find nothing wrong with a store."""

    async def check(self: Any, **_: Any) -> list[Any]:
        return []

    put(Store, "check", check)


def without_epochs(put: Put = setattr) -> None:
    """Write under a claim that another has taken over, as long as there is any claim."""
    refusal = saving.refusal

    def refused(session_id: str, facts: Facts, claim: Claim | None, **more: Any) -> Any:
        return refusal(session_id, facts, claim and replace(claim, epoch=facts.epoch), **more)

    put(saving, "refusal", refused)
    put(claiming, "held", lambda claim: {"id": str(claim.session_id), "claim !=": None})
    try:
        from perdure.stores.postgres import parcel
    except ImportError:  # the store needs psycopg
        return
    statement = parcel.statement
    put(parcel, "statement", lambda parts: statement(parts).replace("AND now_epoch = epoch", ""))
