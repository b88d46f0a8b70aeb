"""Messages that are left for later: which keys they may have."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure import InvalidData, connect
from perdure.model.ids import now


@pytest.mark.parametrize("key", ["until", "schedule:digest"])
async def test_a_key_that_a_pause_or_a_schedule_would_take_for_its_own_is_refused(key: str) -> None:
    """The message would be gone with the end of a pause or of a schedule. At once it may be sent under any key."""
    later = now() + timedelta(hours=1)
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        with pytest.raises(InvalidData, match="use another key"):
            await sessions.enqueue("a", "Hello", key=key, at=later)
        assert await sessions.timers("a") == []
        await sessions.enqueue("a", "Hello", key=f"my-{key}", at=later)
        await sessions.suspend("a", until=later)
        await sessions.resume("a")
        assert not await sessions.unschedule("digest", "a")
        assert [timer.name for timer in await sessions.timers("a")] == [f"my-{key}"]
        assert await sessions.enqueue("a", "Hello", key=key) is not None
