"""Answers that a client waits for, fetches later, or leaves to others: nothing depends on the client that asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.serving import Served, client_of, in_service, refund, serving

import perdure
from perdure.server.app import make_app
from perdure.server.service import Service
from perdure.server.tokens import new_token
from perdure.workers.worker import Worker

ASK = {"text": "refund(order=7)"}


class Gate:
    """A tool that waits until the test lets it go."""

    def __init__(self) -> None:
        self.called = 0
        self.begun = asyncio.Event()
        self.open = asyncio.Event()

    def tool(self) -> Any:
        @perdure.tool(idempotent=True)
        async def hold(number: int) -> str:
            """Wait."""
            self.called += 1
            self.begun.set()
            await self.open.wait()
            return f"held {number}"

        return hold


@asynccontextmanager
async def with_gate(tmp_path: Path) -> AsyncIterator[tuple[Served, Gate]]:
    gate = Gate()
    async with serving(f"sqlite:///{tmp_path}/served.db", tools=[refund, gate.tool()]) as served:
        await served.ada.put("/api/sessions/a", json={})
        yield served, gate


async def pending(served: Served) -> dict[str, Any]:
    """Make a call that waits for a person, and return it."""
    await served.ada.put("/api/sessions/a", json={})
    (call,) = (await served.ada.post("/api/sessions/a/messages", json=ASK)).json()["pending_calls"]
    found: dict[str, Any] = call
    return found


async def user_messages(served: Served) -> list[str]:
    said = (await served.ada.get("/api/sessions/a/messages", params={"view": "said"})).json()["messages"]
    return [each["role"] for each in said]


@in_service
async def test_a_decision_is_accepted_without_waiting(served: Served) -> None:
    """`Location` and the run lead to the answer."""
    call = await pending(served)
    left = await served.ada.post("/api/sessions/a/approve", json={"calls": [call["digest"]], "wait": 0})
    assert (left.status_code, set(left.json())) == (202, {"session", "run"})
    found = await served.ada.get(left.headers["Location"], params={"wait": 20})
    assert found.status_code == 200, found.text
    assert "order 7 is refunded" in found.json()["text"]
    again = await served.ada.get(left.headers["Location"])
    assert again.json() == found.json()


@in_service
async def test_a_decision_is_made_once(served: Served) -> None:
    """Of two decisions, one gets the error that the other was first."""
    await pending(served)
    first, second = await asyncio.gather(
        served.ada.post("/api/sessions/a/approve", json={}),
        served.ada.post("/api/sessions/a/deny", json={"reason": "no"}),
    )
    assert sorted([first.status_code, second.status_code])[0] == 200
    assert sorted([first.status_code, second.status_code])[1] in (409, 422), (first.text, second.text)
    assert (await user_messages(served)).count("tool") == 1


@in_service
async def test_a_denial_is_told_to_the_model(served: Served) -> None:
    await pending(served)
    done = await served.ada.post("/api/sessions/a/deny", json={"reason": "Not on a Sunday."})
    assert done.status_code == 200
    said = (await served.ada.get("/api/sessions/a/messages")).text
    assert "Not on a Sunday." in said
    assert "is refunded" not in said


@in_service
async def test_a_decision_can_be_bound_to_a_version(served: Served) -> None:
    call = await pending(served)
    version = (await served.ada.get("/api/sessions/a")).headers["ETag"]
    await served.ada.post("/api/sessions/a/rename", json={"name": "Seven"})
    body = {"calls": [call["digest"]]}
    late = await served.ada.post("/api/sessions/a/approve", json=body, headers={"If-Match": version})
    assert late.status_code == 412, late.text
    assert len((await served.ada.get("/api/sessions/a")).json()["pending_calls"]) == 1
    version = (await served.ada.get("/api/sessions/a")).headers["ETag"]
    done = await served.ada.post("/api/sessions/a/approve", json=body, headers={"If-Match": version})
    assert done.status_code == 200


@in_service
async def test_what_is_wrong_decides_nothing(served: Served) -> None:
    await pending(served)
    for path, body in (
        ("approve", {"wait": 301}),
        ("approve", {"calls": ["0" * 64]}),
        ("deny", {"reason": " "}),
        ("answer", {"answers": {"call_9": 1}}),
    ):
        wrong = await served.ada.post(f"/api/sessions/a/{path}", json=body)
        assert wrong.status_code in (409, 422), (path, wrong.text)
    assert len((await served.ada.get("/api/sessions/a")).json()["pending_calls"]) == 1
    other = await served.bob.post("/api/sessions/a/approve", json={})
    assert other.status_code == 404


async def test_a_service_that_runs_nothing_leaves_decisions_to_workers(tmp_path: Path) -> None:
    """It has neither tools nor a model, and a worker elsewhere continues the run."""
    url = f"sqlite:///{tmp_path}/served.db"
    async with perdure.connect(url, model="offline", tools=[refund]) as sessions:
        chat = (await sessions.of("ada").open("a")).id
        assert (await sessions.of("ada").send(chat, "refund(order=7)")).pending_calls
    async with perdure.connect(url) as sessions:
        service = Service(sessions)
        secret, _ = await new_token(service.gate._book, "ada")
        async with client_of(make_app(service), secret) as ada:
            left = await ada.post("/api/sessions/a/approve", json={"wait": 0.2})
            assert left.status_code == 202
            assert (await ada.get(left.headers["Location"])).status_code == 202
            again = await ada.post("/api/sessions/a/approve", json={"wait": 0})
            assert again.status_code == 409
            async with perdure.connect(url, model="offline", tools=[refund]) as others, Worker(others) as worker:
                work = asyncio.ensure_future(worker.run())
                done = await ada.get(left.headers["Location"], params={"wait": 30})
                worker.stop()
                await work
            assert "order 7 is refunded" in done.json()["text"]
        await service.feeds.close()


async def test_a_client_that_leaves_cancels_nothing(tmp_path: Path) -> None:
    """Its message is answered once, and the answer can be fetched."""
    async with with_gate(tmp_path) as (served, gate):
        for number, body in enumerate(({}, {"when_busy": "refuse"})):
            gate.begun.clear()
            gate.open.clear()
            message = {"text": f"hold(number={number})", **body}
            asking = asyncio.ensure_future(
                served.ada.post("/api/sessions/a/messages", json=message, headers={"Idempotency-Key": f"k/{number}"})
            )
            await asyncio.wait_for(gate.begun.wait(), 10)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            gate.open.set()
            found = await served.ada.get(f"/api/sessions/a/replies/k%2F{number}", params={"wait": 20})
            assert f"held {number}" in found.json()["text"], found.text
        assert gate.called == 2


@pytest.mark.parametrize("when_busy", ["queue", "refuse", "steer"])
async def test_waiting_ends_after_a_while(tmp_path: Path, when_busy: str) -> None:
    """The run continues, and the answer can be fetched."""
    async with with_gate(tmp_path) as (served, gate):
        message = {"text": "hold(number=1)", "when_busy": when_busy, "wait": 0.3}
        taken = await served.ada.post("/api/sessions/a/messages", json=message)
        assert taken.status_code == 202, taken.text
        await asyncio.wait_for(gate.begun.wait(), 10)
        assert (await served.ada.get(taken.headers["Location"])).status_code == 202
        gate.open.set()
        found = await served.ada.get(taken.headers["Location"], params={"wait": 20})
        assert "held 1" in found.json()["text"]


async def test_what_is_said_while_a_run_is_under_way(tmp_path: Path) -> None:
    """It is refused, or joins that run and gets its answer."""
    async with with_gate(tmp_path) as (served, gate):
        await served.ada.post("/api/sessions/a/messages", json={"text": "hold(number=1)", "wait": 0})
        await asyncio.wait_for(gate.begun.wait(), 10)
        busy = await served.ada.post("/api/sessions/a/messages", json={"text": "hello", "when_busy": "refuse"})
        assert (busy.status_code, "Retry-After" in busy.headers) == (409, True)
        steering = asyncio.ensure_future(
            served.ada.post("/api/sessions/a/messages", json={"text": "by the way", "when_busy": "steer"})
        )
        await asyncio.sleep(0.2)
        gate.open.set()
        steered = await steering
        assert steered.status_code == 202, steered.text
        joined = await served.ada.get(steered.headers["Location"], params={"wait": 20})
        assert joined.status_code == 200
        roles = await user_messages(served)
        assert roles.count("user") == 2


async def test_a_service_that_stops_lets_nobody_wait(tmp_path: Path) -> None:
    """The message is accepted, and its run continues elsewhere."""
    async with with_gate(tmp_path) as (served, gate):
        asking = asyncio.ensure_future(
            served.ada.post("/api/sessions/a/messages", json={"text": "hold(number=1)", "wait": 60})
        )
        await asyncio.wait_for(gate.begun.wait(), 10)
        served.service.closing.set()
        taken = await asyncio.wait_for(asking, 5)
        assert taken.status_code == 202
        refused = await served.ada.post("/api/sessions/a/messages", json={"text": "x", "when_busy": "refuse"})
        assert (refused.status_code, refused.json()["title"]) == (503, "Stopping")
        gate.open.set()


async def test_one_run_is_cancelled_and_no_other(tmp_path: Path) -> None:
    async with with_gate(tmp_path) as (served, gate):
        first = await served.ada.post("/api/sessions/a/messages", json={"text": "hello"})
        assert first.status_code == 200
        (old,) = (await served.ada.get("/api/sessions/a/runs")).json()["runs"]
        taken = await served.ada.post("/api/sessions/a/messages", json={"text": "hold(number=1)", "wait": 0})
        await asyncio.wait_for(gate.begun.wait(), 10)
        late = await served.ada.post(f"/api/sessions/a/runs/{old['loop_id']}/cancel", json={})
        assert late.json() == {"cancelled": False}
        runs = (await served.ada.get("/api/sessions/a/runs")).json()["runs"]
        meant = await served.ada.post(f"/api/sessions/a/runs/{runs[-1]['loop_id']}/cancel", json={})
        assert meant.json() == {"cancelled": True}
        ended = await served.ada.get(taken.headers["Location"], params={"wait": 20})
        assert ended.json()["stop_reason"] is not None
        assert (await served.ada.post("/api/sessions/a/cancel", json={})).json() == {"cancelled": False}


@in_service
async def test_a_run_that_is_not_there_has_no_reply(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    none = await served.ada.get("/api/sessions/a/runs/nothing/reply")
    assert (none.status_code, none.json()["title"]) == (404, "RunNotFound")
    failed: httpx.Response = await served.ada.get("/api/sessions/b/runs/nothing/reply")
    assert failed.json()["title"] == "SessionNotFound"
