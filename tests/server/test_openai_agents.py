"""`openai-agents` with this service as its model provider."""

from __future__ import annotations

import json
from typing import Any

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from tests.server.openai_serving import Reached, over_http


@function_tool
def weather(city: str) -> str:
    """Look at the weather."""
    return f"rain in {city}"


QUIET = RunConfig(tracing_disabled=True)


@over_http
async def test_an_agent_of_openais_runs_here(served: Reached) -> None:
    """It calls its function tool, whether it sends the whole conversation or names the previous response."""
    model = OpenAIResponsesModel("clerk", served.ada)
    agent: Agent[Any] = Agent("caller", instructions="Speak French.", model=model, tools=[weather])
    told = await Runner.run(agent, "call weather", run_config=QUIET)
    assert told.final_output == "It is: rain in Oslo"
    named = await Runner.run(agent, "call weather", run_config=QUIET, auto_previous_response_id=True)
    assert named.final_output == "It is: rain in Oslo"
    assert served.driver.requests[-1].system_prompt == "Be brief.\n\nSpeak French."
    assert named.last_response_id is not None
    assert json.loads((await served.ada.responses.retrieve(named.last_response_id)).model_dump_json())["output"]


@over_http
async def test_an_agent_of_openais_streams(served: Reached) -> None:
    model = OpenAIResponsesModel("clerk", served.ada)
    agent: Agent[Any] = Agent("caller", model=model, tools=[weather])
    run = Runner.run_streamed(agent, "call weather", run_config=QUIET, auto_previous_response_id=True)
    kinds = [event.type async for event in run.stream_events()]
    assert "raw_response_event" in kinds
    assert run.final_output == "It is: rain in Oslo"
