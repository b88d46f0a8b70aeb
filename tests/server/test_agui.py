"""AG-UI: every event and every input is checked by the protocol's own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ag_ui.core import Event, RunAgentInput
from pydantic import TypeAdapter
from tests.server.serving import Served, client_of, in_service, serving
from tests.waiting import until

import perdure
from perdure.model.message import Thinking
from perdure.model.step import InferenceResponse
from perdure.protocols import ModelReply
from perdure.server.agui.events import Teller
from perdure.server.app import make_app
from perdure.server.feeds import Piece
from perdure.server.service import Service
from perdure.server.tokens import new_token
from perdure.testing import Chunks, Delay, ScriptedDriver
from perdure.workers.worker import Worker

EVENT: TypeAdapter[Any] = TypeAdapter(Event)
WEATHER = {"name": "weather", "description": "Look out.", "parameters": {"type": "object", "properties": {}}}


def asked(*messages: dict[str, Any], thread: str = "t", run: str = "r", **more: Any) -> dict[str, Any]:
    """Return an input, as the protocol's own type writes it."""
    made = RunAgentInput(thread_id=thread, run_id=run, messages=messages, **more)
    return json.loads(made.model_dump_json(by_alias=True))


def user(text: Any, name: str = "u1") -> dict[str, Any]:
    return {"id": name, "role": "user", "content": text}


def events_in(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a response, each checked against the protocol's types."""
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    found = [json.loads(line) for line in lines]
    for each in found:
        read = EVENT.validate_python(each)
        assert json.loads(read.model_dump_json(by_alias=True)) == each
        assert not read.model_extra
    return found


async def ran(client: httpx.AsyncClient, given: dict[str, Any], path: str = "/agui") -> list[dict[str, Any]]:
    return events_in(await client.post(path, json=given))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [each["type"] for each in events]


def text_in(events: list[dict[str, Any]]) -> str:
    return "".join(each["delta"] for each in events if each["type"] == "TEXT_MESSAGE_CONTENT")


@in_service
async def test_a_thread_is_a_session(served: Served) -> None:
    """Its first message creates it; messages that the front end sends again are not added again."""
    first = await ran(served.ada, asked(user("hello")))
    assert kinds(first)[:2] == ["RUN_STARTED", "TEXT_MESSAGE_START"]
    assert kinds(first)[-2:] == ["TEXT_MESSAGE_END", "RUN_FINISHED"]
    assert (first[0]["threadId"], first[0]["runId"], first[0]["protocolVersion"]) == ("t", "r", "1.0")
    assert "hello" in text_in(first)
    assert first[-1]["outcome"] == {"type": "success"}
    assert first[-1]["usage"][0]["model"] == "offline"
    answer = {"id": first[1]["messageId"], "role": "assistant", "content": text_in(first)}
    second = await ran(served.ada, asked(user("hello"), answer, user("bye", "u2"), run="r2"))
    assert "bye" in text_in(second)
    said = (await served.ada.get("/api/sessions/t/messages")).json()["messages"]
    assert [each["id"] for each in said] == ["u1", answer["id"], "u2", second[1]["messageId"]]
    runs = (await served.ada.get("/api/sessions/t/runs")).json()["runs"]
    assert [each["metadata"]["agui"]["runId"] for each in runs] == ["r", "r2"]
    assert second[-1]["metadata"]["agui"]["run"] == runs[-1]["loop_id"]


@in_service
async def test_the_same_request_again_is_the_same_answer(served: Served) -> None:
    """The thread is shown as it is, and nothing is run."""
    first = await ran(served.ada, asked(user("hello")))
    again = await ran(served.ada, asked(user("hello")))
    assert kinds(again) == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "RUN_FINISHED"]
    assert [each["content"] for each in again[1]["messages"]] == ["hello", text_in(first)]
    assert len((await served.ada.get("/api/sessions/t/runs")).json()["runs"]) == 1
    edited = await served.ada.post("/agui", json=asked(user("hello!")))
    assert (edited.status_code, edited.json()["path"]) == (422, "$.messages[0].id")


@in_service
async def test_a_thread_can_be_looked_at(served: Served) -> None:
    """Without messages nothing is created; a page that is loaded again shows the calls that wait."""
    empty = await ran(served.ada, asked())
    assert kinds(empty) == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "RUN_FINISHED"]
    assert (await served.ada.get("/api/sessions")).json()["sessions"] == []
    waits = await ran(served.ada, asked(user("refund(order=7)")))
    again = await ran(served.ada, asked(run="r2"))
    assert again[-1]["outcome"] == waits[-1]["outcome"]
    assert again[1]["messages"][1]["toolCalls"][0]["function"] == {"name": "refund", "arguments": '{"order":7}'}


