"""Commands that run an agent, or reach one that runs."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from perdure.cli.errors import FAILED, NOT_ALLOWED, WAITS, Failure, to_decide, to_make_context, to_name_tool
from perdure.cli.hints import command
from perdure.cli.interrupted import subagents_of
from perdure.cli.options import later_option, session_argument, settings_of, store_command
from perdure.cli.session_ids import named, named_with_words, on_session
from perdure.cli.setup import begun, continued, on_sessions, use_model, use_model_in_run
from perdure.cli.short_ids import learn, shown
from perdure.cli.terminal import at_time, is_terminal, line, note, print_json, print_length, progress, safe, say
from perdure.errors import InvalidData, PendingCallsChanged
from perdure.protocols import check_key, check_priority
from perdure.sessions.family_tree import killed_in
from perdure.sessions.graphs import TO_DECIDE, TO_RUN, TO_SEND, is_thread
from perdure.sessions.json_forms import of_reply

if TYPE_CHECKING:
    from perdure.actions.resume import RecoveryReport
    from perdure.actions.send import WhenBusy
    from perdure.model.execution import PendingCall
    from perdure.model.message import Media
    from perdure.sessions.chat import Chat
    from perdure.sessions.queueing import Queued
    from perdure.sessions.reply import Reply
    from perdure.sessions.sessions import Sessions


anyway_option = click.option(
    "--anyway", is_flag=True, help="Answer in a thread of LangGraph too, with perdure's own agent."
)


@store_command(json=True, agent=True)
@click.argument("words", nargs=-1, metavar="[SESSION] TEXT")
@click.option("--new", is_flag=True, help="Begin a new session; SESSION, if given, is the id it gets.")
@click.option("--key", metavar="TEXT", help="Send only once, however often this is repeated with the same key.")
@click.option(
    "--when-busy",
    type=click.Choice(["raise", "steer", "queue"]),
    default="raise",
    show_default=True,
    help="If the session is being run: give up, hand the message to that run, or wait behind it.",
)
@click.option(
    "-a",
    "--attach",
    "files",
    multiple=True,
    metavar="FILE",
    help="An image or a file that goes with the message: a path or an https:// address; may be repeated.",
)
@click.option("--no-wait", is_flag=True, help="Leave the message for a worker to send, and print its key.")
@later_option("--later", help="The same, but later: in 30s, 10min, 2h, 3d, 4w, or at 2026-01-31T18:00 local time.")
@click.option("--priority", type=int, default=0, metavar="N", show_default=True, help="How urgent it is.")
@anyway_option
def send(
    ctx: click.Context,
    words: tuple[str, ...],
    new: bool,
    key: str | None,
    when_busy: Any,
    files: tuple[str, ...],
    no_wait: bool,
    later: datetime | None,
    priority: int,
    anyway: bool,
    as_json: bool,
) -> None:
    """Send one message to SESSION and print the answer. The TEXT - is read from stdin."""
    if key == "":  # most often a variable that a script forgot to set
        raise click.UsageError("--key is empty. Name one, or leave it out.")
    target, text = _addressed(words, new)
    text = _said(text)
    parts = [_attached(each) for each in files]
    check_priority(priority)  # checked first, so that a mistake creates no session
    if key is not None:
        check_key(key)
    if no_wait or later is not None:
        if when_busy == "steer":
            raise click.UsageError("What is left for a worker waits for its turn. Leave --when-busy out.")
        options = {"key": key, "at": later, "priority": priority}
        _leave(ctx, target, new, (text, *parts), anyway=anyway, as_json=as_json, **options)
        return
    if priority:
        raise click.UsageError("--priority is for what is left for a worker. Add --no-wait, or --later.")

    streams = is_terminal() and not as_json and key is None and when_busy == "raise"

    async def work(sessions: Sessions) -> Reply[Any]:
        chat = await _opened_chat(ctx, sessions, target, new, anyway)
        if streams:
            return await _streamed(chat, text, parts)
        return await chat.send(text, *parts, key=key, when_busy=when_busy)

    reply = on_sessions(ctx, work, must_exist=not new, begins=new)
    if reply.queued and not as_json:
        _tell_of_left(reply, when_busy)
    else:
        _answer(ctx, reply, as_json, has_shown=streams)


def _leave(
    ctx: click.Context,
    target: str | None,
    new: bool,
    message: Sequence[Any],
    *,
    anyway: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Leave a message for a worker to send, and print the key by which its answer can be found."""

    async def work(sessions: Sessions) -> Queued:
        chat = await _opened_chat(ctx, sessions, target, new, anyway)
        if not new and settings_of(ctx).model is not None:
            await use_model(ctx, sessions, chat.id)  # stored now: the worker that sends it does not see --model
        return await chat.enqueue(*message, **options)

    left = on_sessions(ctx, work, must_exist=not new, begins=new)
    if as_json:
        at = None if left.at is None else left.at.astimezone(UTC)
        print_json({"session": left.session_id, "key": left.key, "at": at})
        return
    say(left.key)
    when = "" if left.at is None else f" at {at_time(left.at)}"
    note(f"A worker sends it{when}. To see what waits: {command('queue')}")
    if left.at is not None:
        note(f"To take it back: {command('queue', 'drop', left.session_id, left.key)}")


