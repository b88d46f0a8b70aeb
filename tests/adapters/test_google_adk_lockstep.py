"""Random use of a session service beside ADK's own in-memory one: the same sessions, states and lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("google.adk")

from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events import Event, EventActions
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from perdure import MemoryStore
from perdure.adapters.google_adk import PerdureSessionService

APPS, USERS, IDS = ("news", "weather"), ("ada", "bob"), ("a", " b", "c d")
KEYS = ("n", "app:n", "app:m", "user:n", "user:m", "temp:n", "key")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, width=32) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
states = st.dictionaries(st.sampled_from(KEYS), values, max_size=3)
sessions = st.tuples(st.sampled_from(APPS), st.sampled_from(USERS), st.sampled_from(IDS))
parts = st.one_of(
    st.builds(lambda text: types.Part(text=text), st.text(min_size=1, max_size=5)),
    st.builds(lambda data: types.Part.from_bytes(data=data, mime_type="a/b"), st.binary(max_size=4)),
    st.builds(
        lambda args: types.Part(function_call=types.FunctionCall(id="c", name="f", args=args)),
        st.dictionaries(st.text(max_size=2), values, max_size=2),
    ),
)
contents = st.none() | st.builds(
    lambda role, made: types.Content(role=role, parts=made),
    st.sampled_from(["user", "model"]),
    st.lists(parts, max_size=2),
)
steps = st.one_of(
    st.tuples(st.just("create"), sessions, states),
    st.tuples(st.just("append"), sessions, states, contents, st.booleans()),
    st.tuples(st.just("again"), sessions),
    st.tuples(st.just("delete"), sessions),
    st.tuples(st.just("recent"), sessions, st.integers(0, 4), st.none() | st.integers(0, 30)),
)


class Beside:
    """Both services, and the session objects that a caller has from each."""

    def __init__(self) -> None:
        self.ours = PerdureSessionService(store=MemoryStore())
        self.services: tuple[BaseSessionService, ...] = (InMemorySessionService(), self.ours)
        self.last: Event | None = None
        self.time = 0.0

    async def create(self, names: tuple[str, str, str], state: dict[str, Any]) -> None:
        app, user, session_id = names
        came: list[Any] = []
        for service in self.services:
            given_state = copy.deepcopy(state)
            try:
                made = await service.create_session(
                    app_name=app, user_id=user, session_id=session_id, state=given_state
                )
                came.append((made.id, made.state, made.events))
            except AlreadyExistsError as error:
                came.append(str(error))
        assert came[0] == came[1]

    async def append(
        self, names: tuple[str, str, str], delta: dict[str, Any], content: types.Content | None, partial: bool
    ) -> None:
        self.time += 1.0
        self.last = Event(
            author="agent",
            invocation_id="i",
            content=content,
            partial=partial or None,
            timestamp=self.time,
            actions=EventActions(state_delta=delta),
        )
        await self.again(names)

    async def again(self, names: tuple[str, str, str]) -> None:
        """Append the last event, which may be stored already."""
        loaded = [await self.loaded(service, names) for service in self.services]
        if self.last is None or None in loaded:
            return
        for service, session in zip(self.services, loaded, strict=True):
            assert session is not None
            event = self.last.model_copy(deep=True)
            assert await service.append_event(session, event) is event
        assert shown(loaded[0]) == shown(loaded[1])

    async def delete(self, names: tuple[str, str, str]) -> None:
        app, user, session_id = names
        for service in self.services:
            await service.delete_session(app_name=app, user_id=user, session_id=session_id)

    async def recent(self, names: tuple[str, str, str], count: int, since: int | None) -> None:
        config = GetSessionConfig(num_recent_events=count, after_timestamp=since)
        loaded = [await self.loaded(service, names, config) for service in self.services]
        assert shown(loaded[0]) == shown(loaded[1])

    async def loaded(
        self, service: BaseSessionService, names: tuple[str, str, str], config: GetSessionConfig | None = None
    ) -> Session | None:
        app, user, session_id = names
        return await service.get_session(app_name=app, user_id=user, session_id=session_id, config=config)

    async def check(self) -> None:
        for app in APPS:
            for user in (None, *USERS):
                lists = [(await each.list_sessions(app_name=app, user_id=user)).sessions for each in self.services]
                assert [shown(each) for each in in_order(lists[0])] == [shown(each) for each in in_order(lists[1])]
            for user in USERS:
                mine, theirs = [await each.get_user_state(app_name=app, user_id=user) for each in self.services]
                assert mine == theirs
                for session_id in IDS:
                    loaded = [await self.loaded(service, (app, user, session_id)) for service in self.services]
                    assert shown(loaded[0]) == shown(loaded[1])


def shown(session: Session | None) -> Any:
    """Return the fields that must be equal. Without events, the time is that of creation, which differs."""
    if session is None:
        return None
    time = session.last_update_time if session.last_update_time < 1_000_000 else None
    return session.app_name, session.user_id, session.id, session.state, time, [dict(event) for event in session.events]


def in_order(listed: list[Session]) -> list[Session]:
    """Sort sessions; those without events were created at times that differ a little, so ids decide."""
    return sorted(listed, key=lambda each: (min(each.last_update_time, 1_000_000), each.user_id, each.id))


@given(st.lists(steps, max_size=12))
async def test_both_do_the_same(taken: list[tuple[Any, ...]]) -> None:
    """Both create, append, deliver again, delete and return the same."""
    beside = Beside()
    try:
        for verb, *arguments in taken:
            await getattr(beside, verb)(*arguments)
        await beside.check()
    finally:
        beside.ours._home.shared.close()
