"""Lists of sessions: pages of headers by filters, and ids by their beginning or end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from msgspec import UNSET

from perdure.errors import CorruptRecord, InvalidData, InvalidSessionId, KeyUnavailable
from perdure.model.checks import expect, expect_count
from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo, SessionInfoList, SessionStatus, check_owner, tag_rows
from perdure.protocols import SHORTEST_SUFFIX, SessionQuery
from perdure.stores.engine import Job, Select
from perdure.stores.format.heads import decode_info, unpacked_head
from perdure.stores.format.rows import ListPlace, Order, page_start
from perdure.stores.jobs.claiming import stored_id
from perdure.stores.sealing import Sealing, is_sealed

_BEHIND_ALL = "~"
"""Greater than any character that an id can have, in the order of ASCII."""
_SUFFIX = re.compile(r"[A-Za-z0-9._-]{1,200}")
_FILTERS = {
    "id": "id",
    "agent": "agent",
    "status": "status",
    "owner": "owner",
    "parent": "parent",
    "created >": "created_after",
    "created <": "created_before",
    "updated >": "updated_after",
    "updated <": "updated_before",
}


class HeaderRow(NamedTuple):
    """A session's row, and the head of its newest version.

    `time` and `sid` come from an index. If the row is missing, all other fields are None. If the head is missing, `crc`
    and `body` are None.
    """

    time: float
    """The time of creation or update, by which the list is ordered."""
    sid: int
    id: str | None
    version: int
    status: str
    crc: int | None
    body: bytes | None


class Page:
    """A request for a page of a list. One row more than the page is asked for, which tells whether there are more."""

    def __init__(self, query: SessionQuery) -> None:
        self.query = query
        self.start = page_start(query.after, query.order)
        self.most = query.limit + 1

    @property
    def where(self) -> dict[str, Any]:
        """The conditions on a session's row, except for the tag and the place at which the page starts."""
        query = self.query
        asked = {key: getattr(query, name) for key, name in _FILTERS.items()}
        where = {key: _bare(value) for key, value in asked.items() if value is not None and value is not UNSET}
        where |= {"owner": None} if query.owner is None else {}
        where |= {"spawned": 0} if query.top_level else {}
        return where if query.shows_deleted else {**where, "status !=": SessionStatus.DELETED.value}

    def job(self) -> Job[list[HeaderRow]]:
        sids: set[int] | None = None
        for mark in self.query.marks:
            found = {sid for (sid,) in (yield Select("tag", ("sid",), {"tag": mark}))}
            sids = found if sids is None else sids & found
        order = self.query.order
        columns = (order, "sid", "id", "version", "status")
        rows = yield Select("session", columns, self.where, order=f"-{order} -sid")
        chosen = [row for row in rows if (sids is None or row[1] in sids) and self._is_behind_start(row)]
        page = []
        for row in chosen[: self.most]:
            heads = yield Select("head", ("crc", "body"), {"sid": row[1], "version": row[3]}, lenient=True)
            page.append(HeaderRow(*row, *(heads[0] if heads else (None, None))))
        return page

    def _is_behind_start(self, row: Sequence[Any]) -> bool:
        return self.start is None or (row[0], row[1]) < self.start

    def listed(self, rows: Sequence[HeaderRow], sealing: Sealing) -> SessionInfoList:
        """Return the rows of a page as a list of headers. Damaged ones are named beside the others."""
        infos: list[AgentSessionInfo] = []
        damaged: list[CorruptRecord | KeyUnavailable] = []
        for row in rows[: self.query.limit]:
            try:
                if is_sealed(row.body):
                    body, crc = sealing.opened("head", row.body, row.crc)
                    row = row._replace(crc=crc, body=body)
                infos.append(_info_of(self.query, row))
            except KeyUnavailable as error:
                damaged.append(error.of_session(row.id))
            except CorruptRecord as error:
                damaged.append(error)
        last = ListPlace(*rows[self.query.limit - 1][:2]) if len(rows) > self.query.limit else None
        more = last and last.next(self.query.order)
        return SessionInfoList(infos, next=more, damaged=damaged)


def _bare(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.timestamp()
    return value.value if isinstance(value, SessionStatus) else value


def _info_of(query: SessionQuery, row: HeaderRow) -> AgentSessionInfo:
    if row.id is None:
        raise CorruptRecord(None, f"session {row.sid}", "an index leads to it, and it is not there")
    if row.body is None:
        raise CorruptRecord(row.id, f"head {row.version}", "it is missing")
    info = decode_info(unpacked_head(row.body, row.crc, row.id, row.sid, row.version), row.id, row.version)
    # The time may come from an index, and a damaged index can lead to another row.
    said = (time_in(info, query.order), info.id, info.version, info.status.value)
    if said != (row.time, row.id, row.version, row.status) or not matches(info, query):
        raise CorruptRecord(row.id, "header", "it does not agree with its head")
    return info


def time_in(info: AgentSessionInfo, order: Order) -> float:
    """Return the time in a header by which a list is ordered."""
    return (info.created_at if order == "created" else info.updated_at).timestamp()


def matches(info: AgentSessionInfo, query: SessionQuery) -> bool:
    """Tell whether a header matches a query."""
    if info.status is SessionStatus.DELETED and not query.shows_deleted:
        return False
    wanted = (
        (query.id, info.id),
        (query.agent, info.agent_name),
        (query.status, info.status),
        (query.parent, info.parent_id),
    )
    if any(asked is not None and asked != found for asked, found in wanted):
        return False
    if query.owner is not UNSET and query.owner != info.owner:
        return False
    if query.top_level and info.spawn_ref is not None:
        return False
    if not {*query.marks} <= {*tag_rows(info)}:
        return False
    return not (
        (query.created_after is not None and info.created_at <= query.created_after)
        or (query.created_before is not None and info.created_at >= query.created_before)
        or (query.updated_after is not None and info.updated_at <= query.updated_after)
        or (query.updated_before is not None and info.updated_at >= query.updated_before)
    )


class IdPart(NamedTuple):
    """A checked beginning or end of ids, with the filters for the sessions that are sought."""

    where: Mapping[str, str]
    owner: str | None
    deleted: bool
    limit: int

    @classmethod
    def beginning(cls, prefix: str, owner: str | None, deleted: bool, limit: int) -> IdPart:
        given = expect(prefix, str, "$.prefix") and SessionId(prefix)
        return cls({"id >=": str(given), "id <": f"{given}{_BEHIND_ALL}"}, owner, deleted, limit)._checked()

    @classmethod
    def end(cls, suffix: str, owner: str | None, deleted: bool, limit: int) -> IdPart:
        if not _SUFFIX.fullmatch(expect(suffix, str, "$.suffix")):
            raise InvalidSessionId(suffix)
        if len(suffix) < SHORTEST_SUFFIX:
            raise InvalidData(
                "$.suffix", f"{suffix!r} is too short to find sessions by; give {SHORTEST_SUFFIX} characters or more"
            )
        return cls({"id ends": str(suffix)}, owner, deleted, limit)._checked()

    def _checked(self) -> IdPart:
        expect_count(self.limit, "$.limit", least=1)
        expect(self.deleted, bool, "$.deleted")
        check_owner(self.owner)
        return self

    def job(self) -> Job[list[SessionId]]:
        where: dict[str, Any] = {**self.where, "status" if self.deleted else "status !=": SessionStatus.DELETED.value}
        if self.owner is not None:
            where["owner"] = self.owner
        rows = yield Select("session", ("id",), where, order="id", limit=self.limit)
        return [stored_id(found) for (found,) in rows]