def _tell_of_left(reply: Reply[Any], when_busy: WhenBusy) -> None:
    session_id = reply.session.id
    done = "Queued behind" if when_busy == "queue" else "Handed to"
    note(f"{done} the run that is under way in {shown(session_id)}, whose process will send it.")
    note(f"To see each step when it has ended: {command('events', session_id, '--follow')}")
    note(f"To see it later: {command('show', session_id, '--last', 2)}")


def _said(text: str) -> str:
    """Return the text of an argument, or that of stdin. Refuse an empty one."""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise click.UsageError("What comes from stdin is not text in UTF-8.") from None
    if not text.strip():
        raise click.UsageError("The text is empty, so there is nothing to say.")
    return text


def _addressed(words: tuple[str, ...], new: bool) -> tuple[str | None, str]:
    if len(words) == 2:
        return words[0], words[1]
    if new and len(words) == 1:
        return None, words[0]
    raise click.UsageError("Give a session and a text in quotes: perdure send SESSION 'TEXT', or send --new 'TEXT'.")


async def refuse_graph(sessions: Sessions, session_id: str) -> None:
    """Refuse a message to a thread of LangGraph: its graph would not answer it."""
    if is_thread(await sessions.info(session_id)):
        raise Failure(f"{TO_SEND}: add --anyway for that.", NOT_ALLOWED)


async def _opened_chat(ctx: click.Context, sessions: Sessions, target: str | None, new: bool, anyway: bool) -> Chat:
    if new and target is not None and await sessions.exists(target):
        raise click.UsageError(f"Session {target!r} exists already. Leave --new out, or choose another id.")
    if not new and target is not None:
        session_id = await named_with_words(sessions, target)
        if not anyway:
            await refuse_graph(sessions, session_id)
        use_model_in_run(ctx, sessions)
        return await continued(ctx, sessions, session_id)
    chat = await begun(ctx, sessions, target)
    await learn(sessions, [chat.id])
    note(f"session {chat.id}")
    return chat


def _attached(file: str) -> Media:
    """Return an image or a file. This is called first, so that a wrong path creates no session."""
    from perdure.sessions.attaching import attach

    try:
        return attach(file)
    except InvalidData as error:
        problem = error.problem[0].upper() + error.problem[1:]
        raise click.BadParameter(f"{problem}.", param_hint="'-a'") from None


async def _streamed(chat: Chat, text: str, parts: Sequence[Media]) -> Reply[Any]:
    """Show an answer as it comes."""
    reply: Reply[Any] | None = None
    said = ""
    async for chunk in chat.stream(text, *parts):
        if chunk.restarts:
            click.echo("\n[the model begins again]")
            said = ""
        said += chunk
        click.echo(safe(chunk), nl=False)
        reply = chunk.reply or reply
    if reply is None:
        raise Failure("The run ended without a reply.", FAILED)
    if not said.rstrip().endswith(reply.text.rstrip()):  # a model that does not stream
        click.echo(safe(reply.text), nl=False)
    click.echo()
    return reply


def _answer(ctx: click.Context, reply: Reply[Any], as_json: bool, *, has_shown: bool = False) -> None:
    """Print the result of a run. If the run waits for a person, say so, and exit with a code of its own."""
    if as_json:
        print_json(of_reply(reply))
    elif not has_shown and reply.text:
        say(reply.text)
    if not reply.pending_calls:
        stopped = why_stopped(reply)
        if stopped is not None and not as_json:
            note(stopped)
        return
    if not as_json:
        note(f"The run waits for {_what_for(reply.pending_calls)}:")
        _show_calls(reply.pending_calls)
        note(to_decide(reply.session.id, reply.pending_calls))
    ctx.exit(WAITS)


def why_stopped(reply: Reply[Any]) -> str | None:
    """Explain why a run has no whole answer. Otherwise silence, or half a sentence, could be taken for one."""
    reason = reply.stop_reason
    if reason is None or not reason.was_force_stopped:
        return None
    return f"The run was stopped before its answer was complete: {reason.value}. What was said so far is kept."


