"""The commands that can be typed in a chat: `/fork`, `/undo` and the like."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from perdure.actions.definition import ChangeModel, ChangeSystemPrompt
from perdure.cli.changing import NOTHING_TO_DO, compacted, uncompacted
from perdure.cli.chat_view import described
from perdure.cli.hints import command as hint
from perdure.cli.looking import nothing_found
from perdure.cli.short_ids import learn
from perdure.cli.terminal import counted, line, safe
from perdure.cli.tree import print_tree
from perdure.errors import InvalidData
from perdure.model.message import Media, Message
from perdure.sessions.attaching import attach
from perdure.sessions.chat import Chat
from perdure.sessions.family_tree import tree_of
from perdure.sessions.sessions import Sessions

if TYPE_CHECKING:
    from rich.console import Console

_RUNS, _MESSAGES = 50, 200


@dataclass
class Desk:
    """The session that a chat works on. A command may replace it with another one."""

    sessions: Sessions
    chat: Chat
    console: Console
    files: list[Media] = field(default_factory=list)
    """The images and files that go with the next message."""

    def say(self, text: str, style: str = "") -> None:
        # Only the terminal may wrap it, since a command with a line break in it could not be copied.
        self.console.print(Text(safe(text), style=style), soft_wrap=True)


class Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[Desk, str], Awaitable[None]]


async def carry_out(desk: Desk, typed: str) -> None:
    """Carry out a line that begins with a slash. If the command is unknown, print the list of commands."""
    name, _, argument = typed.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        desk.say(f"{line(name, 40)} is not a command. The commands are:", "yellow")
        await _help(desk, "")
        return
    await command.run(desk, argument.strip())


async def _help(desk: Desk, _: str) -> None:
    for command in COMMANDS.values():
        desk.console.print(Text.assemble((f"  {command.usage:<16}", "cyan"), command.help))
    desk.say("  A line that ends with \\ continues. Ctrl-C stops a run; Ctrl-D leaves.", "dim")


async def _fork(desk: Desk, _: str) -> None:
    origin = desk.chat.id
    desk.chat = await desk.chat.fork()
    desk.say(f"Forked: you are in {desk.chat.id} now; {origin} stays as it is.", "dim")


async def _attach(desk: Desk, source: str) -> None:
    if source:
        # In a thread, since reading a large file would stop the screen.
        desk.files.append(await asyncio.to_thread(lambda: attach(os.path.expanduser(source))))
    for each in desk.files:
        desk.say(f"With your next message: {each.label}", "dim")
    if not desk.files:
        desk.say("Nothing is attached: /attach FILE", "dim")


async def _undo(desk: Desk, _: str) -> None:
    _show_length(desk, "Undone", await desk.chat.undo())


async def _compact(desk: Desk, argument: str) -> None:
    if argument and not argument.isdecimal():
        raise InvalidData("/compact", f"how many messages to keep is a number, not {argument!r}")
    options = {"keep_last": int(argument)} if argument else {}
    done = await compacted(desk.sessions, desk.chat.id, **options)
    if done.by is None:
        desk.say(NOTHING_TO_DO, "dim")
    else:
        _show_length(desk, "Compacted", done.shown, done.how)


async def _uncompact(desk: Desk, _: str) -> None:
    done = await uncompacted(desk.sessions, desk.chat.id)
    _show_length(desk, "Uncompacted", done.shown, done.how)


def _show_length(desk: Desk, done: str, length: int, how: str = "") -> None:
    desk.say(f"{done}: the model is shown {counted(length, 'message')}{how}.", "dim")


async def _tree(desk: Desk, _: str) -> None:
    root = await tree_of(desk.sessions, desk.chat.id, limit=_RUNS)
    await learn(desk.sessions, root.session_ids())
    print_tree(root)


async def _model(desk: Desk, name: str) -> None:
    if name:
        await desk.sessions.execute(desk.chat.id, ChangeModel(name))
    session = await desk.chat.session()
    model = desk.sessions.loops.named_model(session.definition, session.state)
    desk.say("No model is named: /model NAME" if model is None else f"The model is {model.name}.", "dim")


async def _system(desk: Desk, text: str) -> None:
    if text:
        await desk.sessions.execute(desk.chat.id, ChangeSystemPrompt(text))
    prompt = (await desk.chat.session()).state.context.system_prompt
    desk.say(f"The system prompt is: {prompt}" if prompt else "The session has no system prompt.", "dim")


async def _history(desk: Desk, _: str) -> None:
    said = await desk.chat.history()
    if len(said) > _MESSAGES:
        desk.say(f"… {len(said) - _MESSAGES} older ones: {hint('show', desk.chat.id, '--all')}", "dim")
    for message in said[-_MESSAGES:]:
        show_message(desk, message)


def show_message(desk: Desk, message: Message) -> None:
    if message.is_sealed:
        return
    lines = [message.text] if message.text else []  # results of tools included
    lines += [f"[{part.label}]" for part in message.parts if isinstance(part, Media)]
    lines += [described(call) for call in message.tool_calls]
    desk.console.print(Text.assemble((f"{message.role}: ", "bold"), safe("\n".join(lines))))


async def _search(desk: Desk, text: str) -> None:
    if not text:
        raise InvalidData("/search", "say what to look for: /search WORDS")
    hits = await desk.chat.search(text)
    for hit in hits:
        desk.console.print(Text.assemble((f"{hit.role}: ", "bold"), line(hit.snippet)))
    if not hits:
        desk.say(await nothing_found(desk.sessions, desk.chat.id, text), "dim")


async def _quit(desk: Desk, _: str) -> None:
    raise EOFError  # the same way out as Ctrl-D


COMMANDS = {
    "/fork": Command("/fork", "continue in a new session that begins here", _fork),
    "/attach": Command("/attach [FILE]", "send an image or a file along with the next message", _attach),
    "/undo": Command("/undo", "take back the last change of what the model is shown", _undo),
    "/compact": Command("/compact [KEEP]", "show the model less of what is older", _compact),
    "/uncompact": Command("/uncompact", "show again what the last compaction covers", _uncompact),
    "/tree": Command("/tree", "the runs of this session", _tree),
    "/model": Command("/model [NAME]", "which model answers; with a name, another one from now on", _model),
    "/system": Command("/system [TEXT]", "the system prompt; with a text, another one from now on", _system),
    "/history": Command("/history", "all that was said, whatever the model is shown of it", _history),
    "/search": Command("/search WORDS", "find messages of this session", _search),
    "/help": Command("/help", "this list", _help),
    "/quit": Command("/quit", "leave; the session stays", _quit),
}
