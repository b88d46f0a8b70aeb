"""What a store is asked for when it finds sessions by the beginning of their id."""

from __future__ import annotations

from typing import NamedTuple

from perdure.model.checks import expect, expect_count
from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo, SessionStatus, check_owner

_BEHIND_ALL = "~"
"""Greater than any character that an id can have, in the order of ASCII."""


class Beginning(NamedTuple):
    """A beginning of ids, checked, and which of the sessions that have it are sought."""

    prefix: str
    owner: str | None
    deleted: bool
    limit: int

    @classmethod
    def of(cls, prefix: str, owner: str | None, deleted: bool, limit: int) -> Beginning:
        expect_count(limit, "$.limit", least=1)
        expect(deleted, bool, "$.deleted")
        check_owner(owner)
        return cls(expect(prefix, str, "$.prefix") and SessionId(prefix), owner, deleted, limit)

    @property
    def bounds(self) -> tuple[str, str]:
        """The ids that begin so are those from the first of these up to the second."""
        return str(self.prefix), f"{self.prefix}{_BEHIND_ALL}"

    def is_met_by(self, session_id: str, info: AgentSessionInfo) -> bool:
        return (
            session_id.startswith(self.prefix)
            and self.owner in (None, info.owner)
            and self.deleted == (info.status is SessionStatus.DELETED)
        )
