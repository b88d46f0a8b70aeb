"""Commands that look at what was said."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from perdure.cli.errors import advice_on_key
from perdure.cli.hints import command
from perdure.cli.interrupted import how_to_continue, told_of
from perdure.cli.options import (
    agent_name_option,
    last_option,
    limit_option,
    older_option,
    session_argument,
    since_option,
    status_option,
    store_command,
    version_option,
)
from perdure.cli.session_ids import named, named_with_words, on_session
from perdure.cli.setup import on_sessions, owner_of
from perdure.cli.short_ids import learn, shown
from perdure.cli.terminal import (
    age,
    console,
    counted,
    is_terminal,
    line,
    note,
    patiently,
    price,
    print_json,
    print_table,
    progress,
    safe,
    say,
    width,
    written,
)
from perdure.errors import KeyUnavailable
from perdure.model.ids import SessionId
from perdure.model.message import Envelope, Media, Message, Part, Text, Thinking, ToolCall, ToolResult
from perdure.sessions.family_tree import HANDED_OVER, KILLED, LEFT, interruption_of, killed_in
from perdure.sessions.graphs import may_answer, plan_of
from perdure.sessions.json_forms import of_head, of_hit, of_listed, of_session, of_usage

if TYPE_CHECKING:
    from perdure.model.session import AgentSession, AgentSessionInfo, ListedSession, SessionInfoList
    from perdure.model.usage import Usage
    from perdure.protocols import SearchHit, SessionHead
    from perdure.sessions.lineage import Diff
    from perdure.sessions.sessions import Sessions

_TOLD = 5
"""The most killed runs that are told one by one for a page of sessions."""
_BOOKKEEPING = re.compile(r"(?:o[a-z2-7]{16}\.)?google-adk-state-(?:app|user)-.*\.h[a-z2-7]{26}")
"""The ids that the adapter for Google ADK gives to the states of apps and of users."""
_WIDE = 140
"""The least width of a terminal that shows the last words: in a narrower one the title needs their room."""
_SPARE = (
    *("LAST WORDS", "VERSION", "AGENT", "COST", "CHANGED", "TAGS"),
    *("MESSAGES", "OWNER", "STATUS", "TITLE", "CREATED"),
)
"""The columns that a narrow terminal leaves out, in this order."""
_STYLES = {"user": "bold cyan", "assistant": "bold green", "tool": "bold yellow", "system": "bold magenta"}
_WIDTH = 2000
_NO_RESULT = "✗ no result: the call was interrupted, and may or may not have taken effect"


@store_command(json=True)
@agent_name_option
@status_option
@click.option("--tag", metavar="TAG", help="Only sessions with this tag.")
@click.option("--metadata", metavar="KEY=VALUE", multiple=True, help="Only those with this metadata, if it is indexed.")
@click.option("--parent", metavar="SESSION", help="Only forks and sub-agents of this session.")
@click.option("--top-level", is_flag=True, help="Leave out the sessions of sub-agents.")
@since_option("updated_after", "sessions changed")
@older_option("updated_before")
@click.option(
    "--order",
    type=click.Choice(["created", "updated"]),
    default="created",
    show_default=True,
    help="Show the last created first, or the last changed.",
)
@limit_option(50)
@click.option("--all", "everything", is_flag=True, help="However many there are, those with only state too.")
def ls(
    ctx: click.Context,
    /,
    limit: int,
    everything: bool,
    as_json: bool,
    parent: str | None,
    metadata: Sequence[str],
    **filters: Any,
) -> None:
    """List sessions, the last created first, or with `--order updated` the last changed."""
    wanted = {name: value for name, value in filters.items() if value is not None}
    wanted["metadata"] = indexed = dict(map(_key_and_value, metadata))

    async def work(sessions: Sessions) -> int:
        shown, left, after = 0, None if everything else limit, None
        if parent is not None:
            wanted["parent"] = await named(sessions, parent)
        killed = await killed_in(sessions)
        while True:
            page = await sessions.list(**wanted, limit=min(1000, left or 1000), after=after)
            listed = page if everything or as_json or not is_terminal() else _of_people(page)
            if not as_json:
                await learn(sessions, [info.id for info in listed])
            why = {str(each.id): await interruption_of(sessions, each.id) for each in page if each.id in killed}
            _print_page(listed, why, as_json, of_all=sessions.owner is None)
            if len(listed) < len(page):
                left_out = counted(len(page) - len(listed), "session")
                note(f"Left out: {left_out} with the state of apps and users. Add --all to see them.")
            # The recovery of a caller continues its sub-agents.
            below = {str(each.id) for each in page if each.spawn_ref is not None and each.parent_id in killed}
            await _tell_of_interrupted(sessions, {key: why[key] for key in why if key not in below})
            shown, left = shown + len(page), None if left is None else left - len(page)
            after = page.next
            if after is not None and left == 0:
                note(f"More follow. Add --all, or --limit {limit * 2}.")
            if after is None or left == 0:
                return shown

    if on_sessions(ctx, work, filters=indexed) > 0:
        return
    if indexed:
        note(_not_indexed(indexed))
    elif not as_json and is_terminal():
        note(f"No sessions here. Begin one: {command('chat', begins=True)}")


def _of_people(page: SessionInfoList[ListedSession]) -> SessionInfoList[ListedSession]:
    """Return a page without the sessions in which an adapter keeps state that other sessions share."""
    from perdure.model.session import SessionInfoList

    kept = [info for info in page if info.message_count or not _BOOKKEEPING.fullmatch(info.id)]
    return SessionInfoList(kept, next=page.next, damaged=page.damaged)


def _not_indexed(asked: Mapping[str, Any]) -> str:
    """Explain that a list may be empty because nothing was indexed. Only the programs know what they declare."""
    pairs = " and ".join(f"{key}={written(value)}" for key, value in asked.items())
    keys = ", ".join(map(repr, asked))
    declared = f"connect(filters=[{keys}])"
    return f"No session is indexed by {pairs}. Only those are that a program has saved with {declared}."


def _key_and_value(given: str) -> tuple[str, Any]:
    """Return the key and the value of `KEY=VALUE`. A value that is a JSON number, boolean or string is read as one."""
    key, sign, text = given.partition("=")
    if not key or not sign:
        raise click.UsageError(f"--metadata takes KEY=VALUE, such as --metadata customer=acme; got {given!r}.")
    try:
        value = json.loads(text)
    except ValueError:
        return key, text
    return key, value if isinstance(value, str | int) else text


async def _tell_of_interrupted(sessions: Sessions, why: Mapping[str, str]) -> None:
    for session_id, reason in list(why.items())[:_TOLD]:
        note(f"{told_of(reason, shown(session_id))} {await how_to_continue(sessions, session_id)}")
    if len(why) > _TOLD:
        more = f"Interrupted as well: {len(why) - _TOLD:,} more."
        note(f"{more} Continue all of them here: {command('recover', tools=True)}")


def _print_page(page: SessionInfoList[ListedSession], why: Mapping[str, str], as_json: bool, *, of_all: bool) -> None:
    if as_json:
        for info in page:
            print_json({**of_listed(info), **_interrupted(why.get(info.id))})
    elif page:
        _print_sessions([_row(info, why.get(info.id)) for info in page], of_all and any(info.owner for info in page))
    sealed = [each for each in page.damaged if isinstance(each, KeyUnavailable)]
    for damage in page.damaged:
        note(f"sealed: {damage.what}" if isinstance(damage, KeyUnavailable) else f"damaged: {damage}")
    # Said once, since there may be thousands that need the same key.
    for advice in {type(each): advice_on_key(each) for each in sealed}.values():
        note(advice)


def _interrupted(why: str | None) -> dict[str, object]:
    """Return the fields of JSON about a run that waits to be continued."""
    return {"killed": why is not None, "interrupted": why}


def _row(info: ListedSession, why: str | None) -> dict[str, object]:
    """Return a session's fields by the names of their columns, in the order that a pipe has them."""
    return {
        "SESSION": shown(info.id),
        "AGENT": info.agent_name,
        "STATUS": why or info.status.value,
        "VERSION": info.version,
        "CREATED": age(info.created_at),
        "CHANGED": age(info.updated_at),
        "TITLE": info.title or "",
        "TAGS": " ".join(info.tags),
        "MESSAGES": "" if info.message_count is None else info.message_count,
        "COST": _cost(info.usage),
        "LAST WORDS": info.last_words or "",
        "OWNER": info.owner or "",
    }


