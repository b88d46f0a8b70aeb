"""Every verb of every store refuses senseless arguments: a typed error says where, and nothing changes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import postgres_server

import perdure
from perdure import Entry, InvalidData, Message, PerdureError
from perdure.model.transcript import LogRef
from perdure.protocols import ArchivedSession, Change, Claim, Due, Key, Sketch, StoredAt, Timer, Token
from perdure.stores.memory import MemoryStore
from perdure.testing.samples import new_session, tell

HALF, HUGE = "half \ud800", 2**70
ANYTHING = (None, "x", 5, -1, 1.5, HUGE, b"x", [], [5], {}, object())


def without(*allowed: Any) -> tuple[Any, ...]:
    """Return the values of any type that are not among these."""
    return tuple(each for each in ANYTHING if not any(each is one or each == one for one in allowed))


ID = (*without("x"), "", "a b", "../x", HALF)
TEXT = (*without("x"), HALF)
COUNT = (*without(5), True, "5")
NUMBER = (*without(5, 1.5, HUGE), True, float("nan"), float("inf"))
FLAG = without()
SEVERAL = (*without([], {}), {"x": 5})
RECORDS = (*without([]), [None])
"""Messages or entries."""
BAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "create": {
        "session": without(),
        "written": without({}),
        "erasures": (*without(None, 5), -1),
        "key": without(None),
    },
    "erasures": {},
    "save": {
        "session": without(),
        "claim": without(None),
        "written": without({}),
        "entries": RECORDS,
        "taken": COUNT,
        "key": without(None),
        "whole": FLAG,
    },
    "save_all": {"changes": (*without([]), [None], [Change(None)], [Change(new_session(), key="x")])},
    "load": {"session_id": ID, "version": (*without(None, 5, -1, HUGE), True), "last": without(None, 5)},
    "glance": {"session_id": ID, "last": without(None, 5)},
    "exists": {"session_id": ID},
    "delete": {"session_id": ID, "expected": without(None)},
    "delete_tree": {"session_id": ID},
    "delete_many": {"session_ids": (*without([], {}), ["a b"], [None])},
    "redact": {
        "session_id": ID,
        "message_ids": (*without([], {}), ["nobody"], [None], [[]]),
        "replacement": (*without("x"), "", " "),
    },
    "gc": {},
    "list": {
        **{name: without(None, "x") for name in ("id", "agent", "owner", "tag", "parent")},
        "status": without(None),
        **{f"{what}_{side}": without(None) for what in ("created", "updated") for side in ("after", "before")},
        "limit": without(None, 5),
        "after": without(None),
    },
    "previews": {"session_ids": (*without([], {}), ["a b"], [None])},
    "forget": {"session_id": ID, "before": (*COUNT, 0)},
    "holds": {"session_ids": (*without([], {}), ["a b"], [None])},
    "held_beside": {"owner": (*without("x"), HALF)},
    "drop_hold": {"session_id": ID, "tag": (*TEXT, "vip")},
    "own_rules": {},
    "overgrown": {"versions": COUNT, "after": TEXT, "limit": (*COUNT, 0)},
    "retire": {"due": RECORDS},
    "prune": {"due": without(), "before": (*COUNT, 0)},
    "rehearse": {
        "batches": (*without([]), [None], ["x"], [[None]]),
        "prunes": (*without([]), [None], [(None, 1)], [()]),
    },
    "kept_of_log": {"session_id": ID},
    "versions": {"session_id": ID, "before": without(None, 5), "limit": (*COUNT, 0)},
    "heads": {"session_ids": (*without([], {}), ["a b"], [None])},
    "find_message": {"message_id": TEXT, "owner": (*without(None, "x"), HALF), "limit": (*COUNT, 0)},
    "ids_with_prefix": {"prefix": (*without("x"), "a b"), "owner": without(None, "x"), "deleted": FLAG, "limit": COUNT},
    "ids_with_suffix": {"suffix": (*TEXT, "a b", "abc"), "owner": without(None, "x"), "deleted": FLAG, "limit": COUNT},
    "search": {
        "text": (*without("x"), "", " "),
        "owner": (*without(None, "x"), HALF),
        "session_id": without(None, "x"),
        "limit": (*COUNT, 0),
    },
    "index": {"rebuild": FLAG, "progress": without(None)},
    "claim": {
        "session_id": ID,
        "version": COUNT,
        "owner": TEXT,
        "lease": (*NUMBER, HUGE, 1e300),
        "messages": RECORDS,
        "entries": RECORDS,
        "take_over": FLAG,
        "per_owner": (*without(None, 5), 0),
    },
    "heartbeat": {"claim": without()},
    "release": {"claim": without(), "interrupted": FLAG},
    "append": {"claim": without(), "messages": RECORDS, "entries": RECORDS, "log": TEXT, "taken": COUNT},
    "sketch": {"claim": without(), "piece": without()},
    "progress": {"session_id": ID, "after": COUNT},
    "listening": {"session_id": ID},
    "read": {
        "session_id": ID,
        "after": (*without(5, HUGE), True),
        "limit": without(None, 5),
        "last": without(None, 5),
        "run": (*without(None, "x"), HALF),
        "inbox": FLAG,
    },
    "runs": {
        "session_id": ID,
        "limit": without(None, 5),
        "before": without(None, 5),
        "run": (*without(None, "x"), HALF),
    },
    "branches": {"session_id": ID},
    "adoptions": {"session_id": ID, "version": COUNT},
    "line_of": {"session_id": ID},
    "names_of": {"logs": RECORDS},
    "log_of": {"session_id": ID, "name": TEXT},
    "lapsed": {},
    "messages": {
        "log": (*without(), LogRef("elsewhere", 1), *(LogRef("here", key) for key in (*ANYTHING, HALF))),
        "start": (*COUNT, 2),
        "stop": COUNT,
    },
    "find_key": {"session_id": ID, "name": TEXT},
    "is_claimed": {"session_id": ID},
    "is_interrupted": {"session_id": ID},
    "post": {
        "session_id": ID,
        "entry": without(),
        "priority": (*without(5, -1), True, 2**31),
        "most": without(None, 5),
        "most_of_owner": without(None, 5),
    },
    "waiting": {"limit": (*COUNT, 0), "idle_only": FLAG},
    "held": {"limit": (*COUNT, 0)},
    "in_turn": {
        "limit": (*COUNT, 0),
        "after": (*without(None, "x"), "", HALF),
        "skip": (*without([]), [HALF]),
        "not_of": (*without([]), [None]),
    },
    "has_waiting": {"session_id": ID},
    "running": {},
    "set_timer": {"timer": without(), "replace": FLAG},
    "timers": {"session_id": (*without(None, "x"), "", "a b", HALF), "limit": (*COUNT, 0), "after": COUNT},
    "due": {"at": (*NUMBER, HUGE), "limit": (*COUNT, 0)},
    "ring": {
        "timer": without(),
        "again": (*without(None, 5, 1.5), True, float("nan")),
        "entry": without(None),
        "most": (*COUNT[1:], 0),
        "later": (),
    },
    "drop_timer": {"session_id": ID, "name": TEXT},
    "reserve": {"name": TEXT, "cost": (*NUMBER, HUGE), "burst": (*NUMBER, HUGE), "most": NUMBER[1:]},
    "add_token": {"token": without()},
    "token": {"digest": (*ANYTHING, HALF, "F" * 64, "0" * 63)},
    "tokens": {"owner": (*without(None, "x"), "", HALF)},
    "drop_token": {"token_id": TEXT},
    "note": {"session_id": ID, "entries": RECORDS},
    "attachments": {"session_id": ID, "hashes": (*without([], {}), {"x": 5}, [HALF], ["0" * 64], ["A" * 64])},
    "dump": {"session_id": ID, "alone": FLAG},
    "restore": {"archived": without()},
    "check": {},
    "changed": {"session_id": ID, "after": COUNT, "most": NUMBER},
    "pin": {"session_id": ID},
    "unpin": {"session_id": ID},
    "evict": {"session_id": ID},
    "is_waited_for": {"session_id": ID},
}


@pytest.fixture(params=["memory://", "sqlite:///s.db", "file://s", "postgresql://"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return postgres_server.url_of(tmp_path) if request.param == "postgresql://" else str(request.param)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """Open a store with a free and a claimed session. Yield it with valid arguments for its verbs."""
    store: Any = perdure.store_of(url)
    async with store:
        free = await store.save(await store.create(new_session("a", id="free")), key=Key("k", "d"))
        await store.post("free", Entry("steer"))
        await store.create(new_session("b", id="held"))
        claim, _ = await store.claim("held", version=1, owner="ann", entries=[Entry("start", run="r")], lease=600)
        log, stop = await store.log_of("free")
        await store.add_token(Token(digest="0" * 64, owner="ann", may_write=True, created_at=free.info.created_at))
        timer = await store.set_timer(Timer(free.id, "t", 5.0, Entry("steer")))
        yield (
            store,
            {
                "session_id": "free",
                "session": free,
                "claim": claim,
                "log": log,
                "start": 0,
                "stop": stop,
                "version": 2,
                "owner": "ann",
                "prefix": "f",
                "suffix": "free",
                "text": "a",
                "name": "",
                "entry": Entry("steer"),
                "piece": Sketch("r", "m", "half", seq=1),
                "message_ids": [free.state.messages[0].id],
                "message_id": free.state.messages[0].id,
                "before": 1,
                "versions": 5,
                "due": Due("free", 99, 0.0),
                "batches": [],
                "entries": [],
                "after": 0,
                "most": 0.0,
                "hashes": [],
                "timer": timer,
                "at": 5.0,
                "cost": 1.0,
                "burst": 1.0,
                "tag": "hold",
            },
        )


async def state_of(store: Any) -> Any:
    """Return everything that a verb could have changed."""
    per_session = [
        (
            await store.load(each),
            await store.read(each),
            await store.read(each, inbox=True),
            await store.log_of(each),
            await store.is_claimed(each),
            await store.is_interrupted(each),
        )
        for each in ("free", "held")
    ]
    queue = (await store.waiting(idle_only=False), await store.timers(), await store.tokens())
    return per_session, [info.id for info in await store.list()], await store.find_key("free", "k"), queue


async def test_a_verb_refuses_what_it_cannot_mean(url: str) -> None:
    """None, wrong types, negative numbers and bytes raise a PerdureError with a path, and nothing changes."""
    wrong: list[str] = []
    async with opened(url) as (store, good):
        before = await state_of(store)
        for verb in verbs_of(store):
            for name, values in BAD[verb].items():
                for value in values:
                    told = await told_of(store, verb, {**arguments(store, verb, good), name: value})
                    wrong += [f"{verb}({name}={value!r}): {told}"] if told else []
            assert await state_of(store) == before, verb
    assert wrong == []


async def told_of(store: Any, verb: str, given: dict[str, Any]) -> str | None:
    """Return what is wrong with a verb's refusal, or None if it is right."""
    if isinstance(given.get("log"), LogRef) and given["log"].origin == "here":
        given["log"] = LogRef((await store.log_of("free"))[0].origin, given["log"].key)
    try:
        outcome = getattr(store, verb)(**given)
        if inspect.isawaitable(outcome):
            await outcome
    except PerdureError as error:
        has_path = not isinstance(error, InvalidData) or error.path.startswith("$")
        return None if has_path and len(str(error)) > 15 else f"says {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def arguments(store: Any, verb: str, good: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a verb requires."""
    parameters = inspect.signature(getattr(store, verb)).parameters.values()
    needed = (each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD)
    given = {each.name: good[each.name] for each in needed if each.name in good}
    return {"session": new_session("c")} if verb == "create" else given