def _show_calls(calls: Iterable[PendingCall], indent: str = "  ") -> None:
    """Print calls, and below a sub-agent's call those that it waits for."""
    for call in calls:
        note(f"{indent}{line(call.name)} {line(dict(call.arguments), 200)}  ({line(call.id)})")
        if call.warning:
            note(f"{indent}  {call.warning}")
        _show_calls(call.waits_for, f"{indent}  ")


def _what_for(calls: Iterable[PendingCall]) -> str:
    are_outside = {leaf.external for call in calls for leaf in call.leaves}
    words = {frozenset({True}): "answers from outside", frozenset({False}): "your approval"}
    return words.get(frozenset(are_outside), "your approval, and for answers from outside")


DENIED = "The user does not want this call to be made."
_no_wait_option = click.option(
    "--no-wait", is_flag=True, help="Leave the rest of the run to a worker: neither tools nor a model are needed here."
)
_call_option = click.option("--call", "calls", multiple=True, metavar="ID", help="Only this call; may be repeated.")


Shown = Sequence["PendingCall | str"] | None


def _decide(
    ctx: click.Context,
    session: str,
    calls: tuple[str, ...],
    as_json: bool,
    title: str,
    verb: Callable[[Sessions, str, Shown], Awaitable[Reply[Any]]],
) -> None:
    """Decide about calls as they were printed, and print the result of the run."""

    async def work(sessions: Sessions, session_id: str) -> Reply[Any]:
        use_model_in_run(ctx, sessions)
        chosen = await _chosen_calls(sessions, session_id, calls, title)
        try:
            return await verb(sessions, session_id, chosen)
        except InvalidData as error:
            is_over = isinstance(error, PendingCallsChanged) and not error.pending
            if not is_over and (chosen is not None or error.path != "$.call_ids"):  # what was typed is wrong
                raise
            raise Failure(f"{error.problem[0].upper()}{error.problem[1:]}.", NOT_ALLOWED) from None

    _tell_decided(ctx, *on_session(ctx, session, work), as_json)


def _tell_decided(ctx: click.Context, session_id: str, reply: Reply[Any], as_json: bool) -> None:
    """Print the result of a run after a decision, or who continues it."""
    if reply.queued and not as_json:
        note(f"Decided. A worker continues the run, or: {command('recover', session_id, tools=True)}")
    else:
        _answer(ctx, reply, as_json)


async def _chosen_calls(sessions: Sessions, session_id: str, names: tuple[str, ...], title: str) -> Shown:
    """Print the calls to decide about. Return them as they were printed.

    If some do not exist, return the names as they were typed: the verb refuses them.
    """
    # The decision has to be about the very calls that a person saw: they may have changed since.
    session = await sessions.session(session_id)
    if is_thread(session.info):
        raise Failure(TO_DECIDE, NOT_ALLOWED)
    execution = session.state.execution
    waiting = execution.pending_calls if execution is not None else ()
    known = [call for call in waiting if not names or call.id in names or call.digest in names]
    if not known or len(known) < len(set(names)):
        return names or None
    note(title)
    _show_calls(known)
    return known


@store_command(json=True, agent=True)
@session_argument()
@_call_option
@_no_wait_option
def approve(ctx: click.Context, session: str, calls: tuple[str, ...], no_wait: bool, as_json: bool) -> None:
    """Approve the pending tool calls of SESSION, all of them by default, and continue the run.

    Only the calls that are printed first are made.
    """

    def verb(sessions: Sessions, key: str, shown: Shown) -> Awaitable[Reply[Any]]:
        return sessions.approve(key, shown, wait=not no_wait)

    _decide(ctx, session, calls, as_json, "Approving:", verb)


@store_command(json=True, agent=True)
@session_argument()
@click.argument("reason", required=False)
@click.option("--reason", "why", metavar="TEXT", help="The same as REASON.")
@_call_option
@_no_wait_option
def deny(
    ctx: click.Context,
    session: str,
    reason: str | None,
    why: str | None,
    calls: tuple[str, ...],
    no_wait: bool,
    as_json: bool,
) -> None:
    """Deny the pending tool calls of SESSION. The model is told so, or the REASON, and continues."""
    if reason is not None and why is not None:
        raise click.UsageError("Give the reason once: after the session, or with --reason.")
    given = next((each for each in (reason, why) if each is not None), DENIED)

    def verb(sessions: Sessions, key: str, shown: Shown) -> Awaitable[Reply[Any]]:
        return sessions.deny(key, given, shown, wait=not no_wait)

    _decide(ctx, session, calls, as_json, "Denying:", verb)


