"""A turn with a bounded view: the last 50 messages of 10,000 are read, a turn is added, beside OpenAI's `limit=50`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import Run, Side, interleaved, ms
from benchmarks.others.turns import Turn
from benchmarks.setting import filled, make_steady, next_turn, turn
from perdure import AgentSession, SessionRuntime, SqliteStore, TrimTranscript

VIEW, HISTORY = 50, 10_000


class BoundedTurn:
    """An action that reads the view, adds a turn, and shows the last 50 messages, or two more to keep a turn whole."""

    async def execute_on(self, session: AgentSession, context: object = None) -> AgentSession:
        read = list(session.state.transcript)
        assert VIEW <= len(read) <= VIEW + 2
        said = session.with_state(session.state.with_messages(*turn()))
        return await TrimTranscript(VIEW).execute_on(said)


async def measure(run: Run) -> None:
    with run.folder() as folder:
        try:
            peer = await openai_turn(folder)
        except ImportError as error:
            for key in ("bounded.warm", "bounded.cold"):
                run.skip(key, f"OpenAI Agents cannot be imported: {error}")
            return
        async with SqliteStore(folder / "bench.db") as store:
            runtime = SessionRuntime(store)
            ids = [(await filled(runtime, HISTORY)).id for _ in range(2)]
            for session_id in ids:
                await runtime.execute(session_id, TrimTranscript(VIEW))
            await make_steady(store, folder / "bench.db")

            async def warm() -> None:
                await runtime.execute(ids[0], BoundedTurn())

            async def cold() -> None:
                store.evict(ids[1])
                await runtime.execute(ids[1], BoundedTurn())

            at_hand, read, theirs = await interleaved(warm, cold, peer, rounds=300, warm_up=20)
    cpu = f"processor {ms(theirs.cpu)} / {ms(at_hand.cpu)}"
    run.report("bounded.warm", theirs.wall / at_hand.wall, f"{ms(theirs.wall)} / {ms(at_hand.wall)}; {cpu}")
    cpu = f"processor {ms(theirs.cpu)} / {ms(read.cpu)}"
    run.report("bounded.cold", theirs.wall / read.wall, f"{ms(theirs.wall)} / {ms(read.wall)}; {cpu}")


async def openai_turn(folder: Path) -> Side:
    from agents import SQLiteSession

    from benchmarks.others.with_openai_agents import items

    session = SQLiteSession("bounded", folder / "openai.db")
    history = [item for number in range(HISTORY // 4) for item in items(Turn(-number))]
    await session.add_items(history)  # type: ignore[arg-type]  # dicts will do; its log is as long as it gets by this

    async def one_turn() -> None:
        assert len(await session.get_items(limit=VIEW)) == VIEW
        await session.add_items(items(next_turn()))  # type: ignore[arg-type]

    return one_turn
