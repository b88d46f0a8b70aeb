"""LangGraph's checkpointer on perdure: `builder.compile(checkpointer=PerdureSaver())`.

A thread is a session, each subgraph's namespace a child session of it, and each checkpoint a version. The channel of
messages is the transcript, and other channels are metadata. The writes of tasks are on the session's record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from perdure.adapters.extras import extra

with extra("langgraph"):
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import (
        BaseCheckpointSaver,
        ChannelVersions,
        Checkpoint,
        CheckpointMetadata,
        CheckpointTuple,
        DeltaChannelHistory,
    )
    from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.adapters.home import Home
from perdure.adapters.langgraph_checkpoints import Codec, NewCheckpoint, Place, writes_entry
from perdure.adapters.langgraph_messages import MessageViews
from perdure.adapters.langgraph_threads import Listed, Threads
from perdure.errors import InvalidData
from perdure.model.checks import expect, expect_text
from perdure.model.value import brief
from perdure.protocols import Entry, SessionStore
from perdure.sessions.blocking import BlockingChat
from perdure.sessions.chat import Chat


class PerdureSaver(BaseCheckpointSaver[Any]):
    """A checkpointer that keeps LangGraph's threads in a perdure store: `builder.compile(checkpointer=PerdureSaver())`.

    `store` is a URL or a store; without one it is the store that the command line uses. `owner` keeps the threads of
    one user apart. With `strict`, a run that would continue beside another on the same thread raises SessionConflict.
    LangGraph's own savers silently drop the work of one. `messages` names the channel that is the conversation.
    """

    def __init__(
        self,
        *,
        store: str | SessionStore | None = None,
        owner: str | None = None,
        strict: bool = True,
        messages: str = "messages",
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self._messages = expect_text(messages, "$.messages", blank=False)
        self._home = Home("langgraph", store, owner=owner)
        self._threads = Threads(self._home, strict=expect(strict, bool, "$.strict"))
        self._views = MessageViews()

    def chat(self, thread_id: str) -> Chat:
        """Return a chat with every perdure verb for a thread. The graph sees what they change."""
        return self._home.chat(self._threads.id_of(Place(thread_id)))

    def blocking_chat(self, thread_id: str) -> BlockingChat:
        """Return the same verbs for code without an event loop."""
        return self._home.blocking_chat(self._threads.id_of(Place(thread_id)))

    def version_of(self, config: RunnableConfig) -> int:
        """Return the version that keeps a checkpoint, for `chat.fork(version=…)`. Without an id it is the newest.

        Raise InvalidData if its thread has no such checkpoint.
        """
        return self._home.wait(self._threads.version_of(Place.of(config)))

    async def aversion_of(self, config: RunnableConfig) -> int:
        """Return the same in code with an event loop."""
        return await self._home.run(self._threads.version_of(Place.of(config)))

    @property
    def _codec(self) -> Codec:
        """The codec of this moment. It is not kept, since LangGraph and its users replace a saver's serializer."""
        return Codec(self.serde, self._views)

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self._home.wait(self._threads.get(Place.of(config), self._codec))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return await self._home.run(self._threads.get(Place.of(config), self._codec))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        new = self._new(config, checkpoint, metadata, new_versions)
        self._home.wait(self._threads.put(new, self._codec))
        return new.saved_at

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        new = self._new(config, checkpoint, metadata, new_versions)
        await self._home.run(self._threads.put(new, self._codec))
        return new.saved_at

    def _new(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> NewCheckpoint:
        return NewCheckpoint(Place.of(config), checkpoint, metadata, new_versions, config, self._messages)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        place, entry = self._writes(config, writes, task_id, task_path)
        self._home.wait(self._threads.note(place, entry))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        place, entry = self._writes(config, writes, task_id, task_path)
        await self._home.run(self._threads.note(place, entry))

    def _writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> tuple[Place, Entry]:
        place = Place.of(config)
        return place, writes_entry(place, writes, task_id, task_path, self.serde)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        for listed in self._home.wait(self._matching(config, filter, before, limit)):
            found = self._home.wait(self._threads.listed(listed, self._codec))
            if found is not None:
                yield found

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        for listed in await self._home.run(self._matching(config, filter, before, limit)):
            found = await self._home.run(self._threads.listed(listed, self._codec))
            if found is not None:
                yield found

    async def _matching(
        self,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Sequence[Listed]:
        # A config without a namespace asks for all of the thread's.
        is_open = config is not None and config["configurable"].get("checkpoint_ns") is None
        return await self._threads.matching(
            None if config is None else Place.of(config),
            every_ns=is_open,
            filter=filter,
            before=None if before is None else before["configurable"].get("checkpoint_id"),
            limit=limit,
        )

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return self._home.wait(self._threads.history(Place.of(config), channels, self._codec))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return await self._home.run(self._threads.history(Place.of(config), channels, self._codec))

    def delete_thread(self, thread_id: str) -> None:
        self._home.wait(self._threads.delete(str(thread_id)))

    async def adelete_thread(self, thread_id: str) -> None:
        await self._home.run(self._threads.delete(str(thread_id)))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self._home.wait(self._threads.copy(str(source_thread_id), str(target_thread_id)))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await self._home.run(self._threads.copy(str(source_thread_id), str(target_thread_id)))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self._home.wait(self._pruned(thread_ids, strategy))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await self._home.run(self._pruned(thread_ids, strategy))

    async def _pruned(self, thread_ids: Sequence[str], strategy: str) -> None:
        verbs = {"keep_latest": self._threads.keep_latest, "delete": self._threads.delete}
        if strategy not in verbs:
            raise InvalidData("$.strategy", f"expected 'keep_latest' or 'delete', got {brief(strategy)}")
        for thread_id in thread_ids:
            await verbs[strategy](str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        self._home.wait(self._threads.delete_runs(set(run_ids)))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await self._home.run(self._threads.delete_runs(set(run_ids)))

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Return the next version of a channel: a number, or a text in a thread that another saver began."""
        if isinstance(current, str):
            number = int(current.partition(".")[0]) + 1
            # LangGraph compares these as texts, so they have the widths that its own savers use.
            return f"{number:032}.{0:016}"
        return 1 if current is None else current + 1