def _cost(usage: Usage | None) -> str:
    """Return the cost of a session. It is empty if the cost is unknown, or nothing was spent."""
    return "" if usage is None or not usage.total_tokens else price(of_usage(usage))


def _print_sessions(rows: Sequence[Mapping[str, object]], owners: bool) -> None:
    room = width()
    is_narrow = room is not None and room < _WIDE
    hidden = [*([] if owners else ["OWNER"]), *(["LAST WORDS"] if is_narrow else [])]
    columns = [name for name in rows[0] if name not in hidden]
    print_table(
        columns,
        [[row[name] for name in columns] for row in rows],
        right=("VERSION", "MESSAGES", "COST"),
        spare=_SPARE,
        flexible=("LAST WORDS", "TITLE", "TAGS", "OWNER"),
    )


@store_command(json=True)
@session_argument()
@click.option("--all", "everything", is_flag=True, help="All that was said, covered and trimmed parts too.")
@version_option("As it was at this version.")
@last_option(help="Only the last N messages.")
def show(
    ctx: click.Context, session: str, everything: bool, version: int | None, last: int | None, as_json: bool
) -> None:
    """Show what SESSION says: what the model is shown, or all that was said."""
    if everything and version is not None:
        raise click.UsageError("Give --all or --version, not both: all that was said belongs to no version.")

    async def verb(sessions: Sessions, session_id: str) -> _Shown:
        found = await sessions.session(session_id, version)
        messages = list(await sessions.history(session_id) if everything else found.state.messages)
        is_interrupted = session_id in await killed_in(sessions)
        why = await interruption_of(sessions, session_id) if is_interrupted else None
        await _tell_of_interrupted(sessions, {} if why is None else {session_id: why})
        is_running = why is None and await _is_being_run(sessions, session_id)
        if why is not None and not everything:
            note(f"To see what it has said and done: {command('show', session_id, '--all')}")
        if is_running:
            note(f"A run is under way. To see what it does: {command('events', session_id, '--follow')}")
        plan = await _plan_of(sessions, found) if version is None else []
        is_over = not (is_running or why or may_answer(found.info, messages))
        lost = _without_result(messages) - _open_in(found, messages, is_over=is_over)
        return _Shown(found, _last_of(messages, last) if last else messages, lost, why, plan)

    _, (found, messages, lost, why, plan) = on_session(ctx, session, verb, of_words=True)
    if as_json:
        print_json({**of_session(found, messages), **_interrupted(why)})
        return
    _print_header(found, why or found.status.value)
    for each in plan:
        say(f"# {each}")
    print_messages(messages, lost=lost)
    if hidden := sum(message.is_sealed for message in messages):
        note(f"Hidden: {counted(hidden, 'message')} that {found.info.agent_name} keeps for itself. --json has them.")


