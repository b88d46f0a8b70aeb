"""The caller of a run: the context for its tools, and the data that is stored to make the context again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import isawaitable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import ConfigurationError, InvalidData
from perdure.loop.factory import LoopFactory
from perdure.model.definition import refuse_secrets
from perdure.model.session import AgentSession
from perdure.model.value import with_article
from perdure.protocols import NeedsContext, Tool


class Caller(msgspec.Struct, frozen=True):
    """The context and the data that a caller gives to the tools of its run. Only the data is ever stored."""

    context: object = None
    data: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, context: object, data: Mapping[str, Any] | None) -> Caller:
        """Return a caller. Raise InvalidData if the data is not a JSON object, or names a secret."""
        if data is None:
            return cls(context)
        if not isinstance(data, Mapping):
            raise InvalidData("$.context_data", f"expected a mapping, got {type(data).__name__}")
        refuse_secrets(data, "$.context_data")
        return cls(context, codec.decode_plain(codec.encode_json(dict(data), "$.context_data")))

    async def known_to(self, loops: LoopFactory, session: AgentSession) -> Caller:
        """Return the caller with a context: its own, or one that `connect(context=…)` makes if the caller is gone."""
        if self.context is not None or loops.make_context is None:
            return self
        try:
            made = loops.make_context(session, self.data)
            return replace(self, context=await made if isawaitable(made) else made)
        except Exception as error:  # a user's function may raise any error; a killed or queued run keeps waiting
            why = f"{type(error).__name__}: {error}".rstrip(". ")
            what = f"The function that makes contexts failed for session {session.id!r}: {why}."
            advice = (
                "Correct the function of connect(context=…) and connect again: recover() continues a run that waits, "
                "send(…) begins one."
            )
            raise ConfigurationError(what, advice, missing="context") from error

    def require_for(self, tools: Iterable[Tool], session_id: str) -> None:
        """Raise ConfigurationError if a tool needs a context that is missing or of another type: its call would fail.

        A run that was killed or queued then keeps waiting, since nothing of it has begun here.
        """
        if self.context is not None:
            self._require_type(tools, session_id)
            return
        needing = [tool.name for tool in tools if isinstance(tool, NeedsContext) and tool.needs_context]
        if needing:
            what = f"The tool {needing[0]!r} of session {session_id!r} needs a context, and there is none."
            advice = (
                "Give one: send(…, context=…). For runs without a caller (recovered, or sent from a queue) name a "
                "function that makes one: connect(…, context=lambda session, data: …). On the command line, write "
                "def context(session, data) into a file that --tools names."
            )
            raise ConfigurationError(what, advice, missing="context", name=needing[0])

    def _require_type(self, tools: Iterable[Tool], session_id: str) -> None:
        for tool in tools:
            wanted = getattr(tool, "context_type", None)
            if isinstance(wanted, type) and not isinstance(self.context, wanted):
                needs = f"The tool {tool.name!r} of session {session_id!r} needs a context of type {_full(wanted)}"
                advice = "Pass one: send(…, context=…), or return one from the function of connect(…, context=…)."
                what = f"{needs}, and was given {with_article(_full(type(self.context)))}."
                raise ConfigurationError(what, advice, missing="context", name=tool.name)


def _full(kind: type) -> str:
    """Return a class's name with its module, since two modules may have classes of the same name."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


NOBODY = Caller()
