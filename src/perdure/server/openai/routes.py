"""The OpenAI face's part of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perdure.server.api.verbs import Nothing
from perdure.server.openai import conversations, models, responses
from perdure.server.openai.asking import CreateResponse
from perdure.server.openai.compacting import Compact, CompactedForm, compact
from perdure.server.openai.conversations import (
    ChangedConversation,
    ConversationForm,
    NewConversation,
    NewItems,
)
from perdure.server.openai.paging import ListForm, ListQuery
from perdure.server.routes import Route

_RESPONSE = "/v1/responses/{response}"
_CONVERSATION = "/v1/conversations/{conversation}"


def openai_routes() -> Iterator[Route]:
    """Yield the routes under `/v1`. Those that change nothing need no token that may write."""
    for route in (*_responses(), *_conversations(), *_models()):
        yield replace(route, face="openai", access="read" if route.method == "GET" else "write")


def _responses() -> Iterator[Route]:
    yield Route(
        "POST",
        "/v1/responses",
        responses.create_response,
        "Have an input answered",
        body=CreateResponse,
        gives=dict,
        takes_key=True,
        is_stream=True,
    )
    yield Route(
        "POST",
        "/v1/responses/compact",
        compact,
        "Make a long conversation short",
        body=Compact,
        gives=CompactedForm,
    )
    yield Route(
        "GET",
        _RESPONSE,
        responses.get_response,
        "Read a response, or follow it",
        responses.RetrieveQuery,
        gives=dict,
        is_stream=True,
    )
    yield Route("DELETE", _RESPONSE, responses.delete_response, "Delete a response", gives=responses.DeletedForm)
    yield Route(
        "POST",
        f"{_RESPONSE}/cancel",
        responses.cancel_response,
        "End a response where it stands",
        body=Nothing,
        gives=dict,
    )
    yield Route(
        "GET",
        f"{_RESPONSE}/input_items",
        responses.list_input,
        "Read what a response answers",
        ListQuery,
        gives=ListForm,
    )


def _conversations() -> Iterator[Route]:
    yield Route(
        "POST",
        "/v1/conversations",
        conversations.create_conversation,
        "Create a conversation",
        body=NewConversation,
        gives=ConversationForm,
        takes_key=True,
    )
    yield Route("GET", _CONVERSATION, conversations.get_conversation, "See a conversation", gives=ConversationForm)
    yield Route(
        "POST",
        _CONVERSATION,
        conversations.update_conversation,
        "Keep other metadata with a conversation",
        body=ChangedConversation,
        gives=ConversationForm,
    )
    yield Route(
        "DELETE",
        _CONVERSATION,
        conversations.delete_conversation,
        "Hide a conversation",
        gives=conversations.DeletedForm,
    )
    yield Route(
        "GET", f"{_CONVERSATION}/items", conversations.list_items, "Read what was said", ListQuery, gives=ListForm
    )
    yield Route(
        "POST",
        f"{_CONVERSATION}/items",
        conversations.create_items,
        "Add to what was said",
        body=NewItems,
        gives=ListForm,
    )
    yield Route("GET", f"{_CONVERSATION}/items/{{item}}", conversations.get_item, "Read one item", gives=dict)


def _models() -> Iterator[Route]:
    yield Route("GET", "/v1/models", models.list_models, "List the agents", gives=models.ModelsForm)
    yield Route("GET", "/v1/models/{model}", models.get_model, "See an agent", gives=models.ModelForm)
