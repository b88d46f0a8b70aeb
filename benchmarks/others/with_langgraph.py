"""LangGraph: a graph with messages as its state, and AsyncSqliteSaver or perdure's saver as its checkpointer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph

from benchmarks.others.library import ON_PERDURE, Kind, OnPerdure, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn
from perdure.adapters.langgraph import PerdureSaver


def call(turn: Turn) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": TOOL, "args": turn.arguments, "id": turn.call_id}])


def messages(turn: Turn) -> list[AnyMessage]:
    return [
        HumanMessage(turn.question),
        call(turn),
        ToolMessage(turn.result, tool_call_id=turn.call_id, name=TOOL),
        AIMessage(turn.answer),
    ]


def kind(message: AnyMessage) -> Kind:
    if isinstance(message, HumanMessage):
        return "question"
    if isinstance(message, ToolMessage):
        return "result"
    return "call" if isinstance(message, AIMessage) and message.tool_calls else "answer"


class OneUpdate(Subject):
    name = "LangGraph, AsyncSqliteSaver"
    packages = ("langgraph", "langgraph-checkpoint-sqlite")
    durability = "SQLite, WAL, synchronous=FULL (SQLite's default): fsync at every commit; update_state, one checkpoint"
    state: Any = MessagesState

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.saving = AsyncSqliteSaver.from_conn_string(str(folder / "checkpoints.db"))
        self.graph = self._graph(await self.saving.__aenter__())
        self.models: dict[str, ScriptedModel] = {}

    def _graph(self, saver: BaseCheckpointSaver[Any]) -> Any:
        async def model(state: Any, config: RunnableConfig) -> dict[str, Any]:
            script: ScriptedModel = self.models[config["configurable"]["run"]]
            done = await script.next(kind(state["messages"][-1])) == "answer"
            return {"messages": [AIMessage(script.turn.answer) if done else call(script.turn)]}

        async def tools(state: Any, config: RunnableConfig) -> dict[str, Any]:
            script: ScriptedModel = self.models[config["configurable"]["run"]]
            asked = state["messages"][-1].tool_calls[0]
            return {"messages": [ToolMessage(script.tool()(**asked["args"]), tool_call_id=asked["id"], name=TOOL)]}

        def after_model(state: Any) -> str:
            return "tools" if state["messages"][-1].tool_calls else END

        builder: Any = StateGraph(self.state)
        builder.add_node("model", model)
        builder.add_node("tools", tools)
        builder.add_edge(START, "model")
        builder.add_conditional_edges("model", after_model, ["tools", END])
        builder.add_edge("tools", "model")
        return builder.compile(checkpointer=saver)

    def _config(self, session_id: str, run: str = "") -> Any:
        return {"configurable": {"thread_id": session_id, "run": run}}

    async def close(self) -> None:
        await self.saving.__aexit__(None, None, None)

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        if turns:
            many = [message for turn in turns for message in messages(turn)]
            await self.graph.aupdate_state(self._config(session_id), {"messages": many}, as_node="model")

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self.graph.aupdate_state(self._config(session_id), {"messages": messages(turn)}, as_node="model")

    async def load(self, session_id: str) -> Sequence[Any]:
        state = await self.graph.aget_state(self._config(session_id))
        return list(state.values.get("messages", []))

    def kind(self, message: Any) -> Kind:
        return kind(message)

    async def fork(self, session_id: str) -> None:
        """Write the checkpoint once more, as another child of its parent: a branch within the thread."""
        state = await self.graph.aget_state(self._config(session_id))
        await self.graph.aupdate_state(state.config, None, as_node="__copy__")

    async def writer(self, session_id: str) -> Write:
        """Return a run that has loaded the thread, and waits in its model for the turn to answer."""
        turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        loaded = asyncio.Event()
        run = f"writer-{id(turn)}"

        class Waiting(ScriptedModel):
            async def next(self, last: Kind) -> Any:
                loaded.set()
                self.turn = await turn
                return "answer"

        self.models[run] = Waiting(Turn(1))
        asked = {"messages": [HumanMessage("Which?")]}
        running = asyncio.create_task(self.graph.ainvoke(asked, self._config(session_id, run)))
        await loaded.wait()

        async def write(given: Turn) -> None:
            turn.set_result(given)
            await running

        return write

    async def past(self, session_id: str) -> Sequence[Any]:
        states = self.graph.aget_state_history(self._config(session_id))
        return [message async for state in states for message in state.values.get("messages", [])[-8:]]

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        self.models["run"] = model
        await self.graph.ainvoke({"messages": [HumanMessage(model.turn.question)]}, self._config(session_id, "run"))

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        self.models["run"] = model
        await self.graph.ainvoke(None, self._config(session_id, "run"))
        return "the run is finished"


class Run(OneUpdate):
    name = "LangGraph, as a run"
    durability = "the same; ainvoke with durability='async', the default: a checkpoint after every step, five a turn"
    run_settings = ()

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self.run(session_id, "default", ScriptedModel(turn))


def added(state: list[AnyMessage] | None, writes: Sequence[Any]) -> list[AnyMessage]:
    return [*(state or []), *(message for write in writes for message in write)]


class DeltaState(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(added)]


class Delta(Run):
    name = "LangGraph, as a run, DeltaChannel (beta)"
    durability = "the same; a checkpoint holds what was added, and every hundredth update the whole"
    state = DeltaState


class Kept(OnPerdure, OneUpdate):
    name = "LangGraph, PerdureSaver"
    packages = ("langgraph", "perdure")
    durability = f"{ON_PERDURE}; update_state, one checkpoint"

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.saver = PerdureSaver(store=self.url)
        self.graph = self._graph(self.saver)
        self.models = {}

    async def fork(self, session_id: str) -> None:
        await self.saver.chat(session_id).fork()


class KeptRun(Kept):
    name = "LangGraph, PerdureSaver, as a run"
    durability = Run.durability
    run_settings = ()
    append_turn = Run.append_turn


SUBJECTS = (OneUpdate, Kept, Run, KeptRun, Delta)