async def _plan_of(sessions: Sessions, session: AgentSession) -> list[str]:
    """Return the lines that tell what a thread of LangGraph does next, and what it waits for."""
    plan = await plan_of(sessions.runtime.journal, session)
    told = [f"next: {line(', '.join(plan.next))}"] if plan.next else []
    return [*told, *(f"waits: {line(node)}, for Command(resume=…)" for node in plan.waits)]


def _without_result(messages: Iterable[Message]) -> set[tuple[str, str]]:
    """Return the calls that no result follows, by the ids of message and call. Two runs may have calls of one id."""
    lost: set[tuple[str, str]] = set()
    for message in messages:
        lost |= {(message.id, call.id) for call in message.tool_calls}
        answered = {result.call_id for result in message.tool_results}
        lost = {(asked, call) for asked, call in lost if call not in answered}
    return lost


def _open_in(session: AgentSession, messages: Sequence[Message], *, is_over: bool) -> set[tuple[str, str]]:
    """Return the calls of the last step that may still get a result: they wait, or their run is not over."""
    last = next((message for message in reversed(messages) if message.tool_calls), None)
    if last is None:
        return set()
    execution = session.state.execution
    waiting = execution.pending_calls if execution else ()
    return {(last.id, call.id) for call in (waiting if is_over else last.tool_calls)}


async def _is_being_run(sessions: Sessions, session_id: str) -> bool:
    journal = sessions.runtime.journal
    return journal is not None and await journal.is_claimed(SessionId(session_id))


class _Shown(NamedTuple):
    """A session as `show` prints it."""

    session: AgentSession
    messages: list[Message]
    lost: set[tuple[str, str]]
    """The calls that get no result any more, by the ids of message and call."""
    why: str | None
    """Why its last run waits to be continued, if it does."""
    plan: list[str]


def _last_of(messages: list[Message], count: int) -> list[Message]:
    """Return the last messages, of which `count` are shown. Hidden messages between them are included."""
    shown = [place for place, message in enumerate(messages) if not message.is_sealed]
    return messages[shown[-count] :] if len(shown) >= count else messages


