"""The page of one run: its steps, what the model was sent in each, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from perdure.errors import ConfigurationError, VersionForgotten
from perdure.loop.tokens import TokenEstimator
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionBudget, PendingCall
from perdure.model.ids import now
from perdure.model.loop_events import AgentStart
from perdure.model.message import Message
from perdure.model.record import LoopRecord
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.protocols import ToolSpec
from perdure.run_journal import HANDED_OVER
from perdure.server.call import Call
from perdure.server.pages.conversation import SaidBox, boxes_of
from perdure.server.pages.render import page
from perdure.server.pages.steps import Reader, Standing
from perdure.server.pages.texts import counted, indented, money, seconds, whole
from perdure.sessions.sent import Sent, sent_in
from perdure.sessions.sessions import Sessions

STEPS = 50
"""How many steps a page has."""
_MOST_SENT = 200
"""How many of the messages that were sent are shown: the last of them."""
_STATES = {"running": "running", "killed": "killed", "waiting": "waits for a decision", "left": "left to a worker"}


class RunQuery(msgspec.Struct, kw_only=True):
    step: int | None = None
    """The step of which all is shown: what was sent, and the raw record."""
    after: int = 0
    """How many steps to pass over."""


class ToolTold(msgspec.Struct, frozen=True):
    """A tool as a model is told of it."""

    name: str
    description: str
    parameters: str
    tokens: int


class SentTold(msgspec.Struct, frozen=True, kw_only=True):
    """What a model was sent, with the tokens of each part."""

    prompt: str = ""
    prompt_tokens: int = 0
    instructions: str = ""
    tools: tuple[ToolTold, ...] = ()
    tools_tokens: int = 0
    form: str = ""
    messages: tuple[tuple[SaidBox, int], ...] = ()
    """The messages, each with its tokens. Those of a result count for the message that has the call."""
    messages_tokens: int = 0
    earlier: int = 0
    """How many messages are not shown, since there are too many."""
    missing: str = ""
    """Why nothing is known of it."""

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.tools_tokens + self.messages_tokens

    @property
    def bars(self) -> list[tuple[str, float, float]]:
        """The parts as stretches of a bar that is 1000 wide: their kinds, where they begin, how wide they are."""
        parts = {"prompt": self.prompt_tokens, "tools": self.tools_tokens, "messages": self.messages_tokens}
        scale, x, bars = 1000 / (self.total or 1), 0.0, []
        for kind, tokens in parts.items():
            bars.append((kind, round(x, 1), round(tokens * scale, 1)))
            x += tokens * scale
        return bars


async def get_run(call: Call) -> Response:
    """Show a run."""
    sessions, asked = call.sessions, call.query
    info = await sessions.info(call.session_id)
    loop = await sessions.loop(info.id, call.path("run"))
    state, standing = await _standing(sessions, info, loop)
    reader = Reader(loop, standing, now())
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
        sent=None if step_id is None else await _sent(sessions, loop, step_id),
        kin=_kin(loop),
        start=_start_told(loop),
        first=first,
        earlier=None if first == 1 else max(0, first - 1 - STEPS),
        later=None if first - 1 + STEPS >= story.total else first - 1 + STEPS,
    )


def _first_of(asked: RunQuery) -> int:
    """Return the number of the page's first step; a step that is opened is on its page."""
    place = asked.after if asked.step is None or asked.step < 1 else (asked.step - 1) // STEPS * STEPS
    return max(0, place) + 1


async def _standing(sessions: Sessions, info: AgentSessionInfo, loop: LoopRecord) -> tuple[str, Standing]:
    """Return how a run stands, in a word, and what of it its steps need to know."""
    journal = sessions.journal
    handed_over = await _handed_over(sessions, loop)
    if loop.status.is_over or journal is None:
        return loop.status.value, Standing(is_over=True, handed_over=handed_over)
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
    """Return the places of those starts before which a worker has handed the run over. The run itself tells of none."""
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
        ("ended by", loop.stop_reason or ("–" if not loop.status.is_over else loop.status.value)),
    ]
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
    """Return the runs that belong to one: that it continues from, that continue from it, and its sibling branches."""
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
    """Return what the run's start says of it: when, for which key, from which version, with what metadata."""
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


async def _sent(sessions: Sessions, loop: LoopRecord, step_id: str) -> SentTold:
    try:
        found = await sent_in(sessions, loop, step_id)
    except VersionForgotten:
        return SentTold(missing="The version that this run set out from was forgotten, so it cannot be told any more.")
    if found is None:
        return SentTold(missing="The record does not tell from which version this run set out.")
    return await _told(sessions, loop, found)


async def _told(sessions: Sessions, loop: LoopRecord, found: Sent) -> SentTold:
    model = None if loop.config is None else loop.config.model
    estimate, execution = TokenEstimator(), found.state.execution
    tools = [*tools_here(sessions, found.definition), *_of_run(found)]
    sizes = await estimate.count_each(found.messages, model)
    earlier = max(0, len(found.messages) - _MOST_SENT)
    form = found.state.response_format or found.definition.output
    return SentTold(
        prompt=found.state.context.system_prompt,
        prompt_tokens=estimate.overhead(found.state.system_prompt, (), model),
        instructions=(execution.instructions or "") if execution is not None else "",
        tools=tuple(_tool_told(each, estimate, model) for each in tools),
        tools_tokens=estimate.overhead("", tools, model),
        form="" if form is None else indented(form),
        messages=_sized(found.messages[earlier:], sizes[earlier:]),
        messages_tokens=sum(sizes),
        earlier=earlier,
    )


def _sized(messages: Sequence[Message], sizes: Sequence[int]) -> tuple[tuple[SaidBox, int], ...]:
    boxes = {box.id: box for box in boxes_of(messages)}
    tokens: dict[str, int] = {}
    for message, size in zip(messages, sizes, strict=True):
        owner = message.id if message.id in boxes else next(reversed(tokens), None)
        if owner is not None:
            tokens[owner] = tokens.get(owner, 0) + size
    return tuple((box, tokens[box_id]) for box_id, box in boxes.items())


def _tool_told(tool: ToolSpec, estimate: TokenEstimator, model: str | None) -> ToolTold:
    return ToolTold(tool.name, tool.description, indented(tool.parameters), estimate.overhead("", [tool], model))


def tools_here(sessions: Sessions, definition: AgentDefinition) -> list[ToolSpec]:
    """Return the tools that an agent has in this process: which ones it was sent elsewhere is not on record."""
    try:
        found = sessions.loops.all_tools(definition, 0)
    except ConfigurationError:  # a capability or a toolset that only workers have
        return []
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in found]


def _of_run(found: Sent) -> list[ToolSpec]:
    execution = found.state.execution
    tools = execution.external_tools if execution is not None else ()
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools]
