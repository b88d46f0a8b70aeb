"""A service with a worker in it, to be killed. It prints its address and its token."""

from __future__ import annotations

import asyncio
import json
import sys

from tests.server.openai_serving import answer
from tests.server.serving import on_a_port

import perdure
from perdure.server.service import Service
from perdure.server.tokens import new_token
from perdure.testing import ScriptedDriver
from perdure.workers.worker import Worker

CLERK = perdure.AgentDefinition("clerk")


async def main(store: str) -> None:
    async with perdure.connect(store, driver=ScriptedDriver(answer)) as sessions, Worker(sessions, lease=1.0) as worker:
        service = Service(sessions, agents=[CLERK], runs_here=True)
        secret, _ = await new_token(service.gate._book, "ada")
        async with on_a_port(service) as url:
            print(json.dumps({"url": f"{url}/v1", "secret": secret}), flush=True)
            await worker.run()


asyncio.run(main(sys.argv[1]))