@in_service
async def test_an_approval_is_an_interrupt(served: Served) -> None:
    waits = await ran(served.ada, asked(user("refund(order=7)")))
    assert kinds(waits) == ["RUN_STARTED", "TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END", "RUN_FINISHED"]
    (interrupt,) = waits[-1]["outcome"]["interrupts"]
    assert (interrupt["reason"], interrupt["toolCallId"]) == ("tool_call", waits[1]["toolCallId"])
    other = await served.ada.post("/agui", json=asked(user("and now?", "u2")))
    assert (other.status_code, other.json()["title"]) == (409, "InterruptsOpen")
    entry = {"interruptId": interrupt["id"], "status": "resolved", "payload": {"approved": True}}
    done = await ran(served.ada, asked(user("refund(order=7)"), run="r2", resume=[entry]))
    assert kinds(done)[:2] == ["RUN_STARTED", "TOOL_CALL_RESULT"]
    assert done[1]["content"] == "order 7 is refunded"
    again = await ran(served.ada, asked(run="r4"))
    assert "usage" not in again[-1]
    whole = (await served.sessions.of("ada").session("t")).state.usage
    assert sum(each[-1]["usage"][0]["totalTokens"] for each in (waits, done)) == whole.total_tokens
    assert "refunded" in text_in(done)
    late = await served.ada.post("/agui", json=asked(run="r3", resume=[entry]))
    assert (late.status_code, late.json()["title"]) == (409, "InterruptClosed")
    other = await served.ada.post("/agui", json=asked(thread="other", resume=[entry]))
    assert other.status_code == 422


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"status": "resolved", "payload": {"approved": False, "reason": "Not on a Sunday."}}, "Not on a Sunday."),
        ({"status": "resolved", "payload": False}, "denied"),
        ({"status": "cancelled"}, "cancelled"),
    ],
)
@in_service
async def test_a_call_is_denied(served: Served, entry: dict[str, Any], told: str) -> None:
    waits = await ran(served.ada, asked(user("refund(order=7)")))
    (interrupt,) = waits[-1]["outcome"]["interrupts"]
    done = await ran(served.ada, asked(run="r2", resume=[{"interruptId": interrupt["id"], **entry}]))
    assert told in done[1]["content"]


@in_service
async def test_several_calls_are_settled_at_once(served: Served) -> None:
    """One is approved and one denied, in one commit; an approved call cannot be changed."""
    waits = await ran(served.ada, asked(user("refund(order=7) and refund(order=8)")))
    first, second = waits[-1]["outcome"]["interrupts"]
    edited = {"approved": True, "editedArgs": {"order": 9}}
    entry = {"interruptId": first["id"], "status": "resolved"}
    wrong = await served.ada.post("/agui", json=asked(run="r2", resume=[{**entry, "payload": edited}]))
    assert (wrong.status_code, wrong.json()["path"]) == (422, "$.resume[0].payload.editedArgs")
    entries = [
        {**entry, "payload": {"approved": True}},
        {"interruptId": second["id"], "status": "cancelled"},
    ]
    done = await ran(served.ada, asked(run="r2", resume=entries))
    results = {each["toolCallId"]: each["content"] for each in done if each["type"] == "TOOL_CALL_RESULT"}
    assert results[first["toolCallId"]] == "order 7 is refunded"
    assert "cancelled" in results[second["toolCallId"]]


@in_service
async def test_a_tool_of_the_front_end(served: Served) -> None:
    """The run ends with its call, and the next input brings the result as a message. The same input changes nothing."""
    first = user("call weather {}")
    waits = await ran(served.ada, asked(first, tools=[WEATHER]))
    call = waits[1]["toolCallId"]
    assert waits[-1]["outcome"] == {"type": "success", "pendingToolCallIds": [call]}
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": call, "type": "function", "function": function}]
    made = {"id": waits[1]["parentMessageId"], "role": "assistant", "toolCalls": calls}
    result = {"id": "x1", "role": "tool", "content": "it snows", "toolCallId": call}
    more = await served.ada.post("/agui", json=asked(first, made, result, user("well?", "u2"), tools=[WEATHER]))
    assert more.status_code == 422
    done = await ran(served.ada, asked(first, made, result, run="r2", tools=[WEATHER]))
    assert "it snows" in text_in(done)
    again = await ran(served.ada, asked(first, made, result, run="r2", tools=[WEATHER]))
    assert kinds(again) == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "RUN_FINISHED"]
    answer = {"id": done[-3]["messageId"], "role": "assistant", "content": text_in(done)}
    more_said = await ran(served.ada, asked(first, made, result, answer, user("thanks", "u2"), run="r3"))
    assert "thanks" in text_in(more_said)


