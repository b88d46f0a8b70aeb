"""The forms on a session's page, as a browser without scripts sends them."""

from __future__ import annotations

import httpx
import pytest
from tests.server.html_page import Page
from tests.server.serving import Served, in_service

from perdure.loop.external import external_tool


async def _sent(served: Served, verb: str, path: str = "/sessions/talk", **changed: str) -> Page:
    """Send the form of a verb from a page, and return the page that follows."""
    form = (await Page.get(served.ada, path)).form(verb)
    response = await form.send(served.ada, **changed)
    assert response.status_code == 303, response.text
    return await Page.get(served.ada, response.headers["Location"])


async def _talk(served: Served, *texts: str) -> None:
    chat = await served.sessions.of("ada").open("talk")
    for text in texts:
        await chat.send(text)


@in_service
async def test_a_message_is_queued_and_answered(served: Served) -> None:
    """The same form sent twice is one message."""
    await _talk(served, "one")
    form = (await Page.get(served.ada, "/sessions/talk")).form("send")
    for _ in range(2):
        assert (await form.send(served.ada, text="What is 2 + 3?")).status_code == 303
    page = await Page.once(served.ada, "/sessions/talk", lambda page: "The answer is 5." in page.text)
    assert [each.text for each in page.all("p", "text")].count("What is 2 + 3?") == 1
    blank = await form.send(served.ada, text="  ", key="other")
    assert blank.status_code == 422
    assert "the message is blank" in blank.text


@in_service
async def test_views_are_changed_and_taken_back(served: Served) -> None:
    await _talk(served, "one", "two", "three")
    trimmed = await _sent(served, "trim", keep_last="2")
    assert len(trimmed.all("article")) == 2
    assert len((await _sent(served, "undo")).all("article")) == 6
    compacted = await _sent(served, "compact", keep_last="2", compact_strategy="truncate")
    assert len(compacted.all("section", "block")) == 1
    assert not (await _sent(served, "uncompact")).all("section", "block")
    assert len((await _sent(served, "rewind", "/sessions/talk?version=2")).all("article")) == 2


@in_service
async def test_headers_are_changed(served: Served) -> None:
    await _talk(served, "one")
    assert "New name" in (await _sent(served, "rename", name="New name")).one("h1").text
    tagged = await _sent(served, "tag", add="north pole, vip")
    assert [each.text for each in tagged.all("span", "tag")] == ["north pole×", "vip×"]
    removing = next(each for each in tagged.forms if each.fields.get("remove") == "vip")
    assert (await removing.send(served.ada)).status_code == 303
    assert (await served.sessions.of("ada").info("talk")).tags == ("north pole",)
    assert "suspended" in (await _sent(served, "suspend")).one("h1").text
    assert "active" in (await _sent(served, "resume")).one("h1").text
    deleted = await _sent(served, "delete")
    assert "deleted" in deleted.one("h1").text
    assert not [each for each in deleted.forms if each.action.endswith("/send")]
    assert "active" in (await _sent(served, "restore")).one("h1").text


@in_service
async def test_a_fork_opens_where_it_was_asked_for(served: Served) -> None:
    await _talk(served, "one", "two", "three")
    fork = await _sent(served, "fork")
    assert len(fork.all("article")) == 6
    assert "forked from" in fork.text
    older = await _sent(served, "fork", "/sessions/talk?version=2")
    assert len(older.all("article")) == 2
    page = await Page.get(served.ada, "/sessions/talk")
    at_message = [each for each in page.forms if each.action.endswith("/fork") and "at" in each.fields][2]
    there = await at_message.send(served.ada)
    assert len((await Page.get(served.ada, there.headers["Location"])).all("article")) == 3


@in_service
async def test_a_page_that_is_out_of_date_changes_nothing(served: Served) -> None:
    """The form is bound to the version that its page showed; the answer says what happened, and links back."""
    await _talk(served, "one", "two")
    page = await Page.get(served.ada, "/sessions/talk")
    await served.sessions.of("ada").rename("talk", "Meanwhile")
    for verb in ("undo", "trim", "compact", "suspend", "delete"):
        refused = await page.form(verb).send(served.ada)
        assert refused.status_code == 412, verb
        told = Page(refused.text)
        assert "Nothing was changed" in told.text
        assert told.link("Back to the session").endswith("talk")
    info = await served.sessions.of("ada").info("talk")
    assert (info.version, info.status.value) == (4, "active")


@pytest.mark.parametrize(("verb", "then"), [("approve", "order 7 is refunded"), ("deny", "not today")])
@in_service
async def test_calls_are_decided_on_as_they_were_shown(served: Served, verb: str, then: str) -> None:
    """A worker continues the run; the same decision again is refused, and changes nothing."""
    chat = await served.sessions.of("ada").open("talk")
    await chat.send('call refund {"order": 7}')
    form = (await Page.get(served.ada, "/sessions/talk")).form(verb)
    wrong = await form.send(served.ada, call="0" * 64)
    assert wrong.status_code in (409, 422)
    assert (await form.send(served.ada, reason="not today")).status_code == 303

    def is_decided(page: Page) -> bool:
        return then in page.by_id("main").text and not page.all("section", "asks")

    await Page.once(served.ada, "/sessions/talk", is_decided)
    assert (await form.send(served.ada, reason="not today")).status_code in (409, 422)


@in_service
async def test_a_call_that_is_made_outside_is_answered(served: Served) -> None:
    chat = await served.sessions.of("ada").open("talk")
    await chat.send('call weather {"city": "Oslo"}', external_tools=[external_tool("weather", "", None)])
    page = await Page.get(served.ada, "/sessions/talk")
    assert "is made outside" in page.one("section", "asks").text
    assert "waits for you" in (await Page.get(served.ada, "/sessions/talk?view=said")).one("span", "out").text
    sent = await page.form("answer").send(served.ada, result="sunny")
    assert (sent.status_code, sent.headers["Location"].endswith("talk?notice=answered-text")) == (303, True)
    assert "as a text" in (await Page.get(served.ada, sent.headers["Location"])).text
    await Page.once(served.ada, "/sessions/talk", lambda page: "→ sunny" in page.text)


@in_service
async def test_forms_of_other_sites_and_of_readers_are_refused(served: Served) -> None:
    await _talk(served, "one")
    form = (await Page.get(served.ada, "/sessions/talk")).form("undo")
    foreign = {"Origin": "http://evil.example"}
    assert (await served.ada.post(form.action, data=form.fields, headers=foreign)).status_code == 403
    assert (await served.ada.post(form.action, data=form.fields, headers={"Origin": "null"})).status_code == 403
    assert (await served.reader.post(form.action, data=form.fields)).status_code == 403
    assert (await served.bob.post(form.action, data=form.fields)).status_code == 404
    assert (await served.ada.post(form.action, json=form.fields)).status_code == 415
    assert (await served.sessions.of("ada").info("talk")).version == 2


@in_service
async def test_another_owners_forms_tell_nothing(served: Served) -> None:
    await _talk(served, "one")
    page = await Page.get(served.ada, "/sessions/talk")
    for form in page.forms:
        answers: list[httpx.Response] = []
        for session in ("talk", "none"):
            action = form.action.replace("/talk/", f"/{session}/")
            fields = {**form.fields, "text": "x", "keep_last": "1", "name": "x", "add": "x", "call": "x"}
            answers.append(await served.bob.post(action, data=fields))
        there, missing = answers
        assert there.status_code == missing.status_code == 404, form.action
        assert there.content == missing.content.replace(b"none", b"talk")