def _blocks(session: AgentSession) -> list[str]:
    """Return a line for each compaction of a session's view: its strategy, and the number of messages it covers."""
    from perdure.model.transcript import Block

    blocks = [piece for piece in session.state.transcript.pieces if isinstance(piece, Block)]
    return [f"{block.by} covers {counted(block.covered_count, 'message')} ({block.id})" for block in blocks]


def _print_header(session: AgentSession, status: str) -> None:
    info = session.info
    named_ = f"  {line(info.name)}" if info.name else ""
    say(f"# {info.id}  {info.agent_name}  {status}  version {info.version}{named_}")
    if info.owner is not None:
        say(f"# owner {line(info.owner)}")
    if info.parent_id:
        how = "sub-agent of" if info.spawn_ref else "fork of"
        say(f"# {how} {info.parent_id}")
    for block in _blocks(session):
        say(f"# {block}")
    execution = session.state.execution
    # After a kill, a decision about these calls is on record: the run had been continued.
    what = {LEFT: "decided on", KILLED: "waited for approval", HANDED_OVER: "waited for approval"}
    for call in execution.pending_calls if execution else ():
        say(f"# {what.get(status, 'waits for approval')}: {line(call.name)} ({line(call.id)})")
        if call.warning:
            say(f"#   {call.warning}")
        for leaf in call.leaves if call.waits_for else ():
            say(f"#   for its sub-agent: {line(leaf.name)} {line(dict(leaf.arguments), 200)}")


@store_command(json=True)
@session_argument()
@click.option("--before", type=click.IntRange(1), metavar="N", help="Only versions older than this one.")
@limit_option(50)
def versions(ctx: click.Context, session: str, before: int | None, limit: int, as_json: bool) -> None:
    """List the versions of SESSION, the newest first, without what they say."""

    async def verb(sessions: Sessions, session_id: str) -> Sequence[SessionHead]:
        return await sessions.versions(session_id, before=before, limit=limit)

    session_id, found = on_session(ctx, session, verb)
    if as_json:
        for head in found:
            print_json(of_head(head))
    elif found:
        print_table(
            ("VERSION", "CHANGED", "STATUS", "AGENT", "COST", "NAME"),
            [_version_row(head.info) for head in found],
            right=("VERSION", "COST"),
            spare=("AGENT", "COST"),
            flexible=("NAME",),
        )
    oldest = found[-1].info.version if found else 1
    if len(found) == limit and oldest > 1:
        note(f"Older ones: {command('versions', session_id, '--before', str(oldest))}")


def _version_row(info: AgentSessionInfo) -> list[object]:
    return [
        *(info.version, age(info.updated_at), info.status.value),
        *(info.agent_name, _cost(info.usage), line(info.name) if info.name else ""),
    ]


@store_command(json=True)
@session_argument("left")
@session_argument("right")
def diff(ctx: click.Context, left: str, right: str, as_json: bool) -> None:
    """Show where the sessions LEFT and RIGHT part, and how each continues."""

    async def work(sessions: Sessions) -> tuple[str, str, Diff]:
        first, second = await named_with_words(sessions, left), await named_with_words(sessions, right)
        return first, second, await sessions.diff(first, second)

    first, second, found = on_sessions(ctx, work)
    if as_json:
        sides = {"left": found.left, "right": found.right}
        parts = {name: [message.to_dict() for message in messages] for name, messages in sides.items()}
        print_json({"sessions": [first, second], "common": len(found.common), **parts})
        return
    say(f"--- {first}\n+++ {second}\n@@ {counted(len(found.common), 'message')} in common @@")
    print_messages(found.left, mark="- ")
    print_messages(found.right, mark="+ ")


@store_command(json=True)
@click.argument("text", required=False, metavar="TEXT")
@click.option("--in", "session", metavar="SESSION", help="In this session only.")
@click.option("--reindex", is_flag=True, help="Make the store's search index again first; TEXT may be left out then.")
@limit_option(20, 1000)
def search(ctx: click.Context, text: str | None, session: str | None, reindex: bool, limit: int, as_json: bool) -> None:
    """Find the messages that have every word of TEXT: "two words" stand together, and word* is a beginning."""
    _check_search(ctx, text, reindex, limit)

    async def work(sessions: Sessions) -> list[SearchHit]:
        session_id = None if session is None else await named(sessions, session)
        indexed = await _indexed(sessions, rebuild=reindex)
        if reindex:
            note(f"messages indexed: {indexed}")
        if text is None:
            return []
        hits = await patiently("searching …", sessions.search(text, session_id=session_id, limit=limit))
        if not hits and (session_id is not None or is_terminal()):
            note(await nothing_found(sessions, session_id, text))
        if not as_json:
            await learn(sessions, [hit.session_id for hit in hits])
        return list(hits)

    for hit in on_sessions(ctx, work):
        if as_json:
            print_json(of_hit(hit))
        elif is_terminal():
            _print_hit(hit)
        else:
            say("\t".join((hit.session_id, line(hit.message_id), hit.role, line(hit.snippet))))