@store_command(json=True, agent=True)
@session_argument()
@click.argument("call")
@click.argument("result", metavar="JSON", required=False)
@click.option("--error", metavar="TEXT", help="Why the call has failed, instead of a result.")
@_no_wait_option
def answer(
    ctx: click.Context, session: str, call: str, result: str | None, error: str | None, no_wait: bool, as_json: bool
) -> None:
    """Give the result of a CALL of SESSION that is made outside, and continue the run.

    CALL is its id, or its digest. The result is JSON, so a text has quotes of its own: '"rain"'. The JSON - is read
    from stdin.
    """
    if (result is None) == (error is None):
        raise click.UsageError("Give the result as JSON, or --error TEXT: one of them.")
    given: dict[str, Any] = {"errors": {call: error}} if result is None else {"answers": {call: _json_of(result)}}

    async def work(sessions: Sessions, session_id: str) -> Reply[Any]:
        use_model_in_run(ctx, sessions)
        return await sessions.answer(session_id, **given, wait=not no_wait)

    _tell_decided(ctx, *on_session(ctx, session, work), as_json)


def _json_of(given: str) -> Any:
    try:
        return msgspec.json.decode(_said(given))
    except msgspec.DecodeError as error:
        raise click.UsageError(f"The result is not JSON ({error}). A text has quotes: '\"rain\"'.") from None


@store_command()
@session_argument()
def cancel(ctx: click.Context, session: str) -> None:
    """Ask the run that is under way in SESSION, in whichever process, to stop. What was said is kept.

    A run that was killed is ended where it stopped.
    """

    async def verb(sessions: Sessions, session_id: str) -> str:
        was_killed = session_id in await killed_in(sessions)
        if not await sessions.cancel(session_id):
            return f"{session_id} is not being run"
        if was_killed:
            return f"The run of {session_id} had been killed; it was ended at that point"
        return f"{session_id} is asked to stop"

    say(on_session(ctx, session, verb)[1])


@store_command(json=True)
@session_argument()
@click.argument("text")
@click.option(
    "--role",
    type=click.Choice(["user", "assistant", "system"]),
    default="user",
    show_default=True,
    help="Who is to have said it.",
)
def inject(ctx: click.Context, session: str, text: str, role: str, as_json: bool) -> None:
    """Append TEXT to SESSION without running the agent. The TEXT - is read from stdin."""
    content = _said(text)

    async def verb(sessions: Sessions, session_id: str) -> int:
        await sessions.inject(session_id, {"role": role, "content": content})
        return await sessions.length(session_id)

    print_length(*on_session(ctx, session, verb), as_json)


async def _recovered(sessions: Sessions) -> RecoveryReport:
    """Continue every killed run, one after the other, so that a person sees the progress."""
    from perdure.actions.resume import RecoveryReport

    journal = sessions.runtime.journal
    if journal is None:
        return await sessions.recover()
    # Newest first: a child is younger than its parent, which then finds the child's run ended.
    wanted = [each for each in reversed(await journal.lapsed()) if await sessions.exists(each)]
    reports: list[RecoveryReport] = []
    with progress("recovering") as tell:
        for done, session_id in enumerate(wanted):
            tell(done, len(wanted))
            reports.append(await sessions.recover(session_id))
    return RecoveryReport.joined(reports)


@store_command(json=True, agent=True)
@session_argument(required=False, metavar="[SESSION]")
def recover(ctx: click.Context, session: str | None, as_json: bool) -> None:
    """Continue runs that were killed: that of SESSION, or all of them.

    Completed tools are not run again. Give the --tools that the agents use, and an --agent for each sub-agent. A run
    continues with the model that it was begun with.
    """

    async def work(sessions: Sessions) -> tuple[RecoveryReport, dict[str, set[str]], bool]:
        given = None if session is None else await named(sessions, session)
        report = await (_recovered(sessions) if given is None else sessions.recover(given))
        failed = [each for each, _ in report.failed]
        await learn(sessions, [*report.resumed, *report.suspended, *report.busy, *failed])
        subagents: dict[str, set[str]] = {each: await subagents_of(sessions, each) for each in failed}
        return report, subagents, given is not None and is_thread(await sessions.info(given))

    report, subagents, is_graph = on_sessions(ctx, work)
    columns = {"resumed": report.resumed, "suspended": report.suspended, "busy": report.busy}
    if as_json:
        failed = [{"session": each, "error": reason} for each, reason in report.failed]
        print_json({**{name: list(found) for name, found in columns.items()}, "failed": failed})
    else:
        for name, found in columns.items():
            for each in found:
                say(f"{name}\t{shown(each)}")
        for (each, _), error in zip(report.failed, report.errors, strict=True):
            note(f"failed\t{shown(each)}: {error.what}")
            hint = to_name_tool(error, subagents[each], "recover", each) or to_make_context(error)
            if hint is not None:
                note(hint)
            note(f"Or end it: {command('cancel', each)}")
        if not any(columns.values()) and not report.failed:
            say("no run was killed")
            if is_graph:
                note(TO_RUN)
    if report.failed:
        ctx.exit(FAILED)
