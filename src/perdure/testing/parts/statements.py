"""The port between sessions and their storage: every statement, and the promises of a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from perdure.errors import CorruptRecord
from perdure.model.ids import SessionId, now
from perdure.protocols import Claim
from perdure.stores.engine import (
    Clock,
    Count,
    Delete,
    Engine,
    Insert,
    Job,
    Kind,
    Later,
    Lock,
    Pledge,
    Select,
    Statement,
    Update,
)
from perdure.stores.jobs.saving import EMPTY_SESSION, Append, Take, info_columns, update_columns
from perdure.stores.jobs.saving import new_session as new_session_rows
from perdure.testing.samples import new_session
from perdure.testing.scene import Contract, in_directory, refused

INBOX = ("sid", "seq", "run", "kind", "crc", "body")


class Refusal(Exception):
    """An error that a job raises."""


class EngineScene(Contract):
    """The part of an engine's contract that you fill in: how to open the engine."""

    def open_engine(self, where: Path) -> Engine:
        """Return the engine that keeps its tables in the directory `where`, not yet entered."""
        raise NotImplementedError("this contract needs to know how your engine is opened: define open_engine(…)")


def in_engine(test: Callable[[Any, Tried], Awaitable[None]]) -> Callable[[Any, Path], None]:
    """Make a test of one open engine."""

    async def scene(self: EngineScene, where: Path) -> None:
        async with opened(self, where) as tried:
            await test(self, tried)

    scene.__name__, scene.__qualname__, scene.__doc__ = test.__name__, test.__qualname__, test.__doc__
    return in_directory(scene)


@asynccontextmanager
async def opened(contract: EngineScene, where: Path) -> AsyncIterator[Tried]:
    async with contract.open_engine(where) as engine:
        yield Tried(engine)


