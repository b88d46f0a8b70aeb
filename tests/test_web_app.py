"""The web app of the examples, served for real: answers stream to each user, and outlive the request."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
from tests.server.browser import browsing, chromium

import perdure
from perdure.testing import Chunks, Delay, ScriptedDriver

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

EXAMPLES = Path(__file__).parents[1] / "examples"
CHAT = "/chats/order-7"
PAY = 'call refund {"order": 7}'


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'chats.db'}"


@pytest.fixture
def url(store: str, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "web_app:app", "--port", str(port), "--log-level", "warning"]
    environment = {**os.environ, "CHAT_STORE": store}
    server = subprocess.Popen([*command, "--app-dir", str(EXAMPLES)], env=environment, cwd=tmp_path)
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Answer(NamedTuple):
    """An answer as a browser has it after following the offsets of events."""

    text: str
    ids: list[str]
    kinds: list[str]
    end: dict[str, Any]


def send(url: str, user: str, body: object, path: str = CHAT) -> Answer:
    with httpx.stream("POST", url + path, json=body, headers={"X-User": user}, timeout=30) as answer:
        assert answer.status_code == 200
        return _read(answer)


def say(url: str, user: str, text: str, key: str) -> Answer:
    return send(url, user, {"text": text, "key": key})


def listen(url: str, user: str, text: str = "", **given: Any) -> Answer:
    headers = {"X-User": user, **given.pop("headers", {})}
    with httpx.stream("GET", f"{url}{CHAT}/events", headers=headers, timeout=30, **given) as answer:
        assert answer.status_code == 200
        return _read(answer, text)


def _read(answer: httpx.Response, text: str = "") -> Answer:
    ids, kinds, data = [], [], {}
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            ids.append(value)
        elif name == "event":
            kinds.append(value)
        elif name == "data":
            data = json.loads(value)
            text = text[: data["offset"]] + data["text"] if "text" in data else text
    return Answer(text, ids, kinds, data)


def page(url: str, user: str) -> Any:
    return httpx.get(url + CHAT, headers={"X-User": user}, timeout=30).json()


def test_every_user_has_chats_of_their_own(url: str) -> None:
    assert say(url, "ada", "What is 2 + 3?", "one").text == say(url, "ada", "What is 2 + 3?", "one").text != ""
    said = say(url, "bob", "Hello", "one")
    assert said.text
    assert said.ids
    chats = {}
    for user in ("ada", "bob"):
        (listed,) = httpx.get(f"{url}/chats", headers={"X-User": user}).json()["chats"]
        chats[user] = listed["chat"]
    assert chats["ada"] != chats["bob"]
    assert [each["text"] for each in page(url, "ada")["messages"]] == ["What is 2 + 3?", "The answer is 5."]


def test_a_browser_that_left_reads_on(url: str) -> None:
    """It gets the missed text, by the id of the last event that it saw, and nothing twice."""
    whole, ids, *_ = say(url, "ada", "Tell me a long story about a fox, a dog and a river", "one")
    headers = {"Last-Event-ID": ids[0]}
    with httpx.stream("GET", f"{url}{CHAT}/events", headers={"X-User": "ada", **headers}, timeout=30) as answer:
        first = next(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
    assert 0 < first["offset"] < len(whole)
    assert listen(url, "ada", whole[: first["offset"]], headers=headers).text == whole


def test_a_page_that_is_loaded_listens_behind_what_it_shows(url: str) -> None:
    """Nothing is shown twice: not even the last answer, if nothing has run since."""
    say(url, "ada", "My name is Ada.", "one")
    loaded = page(url, "ada")
    assert (loaded["activity"], loaded["text"], loaded["calls"], loaded["queued"]) == ("idle", "", [], [])
    assert listen(url, "ada", params={"after": loaded["cursor"]}).kinds == ["end"]
    said = say(url, "ada", "What is my name?", "two")
    heard = listen(url, "ada", params={"after": loaded["cursor"]})
    assert heard.text == said.text != ""
    assert heard.kinds[-1] == "end"


@pytest.mark.parametrize(("verb", "outcome"), [("approve", "ada gets the money for order 7 back"), ("deny", "No.")])
def test_a_person_decides(url: str, verb: str, outcome: str) -> None:
    """The page shows the waiting calls; a decision covers the shown ones, and a second click is refused."""
    asked = say(url, "ada", PAY, "one")
    (call,) = asked.end["calls"]
    assert (call["name"], call["arguments"]) == ("refund", {"order": 7})
    loaded = page(url, "ada")
    assert (loaded["activity"], loaded["calls"]) == ("waiting", [call])
    headers = {"X-User": "ada"}
    assert httpx.post(url + CHAT, json={"text": "Well?", "key": "two"}, headers=headers).status_code == 409
    for wrong, status in ((["0" * 64], 409), ([call["id"], "x"], 400)):
        refused = httpx.post(f"{url}{CHAT}/{verb}", json={"calls": wrong}, headers=headers)
        assert (refused.status_code, page(url, "ada")["activity"]) == (status, "waiting")
    decided = send(url, "ada", {"calls": [call["id"]]}, f"{CHAT}/{verb}")
    assert outcome in decided.text
    assert decided.end["calls"] == []
    assert listen(url, "ada", loaded["text"], params={"after": loaded["cursor"]}).text == decided.text
    again = httpx.post(f"{url}{CHAT}/{verb}", json={"calls": [call["id"]]}, headers=headers)
    assert again.status_code == 409
    loaded = page(url, "ada")
    assert loaded["activity"] == "idle"
    assert {each["role"] for each in loaded["messages"]} == {"user", "assistant"}  # no raw result of a tool


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, {"text": "", "key": "one"}, 400),
        ("POST", CHAT, {"text": "Hi"}, 400),
        ("POST", CHAT, {"text": 5, "key": "one"}, 400),
        ("POST", CHAT, ["text", "key"], 400),
        ("POST", f"{CHAT}/approve", {}, 400),
        ("POST", f"{CHAT}/deny", {"calls": []}, 400),
        ("POST", f"{CHAT}/approve", {"calls": ["x"]}, 404),
        ("GET", CHAT, None, 404),
        ("GET", f"{CHAT}/events", None, 404),
        ("GET", "/chats/a%20b", None, 400),
    ],
)
def test_bad_input_is_told(url: str, method: str, path: str, body: object, status: int) -> None:
    """The answer is a status and a sentence, and nothing is created by it."""
    refused = httpx.request(method, url + path, json=body, headers={"X-User": "ada"}, timeout=30)
    assert (refused.status_code, bool(refused.json()["error"])) == (status, True)
    assert httpx.get(f"{url}/chats", headers={"X-User": "ada"}).json()["chats"] == []


def test_what_is_not_json_or_a_cursor_is_told(url: str) -> None:
    headers = {"X-User": "ada"}
    assert httpx.post(url + CHAT, content=b"{", headers=headers).status_code == 400
    assert httpx.get(f"{url}/chats").status_code == 400  # without a user
    say(url, "ada", "Hello", "one")
    assert httpx.get(f"{url}{CHAT}/events?after=x", headers=headers).status_code == 400
    other = say(url, "bob", "Hello", "one").ids[0]
    told = listen(url, "ada", params={"after": other})
    assert (told.kinds, "cursor" in told.end["error"]) == (["failed"], True)


@pytest.fixture
def killed(store: str) -> None:
    """Leave a run behind that was killed in the middle of its answer."""

    async def leave() -> None:
        half = ScriptedDriver([Chunks(["Once upon ", Delay(60, "a time")])])
        async with perdure.connect(store, model="offline", driver=half, grace=0.0) as app:
            chat = await app.of("ada").open("order-7", perdure.AgentDefinition("clerk"))
            run = await chat.start("Tell me.")
            async for _ in run.stream():
                break
            await asyncio.sleep(0.3)

    asyncio.run(leave())


@pytest.mark.usefixtures("killed")
def test_what_the_last_process_left_behind_is_recovered(url: str) -> None:
    """The server is up at once, and continues the run in the background."""
    deadline = time.monotonic() + 30
    while page(url, "ada")["activity"] != "idle" and time.monotonic() < deadline:
        time.sleep(0.05)
    loaded = page(url, "ada")
    question, answer = (each["text"] for each in loaded["messages"])
    assert (question, "Once upon" in answer) == ("Tell me.", False)
    assert listen(url, "ada").text == answer


CUT = """() => {  // the first response ends behind its first event, as when the network is gone
    const whole = window.fetch;
    window.asked = [];
    window.fetch = async (address, given) => {
        window.asked.push(address);
        const answer = await whole(address, given);
        if (window.asked.length > 1) return answer;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let first = "";
        while (!/data: .*\\r\\n\\r\\n/.test(first)) first += (await reader.read()).value;
        return new Response(first.split(/(?<=\\r\\n\\r\\n)/)[0], answer);
    };
}"""
TALK = """async ([code, text]) => {
    const {say, follow} = await import("data:text/javascript;base64," + code);
    const shown = [];
    const end = await say("order-7", text, "one", (each) => shown.push(each));
    const page = await (await fetch("/chats/order-7")).json();
    const behind = await follow("order-7", page, () => shown.push("twice"));
    const refused = await say("order-7", "", "two", () => shown.push("refused"));
    return {end, behind, refused, shown, asked: window.asked};
}"""
QUEUE = """async ([code]) => {
    const {load, say} = await import("data:text/javascript;base64," + code);
    const missing = await load("order-8", () => 0, () => 0);
    const story = "Tell me a long story about a fox, a dog and a river";
    const first = say("order-7", story, "one", () => 0);
    while ((await fetch("/chats/order-7")).status === 404) {}
    const second = say("order-7", "What is 2 + 3?", "two", () => 0);
    while (!(await (await fetch("/chats/order-7")).text()).includes("2 + 3")) {}  // it waits by now, or is answered
    const page = await load("order-7", () => 0, () => 0);
    await Promise.all([first, second]);
    return {missing, page};
}"""
AWAY = """async ([code]) => {
    const {load, say} = await import("data:text/javascript;base64," + code);
    const asked = [], real = window.fetch;
    let sent;
    window.fetch = async (path, options) => {
        if (path.endsWith("/events") || path.includes("?after")) return real(path, options);
        if (options) {
            sent = options.headers["Content-Type"];
            return new Response("<h1>Too large</h1>", {status: 413});
        }
        asked.push(["away", "502", "passed on"][asked.length]);
        if (asked.length === 1) throw new TypeError("Failed to fetch");
        return asked.length === 2 ? new Response("<h1>Bad gateway</h1>", {status: 502}) : real(path, options);
    };
    const page = await load("order-7", () => 0, () => 0);
    const refused = await say("order-7", "long", "two", () => 0);
    return {page, asked, refused, sent};
}"""
FAILED = """async ([code]) => {
    const {load} = await import("data:text/javascript;base64," + code);
    const real = window.fetch;
    const event = 'event: failed\\r\\ndata: {"kind": "RunFailed", "error": "the model is down"}\\r\\n\\r\\n';
    window.fetch = async (path, options) => path.includes("/events") ? new Response(event) : real(path, options);
    return await load("order-7", () => 0, () => 0);
}"""
BROKEN = """async ([code]) => {
    const {say} = await import("data:text/javascript;base64," + code);
    return await say("order-7", "Hello", "one", (text) => (document.querySelector("#none").textContent = text));
}"""
DECIDE = """async ([code, pay]) => {
    const {load, say, decide} = await import("data:text/javascript;base64," + code);
    const shown = [], show = (each) => shown.push(each);
    const asked = await say("order-7", pay, "one", show);
    const loaded = await load("order-7", () => 0, show);
    const end = await decide("order-7", "approve", loaded, show);
    const late = await decide("order-7", "deny", asked, show);
    return {asked, loaded, end, late, shown};
}"""


async def test_the_script_of_a_page_reads_an_answer_to_its_end(url: str) -> None:
    """It continues behind its last event after a network failure, and stops at the end."""
    chromium()
    code = b64encode((EXAMPLES / "web_app.js").read_bytes()).decode()
    async with browsing(url, None) as seen:
        await seen.page.set_extra_http_headers({"X-User": "ada"})
        await seen.go("/chats")
        await seen.page.evaluate(CUT)
        told = await seen.page.evaluate(TALK, [code, "Tell me a long story about a \U0001f98a, a dog and a river"])
        seen.errors.clear()  # Chromium's console has the status 400 of the empty message
    (_, answer) = (each["text"] for each in page(url, "ada")["messages"])
    assert len(told["shown"]) > 1
    assert told["shown"][-1] == answer
    assert all(answer.startswith(each) for each in told["shown"])
    assert (told["end"]["calls"], told["behind"]["queued"], told["refused"]["status"]) == ([], False, 400)
    assert told["end"]["text"] == answer
    assert told["asked"][0] == CHAT
    assert told["asked"][1].startswith(f"{CHAT}/events?after=")


async def scripted(url: str, script: str, *given: str) -> Any:
    """Run the script of a page in a browser, with the module that the pages of the web app import."""
    chromium()
    code = b64encode((EXAMPLES / "web_app.js").read_bytes()).decode()
    async with browsing(url, None) as seen:
        await seen.page.set_extra_http_headers({"X-User": "ada"})
        await seen.go("/chats")
        told = await seen.page.evaluate(script, [code, *given])
        seen.errors.clear()  # Chromium says in its console which requests had a status of 400 or more
    return told


async def test_a_page_that_is_loaded_shows_queued_messages_to_their_end(url: str) -> None:
    """The stream of the run under way ends before them, so the page is loaded until nothing is left."""
    told = await scripted(url, QUEUE)
    assert (told["missing"]["status"], told["missing"]["kind"]) == (404, "SessionNotFound")
    assert [each["text"] for each in told["page"]["messages"]][2:] == ["What is 2 + 3?", "The answer is 5."]
    assert (told["page"]["activity"], told["page"]["queued"]) == ("idle", [])


async def test_a_page_that_is_loaded_waits_for_a_server_that_is_away(url: str) -> None:
    """A deploy between two requests leaves no page that waits for ever, and a proxy's page is not taken for a chat."""
    say(url, "ada", "What is 2 + 3?", "one")
    told = await scripted(url, AWAY)
    assert [each["text"] for each in told["page"]["messages"]] == ["What is 2 + 3?", "The answer is 5."]
    assert told["asked"] == ["away", "502", "passed on"]
    assert told["refused"] == {"status": 413, "error": "HTTP 413"}
    assert told["sent"] == "application/json"


