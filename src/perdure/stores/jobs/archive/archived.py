"""An archived session by itself: the names of its logs, a check that it is whole, and a comparison with another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, SessionConflict
from perdure.model.definition import AgentDefinition
from perdure.model.transcript import Span
from perdure.protocols import ArchivedSession, Entry
from perdure.stores.format.blocks import BlocksAtHand
from perdure.stores.format.gathering import gathered
from perdure.stores.format.heads import StoredHead, decode_info
from perdure.stores.format.renaming import OpenHead
from perdure.stores.format.rows import Stretch, hash_of
from perdure.stores.tapes import TapeCache, merged

LENT = "~"
Messages = Mapping[int, bytes]
"""Messages of a log, by position."""
# Beyond any log that could be moved. A position costs memory in some stores, so a false one could use up all of it.
_LONGEST = 2**26


def name_of_log(session_id: str, branch: str) -> str:
    return f"{session_id}/{branch}" if branch else str(session_id)


def split_name(name: str) -> tuple[str, str]:
    """Return the session and the branch in a log's name."""
    owner, _, branch = name.partition("/")
    return owner, branch


def own_name(session_id: str, branch: str) -> str:
    """Return the name in an archive of a session's own log, or of its copy of another session's log."""
    return branch.removeprefix(LENT) if branch.startswith(LENT) else name_of_log(session_id, branch)


def check(archived: ArchivedSession) -> list[Stretch]:
    """Return the stretches that an archived session names. Raise InvalidData unless it is whole and sound."""
    try:
        return _check(archived)
    except CorruptRecord as error:
        raise InvalidData(error.position, error.reason) from None


def _check(archived: ArchivedSession) -> list[Stretch]:
    for key, raw in archived.values.items():
        if hash_of(raw) != key:
            raise InvalidData(f"$.values.{key}", "its hash does not match")
    first, newest = first_version(archived), newest_version(archived)
    for name, messages in archived.logs.items():
        _check_own_log(archived.session_id, name, messages, may_have_gaps=first > 1)
    for name, messages in archived.lent.items():
        _check_positions(f"$.lent.{name}", messages)
    _check_files(archived)
    for name, (_, version) in archived.keys.items():
        if not 1 <= version <= newest:
            raise InvalidData(f"$.keys.{name}", f"the session has no version {version}")
    stretches = _read_heads(archived)
    for log, start, stop in stretches:
        _check_stretch(archived, str(log), start, stop)
    return stretches


def first_version(archived: ArchivedSession) -> int:
    """Return the number of the oldest version, which the newest one names."""
    newest = archived.heads[-1] if archived.heads else b""
    return decode_info(newest, archived.session_id, len(archived.heads)).first_version


def newest_version(archived: ArchivedSession) -> int:
    return first_version(archived) + len(archived.heads) - 1


def _check_files(archived: ArchivedSession) -> None:
    for key, body in archived.blobs.items():
        if codec.hash_of_bytes(body) != key:
            raise InvalidData(f"$.blobs.{key}", "its hash does not match")
    for key, where in files_named(archived).items():
        if key not in archived.blobs:
            raise InvalidData(f"$.blobs.{key}", f"{where} names it, and it is not there")


def files_named(archived: ArchivedSession) -> dict[str, str]:
    """Return the hashes of images and files in messages and inbox, each with a place that names it."""
    found: dict[str, str] = {}
    for name, messages in (*archived.logs.items(), *archived.lent.items()):
        for at, body in messages.items():
            found |= dict.fromkeys(codec.hashes_in(body), f"message {at} of log {name}")
    for seq, item in enumerate(archived.inbox, 1):
        found |= dict.fromkeys(codec.hashes_in_post(item.body), f"inbox {seq}")
    return found


def _check_own_log(session_id: str, name: str, messages: Messages, *, may_have_gaps: bool) -> None:
    owner, branch = split_name(name)
    if owner != session_id or branch.startswith(LENT):
        raise InvalidData(f"$.logs.{name}", "it is not a log of this session")
    _check_positions(f"$.logs.{name}", messages)
    # A session that has forgotten versions may have forgotten messages with them.
    if not may_have_gaps and max(messages, default=-1) != len(messages) - 1:
        raise InvalidData(f"$.logs.{name}", "a message is missing from it")


def _check_positions(where: str, messages: Messages) -> None:
    if messages and not 0 <= min(messages) <= max(messages) < _LONGEST:
        raise InvalidData(where, f"no log has a message {max(messages)}")


def _read_heads(archived: ArchivedSession) -> list[Stretch]:
    """Return the stretches that the versions name, after checking that each version can be read."""
    met: set[Stretch] = set()
    tapes, definitions, created = TapeCache(""), dict[str, AgentDefinition](), set()

    def span(name: int | str, start: int, stop: int) -> Span:
        met.add((name, start, stop))
        return tapes.span(name, start, stop)

    block_of, blocks = BlocksAtHand(archived.values, span), set[str]()
    for version, raw in enumerate(archived.heads, first_version(archived)):
        stored = StoredHead(raw, archived.session_id, version)
        found = gathered(stored, _value_in(archived), blocks)
        blocks |= found.blocks
        head = OpenHead(raw, stored, found.values)
        head.check(span, block_of, definitions)
        created.add(head.info.created_at)
    if len(created) != 1:
        raise InvalidData("$.heads", "a session has at least one version, and all of them the same time of creation")
    return merged(met)


