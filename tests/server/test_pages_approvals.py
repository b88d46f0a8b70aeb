"""The page of all calls that wait: every decision is about a call as it was shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.server.html_page import CANARY, Form, Page
from tests.server.serving import Served, looking

import perdure
from perdure import AgentDefinition
from perdure.model.message import Message, ToolCall
from perdure.protocols import ModelRequest
from perdure.testing import ScriptedDriver

CLERK = AgentDefinition("clerk")
HELPER = AgentDefinition("helper", description="Helps.")
OUTSIDE = perdure.external_tool("ask_user", "Ask the user.", {"type": "object"})


@perdure.tool(needs_approval=True)
def refund(order: int, note: str = "") -> str:
    """Give the money back."""
    return f"order {order} is refunded"


def script(request: ModelRequest) -> Message:
    asked = [each for each in request.messages if each.role == "user"][-1].text
    calls = {
        "refund": [ToolCall("refund", {"order": 7})],
        "both": [ToolCall("refund", {"order": 1}), ToolCall("refund", {"order": 2})],
        "outside": [ToolCall("ask_user", {"question": "where?"})],
        "delegate": [ToolCall("helper", {"prompt": "refund"})],
        "hostile": [ToolCall("refund", {"order": 7, "note": f"note {CANARY}"})],
    }
    if request.step == 0 and asked in calls:
        return Message.assistant(tool_calls=calls[asked])
    results = [each.text for each in request.messages if each.role == "tool"]
    return Message.assistant(f"Then: {results[-1] if results else asked}")


def serving(tmp_path: Path) -> Any:
    options = {"driver": ScriptedDriver(script), "tools": [refund], "subagents": [HELPER]}
    return looking(f"sqlite:///{tmp_path}/s.db", **options)


async def asked(served: Served, owner: str, name: str, text: str, **options: Any) -> perdure.Chat:
    chat = await served.sessions.of(owner).open(name, CLERK)
    await chat.send(text, **options)
    return chat


def forms(page: Any) -> list[Form]:
    return [form for form in page.forms if form.action.startswith("/approvals/")]


async def decide(served: Served, form: Form, **given: str) -> tuple[int, str]:
    """Send a form as a browser does; return the status and the address it leads to."""
    sent = await served.ada.post(form.action, data={**form.fields, **given})
    return sent.status_code, sent.headers.get("location", "") or sent.text


async def test_a_call_is_approved_and_left_to_a_worker(tmp_path: Path) -> None:
    """It disappears from the page at once, a worker continues the run, and the call is made once."""
    async with serving(tmp_path) as served:
        chat = await asked(served, "ada", "a", "refund")
        page = await Page.get(served.ada, "/approvals")
        (form,) = forms(page)
        assert '"order": 7' in page.text
        assert await decide(served, form, decide="approve") == (303, "/approvals?notice=approved")
        after = await Page.get(served.ada, "/approvals?notice=approved")
        assert forms(after) == []
        assert "A worker continues the run." in after.text
        assert (await decide(served, form, decide="approve"))[0] == 409
        await served.sessions.recover()
        assert (await chat.snapshot())["messages"][-1]["parts"][0]["text"] == "Then: order 7 is refunded"


@pytest.mark.parametrize(("reason", "told"), [("Not on a Sunday.", "Not on a Sunday."), ("  ", "denied")])
async def test_a_denial_may_have_a_reason(tmp_path: Path, reason: str, told: str) -> None:
    """The model gets the reason; without one, it learns that the call was denied, as on the session's own page."""
    async with serving(tmp_path) as served:
        await asked(served, "ada", "a", "refund")
        (form,) = forms(await Page.get(served.ada, "/approvals"))
        assert (await decide(served, form, decide="deny", reason=reason))[0] == 303
        await served.sessions.recover()
        said = (await served.sessions.of("ada").session("a")).state.messages
        assert told in said[-1].text


async def test_calls_are_decided_on_one_by_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await asked(served, "ada", "a", "both")
        first, second = forms(await Page.get(served.ada, "/approvals"))
        assert (await decide(served, first, decide="approve"))[0] == 303
        await served.sessions.recover()
        (left,) = forms(await Page.get(served.ada, "/approvals"))
        assert left.fields["call"] == second.fields["call"]


async def test_what_was_not_shown_is_not_decided_on(tmp_path: Path) -> None:
    """A form of an outdated page decides nothing. The person learns this and sees the calls that wait now."""
    async with serving(tmp_path) as served:
        chat = await asked(served, "ada", "a", "refund")
        (form,) = forms(await Page.get(served.ada, "/approvals"))
        await chat.deny("no")
        await chat.send("both")
        status, told = await decide(served, form, decide="approve")
        assert status == 409
        assert "Nothing was decided" in told
        assert told.count('value="approve"') == 2
        said = (await served.sessions.of("ada").session("a")).state.messages
        assert not any("is refunded" in message.text for message in said)