@in_service
async def test_a_tool_of_the_front_end_fails(served: Served) -> None:
    waits = await ran(served.ada, asked(user("call weather {}"), tools=[WEATHER]))
    result = {"id": "x", "role": "tool", "content": "", "error": "no window", "toolCallId": waits[1]["toolCallId"]}
    done = await ran(served.ada, asked(user("call weather {}"), result, run="r2"))
    assert "no window" in done[1]["content"]


@in_service
async def test_a_conversation_that_began_elsewhere(served: Served) -> None:
    """Earlier messages of the front end become part of the session."""
    history = [
        {"id": "s", "role": "developer", "content": "Be brief."},
        {"id": "a", "role": "assistant", "content": "How can I help?"},
        {"id": "act", "role": "activity", "activityType": "PLAN", "content": {"steps": []}},
    ]
    await ran(served.ada, asked(*history, user("hello")))
    said = (await served.ada.get("/api/sessions/t/messages")).json()["messages"]
    assert [(each["id"], each["role"]) for each in said[:3]] == [("s", "system"), ("a", "assistant"), ("u1", "user")]


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("reset", {}),
        ("trim", {"keep_last": 1}),
        ("rewind", {"to": 1}),
        ("compact", {"compact_strategy": "truncate", "keep_last": 0}),
    ],
)
@in_service
async def test_what_is_no_longer_shown_is_not_said_again(served: Served, verb: str, body: dict[str, Any]) -> None:
    first = await ran(served.ada, asked(user("hello")))
    changed = await served.ada.post(f"/api/sessions/t/{verb}", json=body)
    assert changed.status_code == 200, changed.text
    answer = {"id": first[1]["messageId"], "role": "assistant", "content": text_in(first)}
    await ran(served.ada, asked(user("hello"), answer, user("bye", "u2"), run="r2"))
    history = (await served.ada.get("/api/sessions/t/messages", params={"view": "said"})).json()["messages"]
    ids = [each["id"] for each in history]
    assert (ids.count("u1"), ids.count(answer["id"]), ids.count("u2")) == (1, 1, 1)


@in_service
async def test_a_fork_is_a_thread(served: Served) -> None:
    """The front end continues in it with the messages that it has."""
    first = await ran(served.ada, asked(user("hello")))
    await served.ada.post("/api/sessions/t/fork", json={"id": "t2"})
    answer = {"id": first[1]["messageId"], "role": "assistant", "content": text_in(first)}
    told = await ran(served.ada, asked(user("hello"), answer, user("bye", "u2"), thread="t2"))
    assert "bye" in text_in(told)
    said = (await served.ada.get("/api/sessions/t2/messages")).json()["messages"]
    assert [each["id"] for each in said][:3] == ["u1", answer["id"], "u2"]
    assert (await served.ada.get("/api/sessions/t/messages")).json()["total"] == 2


@in_service
async def test_a_thread_that_is_closed_is_not_waited_for(served: Served) -> None:
    await ran(served.ada, asked(user("hello")))
    await served.ada.post("/api/sessions/t/suspend", json={})
    refused = await served.ada.post("/agui", json=asked(user("bye", "u2")))
    assert (refused.status_code, refused.json()["title"]) == (409, "SessionNotActive")
    assert kinds(await ran(served.ada, asked()))[-1] == "RUN_FINISHED"


@in_service
async def test_a_tool_that_the_agent_has_already(served: Served) -> None:
    """Its run cannot begin: the front end gets the reason, and the thread continues."""
    told = await ran(served.ada, asked(user("hello"), tools=[{**WEATHER, "name": "refund"}]))
    assert told[-1]["type"] == "RUN_ERROR"
    assert "refund" in told[-1]["message"]
    assert "hello" in text_in(await ran(served.ada, asked(user("hello"))))
    again = await ran(served.ada, asked(user("and now?", "u3"), tools=[{**WEATHER, "name": "refund"}]))
    assert again[-1]["type"] == "RUN_ERROR"
    assert "and now?" in text_in(await ran(served.ada, asked(user("and now?", "u3"))))
    assert "bye" in text_in(await ran(served.ada, asked(user("bye", "u2"), run="r2")))


