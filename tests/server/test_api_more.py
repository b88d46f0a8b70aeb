"""The HTTP API: trees, diffs, workers, imports, searches and parts of long conversations."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.serving import Served, in_service

from perdure import Message
from perdure.sessions.pages import glimpse, page_of_said, page_of_shown


async def talk(served: Served, name: str, *texts: str) -> None:
    await served.ada.put(f"/api/sessions/{name}", json={})
    for text in texts:
        answered = await served.ada.post(f"/api/sessions/{name}/messages", json={"text": text})
        assert answered.status_code == 200, answered.text


@in_service
async def test_a_tree_has_runs_and_forks(served: Served) -> None:
    await talk(served, "a", "hello")
    await served.ada.post("/api/sessions/a/fork", json={"id": "b"})
    tree = (await served.ada.get("/api/sessions/a/tree")).json()
    assert (tree["kind"], [each["kind"] for each in tree["children"]]) == ("session", ["loop", "fork"])
    assert (await served.bob.get(f"/api/sessions/{tree['id']}/tree")).status_code == 404
    assert (await served.ada.get("/api/sessions/a/tree", params={"limit": 0})).status_code == 422


@in_service
async def test_two_versions_are_compared(served: Served) -> None:
    await talk(served, "a", "one", "two")
    diff = (await served.ada.get("/api/sessions/a/diff", params={"version": 2, "with_version": 3})).json()
    assert (diff["common"], len(diff["left"]), len(diff["right"])) == (2, 0, 2)
    assert (await served.ada.get("/api/sessions/a/diff")).status_code == 422
    assert (await served.ada.get("/api/sessions/a/diff", params={"with_version": 9})).status_code == 404


@in_service
async def test_workers_are_those_that_hold_sessions(served: Served) -> None:
    await talk(served, "a", "refund(order=7)")
    assert (await served.ada.get("/api/workers")).json() == {"workers": []}
    session = (await served.ada.get("/api/sessions/a")).json()
    journal = served.sessions.runtime.journal
    assert journal is not None
    claim, _ = await journal.claim(session["id"], version=session["version"], owner="host:1", lease=60)
    (worker,) = (await served.ada.get("/api/workers")).json()["workers"]
    assert (worker["holder"], [each["session"] for each in worker["running"]]) == ("host:1", [session["id"]])
    assert (await served.bob.get("/api/workers")).json() == {"workers": []}
    await journal.release(claim)


@in_service
async def test_an_exported_session_is_taken_in(served: Served) -> None:
    """It is imported once, by its owner, and by nobody else."""
    await talk(served, "a", "hello")
    file = (await served.ada.get("/api/sessions/a/export")).text
    await served.ada.delete("/api/sessions/a", params={"erase": True})
    theirs = await served.bob.post("/api/import", json={"file": file})
    assert theirs.status_code == 422
    first, second = [await served.ada.post("/api/import", json={"file": file}) for _ in range(2)]
    assert (first.status_code, first.json()["sessions"], first.json()["messages"]) == (201, 1, 2)
    assert (second.status_code, second.json()["skipped"]) == (200, 1)
    assert (await served.ada.get("/api/sessions/a/messages")).json()["total"] == 2
    broken = await served.ada.post("/api/import", json={"file": file[:-40]})
    assert (broken.status_code, broken.json()["title"]) == (422, "InvalidData")


@in_service
async def test_a_conversation_is_taken_in(served: Served) -> None:
    file = '[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hello!"}]'
    taken = await served.ada.post("/api/import", json={"format": "openai", "file": file})
    assert taken.status_code == 201, taken.text
    (made,) = taken.json()["created"]
    assert (await served.ada.get(f"/api/sessions/{made}/messages")).json()["total"] == 2
    for wrong in ({"format": "openai", "file": file, "agent": "nobody"}, {"file": file, "agent": "assistant"}):
        assert (await served.ada.post("/api/import", json=wrong)).status_code == 422


@in_service
async def test_a_search_has_pages(served: Served) -> None:
    """Every hit comes once; an operator may ask for one owner's sessions."""
    for number in range(5):
        await talk(served, f"s{number}", f"parrot number {number}")
    await served.bob.put("/api/sessions/b", json={})
    await served.bob.post("/api/sessions/b/messages", json={"text": "my parrot"})
    seen: list[str] = []
    query: dict[str, Any] = {"q": "parrot", "limit": 3, "owner": "ada"}
    while True:
        page = (await served.operator.get("/api/sessions", params=query)).json()
        seen += [hit["message"] for each in page["sessions"] for hit in each["hits"]]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert len(seen) == len(set(seen)) >= 5
    everybody = (await served.operator.get("/api/sessions", params={"q": "my parrot"})).json()["sessions"]
    assert [each["owner"] for each in everybody] == ["bob"]
    nothing = await served.ada.get("/api/sessions", params={"q": "parrot", "owner": "bob"})
    assert nothing.json() == {"sessions": [], "next": None}
    for after in ("x", "-1", "99999999"):
        odd = await served.ada.get("/api/sessions", params={"q": "parrot", "after": after})
        assert odd.status_code == 422


