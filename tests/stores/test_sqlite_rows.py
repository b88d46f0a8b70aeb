"""The rows that every verb writes to a SQLite file, against those that the release before the port to engines wrote.

`tests/golden/rows/sqlite.json` was written by that release, which is gone. Old and new were also run in lock-step over
thousands of sequences when the one took the other's place. Since then heads also say since when their view is shown,
and a new run stands in its head: it is put back here into the row apart that it had. Headers and states also count what
runs have used, which is left out here.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.actions.metadata import TagSession
from perdure.actions.transcript import TrimTranscript
from perdure.model.ids import use
from perdure.model.message import Message
from perdure.protocols import Entry, Key
from perdure.stores.claims import Holder
from perdure.stores.engine import TABLES as KEPT
from perdure.stores.format import packing
from perdure.stores.format.heads import INLINE
from perdure.stores.format.rows import hash_of
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import fork, new_session, note, run_of, say

GOLDEN = Path(__file__).parent.parent / "golden" / "rows" / "sqlite.json"
ORDERED = ("msg", "head", "batch", "inbox")
TABLES = (*ORDERED, "meta", "session", "tag", "log", "value", "uses", "ref", "run", "key", "sqlite_sequence")


async def test_every_verb_writes_the_rows_that_it_wrote_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "here", classmethod(lambda cls, owner, since: cls(owner)))
    monkeypatch.setattr("uuid_utils.uuid7", lambda: "0" * 36)  # a thread does not see the replaced source of ids
    path = tmp_path / "sessions.db"
    await play(path)
    found, expected = rows_in(path), json.loads(GOLDEN.read_text())
    for table in TABLES:
        assert found[table] == expected[table], table


async def play(path: Path) -> None:
    async with SqliteStore(path):
        pass
    db = apsw.Connection(str(path))
    db.execute("UPDATE meta SET value = 'feedface' WHERE key = 'uid'")
    db.close()
    # Time stands still during a verb, and ids begin again with each: how often a store asks makes no difference.
    at, ids = datetime(2026, 1, 1, tzinfo=UTC), count()
    with use(clock=lambda: at, ids=lambda: f"{at.second:018d}{next(ids):018d}"):
        async with SqliteStore(path) as store, SqliteStore(path, cache=0) as other:
            async for _ in verbs(store, other):
                at, ids = at + timedelta(seconds=1), count()


async def verbs(store: Any, other: Any) -> Any:
    """Yield after each verb."""
    talk = await store.create(new_session("one", "two", "three", id="talk", owner="ada", tags=("x", "y")))
    yield
    gone = await store.create(new_session("to be erased", "but for this", id="gone"))
    yield
    child = await store.create(fork(gone, id="child"))
    yield
    talk = await other.save(note(say(talk, "four"), "large", "v" * 400))
    yield
    talk = await store.save(await TagSession("z").execute_on(talk))
    yield
    talk = await store.save(run_of(talk), key=Key("first", "digest"))
    yield
    talk = await store.save(await TrimTranscript(3).execute_on(talk))
    yield
    await store.post("talk", Entry("message", {"text": "posted"}))
    yield
    await store.post("talk", Entry("message", {"text": "posted again"}, "run1"))
    yield
    claim, _ = await store.claim(
        "talk", version=talk.version, owner="me", messages=[Message.user("ask")], entries=[Entry("start", {}, "run1")]
    )
    yield
    entries = [Entry("step", {"n": number}, f"run{1 + number // 2}") for number in range(3)]
    await store.append(claim, messages=[Message.assistant("tell")], entries=entries, taken=1)
    yield
    await store.append(
        claim, messages=[Message.assistant("aside")], entries=[Entry("step", {}, "branch")], log="branch"
    )
    yield
    await store.heartbeat(claim)
    yield
    talk = await store.save(
        say(talk, "done"), claim=claim, entries=[Entry("end", {}, "run1")], taken=2, key=Key("first", "again")
    )
    yield
    claim, _ = await store.claim("child", version=child.version, owner="me", entries=[Entry("start", {}, "c")])
    yield
    await store.release(claim, interrupted=True)
    yield
    claim, _ = await store.claim("child", version=child.version, owner="you", take_over=True)
    yield
    await store.release(claim)
    yield
    await store.redact("talk", [talk.state.messages[0].id])
    yield
    await store.delete("gone")
    yield
    await store.create(new_session("brief", id="brief"))
    yield
    archived = await store.dump("brief")
    yield
    await store.delete_many(["brief", "nobody"])
    yield
    await store.restore(archived)
    yield
    await store.gc()
    yield


def _counts(table: str, name: str, value: Any) -> bool:
    if (table, name) in (("session", "since"), ("session", "priority")):  # a post sets it now
        return False
    return name not in ("crc", "recent") and not (name in ("line", "since", "spawned") and not value)


def rows_in(path: Path) -> dict[str, list[Any]]:
    """Return all rows. Bodies are unpacked, since another zlib packs them otherwise; checksums, which are of what is
    packed, are left to those who read them. Columns that came later are, too, where they hold nothing or follow."""
    db = apsw.Connection(str(path))
    found = {}
    for table in TABLES:
        names = KEPT[table].columns if table in KEPT else ("name", "seq")
        order = " ORDER BY rowid" if table in ORDERED else ""
        rows = [
            dict(zip(names, row, strict=True)) for row in db.execute(f"SELECT {', '.join(names)} FROM {table}{order}")
        ]
        plain = [{name: _plain(value) for name, value in row.items() if _counts(table, name, value)} for row in rows]
        found[table] = plain
    db.close()
    for head in found["head"]:
        _leave_totals_out(head)
        _set_run_apart(head, found)
    return {table: rows if table in ORDERED else sorted(rows, key=json.dumps) for table, rows in found.items()}


def _leave_totals_out(head: dict[str, Any]) -> None:
    body = json.loads(head["body"])
    if [body["info"].pop("usage", None), body["state"].pop("spent", None)] != [None, None]:
        head["body"] = json.dumps(body, separators=(",", ":"), ensure_ascii=False)


def _set_run_apart(head: dict[str, Any], found: dict[str, list[Any]]) -> None:
    """Give a run within a head the rows that it had before, if it was long enough for that."""
    body = json.loads(head["body"])
    run = body.get("parts", {}).pop("execution", None)
    raw = json.dumps(run, separators=(",", ":"), ensure_ascii=False)
    if run is None or len(raw) <= INLINE:
        return
    key = hash_of(raw.encode())
    body["hashed"] = {**body.get("hashed", {}), "execution": key}
    head["body"] = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    for table, row in (("value", {"hash": key, "body": raw}), ("uses", {"hash": key, "sid": head["sid"]})):
        if row not in found[table]:
            found[table].append(row)


def _plain(value: Any) -> Any:
    return re.sub(r',"shown_since":[0-9]+', "", packing.unpack(value).decode()) if isinstance(value, bytes) else value
