"""Sessions as plain conversations, for people and other programs: OpenAI's messages both ways, Markdown one way.

Only what was said is written. Versions, runs and keys are in the archive that `export` writes by default.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

import msgspec

from perdure import codec
from perdure.aio import aside
from perdure.archive.moving import MoveReport, Progress, opened
from perdure.archive.whole_file import checked_path, whole_file
from perdure.errors import InvalidData
from perdure.loop.prompt import compile_prompt
from perdure.model.definition import AgentDefinition
from perdure.model.given_messages import messages_of
from perdure.model.ids import SessionId
from perdure.model.message import Message, require_distinct
from perdure.model.openai_form import openai_messages
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.value import brief
from perdure.sessions.markdown import transcript

if TYPE_CHECKING:
    from perdure.sessions.keeping import Keeping

Format = Literal["perdure", "openai", "markdown"]
"""The format in which sessions are written: whole, to be imported again, or as conversations."""


class ImportReport(MoveReport, frozen=True):
    """The outcome of an import of conversations."""

    created: tuple[SessionId, ...] = ()
    """The sessions that were made, in the order of the file: conversations have no ids of their own."""


def check_format(format: object, *known: str) -> None:
    if format not in (known or get_args(Format)):
        raise InvalidData("$.format", f"expected {' or '.join(known or get_args(Format))}, got {brief(format)}")


async def export_conversations(
    sessions: Keeping,
    target: str | os.PathLike[str] | BinaryIO,
    session_ids: Sequence[SessionId],
    format: Format,
    *,
    history: bool = False,
    is_single: bool = False,
    progress: Progress | None = None,
) -> MoveReport:
    """Write the views of sessions, or with `history` all that was said in them. A single one is a whole document."""
    if isinstance(target, str | os.PathLike):
        async with whole_file(checked_path(target, "$.target")) as file:
            return await export_conversations(
                sessions, file, session_ids, format, history=history, is_single=is_single, progress=progress
            )
    report = MoveReport()
    for place, session_id in enumerate(session_ids):
        session = await sessions.session(session_id)
        messages = await sessions.history(session_id) if history else session.state.messages
        raw = await aside(partial(_written, session, messages, format, is_single=is_single, is_first=place == 0))
        await asyncio.to_thread(target.write, raw)
        report = MoveReport(place + 1, 0, report.messages + len(messages), report.bytes + len(raw))
        if progress is not None:
            progress(place + 1, len(session_ids))
    return report


def _written(
    session: AgentSession, messages: Sequence[Message], format: Format, *, is_single: bool, is_first: bool
) -> bytes:
    if format == "markdown":
        return (("" if is_first else "\n---\n\n") + transcript(session, messages)).encode()
    forms = openai_form(session, messages)
    if is_single:
        return msgspec.json.format(msgspec.json.encode(forms), indent=2) + b"\n"
    return msgspec.json.encode({"messages": forms}) + b"\n"


def openai_form(session: AgentSession, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as a model would be sent them, in the form of chat completions.

    They begin with the system prompt, and every call is answered.
    """
    prompt = session.state.context.system_prompt
    first = [{"role": "system", "content": prompt}] if prompt.strip() else []
    return [*first, *openai_messages(compile_prompt(messages))]


async def import_conversations(
    sessions: Keeping,
    source: str | os.PathLike[str] | BinaryIO,
    agent: AgentDefinition,
    *,
    progress: Progress | None = None,
) -> ImportReport:
    """Make a session of each conversation in a file. Nothing is made if anything in the file is wrong."""
    if isinstance(source, str | os.PathLike):
        with await opened(checked_path(source, "$.source")) as file:
            return await import_conversations(sessions, file, agent, progress=progress)
    raw = await asyncio.to_thread(source.read)
    # Not a generator: the whole file is checked before the first session is made.
    conversations = await aside(lambda: list(_conversations(raw)))
    created: list[SessionId] = []
    for messages in conversations:
        seed = AgentState.of(agent).with_default_model(sessions.loops.model).with_messages(*messages)
        new = SessionId.generate(sessions.owner)
        await sessions.runtime.create(agent, seed=seed, session_id=new, owner=sessions.owner)
        created.append(new)
        if progress is not None:
            progress(len(created), len(conversations))
    return ImportReport(len(created), 0, sum(map(len, conversations)), len(raw), created=tuple(created))


def _conversations(raw: bytes) -> Iterator[tuple[Message, ...]]:
    """Yield the conversations of a file: one for a list of messages, or one for each object with `messages`."""
    values = list(_values(raw))
    if not values:
        raise InvalidData("$", "there are no messages in this file")
    if not any(_is_conversation(value) for _, value in values):
        yield _checked(messages_of_lines(values), "$")
        return
    for path, value in values:
        if not _is_conversation(value):
            raise InvalidData(path, "expected an object with messages, as the others in this file are")
        for key in value.keys() - {"messages"}:
            raise InvalidData(f"{path}.{key}", "unknown key; a conversation has messages, and nothing else")
        if not isinstance(value["messages"], list) or not value["messages"]:
            raise InvalidData(f"{path}.messages", "expected a list of messages")
        yield _checked(messages_of(value["messages"], f"{path}.messages"), f"{path}.messages")


def messages_of_lines(values: Sequence[tuple[str, Any]]) -> list[Message]:
    """Return messages that are given one by one with their places, which errors name."""
    for path, value in values:
        if not isinstance(value, Mapping):
            raise InvalidData(path, f"expected a message, an object with a role; got {brief(value)}")
    return messages_of([value for _, value in values], "$", [path for path, _ in values])


def _is_conversation(value: object) -> bool:
    return isinstance(value, Mapping) and "messages" in value and "role" not in value and "type" not in value


def _checked(messages: Iterable[Message], path: str) -> tuple[Message, ...]:
    made = tuple(messages)
    require_distinct(made, path)
    for each in made:
        codec.encode_message(each)  # InvalidData if it could not be stored
    return made


def _values(raw: bytes) -> Iterator[tuple[str, Any]]:
    """Yield what is in a file, each with its place: the items of one JSON array, or one value a line."""
    # Some editors begin a UTF-8 file with these three bytes, a byte order mark.
    text = raw.removeprefix(b"\xef\xbb\xbf").strip()
    if text.startswith(b"["):
        whole = codec.decode_plain(text)
        yield from ((f"$[{place}]", value) for place, value in enumerate(whole))
        return
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                yield f"line {number}: $", codec.decode_plain(line)
            except InvalidData as error:
                raise InvalidData(f"line {number}", error.problem) from None
