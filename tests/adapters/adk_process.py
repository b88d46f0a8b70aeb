"""An ADK agent with a scripted model on a perdure store, and a process that appends to its session beside others.

Run as `python adk_process.py URL SESSION COUNT` to append events.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from google.adk.agents import LlmAgent
from google.adk.errors import StaleSessionError
from google.adk.events import Event, EventActions
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.genai import types

from perdure.adapters.google_adk import PerdureSessionService

APP, USER = "weather", "ada"
CALLS = 3


def look_up(city: str) -> dict[str, str]:
    """Return the weather of a city."""
    return {"result": f"sunny in {city}"}


class Scripted(BaseLlm):
    """A model that calls a tool three times, and then answers with the number of questions so far."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        asked = [content for content in llm_request.contents if _is_question(content)]
        since = llm_request.contents[llm_request.contents.index(asked[-1]) :]
        answered = sum(bool(part.function_response) for content in since for part in content.parts or [])
        await asyncio.sleep(0.002)
        if answered < CALLS:
            call = types.FunctionCall(name="look_up", args={"city": f"city {answered}"})
            part = types.Part(function_call=call)
        else:
            part = types.Part(text=f"answer {len(asked)}")
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def _is_question(content: types.Content) -> bool:
    return any((part.text or "").startswith("question") for part in content.parts or [])


def runner_of(service: PerdureSessionService) -> Runner:
    agent = LlmAgent(name=APP, model=Scripted(model="scripted"), tools=[look_up], output_key="answer")
    return Runner(app_name=APP, agent=agent, session_service=service)


async def asked(service: PerdureSessionService, session_id: str, text: str) -> str:
    """Ask a question. Return the answer."""
    message = types.Content(role="user", parts=[types.Part(text=text)])
    said = ""
    async for event in runner_of(service).run_async(user_id=USER, session_id=session_id, new_message=message):
        if event.is_final_response() and event.content and event.content.parts:
            said = event.content.parts[0].text or ""
    return said


async def append(service: PerdureSessionService, session_id: str, count: int) -> None:
    """Append events, each as often as it takes, and add to a count in each state."""
    for _ in range(count):
        while True:
            session = await service.get_session(app_name=APP, user_id=USER, session_id=session_id)
            assert session is not None
            delta = {key: session.state.get(key, 0) + 1 for key in ("n", "user:n", "app:n")}
            try:
                await service.append_event(session, Event(author="agent", actions=EventActions(state_delta=delta)))
            except StaleSessionError:
                continue
            break


async def main(url: str, session_id: str, count: str) -> None:
    service = PerdureSessionService(store=url)
    print("ready", flush=True)
    await append(service, session_id, int(count))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
