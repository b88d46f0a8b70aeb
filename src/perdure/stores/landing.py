"""A session on its way into a store: whether it is whole, whether it is there already, and where its logs go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, SessionConflict, SessionNotFound
from perdure.model.definition import AgentDefinition
from perdure.model.transcript import Span
from perdure.protocols import ArchivedSession, Entry
from perdure.stores.format.rows import Stretch, Values, hash_of
from perdure.stores.moving import LENT, LogsAtHand, Rows, merged, name_of_log, own_name, split_name
from perdure.stores.renaming import OpenHead
from perdure.stores.tapes import TapeCache

# Beyond any log that could be moved. A position costs memory in some stores, so that a false one could cost all of it.
_LONGEST = 2**26


class Landing:
    """Where the logs of an archived session go in a store: onto those of sessions there, or into logs of its own."""

    def __init__(self, archived: ArchivedSession, here: LogsAtHand) -> None:
        self.archived = archived
        self.stretches = check(archived)
        self.links: dict[str, int | str] = {}
        self.own: dict[str, Rows] = {"": {}}
        """The logs to be written, by branch."""
        for name, rows in archived.logs.items():
            self.own[split_name(name)[1]] = rows
        for name in {str(name) for name, _, _ in self.stretches} - archived.logs.keys():
            log = self._linked(name, here)
            if log is not None:
                self.links[name] = log
            elif name in archived.lent:
                self.own[LENT + name] = archived.lent[name]
            else:
                raise SessionNotFound(split_name(name)[0])

    def _linked(self, name: str, here: LogsAtHand) -> int | str | None:
        owner, branch = split_name(name)
        if owner not in self.archived.owners:
            return None
        log = here.log_of(owner, branch, self.archived.owners[owner])
        return log if log is not None and self._is_the_same(name, log, here) else None

    def _is_the_same(self, name: str, log: int | str, here: LogsAtHand) -> bool:
        lent = self.archived.lent.get(name)
        for _, start, stop in self._stretches_of(name):
            if lent is None and not here.holds(log, start, stop):
                return False
            if lent is not None and not _says_the_same(
                here.rows(log, start, stop), {at: lent[at] for at in range(start, stop)}
            ):
                return False
        return True

    def _stretches_of(self, name: str) -> list[Stretch]:
        return [stretch for stretch in self.stretches if stretch[0] == name]

    def shown_of_others(self) -> list[Stretch]:
        """The stretches of other sessions' logs, by their keys here."""
        return [(self.links[str(name)], start, stop) for name, start, stop in self.stretches if name in self.links]

    def settled_stretches(self, key_of: Callable[[str], int | str]) -> list[Stretch]:
        """All stretches that the versions name, by their keys here; `key_of` gives that of a branch."""
        keys = self._keys(key_of)
        return [(keys[str(name)], start, stop) for name, start, stop in self.stretches]

    def _keys(self, key_of: Callable[[str], int | str]) -> dict[str, int | str]:
        own = {own_name(self.archived.session_id, branch): key_of(branch) for branch in self.own}
        return {**self.links, **own}

    def heads(self, key_of: Callable[[str], int | str]) -> Iterator[tuple[bytes, Values]]:
        """The versions over the logs of the store, each with the values that it names."""
        keys, values = self._keys(key_of), self.archived.values.__getitem__
        for version, raw in enumerate(self.archived.heads, 1):
            head = OpenHead(raw, self.archived.session_id, version, values)
            yield head.renamed(lambda name, start, stop: keys[str(name)])


def check(archived: ArchivedSession) -> list[Stretch]:
    """The stretches that an archived session names; InvalidData unless it is whole and what it says of itself."""
    try:
        return _check(archived)
    except CorruptRecord as error:
        raise InvalidData(error.position, error.reason) from None


def _check(archived: ArchivedSession) -> list[Stretch]:
    for key, raw in archived.values.items():
        if hash_of(raw) != key:
            raise InvalidData(f"$.values.{key}", "its hash does not match")
    for name in archived.logs:
        owner, branch = split_name(name)
        if owner != archived.session_id or branch.startswith(LENT):
            raise InvalidData(f"$.logs.{name}", "it is not a log of this session")
        _check_positions(f"$.logs.{name}", archived.logs[name])
        if max(archived.logs[name], default=-1) != len(archived.logs[name]) - 1:
            raise InvalidData(f"$.logs.{name}", "a message is missing from it")
    for name, rows in archived.lent.items():
        _check_positions(f"$.lent.{name}", rows)
    for name, (_, version) in archived.keys.items():
        if not 1 <= version <= len(archived.heads):
            raise InvalidData(f"$.keys.{name}", f"there is no version {version}")
    stretches = _read_heads(archived)
    for log, start, stop in stretches:
        _check_stretch(archived, str(log), start, stop)
    return stretches


