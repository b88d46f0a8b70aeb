"""The page of a session: what it shows of a conversation, its versions, runs and family."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.server.html_page import Page
from tests.server.serving import Served, client_of, in_service, refund, serving

import perdure
from perdure import AgentDefinition, SendParallel
from perdure.actions.metadata import TagSession, WriteMetadata
from perdure.loop.factory import LoopFactory
from perdure.model.message import Message, Text, Thinking, ToolCall
from perdure.parallel import LongestAnswer
from perdure.protocols import PARKED, Entry, ModelRequest
from perdure.server.app import make_app
from perdure.server.pages import session_page
from perdure.server.pages.static_files import _all as static_files
from perdure.server.pages.version_line import version_line
from perdure.server.service import Service
from perdure.server.tokens import new_token
from perdure.testing import ScriptedDriver


def _said(page: Page) -> list[tuple[str, str]]:
    """Return the speakers and texts on a page."""
    who, what = page.all("div", "who"), page.all("div", "what")
    return [(one.text, " ".join(other.text.split())) for one, other in zip(who, what, strict=True)]


@in_service
async def test_a_conversation_is_shown_with_its_facts(served: Served) -> None:
    hers = served.sessions.of("ada")
    await (await hers.open("talk")).send("What is 2 + 3?")
    page = await Page.get(served.ada, "/sessions/talk")
    assert _said(page) == [("user", "What is 2 + 3?"), ("assistant", "The answer is 5.")]
    facts = page.one("dl", "facts").text
    assert all(word in facts for word in ("assistant", "version", "tokens used", "ada"))
    assert page.one("title").text == "What is 2 + 3? · perdure"
    assert [each.text for each in page.all("span", "cause")] == ["created", "What is 2 + 3?"]
    assert "What is 2 + 3?" in page.all("ul", "runs")[0].text
    assert "AgentEnd" in page.by_id("events").text


@in_service
async def test_a_graph_answers_in_its_thread(served: Served) -> None:
    """Perdure's own agent would answer a message from the page or by the API, so both are refused."""
    hers = served.sessions.of("ada")
    thread = await hers.open("thread", agent=AgentDefinition("langgraph"))
    body = {"task": "1", "path": "~__pregel_pull, model", "at": 0.0, "writes": [[-3, "__interrupt__", None]]}
    await hers.execute(thread.id, WriteMetadata("langgraph", {"id": "c-1", "version": 2}))
    await served.sessions.store.note(thread.id, [Entry("langgraph.writes", body, "c-1")])
    page = await Page.get(served.ada, "/sessions/thread")
    assert page.all("form", "write") == []
    assert "Waits for Command(resume=…): model." in page.text
    assert "Nothing has run yet" not in page.text
    assert "model waits on an interrupt" in page.by_id("events").text
    posted = await served.ada.post("/sessions/thread/send", data={"text": "Hello"})
    assert (posted.status_code, "its graph answers" in posted.text) == (412, True)
    refused = await served.ada.post("/api/sessions/thread/messages", json={"text": "Hello"})
    assert (refused.status_code, refused.json()["agent"]) == (409, "langgraph")
    assert not (await hers.queue()).waiting


@in_service
async def test_a_call_and_its_result_are_one_box(served: Served) -> None:
    """They are one box even if a provider uses the id of a call again."""
    hers = served.sessions.of("ada")
    await hers.open("calls")
    for number in (1, 2):
        await hers.inject(
            "calls",
            [
                Message.assistant(Thinking("hm"), ToolCall("look", {"at": number}, id="call_0")),
                Message.tool("call_0", f"seen {number}", name="look"),
            ],
        )
    refused = "OutcomeUnknown: This call was interrupted."
    await hers.inject(
        "calls",
        [
            Message.assistant(ToolCall("pay", id="call_9")),
            Message.tool("call_9", refused, name="pay", is_error=True),
            Message.assistant("half an ans", metadata={"incomplete": "length"}),
        ],
    )
    page = await Page.get(served.ada, "/sessions/calls")
    assert [each.text for each in page.all("span", "out")] == ["→ seen 1", "→ seen 2", "✗ outcome unknown"]
    assert len(page.all("details", "unknown")) == 1
    assert refused in page.one("details", "unknown").text
    assert "this answer is not whole" in page.all("article", "cut")[0].text
    assert len(page.all("details", "thinking")) == 2


