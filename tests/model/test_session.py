"""Sessions: the header, the status table, and the changes."""

from __future__ import annotations

import copy
import itertools
import pickle
from datetime import UTC, datetime, timedelta

import pytest

from perdure.errors import CorruptRecord, IllegalStatusChange, InvalidData, InvalidSessionId
from perdure.model import ids
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList, SessionStatus, check_tags
from perdure.model.state import AgentState

START = datetime(2030, 1, 1, tzinfo=UTC)
LATER = START + timedelta(seconds=1)

ACTIVE, SUSPENDED, COMPLETED, FAILED, DELETED = SessionStatus
LEGAL = {
    (ACTIVE, SUSPENDED),
    (SUSPENDED, ACTIVE),
    (ACTIVE, COMPLETED),
    (ACTIVE, FAILED),
    (SUSPENDED, COMPLETED),
    (SUSPENDED, FAILED),
    (COMPLETED, ACTIVE),
    (FAILED, ACTIVE),
    *((status, DELETED) for status in SessionStatus if status is not DELETED),
}


def session(status: SessionStatus = ACTIVE) -> AgentSession:
    info = AgentSessionInfo(SessionId("s-1"), "support", status, created_at=START, updated_at=START)
    return AgentSession(info, AgentDefinition("support"), AgentState())


def test_a_session_shows_its_header():
    """Id, version and status are the header's."""
    made = session()
    assert (made.id, made.version, made.status) == ("s-1", 0, ACTIVE)
    assert (made.info.parent_id, made.info.spawn_ref, made.info.owner, made.info.tags) == (None, None, None, ())


@pytest.mark.parametrize(("current", "wanted"), sorted(LEGAL))
def test_legal_moves(current, wanted):
    """A legal move gives a session of the new status, moves updated_at, and leaves the old one alone."""
    before = session(current)
    with ids.use(clock=lambda: LATER):
        after = before.with_status(wanted)
    assert (after.status, after.info.updated_at) == (wanted, LATER)
    assert (before.status, before.info.updated_at) == (current, START)
    assert (after.version, after.state, after.definition) == (before.version, before.state, before.definition)


@pytest.mark.parametrize(("current", "wanted"), sorted(set(itertools.permutations(SessionStatus, 2)) - LEGAL))
def test_illegal_moves(current, wanted):
    """Any other move raises, and lists the allowed ones."""
    with pytest.raises(IllegalStatusChange) as caught:
        session(current).with_status(wanted)
    error = caught.value
    assert (error.session_id, error.current, error.wanted) == ("s-1", current.value, wanted.value)
    assert set(error.allowed) == {to.value for at, to in LEGAL if at is current}


@pytest.mark.parametrize("status", SessionStatus)
def test_the_same_again_changes_nothing(status):
    """A move to the present status is a no-op: the same value, the same time."""
    before = session(status)
    assert before.with_status(status) is before


def test_each_status_has_a_verb():
    """suspended(), activated(), completed(), failed() and deleted() move along the table."""
    made = session()
    assert made.suspended().status is SUSPENDED
    assert made.suspended().activated().status is ACTIVE
    assert made.completed().status is COMPLETED
    assert made.failed().status is FAILED
    assert made.deleted().status is DELETED


def test_a_status_may_be_given_by_its_name():
    """A status given as text becomes the status; any other text is InvalidData."""
    assert session().with_status("suspended").status is SUSPENDED
    made = session()
    assert made.with_status("active") is made
    for wrong in ("archived", "", None, [], 10**5000):
        with pytest.raises(InvalidData) as caught:
            session().with_status(wrong)
        assert caught.value.path == "$.status"


@pytest.mark.parametrize("status", SessionStatus)
def test_a_new_state_leaves_the_status_alone(status):
    """with_state() changes only state and time, whatever the end of the state's run."""
    state = AgentState().with_execution_started()
    with ids.use(clock=lambda: LATER):
        after = session(status).with_state(state)
    assert (after.state, after.status, after.version, after.info.updated_at) == (state, status, 0, LATER)


def test_a_new_definition_names_the_agent():
    """with_definition() also moves the header's agent name."""
    with ids.use(clock=lambda: LATER):
        after = session().with_definition(AgentDefinition("sales"))
    assert (after.definition.name, after.info.agent_name, after.info.updated_at) == ("sales", "sales", LATER)


def test_tags_and_name():
    """Tags are kept in order and once; a name can be given and taken away."""
    with ids.use(clock=lambda: LATER):
        after = session().with_tags(["vip", "eu", "vip"]).with_name("Monday")
    assert (after.info.tags, after.info.name, after.info.updated_at) == (("vip", "eu"), "Monday", LATER)
    assert after.with_name(None).info.name is None
    assert after.with_tags(()).info.tags == ()
    assert session().info.tags == ()


@pytest.mark.parametrize("tags", ["vip", 5, None, [5], [""], ["x" * 201], [["a"]], [None]])
def test_tags_are_texts(tags):
    """One text, an empty tag, a long one, or something else is InvalidData."""
    with pytest.raises(InvalidData) as caught:
        check_tags(tags)
    assert caught.value.path.startswith("$.tags")


def test_reconstitute_sets_version_and_time_only():
    """A store returns a session with its version and time, and with the version since which its view is shown."""
    before = session(SUSPENDED)
    after = AgentSession.reconstitute(before, version=7, updated_at=LATER)
    assert (after.version, after.info.updated_at, after.status) == (7, LATER, SUSPENDED)
    assert (after.state, after.definition, after.info.created_at) == (before.state.kept_as(7), before.definition, START)


@pytest.mark.parametrize("bad", ["../../etc/passwd", "", "a/b", "x" * 201, "ü", None, 5])
def test_a_header_has_a_valid_id(bad):
    """A header refuses an id that a store must not use, for itself and for its parent."""
    with pytest.raises(InvalidSessionId):
        AgentSessionInfo(bad, "support")
    if bad is not None:
        with pytest.raises(InvalidSessionId):
            AgentSessionInfo("good", "support", parent_id=bad)


def test_a_headers_ids_are_session_ids():
    """Ids given as texts become session ids."""
    info = AgentSessionInfo("child", "support", parent_id="parent")
    assert (type(info.id), type(info.parent_id)) == (SessionId, SessionId)


def test_sessions_are_frozen():
    """No field of a session or its header can be assigned."""
    with pytest.raises(AttributeError):
        session().state = AgentState()
    with pytest.raises(AttributeError):
        session().info.version = 5


def test_copies_are_equal():
    """deepcopy and pickle give an equal session."""
    made = session().with_tags(["vip"]).with_state(AgentState().with_messages(Message.user("hi")))
    assert copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_page_of_headers_is_a_sequence():
    """A page iterates, counts and indexes its headers, and has the next page and the damaged records."""
    infos = [session().info, session(FAILED).info]
    damaged = CorruptRecord("s-9", "head 3", "its checksum does not match")
    page = SessionInfoList(infos, next="cursor", damaged=[damaged])
    assert (list(page), page.all(), len(page)) == (infos, tuple(infos), 2)
    assert (page[0], page[-1:]) == (infos[0], tuple(infos[1:]))
    assert (page.next, page.damaged) == ("cursor", (damaged,))
    assert "2" in repr(page)
    assert (list(SessionInfoList()), SessionInfoList().next, bool(SessionInfoList())) == ([], None, False)
