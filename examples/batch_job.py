"""A batch that can be killed at any time and started again: every question is answered once, in a form of its own."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

import perdure

REVIEWS = {
    "review-1": '{"stars": 5, "about": "the service"}',
    "review-2": '{"stars": 2, "about": "the delivery"}',
    "review-3": '{"stars": 4, "about": "the price"}',
}
READER = perdure.AgentDefinition("reader", system_prompt="Read the review, and answer in the form you are given.")


@dataclass
class Review:
    stars: int
    about: str


async def read(sessions: perdure.Sessions, name: str, text: str, room: asyncio.Semaphore) -> Review:
    async with room:
        chat = await sessions.open(name, agent=READER)
        # The same key returns what the first attempt came to; one that was killed is recovered and finished.
        reply = await chat.send(text, key="read", output=Review)
        return reply.value


async def main(store: str) -> None:
    async with perdure.connect(store, model="offline") as sessions:
        await sessions.recover()
        room = asyncio.Semaphore(8)
        found = await asyncio.gather(*(read(sessions, name, text, room) for name, text in REVIEWS.items()))
        for name, review in zip(REVIEWS, found, strict=True):
            print(f"{name}: {review.stars} stars for {review.about}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "sqlite:///reviews.db"))
