"""The table of all routes."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.server.agui.inputs import RunAgentInput
from perdure.server.agui.runs import run_agent
from perdure.server.api import answers, decisions, files, messages, moving, runs, sessions, verbs
from perdure.server.openai.routes import openai_routes
from perdure.server.pages.routes import page_routes
from perdure.server.routes import Handler, Route
from perdure.server.status import get_health, get_metrics, get_openapi, get_readiness
from perdure.sessions.json_forms import BacklogForm, InfoForm, ReplyForm

_ONE = "/api/sessions/{session}"
_LATER = {202: "The answer is not there yet."}


def _sessions() -> Iterator[Route]:
    yield Route(
        "GET", "/api/sessions", sessions.list_sessions, "List sessions", sessions.ListQuery, gives=sessions.ListForm
    )
    yield Route("GET", _ONE, sessions.get_session, "See a session", sessions.VersionQuery, gives=sessions.DetailForm)
    yield Route(
        "DELETE",
        _ONE,
        sessions.delete_session,
        "Hide a session from lists, or erase it",
        sessions.DeleteQuery,
        gives=sessions.ErasedForm,
        also={204: "It is hidden."},
        access="write",
        is_bound=True,
    )
    yield Route(
        "GET",
        f"{_ONE}/versions",
        sessions.list_versions,
        "List a session's versions, the newest first",
        sessions.VersionsQuery,
        gives=sessions.VersionsForm,
    )


def _made() -> Iterator[Route]:
    yield Route(
        "POST",
        "/api/sessions",
        sessions.create_session,
        "Create a session",
        body=sessions.NewSession,
        gives=InfoForm,
        status=201,
        also={200: "The request was made before."},
        access="write",
        takes_key=True,
    )
    yield Route(
        "PUT",
        _ONE,
        sessions.put_session,
        "Create a session under an id of your own",
        body=sessions.NewSession,
        gives=InfoForm,
        status=201,
        also={200: "It was there already."},
        access="write",
    )
    yield Route(
        "POST",
        "/api/import",
        moving.import_file,
        "Take in the sessions of a file",
        body=moving.Import,
        gives=moving.ImportedForm,
        status=201,
        also={200: "All of them were there already."},
        access="write",
    )


def _said() -> Iterator[Route]:
    yield Route(
        "GET",
        f"{_ONE}/messages",
        messages.list_messages,
        "Read what the model is shown, or all that was said",
        messages.MessagesQuery,
        gives=messages.MessagesForm,
    )
    yield Route(
        "POST",
        f"{_ONE}/messages",
        messages.post_message,
        "Say something to the agent",
        body=messages.NewMessage,
        gives=ReplyForm,
        also=_LATER,
        access="write",
        takes_key=True,
    )
    yield Route(
        "GET",
        f"{_ONE}/replies/{{key:path}}",
        messages.get_reply,
        "Ask for the answer to a message, by its key",
        answers.WaitQuery,
        gives=ReplyForm,
        also=_LATER,
    )
    yield Route("GET", f"{_ONE}/files/{{hash}}", files.get_file, "Read an image or a file of a message, by its hash")
    yield Route(
        "GET",
        f"{_ONE}/events",
        messages.list_events,
        "Read what happened, or follow what happens",
        messages.EventsQuery,
        gives=messages.EventsForm,
        is_stream=True,
    )


def _ran() -> Iterator[Route]:
    yield Route("GET", f"{_ONE}/runs", runs.list_runs, "List a session's runs", runs.RunsQuery, gives=runs.RunsForm)
    yield Route("GET", f"{_ONE}/runs/{{run}}", runs.get_run, "Read the record of one run", gives=dict)
    yield Route(
        "GET",
        f"{_ONE}/runs/{{run}}/reply",
        runs.get_reply,
        "Ask for the answer of a run",
        answers.WaitQuery,
        gives=ReplyForm,
        also=_LATER,
    )
    for path, handler, summary in (
        (f"{_ONE}/runs/{{run}}/cancel", runs.cancel_run, "Ask one run to stop"),
        (f"{_ONE}/cancel", runs.cancel, "Ask the run under way to stop"),
    ):
        yield Route("POST", path, handler, summary, body=verbs.Nothing, gives=runs.CancelledForm, access="write")
    yield Route(
        "GET",
        f"{_ONE}/tree",
        runs.get_tree,
        "See a session's runs, branches, sub-agents and forks",
        runs.TreeQuery,
        gives=runs.TreeForm,
    )
    yield Route(
        "GET", f"{_ONE}/ancestry", runs.get_ancestry, "Tell where a session comes from", gives=runs.AncestryForm
    )
    yield Route(
        "GET",
        f"{_ONE}/diff",
        runs.get_diff,
        "Tell where two sessions or versions part",
        runs.DiffQuery,
        gives=runs.DiffForm,
    )
    yield Route("GET", f"{_ONE}/export", runs.export, "Take a session out as a file", runs.ExportQuery)


def _verbs() -> Iterator[Route]:
    plain: tuple[tuple[Handler, type, str], ...] = (
        (verbs.undo, verbs.Nothing, "Take back the last change of what is shown"),
        (verbs.rewind, verbs.Rewind, "Go back to a version, or to a message"),
        (verbs.trim, verbs.Trim, "Show the model the last messages only"),
        (verbs.reset, verbs.Nothing, "Show the model nothing of what was said so far"),
        (verbs.compact, verbs.Compact, "Show the model a summary, or less, of what is older"),
        (verbs.uncompact, verbs.Uncompact, "Show again what a compaction covers"),
        (verbs.suspend, verbs.Suspend, "Close a session to messages"),
        (verbs.resume, verbs.Nothing, "Open a session again"),
        (verbs.restore, verbs.Nothing, "Take back that a session was hidden"),
        (verbs.rename, verbs.Rename, "Give a session a name"),
        (verbs.tag, verbs.Tag, "Add tags, or take some away"),
        (verbs.inject, verbs.Inject, "Append messages without running the agent"),
    )
    for handler, body, summary in plain:
        path = f"{_ONE}/{handler.__name__}"
        yield Route("POST", path, handler, summary, body=body, gives=InfoForm, access="write", is_bound=True)
    yield Route(
        "POST",
        f"{_ONE}/fork",
        verbs.fork,
        "Begin a new session where this one stands",
        body=verbs.Fork,
        gives=InfoForm,
        status=201,
        access="write",
    )
    for handler, body, summary in (
        (decisions.approve, decisions.Approval, "Let pending tool calls be made"),
        (decisions.deny, decisions.Denial, "Keep pending tool calls from being made"),
        (decisions.answer, decisions.CallAnswers, "Hand in what calls that are made outside have come to"),
    ):
        path = f"{_ONE}/{handler.__name__}"
        yield Route(
            "POST", path, handler, summary, body=body, gives=ReplyForm, also=_LATER, access="write", is_bound=True
        )


def _work() -> Iterator[Route]:
    yield Route(
        "GET",
        "/api/queue",
        runs.get_queue,
        "Tell what waits and runs",
        runs.QueueQuery,
        gives=BacklogForm,
    )
    yield Route(
        "GET", "/api/workers", runs.get_workers, "Tell which processes run sessions, and which", gives=runs.WorkersForm
    )
    yield Route(
        "POST",
        "/api/queue/{session}/retry",
        runs.retry_parked,
        "Open a session that was parked",
        body=verbs.Nothing,
        status=204,
        access="write",
    )
    yield Route(
        "POST",
        "/api/queue/{session}/drop",
        runs.drop_waiting,
        "Take back what waits in a session",
        body=verbs.Nothing,
        gives=runs.DroppedForm,
        access="write",
    )


def _agui() -> Iterator[Route]:
    for path, summary in (
        ("/agui", "Run the agent of a thread for a front end that speaks AG-UI"),
        ("/agui/{agent}", "Run an agent for a front end that speaks AG-UI"),
    ):
        yield Route("POST", path, run_agent, summary, body=RunAgentInput, access="write", face="agui", is_stream=True)


def _status() -> Iterator[Route]:
    yield Route("GET", "/healthz", get_health, "Tell that the process answers", access="open", face="health")
    yield Route("GET", "/readyz", get_readiness, "Tell whether the store answers", face="health")
    yield Route("GET", "/metrics", get_metrics, "Read what the service counts", face="health")
    yield Route("GET", "/openapi.json", get_openapi, "Read this document", face="health")


ROUTES: tuple[Route, ...] = (
    *_sessions(),
    *_made(),
    *_said(),
    *_ran(),
    *_verbs(),
    *_work(),
    *_agui(),
    *_status(),
    *openai_routes(),
    *page_routes(),
)
