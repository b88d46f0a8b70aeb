"""The `input` of clients: messages, and decisions on calls that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from perdure.actions.given import messages_to_send
from perdure.errors import InvalidData
from perdure.model.given_messages import messages_of
from perdure.model.message import Message, ToolCall
from perdure.server.openai.errors import invalid, unsupported

APPROVAL = "mcpr_"
"""The prefix of an approval request's id. The digest of the call that needs approval follows."""
_DENIED = "The user has denied this call."


class Given(msgspec.Struct, frozen=True):
    """An `input`, read."""

    messages: list[Message]
    answers: dict[str, Any]
    """The results of calls that the client has made, by the ids of the calls."""
    approved: list[str]
    """The digests of calls that are approved."""
    denied: dict[str, str]
    """The reasons why others are denied, by their digests."""
    compaction: str | None
    """The handle of a conversation that was compacted before."""

    @property
    def decides(self) -> bool:
        return bool(self.answers or self.approved or self.denied)


def read_input(given: str | Sequence[Mapping[str, Any]], most: int) -> Given:
    """Return the messages and decisions of an input. Raise a Problem that names the item that cannot be taken."""
    if isinstance(given, str):
        return Given(_sendable([Message.user(given)]), {}, [], {}, None)
    if len(given) > most:
        raise invalid("input", f"expected at most {most} items, got {len(given)}")
    made = {item.get("call_id") for item in given if item.get("type") == "function_call"}
    read = _Reader(made)
    for place, item in enumerate(given):
        read.take(item, f"input[{place}]")
    return read.given()


class _Reader:
    """A reader that takes the items of an input one by one."""

    def __init__(self, made: set[Any]) -> None:
        self._made = made
        """The calls that the input itself contains. Their outputs are messages, and do not answer calls that wait."""
        self._said: list[object] = []
        self._places: list[str] = []
        self._answers: dict[str, Any] = {}
        self._approved: list[str] = []
        self._denied: dict[str, str] = {}
        self._compaction: str | None = None

    def take(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type")
        if kind == "function_call_output" and item.get("call_id") not in self._made:
            self._answer(item, path)
        elif kind == "mcp_approval_response":
            self._decide(item, path)
        elif kind == "mcp_call":
            self._said += _made_before(item, path)
            # Twice, since it becomes two messages: the call and its result.
            self._places += [path, path]
        elif kind == "compaction":
            self._begin(item, path)
        elif kind == "mcp_approval_request":
            raise unsupported(path, "what waits for an approval is continued with `previous_response_id`")
        elif kind == "item_reference":
            raise unsupported(path, "items are not looked up; give them whole, or use `previous_response_id`")
        else:
            self._said.append(_plain(item))
            self._places.append(path)

    def given(self) -> Given:
        try:
            messages = messages_of(self._said, "input", self._places)
        except InvalidData as error:
            raise invalid(error.path, error.problem) from None
        return Given(_sendable(messages), self._answers, self._approved, self._denied, self._compaction)

    def _answer(self, item: Mapping[str, Any], path: str) -> None:
        (message,) = _messages([item], path)
        result = message.tool_results[0]
        if result.call_id in self._answers:
            raise invalid(f"{path}.call_id", "two outputs are given for one call; give one")
        self._answers[result.call_id] = result.content

    def _decide(self, item: Mapping[str, Any], path: str) -> None:
        name, approve, reason = item.get("approval_request_id"), item.get("approve"), item.get("reason")
        if not isinstance(name, str) or not name.startswith(APPROVAL) or not isinstance(approve, bool):
            raise invalid(path, "an approval has the `approval_request_id` of its request, and `approve`")
        digest = name.removeprefix(APPROVAL)
        if digest in self._approved or digest in self._denied:
            raise invalid(path, "two decisions are given on one request; give one")
        if approve:
            self._approved.append(digest)
        else:
            self._denied[digest] = reason if isinstance(reason, str) and reason.strip() else _DENIED

    def _begin(self, item: Mapping[str, Any], path: str) -> None:
        handle = item.get("encrypted_content")
        if self._said or self._compaction is not None or not isinstance(handle, str):
            raise invalid(path, "a compaction comes first, once, as it was given")
        self._compaction = handle


def _sendable(messages: list[Message]) -> list[Message]:
    """Return messages if they can be sent. Raise a Problem otherwise, before anything is made for them."""
    try:
        return list(messages_to_send(messages, any_role=True)) if messages else []
    except InvalidData as error:
        raise invalid("input", error.problem) from None


def _messages(items: Sequence[Mapping[str, Any]], path: str) -> list[Message]:
    try:
        return messages_of([_plain(item) for item in items], "input", [path] * len(items))
    except InvalidData as error:
        raise invalid(error.path, error.problem) from None


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item without fields that only the service that made it understands: the model here may be another."""
    unfit = ("id", "encrypted_content", "phase", "namespace", "created_by")
    return {name: value for name, value in item.items() if name not in unfit}


def _made_before(item: Mapping[str, Any], path: str) -> list[Message]:
    """Return a call that an agent has made in another response, as the messages that it was."""
    name, arguments, output = item.get("name"), item.get("arguments"), item.get("output")
    if not isinstance(name, str) or not isinstance(item.get("id"), str):
        raise invalid(path, "an mcp_call has an id, a name and arguments")
    error = item.get("error")
    failed = error.get("message", "") if isinstance(error, Mapping) else error
    try:
        decoded = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError):
        raise invalid(f"{path}.arguments", "arguments are a JSON object, as text") from None
    call = ToolCall(name, decoded, str(item["id"]))
    told = str(failed) if failed else str(output or "")
    return [Message("assistant", (call,)), Message.tool(call.id, told, name=name, is_error=bool(failed))]