@in_service
async def test_an_older_version_is_shown_as_it_was(served: Served) -> None:
    hers = served.sessions.of("ada")
    chat = await hers.open("talk")
    for text in ("one", "two", "three"):
        await chat.send(text)
    await hers.trim("talk", 2)
    await hers.undo("talk")
    await hers.rename("talk", "Talk")
    page = await Page.get(served.ada, "/sessions/talk?version=3")
    assert [who for who, _ in _said(page)] == ["user", "assistant"] * 2
    assert "You look at version 3" in page.one("div", "past").text
    assert [each.text for each in page.all("span", "cause")] == [
        *("created", "one", "two", "three", "trimmed", "undone, back to 4", "renamed")
    ]
    for missing in (0, 8, 99):
        await Page.get(served.ada, f"/sessions/talk?version={missing}", 404)


@in_service
async def test_versions_are_windowed(served: Served) -> None:
    hers = served.sessions.of("ada")
    await hers.open("many")
    for number in range(40):
        await hers.rename("many", f"name {number}")
    for version, shown in ((1, (1, 15)), (20, (13, 27)), (41, (27, 41))):
        page = await Page.get(served.ada, f"/sessions/many?version={version}")
        numbers = [int(each.text) for each in page.all("i") if each.text.isdecimal()]
        assert (numbers[0], numbers[-1]) == shown
    assert any(each.attributes.get("max") == "41" for each in page.all("input"))


@in_service
async def test_what_a_compaction_covers_is_fetched_when_it_is_opened(served: Served) -> None:
    """A script gets a part of a page and other browsers a whole page, one window at a time in both."""
    hers = served.sessions.of("ada")
    await hers.open("long")
    await hers.inject("long", [{"role": "user", "content": f"message {number}"} for number in range(100)])
    await hers.compact("long", compact_strategy="truncate", keep_last=2)
    page = await Page.get(served.ada, "/sessions/long")
    assert "message 50" not in page.text
    covered = page.one("section", "block")
    assert "98 messages folded into 1" in covered.text
    link = page.link("Show them")
    whole = await Page.get(served.ada, link)
    assert "message 0" in whole.text
    assert "message 60" not in whole.text
    part = await served.ada.get(link, headers={"HX-Request": "true"})
    assert "<html" not in part.text
    following = Page(f"<html>{part.text}</html>").link("38 more")
    assert "message 97" in (await Page.get(served.ada, following)).text
    assert (await served.bob.get(link)).status_code == 404
    await Page.get(served.ada, link.replace("/blocks/", "/blocks/no"), 422)


@in_service
async def test_a_window_moves_through_a_long_conversation(served: Served) -> None:
    hers = served.sessions.of("ada")
    await hers.open("long")
    await hers.inject("long", [{"role": "user", "content": f"message {number}."} for number in range(150)])
    for view in ("shown", "said"):
        page = await Page.get(served.ada, f"/sessions/long?view={view}")
        seen = [text for _, text in _said(page)]
        while "Earlier messages" in page.text:
            page = await Page.get(served.ada, page.link("Earlier messages"))
            seen = [text for _, text in _said(page)] + seen
        assert seen == [f"message {number}." for number in range(150)]
        assert "Later messages" in page.text
    await Page.get(served.ada, "/sessions/long?end=-1", 422)


@in_service
async def test_all_that_was_said_is_shown_of_forks_and_rewound_sessions(served: Served) -> None:
    hers = served.sessions.of("ada")
    chat = await hers.open("talk")
    for text in ("one", "two", "three"):
        await chat.send(text)
    await hers.rewind("talk", 2)
    await chat.send("four")
    await hers.fork("talk", "forked")
    await hers.send("forked", "five")
    for session, asked in (("talk", "one two three four"), ("forked", "one four five")):
        page = await Page.get(served.ada, f"/sessions/{session}?view=said")
        users = [text for who, text in _said(page) if who == "user"]
        assert users == asked.split()
        assert [each.text for each in await hers.history(session) if each.role == "user"] == users
    family = (await Page.get(served.ada, "/sessions/talk")).one("ul", "family")
    assert "fork" in family.text


@in_service
async def test_what_waits_for_a_person_is_shown_to_those_who_may_decide(served: Served) -> None:
    await (await served.sessions.of("ada").open("order")).send('call refund {"order": 7}')
    page = await Page.get(served.ada, "/sessions/order")
    assert '"order": 7' in page.one("section", "asks").text
    assert page.form("approve").fields.keys() == {"call"}
    reader = await Page.get(served.reader, "/sessions/order")
    assert '"order": 7' in reader.one("section", "asks").text
    assert reader.forms == []


