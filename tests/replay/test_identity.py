"""A stored session, replayed with its own answers, is the same step by step: for every kind of session and store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.replay.scenes import OPTIONS, SCENES, on_stage
from tests.stories import KINDS, opened

from perdure import ModelRequest, Replay
from perdure.replay import RecordedDriver


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENES)
async def test_a_session_replayed_with_its_own_answers_is_the_same(name: str, kind: str, tmp_path: Path) -> None:
    """Answers, calls, results, finish reasons, ends and tokens are those on record, and the store is not written to."""
    async with opened(kind, tmp_path) as store, on_stage(store, **OPTIONS.get(name, {})) as stage:
        session_id = await SCENES[name](stage)
        chat = await stage.sessions.open(session_id)
        before = await _all_of(store, session_id)
        stage.calls.clear()
        for history in ("recorded", "replayed"):
            driver = Watched()
            result = await Replay(chat, driver=driver, history=history, children=True).run()
            assert result.is_same, str(result)
            assert result.steps
            for step in result.steps:
                if not step.recorded.is_incomplete:
                    assert step.recorded.usage == step.replayed.usage
            shown = [prompt_of(request) for request in stage.driver.requests]
            assert [each for each in map(prompt_of, driver.requests) if each not in shown] == []
        assert stage.calls == []
        assert await _all_of(store, session_id) == before


class Watched(RecordedDriver):
    """Gives the answers on record, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest, on_delta: Any) -> Any:
        self.requests.append(request)
        return await super().respond(request, on_delta)


def prompt_of(request: ModelRequest) -> Any:
    """Return a request's messages, tools and options, without ids."""
    told = [
        (each.role, each.text, [(call.name, dict(call.arguments)) for call in each.tool_calls], len(each.parts))
        for each in request.messages
    ]
    tools = sorted((each.name, each.description) for each in request.tools)
    options = request.model.name.partition(":")[0], request.model.temperature, request.response_format
    return told, request.system_prompt, tools, options, request.step


async def _all_of(store: Any, session_id: str) -> Any:
    sessions = [info async for info in _listed(store)]
    return sessions, await store.dump(session_id, alone=True)


async def _listed(store: Any) -> Any:
    for info in await store.list(limit=100):
        yield info
