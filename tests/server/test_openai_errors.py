"""Refusals under /v1, and the form of their errors."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from tests.server.openai_serving import Reached, over_http

from perdure.server.openai.ids import ResponseId, conversation_id
from perdure.server.table import ROUTES

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": 2.5}),
    ("top_p", {"top_p": -0.5}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_tool_calls", {"max_tool_calls": 2}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("reasoning.effort", {"reasoning": {"effort": "endless"}}),
    ("reasoning.summary", {"reasoning": {"summary": "auto"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("parallel_tool_calls", {"parallel_tool_calls": False}),
    ("truncation", {"truncation": "auto"}),
    ("include", {"include": ["reasoning.encrypted_content"]}),
    ("service_tier", {"service_tier": "flex"}),
    ("stream_options", {"stream_options": {"include_obfuscation": True}}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 7}}}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": "no good", "parameters": None, "strict": None}]}),
    ("tools", {"tools": [{"type": "function", "name": "twice", "parameters": None, "strict": None}] * 2}),
    ("model", {"model": "nobody"}),
    ("model", {"model": "clerk@openai:gpt-5"}),
    ("store", {"store": False, "background": True}),
    ("metadata", {"metadata": {"api_key": "x"}}),
    ("metadata", {"metadata": {str(number): "x" for number in range(17)}}),
    ("input", {"input": []}),
    ("input[0]", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input[0].type", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
    ("input", {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}),
    ("prompt", {"extra_body": {"prompt": {"id": "p"}}}),
    ("context_management", {"extra_body": {"context_management": []}}),
    ("input", {"input": [{"type": "compaction", "id": "c", "encrypted_content": "x"}], "conversation": "conv_a"}),
    ("previous_response_id", {"previous_response_id": "resp_a", "conversation": "conv_a"}),
]


@over_http
async def test_what_cannot_be_followed_is_refused(served: Reached) -> None:
    """A 422 names the parameter, and nothing is begun."""
    for param, given in REFUSED:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await served.ada.responses.create(**{"model": "clerk", "input": "hello", **given})
        assert caught.value.param == param, given
        assert caught.value.type == "invalid_request_error"
    assert len(await served.sessions.headers()) == 0


@over_http
async def test_what_is_harmless_is_kept(served: Reached) -> None:
    given: dict[str, Any] = {
        "user": "u-7",
        "safety_identifier": "s-7",
        "prompt_cache_key": "c-7",
        "service_tier": "auto",
        "truncation": "disabled",
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "include": [],
        "top_logprobs": 0,
    }
    made = await served.ada.responses.create(model="clerk", input="hello", **given)
    found = await served.ada.responses.retrieve(made.id)
    assert (found.user, found.safety_identifier, found.prompt_cache_key) == ("u-7", "s-7", "c-7")


@over_http
async def test_tools_that_the_agent_has_already_are_refused(served: Reached) -> None:
    """The conflict is found when the message is sent, and the response says so."""
    tool: Any = {"type": "function", "name": "stock", "parameters": None, "strict": None}
    made = await served.ada.responses.create(model="clerk", input="hello", tools=[tool])
    assert made.status == "failed"
    assert made.error is not None
    assert "stock" in made.error.message


@over_http
async def test_others_cannot_tell_that_something_is_there(served: Reached) -> None:
    """Another owner's id gets the same bytes as an unknown one."""
    made = await served.ada.responses.create(model="clerk", input="hello", tools=[])
    conversation = await served.ada.conversations.create()
    response_id = ResponseId.of(made.id)
    assert response_id is not None
    nowhere = str(ResponseId(response_id.session, "0" * 32, response_id.after))
    bob = httpx.AsyncClient(base_url=served.url, headers={"Authorization": f"Bearer {served.bob.api_key}"})
    ada = httpx.AsyncClient(base_url=served.url, headers={"Authorization": f"Bearer {served.ada.api_key}"})
    async with ada, bob:
        for route in ROUTES:
            if route.face != "openai" or "{" not in route.path or "{model}" in route.path:
                continue
            bodies: dict[str, Any] = {"items": {"items": []}, "cancel": {}}
            last = route.path.rpartition("/")[2]
            body = {"json": bodies.get(last, {"metadata": {}})} if route.body else {}
            for given, other in ((made.id, nowhere), (conversation.id, conversation_id("nowhere"))):
                found = await bob.request(route.method, _filled(route.path, given), **body)
                missing = await ada.request(route.method, _filled(route.path, other), **body)
                assert found.status_code == missing.status_code == 404, route
                assert found.content.replace(given.encode(), b"") == missing.content.replace(other.encode(), b"")
        for given in (made.id, "resp_x", "", "resp_" + "A" * 3000):
            asked = {"model": "clerk", "input": "x", "previous_response_id": given}
            assert (await bob.post("/v1/responses", json=asked)).status_code == 404
    assert (await served.ada.responses.retrieve(made.id)).status == "completed"


def _filled(path: str, given: str) -> str:
    return path.replace("{response}", given).replace("{conversation}", given).replace("{item}", "msg_1")


@over_http
async def test_a_token_that_may_only_read_reads(served: Reached) -> None:
    made = await served.ada.responses.create(model="clerk", input="hello")
    assert (await served.reader.responses.retrieve(made.id)).output_text == "You said: hello"
    assert [model.id async for model in served.reader.models.list()] == ["clerk", "cook"]
    for attempt in (
        served.reader.responses.create(model="clerk", input="hello"),
        served.reader.responses.cancel(made.id),
        served.reader.responses.delete(made.id),
        served.reader.conversations.create(),
    ):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await attempt
        assert caught.value.code == "read_only_token"


@over_http
async def test_errors_have_openais_form(served: Reached) -> None:
    """Errors of the guard, and of missing paths, have it too."""
    nobody = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        await nobody.models.list()
    assert (caught.value.type, caught.value.code) == ("authentication_error", "token_needed")
    await nobody.close()
    with pytest.raises(openai.NotFoundError) as missing:
        await served.ada.files.list()
    assert missing.value.code == "not_found"
    with pytest.raises(openai.NotFoundError):
        await served.ada.models.retrieve("nobody")
    assert (await served.ada.models.retrieve("cook")).id == "cook"
    made = await served.ada.responses.create(model="clerk", input="hang", background=True)
    with pytest.raises(openai.ConflictError):
        await served.ada.responses.create(model="clerk", input="x", previous_response_id=made.id)
    await served.ada.responses.cancel(made.id)