class Tried:
    """An engine that is tried statement by statement."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def ask(self, *statements: Statement, kind: Kind = "read") -> Any:
        """Run statements as one job, and return the answer to the last one."""

        def job() -> Job[Any]:
            answer: list[Any] = []
            for statement in statements:
                answer = yield statement
            return answer

        return await self.engine.run(job, kind)

    async def do(self, *statements: Statement) -> Any:
        return await self.ask(*statements, kind="write")

    async def session(self, session_id: str = "it") -> tuple[int, int | str]:
        """Add a session and its log, and return the numbers of both."""
        info = new_session(id=session_id).info
        columns = {**info_columns(info), "log": 0, "version": 1, "msg_end": 0, **update_columns(now())}
        return await self.engine.run(lambda: new_session_rows({**columns, **EMPTY_SESSION}), "write")

    async def inbox(self, session_id: str = "it") -> int:
        """Add a session with five inbox items, of runs a, b, a and of no run, and return its number."""
        sid, _ = await self.session(session_id)
        runs = ("a", None, "b", "a", None)
        rows = [(sid, seq, run, f"k{seq % 2}", seq * 10, bytes([seq])) for seq, run in enumerate(runs, 1)]
        await self.do(Insert("inbox", INBOX, rows))
        return sid

    async def seqs(self, where: Mapping[str, Any], order: str = "seq", limit: int | None = None) -> list[int]:
        return [seq for (seq,) in await self.ask(Select("inbox", ("seq",), where, order, limit))]


class Reading(EngineScene):
    """Select and Count: the rows, their columns, their order and their number."""

    @in_engine
    async def test_rows_are_tuples_in_the_order_of_the_columns(self, tried: Tried) -> None:
        """A row is a tuple of the columns that were asked for, in that order."""
        sid = await tried.inbox()
        where = {"sid": sid, "seq": 3}
        assert await tried.ask(Select("inbox", ("body", "seq", "kind", "run"), where)) == [(b"\x03", 3, "k1", "b")]
        assert await tried.ask(Select("inbox", ("seq",), {"sid": sid, "seq": 99})) == []

    @in_engine
    async def test_all_conditions_hold(self, tried: Tried) -> None:
        """Every comparison selects the right rows, alone and together with others."""
        sid = await tried.inbox()
        for condition, expected in (
            ({"seq": 2}, [2]),
            ({"seq =": 2}, [2]),
            ({"seq !=": 2}, [1, 3, 4, 5]),
            ({"seq <": 3}, [1, 2]),
            ({"seq <=": 3}, [1, 2, 3]),
            ({"seq >": 3}, [4, 5]),
            ({"seq >=": 3}, [3, 4, 5]),
            ({"seq in": [5, 1, 1, 9]}, [1, 5]),
            ({"seq in": []}, []),
            ({"seq >=": 2, "seq <": 5, "kind": "k0"}, [2, 4]),
            ({"kind in": ("k1",), "run": "a"}, [1]),
        ):
            assert await tried.seqs({"sid": sid, **condition}) == expected, condition
            assert await tried.ask(Count("inbox", {"sid": sid, **condition})) == [(len(expected),)], condition

    @in_engine
    async def test_two_columns_of_a_row_are_compared(self, tried: Tried) -> None:
        """Two columns are compared in every kind of statement, beside other conditions, and after every change."""
        sids = [(await tried.session(f"s{n}"))[0] for n in range(4)]
        uneven = {"inbox_end > taken": True}
        assert await tried.ask(Select("session", ("id",), uneven)) == []
        for n, sid in enumerate(sids):
            changed = {"inbox_end": 2, "taken": n, "owner": "ada", "priority": n % 2, "since": float(n)}
            await tried.do(Update("session", changed, {"sid": sid}))
        rows = await tried.ask(Select("session", ("id",), {**uneven, "owner": "ada"}, "-priority since"))
        assert rows == [("s1",), ("s0",)]
        assert await tried.ask(Select("session", ("id",), {**uneven, "since >=": 1.0, "claim": None})) == [("s1",)]
        assert await tried.ask(Count("session", {"owner": "ada", **uneven})) == [(2,)]
        assert await tried.do(Update("session", {"taken +": 1}, {"sid": sids[1], **uneven})) == [(1,)]
        assert await tried.do(Update("session", {"taken +": 1}, {"sid": sids[1], **uneven})) == [(0,)]
        await tried.do(Update("session", {"inbox_end +": 2}, {"sid": sids[3]}))
        await tried.do(Delete("session", {"sid": sids[0], **uneven}))
        assert await tried.ask(Select("session", ("id", "taken"), uneven, "id", 5)) == [("s3", 3)]

    @in_engine
    async def test_nothing_is_a_value_that_can_be_asked_for(self, tried: Tried) -> None:
        """None is compared as IS NULL."""
        sid = await tried.inbox()
        assert await tried.seqs({"sid": sid, "run": None}) == [2, 5]
        assert await tried.seqs({"sid": sid, "run !=": None}) == [1, 3, 4]
        assert await tried.ask(Select("inbox", ("run",), {"sid": sid, "seq": 2})) == [(None,)]

    @in_engine
    async def test_rows_come_in_the_order_that_was_asked_for(self, tried: Tried) -> None:
        """Rows come in the order of several columns, up or down, and no more than were asked for."""
        sid = await tried.inbox()
        assert await tried.seqs({"sid": sid}, "-seq") == [5, 4, 3, 2, 1]
        assert await tried.seqs({"sid": sid}, "kind -seq") == [4, 2, 5, 3, 1]
        assert await tried.seqs({"sid": sid}, "-kind seq", 4) == [1, 3, 5, 2]
        assert await tried.seqs({"sid": sid}, "-seq", 1) == [5]

    @in_engine
    async def test_text_is_ordered_as_ascii_is(self, tried: Tried) -> None:
        """Text is ordered as ASCII is: lists of ids by their beginning depend on it."""
        for session_id in ("b", "a", "B", "a-", "a1", "9"):
            await tried.session(session_id)
        rows = await tried.ask(Select("session", ("id",), {"id >=": "9", "id <": "b"}, "id"))
        assert [found for (found,) in rows] == ["9", "B", "a", "a-", "a1"]

    @in_engine
    async def test_text_is_found_by_its_end(self, tried: Tried) -> None:
        """`ends` matches text that ends with the given characters, of which there are at least four."""
        for session_id in ("x-4af2", "x-4AF2", "4af2", "4af2-", "af2"):
            await tried.session(session_id)
        for end, expected in (("4af2", ["4af2", "x-4af2"]), ("-4af2", ["x-4af2"]), ("xx-4af2", []), ("%af2", [])):
            rows = await tried.ask(Select("session", ("id",), {"id ends": end}, "id"))
            assert [found for (found,) in rows] == expected, end

    @in_engine
    async def test_one_session_is_not_another(self, tried: Tried) -> None:
        """Rows with the same number in two sessions are different rows."""
        one, other = await tried.inbox("one"), await tried.inbox("other")
        await tried.do(Delete("inbox", {"sid": one, "seq >": 2}))
        assert (await tried.seqs({"sid": one}), await tried.seqs({"sid": other})) == ([1, 2], [1, 2, 3, 4, 5])
        assert await tried.ask(Count("inbox", {})) == [(7,)]

    @in_engine
    async def test_looking_again_finds_the_same(self, tried: Tried) -> None:
        """`again=True` finds the same rows, however the engine looks them up."""
        sid, _ = await tried.session()
        await tried.do(Insert("key", ("sid", "name", "digest", "version", "crc"), [(sid, "k", "d", 1, 7)]))
        for table, where in (("session", {"id": "it"}), ("key", {"sid": sid, "name": "k"})):
            assert await tried.ask(Select(table, ("sid",), where, again=True)) == [(sid,)]
        assert await tried.ask(Select("session", ("sid",), {"id": "nobody"}, again=True)) == []


class Writing(EngineScene):
    """Insert, Update and Delete."""

    @in_engine
    async def test_values_are_read_as_they_were_written(self, tried: Tried) -> None:
        """Any bytes, texts of any script, the greatest numbers and exact times are read as they were written."""
        sid, _ = await tried.session()
        # Every byte, the greatest position, and the greatest checksum of 32 bits.
        body, texts, most = bytes(range(256)) * 300, ("", "münchen 🎈", "a'b\"c%\\"), 2**63 - 1
        rows = [(sid, seq, text, text, 2**32 - 1, body) for seq, text in zip((1, 2, most), texts, strict=True)]
        await tried.do(Insert("inbox", INBOX, iter(rows)))
        found = await tried.ask(Select("inbox", ("sid", "seq", "run", "kind", "body"), {"sid": sid}, "seq"))
        assert found == [(*row[:4], body) for row in rows]
        # Microseconds, which a single float would round.
        exact = 1754000000.123456
        await tried.do(Update("session", {"expires": exact, "claim": b'{"owner":"\xc3\xa4"}'}, {"sid": sid}))
        assert await tried.ask(Select("session", ("expires", "claim"), {"sid": sid})) == [
            (exact, b'{"owner":"\xc3\xa4"}')
        ]

    @in_engine
    async def test_an_insert_of_no_rows_is_nothing(self, tried: Tried) -> None:
        """An insert of no rows changes nothing, and an update that meets no row answers 0."""
        sid, _ = await tried.session()
        await tried.do(Insert("tag", ("tag", "sid"), []))
        assert await tried.ask(Count("tag", {})) == [(0,)]
        assert await tried.do(Update("session", {"taken": 1}, {"sid": sid + 1})) == [(0,)]
        await tried.do(Delete("tag", {"sid": sid}))

    @in_engine
    async def test_a_row_that_is_there_already_is_refused_left_or_set(self, tried: Tried) -> None:
        """A row that is there is refused, left as it is (`or_set=()`), or gets the columns that `or_set` names."""
        sid, log = await tried.session()
        columns = ("sid", "loop", "first_seq", "last_seq", "log", "first_pos", "end_pos")
        ((number,),) = await tried.do(Insert("run", columns, [(sid, "r", 1, 2, log, 0, 1)]))
        # Refused by any error: each database has its own.
        again = (sid, "r", 8, 9, log, 8, 9)
        with refused(Exception, of="a second row of the same key"):
            await tried.do(Insert("run", columns, [again]))
        for or_set, expected in (((), (1, 2, 0, 1)), (("last_seq", "end_pos"), (1, 9, 0, 9))):
            answer = await tried.do(Insert("run", columns, [again], or_set))
            assert answer == [(number,)] or not or_set
            found = await tried.ask(Select("run", ("first_seq", "last_seq", "first_pos", "end_pos"), {"run": number}))
            assert found == [expected]
        assert await tried.ask(Count("run", {"sid": sid})) == [(1,)]

    @in_engine
    async def test_numbers_go_up_and_none_is_given_out_twice(self, tried: Tried) -> None:
        """Numbers go up, and none is given out twice, even after its row is deleted."""
        met = []
        for _ in range(4):
            sid, log = await tried.session()
            assert type(log) is tried.engine.key_of_log
            # A log's number that is given out again would show a fork a stranger's text.
            met.append((sid, log))
            await tried.do(Delete("log", {"sid": sid}), Delete("session", {"sid": sid}))
        assert [sid for sid, _ in met] == sorted({sid for sid, _ in met})
        assert len({log for _, log in met}) == 4

    @in_engine
    async def test_an_update_sets_and_adds(self, tried: Tried) -> None:
        """An update sets and adds in all rows that meet the conditions, and returns their number."""
        sid, _ = await tried.session()
        changes = {"version +": 2, "taken": 7, "claim": b"{}", "expires": 0.5}
        assert await tried.do(Update("session", changes, {"sid": sid, "claim": None})) == [(1,)]
        found = await tried.ask(Select("session", ("version", "taken", "claim", "expires"), {"sid": sid}))
        assert found == [(3, 7, b"{}", 0.5)]
        assert await tried.do(Update("session", {"claim": None, "expires": None}, {"sid": sid})) == [(1,)]
        assert await tried.ask(Select("session", ("claim", "expires"), {"sid": sid})) == [(None, None)]
        await tried.do(Update("meta", {"value +": 1}, {"key": "erasures"}))
        assert await tried.ask(Select("meta", ("value",), {"key": "erasures"})) == [(1,)]

    @in_engine
    async def test_later_is_by_the_clock(self, tried: Tried) -> None:
        """`Later` is that many seconds after the time of the clock."""
        sid, _ = await tried.session()
        ((before,),) = await tried.ask(Clock())
        await tried.do(Update("session", {"expires": Later(30.0)}, {"sid": sid}))
        ((after,),) = await tried.ask(Clock())
        ((expires,),) = await tried.ask(Select("session", ("expires",), {"sid": sid}))
        assert before + 30.0 <= expires <= after + 30.0
        assert abs(before - now().timestamp()) < 3600

    @in_engine
    async def test_a_deletion_takes_what_meets_the_conditions(self, tried: Tried) -> None:
        """A deletion removes the rows that meet the conditions, and no others."""
        sid = await tried.inbox()
        await tried.do(Delete("inbox", {"sid": sid, "seq in": [2, 4, 9]}))
        assert await tried.seqs({"sid": sid}) == [1, 3, 5]

    @in_engine
    async def test_locks_and_pledges_are_answered(self, tried: Tried) -> None:
        """Locks and pledges are answered, also if the engine needs none, and for sessions that are not there."""
        sid, _ = await tried.session()
        locks = (Lock(("it",)), Lock(("it", "nobody"), "share"), Lock(("it",), "alone"), Lock((), owner="ada"))
        for lock in locks:
            await tried.do(lock, Pledge("it", b"{}"), Update("session", {"taken +": 1}, {"sid": sid}))
        assert await tried.ask(Select("session", ("taken",), {"sid": sid})) == [(4,)]


class Transactions(EngineScene):
    """The promises to a job: it sees one state of all tables, and all of its changes are made, or none."""

    @in_engine
    async def test_a_write_that_raises_changes_nothing(self, tried: Tried) -> None:
        """A write that raises changes nothing, whatever it had written, and its caller gets the same error."""
        sid = await tried.inbox()

        def job() -> Job[None]:
            yield Lock(("it",))
            yield Insert("tag", ("tag", "sid"), [("t", sid)])
            yield Insert("inbox", INBOX, [(sid, 6, None, "k", 0, b"")])
            yield Update("inbox", {"body": b"changed"}, {"sid": sid, "seq": 1})
            yield Delete("inbox", {"sid": sid, "seq": 2})
            yield Update("session", {"taken": 5}, {"sid": sid})
            assert (yield Count("inbox", {"sid": sid})) == [(5,)], "a job sees what it has written"
            raise Refusal

        with refused(Refusal):
            await tried.engine.run(job, "write")
        assert await tried.seqs({"sid": sid}) == [1, 2, 3, 4, 5]
        assert await tried.ask(Select("inbox", ("body",), {"sid": sid, "seq": 1})) == [(b"\x01",)]
        assert await tried.ask(Count("tag", {})) == [(0,)]
        assert await tried.ask(Select("session", ("taken",), {"sid": sid})) == [(0,)]

    @in_engine
    async def test_a_write_with_a_row_too_many_changes_nothing(self, tried: Tried) -> None:
        """A row whose key is taken undoes the statements before it."""
        sid = await tried.inbox()
        with refused(Exception, of="a second row of the same key"):
            await tried.do(
                Update("session", {"taken": 5}, {"sid": sid}), Insert("inbox", INBOX, [(sid, 5, None, "k", 0, b"")])
            )
        assert await tried.ask(Select("session", ("taken",), {"sid": sid})) == [(0,)]

    @in_engine
    async def test_writes_at_once_lose_nothing(self, tried: Tried) -> None:
        """A job that has locked a session reads what the job before it has written."""
        sid, _ = await tried.session()

        def job() -> Job[None]:
            yield Lock(("it",))
            ((taken,),) = yield Select("session", ("taken",), {"sid": sid})
            yield Update("session", {"taken": taken + 1}, {"sid": sid})

        await asyncio.gather(*(tried.engine.run(job, "write") for _ in range(20)))
        assert await tried.ask(Select("session", ("taken",), {"sid": sid})) == [(20,)]

    @in_engine
    async def test_a_read_sees_one_state(self, tried: Tried) -> None:
        """A job reads one state in all its statements, also while others write.

        An engine may find out late, and run the job again. A job that reads rows that do not fit together reports
        damage.
        """
        one, _ = await tried.session("one")
        other, _ = await tried.session("other")

        def move(number: int) -> Callable[[], Job[None]]:
            def job() -> Job[None]:
                yield Lock(("one", "other"))
                yield Update("session", {"taken": number}, {"sid": one})
                yield Update("session", {"taken": -number}, {"sid": other})

            return job

        def add() -> Job[int]:
            total = 0
            for sid in (one, other, one, other):
                ((taken,),) = yield Select("session", ("taken",), {"sid": sid})
                total += taken
            if total:
                raise CorruptRecord("one", "what is taken", "it was read in two states")
            return total

        async def write() -> None:
            for number in range(40):
                await tried.engine.run(move(number), "write")

        writing = asyncio.ensure_future(write())
        while not writing.done():
            assert await tried.engine.run(add) == 0
            await asyncio.sleep(0)
        await writing

    @in_engine
    async def test_every_kind_of_job_returns_what_it_returns(self, tried: Tried) -> None:
        """Every kind of job, long or not, returns what its generator returns."""
        sid, _ = await tried.session()

        def job() -> Job[int]:
            ((found,),) = yield Select("session", ("sid",), {"id": "it"})
            return int(found)

        # An engine may carry out each kind in another way: on another thread, connection or lock.
        for kind in ("glance", "read", "write", "erase"):
            assert await tried.engine.run(job, kind) == sid
            assert await tried.engine.run(job, kind, long=True) == sid

    @in_engine
    async def test_a_change_is_finished_though_nobody_waits(self, tried: Tried) -> None:
        """`finish` is called in the caller's event loop, also if the caller was cancelled meanwhile."""
        sid, _ = await tried.session()
        finished: list[bool] = []
        loop = asyncio.get_running_loop()

        def finish(result: Any) -> Any:
            finished.append(asyncio.get_running_loop() is loop)
            return result

        take = Take(Claim(SessionId("it"), 0, 1, "me", 30.0), tried.engine.origin, [], None, take_over=False)
        take.finish = finish  # type: ignore[method-assign]  # what is asked of it is seen here
        claim, _ = await tried.engine.commit(take)
        assert finished == [True]
        append = Append(claim, tried.engine.origin, [], None, taken=3)
        append.finish = finish  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(tried.engine.commit(append))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for _ in range(200):  # the caller may have been let go before the change was made
            ((taken,),) = await tried.do(Select("session", ("taken",), {"sid": sid}))
            if taken and finished == [True, True]:
                return
            await asyncio.sleep(0.01)
        assert (taken, finished) == (0, [True]), "what was never made is never finished"

    @in_engine
    async def test_the_store_has_an_id_of_its_own(self, tried: Tried) -> None:
        """A store's id is in the table `meta`, beside the number of erasures."""
        assert tried.engine.origin
        assert await tried.ask(Select("meta", ("value",), {"key": "uid"})) == [(tried.engine.origin,)]
        assert await tried.ask(Select("meta", ("value",), {"key": "erasures"})) == [(0,)]

    @in_directory
    async def test_all_of_it_is_there_after_reopening(self, where: Path) -> None:
        """Rows, the store's id and the numbers given out are there after reopening an engine that can be shared."""
        if not self.shared:
            return
        async with opened(self, where) as tried:
            origin, sid = tried.engine.origin, await tried.inbox()
            gone, _ = await tried.session("gone")
            await tried.do(Delete("log", {"sid": gone}), Delete("session", {"sid": gone}))
        async with opened(self, where) as tried:
            assert tried.engine.origin == origin
            assert await tried.seqs({"sid": sid}) == [1, 2, 3, 4, 5]
            assert (await tried.session("next"))[0] > gone

    @in_directory
    async def test_no_two_stores_have_the_same_id(self, where: Path) -> None:
        """No two new stores have the same id."""
        origins = set()
        for name in ("one", "other"):
            (where / name).mkdir()
            async with opened(self, where / name) as tried:
                origins.add(tried.engine.origin)
        assert len(origins) == 2