@in_service
async def test_context_images_and_properties_reach_the_run(served: Served) -> None:
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
    parts = [
        {"type": "text", "text": "hello"},
        {"type": "image", "source": {"type": "data", "value": png, "mimeType": "image/png"}},
        {"type": "image", "source": {"type": "url", "value": "https://example.org/a.png"}},
    ]
    context = [{"description": "The page", "value": "orders"}]
    await ran(served.ada, asked(user(parts), context=context, forwarded_props={"tenant": 7}))
    run = (await served.ada.get("/api/sessions/t/runs")).json()["runs"][0]
    whole = (await served.ada.get(f"/api/sessions/t/runs/{run['loop_id']}")).json()
    assert "The page:\\norders" in json.dumps(whole)
    shown = (await ran(served.ada, asked(run="r2")))[1]["messages"][0]["content"]
    assert [each["type"] for each in shown] == ["text", "text", "image"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"state": {"a": 1}}, "$.state"),
        ({"forwardedProps": 7}, "$.forwardedProps"),
        ({"bogus": 1}, "$"),
        ({"messages": [{"id": "a", "role": "assistant", "content": "hi"}]}, "$.messages[0]"),
        ({"messages": [{"id": "", "role": "user", "content": "hi"}]}, "$.messages[0].id"),
        ({"messages": [{"id": "x", "role": "tool", "content": "hi", "toolCallId": "c"}]}, "$.messages[0]"),
        (
            {"messages": [user([{"type": "image", "source": {"type": "file", "value": "f"}}])]},
            "$.messages[0].content[0].source",
        ),
        (
            {"messages": [user([{"type": "image", "source": {"type": "url", "value": "/etc/passwd"}}])]},
            "$.messages[0].content[0].source",
        ),
        ({"tools": [{"name": "a b", "description": ""}]}, "$.tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "$.external_tools"),
        ({"messages": [user("hi", f"u{number}") for number in range(101)]}, "$.messages"),
        ({"threadId": ""}, "$.threadId"),
    ],
)
@in_service
async def test_what_cannot_be_supported_is_refused(served: Served, change: dict[str, Any], path: str | None) -> None:
    """The answer names the path, and no session is created."""
    refused = await served.ada.post("/agui", json={**asked(user("hello")), **change})
    assert refused.status_code == 422, refused.text
    assert refused.headers["Content-Type"] == "application/problem+json"
    if path is not None:
        assert refused.json()["path"] == path
    assert (await served.ada.get("/api/sessions/t")).status_code == 404


@in_service
async def test_owners_have_threads_of_their_own(served: Served) -> None:
    """Asking for another owner's thread by its whole id gives the same answer as for a missing one."""
    await ran(served.ada, asked(user("a secret")))
    whole = (await served.ada.get("/api/sessions/t")).json()["id"]
    theirs = await served.bob.post("/agui", json=asked(thread=whole))
    none = await served.bob.post("/agui", json=asked(thread="x" + whole[1:]))
    assert theirs.text.replace(whole, "") == none.text.replace("x" + whole[1:], "")
    await ran(served.bob, asked(user("hello")))
    assert "secret" not in (await served.bob.get("/api/sessions/t/messages")).text


@in_service
async def test_an_agent_is_named_by_the_path(served: Served) -> None:
    assert kinds(await ran(served.ada, asked(user("hello")), "/agui/assistant"))[-1] == "RUN_FINISHED"
    assert (await served.ada.post("/agui/nobody", json=asked(user("hello")))).status_code == 404


class Firm:
    """A service whose model follows a test's script."""

    def __init__(self, sessions: perdure.Sessions, ada: httpx.AsyncClient, service: Service) -> None:
        self.sessions = sessions
        self.ada = ada
        self.service = service


@asynccontextmanager
async def firm(path: Path, *script: Any, works: bool = True, **options: Any) -> AsyncIterator[Firm]:
    driver = ScriptedDriver(script[0] if callable(script[0]) else script)
    url = f"sqlite:///{path}/firm.db"
    async with perdure.connect(url, driver=driver, model="scripted", **options) as sessions, Worker(sessions) as worker:
        work = asyncio.ensure_future(worker.run()) if works else None
        service = Service(sessions)
        secret, _ = await new_token(service.gate._book, "ada")
        async with client_of(make_app(service), secret) as ada:
            yield Firm(sessions, ada, service)
        await service.feeds.close()
        worker.stop()
        if work is not None:
            await work


