"""The list of sessions, as a page."""

from __future__ import annotations

from tests.server.html_page import Page
from tests.server.serving import Served, in_service

from perdure.actions.metadata import TagSession


def _titles(page: Page) -> list[str]:
    return [each.text for each in page.all("a") if "data-row" in each.attributes]


@in_service
async def test_sessions_are_listed_the_last_changed_first(served: Served) -> None:
    hers = served.sessions.of("ada")
    for name in ("one", "two"):
        await (await hers.open(name)).send(f"hello from {name}")
    await hers.rename("one", "First")
    page = await Page.get(served.ada, "/")
    assert _titles(page) == ["First", "hello from two"]
    cells = [each.text.strip() for each in page.all("td")]
    assert cells[1:4] == ["active", "assistant", "2"]
    assert page.one("title").text == "Sessions · perdure"


@in_service
async def test_filters_are_plain_forms_and_links(served: Served) -> None:
    hers = served.sessions.of("ada")
    for name in ("one", "two", "three"):
        await hers.inject((await hers.open(name)).id, f"about {name}")
    await hers.execute("two", TagSession("north pole"))
    await hers.suspend("three")
    page = await Page.get(served.ada, "/")
    assert _titles(await Page.get(served.ada, page.link("north pole"))) == ["about two"]
    assert _titles(await Page.get(served.ada, "/?status=suspended")) == ["about three"]
    assert _titles(await Page.get(served.ada, "/?agent=nobody")) == []
    assert "No session fits these filters" in (await Page.get(served.ada, "/?agent=nobody")).text
    assert not [each for each in page.all("input") if each.attributes.get("name") == "owner"]
    wrong = await Page.get(served.ada, "/?status=asleep", 422)
    assert "asleep" in wrong.text or "Invalid enum value" in wrong.text


@in_service
async def test_only_operators_see_owners(served: Served) -> None:
    for owner in ("ada", "bob"):
        mine = served.sessions.of(owner)
        await mine.inject((await mine.open("talk")).id, f"I am {owner}")
    assert _titles(await Page.get(served.bob, "/")) == ["I am bob"]
    assert _titles(await Page.get(served.bob, "/?owner=ada")) == []
    everybody = await Page.get(served.operator, "/")
    assert _titles(everybody) == ["I am bob", "I am ada"]
    assert _titles(await Page.get(served.operator, "/?owner=ada")) == ["I am ada"]


@in_service
async def test_a_word_is_found_though_it_was_compacted_away(served: Served) -> None:
    """The hit marks the words within the text, and leads to the message in the whole history."""
    hers = served.sessions.of("ada")
    chat = await hers.open("talk")
    for text in ("the <b>marmalade</b> & more marmalade", "two", "three"):
        await chat.send(text)
    await hers.compact("talk", compact_strategy="truncate", keep_last=1)
    page = await Page.get(served.ada, "/?q=marmalade")
    assert [each.text for each in page.all("mark")] == ["marmalade"] * len(page.all("mark"))
    assert not page.all("b", None)[0].text.startswith("marmalade")
    path, _, message = page.links("hit")[-1].partition("#")
    said = await Page.get(served.ada, path)
    assert "the <b>marmalade</b> & more marmalade" in said.by_id(message).text
    assert "Nothing that was said" in (await Page.get(served.bob, "/?q=marmalade")).text
    assert "Nothing that was said" in (await Page.get(served.ada, "/?q=%22unclosed")).text


@in_service
async def test_the_search_box_takes_ids_too(served: Served) -> None:
    hers = served.sessions.of("ada")
    chat = await hers.open("order-4711")
    await hers.inject(chat.id, "Good morning.")
    for words in ("order-4711", str(chat.id), "4711"):
        assert _titles(await Page.get(served.ada, f"/?q={words}")) == ["Good morning."], words
        assert _titles(await Page.get(served.bob, f"/?q={words}")) == [], words


@in_service
async def test_strips_tell_what_needs_an_eye(served: Served) -> None:
    hers = served.sessions.of("ada")
    waits = await hers.open("waits")
    await waits.send('call refund {"order": 7}')
    await hers.inject((await hers.open("idle")).id, "hello")
    await hers.suspend("idle")
    for client, count in ((served.ada, "1"), (served.bob, "0"), (served.operator, "1")):
        page = await Page.get(client, "/")
        strips = {each.text.split()[1]: each.text.split()[0] for each in page.all("a", "strip")}
        assert strips == {"running": "0", "waiting": count, "killed": "0", "parked": "0"}
    page = await Page.get(served.ada, "/?show=waiting")
    assert _titles(page) == ['call refund {"order": 7}']
    assert page.one("span", "waiting").text == "waits for you"
    await waits.deny("no")
    assert _titles(await Page.get(served.ada, "/?show=waiting")) == []


@in_service
async def test_pages_go_on_where_the_last_one_ended(served: Served) -> None:
    hers = served.sessions.of("ada")
    for number in range(70):
        await hers.open(f"s{number}")
    first = await Page.get(served.ada, "/")
    second = await Page.get(served.ada, first.link("Older"))
    assert (len(_titles(first)), len(_titles(second))) == (50, 20)
    assert not set(_titles(first)) & set(_titles(second))
    assert second.link("Newest") == "/"


@in_service
async def test_a_list_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    """The page sends its mark each time it asks, and gets an answer without content."""
    hers = served.sessions.of("ada")
    await hers.inject((await hers.open("one")).id, "hello")
    page = await Page.get(served.ada, "/")
    again = page.by_id("list").attributes["hx-get"]
    assert (await served.ada.get(again, headers={"HX-Request": "true"})).status_code == 204
    await hers.rename("one", "Another name")
    assert _titles(await Page.get(served.ada, again, **{"HX-Request": "true"})) == ["Another name"]


@in_service
async def test_static_files_are_sent_once(served: Served) -> None:
    """A browser that has a file asks whether it has changed; no path leads out of the folder."""
    first = await served.nobody.get("/static/inspector.css")
    assert (first.status_code, first.headers["Content-Type"]) == (200, "text/css; charset=utf-8")
    again = await served.nobody.get("/static/inspector.css", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    for name in ("README.md", "..%2frender.py", "%2e%2e/render.py", "none.js"):
        assert (await served.nobody.get(f"/static/{name}")).status_code in (303, 404)
