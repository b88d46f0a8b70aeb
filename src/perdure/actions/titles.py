"""The title that `connect(title=…)` gives a session after its first answer, saved with the run that gave it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial

from perdure.loop.factory import LoopFactory
from perdure.loop.tools import in_a_thread
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.value import kind_of
from perdure.model.words import first_words

PATIENCE = 10.0
"""The number of seconds that a title may take."""
_LONGEST = 200
_log = logging.getLogger("perdure.titles")


class Titling:
    """The request for a session's title, made once a run has answered, while the session is claimed.

    `name` is the result. The request is not a part of the run. If it fails, the run has ended all the same, and the
    first words serve as a title.
    """

    def __init__(self, session: AgentSession, loops: LoopFactory) -> None:
        self._session = session
        self._loops = loops
        self.name: str | None = None

    async def ask(self, state: AgentState) -> None:
        """Ask for a title if a state has the session's first answer, and the session has no name."""
        if not self._is_due(state):
            return
        try:
            async with asyncio.timeout(PATIENCE):
                made = await self._made(self._session.with_state(state))
            if made is not None and not isinstance(made, str):
                raise TypeError(f"a title is a text or None, not {kind_of(made)}")
        except Exception:  # it is the user's function, like a subscriber
            _log.exception("no title for session %s; its first words serve", self._session.id)
        else:
            # Redacted before it is cut: half a secret is not found.
            self.name = None if made is None else first_words(self._loops.redacted(made), _LONGEST)

    async def _made(self, session: AgentSession) -> object:
        assert self._loops.title is not None
        if inspect.iscoroutinefunction(self._loops.title):
            return await self._loops.title(session)
        # In a thread, since it may take long. One that is late is left behind there.
        made = await in_a_thread("title", partial(self._loops.title, session))
        return await made if inspect.isawaitable(made) else made

    def _is_due(self, state: AgentState) -> bool:
        info, run = self._session.info, state.execution
        if info.name is not None or info.spawn_ref is not None or run is None or not state.has_final_response:
            return False
        first = next((message for message in state.messages if message.role == "assistant"), None)
        return first is not None and first.metadata.get("execution_id") == run.execution_id

    def named(self, session: AgentSession) -> AgentSession:
        """Return a session with the title as its name."""
        return session if self.name is None else session.with_name(self.name)