async def test_a_page_that_is_loaded_is_told_that_the_last_answer_failed(url: str) -> None:
    """The key of its message is gone, so nothing else tells."""
    say(url, "ada", "What is 2 + 3?", "one")
    told = await scripted(url, FAILED)
    assert (told["activity"], told["kind"], told["error"]) == ("idle", "RunFailed", "the model is down")


async def test_a_mistake_in_a_page_is_raised(url: str) -> None:
    """A TypeError of the page's `show` is not taken for a network that is away, and tried again for ever."""
    with pytest.raises(Exception, match="Cannot set properties of null"):
        await scripted(url, BROKEN)


async def test_the_script_of_a_page_decides(url: str) -> None:
    """The answer continues behind what was shown of it, and a later click is told that it was decided."""
    told = await scripted(url, DECIDE, PAY)
    assert told["asked"]["calls"] == told["loaded"]["calls"] != []
    assert "ada gets the money for order 7 back" in told["shown"][-1]
    assert (told["end"]["calls"], told["end"]["text"]) == ([], told["shown"][-1])
    assert (told["late"]["status"], told["late"]["kind"]) == (409, "PendingCallsChanged")


@pytest.mark.usefixtures("killed")
def test_two_clicks_on_try_again_are_one_try(url: str) -> None:
    """The key says so, also after the first try has ended. The message and its answer are there once."""
    send(url, "ada", {"text": "Hello", "key": "1"}, "/chats/r1")
    tries = [send(url, "ada", {"key": "again"}, "/chats/r1/retry") for _ in range(2)]
    assert tries[0].text == tries[1].text != ""
    shown = httpx.get(f"{url}/chats/r1", headers={"X-User": "ada"}).json()
    assert [each["role"] for each in shown["messages"]] == ["user", "assistant"]


def test_a_run_is_stopped_by_a_button(url: str) -> None:
    """The button is also there when nothing runs, and the chat can be used afterwards."""
    send(url, "ada", {"text": "Hello", "key": "one"}, "/chats/s1")
    stopped = httpx.post(f"{url}/chats/s1/stop", headers={"X-User": "ada"}, timeout=30)
    assert (stopped.status_code, stopped.json()) == (200, {"stopped": False})
    assert send(url, "ada", {"text": "What is 2 + 3?", "key": "two"}, "/chats/s1").text == "The answer is 5."
    assert httpx.post(f"{url}/chats/none/stop", headers={"X-User": "ada"}).status_code == 404


def test_two_clicks_at_once_are_one_decision(url: str) -> None:
    """The losers get a status before a response begins: 409."""
    (call,) = say(url, "ada", PAY, "one").end["calls"]
    headers, body = {"X-User": "ada"}, {"calls": [call["id"]]}

    def click(_: int) -> int:
        return httpx.post(f"{url}{CHAT}/approve", json=body, headers=headers, timeout=30).status_code

    with ThreadPoolExecutor(4) as people:
        assert sorted(people.map(click, range(4))) == [200, 409, 409, 409]