async def test_what_a_model_thinks_is_told_apart(tmp_path: Path) -> None:
    thought = perdure.Message.assistant(Thinking("Hm."), "Yes.")
    reply = ModelReply(thought, InferenceResponse("stop", model="scripted", provider="scripted"))
    async with firm(tmp_path, reply) as made:
        told = await ran(made.ada, asked(user("well?")))
        again = await ran(made.ada, asked(run="r2"))
    assert [each["delta"] for each in told if each["type"] == "REASONING_MESSAGE_CONTENT"] == ["Hm."]
    assert text_in(told) == "Yes."
    assert [each["role"] for each in again[1]["messages"]] == ["user", "reasoning", "assistant"]


async def test_what_a_sub_agent_waits_for(tmp_path: Path) -> None:
    """An interrupt shows what the sub-agent's call would do; a call to be made outside has an interrupt of its own."""
    clerk = perdure.AgentDefinition("clerk", system_prompt="clerk")
    wanted = [perdure.ToolCall("pay", {"amount": 3}, "p"), perdure.ToolCall("weather", {}, "w")]

    @perdure.tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    def reply(request: Any) -> Any:
        if request.step:
            return " ".join(each.text for each in request.messages if each.role == "tool")
        return wanted if request.system_prompt == "clerk" else perdure.ToolCall("clerk", {"prompt": "Do it."}, "k")

    tools = [pay, perdure.external_tool("weather")]
    async with firm(tmp_path, reply, tools=tools, subagents=[clerk]) as made:
        waits = await ran(made.ada, asked(user("Go")))
        approval, question = waits[-1]["outcome"]["interrupts"]
        assert (approval["toolCallId"], approval["message"]) == ("k", 'May this be done? pay({"amount":3})')
        assert question["metadata"]["agui"]["name"] == "weather"
        entries = [
            {"interruptId": approval["id"], "status": "resolved", "payload": True},
            {"interruptId": question["id"], "status": "resolved", "payload": "it snows"},
        ]
        done = await ran(made.ada, asked(run="r2", resume=entries))
        assert "paid 3" in text_in(done)
        assert "it snows" in text_in(done)


async def test_a_run_that_fails(tmp_path: Path) -> None:
    """Its error is the last event, and the same request again gives the same error."""
    async with firm(tmp_path, perdure.DriverError("the model is gone")) as made:
        told = await ran(made.ada, asked(user("well?")))
        assert (told[-1]["type"], told[-1]["code"]) == ("RUN_ERROR", "RunFailed")
        assert "the model is gone" in told[-1]["message"]
        assert kinds(await ran(made.ada, asked(user("well?"))))[-1] == "RUN_ERROR"


@pytest.mark.parametrize("again", [(), (user("count"),)])
async def test_a_run_goes_on_without_its_client(tmp_path: Path, again: tuple[dict[str, Any], ...]) -> None:
    """A client that comes back is shown the text so far, and gets the rest, whether it repeats its request or not."""
    async with firm(tmp_path, Chunks(["One. ", Delay(0.8, ""), "Two."])) as made:
        asking = asyncio.ensure_future(made.ada.post("/agui", json=asked(user("count"))))
        await until(lambda: _is_running(made))
        asking.cancel()
        told = await ran(made.ada, asked(*again, run="r2"))
        assert kinds(told)[:2] == ["RUN_STARTED", "MESSAGES_SNAPSHOT"]
        # On a slow machine the run may have ended already: then its answer is in the snapshot.
        assert [*(each["content"] for each in told[1]["messages"]), text_in(told)].count("One. Two.") == 1
        assert len((await made.ada.get("/api/sessions/t/runs")).json()["runs"]) == 1


async def test_a_run_that_is_cancelled(tmp_path: Path) -> None:
    async with firm(tmp_path, Chunks(["One. ", Delay(20, ""), "Two."])) as made:
        asking = asyncio.ensure_future(ran(made.ada, asked(user("count"))))
        await until(lambda: _is_running(made))
        await made.ada.post("/api/sessions/t/cancel", json={})
        assert (await asking)[-1]["outcome"] == {"type": "cancelled"}


async def _is_running(made: Firm) -> bool:
    if not await made.sessions.of("ada").exists("t"):
        return False
    return (await made.sessions.of("ada").view("t")).activity == "running"