@pytest.mark.parametrize("verb", ["nothing", "trim", "reset", "compact", "rewind", "fork"])
@in_service
async def test_parts_of_a_conversation_are_parts_of_the_whole(served: Served, verb: str) -> None:
    """The pages together are the whole, after any change, and when they are read from the store again."""
    sessions = served.sessions
    chat = await sessions.open("long")
    await sessions.inject(chat.id, [Message.user(f"number {number}") for number in range(60)])
    match verb:
        case "trim":
            await chat.trim(7)
        case "reset":
            await chat.reset()
        case "compact":
            await chat.compact(compact_strategy="truncate", keep_last=5)
        case "rewind":
            await chat.rewind(1)
        case "fork":
            chat = await chat.fork("other")
    await sessions.inject(chat.id, [Message.user(f"more {number}") for number in range(20)])
    shown, said = list((await chat.session()).state.transcript), await chat.history()
    sessions.store.evict(chat.id)  # type: ignore[attr-defined]
    assert (await glimpse(sessions, chat.id)).version == (await sessions.info(chat.id)).version
    for page_of, whole in ((page_of_shown, shown), (page_of_said, said)):
        parts: list[Message] = []
        place, total = 0, 1
        while place < total:
            page = await page_of(sessions, chat.id, place, place + 9)
            parts += page.messages
            place, total = place + 9, page.total
        assert [each.id for each in parts] == [each.id for each in whole]


@in_service
async def test_a_long_session_is_not_read_whole(served: Served) -> None:
    sessions = served.sessions.of("ada")
    chat = await sessions.open("long")
    await sessions.inject(chat.id, [Message.user(f"number {number}") for number in range(3_000)])
    sessions.store.evict(chat.id)  # type: ignore[attr-defined]
    detail = (await served.ada.get("/api/sessions/long")).json()
    assert detail["message_count"] == 3_000
    last = (await served.ada.get("/api/sessions/long/messages", params={"after": 2_990})).json()
    assert (len(last["messages"]), last["total"], last["next"]) == (10, 3_000, None)
    held = sessions.store.glance(chat.id, last=1)  # type: ignore[attr-defined]
    read = [span for span in held.state.transcript.spans() if span.tape.items is not None]
    assert sum(map(len, read)) < 100


@in_service
async def test_a_condition_is_never_ignored(served: Served) -> None:
    """A request that cannot be bound to a version is refused, and nothing is changed."""
    await talk(served, "a", "hello")
    late = {"If-Match": '"1"'}
    refused = [
        await served.ada.post("/api/sessions/a/messages", json={"text": "more"}, headers=late),
        await served.ada.post("/api/sessions/a/fork", json={"id": "b"}, headers=late),
        await served.ada.post("/api/sessions/a/cancel", json={}, headers=late),
        await served.ada.delete("/api/sessions/a", params={"erase": True}, headers=late),
    ]
    assert [(each.status_code, each.json()["path"]) for each in refused] == [(422, "If-Match")] * 4
    assert (await served.ada.delete("/api/sessions/a", headers=late)).status_code == 412
    assert (await served.ada.get("/api/sessions/a")).headers["ETag"] == '"2"'
    assert (await served.ada.get("/api/sessions/b")).status_code == 404
