"""Responses outlive the process that began them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.server.openai_serving import heard, reached, text_in


async def test_a_response_outlives_its_server(tmp_path: Path) -> None:
    """It is begun in one process, waits there, and is answered and followed in another."""
    store = f"sqlite:///{tmp_path}/served.db"
    async with reached(store, works=False) as served:
        waits = await served.ada.responses.create(model="clerk", input="slow", background=True, metadata={"a": "b"})
        assert waits.status == "queued"
        stream = await served.ada.responses.retrieve(waits.id, stream=True)
        seen = [await anext(aiter(stream)), await anext(aiter(stream))]
        assert [event.type for event in seen] == ["response.created", "response.queued"]
        again = waits.id
    async with reached(store) as served:
        after = seen[-1].sequence_number
        rest = await heard(await served.ada.responses.retrieve(again, stream=True, starting_after=after))
        assert rest[0].type == "response.in_progress"
        assert rest[-1].response.output_text == text_in(rest) == "".join(f"piece {number}, " for number in range(6))
        found = await served.ada.responses.retrieve(again)
        assert (found.created_at, found.metadata) == (waits.created_at, {"a": "b"})


async def test_an_answer_is_followed_over_the_death_of_its_process(tmp_path: Path) -> None:
    """Events are not repeated, unless the model begins its answer again: then the stream says so."""
    store = f"sqlite:///{tmp_path}/served.db"
    seen: list[Any] = []
    with suppress(BrokenPipeError):
        async with reached(store) as served:
            made = await served.ada.responses.create(model="clerk", input="slow", background=True)
            async with await served.ada.responses.retrieve(made.id, stream=True) as stream:
                async for event in stream:
                    seen.append(event)
                    if len(text_in(seen)) > 20:
                        raise BrokenPipeError
    async with reached(store) as served:
        after = seen[-1].sequence_number
        rest = await heard(await served.ada.responses.retrieve(made.id, stream=True, starting_after=after))
        last = rest[-1].response
        assert last.output_text == "".join(f"piece {number}, " for number in range(6))
        numbers = [event.sequence_number for event in seen + rest]
        assert numbers == sorted(set(numbers))
        assert len(last.output) == 1
        assert [event.output_index for event in seen + rest if event.type == "response.output_item.added"] == [0, 1]
        ends = [event.item.status for event in rest if event.type == "response.output_item.done"]
        assert ends == ["incomplete", "completed"]


async def test_a_decision_outlives_its_server(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/served.db"
    async with reached(store) as served:
        first = await served.ada.responses.create(model="clerk", input="call refund")
    async with reached(store, works=False) as served:
        decided: Any = [{"type": "mcp_approval_response", "approval_request_id": first.output[0].id, "approve": True}]
        made = await served.ada.responses.create(
            model="clerk", input=decided, previous_response_id=first.id, background=True
        )
        assert made.status == "in_progress"
    async with reached(store) as served:
        events = await heard(await served.ada.responses.retrieve(made.id, stream=True))
        assert "refunded" in events[-1].response.output_text
        assert events[-1].response.previous_response_id == first.id


async def test_a_stream_says_why_it_ends(tmp_path: Path) -> None:
    """Its last event has the number to continue from."""
    async with reached(f"sqlite:///{tmp_path}/served.db", works=False) as served:
        made = await served.ada.responses.create(model="clerk", input="slow", background=True)
        stream = await served.ada.responses.retrieve(made.id, stream=True)
        seen = [await anext(aiter(stream)), await anext(aiter(stream))]
        served.service.closing.set()
        (last,) = [event async for event in stream]
        assert (last.type, last.code) == ("error", "shutdown")
        assert last.sequence_number == seen[-1].sequence_number


async def test_a_client_that_goes_away_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It leaves neither an error in the log nor a stream that is counted as open."""
    async with reached(f"sqlite:///{tmp_path}/served.db", works=False) as served:
        made = await served.ada.responses.create(model="clerk", input="slow", background=True)
        tasks = len(asyncio.all_tasks())
        for _ in range(3):
            async with await served.ada.responses.retrieve(made.id, stream=True) as stream:
                await anext(aiter(stream))
        async with asyncio.timeout(10):
            while served.service.open_streams or len(asyncio.all_tasks()) > tasks + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert not caplog.records
