"""The contract of ADK's session service, written again: ADK's own suite is not in a release."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.adk")

from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types
from tests import postgres_server

from perdure import MemoryStore
from perdure.adapters.google_adk import PerdureSessionService
from perdure.errors import ConfigurationError, InvalidData

APP, USER = "weather", "ada"


@pytest.fixture(params=["memory", "file", "sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PerdureSessionService]:
    urls = {"file": f"file://{tmp_path}/sessions", "sqlite": f"sqlite:///{tmp_path}/sessions.db"}
    if request.param == "postgres":
        urls["postgres"] = postgres_server.url_of(tmp_path)
    made = PerdureSessionService(store=urls.get(request.param) or MemoryStore())
    yield made
    made._home.shared.close()


async def created(service: PerdureSessionService, session_id: str | None = None, **given: Any) -> Session:
    return await service.create_session(**{"app_name": APP, "user_id": USER, "session_id": session_id, **given})


async def got(service: PerdureSessionService, session_id: str, **given: Any) -> Session:
    session = await service.get_session(**{"app_name": APP, "user_id": USER, "session_id": session_id, **given})
    assert session is not None
    return session


def said(text: str = "Hi", **given: Any) -> Event:
    content = types.Content(role="user", parts=[types.Part(text=text)])
    return Event(**{"author": "user", "invocation_id": "i-1", "content": content, **given})


def changing(**delta: Any) -> Event:
    return Event(author="agent", invocation_id="i-1", actions=EventActions(state_delta=delta))


def texts(session: Session) -> list[str | None]:
    return [event.content.parts[0].text for event in session.events if event.content and event.content.parts]


async def test_a_session_comes_back_as_it_was_created(service: PerdureSessionService) -> None:
    """It has its state, and a new id if none was given."""
    session = await created(service, state={"city": "Rome"})
    assert session.id
    assert session.state == {"city": "Rome"}
    assert session.last_update_time <= datetime.now(UTC).timestamp()
    assert await got(service, session.id) == session


async def test_an_unknown_session_is_none(service: PerdureSessionService) -> None:
    """It is None also for another user, or in another app."""
    await created(service, "s")
    for names in ((APP, USER, "t"), (APP, "bob", "s"), ("news", USER, "s"), (APP, USER, "")):
        app, user, session_id = names
        assert await service.get_session(app_name=app, user_id=user, session_id=session_id) is None


async def test_blanks_around_an_id_are_dropped(service: PerdureSessionService) -> None:
    """A session is found and deleted with or without them, and exists only once."""
    session = await created(service, "  s ")
    assert session.id == "s"
    assert (await got(service, " s")).id == "s"
    with pytest.raises(AlreadyExistsError):
        await created(service, "s  ")
    await service.delete_session(app_name=APP, user_id=USER, session_id=" s ")
    assert await service.get_session(app_name=APP, user_id=USER, session_id="s") is None


async def test_an_id_is_given_once(service: PerdureSessionService) -> None:
    """A second session of the same name is refused, and changes nothing; another user may use it."""
    await created(service, "s", state={"n": 1, "app:a": 1})
    with pytest.raises(AlreadyExistsError, match="s already exists"):
        await created(service, "s", state={"n": 2, "app:a": 2, "user:u": 2})
    assert (await got(service, "s")).state == {"n": 1, "app:a": 1}
    assert (await created(service, "s", user_id="bob")).state == {"app:a": 1}


async def test_of_several_that_create_one_session_one_does(service: PerdureSessionService) -> None:
    """The others raise AlreadyExistsError."""
    came = await asyncio.gather(*(created(service, "s") for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(each, Session) for each in came) == 1
    assert sum(isinstance(each, AlreadyExistsError) for each in came) == 4


async def test_a_deleted_session_is_gone(service: PerdureSessionService) -> None:
    """Its id can be used again, for a session that has none of its events; a second deletion raises nothing."""
    session = await created(service, "s", state={"n": 1, "user:u": 1})
    await service.append_event(session, said())
    await service.delete_session(app_name=APP, user_id=USER, session_id="s")
    await service.delete_session(app_name=APP, user_id=USER, session_id="s")
    assert await service.get_session(app_name=APP, user_id=USER, session_id="s") is None
    again = await created(service, "s")
    assert (again.state, again.events) == ({"user:u": 1}, [])


async def test_lists_have_states_and_no_events(service: PerdureSessionService) -> None:
    """The lists are of one user or of all, in the order of their last change."""
    for user, name in (("ada", "a"), ("ada", "b"), ("bob", "a")):
        session = await created(service, name, user_id=user, state={"n": name, "app:x": 1, "user:me": user})
        await service.append_event(session, said())
    await created(service, "z", app_name="news")
    listed = (await service.list_sessions(app_name=APP)).sessions
    assert [(each.user_id, each.id) for each in listed] == [("ada", "a"), ("ada", "b"), ("bob", "a")]
    assert listed[0].state == {"n": "a", "app:x": 1, "user:me": "ada"}
    assert listed[2].state == {"n": "a", "app:x": 1, "user:me": "bob"}
    assert not any(each.events for each in listed)
    mine = (await service.list_sessions(app_name=APP, user_id="ada")).sessions
    assert [each.id for each in mine] == ["a", "b"]
    session = await got(service, "a")
    await service.append_event(session, said(timestamp=session.last_update_time + 9))
    assert [each.id for each in (await service.list_sessions(app_name=APP, user_id="ada")).sessions] == ["b", "a"]
    assert (await service.list_sessions(app_name="no such app")).sessions == []
    assert (await service.list_sessions(app_name=APP, user_id="nobody")).sessions == []


async def test_a_listed_session_can_be_appended_to(service: PerdureSessionService) -> None:
    """It has no events, but it is current."""
    await service.append_event(await created(service, "s"), said("one"))
    (listed,) = (await service.list_sessions(app_name=APP)).sessions
    await service.append_event(listed, said("two"))
    assert texts(await got(service, "s")) == ["one", "two"]


async def test_an_apps_state_is_shared_by_its_users(service: PerdureSessionService) -> None:
    """A value that one user has put there is in all sessions of the app, older and newer ones."""
    first = await created(service, "s", state={"app:a": 1})
    await service.append_event(first, changing(**{"app:b": 2}))
    assert (await created(service, "t", user_id="bob")).state == {"app:a": 1, "app:b": 2}
    assert (await got(service, "s")).state == {"app:a": 1, "app:b": 2}
    assert (await created(service, "s", app_name="news")).state == {}


async def test_a_users_state_is_shared_by_her_sessions(service: PerdureSessionService) -> None:
    """It is not shared with other users, nor with her sessions in another app."""
    first = await created(service, "s", state={"user:a": 1})
    await service.append_event(first, changing(**{"user:b": {"deep": [1, None]}}))
    assert (await created(service, "t")).state == {"user:a": 1, "user:b": {"deep": [1, None]}}
    assert (await created(service, "s", user_id="bob")).state == {}
    assert await service.get_user_state(app_name=APP, user_id=USER) == {"a": 1, "b": {"deep": [1, None]}}
    assert await service.get_user_state(app_name="news", user_id=USER) == {}
    assert await service.get_user_state(app_name=APP, user_id="bob") == {}


async def test_none_is_a_value(service: PerdureSessionService) -> None:
    """A key that is set to None is not deleted, in any of the states."""
    session = await created(service, "s", state={"a": 1, "user:b": 1, "app:c": 1})
    await service.append_event(session, changing(**{"a": None, "user:b": None, "app:c": None}))
    assert (await got(service, "s")).state == session.state == {"a": None, "user:b": None, "app:c": None}


async def test_temporary_state_is_not_stored(service: PerdureSessionService) -> None:
    """Agents of the same run see it; the event and the store do not have it."""
    session = await created(service, "s", state={"temp:at first": 1})
    event = changing(**{"temp:now": 1, "kept": 2})
    await service.append_event(session, event)
    assert session.state == {"temp:now": 1, "kept": 2}
    assert event.actions.state_delta == {"kept": 2}
    loaded = await got(service, "s")
    assert loaded.state == {"kept": 2}
    assert loaded.events[0].actions.state_delta == {"kept": 2}


async def test_state_that_is_not_json_is_kept_as_adk_keeps_it(service: PerdureSessionService) -> None:
    """Times are kept as text, functions by their names, and other values unchanged."""
    odd = {"n": 10**30, "inf": [float("inf")], "deep": json.loads("[" * 150 + "]" * 150)}
    session = await created(service, "s", state={"at": datetime(2026, 1, 2, tzinfo=UTC), **odd})
    assert session.state == {"at": "2026-01-02T00:00:00Z", **odd}
    await service.append_event(session, changing(**{"run": print, "n": 1, "user:n": 10**30}))
    loaded = (await got(service, "s")).state
    assert loaded.pop("run").startswith("<built-in function print")
    assert loaded == {"at": "2026-01-02T00:00:00Z", **odd, "n": 1, "user:n": 10**30}


async def test_an_event_comes_back_whole(service: PerdureSessionService) -> None:
    """Its bytes, calls, actions, transcriptions and numbers come back."""
    parts = [
        types.Part.from_bytes(data=b"\x00\xffimage" * 2_000, mime_type="image/png"),
        types.Part(text="Hm.", thought=True, thought_signature=b"signed"),
        types.Part(function_call=types.FunctionCall(id="c-1", name="look", args={"a": [1, {"b": None}]})),
        types.Part(function_response=types.FunctionResponse(id="c-1", name="look", response={"result": 1.5})),
    ]
    events = [
        Event(author="user", invocation_id="i-1", content=types.Content(role="user", parts=parts)),
        Event(
            author="agent",
            invocation_id="i-1",
            content=types.Content(role="model", parts=[types.Part(text="Sunny.")]),
            turn_complete=True,
            partial=False,
            actions=EventActions(artifact_delta={"file": 0}, transfer_to_agent="b", escalate=True, agent_state={}),
            long_running_tool_ids={"c-2", "c-1"},
            error_code="E",
            error_message="broken",
            interrupted=True,
            grounding_metadata=types.GroundingMetadata(
                web_search_queries=["q"], search_entry_point=types.SearchEntryPoint(sdk_blob=b"blob")
            ),
            usage_metadata=types.GenerateContentResponseUsageMetadata(prompt_token_count=1, total_token_count=2),
            citation_metadata=types.CitationMetadata(),
            custom_metadata={"key": "value"},
            timestamp=1_700_000_000.123,
            branch="a.b",
            output={"any": "thing"},
            input_transcription=types.Transcription(text="in", finished=True),
        ),
        Event(author="agent", actions=EventActions(requested_auth_configs={}, rewind_before_invocation_id="i-1")),
    ]
    session = await created(service, "s")
    for event in events:
        assert await service.append_event(session, event) is event
    loaded = await got(service, "s")
    assert loaded == session
    assert loaded.events == events
    assert [event.model_dump_json() for event in loaded.events] == [event.model_dump_json() for event in events]


async def test_what_a_caller_does_to_a_session_stays_with_it(service: PerdureSessionService) -> None:
    """Other callers that load it have events and states of their own, however deep the change."""
    session = await created(service, "s", state={"list": [1], "user:list": [1]})
    call = types.Part(function_call=types.FunctionCall(id="c-1", name="look", args={"deep": {"a": [1]}}))
    event = Event(author="agent", content=types.Content(role="model", parts=[call]))
    await service.append_event(session, event)
    before = await got(service, "s")
    spoilt = await got(service, "s")
    spoilt.state["list"].append(2)
    spoilt.state["user:list"].append(2)
    (mine,) = spoilt.events
    assert mine.content is not None
    assert mine.content.parts is not None
    assert mine.content.parts[0].function_call is not None
    assert mine.content.parts[0].function_call.args is not None
    mine.content.parts[0].function_call.args["deep"]["a"].append(2)
    mine.content.parts.append(types.Part(text="more"))
    mine.actions.state_delta["more"] = 1
    mine.author = "somebody"
    event.author = "somebody else"
    assert await got(service, "s") == before


async def test_partial_events_are_not_stored(service: PerdureSessionService) -> None:
    """They are not added to the session either."""
    session = await created(service, "s")
    event = said(partial=True, actions=EventActions(state_delta={"a": 1}))
    assert await service.append_event(session, event) is event
    assert (session.events, session.state) == ([], {})
    assert await got(service, "s") == session


async def test_a_session_was_updated_when_its_last_event_was(service: PerdureSessionService) -> None:
    """The time of the event counts, not that of the store, even if it is in the past."""
    session = await created(service, "s")
    for timestamp in (session.last_update_time + 10, 5.0):
        await service.append_event(session, said(timestamp=timestamp))
        assert session.last_update_time == timestamp
        assert (await got(service, "s")).last_update_time == timestamp


async def test_events_can_be_asked_for_in_part(service: PerdureSessionService) -> None:
    """The newest, those since a time, both, or none are returned, in the order they came."""
    session = await created(service, "s", state={"a": 1})
    for number in range(1, 6):
        await service.append_event(session, said(str(number), timestamp=number))

    async def asked(**config: Any) -> list[str | None]:
        loaded = await got(service, "s", config=GetSessionConfig(**config))
        assert loaded.state == {"a": 1}
        return texts(loaded)

    assert await asked() == ["1", "2", "3", "4", "5"]
    assert await asked(num_recent_events=0) == []
    assert await asked(num_recent_events=3) == ["3", "4", "5"]
    assert await asked(num_recent_events=9) == ["1", "2", "3", "4", "5"]
    assert await asked(after_timestamp=4.0) == ["4", "5"]
    assert await asked(after_timestamp=50.0) == []
    assert await asked(after_timestamp=2.0, num_recent_events=3) == ["3", "4", "5"]
    assert await asked(after_timestamp=4.0, num_recent_events=3) == ["4", "5"]


async def test_a_session_that_was_loaded_in_part_can_be_appended_to(service: PerdureSessionService) -> None:
    """The events that were not loaded are still there."""
    session = await created(service, "s")
    for number in range(3):
        await service.append_event(session, said(str(number)))
    part = await got(service, "s", config=GetSessionConfig(num_recent_events=1))
    await service.append_event(part, said("3"))
    assert texts(await got(service, "s")) == ["0", "1", "2", "3"]


async def test_a_stale_session_is_refused(service: PerdureSessionService) -> None:
    """It was loaded before another caller appended: neither the event nor its states are stored."""
    stale = await created(service, "s")
    await service.append_event(await got(service, "s"), said("first", timestamp=stale.last_update_time))
    with pytest.raises(StaleSessionError, match="modified in storage"):
        await service.append_event(stale, changing(**{"a": 1, "user:a": 1, "app:a": 1}))
    loaded = await got(service, "s")
    assert (texts(loaded), loaded.state, stale.events) == (["first"], {}, [])


async def test_a_session_of_an_erased_one_is_stale(service: PerdureSessionService) -> None:
    """A new session with the same id and version is another session."""
    old = await created(service, "s")
    await service.delete_session(app_name=APP, user_id=USER, session_id="s")
    with pytest.raises(SessionNotFoundError, match="s not found"):
        await service.append_event(old, said())
    await created(service, "s")
    with pytest.raises(StaleSessionError):
        await service.append_event(old, said())


async def test_times_that_drift_make_nobody_stale(service: PerdureSessionService) -> None:
    """Versions are compared, not times."""
    session = await created(service, "s")
    await service.append_event(session, said("one", timestamp=session.last_update_time + 10))
    session.last_update_time -= 0.0001
    await service.append_event(session, said("two", timestamp=1.0))
    assert texts(await got(service, "s")) == ["one", "two"]


async def test_a_session_made_by_hand_is_judged_by_its_events(service: PerdureSessionService) -> None:
    """It has no version. Its last event must be the last one stored, or its time not before that one's."""
    session = await created(service, "s")
    await service.append_event(session, said("one"))
    session._storage_update_marker = None
    session.last_update_time -= 0.0001
    await service.append_event(session, said("two"))
    bare = Session(app_name=APP, user_id=USER, id="s")
    with pytest.raises(StaleSessionError):
        await service.append_event(bare, said("three"))
    current = Session(app_name=APP, user_id=USER, id="s", last_update_time=session.last_update_time)
    await service.append_event(current, said("three"))
    assert texts(await got(service, "s")) == ["one", "two", "three"]


