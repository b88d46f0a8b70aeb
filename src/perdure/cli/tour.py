"""`perdure tour`: a real session shows what sessions can do, without a key and in well under a minute."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import click

import perdure
from perdure.actions.parallel import SendParallel
from perdure.cli.hints import program
from perdure.cli.tour_agent import CASHIER, ORDERS, TAKE_THE_MONEY, tools_of
from perdure.cli.tour_stage import Stage
from perdure.loop.strategies import FewestTokens
from perdure.model.definition import AgentDefinition
from perdure.model.loop_events import ToolExecutionStart
from perdure.sessions.chat import Chat
from perdure.sessions.family_tree import tree_of
from perdure.sessions.sessions import Sessions

BY_HEAD = AgentDefinition(CASHIER.name, system_prompt="Work it out in your head.", tools=())
WITH_TOOLS = AgentDefinition(CASHIER.name, system_prompt="Use your tools.")

PATIENCE = 30.0
"""The most seconds until the process that will be killed has come that far."""


@click.command()
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path))
def tour(directory: Path | None) -> None:
    """See a session talk, be killed, recover, fork and shrink.

    It needs no key and no network, and touches no store but its own, which it leaves in DIRECTORY for you to look
    around in: in a new temporary one, unless you name it.
    """
    place = directory or Path(tempfile.mkdtemp(prefix="perdure-tour-"))
    if (place / "sessions.db").exists():
        raise click.UsageError(f"There is a tour in {place} already. Name another directory, or none.")
    place.mkdir(parents=True, exist_ok=True)
    asyncio.run(Tour(place.resolve()).run())


class Tour:
    """One tour. Every line that it prints is the result of a real call."""

    def __init__(self, place: Path) -> None:
        self._url = f"sqlite:///{quote(str(place / 'sessions.db'))}"
        self._ledger = place / "ledger.txt"
        self._stage = Stage()

    async def run(self) -> None:
        self._stage.open(self._url)
        async with perdure.connect(self._url, model="offline", tools=tools_of(self._ledger, pause=0.2)) as sessions:
            chat = await sessions.open(agent=CASHIER)
            await self.talk(chat)
            await self.kill(chat)
            await self.recover(chat)
            left, right = await self.fork(chat)
            await self.evaluate(sessions, chat)
            await self.compact(chat)
            await self.draw(sessions, chat, left, right)
        self._stage.close(program(), self._url, chat.id, left.id, right.id)

    async def talk(self, chat: Chat) -> None:
        self._stage.scene("An agent talks", "answers stream; tool calls show as they run")
        with self._stage.watching(chat):
            for message in ("Hello! My name is Ada.", "What is 12.5 * 4?", "What is my name?"):
                self._stage.user(message)
                await chat.send(message)

    async def kill(self, chat: Chat) -> None:
        """Let a second process charge three cards, and kill it while it charges the second."""
        self._stage.scene("It is killed", "SIGKILL, in the middle of a tool that must not run twice")
        version = (await chat.session()).version
        self._stage.user(TAKE_THE_MONEY)
        async with _process("perdure.cli.tour_agent", self._url, self._ledger, chat.id, TAKE_THE_MONEY) as process:
            async with asyncio.timeout(PATIENCE):
                await self._second_charge(chat)
            process.send_signal(signal.SIGKILL)
            code = await process.wait()
        self._stage.fact(f"process {process.pid} ended with {signal.Signals(-code).name}")
        after = (await chat.session()).version
        self._stage.fact(f"the session was at version {version} before the run, and is at version {after} now")
        self._stage.ledger(self._ledger)

    async def _second_charge(self, chat: Chat) -> None:
        """Wait until the other process's run is inside its second charge. The run is followed by its record."""
        customers: list[str] = []
        async with aclosing(chat.events(follow=True)) as events:  # type: ignore[type-var]  # it is a generator, told as an iterator
            async for event in events:
                if isinstance(event, ToolExecutionStart) and event.call.name == "charge":
                    self._stage.heard(event)
                    customers.append(event.call.arguments["customer"])
                if len(customers) == 2:
                    break
        # The start of a call is on record before the tool runs, so only the ledger tells that it has begun. A file
        # cannot be awaited: hence the noqa.
        while f"{customers[1]} {ORDERS[1][1]} begun" not in self._ledger.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def recover(self, chat: Chat) -> None:
        self._stage.scene(
            "It recovers", "from the record: no completed tool runs again, an unknown one is not repeated"
        )
        with self._stage.watching(chat):
            await chat.recover()
        self._stage.fact(f"the session is at version {(await chat.session()).version}")
        self._stage.ledger(self._ledger)

    async def fork(self, chat: Chat) -> tuple[Chat, Chat]:
        self._stage.scene("It is forked", "two branches from one past; nothing is copied")
        left, right = await chat.fork(), await chat.fork()
        for branch, message in ((left, "My favourite colour is teal."), (right, "What is 30 * 2?")):
            with self._stage.watching(branch):
                self._stage.user(message)
                await branch.send(message)
        return left, right

    async def evaluate(self, sessions: Sessions, chat: Chat) -> None:
        self._stage.scene("It is evaluated in parallel", "one question, two configurations; the cheaper answer is kept")
        self._stage.user("What is 19 * 21?")
        configs = [WITH_TOOLS, BY_HEAD]
        question = SendParallel("What is 19 * 21?", sessions.loops, configs=configs, strategy=FewestTokens())
        await sessions.execute(chat.id, question)
        group = (await chat.record()).loops[-1].parallel_group
        loops = [await sessions.loop(chat.id, loop_id) for loop_id in group.all_loop_ids] if group else []
        self._stage.branches([config.system_prompt for config in configs], loops)

    async def compact(self, chat: Chat) -> None:
        self._stage.scene("It is compacted, and uncompacted", "an overlay: what was said stays")
        said = len(await chat.history())
        self._stage.shown("before", await chat.length(), said)
        await chat.compact(keep_last=4, compact_strategy="llm")
        self._stage.shown("compacted", await chat.length(), len(await chat.history()))
        self._stage.summary((await chat.session()).state.messages[0].text)
        await chat.uncompact()
        self._stage.shown("uncompacted", await chat.length(), len(await chat.history()))

    async def draw(self, sessions: Sessions, chat: Chat, left: Chat, right: Chat) -> None:
        self._stage.scene("All of it is on record", "the runs, where the branches part, and what it cost")
        named = (("the session", chat), ("left branch", left), ("right branch", right))
        records = [(title, await each.record()) for title, each in named]
        self._stage.tree(await tree_of(sessions, chat.id, limit=50))
        self._stage.diff(await left.diff(right), left.id, right.id)
        self._stage.costs(records)


@asynccontextmanager
async def _process(module: str, *arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *map(str, arguments))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
