"""Every verb, in any order, on every store, against a model kept in lists."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests import postgres_server
from tests.sessions.naive import NaiveSession, NaiveStore, View, covered, cut, held, shown, uncovered

import perdure
from perdure import (
    CompleteSession,
    FileStore,
    InvalidData,
    MemoryStore,
    Message,
    PostgresStore,
    Sessions,
    SessionStore,
    SqliteStore,
    ToolCall,
    VersionForgotten,
    WriteMetadata,
)
from perdure.archive import ArchivingStore, fsck
from perdure.protocols import Erasure, Forgets, ModelRequest, Search
from perdure.testing import ScriptedDriver

STORES = ("memory", "file", "sqlite", "postgres")
OTHER = {"memory": "sqlite", "file": "memory", "sqlite": "file", "postgres": "memory"}
STEPS = 50
RUNS = 50 if os.environ.get("PERDURE_TORTURE") else 2  # of 50 steps on four stores: 10,000 steps, or 400
ANY = st.integers(0, 1_000)


class Side:
    """A store, the connection to it, and its model."""

    def __init__(self, kind: str, folder: Path, driver: ScriptedDriver) -> None:
        self.kind = kind
        self._folder = folder
        self._driver = driver
        self._memory = MemoryStore()
        self.naive = NaiveStore()
        self.face: Sessions

    async def open(self) -> None:
        # Few sessions are kept in memory, so that most reads go to the store.
        self.face = perdure.connect(self._store(), driver=self._driver, tools=[look], live=3)
        await self.face.__aenter__()

    def _store(self) -> SessionStore:
        match self.kind:
            case "memory":
                return self._memory
            case "file":
                return FileStore(self._folder / "files")
            case "sqlite":
                return SqliteStore(self._folder / "sessions.db", cache=3)
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(self._folder))

    async def close(self) -> None:
        await self.face.__aexit__(None, None, None)


def look(word: str) -> str:
    """Something long enough that leaving it out is a gain."""
    return f"seen {word} " + "and more " * 20


class Verbs(RuleBasedStateMachine):
    """Two stores of different kinds, and the verbs on their sessions."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._folder = Path(tempfile.mkdtemp(prefix="perdure-verbs-"))
        self._count = 0
        self._script: list[Any] = []
        driver = ScriptedDriver(self._reply)
        self.sides = []
        for place, kind in enumerate((self.kind, OTHER[self.kind])):
            (self._folder / str(place)).mkdir()
            self.sides.append(Side(kind, self._folder / str(place), driver))
            self._do(self.sides[-1].open())
        self.side = self.sides[0]

    def _reply(self, request: ModelRequest) -> Any:
        return self._script.pop(0)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _word(self) -> str:
        return f"word{self._next()}x{os.getpid()}"

    @property
    def naive(self) -> NaiveStore:
        return self.side.naive

    @property
    def face(self) -> Sessions:
        return self.side.face

    def _pick(self, which: int, older: int) -> NaiveSession:
        """Return a session to act on, on either side; there is always one."""
        self.side = self.sides[1 if older % 5 == 4 and self.sides[1].naive.sessions else 0]
        found = self.naive.any_session(which)
        return found if found is not None else self._opened(None)

    def _opened(self, session_id: str | None) -> NaiveSession:
        chat = self._do(self.face.open(session_id))
        return self.naive.sessions.setdefault(chat.id, NaiveSession(chat.id))

    def _learn(self, message: Message, word: str | None = None) -> str:
        self.naive.messages[message.id] = message.to_dict()
        if word is not None:
            assert word in message.text
            self.naive.words[message.id] = word
        return message.id

    def _compare(self, ids: list[str], messages: Any) -> None:
        """Compare messages with the model's, to the letter; one that a redaction changed is compared once more."""
        assert [message.id for message in messages] == ids
        for message in messages:
            if message.id in self.naive.changed:
                self._relearn(message)
            assert message.to_dict() == self.naive.messages[message.id]

    def _relearn(self, message: Message) -> None:
        before, after = self.naive.messages[message.id], message.to_dict()
        assert (before["role"], before["id"]) == (after["role"], after["id"])
        if message.id in self.naive.redacted and message.id in self.naive.words:
            assert self.naive.words[message.id] not in str(after)
        self.naive.changed.discard(message.id)
        self.naive.messages[message.id] = after

    def _check(self, session: NaiveSession, older: int) -> None:
        """Compare a session with the model, now and at some older version."""
        found = self._do(self.face.session(session.id))
        assert found.version == len(session.versions)
        self._compare(shown(session.view), found.state.messages)
        assert self._do(self.face.length(session.id)) == len(shown(session.view))
        version = session.first + older % len(session.kept)
        before = self._do(self.face.session(session.id, version))
        assert before.version == version
        self._compare(shown(session.versions[version - 1]), before.state.messages)

    def _check_history(self, session: NaiveSession) -> None:
        history = self._do(self.face.history(session.id))
        ids = [message.id for message in history]
        assert ids == session.said
        self._compare(ids, history)

    # Opening, talking

    @initialize()
    def begin(self) -> None:
        self._opened(None)

    @rule(number=st.integers(0, 5), which=st.integers(0, 4))
    def open(self, number: int, which: int) -> None:
        self.side = self.sides[which == 4]
        session = self._opened(f"s{number}")
        self._check(session, number)

    @rule(which=ANY, older=ANY, role=st.sampled_from(["user", "assistant", "system"]))
    def inject(self, which: int, older: int, role: str) -> None:
        session, word = self._pick(which, older), self._word()
        message = Message.of({"role": role, "content": f"injected {word}"})
        self._do(self.face.inject(session.id, message))
        session.becomes((*session.view, self._learn(message, word)), message.id)
        self._check(session, older)

    @rule(which=ANY, older=ANY, between=st.booleans())
    def inject_call_and_result(self, which: int, older: int, between: bool) -> None:
        session, call = self._pick(which, older), ToolCall(name="look", arguments={"word": "w"})
        messages = [Message.assistant(tool_calls=[call]), Message.tool(call.id, look("w"), name="look")]
        messages[1:1] = [Message.user("still there?")] if between else []
        for message in messages:
            self._do(self.face.inject(session.id, message))
            session.becomes((*session.view, self._learn(message)), message.id)
        self._check(session, older)

    @rule(which=ANY, older=ANY, calls=st.lists(st.integers(1, 3), max_size=2), streamed=st.booleans())
    def send(self, which: int, older: int, calls: list[int], streamed: bool) -> None:
        session, asked, answered = self._pick(which, older), self._word(), self._word()
        steps = [[ToolCall(name="look", arguments={"word": f"{n}"}) for n in range(many)] for many in calls]
        self._script = [*steps, f"answer {answered}"]
        if streamed:
            text, reply = self._do(_streamed(self.face, session.id, f"ask {asked}"))
            assert text == f"answer {answered}"
        else:
            reply = self._do(self.face.send(session.id, f"ask {asked}"))
        assert reply.text == f"answer {answered}"
        assert self._script == []
        before = len(shown(session.view))
        new = reply.session.state.messages[before:]
        roles = ["user", *(role for many in calls for role in ("assistant", *["tool"] * many)), "assistant"]
        assert [message.role for message in new] == roles
        words = [asked, *[None] * (len(new) - 2), answered]
        ids = [self._learn(message, word) for message, word in zip(new, words, strict=True)]
        session.becomes((*session.view, *ids), *ids)
        self._check(session, older)

    # Branches

    @rule(which=ANY, older=ANY, how=st.sampled_from(["end", "count", "message", "version"]), named=st.booleans())
    def fork(self, which: int, older: int, how: str, named: bool) -> None:
        session, dst = self._pick(which, older), f"f{self._next()}" if named else None
        view, options = self._fork_point(session, older, how)
        made = self._do(self.face.fork(session.id, dst, **options))
        assert dst in (None, made.id)
        said = self.naive.unmarked(held(view))
        fork = self.naive.sessions[made.id] = NaiveSession(made.id, view, said, session.id)
        self._check(fork, older)
        self._check(session, older)
        self._check_history(fork)

    def _fork_point(self, session: NaiveSession, older: int, how: str) -> tuple[View, dict[str, Any]]:
        ids = shown(session.view)
        if how == "version":
            version = session.first + older % len(session.kept)
            return session.versions[version - 1], {"version": version}
        if how == "count" or (how == "message" and not ids):
            count = older % (len(ids) + 1)
            return cut(session.view, 0, count), {"at": count}
        if how == "message":
            place = older % len(ids)
            return cut(session.view, 0, place + 1), {"at": ids[place]}
        return session.view, {}

    @rule(which=ANY, older=ANY, branch=ANY)
    def adopt(self, which: int, older: int, branch: int) -> None:
        session = self._pick(which, older)
        fork = self.naive.any_session(branch, lambda each: self.naive.is_fork(each, session.id))
        if fork is None:
            with pytest.raises(InvalidData, match="not a fork"):
                self._do(self.face.adopt(session.id, session.id))
        else:
            self._do(self.face.adopt(session.id, fork.id))
            new = (each for each in self.naive.unmarked(held(fork.view)) if each not in session.said)
            session.becomes(fork.view, *dict.fromkeys(new))
        self._check(session, older)
        self._check_history(session)

    # The view

    @rule(which=ANY, older=ANY, keep=st.integers(0, 12))
    def trim(self, which: int, older: int, keep: int) -> None:
        session = self._pick(which, older)
        ids = shown(session.view)
        start = self.naive.safe_cut(ids, len(ids) - keep)
        assert self._do(self.face.trim(session.id, keep)) == len(ids) - start
        session.becomes(cut(session.view, start, len(ids)))
        self._check(session, older)

    @rule(which=ANY, older=ANY)
    def reset(self, which: int, older: int) -> None:
        session = self._pick(which, older)
        self._do(self.face.reset(session.id))
        session.becomes(())
        self._check(session, older)
        self._check_history(session)

    @rule(which=ANY, older=ANY)
    def undo(self, which: int, older: int) -> None:
        session = self._pick(which, older)
        if session.undo():
            assert self._do(self.face.undo(session.id)) == len(shown(session.view))
        else:
            with pytest.raises(InvalidData, match="nothing to undo"):
                self._do(self.face.undo(session.id))
        self._check(session, older)

    @rule(which=ANY, older=ANY, by_message=st.booleans())
    def rewind(self, which: int, older: int, by_message: bool) -> None:
        session = self._pick(which, older)
        ids = shown(session.view)
        if by_message and ids:
            place = older % len(ids)
            self._do(self.face.rewind(session.id, ids[place]))
            session.becomes(cut(session.view, 0, place + 1))
        else:
            version = session.first + older % len(session.kept)
            self._do(self.face.rewind(session.id, version))
            session.becomes(session.versions[version - 1])
        self._check(session, older)

    @rule(which=ANY, older=ANY, keep=st.integers(0, 8), strategy=st.sampled_from(["truncate", "llm", "custom", "keep"]))
    def compact(self, which: int, older: int, keep: int, strategy: str) -> None:
        session = self._pick(which, older)
        ids = shown(session.view)
        place = self.naive.safe_cut(ids, len(ids) - keep)
        head, tail = ids[:place], ids[place:]
        options: dict[str, Any] = {"compact_strategy": "custom" if strategy == "keep" else strategy}
        self._script = ["in short"] if strategy == "llm" else []
        if strategy in ("custom", "keep"):
            options["custom_compactor"] = _first_or_note if strategy == "keep" else _note
        self._do(self.face.compact(session.id, keep_last=keep, **options))
        wanted = self._compacted(head, strategy)
        self._covered(session, None if wanted is None else [*wanted, *tail])
        self._check(session, older)
        self._check_history(session)

    def _compacted(self, head: list[str], strategy: str) -> list[str | None] | None:
        """Return what replaces the head, with None for a message that is made; None if nothing is done."""
        is_settled = all(self.naive.mark(each) in ("llm", "truncate") for each in head)
        match strategy:
            case "truncate":
                return None if is_settled else [each for each in head if self.naive.mark(each) == "llm"] + [None]
            case "llm":
                return None if is_settled else [None]
            case "keep" if head and self.naive.messages[head[0]]["role"] == "user":
                return [head[0]]
        return [None] if head else None

    def _covered(self, session: NaiveSession, wanted: list[str | None] | None) -> None:
        """Check the session after a compaction, and add a version if the view was to change."""
        before = shown(session.view)
        if wanted is None or wanted == before:
            return
        messages = self._do(self.face.session(session.id)).state.messages
        assert len(messages) == len(wanted)
        for message, known in zip(messages, wanted, strict=True):
            assert message.id == known if known else message.metadata["compaction"]
            if known is None:
                self._learn(message)
        session.becomes(covered(session.view, [message.id for message in messages], self._next()))

    @rule(which=ANY, older=ANY, keep=st.integers(0, 8))
    def mask(self, which: int, older: int, keep: int) -> None:
        session = self._pick(which, older)
        ids = shown(session.view)
        place = self.naive.safe_cut(ids, len(ids) - keep)
        wanted = [None if at < place and self._is_maskable(each) else each for at, each in enumerate(ids)]
        kept = self._do(self.face.compact(session.id, compact_strategy="observation_mask", keep_last=keep))
        assert kept == len(ids)
        self._covered(session, wanted)
        self._check(session, older)
        self._check_history(session)

    def _is_maskable(self, message_id: str) -> bool:
        parts = self.naive.messages[message_id]["parts"]
        long = any(part["type"] == "tool_result" and len(part["content"]) > 40 for part in parts)
        return long and self.naive.mark(message_id) is None

    @rule(which=ANY, older=ANY)
    def uncompact(self, which: int, older: int) -> None:
        session = self._pick(which, older)
        view = uncovered(session.view)
        if view is None:
            with pytest.raises(InvalidData, match="no compaction block"):
                self._do(self.face.uncompact(session.id))
        else:
            assert self._do(self.face.uncompact(session.id)) == len(shown(view))
            session.becomes(view)
        self._check(session, older)

    @rule(which=ANY, older=ANY)
    def write_metadata(self, which: int, older: int) -> None:
        session = self._pick(which, older)
        self._do(self.face.execute(session.id, WriteMetadata("mood", older)))
        session.becomes(session.view)
        self._check(session, older)

    # Looking

    @rule(which=ANY, older=ANY, other=ANY)
    def look_around(self, which: int, older: int, other: int) -> None:
        session = self._pick(which, older)
        second = self.naive.any_session(other)
        assert second is not None
        diff = self._do(self.face.diff(session.id, second.id))
        left, right = shown(session.view), shown(second.view)
        same = 0
        while same < min(len(left), len(right)) and left[same] == right[same]:
            same += 1
        assert [message.id for message in diff.common] == left[:same]
        assert [message.id for message in diff.left] == left[same:]
        assert [message.id for message in diff.right] == right[same:]
        ancestry = self._do(self.face.ancestry(session.id))
        assert ancestry.parent == session.parent
        assert set(ancestry.children) == set(self.naive.forks(session.id))
        self._check_history(session)

    @rule(which=ANY, older=ANY)
    def search(self, which: int, older: int) -> None:
        self._pick(which, older)
        if not self.naive.words or not isinstance(self.face.store, Search):
            return
        message_id, word = list(self.naive.words.items())[which % len(self.naive.words)]
        found = {hit.message_id for hit in self._do(self.face.search(word))}
        is_there = any(each.holds(message_id) for each in self.naive.sessions.values())
        if message_id in self.naive.redacted or not is_there:
            assert message_id not in found
        else:
            assert message_id in found
        assert all(self.naive.mark(each) for each in found - {message_id})  # a summary may quote what was asked

    # Closing, moving, erasing

    @rule(which=ANY, older=ANY)
    def close_session(self, which: int, older: int) -> None:
        session = self._pick(which, older)
        self._do(self.face.close(session.id))
        self._check(session, older)

    @rule(older=ANY)
    def reopen_store(self, older: int) -> None:
        session = self._pick(older, older)
        self._do(self.side.close())
        self._do(self.side.open())
        self._check(session, older)

    @rule(which=ANY, older=ANY)
    def move_to_the_other_store(self, which: int, older: int) -> None:
        session = self._pick(which, 0)
        source, target = self.sides
        if not all(isinstance(side.face.store, ArchivingStore) for side in self.sides) or source.naive.changed:
            return
        ours, theirs = source.naive, target.naive
        named = [*session.said, *(each for view in session.kept for each in held(view))]
        differs = any(theirs.messages.get(each, ours.messages[each]) != ours.messages[each] for each in named)
        if session.id in theirs.sessions or differs or theirs.changed & set(named):
            return
        file = io.BytesIO()
        assert self._do(source.face.export(file, [session.id])).sessions == 1
        file.seek(0)
        assert self._do(target.face.import_(file)).sessions == 1
        theirs.sessions[session.id] = session.twin()
        theirs.messages |= {each: ours.messages[each] for each in named}
        theirs.words |= {each: ours.words[each] for each in named if each in ours.words}
        theirs.redacted |= ours.redacted & set(named)
        self.side = target
        self._check(theirs.sessions[session.id], older)
        self._check_history(theirs.sessions[session.id])

    @rule(which=ANY, older=ANY, message=ANY)
    def redact(self, which: int, older: int, message: int) -> None:
        session = self._pick(which, older)
        said = [each for each in session.said if each not in self.naive.redacted]
        if not said or not isinstance(self.face.store, Erasure):
            return
        chosen = said[message % len(said)]
        assert self._do(self.face.redact(session.id, [chosen])) == 1
        self.naive.redacted.add(chosen)
        # Summaries may have quoted it, and calls and results quote each other.
        self.naive.changed |= {chosen, *(each for each in self.naive.messages if self._may_tell(each))}
        self._noted()
        self._check(session, older)
        self._check_history(session)

    def _noted(self) -> None:
        """Add a version to the sessions that a redaction concerns: it is on record there, with the same view."""
        for session in self.naive.sessions.values():
            if self._do(self.face.info(session.id)).version > len(session.versions):
                session.becomes(session.view)

    def _may_tell(self, message_id: str) -> bool:
        return self.naive.mark(message_id) is not None

    @rule(which=ANY, older=ANY)
    def forget(self, which: int, older: int) -> None:
        session = self._pick(which, older)
        if not isinstance(self.face.store, Forgets):
            return
        before = session.first + older % (len(session.kept) + 1)  # which may be a session that does not exist yet
        oldest = min(before, len(session.versions))
        erased = self._do(self.face.forget(session.id, before=before))
        assert erased.versions == oldest - session.first
        if erased.versions:
            session.forget(oldest)
            session.said = self._left(session)
            with pytest.raises(VersionForgotten):
                self._do(self.face.session(session.id, oldest - 1))
        for each in self.naive.sessions.values():
            for place in range(len(each.kept)):
                self._check(each, place)
            self._check_history(each)

    def _left(self, session: NaiveSession) -> list[str]:
        """Return the messages that are left: in the same order, and with all that a kept version has."""
        left = [message.id for message in self._do(self.face.history(session.id))]
        assert left == [each for each in session.said if each in left]
        assert {each for view in session.kept for each in self.naive.unmarked(held(view))} <= {*left}
        return left

    @rule(which=ANY, older=ANY, purge=st.booleans())
    def erase(self, which: int, older: int, purge: bool) -> None:
        session = self._pick(which, older)
        if purge:
            self._do(self.face.execute(session.id, CompleteSession()))
            assert self._do(self.face.purge(status="completed")) == 1
        else:
            self._do(self.face.erase(session.id))
        del self.naive.sessions[session.id]
        assert not self._do(self.face.exists(session.id))
        assert self._do(self.face.snapshot(session.id)) is None
        for fork in self.naive.forks(session.id):
            self._check(self.naive.sessions[fork], older)
            self._check_history(self.naive.sessions[fork])

    def teardown(self) -> None:
        try:
            for side in self.sides:
                self.side = side
                for session in self.naive.sessions.values():
                    self._check(session, len(session.versions) - 1)
                    self._check_history(session)
                problems = self._do(fsck(self.face.store)).problems
                assert list(problems) == []
        finally:
            for side in self.sides:
                self._do(side.close())
            self._runner.close()
            shutil.rmtree(self._folder)


async def _streamed(face: Sessions, session_id: str, text: str) -> tuple[str, Any]:
    chunks = [chunk async for chunk in face.stream(session_id, text)]
    return "".join(chunks), chunks[-1].reply


def _note(older: Any) -> list[Any]:
    return [{"role": "user", "content": "a note"}]


def _first_or_note(older: Any) -> list[Any]:
    return [older[0]] if older[0].role == "user" else _note(older)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STORES)
def test_all_verbs_in_any_order(kind: str) -> None:
    """After every step, a session's view, versions and history are those of the model."""
    machine = type(f"{kind.title()}Verbs", (Verbs,), {"kind": kind})
    # A failure is not shrunk, which would take minutes: the steps that lead to it are printed.
    limits = settings(
        max_examples=RUNS,
        stateful_step_count=STEPS,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=limits)