async def test_a_service_that_stops_says_so(tmp_path: Path) -> None:
    """The event is the protocol's own; the message stays, and waits for a worker."""
    async with firm(tmp_path, "Yes.", works=False) as made:
        asking = asyncio.ensure_future(ran(made.ada, asked(user("well?"))))
        await until(lambda: made.service.open_streams == 1)
        made.service.closing.set()
        told = await asking
        assert (told[-1]["type"], told[-1]["code"]) == ("RUN_ERROR", "shutdown")
        assert (await made.sessions.of("ada").view("t")).queued[0].id == "u1"


async def test_a_message_that_waits_is_shown(tmp_path: Path) -> None:
    """A page that is loaded without a worker shows it, and gets its answer when a worker comes."""
    async with firm(tmp_path, "Yes.", works=False) as made:
        asking = asyncio.ensure_future(made.ada.post("/agui", json=asked(user("well?"))))
        await until(lambda: made.service.open_streams == 1)
        asking.cancel()
        await until(lambda: made.service.open_streams == 0)
        looking = asyncio.ensure_future(ran(made.ada, asked(run="r2")))
        await until(lambda: made.service.open_streams == 1)
        async with Worker(made.sessions) as worker:
            await worker.only((await made.sessions.of("ada").info("t")).id)
        told = await looking
        assert [each["content"] for each in told[1]["messages"]] == ["well?"]
        assert text_in(told) == "Yes."


def test_an_answer_that_begins_again_is_taken_back() -> None:
    """A snapshot without it takes it back; the protocol has no other way."""
    teller = Teller(run="r")
    first = [*teller.hear(Piece("r", "m", 0, 0, "Once")), *teller.hear(Piece("r", "m", 0, 4, " upon"))]
    assert text_in(first) == "Once upon"
    second = list(teller.hear(Piece("r", "m", 1, 0, "Twice")))
    assert kinds(second) == ["TEXT_MESSAGE_END", "MESSAGES_SNAPSHOT", "TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT"]
    assert list(teller.hear(Piece("other", "m2", 0, 0, "no"))) == []
    third = list(teller.hear(Piece("r", "m3", 0, 0, "Thrice")))
    assert kinds(third)[:3] == ["TEXT_MESSAGE_END", "MESSAGES_SNAPSHOT", "TEXT_MESSAGE_START"]
    assert kinds(list(teller.end())) == ["TEXT_MESSAGE_END"]


async def test_two_at_once_in_one_thread(tmp_path: Path) -> None:
    """The second waits for its turn, and each stream shows its own run."""

    def reply(request: Any) -> Any:
        return Chunks(["To ", Delay(0.2, ""), request.messages[-1].text])

    async with firm(tmp_path, reply) as made:
        first = asyncio.ensure_future(ran(made.ada, asked(user("one"))))
        await until(lambda: _is_running(made))
        second = await ran(made.ada, asked(user("one"), user("two", "u2"), run="r2"))
        assert (text_in(await first), text_in(second)) == ("To one", "To two")


async def test_a_worker_elsewhere_answers(tmp_path: Path) -> None:
    """The worker may be in another process: the service reads the record."""
    async with firm(tmp_path, "no", works=False) as made:
        asking = asyncio.ensure_future(ran(made.ada, asked(user("well?"))))
        await until(lambda: made.service.open_streams == 1)
        driver = ScriptedDriver([Chunks(["Yes. ", Delay(0.2, ""), "Indeed."])])
        async with perdure.connect(f"sqlite:///{tmp_path}/firm.db", driver=driver, model="scripted") as elsewhere:
            async with Worker(elsewhere) as worker:
                await worker.only((await elsewhere.of("ada").info("t")).id)
            assert text_in(await asking) == "Yes. Indeed."


async def test_a_thread_that_is_erased_ends_its_streams(tmp_path: Path) -> None:
    async with firm(tmp_path, "no", works=False) as made:
        asking = asyncio.ensure_future(ran(made.ada, asked(user("well?"))))
        await until(lambda: made.service.open_streams == 1)
        await made.ada.delete("/api/sessions/t", params={"erase": True})
        assert (await asyncio.wait_for(asking, 10))[-1]["type"] == "RUN_ERROR"


async def test_a_stream_has_to_find_room(tmp_path: Path) -> None:
    """A stream without room leaves no message behind."""
    from perdure.server.settings import Limits, Settings

    settings = Settings(limits=Limits(streams_of_owner=0))
    async with serving(f"sqlite:///{tmp_path}/full.db", settings) as served:
        refused = await served.ada.post("/agui", json=asked(user("hello")))
        assert refused.status_code == 429
        assert (await served.ada.get("/api/sessions")).json()["sessions"] == []
