"""`perdure chat`: a conversation in a terminal, or line by line through a pipe."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import click

from perdure.cli.chat_commands import COMMANDS, Desk, carry_out
from perdure.cli.chat_prompt import Prompt
from perdure.cli.chat_view import PlainView, TerminalView, View, described_in_full
from perdure.cli.errors import NAME_A_MODEL, WAITS, Failure, advised, to_decide, to_name_tool
from perdure.cli.hints import command
from perdure.cli.interrupted import needs_tools, subagents_of
from perdure.cli.options import settings_of, store_command
from perdure.cli.session_ids import LAST_USED, named
from perdure.cli.setup import agent_of, begun, continued, model_name, opened, use_model
from perdure.cli.short_ids import learn
from perdure.cli.talking import DENIED, anyway_option, refuse_graph, why_stopped
from perdure.cli.terminal import console, counted, line, note
from perdure.errors import ConfigurationError, PendingCallsChanged, PerdureError, SessionNotFound
from perdure.model.execution import PendingCall
from perdure.model.session import AgentSession
from perdure.model.stop import StopReason
from perdure.sessions.chat import Chat
from perdure.sessions.default_store import data_directory
from perdure.sessions.family_tree import killed_in
from perdure.sessions.reply import Reply
from perdure.sessions.sessions import Sessions

OFFLINE = "offline"
STOPPED = "Stopped. The session is kept, with what was said so far."


@store_command(agent=True)
@click.option("-s", "--session", "wanted", metavar="SESSION", help="Continue this session: its id, a part of it, or @.")
@click.option("-c", "--continue", "goes_on", is_flag=True, help="Continue the session that was used last.")
@anyway_option
def chat(ctx: click.Context, wanted: str | None, goes_on: bool, anyway: bool) -> None:
    """Talk to an agent, in a new session unless one is named.

    Ctrl-C stops an answer and keeps the session; Ctrl-D leaves; /help lists what else can be typed. In a pipe, every
    line is a message, and the answers are printed as plain text.
    """
    if wanted and goes_on:
        raise click.UsageError("Name a session with -s, or take the last one with -c, not both.")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    begins = not (wanted or goes_on)
    if begins and is_terminal:
        _offer_offline(ctx)
    with asyncio.Runner() as runner, _entered(runner, opened(ctx, begins=begins)) as sessions:
        handle = runner.run(_begun(ctx, sessions, wanted, goes_on, anyway))
        desk = Desk(sessions, handle, console())
        talk = (_TerminalTalk if is_terminal else _PipedTalk)(runner, desk, is_new=begins)
        try:
            talk.talk()
        finally:
            talk.leave()


@contextmanager
def _entered(runner: asyncio.Runner, sessions: Sessions) -> Iterator[Sessions]:
    runner.run(sessions.__aenter__())
    try:
        yield sessions
    finally:
        runner.run(sessions.__aexit__())


async def _begun(ctx: click.Context, sessions: Sessions, wanted: str | None, goes_on: bool, anyway: bool) -> Chat:
    if not wanted and not goes_on:
        return await begun(ctx, sessions)
    session_id = await named(sessions, LAST_USED if wanted is None else wanted)
    if not anyway:
        await refuse_graph(sessions, session_id)
    chat = await continued(ctx, sessions, session_id)
    await use_model(ctx, sessions, chat.id)
    return chat


def _offer_offline(ctx: click.Context) -> None:
    """Ask whether the built-in model should answer if no model is named. It is then stored with the session."""
    agent = agent_of(ctx)
    if model_name(ctx) is not None or (agent is not None and agent.model is not None):
        return
    note("No model is named. The model “offline” is built in: it needs no key, follows fixed rules, and does sums.")
    if not click.confirm("Begin a session with it?", default=True, err=True):
        raise ConfigurationError(f"No model is named. {NAME_A_MODEL}")
    settings_of(ctx).model = OFFLINE


class _Talk:
    """The common part of both ways to talk. Runs are shown, and pending calls are decided before a message is sent."""

    view: View

    def __init__(self, runner: asyncio.Runner, desk: Desk, *, is_new: bool) -> None:
        self._runner = runner
        self._desk = desk
        self._is_new = is_new

    def talk(self) -> None:
        raise NotImplementedError

    def tell(self, text: str) -> None:
        raise NotImplementedError

    def _session(self) -> AgentSession:
        return self._runner.run(self._desk.chat.session())

    def _pending(self) -> tuple[PendingCall, ...]:
        execution = self._session().state.execution
        return execution.pending_calls if execution is not None else ()

    def _watched(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a run, which is shown while it lasts. Ctrl-C stops it, and is raised after its end."""
        subscription = self._desk.chat.subscribe(self.view.hear)
        try:
            return self._runner.run(work)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            subscription.cancel()
            self.view.finish()

    def _recover(self) -> None:
        """Continue a run that was killed, if there is one, and say so."""
        sessions, session_id = self._desk.sessions, self._desk.chat.id
        if self._is_new or session_id not in self._runner.run(killed_in(sessions)):
            return
        self.tell("The last run of this session was killed. It is recovered from its record:")
        report = self._watched(sessions.recover(session_id))
        for error in report.errors:
            self.tell(f"It could not be recovered: {error.what}")
            subagents = self._runner.run(subagents_of(sessions, session_id))
            if (hint := to_name_tool(error, subagents, "chat", "-s", session_id)) is not None:
                self.tell(hint)
            self.tell(f"Or end it at that point: {command('cancel', session_id)}")
        if report.busy:
            self.tell("Somebody else is recovering it.")

    def _send(self, message: str) -> None:
        reply: Reply[Any] = self._watched(self._desk.chat.send(message, *self._desk.files))
        self._desk.files.clear()  # only after a success: if it failed, the files go with the next message
        stopped = STOPPED if reply.stop_reason is StopReason.USER_REQUESTED else why_stopped(reply)
        if stopped is not None:
            self.tell(stopped)

    def leave(self) -> None:
        """Print how to come back. A new session in which nothing has happened is erased."""
        chat = self._desk.chat
        try:
            if self._is_new and self._runner.run(chat.session()).version == 1:
                self._runner.run(self._desk.sessions.erase(chat.id))
                self.tell("Nothing was said, and nothing is kept.")
                return
        except SessionNotFound:
            return
        tools = self._runner.run(needs_tools(self._desk.sessions, chat.id))
        self._runner.run(learn(self._desk.sessions, [chat.id]))
        self.tell(f"To come back: {command('chat', '-s', chat.id, tools=tools)}")