@in_service
async def test_another_owners_session_is_as_one_that_is_not_there(served: Served) -> None:
    """The answers are equal byte for byte, on every page and for every form."""
    chat = await served.sessions.of("ada").open("hers")
    await chat.send("secret")
    missing = str(chat.id)[:-4] + "none"
    for path in ("", "?view=said", "?version=1", "/live", "/blocks/x"):
        there = await served.bob.get(f"/sessions/{chat.id}{path}")
        not_there = await served.bob.get(f"/sessions/{missing}{path}")
        assert there.status_code == not_there.status_code == 404
        assert there.content == not_there.content.replace(missing.encode(), str(chat.id).encode())
        assert b"secret" not in there.content


@in_service
async def test_the_live_stream_sends_rows_and_reads_on(served: Served) -> None:
    """An id is a place on the record: after the last one seen, nothing comes twice."""
    hers = served.sessions.of("ada")
    chat = await hers.open("talk")
    await chat.send("one")
    first = await _rows(served.ada, "/sessions/talk/live?version=2", 3)
    assert [each for each, _ in first] == [1, 2, 3]
    assert 'hx-target="#events"' in first[0][1]
    await chat.send("two")
    rest = await _rows(served.ada, "/sessions/talk/live?version=2", 3, {"Last-Event-ID": "3"})
    assert [each for each, _ in rest] == [4, 5, 6]
    assert (await served.bob.get("/sessions/talk/live")).status_code == 404


async def _rows(
    client: httpx.AsyncClient, path: str, count: int, headers: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """Return the first rows of a stream, each with its id. It asks the app: httpx's transport waits for the end."""
    rows: list[tuple[int, str]] = []
    gone = asyncio.Event()
    body = ""
    app = client._transport.app  # type: ignore[attr-defined]
    given = {**client.headers, "accept": "text/event-stream", **(headers or {})}
    scope = {
        "type": "http",
        "method": "GET",
        "path": path.partition("?")[0],
        "query_string": path.partition("?")[2].encode(),
        "headers": [(b"host", b"127.0.0.1:7433"), *((k.lower().encode(), v.encode()) for k, v in given.items())],
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, object]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        nonlocal body
        body += bytes(message.get("body", b"")).decode()  # type: ignore[arg-type]
        *whole, body = body.split("\n\n")
        for each in whole:
            lines = each.split("\n")
            ids = [line[4:] for line in lines if line.startswith("id: ")]
            rows.extend((int(found), each) for found in ids)
        if len(rows) >= count:
            gone.set()

    async with asyncio.timeout(10):
        await app(scope, receive, send)
    return rows[:count]


CANARY = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>{{7*7}}\u202e\x07"


async def _hostile(sessions: perdure.Sessions) -> None:
    """Leave a session in which every text is an attack."""
    agent = perdure.AgentDefinition(CANARY, system_prompt=CANARY)
    await sessions.open("hostile", agent, tags=[CANARY])
    await sessions.rename("hostile", CANARY)
    call = ToolCall(CANARY, {CANARY: CANARY}, id=CANARY)
    await sessions.inject(
        "hostile",
        [
            Message("user", (Text(CANARY),), id=CANARY),
            Message.assistant(Thinking(CANARY), CANARY, call, id="b" + CANARY),
            Message.tool(CANARY, CANARY, name=CANARY),
            *(Message.user(f"{CANARY} {number}") for number in range(6)),
        ],
    )
    await sessions.compact("hostile", compact_strategy="truncate", keep_last=3)
    await sessions.send("hostile", CANARY)
    await sessions.fork("hostile", "fork")
    await sessions.rename("fork", CANARY)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?q=alert",
        f"/?{httpx.QueryParams({'tag': CANARY})}",
        "/sessions/hostile",
        "/sessions/hostile?view=said",
        "/sessions/hostile?version=2",
        "/sessions/fork",
        "BLOCK",
    ],
)
async def test_what_was_stored_cannot_act(tmp_path: Path, path: str) -> None:
    """Every stored text is shown as text."""
    driver = ScriptedDriver([CANARY] * 3)
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", driver=driver) as sessions:
        await _hostile(sessions)
        await sessions.enqueue("hostile", CANARY)
    async with serving(f"sqlite:///{tmp_path}/a.db") as served:
        if path == "BLOCK":
            path = (await Page.get(served.operator, "/sessions/hostile")).link("Show them")
        page = await Page.get(served.operator, path)
        assert_harmless(page)
        assert "onerror=alert(1)" in page.text
        assert "\u202e" not in page.text
        assert "\x07" not in page.text
        assert "49" not in [each.text for each in page.all("bdi")]


