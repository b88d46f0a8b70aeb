"""Damaged rows: a check names each of them, and names nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import CorruptRecord
from perdure.protocols import said_in
from perdure.stores.engine import Delete, Insert, Job, Select, Statement, Update
from perdure.stores.jobs.checking import check
from perdure.stores.store import Store
from perdure.testing.parts.checking import fill
from perdure.testing.parts.statements import EngineScene, Tried
from perdure.testing.parts.tokens import token
from perdure.testing.scene import in_directory, refused


class Numbers(NamedTuple):
    """The numbers of the sessions that get damaged, and of their logs."""

    talk: int
    log: int | str
    """The log of `talk`."""
    child: int
    killed: int
    orphan: int
    album: int | str
    """The log of `album`, which has an image."""


class Damage(NamedTuple):
    """A change of rows, with the session that a check must name for it, and words that it must use."""

    done: Statement
    session: str | None
    said: str


def _in_row(sid: int, session: str, said: str, values: Mapping[str, Any]) -> Damage:
    return Damage(Update("session", values, {"sid": sid}), session, said)


def damages(at: Numbers) -> Sequence[Damage]:
    talk, ada = {"sid": at.talk}, {"owner": "ada"}
    no_range = "its epoch: it is out of the session's range"
    return (
        _in_row(at.talk, "talk", "its newest version: it is not what", {"version +": 1}),
        _in_row(at.talk, "talk", "the end of its log: it is not what", {"msg_end +": 1}),
        _in_row(at.talk, "talk", "the end of its record: it is not what", {"evt_end +": -1}),
        _in_row(at.talk, "talk", "the end of its inbox: it is not what", {"inbox_end +": 1}),
        _in_row(at.talk, "talk", "inbox is taken: it is noted to be taken to where it does not", {"taken": 9}),
        _in_row(at.talk, "talk", "inbox is taken: it is noted to be taken to where it does not", {"taken": -1}),
        # Only where logs are numbered do a session's epochs have a range, by its own number.
        *([_in_row(at.talk, "talk", no_range, {"epoch": 7})] if isinstance(at.log, int) else []),
        _in_row(at.talk, "talk", "its claim: it has a holder and no end, or an end and no holder", {"expires": 5.0}),
        _in_row(at.killed, "killed", "its claim: it has a holder and no end", {"expires": None}),
        _in_row(at.killed, "killed", "claim: ", {"claim": b"nobody"}),
        _in_row(at.talk, "talk", "column status: it says 'suspended'", {"status": "suspended"}),
        _in_row(at.talk, "talk", "column agent: it says 'nobody', and the newest version", {"agent": "nobody"}),
        _in_row(at.talk, "talk", "column owner: it says 'eve', and the newest version 'ada'", {"owner": "eve"}),
        _in_row(at.talk, "talk", "column parent: it says 'views', and the newest version None", {"parent": "views"}),
        _in_row(at.talk, "talk", "column created: it says", {"created +": 1.0}),
        _in_row(at.talk, "talk", "column updated: it says", {"updated +": 1.0}),
        Damage(Insert("tag", ("tag", "sid"), [("extra", at.talk)]), "talk", "tags: they are not those of"),
        Damage(Delete("tag", {"tag": "vip"}), "talk", "tags: they are not those of"),
        Damage(Update("key", {"version": 99}, talk), "talk", "key 'first': it names a version that does not exist"),
        Damage(Delete("ref", {"child": at.child}), "child", "that is not noted where deletions look"),
        Damage(Update("ref", {"stop +": 1000}, {"child": at.child}), "child", "that does not reach so far"),
        Damage(Update("ref", {"start": -1}, {"child": at.child}), "child", "of others: it is a stretch of a log"),
        Damage(Insert("ref", ("log", "child", "start", "stop"), [(at.log, at.orphan, 0, 1)]),
               "orphan", "it is noted that the session shows it, and no version does"),
        Damage(Delete("ref", {"child": at.orphan}), None, "are left of an erased session, and nobody shows them"),
        Damage(Delete("uses", talk), "talk", "a version names it, and that is not noted where deletions look"),
        Damage(Insert("value", ("hash", "body"), [("nobody", b"{}")]), None, "value nobody: it belongs to no session"),
        Damage(Update("meta", {"value": -1}, {"key": "erasures"}), None, "meta erasures: it is not the number"),
        Damage(Delete("batch", {**talk, "last": 1}), "talk", "its record: its entries are not numbered from 1 on"),
        Damage(Update("run", {"end_pos +": 1000}, talk), "talk", "the stretch of one of its runs: it goes beyond"),
        Damage(Update("run", {"first_pos": -1}, talk), "talk", "the stretch of one of its runs: it goes beyond"),
        Damage(Delete("log", {**talk, "name": "b"}), "talk", "the log of one of its runs: it is missing"),
        Damage(Delete("msg", {"log": at.log, "pos": 1}), "talk", "its messages are not numbered from 0 on"),
        Damage(Delete("head", {**talk, "version": 2}), "talk", "its versions: they are not numbered from 1 on"),
        Damage(Delete("inbox", {**talk, "seq": 1}), "talk", "its inbox: an item is missing from it"),
        Damage(Update("sketch", {"body": b"[]"}, {"sid": at.killed, "start": 1}), "killed", "a piece of it is not"),
        Damage(Update("sketch", {"start": 9}, {"sid": at.killed, "start": 2}), "killed", "a piece of it is not"),
        Damage(Update("session", {"claim": None, "expires": None}, {"sid": at.killed}), "killed", "a run that is over"),
        Damage(Insert("sketch", ("sid", "start", "crc", "body"), [(10**9, 0, 0, b"")]), None, "belongs to no session"),
        Damage(Delete("blob", {}), "album", "it is missing"),
        Damage(Update("blob", {"body": b"x"}, {}), None, "its hash or its size does not match"),
        Damage(Update("blob", {"size": 7}, {}), None, "its hash or its size does not match"),
        Damage(Insert("blob", ("hash", "size", "body"), [("f" * 64, 1, b"x")]), None, "it belongs to no message"),
        Damage(Delete("attached", {"log": at.album, "pos": 1}), "album", "is not noted where erasures look"),
        Damage(Insert("attached", ("hash", "log", "pos"), [("f" * 64, at.album, 1)]), "album", "and does not"),
        Damage(Insert("attached", ("hash", "log", "pos"), [("f" * 64, 999, 1)]), None, "attached 999: it belongs to"),
        Damage(Update("token", {"owner": "eve"}, ada), None, "its columns do not say what its body says"),
        Damage(Update("token", {"owner": None}, ada), None, "its columns do not say what its body says"),
        Damage(Update("token", {"digest": "f" * 64}, ada), None, "its columns do not say what its body says"),
        Damage(Update("token", {"body": b"{}"}, ada), None, "its checksum does not match"),
        Damage(Delete("session", talk), None, "it belongs to no session"),
    )  # fmt: skip


class Damages(EngineScene):
    """A check finds everything that is wrong with rows, and nothing that it finds makes it fail."""

    @in_directory
    async def test_damaged_rows_are_named(self, where: Path) -> None:
        """Each damage is named, with its repair. Once it is undone, no problem is left."""
        async with self.open_store(where) as store:
            assert isinstance(store, Store)
            await fill(store)
            tried = Tried(store._engine)
            assert [*await store.check()] == []
            # Each in a transaction that is rolled back, so that every damage meets a sound store.
            for damage in damages(await _numbers(tried)):
                found = await _checked_with(tried, damage.done)
                told = [f"{each.where}: {each.what}" for each in found if each.session_id == damage.session]
                assert any(damage.said in each for each in told), (damage, found)
                assert all(len(each.repair) > 30 for each in found), damage
            assert [*await store.check()] == []

    @in_directory
    async def test_a_damaged_piece_is_left_out(self, where: Path) -> None:
        """A damaged piece of an unfinished answer is left out, with all pieces behind it: the rest was really said."""
        async with self.open_store(where) as store:
            assert isinstance(store, Store)
            await fill(store)
            tried = Tried(store._engine)
            killed = (await _numbers(tried)).killed
            assert said_in((await store.progress("killed")).sketches) == "abc"
            ((crc, body),) = await tried.ask(Select("sketch", ("crc", "body"), {"sid": killed, "start": 1}))
            for wrong in ({"body": body.replace(b"b", b"x")}, {"crc": crc ^ 1}, {"body": b""}):
                await tried.do(Update("sketch", wrong, {"sid": killed, "start": 1}))
                assert [each.text for each in (await store.progress("killed")).sketches] == ["a"]
                assert [each.text for each in (await store.progress("killed", after=1)).sketches] == ["a"]
                await tried.do(Update("sketch", {"crc": crc, "body": body}, {"sid": killed, "start": 1}))
            assert said_in((await store.progress("killed")).sketches) == "abc"

    @in_directory
    async def test_a_damaged_token_opens_nothing(self, where: Path) -> None:
        """A damaged token is never read as another owner's, or with more permissions. It can still be dropped."""
        async with self.open_store(where) as store:
            assert isinstance(store, Store)
            await store.add_token(token(1, "ada", may_write=False))
            await store.add_token(token(2, "bob"))
            tried, key = Tried(store._engine), {"digest": token(1).digest}
            ((body,),) = await tried.ask(Select("token", ("body",), key))
            damaged = ({"body": body.replace(b"false", b"true ")}, {"owner": None}, {"owner": "bob"}, {"body": b""})
            for wrong in damaged:
                await tried.do(Update("token", wrong, key))
                for asked in (store.token(token(1).digest), store.tokens()):
                    with refused(CorruptRecord, of=str(wrong)):
                        await asked
                assert await store.token(token(2).digest) == token(2, "bob")
                await tried.do(Update("token", {"owner": "ada", "body": body}, key))
            await tried.do(Update("token", damaged[0], key))
            assert await store.drop_token(token(1).id)
            assert [*await store.tokens()] == [token(2, "bob")]

    @in_directory
    async def test_a_damaged_head_stops_no_other(self, where: Path) -> None:
        """A damaged head is named as damaged. It is not shown as an older version, or taken for a missing session."""
        async with self.open_store(where) as store:
            assert isinstance(store, Store)
            await fill(store)
            tried = Tried(store._engine)
            talk = (await _numbers(tried)).talk
            sound = await store.heads(["talk", "child", "killed"])
            assert ([*sound], sound.damaged) == (["talk", "child", "killed"], {})
            version = sound["talk"].info.version
            ((crc, body),) = await tried.ask(Select("head", ("crc", "body"), {"sid": talk, "version": version}))
            newest, row = {"sid": talk, "version": version}, {"sid": talk}
            for done, undone in (
                (Update("head", {"body": body + b" "}, newest), Update("head", {"body": body}, newest)),
                (Update("head", {"crc": crc ^ 1}, newest), Update("head", {"crc": crc}, newest)),
                (Update("session", {"version": version + 1}, row), Update("session", {"version": version}, row)),
                (Update("session", {"version": version - 1}, row), Update("session", {"version": version}, row)),
            ):
                await tried.do(done)
                # Without what is at hand, which would answer for the damaged row.
                store._forget_all()
                found = await store.heads(["talk", "child", "nobody", "killed"])
                assert (found, [*found.damaged]) == ({key: sound[key] for key in ("child", "killed")}, ["talk"]), done
                assert found.damaged["talk"].session_id == "talk"  # type: ignore[union-attr]  # an engine has rows
                await tried.do(undone)
            assert await store.heads(["talk", "child", "killed"]) == sound


async def _numbers(tried: Tried) -> Numbers:
    rows = await tried.ask(Select("session", ("id", "sid", "log"), {}))
    sids = {session_id: (sid, log) for session_id, sid, log in rows}
    return Numbers(*sids["talk"], sids["child"][0], sids["killed"][0], sids["orphan"][0], sids["album"][1])


class _Undone(Exception):
    """Raised to roll a transaction back."""

    def __init__(self, found: Any) -> None:
        super().__init__("this transaction is not to be kept")
        self.found = found


async def _checked_with(tried: Tried, damage: Statement) -> Any:
    """Damage rows within a transaction, return what a check finds there, and roll the transaction back."""

    def job() -> Job[None]:
        yield damage
        raise _Undone((yield from check()))

    try:
        await tried.engine.run(job, "write", long=True)
    except _Undone as undone:
        return undone.found