# Only the archive calls these, and it checks its own arguments.
OF_THE_ARCHIVE = {"at", "copy_out", "count", "landing", "lapse_claims", "repair", "require_copyable"}


def verbs_of(store: Any) -> list[str]:
    found = [name for name, _ in inspect.getmembers(type(store), inspect.isfunction) if not name.startswith("_")]
    return [name for name in found if name not in OF_THE_ARCHIVE]


async def test_every_parameter_of_every_verb_is_tried(url: str) -> None:
    """A new verb, or a new parameter of one, has to be added to the table."""
    store = perdure.store_of(url)
    for verb in verbs_of(store):
        parameters = inspect.signature(getattr(type(store), verb)).parameters
        assert verb == "list" or BAD[verb].keys() == parameters.keys() - {"self"}, verb


async def test_a_value_within_a_value_is_refused(url: str) -> None:
    """A verb checks the parts of a session, and the place of a message, before it writes anything."""
    async with opened(url) as (store, good):
        before, session = await state_of(store), good["session"]
        placed: Any = StoredAt
        for verb in (store.create, store.save):
            for change in ({"info": 5}, {"definition": 5}, {"state": 5}, {"info": replace(session.info, version="1")}):
                with pytest.raises(InvalidData):
                    await verb(replace(session, **change))
        said = tell(session, Message.user("c", id="m"))
        for place in (5, placed(5, 0), placed(good["log"], "0"), placed(good["log"], -1)):
            with pytest.raises(InvalidData, match="written"):
                await store.save(said, written={"m": place})
        assert await state_of(store) == before


async def test_an_archived_session_of_wrong_parts_is_refused() -> None:
    """`restore` raises a PerdureError and keeps nothing."""
    async with MemoryStore() as store:
        await store.create(new_session("a", id="s"))
        archived: ArchivedSession = await store.dump("s")
    parts = (None, 5, -1, b"x", (5,), {"x": "5"}, {"s": {0: 5}}, {"k": ("d", "1")})
    changes = [{name: part} for name in archived.__struct_fields__ for part in parts]
    async with MemoryStore() as store:
        for change in (*changes, {"heads": ()}, {"logs": {"s": {-1: b"x"}}}, {"session_id": "a b"}):
            with pytest.raises(PerdureError):
                await store.restore(replace(archived, **change))
        assert len(await store.list()) == 0


def test_a_claim_is_checked_when_it_is_made() -> None:
    """Its fields are compared with what is stored, and sent to databases, as they are."""
    good = {"session_id": "s", "epoch": 1, "version": 1, "owner": "ann", "lease": 30.0}
    for name, value in (("session_id", 5), ("epoch", "1"), ("version", None), ("owner", b"x"), ("lease", -1)):
        with pytest.raises(InvalidData, match=name):
            Claim(**{**good, name: value})  # type: ignore[arg-type]
