"""The ten promises, each checked on a world that has settled. A broken one is a line that begins with its number."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable

from msgspec.structs import replace
from tests.pairs.bank import REPEATABLE
from tests.pairs.model import Made, words_in
from tests.pairs.world import World, pending_in

from perdure import AgentSession, LoopRecord, LoopStatus, SessionRecord, Usage
from perdure.archive import fsck
from perdure.model.session import SessionStatus

Promise = Callable[[World], AsyncIterator[str]]


async def broken_in(world: World) -> list[str]:
    """Return every promise that a world has broken, during the case or at its end."""
    found = list(world.model.broken)
    for promise in PROMISES:
        found += [line async for line in promise(world)]
    return [*dict.fromkeys(found)]


async def nothing_said_is_lost(world: World) -> AsyncIterator[str]:
    for session_id in (*world.model.said, *(world.model.heard.keys() - world.model.said.keys())):
        if session_id in world.model.erased | world.model.doubtful:
            continue
        if not await world.look.exists(session_id):
            yield f"1: session {session_id} is gone"
            continue
        history = {word for message in await world.face.history(session_id) for word in words_in(message.text)}
        lost = world.model.lasting(session_id) - history
        if lost and await world.waiting_in(session_id) and not await _is_active(world, session_id):
            continue  # it waits until somebody opens the session again
        if lost - world.model.said[session_id]:
            yield f"1: {session_id} has lost what was streamed: {sorted(lost)}"
        elif lost:
            yield f"1: {session_id} has lost {sorted(lost)}"


async def nothing_noted_is_lost(world: World) -> AsyncIterator[str]:
    for session_id, words in world.model.noted.items():
        if session_id not in world.model.erased | world.model.doubtful and await world.look.exists(session_id):
            told = {word for entry in await world.look.read(session_id) for word in words_in(str(entry.body))}
            lost = words - told - world.model.doubtful
            if lost:
                yield f"1: the record of {session_id} has lost {sorted(lost)}"


async def _is_active(world: World, session_id: str) -> bool:
    session = await world.look.load(session_id)
    return session is not None and session.status is SessionStatus.ACTIVE


async def no_completed_tool_repeats(world: World) -> AsyncIterator[str]:
    for made in world.model.made:
        if made.recorded:
            yield f"2: {made.tool} {made.call} was made though its result was on record"
    calls = Counter(
        (made.session, made.execution, made.call) for made in world.model.made if made.tool not in REPEATABLE
    )
    for (_, _, call), times in calls.items():
        if times > 1:
            yield f"2: call {call} was made {times} times"
    async for line in _no_request_repeats(world):
        yield line


async def _no_request_repeats(world: World) -> AsyncIterator[str]:
    """Another run may charge for a message again only if the first one has failed or was stopped."""
    runs: dict[str, list[Made]] = defaultdict(list)
    for made in world.model.made:
        if made.tool == "charge" and made.execution not in (each.execution for each in runs[made.arguments]):
            runs[made.arguments].append(made)
    for arguments, several in runs.items():
        for made in several[:-1]:
            loop = await _loop(world, made)
            if loop is not None and not _came_to_nothing(loop):
                yield f"2: charge {arguments} was made again, though its run is {loop.status.value}"


async def _loop(world: World, made: Made) -> LoopRecord | None:
    if not await world.look.exists(made.session):
        return None
    record = await world.face.record(made.session)
    return next((loop for loop in record.loops if loop.loop_id == made.execution), None)


def _came_to_nothing(loop: LoopRecord) -> bool:
    stopped = loop.status is LoopStatus.COMPLETED and loop.stop_reason not in (None, "completed")
    return stopped or loop.status in (LoopStatus.FAILED, LoopStatus.ABORTED, LoopStatus.REJECTED)


async def no_undecided_call_is_made(world: World) -> AsyncIterator[str]:
    for made in world.model.made:
        if made.tool == "pay" and not made.approved:
            yield f"3: pay {made.call} {made.arguments} was made in {made.session}, and nobody has approved it"


async def every_run_ends(world: World) -> AsyncIterator[str]:
    for session in await _all(world):
        waits = session.status is not SessionStatus.ACTIVE and bool(pending_in(session))
        execution = session.state.execution
        for loop in (await world.face.record(session.id)).loops:
            is_current = execution is not None and execution.execution_id == loop.loop_id
            if not loop.status.is_over and not (waits and is_current):
                yield f"5: {_kind(session)} has a loop that is {loop.status.value} for ever"
        if session.status is SessionStatus.SUSPENDED and not waits:
            yield f"5: {_kind(session)} is suspended with nothing to decide"
        if waits and session.info.spawn_ref and not await _parent_waits(world, session):
            yield "5: a sub-agent waits for a decision, and its caller does not"


async def _parent_waits(world: World, session: AgentSession) -> bool:
    assert session.info.spawn_ref is not None
    parent = await world.look.load(session.info.spawn_ref.parent_session_id)
    return parent is not None and bool(pending_in(parent))


def _kind(session: AgentSession) -> str:
    return "a sub-agent" if session.info.spawn_ref else session.id.partition("-")[0]


async def no_claim_is_left(world: World) -> AsyncIterator[str]:
    for session in await _all(world):
        if await world.look.is_claimed(session.id):
            yield f"6: {_kind(session)} is claimed"
        if await world.look.is_interrupted(session.id):
            yield f"6: {_kind(session)} is interrupted"
    if await world.look.lapsed():
        yield "6: claims have lapsed"


async def key_and_reply_agree(world: World) -> AsyncIterator[str]:
    for name, answers in world.model.answers.items():
        final = [answer for answer in answers if answer.is_final]
        shown = {(answer.version, answer.text) for answer in final if not _is_redacted(world, answer.text)}
        if len(shown) > 1 and not _is_redacted(world, " ".join(text for _, text in shown)):
            yield f"7: {name} was answered with {sorted(shown)}"
        first = next((place for place, answer in enumerate(answers) if answer.is_final), len(answers))
        if any(not answer.is_final for answer in answers[first:]):
            yield f"7: {name} was answered, and then with less"


def _is_redacted(world: World, text: str) -> bool:
    return "[redacted]" in text or bool(words_in(text) & world.model.redacted)


async def redacted_text_is_nowhere(world: World) -> AsyncIterator[str]:
    if not world.model.redacted:
        return
    places = {"the export": await _exported(world), "a timer": str(await world.look.timers())}
    for session in await _all(world):
        places[f"the history of {_kind(session)}"] = str(await world.face.history(session.id))
        places[f"the record of {_kind(session)}"] = await _recorded(world, session)
        places[f"a version of {_kind(session)}"] = await _shown_ever(world, session)
    for word in world.model.redacted:
        places["a search"] = str([hit.snippet for hit in await world.face.search(word)])
        for place, text in places.items():
            if word in words_in(text):
                yield f"8: redacted text is in {place}"


async def _recorded(world: World, session: AgentSession) -> str:
    loops = (await world.face.record(session.id)).loops
    return str([await world.face.loop(session.id, loop.loop_id) for loop in loops])


async def _shown_ever(world: World, session: AgentSession) -> str:
    kept = range(session.info.first_version, session.version + 1)
    versions = [await world.look.load(session.id, version) for version in kept]
    return str([version.state.messages for version in versions if version is not None])


async def _exported(world: World) -> str:
    file = io.BytesIO()
    await world.face.export(file)
    return file.getvalue().decode()


async def versions_load_and_nothing_is_damaged(world: World) -> AsyncIterator[str]:
    for session in await _all(world):
        for version in range(session.info.first_version, session.version + 1):
            loaded = await world.look.load(session.id, version)
            if loaded is None or loaded.version != version:
                yield f"9: version {version} of {_kind(session)} does not load"
    for problem in (await fsck(world.look)).problems:
        yield f"9: fsck: {problem.where}: {problem.what}"


async def what_was_spent_is_counted(world: World) -> AsyncIterator[str]:
    for session in await _all(world):
        record = await world.face.record(session.id)
        counted, spent = session.info.usage or Usage(), _saved_usage(record)
        if session.info.first_version > 1 and counted.total_tokens > spent.total_tokens:
            continue  # runs were forgotten, and their usage was not
        if counted != spent:
            yield f"10: {_kind(session)} counts {counted.total_tokens} tokens, and its record {spent.total_tokens}"


def _saved_usage(record: SessionRecord) -> Usage:
    """Return the usage of a record's loops, without those that made no version."""
    loops = tuple(loop for loop in record.loops if not _has_no_version(loop))
    return replace(record, loops=loops).total_usage()


def _has_no_version(loop: LoopRecord) -> bool:
    group, how = loop.parallel_group, loop.continuation_kind
    is_given_up = group is not None and group.selected_loop_id is None
    return is_given_up or (how.kind == "compaction" and loop.status is not LoopStatus.COMPLETED)


async def _all(world: World) -> list[AgentSession]:
    """Return the newest version of every session, hidden ones too."""
    infos = {info.id for status in SessionStatus for info in await world.look.list(status=status, limit=1000)}
    found = [await world.look.load(session_id) for session_id in sorted(infos)]
    return [session for session in found if session is not None]


PROMISES: tuple[Promise, ...] = (
    nothing_said_is_lost,
    nothing_noted_is_lost,
    no_completed_tool_repeats,
    no_undecided_call_is_made,
    every_run_ends,
    no_claim_is_left,
    key_and_reply_agree,
    redacted_text_is_nowhere,
    versions_load_and_nothing_is_damaged,
    what_was_spent_is_counted,
)
"""All but the fourth, that a request is valid: the model checks that one at each request."""
