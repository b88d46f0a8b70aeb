"""A store in front of another one, which lets no text through that redactors would change.

It is the last gate. A run redacts its input as it arrives, so that the model is sent what is stored. Here that only
costs a look at texts that are known already. Everything else that is written is redacted here: metadata, names,
prompts, items of inboxes, and the data of adapters and imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionInfoList
from perdure.protocols import (
    Appended,
    ArchivedSession,
    Change,
    Claim,
    Entry,
    Key,
    KeyRing,
    SessionStore,
    Sketch,
    Timer,
    Token,
    keys_of,
)
from perdure.redaction.redactors import Redactor
from perdure.redaction.texts import Redaction, TextFunction
from perdure.stores.urls import store_of

_TELLS_NOTHING = frozenset({"turn_start", "message_start", "message_end", "parallel_loop_end"})
"""Kinds of entries of runs that have no text in them. They name a message by its id."""
_INLINE = b'"data":"'
"""Contained in every stored message that has the bytes of a small file in it."""
_WRITES = frozenset(
    ("save_all", "claim", "append", "sketch", "post", "note", "set_timer", "ring", "add_token", "redact", "restore")
)
"""The verbs that write, beside `create` and `save`. A store need not have all of them."""


def redacting(store: str | SessionStore, redact: Iterable[Redactor | TextFunction]) -> SessionStore:
    """Return a store that redacts every text before it is written. It can be used wherever a store can.

    `store` is a store or its URL, and `redact` has redactors and functions over texts. `connect(redact=…)` makes one by
    itself. Give this one to an adapter of another framework.
    """
    redaction = Redaction.of(redact)
    if redaction is None:
        raise ConfigurationError("No redactors are given. perdure.redactors.DEFAULT has several.")
    return RedactingStore(store_of(store), redaction)


def without_redactors(store: SessionStore) -> SessionStore:
    """Return the store behind redactors, for verbs that write no texts: backups and repairs. Others are themselves."""
    inner: SessionStore = store.inner if isinstance(store, RedactingStore) else store
    return inner


class RedactingStore:
    """A store that passes every verb on to another one, with redacted texts. It has the verbs of that store."""

    exists: Any
    delete: Any
    load: Any

    def __init__(self, store: Any, redaction: Redaction) -> None:
        self.inner = store
        self.redaction = redaction
        for name in {*dir(type(store)), *getattr(store, "__dict__", ())}:
            if name.startswith("_") or hasattr(RedactingStore, name):
                continue
            verb = getattr(type(store), name, None) or getattr(store, name)
            if callable(verb):
                # Set on the object, since protocols look for them there. A verb that only reads costs nothing more.
                setattr(self, name, getattr(self, f"_{name}") if name in _WRITES else getattr(store, name))

    def over(self, store: Any) -> RedactingStore:
        """Return a store with the same redactors in front of another store."""
        return RedactingStore(store, self.redaction)

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.inner.__aexit__(*error)

    @property
    def is_open(self) -> bool:
        return bool(getattr(self.inner, "is_open", False))

    @property
    def keys(self) -> KeyRing | None:
        # Not by `__getattr__`, which `isinstance` with a protocol does not ask since Python 3.12.
        return keys_of(self.inner)

    @property
    def never_waits(self) -> bool:
        return bool(getattr(self.inner, "never_waits", False))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":  # before __init__, as in a copy, `inner` would ask for itself
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"<RedactingStore of {type(self.inner).__name__}>"

    async def list(self, **filters: Any) -> SessionInfoList:
        found: SessionInfoList = await self.inner.list(**filters)
        return found

    async def create(self, session: AgentSession, **options: Any) -> AgentSession:
        kept: AgentSession = await self.inner.create(self._session(session), **self._options(options))
        return kept

    async def save(self, session: AgentSession, **options: Any) -> AgentSession:
        kept: AgentSession = await self.inner.save(self._session(session), **self._options(options))
        return kept

    async def _save_all(self, changes: Sequence[Change]) -> Sequence[AgentSession]:
        made = [replace(each, **self._options({"entries": each.entries, "key": each.key})) for each in changes]
        made = [replace(each, session=self._session(each.session)) for each in made]
        kept: Sequence[AgentSession] = await self.inner.save_all(made)
        return kept

    async def _claim(self, session_id: str, **options: Any) -> tuple[Claim, Appended]:
        taken: tuple[Claim, Appended] = await self.inner.claim(session_id, **self._options(options))
        return taken

    async def _append(self, claim: Claim, **options: Any) -> Appended:
        appended: Appended = await self.inner.append(claim, **self._options(options))
        return appended

    async def _sketch(self, claim: Claim, piece: Sketch) -> bool:
        # Its stream has held back whatever could be part of a secret. A piece that still needs redaction was not
        # streamed in that way, and is not kept.
        if self.redaction.text(piece.text) != piece.text:
            return False
        return bool(await self.inner.sketch(claim, piece))

    async def _post(self, session_id: str, entry: Entry, **limits: Any) -> int:
        return int(await self.inner.post(session_id, self._entry(entry), **limits))

    async def _note(self, session_id: str, entries: Sequence[Entry]) -> int:
        return int(await self.inner.note(session_id, self._entries(entries)))

    async def _set_timer(self, timer: Timer, **options: Any) -> Timer:
        self.redaction.refuse(timer.name, "$.name")
        entry = None if timer.entry is None else self._entry(timer.entry)
        kept: Timer = await self.inner.set_timer(replace(timer, entry=entry), **options)
        return kept

    async def _ring(self, timer: Timer, **options: Any) -> bool | None:
        if options.get("entry") is not None:
            options["entry"] = self._entry(options["entry"])
        rung: bool | None = await self.inner.ring(timer, **options)
        return rung

    async def _add_token(self, token: Token) -> None:
        await self.inner.add_token(self.redaction.value(token))

    async def _redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        text = self.redaction.text(replacement) if isinstance(replacement, str) else replacement
        return int(await self.inner.redact(session_id, message_ids, replacement=text))

    async def _restore(self, archived: ArchivedSession) -> bool:
        return bool(await self.inner.restore(self._archived(archived)))

    def _session(self, session: AgentSession) -> AgentSession:
        if not isinstance(session, AgentSession):
            return session  # the store refuses it
        redaction, info = self.redaction, session.info
        for name, path in ((info.id, "$.id"), (info.owner, "$.owner"), (info.agent_name, "$.agent_name")):
            redaction.refuse(name, path)
        for place, tag in enumerate(info.tags):
            redaction.refuse(tag, f"$.tags[{place}]")
        return redaction.value(session)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("messages"):
            options["messages"] = [self._message(each) for each in options["messages"]]
        if options.get("entries"):
            options["entries"] = self._entries(options["entries"])
        key = options.get("key")
        if isinstance(key, Key):
            self.redaction.refuse(key.name, "$.key")
        return options

    def _message(self, message: Message) -> Message:
        return self.redaction.message(message) if isinstance(message, Message) else message

    def _entries(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        return [self._entry(each) for each in entries]

    def _entry(self, entry: Entry) -> Entry:
        if not isinstance(entry, Entry):
            return entry
        body = entry.body
        if isinstance(body, msgspec.Raw):
            # An append has many entries. Most of them can be let through without being decoded.
            if entry.kind in _TELLS_NOTHING or (entry.kind == "turn_end" and b'"errors"' not in bytes(body)):
                return entry
            if not self.redaction.may_touch(bytes(body).decode()):
                return entry
            body = codec.decode_plain(bytes(body))
        made = self.redaction.value(body)
        return entry if made is entry.body else replace(entry, body=made)

    def _archived(self, archived: ArchivedSession) -> ArchivedSession:
        """Return a session from elsewhere, redacted. Raise InvalidData if a secret is in a head or in a value."""
        # Heads name values by their hashes, so neither can be changed alone.
        for raw in (*archived.heads, *archived.values.values()):
            if self._is_touched(raw):
                raise InvalidData(
                    "$.heads",
                    "redactors find a secret in the session's name, prompt, metadata or state. Import it without "
                    "redactors into another store, remove the secret there, and export it again",
                )
        for name in archived.keys:
            self.redaction.refuse(name, "$.keys")
        return replace(
            archived,
            logs={name: self._log(log) for name, log in archived.logs.items()},
            lent={name: self._log(log) for name, log in archived.lent.items()},
            entries=tuple(self._entries(archived.entries)),
            inbox=tuple(self._entries(archived.inbox)),
        )

    def _is_touched(self, raw: bytes) -> bool:
        if not self.redaction.may_touch(raw.decode("utf-8", "surrogatepass")):
            return False
        plain = codec.decode_plain(raw)
        return self.redaction.value(plain) is not plain

    def _log(self, log: Mapping[int, bytes]) -> dict[int, bytes]:
        return {place: self._body(raw) for place, raw in log.items()}

    def _body(self, raw: bytes) -> bytes:
        # A small file is in its message as base64, in which no redactor would find anything.
        if _INLINE not in raw and not self.redaction.may_touch(raw.decode("utf-8", "surrogatepass")):
            return raw
        message = codec.decode_message(raw)
        made = self.redaction.message(message)
        return raw if made is message else codec.encode_message(made)