class _PipedTalk(_Talk):
    """A conversation through a pipe: lines in, answers out. A call that needs approval ends it: nobody can be asked."""

    def __init__(self, runner: asyncio.Runner, desk: Desk, *, is_new: bool) -> None:
        super().__init__(runner, desk, is_new=is_new)
        self.view = PlainView(sys.stdout, sys.stderr)

    def talk(self) -> None:
        self._recover()
        self._require_decided()
        for typed in sys.stdin:
            if not typed.strip():
                continue
            if typed.startswith("/"):
                try:
                    self._runner.run(carry_out(self._desk, typed.strip()))
                except EOFError:
                    return
            else:
                self._send(typed.strip())
                self._require_decided()

    def tell(self, text: str) -> None:
        note(text)

    def _require_decided(self) -> None:
        pending = self._pending()
        if pending:
            wanted = ", ".join(map(described_in_full, pending))
            waits = f"The session waits for a person to allow {wanted}."
            raise Failure(f"{waits}\n{to_decide(self._desk.chat.id)}", WAITS)


class _TerminalTalk(_Talk):
    """A conversation in a terminal: a prompt, answers that are drawn as they come, and questions about calls."""

    def __init__(self, runner: asyncio.Runner, desk: Desk, *, is_new: bool) -> None:
        super().__init__(runner, desk, is_new=is_new)
        self.view = TerminalView(desk.console)
        colour = desk.console.color_system is not None and not desk.console.no_color
        self._prompt = Prompt(data_directory() / "chat_history", COMMANDS, colour=colour)

    def talk(self) -> None:
        self._greet()
        self._guarded(self._recover)
        self._guarded(self._decide)
        while (typed := self._prompt.read()) is not None:
            if not typed.strip():
                continue
            try:
                self._guarded(lambda said=typed: self._take(said))
            except EOFError:
                return

    def tell(self, text: str) -> None:
        self._desk.say(text, "dim")

    def _take(self, typed: str) -> None:
        if typed.startswith("/"):
            self._watched(carry_out(self._desk, typed.strip()))
            self._is_new = self._is_new and not typed.startswith("/fork")
        elif self._decide():
            self._send(typed)
            self._decide()

    def _guarded(self, step: Any) -> None:
        """Take a step. After an error, or Ctrl-C, print a message and continue the conversation."""
        try:
            step()
        except KeyboardInterrupt:
            self.tell(STOPPED)
        except PerdureError as error:
            self._desk.say(advised(error), "red")

    def _greet(self) -> None:
        session = self._session()
        self.tell(f"{session.info.agent_name} · {session.id} · /help lists commands, Ctrl-D leaves")
        said = session.state.messages
        if said:
            self.tell(f"{counted(len(said), 'message')} so far. The last: {line(said[-1].text, 200)}")

    def _decide(self) -> bool:
        """Ask about each call that waits. Return False if one was left open."""
        while pending := self._pending():
            call = pending[0]
            answer = self._prompt.ask(f"Allow {described_in_full(call)}? [y/n, or why not] ")
            if not answer:
                self.tell("It waits. Send anything to be asked again, or come back later.")
                return False
            try:
                self._carry(call, answer)
            except PendingCallsChanged:
                self.tell("It waits for something else by now.")
        return True

    def _carry(self, call: PendingCall, answer: str) -> None:
        """Decide about a call in the form that was shown."""
        if answer.lower() in ("y", "yes"):
            self._watched(self._desk.chat.approve([call]))
        else:
            reason = DENIED if answer.lower() in ("n", "no") else answer
            self._watched(self._desk.chat.deny(reason, [call]))
