"""The messages that a caller gives to be answered, checked before anything is claimed or spent."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from perdure import codec
from perdure.errors import InvalidData
from perdure.loop.factory import LoopFactory
from perdure.model.checks import expect_method
from perdure.model.message import (
    CONTINUES,
    Envelope,
    Media,
    Message,
    Part,
    Role,
    Text,
    require_distinct,
    several_messages,
)


def redacted_messages(messages: tuple[Message, ...], loops: LoopFactory) -> tuple[Message, ...]:
    """Return messages as they will be stored, and as the model will be sent them."""
    redaction = getattr(loops, "redaction", None)  # a custom builder of loops need not have one
    return messages if redaction is None else redaction.messages(messages)


def require_loops(loops: LoopFactory) -> LoopFactory:
    """Return a builder of loops. Raise InvalidData for anything else."""
    return expect_method(loops, "build", "$.loops")


def messages_to_send(message: object, *, any_role: bool = False) -> tuple[Message, ...]:
    """Return one message, or several, as messages to be answered. Raise InvalidData for what no model could answer.

    With `any_role`, messages of other roles than `user` are accepted: a conversation from elsewhere, for instance.
    """
    if not isinstance(any_role, bool):
        raise InvalidData("$.any_role", f"expected True or False, got {type(any_role).__name__}")
    several = isinstance(message, Sequence) and not isinstance(message, str | bytes | bytearray)
    given: Sequence[object] = message if several else (message,)  # type: ignore[assignment]  # as was just asked
    if not given:
        raise InvalidData("$.message", "there is nothing to send; give at least one message")
    messages = several_messages(given, "$.message") if several else (Message.of(message),)
    for place, each in enumerate(messages):
        _check(each, f"$.message[{place}]" if several else "$.message", any_role)
        codec.encode_message(codec.detached(each)[0])  # raises InvalidData if it could not be stored
    require_distinct(messages, "$.message")
    return tuple(map(_as_said, messages))


def _as_said(message: Message) -> Message:
    """Return a message without the mark of perdure's own notes, which input filters are not asked about."""
    if not message.is_note:
        return message
    return replace(message, metadata={name: each for name, each in message.metadata.items() if name != CONTINUES})


def _check(message: Message, path: str, any_role: bool) -> None:
    if message.role != "user" and not any_role:
        problem = f"a message of role {message.role} is not sent as a user's; inject() it, or send(…, any_role=True)"
        raise InvalidData(f"{path}.role", problem)
    if not any(_says_something(part, message.role) for part in message.parts):
        raise InvalidData(path, "the message is blank; give a text, or a part such as Media")


def _says_something(part: Part, role: Role) -> bool:
    """Tell whether a part reaches the model. Calls and results in a user's message do not."""
    if isinstance(part, Text):
        return bool(part.text.strip())
    return isinstance(part, Media) or (role in ("assistant", "tool") and not isinstance(part, Envelope))
