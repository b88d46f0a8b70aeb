"""Every page of the inspector, checked by axe-core in a real Chromium."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.server.browser import Seen, browsing, chromium, site_of

import perdure
from perdure.model.message import Message, ToolCall
from perdure.protocols import ModelRequest
from perdure.testing import ScriptedDriver

pytestmark = pytest.mark.sample(2)  # make torture runs all

SIZES: list[tuple[int, Any]] = [(390, "dark"), (1280, "light")]
if os.environ.get("PERDURE_TORTURE"):
    SIZES = [(width, scheme) for width in (390, 800, 1440) for scheme in ("light", "dark")]
PAGES = (
    "/",
    "/?q=hello",
    "/?status=active",
    "/sessions/order-7",
    "/sessions/order-7?view=said",
    "/sessions/order-7?version=2",
    "/sessions/nobody",
    "/diff?left=order-7&right=order-7-again",
    "/diff?left=order-7",
    "/approvals",
    "/workers",
    "/cost",
    "/login",
)


@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


def script(request: ModelRequest) -> Message:
    asked = [each for each in request.messages if each.role == "user"][-1].text
    if asked == "refund" and request.step == 0:
        return Message.assistant(tool_calls=[ToolCall("refund", {"order": 7})])
    return Message.assistant(f"You said: {asked}")


async def filled(sessions: perdure.Sessions) -> str:
    """Make sessions that show everything that pages can show. Return the path of a run."""
    chat = await sessions.open("order-7")
    for said in ("hello", "and then?", "what else?"):
        await chat.send(said)
    await sessions.compact("order-7", compact_strategy="truncate", keep_last=2)
    await sessions.fork("order-7", "order-7-again")
    await chat.send("refund")
    await sessions.enqueue("order-7", "later")
    await sessions.open("waits")
    await sessions.enqueue("waits", "work on it")
    record = await sessions.record("order-7")
    return f"/sessions/order-7/runs/{record.loops[0].loop_id}"


@pytest.mark.parametrize(("width", "scheme"), SIZES)
async def test_no_page_has_a_serious_finding(tmp_path: Path, width: int, scheme: Any) -> None:
    chromium()
    url = f"sqlite:///{tmp_path}/a.db"
    async with perdure.connect(url, driver=ScriptedDriver(script), tools=[refund]) as sessions:
        run = await filled(sessions)
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret, width=width) as seen:
            await seen.page.emulate_media(color_scheme=scheme)
            found = {path: await serious(seen, path) for path in (*PAGES, run, f"{run}?step=1")}
            # A browser logs a page that is missing, and one of these pages is.
            seen.errors[:] = [each for each in seen.errors if "404" not in each]
    assert {path: each for path, each in found.items() if each} == {}


async def serious(seen: Seen, path: str) -> list[str]:
    """Return axe's findings on a page that keep somebody from using it."""
    from axe_playwright_python.base import AXE_FILE_PATH

    await seen.go(path)
    await seen.page.evaluate(AXE_FILE_PATH.read_text())
    results = await seen.page.evaluate("axe.run()")
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:120]}"
        for each in results["violations"]
        if each["impact"] in ("serious", "critical")
    ]