def _check_positions(where: str, rows: Rows) -> None:
    if rows and not 0 <= min(rows) <= max(rows) < _LONGEST:
        raise InvalidData(where, f"no log has a message {max(rows)}")


def _read_heads(archived: ArchivedSession) -> list[Stretch]:
    """The stretches that the versions name, all of which can be read."""
    met: set[Stretch] = set()
    shelf, definitions, created = TapeCache(""), dict[str, AgentDefinition](), set()

    def span(name: int | str, start: int, stop: int) -> Span:
        met.add((name, start, stop))
        return shelf.span(name, start, stop)

    for version, raw in enumerate(archived.heads, 1):
        head = OpenHead(raw, archived.session_id, version, _value_in(archived))
        head.check(span, definitions)
        created.add(head.info.created_at)
    if len(created) != 1:
        raise InvalidData("$.heads", "a session has at least one version, and all of them the same time of creation")
    return merged(met)


def _check_stretch(archived: ArchivedSession, name: str, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= _LONGEST:
        raise InvalidData(f"$.logs.{name}", f"no log has messages {start} to {stop}")
    rows = archived.logs.get(name, archived.lent.get(name))
    if rows is None and split_name(name)[0] in archived.owners:
        return
    if rows is None or not all(at in rows for at in range(start, stop)):
        raise InvalidData(f"$.logs.{name}", f"messages {start} to {stop} are named by a version, and not there")


def _value_in(archived: ArchivedSession) -> Callable[[str], bytes]:
    def value_of(key: str) -> bytes:
        if key not in archived.values:
            raise InvalidData(f"$.values.{key}", "a version names it, and it is not there")
        return archived.values[key]

    return value_of


def is_same(archived: ArchivedSession, found: ArchivedSession) -> bool:
    """Whether two archives hold one session in one state. What one of them carries along, the other need not."""
    alike = ("session_id", "heads", "values", "entries", "inbox", "keys", "interrupted")
    if any(getattr(archived, field) != getattr(found, field) for field in alike):
        return False
    if archived.logs.keys() != found.logs.keys():
        return False
    common = archived.lent.keys() & found.lent.keys()
    pairs = [(archived.logs[name], found.logs[name]) for name in archived.logs]
    pairs += [(archived.lent[name], found.lent[name]) for name in common]
    return all(_says_the_same(one, other) for one, other in pairs)


def _says_the_same(one: Rows, other: Rows) -> bool:
    return one.keys() == other.keys() and all(
        # Earlier releases did not write redacted messages in canonical form, as an export does.
        body == other[at] or _canonical(body) == _canonical(other[at])
        for at, body in one.items()
    )


def _canonical(body: bytes) -> bytes:
    return codec.encode_message(codec.decode_message(body))


def require_same(archived: ArchivedSession, found: ArchivedSession) -> None:
    """Raise SessionConflict unless what is to be brought in is what is there."""
    if not is_same(archived, found):
        raise SessionConflict(
            archived.session_id,
            len(archived.heads),
            len(found.heads),
            f"Session {archived.session_id!r} is in this store already (version {len(found.heads)}), and it is not "
            f"the one to be brought in (version {len(archived.heads)}). Nothing was changed. Delete the one that is "
            "here, or bring the other into another store.",
        )


def run_stretches(archived: ArchivedSession) -> dict[str, tuple[str, int, int]]:
    """For each run on record the branch whose log holds its messages, and from where to where."""
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


def _branch_of(archived: ArchivedSession, first: Entry) -> str:
    """The branch that a run's first entry puts it on. One of a parallel group has its own, though it be empty yet."""
    is_of_group = isinstance(first.body, Mapping) and first.body.get("group")
    has_log = name_of_log(archived.session_id, str(first.run)) in archived.logs
    return str(first.run) if is_of_group or has_log else ""


def _places(rows: Rows) -> dict[str, int]:
    return {codec.decode_message(body).id: at for at, body in rows.items()}


def _messages_of(entry: Entry) -> list[str]:
    """The ids of the messages that an entry of a run names."""
    if not isinstance(entry.body, Mapping):
        return []
    made = [part.get("message") for part in _listed(entry.body.get("shown")) if isinstance(part, Mapping)]
    named = [entry.body.get("message"), *_listed(entry.body.get("messages")), *made]
    return [message["id"] for message in named if isinstance(message, Mapping) and isinstance(message.get("id"), str)]


def _listed(value: Any) -> Sequence[Any]:
    """A list, or nothing: an entry may be anybody's, and of any form."""
    return value if isinstance(value, list | tuple) else ()
