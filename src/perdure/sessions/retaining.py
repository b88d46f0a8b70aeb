"""Retention: keep sessions for as long as rules say, and those under a legal hold in any case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from perdure.errors import KeyForgotten
from perdure.model.checks import expect
from perdure.model.ids import SessionId, now
from perdure.model.retention import Retention, RetentionPolicy, hold_tag, no_hold
from perdure.protocols import Retains, SealedStore
from perdure.sessions.keeping import Keeping
from perdure.sessions.reach import cannot

if TYPE_CHECKING:
    from perdure.sessions.rounds import RetentionReport


class Retaining(Keeping):
    """The verbs about how long sessions are kept."""

    async def retain(self, session_id: str, rule: Retention | None) -> None:
        """Give a session a `rule` of its own about how long it is kept. None takes it away.

        It overrides the rules of its tags, its owner and the connection. Every worker applies it.
        """
        from perdure.actions.metadata import RetainSession

        await self.execute(session_id, RetainSession(rule))

    async def hold(self, session_id: str, case: str | None = None) -> None:
        """Put a legal hold on a session: until it is lifted, nothing of it can be erased, forgotten or redacted.

        The hold is the tag `hold`, or `hold:case` for a `case`. It covers the sessions of sub-agents, too, and is put
        on record.
        """
        from perdure.actions.metadata import TagSession

        await self.execute(session_id, TagSession(hold_tag(case)))

    async def lift_hold(self, session_id: str, case: str | None = None) -> None:
        """Lift the legal hold of a `case`, and put that on record. Raise InvalidData if the session has no such hold.

        If the session's key was forgotten, its record is erased too, and the hold is lifted without an entry there.
        """
        from perdure.actions.metadata import TagSession

        tag = hold_tag(case)
        self._require_no_owner("An owner cannot lift a hold.")
        try:
            info = await self.info(session_id)
        except KeyForgotten:
            if not isinstance(self.store, SealedStore):
                raise
            await self.store.drop_hold(session_id, tag)
            return
        if tag not in info.tags:
            raise no_hold(info.id, tag, info.tags)
        await self.execute(info.id, TagSession(remove=(tag,)))

    async def holds(self, session_ids: Iterable[str]) -> Mapping[SessionId, str]:
        """Return those sessions of `session_ids` that a legal hold is on, each with its tag.

        The hold may be on the session that has called a sub-agent's.
        """
        keys = [(await self.info(each)).id for each in session_ids]
        return await self._retains().holds(keys)

    async def apply_retention(
        self, policy: Retention | RetentionPolicy | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Erase the sessions and versions whose time is over. Return what was erased, and which sessions stay and why.

        The rules are those of the `policy`, or else of the connection, and those that sessions have of their own. With
        `dry_run` nothing is erased: the report says what would be. Sessions stay while something is under way in them
        or waits there, and while they are under a legal hold. With an owner, only that owner's sessions are looked at.
        """
        from perdure.sessions.rounds import Round

        expect(dry_run, bool, "$.dry_run")
        rules = self._connection.retention if policy is None else RetentionPolicy.of(policy)
        return await Round(self, rules, now()).carry_out(dry_run=dry_run)

    def _retains(self) -> Retains:
        self._require_open()
        if not isinstance(self.store, Retains):
            raise cannot(self.store, "keep sessions by rules")
        return self.store
