"""Checks of the arguments of every store's verbs, one function for each verb.

Each raises InvalidData, with the path, before anything is read or written. `SessionId` checks ids of sessions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from perdure.errors import InvalidData, SessionNotFound
from perdure.model.checks import expect, expect_count, expect_function, expect_number, expect_several, expect_text
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.retention import is_hold
from perdure.model.session import AgentSession, AgentSessionInfo, check_owner
from perdure.model.state import AgentState
from perdure.model.transcript import LogRef
from perdure.model.value import brief
from perdure.protocols import (
    NOTHING_WRITTEN,
    ArchivedSession,
    Change,
    Claim,
    Due,
    Entry,
    Key,
    KeyRing,
    Sketch,
    StoredAt,
    Timer,
    Token,
    check_digest,
    check_lease,
    check_page,
    check_priority,
    check_time,
)
from perdure.stores.format.rows import LAST

T = TypeVar("T")
_HASH = re.compile("[0-9a-f]{64}")


def create(session: AgentSession, written: Mapping[str, StoredAt], erasures: int | None, key: Key | None) -> None:
    _check_session(session)
    if erasures is not None:
        expect_count(erasures, "$.erasures")
    _check_mapping(written)
    if key is not None:
        expect(key, Key, "$.key")
    if session.version != 0:
        raise InvalidData("$.version", f"a new session has version 0, not {session.version}; save() an existing one")


def save(
    session: AgentSession,
    claim: Claim | None,
    written: Mapping[str, StoredAt],
    entries: Sequence[Entry],
    taken: int,
    key: Key | None,
) -> None:
    _check_session(session)
    _check_mapping(written)
    _check_all(entries, Entry, "$.entries")
    expect_count(taken, "$.taken")
    if claim is not None:
        held(claim)
    if key is not None:
        expect(key, Key, "$.key")


def save_all(changes: Sequence[Change]) -> None:
    _check_all(changes, Change, "$.changes")
    seen: dict[str, int] = {}
    for at, change in enumerate(changes):
        save(change.session, None, NOTHING_WRITTEN, change.entries, 0, change.key)
        first = seen.setdefault(change.session.id, at)
        if first != at:
            what = f"session {change.session.id!r} is in $.changes[{first}] already; save it once, with all its changes"
            raise InvalidData(f"$.changes[{at}]", what)


def attachments(hashes: Iterable[str]) -> list[str]:
    """Return the hashes, each of them once."""
    found = [*expect_several(hashes, "$.hashes")]
    for place, key in enumerate(found):
        if not isinstance(key, str) or not _HASH.fullmatch(key):
            raise InvalidData(f"$.hashes[{place}]", f"a SHA-256 has 64 digits in hex; this is {brief(key)}")
    return [*dict.fromkeys(found)]


def _check_session(session: AgentSession) -> None:
    expect(session, AgentSession, "$.session")
    expect_count(expect(session.info, AgentSessionInfo, "$.info").version, "$.version")
    expect(session.definition, AgentDefinition, "$.definition")
    expect(session.state, AgentState, "$.state")


def _check_mapping(written: Mapping[str, StoredAt]) -> None:
    if written is not NOTHING_WRITTEN and not isinstance(written, Mapping):
        raise InvalidData("$.written", f"expected a mapping of messages' ids, got {brief(written)}")


def place(stored: StoredAt) -> StoredAt:
    """Return the place at which a message is said to be stored already."""
    expect_count(expect(stored, StoredAt, "$.written").position, "$.written.position")
    expect(stored.log, LogRef, "$.written.log")
    return stored


def claim(
    version: int,
    owner: str,
    lease: float,
    messages: Sequence[Message],
    entries: Sequence[Entry],
    take_over: bool,
    per_owner: int | None,
) -> None:
    expect_count(version, "$.version")
    expect_text(owner, "$.owner")
    check_lease(lease)
    _check_all(messages, Message, "$.messages")
    _check_all(entries, Entry, "$.entries")
    expect(take_over, bool, "$.take_over")
    if per_owner is not None:
        expect_count(per_owner, "$.per_owner", least=1)


def held(claim: Claim) -> None:
    expect(claim, Claim, "$.claim")


def release(claim: Claim, interrupted: bool) -> None:
    held(claim)
    expect(interrupted, bool, "$.interrupted")


def append(claim: Claim, messages: Sequence[Message], entries: Sequence[Entry], log: str, taken: int) -> None:
    held(claim)
    _check_all(messages, Message, "$.messages")
    _check_all(entries, Entry, "$.entries")
    expect_text(log, "$.log")
    expect_count(taken, "$.taken")


def sketch(claim: Claim, piece: Sketch) -> None:
    held(claim)
    expect(piece, Sketch, "$.piece")


def delete(session_id: str, expected: AgentSessionInfo | None) -> SessionId:
    if expected is not None:
        expect(expected, AgentSessionInfo, "$.expected")
    return SessionId(session_id)


def progress(after: int) -> None:
    expect_count(after, "$.after")


def post(entry: Entry, priority: int, most: int | None, most_of_owner: int | None) -> None:
    expect(entry, Entry, "$.entry")
    check_priority(priority)
    _check_optional_count(most, "$.most")
    _check_optional_count(most_of_owner, "$.most_of_owner")


def waiting(limit: int, idle_only: bool) -> None:
    expect_count(limit, "$.limit", least=1)
    expect(idle_only, bool, "$.idle_only")


def in_turn(limit: int, after: str | None, skip: Iterable[str], not_of: Iterable[str]) -> None:
    expect_count(limit, "$.limit", least=1)
    check_owner(after)
    for path, names in (("$.skip", skip), ("$.not_of", not_of)):
        for name in expect_several(names, path):
            expect_text(name, path)


def set_timer(timer: Timer, is_replaced: bool) -> None:
    SessionId(expect(timer, Timer, "$.timer").session_id)
    expect(is_replaced, bool, "$.replace")


def timers(limit: int, after: int) -> None:
    expect_count(limit, "$.limit", least=1)
    expect_count(after, "$.after")


def due(at: float, limit: int) -> None:
    check_time(at, "$.at")
    expect_count(limit, "$.limit", least=1)


def ring(
    timer: Timer, again: float | None, entry: Entry | None, most: int | None = None, later: float | None = None
) -> None:
    SessionId(expect(timer, Timer, "$.timer").session_id)
    if most is not None:
        expect_count(most, "$.most", least=1)
    if most is not None and again is None:
        check_time(expect(later, float, "$.later"), "$.later")
    if again is not None:
        check_time(again, "$.again")
    if entry is not None:
        expect(entry, Entry, "$.entry")


def drop_timer(name: str) -> None:
    expect_text(name, "$.name")


def reserve(name: str, cost: float, burst: float, most: float | None) -> None:
    expect_text(name, "$.name")
    check_time(cost, "$.cost")
    check_time(burst, "$.burst")
    if most is not None:
        expect_number(most, "$.most")


def add_token(token: Token) -> None:
    expect(token, Token, "$.token")


def token(digest: str) -> None:
    check_digest(digest)


def tokens(owner: str | None) -> None:
    check_owner(owner)


def drop_token(token_id: str) -> None:
    expect_text(token_id, "$.token_id")


def note(entries: Sequence[Entry]) -> None:
    _check_all(entries, Entry, "$.entries")


def read(after: int, limit: int | None, last: int | None, run: str | None, inbox: bool) -> None:
    if type(after) is not int or after < 0:  # no upper limit: a number beyond the last entry just finds none
        raise InvalidData("$.after", f"expected a whole number of at least 0, got {brief(after)}")
    _check_optional_count(limit, "$.limit")
    _check_optional_count(last, "$.last")
    _check_optional_text(run, "$.run")
    expect(inbox, bool, "$.inbox")


def runs(limit: int | None, before: int | None, run: str | None) -> None:
    check_page(limit, before)
    _check_optional_text(run, "$.run")


def versions(before: int | None, limit: int) -> None:
    if before is not None:
        expect_count(before, "$.before")
    expect_count(limit, "$.limit", least=1)


def forget(before: int) -> None:
    expect_count(before, "$.before", least=1)


def retire(due: Sequence[Due]) -> None:
    _check_all(due, Due, "$.due")


def prune(due: Due, before: int) -> None:
    expect(due, Due, "$.due")
    forget(before)


def rehearse(batches: Sequence[Sequence[Due]], prunes: Sequence[tuple[Due, int]]) -> None:
    _check_all(batches, Sequence, "$.batches")  # type: ignore[type-abstract]  # it is only asked whether each is one
    for batch in batches:
        retire(batch)
    _check_all(prunes, tuple, "$.prunes")
    for at, each in enumerate(prunes):
        if len(each) != 2:
            raise InvalidData(f"$.prunes[{at}]", f"expected a session and a version, got {brief(each)}")
        prune(*each)


def overgrown(versions: int, after: str, limit: int) -> None:
    expect_count(versions, "$.versions")
    expect_text(after, "$.after")
    expect_count(limit, "$.limit", least=1)


def adoptions(version: int) -> None:
    expect_count(version, "$.version")


def log_of(name: str) -> None:
    expect_text(name, "$.name")


def names_of(logs: Iterable[LogRef]) -> None:
    for place, log in enumerate(expect_several(logs, "$.logs")):
        expect(log, LogRef, f"$.logs[{place}]")


def messages(log: LogRef, start: int, stop: int, origin: str) -> None:
    """Check a stretch of a log. Raise SessionNotFound for a log of another store."""
    expect(log, LogRef, "$.log")
    expect_count(start, "$.start")
    expect_count(stop, "$.stop", least=start)
    if log.origin != origin or not isinstance(log.key, int | str):
        raise SessionNotFound(f"log {log.key}")


def log_number(log: LogRef) -> int:
    """Return the number of a log in a store that numbers them. Raise SessionNotFound for a key that is not a number."""
    if type(log.key) is not int or not 0 <= log.key <= LAST:
        raise SessionNotFound(f"log {log.key}")
    return log.key


def find_key(name: str) -> None:
    expect_text(name, "$.key")


def changed(after: int, most: float) -> None:
    expect_count(after, "$.after")
    expect_number(most, "$.most")


def session_ids(given: Iterable[str]) -> list[SessionId]:
    """Return the ids, each of them once."""
    return list(dict.fromkeys(map(SessionId, expect_several(given, "$.session_ids"))))


def find_message(message_id: str, owner: str | None, limit: int) -> None:
    expect_text(message_id, "$.message_id")
    check_owner(owner)
    expect_count(limit, "$.limit", least=1)


def index(rebuild: bool, progress: Callable[[int, int], None] | None) -> None:
    expect(rebuild, bool, "$.rebuild")
    if progress is not None:
        expect_function(progress, "$.progress")


def dump(alone: bool) -> None:
    expect(alone, bool, "$.alone")


def restore(archived: ArchivedSession) -> None:
    parts = asdict(expect(archived, ArchivedSession, "$.archived"))
    # Most of the bytes are in these. The conversion is one call that blocks all threads. So it is given these only if
    # something in them is wrong, to say what.
    for field in ("logs", "lent"):
        if _are_logs(parts[field]):
            parts[field] = {}
    try:
        msgspec.convert(parts, ArchivedSession, builtin_types=(bytes,), dec_hook=_as_session_id)
    except msgspec.ValidationError as error:
        raise InvalidData("$.archived", str(error)) from None


def _are_logs(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        type(name) is str and isinstance(messages, Mapping) and _are_messages(messages)
        for name, messages in given.items()
    )


def _are_messages(given: Mapping[Any, Any]) -> bool:
    return all(type(at) is int and type(body) is bytes for at, body in given.items())


def _as_session_id(kind: type, value: object) -> SessionId:
    return SessionId(value)  # type: ignore[arg-type]  # it refuses a value that is not a text


def _check_all(given: Sequence[T], kind: type[T], path: str) -> None:
    # A text is also a sequence of texts, but is hardly ever meant as one.
    if type(given) is not list and (isinstance(given, str | bytes) or not isinstance(given, Sequence)):
        raise InvalidData(path, f"expected a list, got {brief(given)}")
    for at, each in enumerate(given):
        if not isinstance(each, kind):
            raise InvalidData(f"{path}[{at}]", f"expected {kind.__name__}, got {brief(each)}")


def _check_optional_count(value: int | None, path: str) -> None:
    if value is not None:
        expect_count(value, path)


def _check_optional_text(value: str | None, path: str) -> None:
    if value is not None:
        expect_text(value, path)


def drop_hold(tag: object) -> None:
    if not is_hold(expect_text(tag, "$.tag")):
        raise InvalidData("$.tag", f"a hold has the tag 'hold' or 'hold:…', not {tag!r}")


def keys(given: object) -> KeyRing | None:
    if given is None or isinstance(given, KeyRing):
        return given
    raise InvalidData("$.keys", "keys are a KeyRing: `FileKeyRing(path, master=…)`, or a class of your own")