async def nothing_found(sessions: Sessions, session_id: str | None, text: str) -> str:
    """Return the words for a search without hits. The messages that a fork shares are found only in its parent."""
    info = None if session_id is None else await sessions.info(session_id)
    if info is None:
        return "Nothing was found."
    if info.parent_id is None or info.spawn_ref is not None:
        return "Nothing was found in this session."
    await learn(sessions, [info.parent_id])
    elsewhere = command("search", text, "--in", info.parent_id)
    return f"Nothing was found in this session itself. It was forked from {shown(info.parent_id)}: {elsewhere}"


def _check_search(ctx: click.Context, text: str | None, reindex: bool, limit: int) -> None:
    """Refuse a wrong query before anything is indexed, which may take long."""
    from perdure.stores.search import Query

    if text is None and not reindex:
        raise click.UsageError("Missing argument 'TEXT'.", ctx)
    if reindex and owner_of(ctx):
        raise click.UsageError("The index is of the whole store; leave --owner out.", ctx)
    if text is not None:
        Query.of(text, None, None, limit)


async def _indexed(sessions: Sessions, *, rebuild: bool) -> int:
    """Bring the store's index up to date, with a bar if that takes long. Return the number of messages indexed."""
    from perdure.protocols import Indexed

    if isinstance(sessions.store, Indexed):
        with progress("indexing") as tell:
            return await sessions.store.index(rebuild=rebuild, progress=tell)
    if rebuild:
        raise click.UsageError(f"A {type(sessions.store).__name__} has no search index: every search reads it whole.")
    return 0


def _print_hit(hit: SearchHit) -> None:
    from rich.text import Text as Styled

    snippet, done = Styled(), 0
    for start, stop in hit.matches:
        snippet.append(safe(hit.snippet[done:start]))
        snippet.append(safe(hit.snippet[start:stop]), style="bold red")
        done = stop
    snippet.append(safe(hit.snippet[done:]))
    when = f"  {hit.created_at:%Y-%m-%d %H:%M}" if isinstance(hit.created_at, datetime) else ""
    out = console()
    out.print(Styled(f"{shown(hit.session_id)}  {hit.role}{when}", style="dim"))
    out.print(snippet)


def print_messages(
    messages: Iterable[Message], *, mark: str = "", lost: Container[tuple[str, str]] = frozenset()
) -> None:
    """Print each message under the role that said it, with a mark before every line.

    `lost` are calls that have no result and get none any more, by the ids of message and call.
    """
    for message in messages:
        if message.is_sealed:
            continue
        _print_head(f"{mark}{message.role}", message)
        for part in message.parts:
            for text in _lines_of(part):
                say(f"{mark}  {text}")
            if isinstance(part, ToolCall) and (message.id, part.id) in lost:
                say(f"{mark}  {_NO_RESULT}")


def _print_head(title: str, message: Message) -> None:
    if not is_terminal():
        say(f"{title}  {message.id}")
        return
    from rich.text import Text as Styled

    head = Styled(safe(title), style=_STYLES[message.role])
    head.append(f"  {line(message.id)}", style="dim")
    console().print(head, soft_wrap=True)


def _lines_of(part: Part) -> list[str]:
    match part:
        case Text():
            return part.text.split("\n")
        case ToolCall():
            arguments = ", ".join(f"{name}={line(written(value), 200)}" for name, value in part.arguments.items())
            return [f"→ {part.name}({arguments})"]
        case ToolResult():
            return [("✗ " if part.is_error else "← ") + line(part.text, _WIDTH)]
        case Thinking():
            return [f"(thinks) {text}" for text in part.text.split("\n")]
        case Media():
            return [f"[{part.label}{f' {part.url}' if part.url else ''}]"]
        case Envelope():  # the leftovers of another framework's item: nothing in it was said
            return []
    return [f"[{type(part).__name__}]"]
