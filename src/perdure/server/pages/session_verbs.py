"""Changes that a person makes to a session from its page. Each verb is a form's post, which leads back to the page.

A form whose effect could surprise is bound to the version that its page showed. If the session has changed since,
nothing happens.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote, urlencode

import msgspec
from starlette.responses import Response

from perdure.actions.metadata import TagSession
from perdure.errors import InvalidData
from perdure.server.call import Call
from perdure.server.pages.outside import result_of
from perdure.sessions.graphs import require_no_graph
from perdure.sessions.sessions import Sessions


class Bound(msgspec.Struct, kw_only=True):
    """A form of the page of a version."""

    version: int


class ForkForm(msgspec.Struct, kw_only=True):
    at: str = ""
    """The message after which the fork begins. Without it, it begins at the end."""
    version: int | None = None


class RewindForm(Bound, kw_only=True):
    to: int | None = None
    message: str = ""


class TrimForm(Bound, kw_only=True):
    keep_last: int


class CompactForm(Bound, kw_only=True):
    keep_last: int = 12
    compact_strategy: Literal["", "llm", "truncate", "observation_mask"] = ""


class UncompactForm(Bound, kw_only=True):
    block: str = ""


class NameForm(msgspec.Struct, kw_only=True):
    name: str = ""


class TagForm(msgspec.Struct, kw_only=True):
    add: str = ""
    remove: str = ""


class SendForm(msgspec.Struct, kw_only=True):
    text: str
    key: str = ""
    """The key by which a post is known if a browser sends it twice."""


class DecisionForm(msgspec.Struct, kw_only=True):
    call: str
    """The digest of the call as the page showed it."""
    reason: str = ""


class AnswerForm(msgspec.Struct, kw_only=True):
    call: str
    result: str
    is_error: bool = False


class NoForm(msgspec.Struct, kw_only=True):
    pass


def _back(call: Call, session_id: str | None = None, **query: str) -> Response:
    """Send the browser to the session's page."""
    asked = f"?{urlencode(query)}" if query else ""
    # After a 303 the browser asks with GET, so to reload does not post again.
    return Response(None, 303, {"Location": f"/sessions/{quote(session_id or call.session_id)}{asked}"})


def _bound(call: Call) -> Sessions:
    form: Bound = call.body
    return call.sessions.expecting(form.version)


async def send(call: Call) -> Response:
    """Leave a message in the session. A worker answers it."""
    form: SendForm = call.body
    if not form.text.strip():
        raise InvalidData("$.text", "the message is blank; write something")
    await require_no_graph(call.sessions, call.session_id)
    await call.sessions.enqueue(call.session_id, form.text, key=form.key or None)
    return _back(call)


async def fork(call: Call) -> Response:
    """Begin a new session from this one: from its end, a message, or a version. The browser goes to its page."""
    form: ForkForm = call.body
    made = await call.sessions.fork(call.session_id, at=form.at or None, version=form.version)
    return _back(call, made.id)


async def undo(call: Call) -> Response:
    await _bound(call).undo(call.session_id)
    return _back(call)


async def rewind(call: Call) -> Response:
    form: RewindForm = call.body
    to = form.message or form.to
    if to is None:
        raise InvalidData("$.to", "name a version or a message to go back to")
    await _bound(call).rewind(call.session_id, to)
    return _back(call)


async def trim(call: Call) -> Response:
    await _bound(call).trim(call.session_id, call.body.keep_last)
    return _back(call)


async def compact(call: Call) -> Response:
    form: CompactForm = call.body
    options: dict[str, Any] = {"keep_last": form.keep_last}
    if form.compact_strategy:
        options["compact_strategy"] = form.compact_strategy
    await _bound(call).compact(call.session_id, **options)
    return _back(call)


async def uncompact(call: Call) -> Response:
    await _bound(call).uncompact(call.session_id, call.body.block or None)
    return _back(call)


async def suspend(call: Call) -> Response:
    await _bound(call).suspend(call.session_id)
    return _back(call)


async def resume(call: Call) -> Response:
    await _bound(call).resume(call.session_id)
    return _back(call)


async def delete(call: Call) -> Response:
    await _bound(call).delete(call.session_id)
    return _back(call)


async def restore(call: Call) -> Response:
    await _bound(call).restore(call.session_id)
    return _back(call)


async def rename(call: Call) -> Response:
    await call.sessions.rename(call.session_id, call.body.name.strip() or None)
    return _back(call)


async def tag(call: Call) -> Response:
    form: TagForm = call.body
    add = [each.strip() for each in form.add.split(",") if each.strip()]
    remove = [form.remove] if form.remove else []
    if not add and not remove:
        raise InvalidData("$.add", "name a tag to add or to remove")
    await call.sessions.execute(call.session_id, TagSession(*add, remove=tuple(remove)))
    return _back(call)


async def cancel(call: Call) -> Response:
    """Ask the run under way to stop. One that has ended meanwhile is not an error."""
    await call.sessions.cancel(call.session_id)
    return _back(call)


async def retry(call: Call) -> Response:
    """Send the last message again, in this process."""
    if not call.service.runs_here:
        raise InvalidData("$", "no agent is run by this service; write the message again, and a worker answers")
    await call.sessions.start_retry(call.session_id)
    return _back(call)


async def approve(call: Call) -> Response:
    """Put on record that a call may be made. A worker continues the run."""
    form: DecisionForm = call.body
    await call.sessions.approve(call.session_id, [form.call], wait=False)
    return _back(call)


async def deny(call: Call) -> Response:
    """Put on record that a call must not be made, and why."""
    form: DecisionForm = call.body
    await call.sessions.deny(call.session_id, form.reason.strip() or "denied", [form.call], wait=False)
    return _back(call)


async def answer(call: Call) -> Response:
    """Hand in the result of a call that is made outside: JSON, or else a plain text."""
    form: AnswerForm = call.body
    if form.is_error:
        await call.sessions.answer(call.session_id, errors={form.call: form.result}, wait=False)
        return _back(call, notice="failed")
    result, kind = result_of(form.result)
    await call.sessions.answer(call.session_id, {form.call: result}, wait=False)
    return _back(call, notice=f"answered-{kind}")


VERBS = {
    send: SendForm,
    fork: ForkForm,
    undo: Bound,
    rewind: RewindForm,
    trim: TrimForm,
    compact: CompactForm,
    uncompact: UncompactForm,
    suspend: Bound,
    resume: Bound,
    delete: Bound,
    restore: Bound,
    rename: NameForm,
    tag: TagForm,
    cancel: NoForm,
    retry: NoForm,
    approve: DecisionForm,
    deny: DecisionForm,
    answer: AnswerForm,
}
"""Every verb, and its form."""
