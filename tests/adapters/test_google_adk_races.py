"""Many callers that append to one ADK session at once: tasks, event loops, threads and processes, some killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.adk")

from google.adk.errors import StaleSessionError
from google.adk.events import Event, EventActions
from google.adk.sessions import Session
from tests.adapters import adk_process
from tests.adapters.adk_process import APP, CALLS, USER, asked

from perdure import MemoryStore
from perdure.adapters.google_adk import PerdureSessionService

IS_TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
ROUNDS = 100 if IS_TORTURE else 10
KILLS = 50 if IS_TORTURE else 3
WRITERS = 8


def event_of(number: int, **delta: int) -> Event:
    return Event(author="agent", invocation_id=f"i-{number}", actions=EventActions(state_delta=delta))


async def got(service: PerdureSessionService, session_id: str = "s") -> Session:
    session = await service.get_session(app_name=APP, user_id=USER, session_id=session_id)
    assert session is not None
    return session


@pytest.mark.parametrize("url", ["memory", "sqlite", "two services"])
async def test_of_stale_writers_exactly_one_wins(tmp_path: Path, url: str) -> None:
    """One wins in each round, though all events have the same time; each winner is added to the state once."""
    store = MemoryStore() if url == "memory" else f"sqlite:///{tmp_path}/a.db"
    services = [PerdureSessionService(store=store) for _ in range(2 if url == "two services" else 1)]
    await services[0].create_session(
        app_name=APP, user_id=USER, session_id="s", state={"n": 0, "user:n": 0, "app:n": 0}
    )
    for round_number in range(ROUNDS):
        sessions = [await got(services[place % len(services)]) for place in range(WRITERS)]
        added = {key: sessions[0].state[key] + 1 for key in ("n", "user:n", "app:n")}
        appends = [
            services[place % len(services)].append_event(
                session, Event(author=str(place), timestamp=1.0, actions=EventActions(state_delta=dict(added)))
            )
            for place, session in enumerate(sessions)
        ]
        came = await asyncio.gather(*appends, return_exceptions=True)
        assert sum(isinstance(each, Event) for each in came) == 1
        stale = [each for each in came if isinstance(each, StaleSessionError)]
        assert len(stale) == WRITERS - 1
        assert all("modified in storage" in str(each) for each in stale)
        loaded = await got(services[0])
        assert len(loaded.events) == round_number + 1
        assert loaded.state == dict.fromkeys(("n", "user:n", "app:n"), round_number + 1)


async def test_parallel_appends_through_one_session_all_land(tmp_path: Path) -> None:
    """The branches of a parallel agent append so: the session has the events in the order they are stored."""
    service = PerdureSessionService(store=f"sqlite:///{tmp_path}/a.db")
    session = await service.create_session(app_name=APP, user_id=USER, session_id="s")
    for round_number in range(ROUNDS):
        events = [event_of(place, **{f"k{round_number}-{place}": place, "app:last": place}) for place in range(WRITERS)]
        await asyncio.gather(*(service.append_event(session, event) for event in events))
    loaded = await got(service)
    assert len(loaded.events) == ROUNDS * WRITERS
    assert loaded == session


async def test_states_that_sessions_share_lose_nothing(tmp_path: Path) -> None:
    """Several sessions put values into their app's and their user's states at once, and all values are kept."""
    service = PerdureSessionService(store=f"sqlite:///{tmp_path}/a.db")
    names = [f"s-{place}" for place in range(WRITERS)]
    sessions = [await service.create_session(app_name=APP, user_id=USER, session_id=name) for name in names]
    for round_number in range(ROUNDS):
        deltas = [{f"app:{place}-{round_number}": 1, f"user:{place}-{round_number}": 1} for place in range(WRITERS)]
        appends = [
            service.append_event(session, event_of(0, **delta)) for session, delta in zip(sessions, deltas, strict=True)
        ]
        await asyncio.gather(*appends)
    assert len((await got(service, "s-0")).state) == 2 * ROUNDS * WRITERS


def test_threads_with_event_loops_of_their_own_share_a_service(tmp_path: Path) -> None:
    """A server may run requests in several event loops."""
    service = PerdureSessionService(store=f"sqlite:///{tmp_path}/a.db")
    asyncio.run(service.create_session(app_name=APP, user_id=USER, session_id="s"))
    threads = [threading.Thread(target=lambda: asyncio.run(adk_process.append(service, "s", ROUNDS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = asyncio.run(got(service)).state
    assert state == dict.fromkeys(("n", "user:n", "app:n"), 4 * ROUNDS)


async def test_a_cancelled_append_is_in_both_or_in_neither(tmp_path: Path) -> None:
    """The store and the session have the same events, and the next event is appended after them."""
    service = PerdureSessionService(store=f"sqlite:///{tmp_path}/a.db")
    session = await service.create_session(app_name=APP, user_id=USER, session_id="s")
    for number in range(ROUNDS):
        task = asyncio.create_task(service.append_event(session, event_of(number)))
        await asyncio.sleep(random.Random(number).random() * 0.003)
        task.cancel()
        await asyncio.wait([task])
        await service.append_event(session, event_of(number))
    assert await got(service) == session


def test_processes_share_a_store(tmp_path: Path) -> None:
    """An event that one process has stored is not lost to another."""
    url = f"sqlite:///{tmp_path}/a.db"
    service = PerdureSessionService(store=url)
    asyncio.run(service.create_session(app_name=APP, user_id=USER, session_id="s"))
    command = [sys.executable, adk_process.__file__, url, "s", str(ROUNDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        asyncio.run(adk_process.append(service, "s", ROUNDS))
    assert other.returncode == 0
    loaded = asyncio.run(got(service))
    assert len(loaded.events) == 2 * ROUNDS
    assert loaded.state == dict.fromkeys(("n", "user:n", "app:n"), 2 * ROUNDS)


def forked(work: Callable[[], Coroutine[Any, Any, object]]) -> int:
    """Fork a process that does some work, with all modules loaded. Return its id."""
    child = os.fork()
    if not child:
        try:
            asyncio.run(work())
        except BaseException:  # whatever it is, the child must not continue with the parent's tests
            os._exit(1)
        os._exit(0)
    return child


def test_a_forked_child_goes_on(tmp_path: Path) -> None:
    """It opens the store for itself."""
    service = PerdureSessionService(store=f"sqlite:///{tmp_path}/a.db")
    session = asyncio.run(service.create_session(app_name=APP, user_id=USER, session_id="s"))
    child = forked(lambda: service.append_event(session, event_of(1)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(asyncio.run(got(service)).events) == 1


def test_a_killed_run_leaves_a_history_to_go_on_with(tmp_path: Path) -> None:
    """Wherever SIGKILL strikes, the session loads, its events and states agree, and the next question is answered."""
    url, chance = f"sqlite:///{tmp_path}/a.db", random.Random(15)
    service = PerdureSessionService(store=url)
    asyncio.run(service.create_session(app_name=APP, user_id=USER, session_id="s"))
    ends = set()
    for number in range(KILLS):
        child = forked(lambda number=number: asked(service, "s", f"question {number}"))  # type: ignore[misc]
        time.sleep(chance.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        ends.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        loaded = asyncio.run(got(service))
        questions = sum(bool(event.content) and event.author == "user" for event in loaded.events)
        answer = asyncio.run(asked(service, "s", f"question {number} again"))
        assert answer == f"answer {questions + 1}"
        whole = asyncio.run(got(service))
        assert whole.events[: len(loaded.events)] == loaded.events
        assert len(whole.events) == len(loaded.events) + 2 + 2 * CALLS
        assert whole.state == {"answer": answer}
    assert -signal.SIGKILL in ends
    assert 1 not in ends