def assert_harmless(page: Page) -> None:
    """Assert that nothing on the page is of another's making, and that nothing would need a weaker policy."""
    assert not page.all("img")
    for each in page.elements:
        names = each.attributes.keys()
        assert not any(name.startswith("on") or name == "style" for name in names), each
        assert each.tag not in ("style", "iframe", "object", "base"), each
        assert each.tag != "script" or each.attributes["src"].startswith("/static/"), each
        for address in ("href", "src", "action", "hx-get"):
            given = each.attributes.get(address, "/")
            assert given.startswith(("/", "#", "?")), each
            assert not given.startswith("//"), each


@in_service
async def test_the_first_page_is_small(served: Served) -> None:
    """HTML, style and scripts take 60 KB at most, compressed, for a full list and a full window."""
    hers = served.sessions.of("ada")
    for number in range(60):
        await hers.inject((await hers.open(f"s{number}")).id, f"a question about the trains of line {number}")
    await hers.inject("s0", [{"role": "user", "content": f"message {n}, " * 20} for n in range(200)])
    static = sum(len(gzip.compress(body)) for body in static_files().values())
    for path in ("/", "/sessions/s0"):
        html = (await served.ada.get(path)).content
        assert static + len(gzip.compress(html)) < 60_000


@in_service
async def test_a_page_costs_its_window(served: Served) -> None:
    """The best of several times counts, for any length of session: other work on this machine only adds to a time."""
    hers = served.sessions.of("ada")
    for name, length in (("short", 100), ("long", 20_000)):
        await hers.open(name)
        for start in range(0, length, 5_000):
            some = range(start, min(length, start + 5_000))
            await hers.inject(name, [{"role": "user", "content": f"message {number}"} for number in some])
    for view in ("shown", "said"):
        best = {"short": 1.0, "long": 1.0}
        for _ in range(30):
            for name in best:
                best[name] = min(best[name], await _taken(served, name, view))
            if best["long"] < min(0.1, 1.5 * best["short"]):
                break
        assert best["long"] < min(0.1, 1.5 * best["short"]), best


async def _taken(served: Served, name: str, view: str) -> float:
    """Return the time for a page of a session that is not in memory."""
    served.sessions.store.evict((await served.sessions.of("ada").info(name)).id)  # type: ignore[attr-defined]
    began = time.perf_counter()
    await served.ada.get(f"/sessions/{name}?view={view}")
    return time.perf_counter() - began


@asynccontextmanager
async def _served(sessions: perdure.Sessions) -> AsyncIterator[httpx.AsyncClient]:
    """Serve sessions without a worker, to an operator."""
    service = Service(sessions)
    secret, _ = await new_token(service.gate._book, None)
    async with client_of(make_app(service), secret) as client:
        yield client
    await service.feeds.close()


async def test_a_killed_run_and_a_parked_session_are_told(tmp_path: Path) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        for name in ("killed", "parked", "well"):
            await (await sessions.open(name)).send(f"I am {name}")
        journal = sessions.runtime.journal
        assert journal is not None
        claim, _ = await journal.claim("killed", version=2, owner="a process that is gone")
        await journal.release(claim, interrupted=True)
        await sessions.execute("parked", TagSession(PARKED))
        await sessions.suspend("parked")
        async with _served(sessions) as client:
            page = await Page.get(client, "/")
            strips = {each.text.split()[1]: each.text.split()[0] for each in page.all("a", "strip")}
            assert strips == {"running": "0", "waiting": "0", "killed": "1", "parked": "1"}
            assert "I am killed" in (await Page.get(client, "/?show=killed")).by_id("rows").text
            assert "I am parked" in (await Page.get(client, "/?show=parked")).by_id("rows").text
            killed = await Page.get(client, "/sessions/killed")
            assert "killed" in killed.one("h1").text
            assert killed.form("cancel")


