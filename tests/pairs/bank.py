"""The tools of a world, and the ledger outside of it that records each of their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from tests.pairs.model import Model

from perdure import AgentDefinition, tool
from perdure.protocols import ToolContext

TELLER = AgentDefinition("teller", tools=("note", "charge", "pay", "lookup", "clerk"))
CLERK = AgentDefinition("clerk", description="Pays.", tools=("pay", "lookup"))
REPEATABLE = ("lookup",)


class Surroundings(Protocol):
    """The parts of a world that a bank needs. `look` is a store that is read behind the process's back."""

    model: Model
    look: Any
    limit: int


class Bank:
    """The tools of one process."""

    def __init__(self, world: Surroundings, require_alive: Callable[[], None]) -> None:
        self._world = world
        self._require_alive = require_alive

    def tools(self, *, in_thread: bool = True) -> list[Any]:
        """Return them. `note` is a plain function, unless a thread could make a case play differently each time."""

        def note(about: str, context: ToolContext) -> str:
            """Write something down."""
            self._require_alive()
            self._enter("note", {"about": about}, context, recorded=False)
            return f"noted {about}"

        async def note_here(about: str, context: ToolContext) -> str:
            """Write something down."""
            return note(about, context)

        @tool
        async def charge(about: str, amount: int, context: ToolContext) -> str:
            return await self._made("charge", {"about": about, "amount": amount}, context)

        @tool(needs_approval=lambda arguments: arguments["amount"] > self._world.limit)
        async def pay(about: str, amount: int, context: ToolContext) -> str:
            is_asked_for = self._world.limit == 0 or await self._is_waiting(context)
            return await self._made("pay", {"about": about, "amount": amount}, context, is_asked_for)

        @tool(idempotent=True)
        async def lookup(about: str, context: ToolContext) -> str:
            return await self._made("lookup", {"about": about}, context)

        plain = tool(note) if in_thread else tool(name="note")(note_here)
        return [plain, charge, pay, lookup]

    async def _made(
        self, name: str, arguments: dict[str, Any], context: ToolContext, is_asked_for: bool = False
    ) -> str:
        self._require_alive()
        recorded = await self._is_recorded(context)
        self._require_alive()
        self._enter(name, arguments, context, recorded=recorded, is_asked_for=is_asked_for)
        await asyncio.sleep(0)
        self._require_alive()
        return f"done: {name} {arguments['about']}"

    async def _is_waiting(self, context: ToolContext) -> bool:
        """Return True if a call waits for a person in the version from which its run began."""
        session = await self._world.look.load(context.session_id)
        execution = session.state.execution if session else None
        return execution is not None and context.call_id in {call.id for call in execution.pending_calls}

    async def _is_recorded(self, context: ToolContext) -> bool:
        """Return True if the result of a call is on record already."""
        entries = await self._world.look.read(context.session_id, run=context.execution_id)
        ended = [entry for entry in entries if entry.kind == "tool_execution_end"]
        return any(f'"{context.call_id}"' in msgspec.json.encode(entry.body).decode() for entry in ended)

    def _enter(
        self,
        name: str,
        arguments: dict[str, Any],
        context: ToolContext,
        *,
        recorded: bool,
        is_asked_for: bool = False,
    ) -> None:
        written = canonical(arguments)
        session = str(context.session_id)
        self._world.model.note(
            "made",
            tool=name,
            session=session,
            execution=context.execution_id,
            call=context.call_id,
            arguments=written,
            recorded=recorded,
            approved=not is_asked_for or self._world.model.may_pay(session, context.call_id, written),
        )


def canonical(arguments: Any) -> str:
    """Return arguments as one text, whatever their order."""
    return msgspec.json.encode(dict(arguments), order="sorted").decode()
