"""Operations on a store while something fails, each with what the store shows once it is done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

from perdure.model.session import AgentSession
from perdure.protocols import Change, Entry
from perdure.testing.pictures import Picture, pictures
from perdure.testing.samples import fork, new_session, say

IDS = ("a", "b", "new", "gone")


class Deed(NamedTuple):
    """One operation, and the picture of each session once it is done."""

    name: str
    work: Callable[[], Coroutine[Any, Any, Any]]
    after: Mapping[str, Picture | None]


async def prepared(store: Any) -> dict[str, Picture | None]:
    """Create the sessions that the deeds change, and return what the store shows of them."""
    for name in ("a", "b"):
        await store.create(new_session("Hello.", "secretword", id=name))
    await store.create(say(fork(await store.load("a"), id="gone"), "of the fork"))
    return await reduced(store)


def deeds_for(store: Any, known: Mapping[str, AgentSession], before: Mapping[str, Picture | None]) -> list[Deed]:
    """Return the operations that can be done to the sessions of `prepared`. `known` has them as they were loaded."""
    a, b = known["a"], known["b"]

    def changed(name: str, **changes: Any) -> dict[str, Picture | None]:
        return {**before, name: {**(before[name] or {}), **changes}}

    def said(name: str, text: str, into: Mapping[str, Picture | None] = before) -> dict[str, Picture | None]:
        was = into[name]
        assert was is not None
        return {**into, name: {**was, "version": was["version"] + 1, "shown": [*was["shown"], text]}}

    # More than two pages of a SQLite file: the write touches several, and can fail between them.
    long = "w" * 9000
    new: Picture = {"version": 1, "shown": ["New."], "record": [], "inbox": []}
    return [
        Deed("save", partial(store.save, say(a, "more")), said("a", "more")),
        Deed("long save", partial(store.save, say(a, long)), said("a", long)),
        Deed("create", partial(store.create, new_session("New.", id="new")), {**before, "new": new}),
        Deed("post", partial(store.post, "a", Entry("mail")), changed("a", inbox=["mail"])),
        Deed("note", partial(store.note, "a", [Entry("noted", run="task")]), changed("a", record=["noted"])),
        Deed(
            "claim",
            partial(store.claim, "a", version=1, owner="me", entries=[Entry("start", run="r")]),
            changed("a", record=["start"]),
        ),
        Deed("delete", partial(store.delete, "gone"), {**before, "gone": None}),
        Deed(
            "save_all",
            partial(store.save_all, [Change(say(a, "both")), Change(say(b, "both"))]),
            said("b", "both", said("a", "both")),
        ),
    ]


async def reduced(store: Any) -> dict[str, Picture | None]:
    """Return those parts of the pictures that a deed changes."""
    wanted = ("version", "shown", "record", "inbox")
    found = await pictures(store, IDS)
    return {name: each and {key: each[key] for key in wanted} for name, each in found.items()}
