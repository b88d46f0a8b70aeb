"""The page of one run: its steps, what the model was sent in each, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from perdure.model.execution import ExecutionBudget, PendingCall
from perdure.model.ids import now
from perdure.model.loop_events import AgentStart
from perdure.model.record import LoopRecord
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.run_journal import HANDED_OVER
from perdure.server.call import Call
from perdure.server.pages.conversation import boxes_of
from perdure.server.pages.model_call import what_was_sent
from perdure.server.pages.render import page
from perdure.server.pages.run_list import standing_of
from perdure.server.pages.steps import Reader, Standing
from perdure.server.pages.texts import counted, indented, money, seconds, whole
from perdure.sessions.sessions import Sessions

STEPS = 50
"""The number of steps on a page."""
_STATES = {"running": "running", "killed": "killed", "waiting": "waits for a decision", "left": "left to a worker"}


class RunQuery(msgspec.Struct, kw_only=True):
    step: int | None = None
    """The step that is shown in full: what was sent, and the raw record."""
    after: int = 0
    """The number of steps to skip."""


async def get_run(call: Call) -> Response:
    """Show a run."""
    sessions, asked = call.sessions, call.query
    info = await sessions.info(call.session_id)
    loop = await sessions.loop(info.id, call.path("run"))
    state, standing = await _standing(sessions, info, loop)
    reader = Reader(loop, standing, now() if standing.is_running or not loop.events else loop.events[-1].at)
    first = _first_of(asked)
    story = reader.story(first, STEPS, asked.step)
    step_id = None if asked.step is None else reader.step_id(asked.step)
    head = (await sessions.versions(info.id, limit=1))[0]
    return page(
        call,
        "run.html",
        info=info,
        run=loop,
        name=loop.loop_id[-6:],
        state=state,
        state_words=_STATES.get(state, state),
        facts=_facts(loop),
        budget=_budget(head.definition.budget, loop, len(story.steps) if story.total <= STEPS else story.total),
        asked=boxes_of(story.asked),
        story=story,
        opened=asked.step,
        sent=None if step_id is None else await what_was_sent(sessions, loop, step_id),
        kin=_kin(loop),
        start=_start_told(loop),
        first=first,
        earlier=None if first == 1 else max(0, first - 1 - STEPS),
        later=None if first - 1 + STEPS >= story.total else first - 1 + STEPS,
    )


def _first_of(asked: RunQuery) -> int:
    """Return the number of the page's first step. A step that is opened decides the page."""
    place = asked.after if asked.step is None or asked.step < 1 else (asked.step - 1) // STEPS * STEPS
    return max(0, place) + 1


async def _standing(sessions: Sessions, info: AgentSessionInfo, loop: LoopRecord) -> tuple[str, Standing]:
    """Return the state of a run in a word, and the facts about it that its steps need."""
    journal = sessions.journal
    handed_over = await _handed_over(sessions, loop)
    if loop.status.is_over or journal is None:
        return standing_of(loop), Standing(is_over=True, handed_over=handed_over)
    if await journal.is_claimed(info.id):
        return "running", Standing(is_over=False, handed_over=handed_over, is_running=True)
    if await journal.is_interrupted(info.id):
        last = await journal.read(info.id, last=1)
        state = "left" if last and last[0].kind == HANDED_OVER else "killed"
        return state, Standing(is_over=False, handed_over=handed_over)
    waiting = await _waiting(sessions, info, loop)
    state = "waiting" if waiting else loop.status.value
    return state, Standing(is_over=False, waiting=waiting, handed_over=handed_over)


async def _waiting(sessions: Sessions, info: AgentSessionInfo, loop: LoopRecord) -> frozenset[str]:
    if info.status is not SessionStatus.SUSPENDED:
        return frozenset()
    execution = (await sessions.session(info.id)).state.execution
    is_its_own = execution is not None and execution.execution_id == loop.loop_id
    calls: Sequence[PendingCall] = execution.pending_calls if execution is not None and is_its_own else ()
    return frozenset(call.id for call in calls)