async def test_an_event_that_is_delivered_again_is_stored_once(service: PerdureSessionService) -> None:
    """Its state is not applied again. Another event of the same id is another event."""
    session = await created(service, "s")
    event = said("one", actions=EventActions(state_delta={"n": 1}))
    await service.append_event(session, event)
    await service.append_event(session, event.model_copy(deep=True))
    await service.append_event(await got(service, "s"), event)
    await service.append_event(session, said("two", id=event.id))
    loaded = await got(service, "s")
    assert texts(loaded) == texts(session) == ["one", "two"]
    assert {each.id for each in loaded.events} == {event.id}


@pytest.mark.parametrize("text", ["", " ", "a/b", "ä\n", "o" * 300, "\x1fmark", "'; --"])
async def test_any_text_is_a_name(text: str) -> None:
    """This holds for an app, a user and a session: no two of them are mixed up."""
    service = PerdureSessionService(store=MemoryStore())
    await created(service, "s", app_name=text, state={"app:n": "app"})
    await created(service, "s", user_id=text, state={"user:n": "user"})
    named = await created(service, text or None, state={"n": "session"})
    listed = [(each.app_name, each.user_id, each.id) for each in (await service.list_sessions(app_name=APP)).sessions]
    assert sorted(listed) == sorted([(APP, text, "s"), (APP, USER, named.id)])
    assert [each.id for each in (await service.list_sessions(app_name=APP, user_id=text)).sessions] == ["s"]
    assert (await got(service, "s", app_name=text)).state == {"app:n": "app"}
    assert (await got(service, "s", user_id=text)).state == {"user:n": "user"}
    assert (await got(service, named.id)).state == {"n": "session"}


