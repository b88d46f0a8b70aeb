"""Answers as values: a type for one answer, a type for all answers of an agent, and a JSON schema."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, assert_type

import perdure


@dataclass
class City:
    name: str
    people: int


GUIDE = perdure.AgentDefinition("guide", output=City)


async def main() -> None:
    # The offline model repeats the JSON that a message contains. Any other model is told the schema.
    async with perdure.connect("memory://", model="offline") as sessions:
        chat = await sessions.open()
        reply = await chat.send('Repeat: {"name": "Bern", "people": 134591}', output=City)
        assert_type(reply.value, City)
        print(f"{reply.value.name} has {reply.value.people:,} people")

        numbers = await chat.send("Repeat: [3, 1, 2]", output=list[int])
        assert_type(numbers.value, list[int])
        print(f"the largest is {max(numbers.value)}")

        plain = await chat.send('Repeat: {"ok": true}', output={"type": "object", "required": ["ok"]})
        assert_type(plain.value, Any)
        print(f"ok is {plain.value['ok']}")

        guide = await sessions.open(agent=GUIDE)
        print((await guide.send('Repeat: {"name": "Oslo", "people": 709037}')).value)


if __name__ == "__main__":
    asyncio.run(main())