def _value_in(archived: ArchivedSession) -> Callable[[str], bytes]:
    def value_of(key: str) -> bytes:
        if key not in archived.values:
            raise InvalidData(f"$.values.{key}", "a version names it, and it is not there")
        return archived.values[key]

    return value_of


def _check_stretch(archived: ArchivedSession, name: str, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= _LONGEST:
        raise InvalidData(f"$.logs.{name}", f"no log has messages {start} to {stop}")
    messages = archived.logs.get(name, archived.lent.get(name))
    if messages is None and split_name(name)[0] in archived.owners:
        return  # the target store has to have this log, and a restore looks for it there
    if messages is None or not all(at in messages for at in range(start, stop)):
        raise InvalidData(f"$.logs.{name}", f"messages {start} to {stop} are named by a version, and not there")


def require_same(archived: ArchivedSession, found: ArchivedSession) -> None:
    """Raise SessionConflict unless the archived session and the stored one are the same."""
    if not is_same(archived, found):
        arrives, there = newest_version(archived), newest_version(found)
        raise SessionConflict(
            archived.session_id,
            arrives,
            there,
            f"Session {archived.session_id!r} is in this store already (version {there}), and it is not the one to be "
            f"brought in (version {arrives}). Nothing was changed. Delete the one that is here, or bring the other "
            "into another store.",
        )


def is_same(archived: ArchivedSession, found: ArchivedSession) -> bool:
    """Tell whether two archives have one session in one state. Messages of others may be in one of them alone."""
    alike = ("session_id", "heads", "values", "entries", "inbox", "keys", "interrupted")
    if any(getattr(archived, field) != getattr(found, field) for field in alike):
        return False
    if not archived.lent and not found.lent and archived.blobs.keys() != found.blobs.keys():
        return False  # with messages of others, their files too may be in one alone
    if archived.logs.keys() != found.logs.keys():
        return False
    common = archived.lent.keys() & found.lent.keys()
    pairs = [(archived.logs[name], found.logs[name]) for name in archived.logs]
    pairs += [(archived.lent[name], found.lent[name]) for name in common]
    return all(say_the_same(one, other) for one, other in pairs)


def say_the_same(one: Messages, other: Messages) -> bool:
    return one.keys() == other.keys() and all(
        # Earlier releases did not write redacted messages in canonical form, as an export does.
        body == other[at] or _canonical(body) == _canonical(other[at])
        for at, body in one.items()
    )


def _canonical(body: bytes) -> bytes:
    return codec.detached_raw(codec.encode_message(codec.decode_message(body)))[0]


def run_stretches(archived: ArchivedSession) -> dict[str, tuple[str, int, int]]:
    """Return the place of each run's messages: the branch whose log has them, the first position, and the end."""
    places: dict[str, dict[str, int]] = {}
    reach: dict[str, tuple[str, int, int]] = {}
    for entry in archived.entries:
        if entry.run is None:
            continue
        if entry.run not in reach:
            reach[entry.run] = (_branch_of(archived, entry), 0, 0)
        branch, start, stop = reach[entry.run]
        if branch not in places:
            places[branch] = _places(archived.logs.get(name_of_log(archived.session_id, branch), {}))
        for at in (places[branch][each] for each in _messages_of(entry) if each in places[branch]):
            start, stop = (min(start, at), max(stop, at + 1)) if stop else (at, at + 1)
        reach[entry.run] = (branch, start, stop)
    return reach


def within(kept: Iterable[Stretch], run: Stretch) -> Stretch:
    """Return a run's stretch in a log that has gaps, without what is before the gap.

    The end is right. Two messages with one id may have put the start too early.
    """
    log, start, stop = run
    for each, low, high in kept:
        if each == log and low < stop <= high:
            start = max(start, low)
    return log, start, stop


def _branch_of(archived: ArchivedSession, first: Entry) -> str:
    """Return the branch of a run by its first entry. A run of a parallel group has its own branch, even if empty."""
    is_of_group = isinstance(first.body, Mapping) and first.body.get("group")
    has_log = name_of_log(archived.session_id, str(first.run)) in archived.logs
    return str(first.run) if is_of_group or has_log else ""


def _places(messages: Messages) -> dict[str, int]:
    return {codec.decode_message(body).id: at for at, body in messages.items()}


def _messages_of(entry: Entry) -> list[str]:
    """Return the ids of the messages that an entry of a run names."""
    if not isinstance(entry.body, Mapping):
        return []
    made = [part.get("message") for part in _listed(entry.body.get("shown")) if isinstance(part, Mapping)]
    named = [entry.body.get("message"), *_listed(entry.body.get("messages")), *made]
    return [message["id"] for message in named if isinstance(message, Mapping) and isinstance(message.get("id"), str)]


def _listed(value: Any) -> Sequence[Any]:
    """Return a list, or () for any other value. An entry may come from anybody, in any form."""
    return value if isinstance(value, list | tuple) else ()