async def test_more_sessions_than_a_page_holds_are_listed() -> None:
    """All of them are."""
    service = PerdureSessionService(store=MemoryStore())
    for number in range(620):
        await created(service, f"s-{number}")
    assert len((await service.list_sessions(app_name=APP)).sessions) == 620


async def test_a_name_of_perdures_own_forks_cannot_be_given() -> None:
    """Otherwise a client of ADK's server could take any id in the store."""
    service = PerdureSessionService(store=MemoryStore())
    with pytest.raises(InvalidData, match="names a fork"):
        await created(service, "perdure:chat-1")


def test_a_uri_names_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ADK's command line makes a service from it, once the scheme is registered."""
    from google.adk.cli.utils.service_factory import create_session_service_from_options

    from perdure.adapters.google_adk import register, service_at

    register()
    uri = f"perdure+sqlite:///{tmp_path}/a.db"
    service = create_session_service_from_options(base_dir=tmp_path, session_service_uri=uri)
    assert isinstance(service, PerdureSessionService)
    asyncio.run(service.create_session(app_name=APP, user_id=USER, session_id="s"))
    assert (tmp_path / "a.db").exists()
    monkeypatch.setenv("PERDURE_STORE", str(tmp_path / "b.db"))
    asyncio.run(service_at("perdure://").create_session(app_name=APP, user_id=USER))
    assert (tmp_path / "b.db").exists()
    with pytest.raises(ConfigurationError, match=r"perdure\+sqlite:///file.db"):
        service_at("perdure://a.db")


def test_a_services_file_registers_it(tmp_path: Path) -> None:
    """A services.yaml in the folder of the agents is enough, without any code."""
    from google.adk.cli.service_registry import get_service_registry, load_services_module

    named = "scheme: perdure+sqlite\n    type: session\n    class: perdure.adapters.google_adk.service_at"
    (tmp_path / "services.yaml").write_text(f"services:\n  - {named}\n")
    get_service_registry()._session_factories.pop("perdure+sqlite", None)
    load_services_module(str(tmp_path))
    uri = f"perdure+sqlite:///{tmp_path}/a.db"
    made = get_service_registry().create_session_service(uri, agents_dir=str(tmp_path))
    assert isinstance(made, PerdureSessionService)