async def test_a_long_run_that_waits_is_shown(tmp_path: Path) -> None:
    """It has more messages than a session's first read returns."""
    look = [ToolCall("look") for _ in range(70)]
    driver = ScriptedDriver([*look, ToolCall("refund", {"order": 7})])
    tools = [perdure.tool(_look, name="look"), refund]
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", driver=driver, tools=tools) as sessions:
        await (await sessions.open("long")).send("look, and pay")
        assert await sessions.length("long") > 140
        async with _served(sessions) as client:
            page = await Page.get(client, "/sessions/long")
            assert '"order": 7' in page.one("section", "asks").text
            assert len(page.all("details", "waits")) == 1


def _look() -> str:
    """Look."""
    return "seen"


async def test_a_run_that_was_stopped_is_told_from_one_that_came_to_its_end(tmp_path: Path) -> None:
    """Its call does not look as if a result could still come."""
    begun = asyncio.Event()

    @perdure.tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        await asyncio.sleep(60)
        return "done"

    driver = ScriptedDriver([ToolCall("wait")])
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", driver=driver, tools=[wait]) as sessions:
        await sessions.open("a")
        run = await sessions.start("a", "wait")
        await begun.wait()
        async with _served(sessions) as client:
            under_way = await Page.get(client, "/sessions/a")
            assert [each.text for each in under_way.all("span", "out")] == ["no result yet"]
            await sessions.cancel("a")
            await run.result()
            page = await Page.get(client, "/sessions/a")
            assert [each.text for each in page.all("span", "out")] == ["no result"]
            assert "stopped: user requested" in page.all("ul", "runs")[0].text
            assert "stopped, user requested" in page.all("dl", "table")[0].text
            link = next(each.attributes["href"] for each in page.all("a") if "/runs/" in each.attributes["href"])
            assert "stopped" in (await Page.get(client, link)).one("h1").text


@in_service
async def test_what_happens_while_a_page_is_made_is_told_by_its_stream(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream begins after the events that were there before anything else of the page was read."""
    hers = served.sessions.of("ada")
    chat = await hers.open("talk")
    await chat.send("one")
    before = len([each async for each in chat.events()])

    async def with_a_run(*given: object) -> object:
        await chat.send("two")
        return await version_line(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(session_page, "version_line", with_a_run)
    page = await Page.get(served.ada, "/sessions/talk")
    assert f"live?after={before}&" in page.by_id("live").attributes["hx-sse:connect"]


async def test_branches_are_shown_side_by_side(tmp_path: Path) -> None:
    def by_model(request: ModelRequest) -> str:
        return {"small": "Yes.", "large": "Yes, on Thursday."}[request.model.name]

    loops = LoopFactory(driver=ScriptedDriver(by_model))
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        await sessions.open("talk")
        action = SendParallel("This week?", loops, configs=["small", "large"], strategy=LongestAnswer())
        await sessions.execute("talk", action)
        async with _served(sessions) as client:
            page = await Page.get(client, "/sessions/talk")
            runs = page.all("ul", "runs")[0].text
            assert "2 branches side by side" in runs
            assert [each.text for each in page.all("span", "title")][:3] == ["This week?", "small", "large"]
            for view in ("shown", "said"):
                page = await Page.get(client, f"/sessions/talk?view={view}")
                assert _said(page) == [("user", "This week?"), ("assistant", "Yes, on Thursday.")]
                first = next(each for each in page.all("div") if each.classes & {"of-run", "who"})
                assert "of-run" in first.classes  # above the run's question


@in_service
async def test_a_message_that_was_found_is_on_its_page(served: Served) -> None:
    """It is found anywhere in the log, and even if the place is not in this session's log."""
    hers = served.sessions.of("ada")
    await hers.open("long")
    await hers.inject("long", [{"role": "user", "content": f"message {number}."} for number in range(200)])
    wanted = (await hers.session("long")).state.messages[17]
    for place in (17, 190):
        page = await Page.get(served.ada, f"/sessions/long?view=said&message={wanted.id}&place={place}")
        assert "message 17." in page.by_id(f"m-{wanted.id}").text


@in_service
async def test_a_text_without_end_is_cut(served: Served) -> None:
    hers = served.sessions.of("ada")
    await hers.open("huge")
    await hers.inject("huge", "x" * 500_000)
    response = await served.ada.get("/sessions/huge")
    assert len(response.content) < 100_000
    assert "480,000 more characters" in response.text