async def _handed_over(sessions: Sessions, loop: LoopRecord) -> frozenset[int]:
    """Return the places of the starts before which a worker has handed the run over. The run's events do not tell."""
    journal, found = sessions.journal, set()
    for before, event in zip(loop.events, loop.events[1:], strict=False):
        if not isinstance(event, AgentStart) or event.cursor is None or before.cursor is None or journal is None:
            continue
        between = await journal.read(loop.session_id, after=before.cursor, limit=event.cursor - before.cursor)
        if any(entry.kind == HANDED_OVER for entry in between):
            found.add(event.cursor)
    return frozenset(found)


def _facts(loop: LoopRecord) -> list[tuple[str, str]]:
    usage, config = loop.usage, loop.config
    facts = [
        ("model", "–" if config is None else config.model),
        ("took", seconds(loop.duration)),
        ("waited or lay dead", seconds(loop.idle) if loop.idle else "–"),
        ("tokens", f"{whole(usage.input_tokens)} in, {whole(usage.output_tokens)} out"),
        ("cost", money(usage)),
        ("ended by", (loop.stop_reason or (loop.status.value if loop.status.is_over else "–")).replace("_", " ")),
    ]
    if loop.redactions:
        facts.append(("redacted", ", ".join(f"{name} {count}" for name, count in loop.redactions.items())))
    return facts if loop.idle else [fact for fact in facts if fact[0] != "waited or lay dead"]


def _budget(budget: ExecutionBudget, loop: LoopRecord, steps: int) -> list[tuple[str, str, float]]:
    """Return the agent's limits as it has them now: each with what the run has spent of it, as text and as a share."""
    cost, tokens = loop.usage.cost, loop.usage.total_tokens
    took = loop.duration or 0.0
    limits = (
        ("steps", budget.max_steps, steps, whole(steps), budget.max_steps and whole(budget.max_steps)),
        ("tokens", budget.max_tokens, tokens, whole(tokens), budget.max_tokens and whole(budget.max_tokens)),
        ("time", budget.max_seconds, took, seconds(took), seconds(budget.max_seconds)),
        ("cost", budget.max_cost, cost, money(loop.usage), f"${budget.max_cost or 0:,.2f}"),
    )
    return [
        (name, f"{spent} of {most}", round(min(100.0, 100 * used / limit), 1) if limit else 100.0)
        for name, limit, used, spent, most in limits
        if limit is not None
    ]


def _kin(loop: LoopRecord) -> dict[str, Any]:
    """Return the relatives of a run: the one it continues from, those that continue from it, and sibling branches."""
    group = loop.parallel_group
    branches = [] if group is None else [(each, each == group.selected_loop_id) for each in group.all_loop_ids]
    return {
        "kind": loop.continuation_kind.kind,
        "parent": loop.parent_loop_id,
        "next": loop.children_loop_ids,
        "branches": branches if len(branches) > 1 else [],
        "judged": "" if group is None or not group.evaluation_usage.total_tokens else money(group.evaluation_usage),
    }


def _start_told(loop: LoopRecord) -> dict[str, Any]:
    """Return the facts of the run's start, such as its time, its key, its version and its metadata."""
    starts = [event for event in loop.events if isinstance(event, AgentStart)]
    first = starts[0] if starts else AgentStart()
    config = None if loop.config is None else {k: v for k, v in loop.config.to_dict().items() if v is not None}
    return {
        "at": loop.started_at,
        "ended": loop.ended_at,
        "key": None if first.key is None else first.key[0],
        "version": first.base_version,
        "tries": counted(len(starts), "start"),
        "resumed": len(starts) > 1,
        "metadata": indented(loop.metadata) if loop.metadata else "",
        "config": "" if config is None else indented(config),
        "events": whole(len(loop.events)),
    }
