"""Images and files for a message: from a path, an address or bytes, with the type and the name for the model."""

from __future__ import annotations

import asyncio
import os
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from msgspec.structs import replace

from perdure.codec import MOST_BYTES
from perdure.errors import InvalidData
from perdure.model.message import Media, Message, Part
from perdure.model.value import brief

Sent = str | os.PathLike[str] | Part
"""A part after the first text of a message: an image or a file, a path to one, or a further text."""
# The first bytes of files of a type. They are checked before the name, which may be wrong.
_BEGINNINGS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
)
# Python's own table is not the same on every machine.
_TYPES = {
    "image/png": ".png",
    "image/jpeg": ".jpg .jpeg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/bmp": ".bmp",
    "image/tiff": ".tif .tiff",
    "image/heic": ".heic",
    "image/svg+xml": ".svg",
    "application/pdf": ".pdf",
    "text/plain": ".txt .log",
    "text/markdown": ".md",
    "text/csv": ".csv",
    "text/html": ".html .htm",
    "application/json": ".json",
    "application/xml": ".xml",
    "application/yaml": ".yaml .yml",
    "application/rtf": ".rtf",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": ".xlsx",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": ".pptx",
    "audio/mpeg": ".mp3",
    "audio/wav": ".wav",
    "audio/ogg": ".ogg",
    "audio/flac": ".flac",
    "audio/mp4": ".m4a",
    "video/mp4": ".mp4",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
}
_BY_ENDING = {ending: kind for kind, endings in _TYPES.items() for ending in endings.split()}
_SAY = "say what it is: media_type='image/png', for instance"


def attach(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
    *,
    name: str | None = None,
    media_type: str | None = None,
) -> Media:
    """Return an image or a file to send: `await chat.send("What is this?", perdure.attach("plot.png"))`.

    `source` is a path, an address (`https://…`, which the provider fetches, or `data:…`), or bytes. The `media_type` is
    known from what the bytes begin with, or from the name's ending, unless you give it. `name` is the name that the
    model is told.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return _of_bytes(bytes(source), name, media_type)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _of_data_url(source, name, media_type)
    if isinstance(source, str) and source.lower().startswith(("https://", "http://")):
        last = urlsplit(source).path.rpartition("/")[2]
        kind = media_type or _by_ending(last)
        if kind is None:
            raise InvalidData("$.source", f"what is at {brief(source)} cannot be told from its address; {_SAY}")
        return Media(kind, url=source, name=name or last or None)
    if not isinstance(source, str | os.PathLike):
        raise InvalidData("$.source", f"expected a path, an address or bytes, got {type(source).__name__}")
    return _of_bytes(_read(Path(source)), name or Path(source).name, media_type)


async def attached(given: Sent) -> str | Part:
    """Return a part of a message. A file given as a path is read in a thread, so that the loop is not blocked."""
    return await asyncio.to_thread(attach, given) if isinstance(given, os.PathLike) else given


async def message_of(message: object, parts: Sequence[Sent]) -> object:
    """Return the message to send: as it was given, or a text followed by parts."""
    if isinstance(message, os.PathLike):
        message = await attached(message)
    if not parts:
        return message
    more = [await attached(each) for each in parts]
    if isinstance(message, Message):
        return replace(message, parts=(*message.parts, *Message.user(*more).parts))
    if isinstance(message, str | Part):
        return Message.user(message, *more)
    problem = f"images and files follow a text or a Message; put them into the {type(message).__name__} itself"
    raise InvalidData("$.parts", problem)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(MOST_BYTES + 1)  # one byte over the limit is enough to see that a file is too large
    except FileNotFoundError:
        raise InvalidData("$.source", f"the file {path} does not exist") from None
    except IsADirectoryError:
        raise InvalidData("$.source", f"{path} is a directory; name a file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidData("$.source", f"{path} cannot be read: {reason}") from None
    if len(body) > MOST_BYTES:
        raise InvalidData("$.source", f"{path} has more than the {MOST_BYTES // 1_000_000} MB that a file may have")
    return body


def _of_bytes(body: bytes, name: str | None, media_type: str | None) -> Media:
    called = name or "these bytes"
    if not body:
        raise InvalidData("$.source", f"{called}: there is nothing in it")
    kind = media_type or type_by_beginning(body) or _by_ending(name or "") or _by_text(body)
    if kind is None:
        raise InvalidData("$.source", f"{called}: its type is not known; {_SAY}")
    return Media(kind, data=body, name=name)


def _of_data_url(url: str, name: str | None, media_type: str | None) -> Media:
    head, comma, data = url[5:].partition(",")
    kind, *options = head.split(";")
    try:
        body = b64decode(data, validate=True) if "base64" in options else unquote_to_bytes(data)
    except ValueError:
        body = b""
    if not comma or not body:
        raise InvalidData("$.source", "this data: address is incomplete")
    return _of_bytes(body, name, media_type or kind or None)


def type_by_beginning(body: bytes) -> str | None:
    """Return the type that the first bytes show. Providers refuse an image whose type is named wrongly."""
    # RIFF is a container: the format in it is named after the length.
    if body[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(body[8:12])
    return next((kind for beginning, kind in _BEGINNINGS if body.startswith(beginning)), None)


def _by_ending(name: str) -> str | None:
    return _BY_ENDING.get(os.path.splitext(name)[1].lower())


def _by_text(body: bytes) -> str | None:
    """Return the type of a plain text, such as a program."""
    # Binary files may be valid UTF-8, too, but a text has no NUL.
    try:
        return "text/plain" if "\0" not in body.decode() else None
    except UnicodeDecodeError:
        return None
