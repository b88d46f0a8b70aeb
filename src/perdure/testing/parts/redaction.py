"""Redaction and clearing up: content goes for good, and everything else stays readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import InvalidData, SessionBusy, SessionConflict, SessionNotFound
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import now
from perdure.model.message import Envelope, Message, Opaque, Text, Thinking, ToolCall
from perdure.model.session import AgentSession
from perdure.model.step import AgentStep, ToolExecution
from perdure.model.stop import StopReason, StopSignal
from perdure.model.value import ErrorRecord, thawed
from perdure.protocols import Archive, Entry, Erasure
from perdure.testing.samples import fork, new_session, note, say, show, tell, texts
from perdure.testing.scene import Contract, in_directory, in_store, refused

SECRET = "hunter2-4111-1111"


async def everything(store: Any, *session_ids: str) -> str:
    """Return all that a store shows of sessions: every version with its blocks, the logs, records and inboxes."""
    told: list[Any] = []
    for session_id in session_ids:
        newest = await store.load(session_id)
        for version in range(1, newest.version + 1):
            session = await store.load(session_id, version)
            # As text: the secret is looked for in all of it, wherever it was put.
            told += [repr(session.info), repr(session.state.metadata), session.state.task]
            told += [repr(session.state.execution), list(session.state.messages)]
            told += [await store.messages(*stretch) for stretch in _stretches(session)]
        log, end = await store.log_of(session_id)
        told.append(await store.messages(log, 0, end))
        told += [await store.read(session_id), await store.read(session_id, inbox=True)]
        told += [await store.runs(session_id)]
    return str(msgspec.json.encode(told, enc_hook=str))


def _stretches(session: AgentSession) -> list[Any]:
    found = []
    for block in session.state.transcript.blocks():
        for span in (*block.covered, *block.shown):
            if hasattr(span, "tape"):
                found.append((span.tape.ref, span.start, span.stop))
    return found


def run_with_secret(session: AgentSession) -> AgentSession:
    """Return the session after a run in which everything that can contain the secret contains it."""
    call = ToolCall("pay", {"card": SECRET, "cents": 7}, id="call-1")
    failed = ToolCall("pay", {"card": SECRET, "again": True}, id="call-2")
    said = [
        Message.assistant(Thinking(f"The card is {SECRET}", "signature"), f"I pay with {SECRET}.", tool_calls=[call]),
        Message.tool("call-1", {"receipt": SECRET, "lines": [SECRET] * 30}),
    ]
    done = ToolExecution(call, now(), now(), result={"receipt": SECRET, "lines": [SECRET] * 30})
    broken = ToolExecution(failed, now(), now(), error=ErrorRecord("ValueError", f"bad card {SECRET}", f"at {SECRET}"))
    step = AgentStep.of(said, input=session.state.transcript, tool_executions=[done, broken])
    state = session.state.with_execution_started().with_current_step(step).with_current_step_completed()
    assert state.execution is not None
    # A part of the text only, as providers and filters quote it: such a message goes as a whole.
    wrong = state.execution.with_error(ErrorRecord("DriverError", f"refused: …{SECRET[:12]}", None))
    wrong = wrong.with_stop_signal(StopSignal(StopReason.ERROR_FORBADE, f"it says {SECRET[:9]}", source="filter"))
    return session.with_state(state.with_execution(wrong.ended(ExecutionStatus.FAILED)))


def entries_with_secret(user: Message, session: AgentSession) -> list[Entry]:
    """Return the entries that a run may have put on record about the secret."""
    run = session.state.execution
    assert run is not None
    loop = run.execution_id
    call = {"type": "tool_call", "name": "pay", "arguments": {"card": SECRET}, "id": "call-1"}
    error = {"type": "ValueError", "message": f"bad {SECRET}", "traceback": f"at {SECRET}"}
    at = "2026-01-01T00:00:00Z"
    asked, answered = session.state.messages[-2:]
    return [
        Entry(
            "agent_start",
            {
                "agent_id": "a",
                "seq": 1,
                "at": at,
                "denied": {"call-2": f"not {SECRET[:9]}"},
                "metadata": {"denied": True, "stop_signals": ["any"]},
            },
            loop,
        ),
        Entry("message_end", {"seq": 2, "at": at, "message": {"role": "user", "id": user.id}}, loop),
        Entry("input_rejected", {"seq": 3, "at": at, "reason": f"it says {SECRET[:9]}"}, loop),
        Entry("message_end", {"seq": 4, "at": at, "message": {"role": "user", "id": asked.id}}, loop),
        Entry("tool_execution_start", {"seq": 5, "at": at, "call": call, "step_id": "s"}, loop),
        Entry(
            "tool_execution_end",
            {
                "seq": 6,
                "at": at,
                "execution": {"call": call, "started_at": at, "result": {"receipt": SECRET}, "error": error},
                "step_id": "s",
            },
            loop,
        ),
        Entry("message_end", {"seq": 7, "at": at, "message": {"role": "user", "id": answered.id}}, loop),
        Entry(
            "agent_end",
            {
                "seq": 8,
                "at": at,
                "status": "failed",
                "errors": [error],
                "rejection": f"it says {SECRET[:9]}",
                "stop_signals": [{"reason": "error_forbade", "message": f"it says {SECRET[:9]}", "source": "filter"}],
            },
            loop,
        ),
    ]


class Redaction(Contract):
    """The contract of `perdure.protocols.Erasure`."""

    @in_store
    async def test_only_what_was_read_is_erased(self, store: Any) -> None:
        """`delete` with `expected` leaves a session that was saved since, or erased and created again."""
        read = await store.create(new_session("Hello", id="again"))
        saved = await store.save(say(read, "more"))
        with refused(SessionConflict):
            await store.delete("again", expected=read.info)
        assert await store.load("again") == saved
        await store.delete("again", expected=saved.info)
        anew = await store.create(new_session("Hello", id="again"))
        with refused(SessionConflict):
            await store.delete("again", expected=read.info)
        assert await store.load("again") == anew
        await store.delete("again")
        with refused(SessionNotFound):
            await store.delete("again", expected=anew.info)

    @in_store
    async def test_content_is_replaced_in_every_version_and_fork(self, store: Any) -> None:
        """A redacted message keeps its id, role and place, and every version and fork shows the replacement."""
        assert issubclass(type(store), Erasure)
        session = await store.create(new_session("hello", f"the code is {SECRET}", "thanks"))
        child = await store.create(say(fork(session), "more"))
        later = await store.save(say(session, "bye"))
        secret = session.state.messages[1]
        assert await store.redact(session.id, [secret.id]) == 1
        assert texts(await store.load(later.id)) == ["hello", "[redacted]", "thanks", "bye"]
        assert texts(await store.load(session.id, 1)) == ["hello", "[redacted]", "thanks"]
        assert texts(await store.load(child.id)) == ["hello", "[redacted]", "thanks", "more"]
        replaced = (await store.load(session.id, 1)).state.messages[1]
        assert (replaced.id, replaced.role, replaced.metadata["redacted"]) == (secret.id, secret.role, True)
        assert SECRET not in await everything(store, session.id, child.id)
        # What is redacted already is not counted again.
        assert await store.redact(session.id, [secret.id]) == 0

    @in_store
    async def test_notes_that_quote_a_message_are_replaced(self, store: Any) -> None:
        """Notes that quote a message are replaced, under whatever name. Other notes and all numbers stay."""
        session = await store.create(new_session("hello", f"the code is {SECRET}"))
        said = session.state.messages[1].text
        quotes = [Entry("acme.note", {"said": [said, {"in": f"It was: {said}!"}], "n": 7}, "task"), Entry("x", said)]
        await store.note(session.id, [Entry("acme.note", {"kept": "as it is"}, "task"), *quotes])
        assert await store.redact(session.id, [session.state.messages[1].id]) == 1
        assert SECRET not in await everything(store, session.id)
        found = await store.read(session.id)
        assert [entry.kind for entry in found] == ["acme.note", "acme.note", "x", "redacted"]
        assert (found[0].body, found[1].body["n"]) == ({"kept": "as it is"}, 7)

    @in_store
    async def test_a_fork_redacts_what_its_parent_said(self, store: Any) -> None:
        """A fork can redact what its parent said: the message is replaced in the parent, too."""
        parent = await store.create(new_session(f"code {SECRET}", "ok"))
        child = await store.create(say(fork(parent), f"again {SECRET}"))
        sibling = await store.create(fork(parent))
        ids = [message.id for message in child.state.messages if SECRET in message.text]
        assert await store.redact(child.id, ids, replacement="(gone)") == 2
        assert texts(await store.load(parent.id)) == ["(gone)", "ok"]
        assert texts(await store.load(sibling.id)) == ["(gone)", "ok"]
        assert texts(await store.load(child.id)) == ["(gone)", "ok", "(gone)"]
        await store.delete(parent.id)
        assert texts(await store.load(child.id)) == ["(gone)", "ok", "(gone)"]
        assert SECRET not in await everything(store, child.id, sibling.id)

    @in_store
    async def test_what_an_erased_parent_has_left_can_be_redacted(self, store: Any) -> None:
        """Messages that an erased parent has left can be redacted."""
        parent = await store.create(new_session(f"code {SECRET}", "ok"))
        child = await store.create(fork(parent))
        await store.delete(parent.id)
        assert await store.redact(child.id, [parent.state.messages[0].id]) == 1
        assert texts(await store.load(child.id)) == ["[redacted]", "ok"]

    @in_store
    async def test_summaries_that_cover_it_go_too(self, store: Any) -> None:
        """Summaries that cover the message go, nested ones and those of forks too. Blocks can still be undone."""
        session = await store.create(new_session("one", SECRET, "three", "four"))
        secret = session.state.messages[1]
        # A part of the text only: looking for the whole of it would not find these.
        view = session.state.transcript.cover(0, 2, [Message.assistant(f"sum of {SECRET[:10]}")], by="test")
        session = await store.save(show(session, view))
        view = session.state.transcript.cover(0, 2, [Message.assistant(f"summed again: {SECRET[:10]}")], by="test")
        child = await store.create(show(fork(session), view))
        other = session.state.transcript.cover(1, 3, [Message.assistant("harmless")], by="test")
        session = await store.save(show(session, other))
        assert await store.redact(session.id, [secret.id]) == 1
        assert texts(await store.load(session.id)) == ["[redacted]", "harmless"]
        loaded = await store.load(child.id)
        assert texts(loaded) == ["[redacted]", "four"]
        assert loaded.state.messages[0].metadata["redacted"] is True
        assert SECRET[:10] not in await everything(store, session.id, child.id)
        child = await store.save(show(loaded, loaded.state.transcript.uncover()))
        child = await store.save(show(child, child.state.transcript.uncover()))
        assert texts(await store.load(child.id)) == ["one", "[redacted]", "three", "four"]

    @in_store
    async def test_runs_tell_nothing_of_it(self, store: Any) -> None:
        """Every quotation goes from steps, record and inbox, and from stop and denial reasons. Names and ids stay."""
        session = await store.create(new_session())
        user = Message.user(f"Pay with {SECRET}", metadata={"channel": "web", "raw": f"Pay with {SECRET}"})
        ran = run_with_secret(tell(session, user))
        ran = note(ran, "last", f"Pay with {SECRET}")
        claim, appended = await store.claim(session.id, version=1, owner="me", messages=[user])
        await store.post(session.id, Entry("steer", {"messages": [user.to_dict()], "key": None}))
        entries = entries_with_secret(user, ran)
        saved = await store.save(ran, claim=claim, written=appended.written, entries=entries, taken=1)
        child = await store.create(fork(saved))
        assert await store.redact(saved.id, [message.id for message in saved.state.messages]) == 3
        told = await everything(store, saved.id, child.id)
        assert SECRET not in told
        assert SECRET[:9] not in told
        loaded = await store.load(saved.id)
        asked, paid, receipt = loaded.state.messages
        assert (asked.text, asked.metadata["channel"]) == ("[redacted]", "web")
        (call,) = paid.tool_calls
        assert (call.id, call.name) == ("call-1", "pay")
        assert receipt.tool_results[0].call_id == "call-1"
        execution = loaded.state.execution
        assert [error.type for error in execution.all_errors] == ["DriverError", "ValueError"]
        assert [each.call.name for each in execution.steps[0].tool_executions] == ["pay", "pay"]
        assert execution.stop_reason is StopReason.ERROR_FORBADE
        assert (await store.read(saved.id))[0].body["denied"] == {"call-2": "[redacted]"}

    @in_store
    async def test_parts_of_every_kind_are_replaced(self, store: Any) -> None:
        """Parts of every kind are replaced by one text. Calls stay."""
        message = Message.assistant("", Thinking(SECRET), Opaque("acme", {"x": SECRET}), f"so {SECRET}")
        session = await store.create(tell(new_session(), message))
        assert await store.redact(session.id, [message.id], replacement="…") == 1
        loaded = await store.load(session.id)
        assert [part.text for part in loaded.state.messages[0].parts] == ["…"]

    @in_store
    async def test_an_envelope_goes_with_its_message(self, store: Any) -> None:
        """An envelope goes with its message, its words are not looked for elsewhere, and a call keeps its id."""
        word = "function_call"
        call = Message.assistant(
            tool_calls=[ToolCall("pay", {"card": SECRET}, "call-1")], id="m-1", metadata={"kind": word}
        )
        call = replace(call, parts=(*call.parts, Envelope("acme", {"type": word, "seen": SECRET})))
        odd = Message("system", (Envelope("acme", {"type": word, "blob": SECRET}),), "m-2")
        session = note(tell(new_session(), call, odd), "k", word)
        session = await store.create(session)
        assert await store.redact(session.id, ["m-1", "m-2"], replacement="…") == 2
        loaded = await store.load(session.id)
        (left,), (text,) = (message.parts for message in loaded.state.messages)
        assert (left.id, left.name, dict(left.arguments)) == ("call-1", "pay", {"redacted": "…"})
        assert text == Text("…")
        assert loaded.state.metadata["k"] == word
        assert loaded.state.messages[0].metadata["kind"] == word
        assert SECRET not in await everything(store, session.id)

    @in_store
    async def test_hidden_messages_lose_what_they_quote(self, store: Any) -> None:
        """Copies of a prompt that a framework keeps in envelopes go with it, short ones too, in forks as well."""
        said, short = Message.user(f"{SECRET}\nis é", id="m-1"), Message.user("4711", id="m-2")
        bodies = [
            {"last": said.text, "mode": "plan", "all": [f"> {said.text}", "4711", "14711", 4711]},
            msgspec.json.encode({"last": said.text, "hole": "\x7f0\x7f", "x": 1.5}).decode(),
            " " + json.dumps({"last": said.text, "odd": "\ud800", "nan": float("nan"), "pin": "4711"}),
            "no JSON: " + said.text,
        ]
        hidden = [Message("system", (Envelope("acme", body),), f"h-{n}") for n, body in enumerate(bodies)]
        session = await store.create(tell(new_session(), said, short, *hidden))
        child = await store.create(fork(session))
        later = Message("system", (Envelope("acme", {"last": said.text}),), "h-9")
        child = await store.save(tell(child, later))
        assert await store.redact(session.id, ["m-1", "m-2"], replacement='"…"') == 2
        loaded = await store.load(child.id)
        first, second, third, fourth, last = [each.parts[0].body for each in loaded.state.messages[2:]]
        assert thawed(first) == {"last": '"…"', "mode": "plan", "all": ['> "…"', '"…"', "14711", 4711]}
        assert json.loads(second) == {"last": '"…"', "hole": "\x7f0\x7f", "x": 1.5}
        assert (third[0], "\\ud800" in third, "NaN" in third) == (" ", True, True)
        assert (json.loads(third)["last"], json.loads(third)["pin"]) == ('"…"', '"…"')
        assert (fourth, thawed(last)) == ('no JSON: "…"', {"last": '"…"'})
        assert [each.metadata.get("redacted") for each in loaded.state.messages] == [True, True, *["in part"] * 5]
        assert SECRET not in await everything(store, session.id, child.id)
        assert await store.redact(session.id, ["h-0"], replacement="…") == 1  # it can still be asked for itself

    @in_store
    async def test_what_was_made_of_messages_is_dropped(self, store: Any) -> None:
        """Metadata marked as derived goes from every version: it may quote a message, and is made again."""
        said = Message.user(f"{SECRET} and so on", id="m-1")
        made = {"$derived": ["s", 1], "first_words": SECRET}
        session = await store.create(note(tell(new_session(), said), "summary", made))
        session = await store.save(note(session, "big", {"$derived": True, "words": [SECRET] * 2_000}))
        session = await store.save(note(session, "kept", {"derived": "yes"}))
        assert await store.redact(session.id, ["m-1"], replacement="…") == 1
        left = (await store.load(session.id)).state.metadata
        assert ("summary" in left, "big" in left, left["kept"]["derived"]) == (False, False, "yes")
        assert SECRET not in await everything(store, session.id)

    @in_store
    async def test_entries_of_an_unknown_kind_are_scrubbed(self, store: Any) -> None:
        """Entries of any form lose their quotations of the message, also those in JSON within a text."""
        said = Message.user(f"{SECRET}\nis é", id="m-1")
        in_json = msgspec.json.encode({"text": said.text}).decode()
        bodies: list[Any] = [
            {"type": "human", "message": said.text, "id": "m-1", "parts": [said.text], "call": 5},
            [1, {"call": "x", "arguments": in_json, "ascii": json.dumps({"text": said.text})}],
            f"> {said.text}",
            None,
        ]
        session = await store.create(new_session())
        entries = [Entry("acme.note", body, "r-1") for body in bodies]
        await store.save(tell(session, said), entries=entries)
        assert await store.redact(session.id, ["m-1"], replacement="…") == 1
        noted = [entry.body for entry in await store.read(session.id) if entry.kind == "acme.note"]
        quoted = [1, {"call": "x", "arguments": '{"text":"…"}', "ascii": '{"text": "…"}'}]
        assert noted == [{**bodies[0], "message": "…", "parts": ["…"]}, quoted, "> …", None]
        assert SECRET not in await everything(store, session.id)

    @in_store
    async def test_it_is_told_on_record_without_the_content(self, store: Any) -> None:
        """Every session concerned gets an entry with the ids and a new version, so stale ones cannot be saved."""
        session = await store.create(new_session(SECRET, "two"))
        child = await store.create(fork(session))
        message_id = session.state.messages[0].id
        await store.redact(session.id, [message_id])
        for each in (session, child):
            (entry,) = await store.read(each.id)
            assert (entry.kind, entry.run, entry.body["message_ids"]) == ("redacted", None, [message_id])
            with refused(SessionConflict):
                await store.save(say(each, "from before"))
            loaded = await store.load(each.id)
            assert loaded.version == each.version + 1
            await store.save(say(loaded, "goes on"))
        assert SECRET not in await everything(store, session.id, child.id)

    @in_store
    async def test_an_unknown_message_is_refused_and_nothing_changed(self, store: Any) -> None:
        """An unknown message is refused, and so is another session's. The error names it, and nothing is changed."""
        session = await store.create(new_session(SECRET))
        other = await store.create(new_session("other"))
        known, foreign = session.state.messages[0].id, other.state.messages[0].id
        for unknown in ("nobody", foreign):
            with refused(InvalidData) as refusal:
                await store.redact(session.id, [known, unknown])
            assert unknown in str(refusal.error)
        for wrong in (known, None, [7]):
            with refused(InvalidData):
                await store.redact(session.id, wrong)
        with refused(InvalidData):
            await store.redact(session.id, [known], replacement="")
        with refused(SessionNotFound):
            await store.redact("unknown", [known])
        assert await store.load(session.id) == session
        assert await store.read(session.id) == []
        assert await store.redact(session.id, []) == 0

    @in_store
    async def test_a_session_that_is_run_is_left_alone(self, store: Any) -> None:
        """A session that runs is not redacted, nor is a message that a running fork shows."""
        session = await store.create(new_session(SECRET))
        child = await store.create(fork(session))
        claim, _ = await store.claim(child.id, version=1, owner="me")
        for each in (child, session):
            with refused(SessionBusy):
                await store.redact(each.id, [session.state.messages[0].id])
        assert await store.load(session.id) == session
        await store.release(claim)
        assert await store.redact(child.id, [session.state.messages[0].id]) == 1

    @in_store
    async def test_an_interrupted_run_can_still_go_on(self, store: Any) -> None:
        """A session that waits to be recovered is redacted, and keeps its version, from which the run began."""
        session = await store.create(new_session(SECRET))
        # A lease of 0 lapses at once, as if the process had been killed.
        await store.claim(session.id, version=1, owner="me", lease=0.0, messages=[Message.user(f"again {SECRET}")])
        log, end = await store.log_of(session.id)
        ids = [message.id for message in await store.messages(log, 0, end)]
        assert await store.redact(session.id, ids) == 2
        assert (await store.load(session.id)).version == 1
        assert await store.lapsed() == [session.id]
        assert SECRET not in await everything(store, session.id)

    @in_store
    async def test_the_summary_of_a_killed_run_goes_too(self, store: Any) -> None:
        """The summary that a killed run has written goes, too, although no version shows it yet."""
        session = await store.create(new_session(f"code {SECRET}", "ok"))
        made = Message.user(f"They said raspberry, {SECRET[:10]}")
        told = {
            "block": {"id": "block-1", "by": "summary", "covered": 2, "summary": made.text},
            "shown": [{"message": {"role": "user", "id": made.id}}],
        }
        said, entries = [Message.user("and now?"), made], [Entry("compaction", told, "run-1")]
        await store.claim(session.id, version=1, owner="me", lease=0.0, messages=said, entries=entries)
        assert len(await store.search("raspberry")) == 1
        assert await store.redact(session.id, [session.state.messages[0].id]) == 1
        assert SECRET[:10] not in await everything(store, session.id)
        assert await store.search("raspberry") == []
        log, end = await store.log_of(session.id)
        assert [each.id for each in await store.messages(log, 0, end)][-1] == made.id

    @in_store
    async def test_a_redacted_session_moves_as_any_other(self, store: Any) -> None:
        """Redacted content is in canonical form, so an export of it counts as the same session in its own store."""
        # The contract of erasure asks for no archive.
        if not issubclass(type(store), Archive):
            return
        session = await store.create(new_session())
        user = Message.user(f"Pay with {SECRET}", metadata={"channel": "web"})
        ran = note(run_with_secret(tell(session, user)), "last", f"Pay with {SECRET}")
        view = ran.state.transcript.cover(0, 1, [Message.assistant(f"sum of {SECRET}")], by="test")
        saved = await store.save(show(ran, view))
        child = await store.create(fork(saved))
        await store.redact(saved.id, [user.id, *(message.id for message in saved.state.messages)])
        for each in (saved, child):
            archived = await store.dump(each.id)
            for rows in archived.logs.values():
                assert [codec.encode_message(codec.decode_message(raw)) for raw in rows.values()] == [*rows.values()]
            assert await store.restore(archived) is False
        alone = await store.dump(saved.id)
        await store.delete(child.id)
        await store.delete(saved.id)
        assert await store.restore(alone) is True
        assert await store.dump(saved.id) == alone

    @in_store
    async def test_a_copy_that_a_fork_has_of_its_own_goes_too(self, store: Any) -> None:
        """If a fork has said a message again in its own log, that copy is replaced as well."""
        parent = await store.create(new_session(SECRET, "two"))
        child = await store.create(fork(parent))
        child = await store.save(tell(child, *parent.state.messages[:1]))
        await store.redact(parent.id, [parent.state.messages[0].id])
        assert SECRET not in await everything(store, parent.id, child.id)

    @in_store
    async def test_what_is_redacted_is_found_no_more(self, store: Any) -> None:
        """Redacted words are not found any longer, and the replacement is."""
        session = await store.create(new_session("one raspberry", "two"))
        assert len(await store.search("raspberry")) == 1
        await store.redact(session.id, [session.state.messages[0].id], replacement="[withheld]")
        assert await store.search("raspberry") == []
        assert [hit.session_id for hit in await store.search("withheld")] == [session.id]

    @in_store
    async def test_there_is_nothing_to_clear_up(self, store: Any) -> None:
        """Deleting leaves nothing behind that nobody shows, so `gc` has nothing to do."""
        assert await store.gc() == 0
        parent = await store.create(new_session("one", "two"))
        child = await store.create(fork(parent))
        await store.delete(parent.id)
        assert await store.gc() == 0
        assert texts(await store.load(child.id)) == ["one", "two"]
        await store.delete(child.id)
        assert await store.gc() == 0

    @in_directory
    async def test_other_instances_show_the_replacement_at_once(self, where: Path) -> None:
        """An instance with the session in its cache stops showing the content at once."""
        if not self.shared:
            return
        async with self.open_store(where) as first, self.open_store(where) as second:
            session = await first.create(new_session(f"code {SECRET}", "two"))
            child = await second.create(fork(session))
            assert await second.load(session.id) == session
            await first.redact(child.id, [session.state.messages[0].id])
            for store in (second, first):
                assert texts(await store.load(session.id)) == ["[redacted]", "two"]
                assert texts(await store.load(session.id, 1)) == ["[redacted]", "two"]
                assert texts(await store.load(child.id)) == ["[redacted]", "two"]
            saved = await second.save(say(await second.load(session.id), "three"))
            assert texts(await first.load(saved.id)) == ["[redacted]", "two", "three"]