async def test_a_call_made_outside_is_answered(tmp_path: Path) -> None:
    """The answer is JSON or plain text; the page says which it was taken for."""
    async with serving(tmp_path) as served:
        for name in ("good", "plain", "bad"):
            await asked(served, "ada", name, "outside", external_tools=[OUTSIDE])
        found = {form.action.rpartition(".")[2]: form for form in forms(await Page.get(served.ada, "/approvals"))}
        assert all(("decide", "approve") not in form.buttons for form in found.values())
        assert (await decide(served, found["good"], decide="answer", answer=" "))[0] == 422
        for name, answer, kind in (("good", '{"street": "High"}', "value"), ("plain", "{not json", "text")):
            sent = await served.ada.post(
                found[name].action, data={**found[name].fields, "decide": "answer", "answer": answer}
            )
            assert (sent.status_code, sent.headers["Location"]) == (303, f"/approvals?notice=answered-{kind}")
        assert "as a text" in (await Page.get(served.ada, "/approvals?notice=answered-text")).text
        assert (await decide(served, found["bad"], decide="fail", reason="nobody is there"))[0] == 303
        await served.sessions.recover()
        ada = served.sessions.of("ada")
        assert '"street":"High"' in (await ada.session("good")).state.messages[-1].text
        assert "{not json" in (await ada.session("plain")).state.messages[-1].text
        assert "nobody is there" in (await ada.session("bad")).state.messages[-1].text


async def test_a_sub_agents_call_stands_below_its_callers(tmp_path: Path) -> None:
    """The decision on the caller's entry lets the sub-agent's call be made."""
    async with serving(tmp_path) as served:
        await asked(served, "ada", "a", "delegate")
        page = await Page.get(served.ada, "/approvals")
        (form,) = forms(page)
        assert page.has("wants") == 1
        assert '"order": 7' in page.text
        assert (await decide(served, form, decide="approve"))[0] == 303
        await served.sessions.recover()
        assert "order 7 is refunded" in (await served.sessions.of("ada").session("a")).state.messages[-1].text


async def test_only_calls_within_reach_are_shown_and_decided_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        hers = await asked(served, "ada", "a", "refund")
        await asked(served, "bob", "b", "refund")
        (form,) = forms(await Page.get(served.ada, "/approvals"))
        everybody = await Page.get(served.operator, "/approvals")
        assert len(forms(everybody)) == 2
        assert "bob" in everybody.text
        data = {**form.fields, "decide": "approve"}
        there = await served.bob.post(f"/approvals/{hers.id}", data=data)
        missing = await served.bob.post(f"/approvals/{hers.id}x", data=data)
        assert there.status_code == missing.status_code == 404
        assert there.text == missing.text.replace(f"{hers.id}x", hers.id)
        assert len(forms(await Page.get(served.ada, "/approvals"))) == 1


async def test_a_reader_sees_and_decides_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chat = await asked(served, "ada", "a", "refund")
        page = await Page.get(served.reader, "/approvals")
        assert '"order": 7' in page.text
        assert forms(page) == []
        sent = await served.reader.post(f"/approvals/{chat.id}", data={"decide": "approve", "call": "x"})
        assert sent.status_code == 403


async def test_paused_and_parked_sessions_wait_for_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chat = await asked(served, "ada", "a", "hello")
        await chat.suspend()
        page = await Page.get(served.ada, "/approvals")
    assert "Nothing waits for a decision." in page.text


async def test_many_closed_sessions_have_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await asked(served, "ada", "first", "refund")
        for number in range(50):
            await (await served.sessions.of("ada").open(f"s{number}")).suspend()
        page = await Page.get(served.ada, "/approvals")
        assert forms(page) == []
        (older,) = [link for link in page.links() if "after=" in link]
        assert len(forms(await Page.get(served.ada, older))) == 1


async def test_nothing_that_was_stored_runs_on_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chat = await served.sessions.of(f"owner {CANARY}").open("a", AgentDefinition(f"agent {CANARY}"))
        await chat.rename(f"name {CANARY}")
        await chat.send("hostile")
        page = await Page.get(served.operator, f"/approvals?notice={CANARY}")
    for what in ("owner", "agent", "name"):
        assert f"{what} {CANARY}" in page.text
    assert f"note {CANARY}".replace('"', '\\"') in page.text
