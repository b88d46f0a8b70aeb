"""Every question that a store can be asked. Each is one read, made before the damage and after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from perdure.errors import CorruptRecord, InvalidSessionFile, PerdureError, SessionNotFound, StoreError
from perdure.model.session import SessionInfoList, SessionStatus
from perdure.model.transcript import LogRef
from perdure.protocols import RunProgress, SessionHeads
from perdure.runtime.runtime import SessionRuntime
from perdure.testing.rot.furnishing import FAR

TYPED = (CorruptRecord, InvalidSessionFile, StoreError)
"""The errors that say that something is damaged."""
Kind = Literal["plain", "list", "names", "queue", "heads", "lenient", "progress", "log", "notes", "check"]
Ask = Callable[[Any], Awaitable[Any]]
# The most that a list may be asked for: nothing is left for a second page.
FULL = 1_000


class Question(NamedTuple):
    """A read. Its kind tells what may be missing from the answer.

    From a `plain` answer nothing may be missing. From a `list` or `heads`, those that are named beside them as
    damaged. From a `lenient` answer, anything that cannot be loaded either: the verb is documented to leave it out.
    From `progress`, damaged pieces.
    """

    name: str
    ask: Ask
    kind: Kind = "plain"


class Failed(NamedTuple):
    """An error in place of an answer."""

    error: BaseException

    @property
    def is_typed(self) -> bool:
        return isinstance(self.error, TYPED)


Answers = dict[str, Any]


async def questions_of(
    store: Any, *, crowd: Collection[str] = (), orders: Sequence[str] = ("created", "updated")
) -> list[Question]:
    """Return the questions that a sound store can be asked. Sessions in the `crowd` are only loaded."""
    shown = (await store.list(limit=FULL)).all()
    hidden = (await store.list(status=SessionStatus.DELETED, limit=FULL)).all()
    ids = [info.id for info in (*shown, *hidden)]
    found = [*_of_lists(shown, orders), *_of_store(store, ids)]
    for info in (*shown, *hidden):
        if info.id in crowd:
            found.append(_question("load", info.id, lambda store, key: store.load(key)))
        else:
            found += await _of_session(store, info)
    return found


async def answers_of(store: Any, questions: Iterable[Question]) -> Answers:
    """Ask all questions, and return the answers. An error takes the place of an answer."""
    found: Answers = {}
    for question in questions:
        if (evict := getattr(store, "_forget_all", None)) is not None:
            evict()  # what is at hand would answer for what is damaged
        try:
            found[question.name] = await question.ask(store)
        except Exception as error:  # around a request: whatever damage brings about is an outcome
            found[question.name] = Failed(error)
    return found


def is_right(question: Question, right: Any, found: Any, has_reported: bool) -> bool:
    """Tell whether an answer is the same as before, or says that something is damaged.

    `has_reported` tells whether any session or version could not be loaded.
    """
    if isinstance(found, Failed):
        # A log of which no version is left belongs to nobody.
        is_lost = question.kind == "log" and isinstance(found.error, SessionNotFound)
        return found.is_typed or (is_lost and has_reported)
    match question.kind:
        case "list":
            return _is_list_right(right, found)
        case "heads":
            return all(found.get(key) == value or key in found.damaged for key, value in right.items()) and (
                found.keys() <= right.keys()
            )
        case "lenient":
            is_told = isinstance(found, Mapping) and found.keys() == right.keys()
            return bool(found == right) or ((has_reported or is_told) and _is_part(right, found))
        case "progress":
            return bool(found == right) or _is_part(right, found)
        # A check may find any problem. `Attack` runs it by itself.
        case "check":
            return True
        case _:
            return bool(found == right)


def _is_list_right(right: SessionInfoList, found: SessionInfoList) -> bool:
    expected = right.all()
    shown = [info for info in expected if info in found.all()]
    return [*found.all()] == shown and len(expected) - len(shown) <= len(found.damaged)


def _is_part(right: Any, found: Any) -> bool:
    if isinstance(right, Mapping):
        return all(key in right and (right[key] == value or _says_damage(value)) for key, value in found.items())
    if isinstance(right, Sequence):
        return all(item in right for item in found)
    if isinstance(right, RunProgress):
        return all(piece in right.sketches for piece in found.sketches)
    return False


def _says_damage(preview: Any) -> bool:
    return getattr(preview, "damage", None) is not None


def _question(verb: str, key: Any, ask: Callable[[Any, Any], Awaitable[Any]], kind: Kind = "plain") -> Question:
    return Question(f"{verb} {key}", lambda store: ask(store, key), kind)


def _of_lists(shown: Sequence[Any], orders: Sequence[str]) -> Iterator[Question]:
    owners = sorted({info.owner for info in shown if info.owner is not None})[:3]
    agents = sorted({info.agent_name for info in shown})[:3]
    tags = sorted({tag for info in shown for tag in info.tags})
    times = sorted(info.created_at for info in shown)
    parents = sorted({info.parent_id for info in shown if info.parent_id is not None})[:3]
    filters: list[dict[str, Any]] = [{}, {"top_level": True}, {"owner": None}]
    filters += [{"status": status} for status in SessionStatus]
    filters += [{"owner": owner} for owner in owners] + [{"agent": agent} for agent in agents]
    filters += [{"tag": tag} for tag in tags] + [{"parent": parent} for parent in parents]
    filters += [{"owner": owners[0], "agent": agents[0]}, {"owner": owners[0], "tag": tags[0]}]
    filters += [{"agent": agents[0], "tag": tags[0]}, {"owner": owners[1], "status": SessionStatus.SUSPENDED}]
    filters += [{"created_after": times[len(times) // 2]}, {"created_before": times[len(times) // 2]}]
    filters += [{"updated_after": times[len(times) // 2]}, {"updated_before": times[len(times) // 2]}]
    for asked in filters:
        for order in orders:
            yield _list({**asked, "order": order})
    yield _list({"id": shown[0].id})
    yield Question("pages", _all_pages, "names")


def _list(filters: dict[str, Any]) -> Question:
    return Question(f"list {filters}", lambda store: store.list(**filters, limit=FULL), "list")


async def _all_pages(store: Any) -> list[str]:
    """Return the ids of a list that is read page by page."""
    found: list[str] = []
    after: str | None = None
    while True:
        page = await store.list(limit=37, after=after)
        # Only ids are compared: damage beside a page has to be raised, or it would look like a missing session.
        for damage in page.damaged:
            raise damage
        found += [info.id for info in page]
        after = page.next
        if after is None:
            return found


def _of_store(store: Any, ids: Sequence[str]) -> Iterator[Question]:
    def verb(name: str, *given: Any, kind: Kind = "plain", **options: Any) -> Iterator[Question]:
        if hasattr(store, name):
            asked = ", ".join([*map(repr, given), *(f"{key}={value!r}" for key, value in options.items())])[:90]
            yield Question(f"{name}({asked})", lambda store: getattr(store, name)(*given, **options), kind)

    yield from verb("heads", ids, kind="heads")
    yield from verb("previews", ids, kind="lenient")
    for prefix in ("crowd-", "long", "talk"):
        yield from verb("ids_with_prefix", prefix, limit=FULL, kind="names")
    yield from verb("ids_with_prefix", "crowd", deleted=True, limit=FULL, kind="names")
    for suffix in ("hild", "alks"):
        yield from verb("ids_with_suffix", suffix, limit=FULL, kind="names")
    yield from verb("lapsed", kind="queue")
    yield from verb("running", kind="queue")
    yield from verb("erasures")
    for idle_only in (True, False):
        yield from verb("waiting", FULL, idle_only=idle_only, kind="queue")
    yield from verb("held", FULL, kind="queue")
    yield from verb("in_turn", FULL, kind="queue")
    yield from verb("timers", limit=FULL, kind="queue")
    yield from verb("due", FAR + 1, limit=FULL, kind="queue")
    yield from verb("tokens", kind="queue")
    for number in range(3):
        yield from verb("token", f"{number + 1:x}" * 64)
    for text in ("apple", "zebra3", "common", "word7", '"turn 3"', "ord*"):
        if hasattr(store, "search"):
            yield Question(f"search {text}", partial(_hits, text=text), "lenient")
    yield from verb("check", kind="check")


async def _hits(store: Any, text: str) -> list[Any]:
    """Return what a search finds, without the scores: those depend on what else is indexed."""
    return sorted((hit.session_id, hit.message_id, hit.snippet) for hit in await store.search(text, limit=500))


async def _of_session(store: Any, info: Any) -> list[Question]:
    key, found = info.id, list[Question]()

    def verb(name: str, *given: Any, kind: Kind = "plain", **options: Any) -> None:
        if hasattr(store, name):
            asked = ", ".join([*map(repr, given), *(f"{each}={value!r}" for each, value in options.items())])
            ask: Ask = lambda store: getattr(store, name)(key, *given, **options)  # noqa: E731  # it is kept in a list
            found.append(Question(f"{name} {key} {asked}", ask, kind))

    verb("load")
    verb("exists")
    versions = range(info.first_version, info.version + 1)
    # Of a long history two versions at the beginning and a few of the second half: each is a read of its own in every
    # round.
    for version in versions if len(versions) < 8 else (*versions[:2], *versions[len(versions) // 2 :: 9]):
        verb("load", version)
    verb("load", info.version + 1)
    verb("versions", limit=200, kind="lenient")
    for options in ({}, {"last": 3}, {"after": 1, "limit": 3}, {"inbox": True}):
        verb("read", **options)
    for name in ("log_of", "line_of", "is_claimed", "is_interrupted"):
        verb(name)
    verb("kept_of_log", kind="notes")
    # A run whose row is lost is left out; reading the record says so.
    verb("runs", kind="lenient")
    verb("branches", kind="lenient")
    verb("progress", kind="progress")
    verb("timers", limit=FULL, kind="queue")
    verb("adoptions", info.version)
    for name in ("first", "key-3", "nobody's"):
        verb("find_key", name)
    # A session that is running cannot be dumped.
    if await store.is_claimed(key) is False:
        verb("dump", kind="notes")
        verb("dump", kind="notes", alone=True)
    found += await _of_log(store, key)
    found += await _of_record(store, key)
    return found


async def _of_log(store: Any, key: str) -> list[Question]:
    log, end = await store.log_of(key)
    found = [Question(f"messages {key}", lambda store: _messages(store, log, end), "log")]
    session = await store.load(key)
    said = [*session.state.messages]
    if hasattr(store, "find_message") and said:
        for message in (said[0], said[-1]):
            name = f"find_message {key} {message.id}"
            found.append(Question(name, partial(_found, message_id=message.id), "lenient"))
    hashes = sorted({part.hash for message in said for part in message.parts if getattr(part, "hash", None)})
    if hashes and hasattr(store, "attachments"):
        found.append(Question(f"attachments {key}", lambda store: store.attachments(key, hashes)))
    return found


async def _messages(store: Any, log: LogRef, end: int) -> Any:
    return await store.messages(log, 0, end)


async def _of_record(store: Any, key: str) -> list[Question]:
    """Return the questions about a record that is read as loops and events."""
    runs = await store.runs(key)
    found = [
        Question(f"record {key}", lambda store: SessionRuntime(store).record(key), "lenient"),
        Question(f"events {key}", lambda store: _events(store, key)),
    ]
    for run in (*runs[:1], *runs[-1:]):
        loop = run.loop_id
        found += [
            Question(f"loop {key} {loop}", partial(_loop, key=key, loop=loop)),
            Question(f"read {key} {loop}", partial(_entries, key=key, loop=loop), "lenient"),
            Question(f"runs {key} {loop}", partial(_runs, key=key, loop=loop), "lenient"),
        ]
    kept = []
    for question in found:  # a record that was not written by a loop may not be one
        try:
            await question.ask(store)
            kept.append(question)
        except PerdureError:
            continue
    return kept


async def _loop(store: Any, key: str, loop: str) -> Any:
    return await SessionRuntime(store).loop(key, loop)


async def _entries(store: Any, key: str, loop: str) -> Any:
    return await store.read(key, run=loop)


async def _runs(store: Any, key: str, loop: str) -> Any:
    return await store.runs(key, run=loop)


async def _found(store: Any, message_id: str) -> Any:
    return await store.find_message(message_id)


async def _events(store: Any, key: str) -> list[Any]:
    return [event async for event in SessionRuntime(store).events(key)]


def is_loaded(question: str) -> bool:
    """Tell whether a question is one that shows a damaged session or message."""
    return question.startswith(("load ", "messages ", "dump ", "read ", "heads", "timers"))


__all__ = ["Answers", "Failed", "Question", "SessionHeads", "answers_of", "is_loaded", "is_right", "questions_of"]
