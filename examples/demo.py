"""A session's life in one screen: create, act, fork, close the store, and load it all again."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from perdure import (
    AgentDefinition,
    AgentSession,
    ForkSession,
    InjectMessage,
    Message,
    SessionRuntime,
    SqliteStore,
    TrimTranscript,
    WriteMetadata,
)

SUPPORT = AgentDefinition(name="support", system_prompt="Be brief.")


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        print("A new store:")
        async with SqliteStore(path) as store:
            session, branch = await talk(store)
        print("\nThe store is closed. Open the file again:")
        async with SqliteStore(path) as store:
            await look_back(store, session, branch)


async def talk(store: SqliteStore) -> tuple[AgentSession, AgentSession]:
    runtime = SessionRuntime(store)

    session = await runtime.create(SUPPORT)
    show("create", session)

    session = await runtime.execute(session.id, WriteMetadata("ticket_id", "OPS-142"))
    show("write metadata", session)

    question = Message.user("My order has not arrived.")
    answer = Message.assistant("It left the warehouse on Monday and is due tomorrow.")
    session = await runtime.execute(session.id, InjectMessage(question, answer))
    show("inject two messages", session)

    branch = await store.create(await ForkSession().execute_on(session))
    show("fork", branch)

    branch = await runtime.execute(branch.id, InjectMessage(Message.user("Then cancel it, please.")))
    show("speak in the fork", branch)

    session = await runtime.execute(session.id, TrimTranscript(1))
    show("trim the original", session)
    return session, branch


async def look_back(store: SqliteStore, session: AgentSession, branch: AgentSession) -> None:
    runtime = SessionRuntime(store)
    for version in range(1, session.version + 1):
        show("the original", await runtime.get_session(session.id, version=version))
    fork = await runtime.get_session(branch.id)
    show("the fork", fork)

    print("\nWhat the fork shows; its first two messages are stored once, in the original's log:")
    for message in fork.state.messages:
        print(f"  {message.role:<10} {message.text}")

    print("\nSessions, newest first:")
    for info in await runtime.list_sessions(agent=SUPPORT.name):
        parent = f"fork of {info.parent_id}" if info.parent_id else "root"
        print(f"  {info.id}  version {info.version}  {info.status.value}  {parent}")


def show(what: str, session: AgentSession) -> None:
    metadata = " ".join(f"{key}={value}" for key, value in session.state.metadata.items())
    print(f"  {what:<20} version {session.version}  {len(session.state.messages)} messages  {metadata}".rstrip())


if __name__ == "__main__":
    asyncio.run(main())
