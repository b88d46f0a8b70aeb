"""Every public constructor and verb checks its arguments at once: a typed error says where, and nothing changes."""

from __future__ import annotations

import asyncio
import inspect
import io
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

import perdure
from perdure import (
    AgentDefinition,
    AgentState,
    Chat,
    EventBus,
    ExecutionBudget,
    FunctionTool,
    InvalidData,
    LoopFactory,
    MemoryStore,
    Message,
    ModelConfig,
    PerdureError,
    SessionRuntime,
    Sessions,
    Stage,
    Workflow,
)
from perdure.archive import export_sessions, import_sessions, repair
from perdure.copying import copy
from perdure.fsck import fsck
from perdure.testing import ScriptedDriver

P: Any = perdure
NAN, INFINITY, HALF = float("nan"), float("inf"), "half \ud800"
NAIVE = datetime(2030, 1, 1)
LOOPS = LoopFactory(driver=ScriptedDriver(["yes"]))


def plain(a: int) -> int:
    return a


CONSTRUCTORS: dict[str, Callable[[], Any]] = {
    # MCP servers: more in tests/loop/mcp/test_options.py
    "mcp without a command": lambda: P.mcp(""),
    "mcp of None": lambda: P.mcp(None),
    "mcp of half a surrogate pair": lambda: P.mcp(["uvx", HALF]),
    "mcp name": lambda: P.mcp("x", name=5),
    "mcp timeout NaN": lambda: P.mcp("x", timeout=NAN),
    "mcp only": lambda: P.mcp("x", only="add"),
    "mcp env": lambda: P.mcp("x", env={"A": 5}),
    "mcp headers for a command": lambda: P.mcp("x", headers={"A": "b"}),
    "load_policy number": lambda: P.load_policy(5),
    "Replay system_prompt": lambda: P.Replay("x.jsonl", system_prompt=5),
    # Values
    "SessionId of a number": lambda: P.SessionId(5),
    "SessionId with a slash": lambda: P.SessionId("../etc"),
    "SessionId None": lambda: P.SessionId(None),
    "Message of another role": lambda: P.Message("judge"),
    "Message.user of a number": lambda: Message.user(5),  # type: ignore[arg-type]
    "Message.user of None": lambda: Message.user(None),  # type: ignore[arg-type]
    "Message.user metadata": lambda: Message.user("x", metadata=5),  # type: ignore[arg-type]
    "Message.user id": lambda: Message.user("x", id=5),  # type: ignore[arg-type]
    "Message.assistant tool_calls": lambda: Message.assistant(tool_calls=5),  # type: ignore[arg-type]
    "Message.assistant a call that is none": lambda: Message.assistant(tool_calls=["x"]),  # type: ignore[list-item]
    "Message.tool call id": lambda: Message.tool(5, "x"),  # type: ignore[arg-type]
    "Message.system of None": lambda: Message.system(None),  # type: ignore[arg-type]
    "Message.of None": lambda: Message.of(None),
    "Message.of bytes": lambda: Message.of(b"x"),
    "Message.of a dict without a role": lambda: Message.of({"content": "x"}),
    "Message.of a dict with a wrong key": lambda: Message.of({"role": "user", "txt": "x"}),
    "AgentDefinition output": lambda: P.AgentDefinition("a", output=5),
    "AgentDefinition output text": lambda: P.AgentDefinition("a", output="City"),
    "AgentDefinition output of no type": lambda: P.AgentDefinition("a", output=object),
    "ToolCall without a name": lambda: P.ToolCall(None),
    "ToolCall arguments": lambda: P.ToolCall("t", 5),
    "ToolCall id": lambda: P.ToolCall("t", {}, 5),
    "Media without content": lambda: P.Media("image/png"),
    "Media with text for data": lambda: P.Media("image/png", data="x"),
    "Media of a number": lambda: P.Media(5, url="x"),
    "Media with data and a hash": lambda: P.Media("image/png", data=b"x", hash="0" * 64, size=1),
    "Media with a hash that is none": lambda: P.Media("image/png", hash="x", size=1),
    "Media with a hash and no size": lambda: P.Media("image/png", hash="0" * 64),
    "Media with a size and no hash": lambda: P.Media("image/png", data=b"x", size=1),
    "Media name": lambda: P.Media("image/png", data=b"x", name=5),
    "attach nothing": lambda: P.attach(None),
    "attach a missing file": lambda: P.attach("/nowhere/at/all.png"),
    "attach empty bytes": lambda: P.attach(b""),
    "attach bytes of no type": lambda: P.attach(b"\0\xff"),
    "attach an address of no type": lambda: P.attach("https://a.example/"),
    "ModelConfig name": lambda: ModelConfig(5),  # type: ignore[arg-type]
    "ModelConfig blank name": lambda: ModelConfig(" "),
    "ModelConfig temperature NaN": lambda: ModelConfig("m", temperature=NAN),
    "ModelConfig temperature text": lambda: ModelConfig("m", temperature="hot"),  # type: ignore[arg-type]
    "ModelConfig max_tokens text": lambda: ModelConfig("m", max_tokens="8"),  # type: ignore[arg-type]
    "ModelConfig thinking": lambda: ModelConfig("m", thinking=5),  # type: ignore[arg-type]
    "ModelConfig base_url": lambda: ModelConfig("m", base_url=5),  # type: ignore[arg-type]
    "ModelConfig settings": lambda: ModelConfig("m", settings=5),  # type: ignore[arg-type]
    "ModelConfig api_key_env": lambda: ModelConfig("m", api_key_env="sk-123"),
    "AgentDefinition name": lambda: AgentDefinition(None),  # type: ignore[arg-type]
    "AgentDefinition prompt": lambda: AgentDefinition("a", system_prompt=None),  # type: ignore[arg-type]
    "AgentDefinition tools": lambda: AgentDefinition("a", tools="look"),  # type: ignore[arg-type]
    "AgentDefinition a tool that is no name": lambda: AgentDefinition("a", tools=(5,)),  # type: ignore[arg-type]
    "AgentDefinition model": lambda: AgentDefinition("a", model=5),  # type: ignore[arg-type]
    "AgentDefinition budget": lambda: AgentDefinition("a", budget=5),  # type: ignore[arg-type]
    "AgentDefinition metadata": lambda: AgentDefinition("a", metadata=[]),  # type: ignore[arg-type]
    "ExecutionBudget negative": lambda: ExecutionBudget(max_steps=-1),
    "ExecutionBudget NaN": lambda: ExecutionBudget(max_seconds=NAN),
    "ExecutionBudget text": lambda: ExecutionBudget(max_tokens="9"),  # type: ignore[arg-type]
    "ExecutionBudget bool": lambda: ExecutionBudget(max_steps=True),
    "ExecutionBudget deadline": lambda: ExecutionBudget(deadline=NAIVE),
    # Tools and loops
    "tool of a number": lambda: P.tool(5),
    "tool with an unknown option": lambda: P.tool(retries=3),
    "FunctionTool name": lambda: FunctionTool(plain, name=5),  # type: ignore[arg-type]
    "FunctionTool blank name": lambda: FunctionTool(plain, name="a b"),
    "FunctionTool description": lambda: FunctionTool(plain, description=5),  # type: ignore[arg-type]
    "FunctionTool timeout text": lambda: FunctionTool(plain, timeout="5"),  # type: ignore[arg-type]
    "FunctionTool timeout NaN": lambda: FunctionTool(plain, timeout=NAN),
    "FunctionTool timeout 0": lambda: FunctionTool(plain, timeout=0),
    "FunctionTool timeout bool": lambda: FunctionTool(plain, timeout=True),
    "FunctionTool on_unknown": lambda: FunctionTool(plain, on_unknown="maybe"),  # type: ignore[arg-type]
    "FunctionTool idempotent": lambda: FunctionTool(plain, idempotent="yes"),  # type: ignore[arg-type]
    "FunctionTool needs_approval": lambda: FunctionTool(plain, needs_approval="no"),  # type: ignore[arg-type]
    "ToolRegistry of a number": lambda: P.ToolRegistry(5),
    "ToolRegistry of numbers": lambda: P.ToolRegistry([5]),
    "LoopFactory tools": lambda: LoopFactory(tools=5),  # type: ignore[arg-type]
    "LoopFactory driver": lambda: LoopFactory(driver=5),  # type: ignore[arg-type]
    "LoopFactory driver class": lambda: LoopFactory(driver=ScriptedDriver),  # type: ignore[arg-type]
    "LoopFactory model": lambda: LoopFactory(model=5),  # type: ignore[arg-type]
    "LoopFactory capabilities": lambda: LoopFactory(capabilities=5),  # type: ignore[arg-type]
    "LoopFactory a capability that is none": lambda: LoopFactory(capabilities={"x": 5}),  # type: ignore[dict-item]
    "LoopFactory subagents": lambda: LoopFactory(subagents=["helper"]),  # type: ignore[list-item]
    "LoopFactory subagents number": lambda: LoopFactory(subagents=5),  # type: ignore[arg-type]
    "LoopFactory subagent_policy": lambda: LoopFactory(subagent_policy=3),  # type: ignore[arg-type]
    "LoopFactory interceptors": lambda: LoopFactory(interceptors=[5]),
    "LoopFactory interceptors number": lambda: LoopFactory(interceptors=5),  # type: ignore[arg-type]
    "LoopFactory interceptor class": lambda: LoopFactory(interceptors=[P.Interceptor]),
    "LoopFactory interceptor priority": lambda: LoopFactory(interceptors=[(P.Interceptor(), "high")]),
    "LoopFactory input_filters": lambda: LoopFactory(input_filters=[5]),  # type: ignore[list-item]
    "LoopFactory input_filters number": lambda: LoopFactory(input_filters=5),  # type: ignore[arg-type]
    "LoopFactory events": lambda: LoopFactory(events=5),  # type: ignore[arg-type]
    "LoopFactory concurrency": lambda: LoopFactory(concurrency="fast"),  # type: ignore[arg-type]
    "LoopFactory concurrency 0": lambda: LoopFactory(concurrency=0),
    "LoopFactory keep_traces": lambda: LoopFactory(keep_traces="no"),  # type: ignore[arg-type]
    "LoopFactory max_result_chars": lambda: LoopFactory(max_result_chars=-1),
    "LoopFactory compaction": lambda: LoopFactory(compaction=0.5),  # type: ignore[arg-type]
    "SubagentPolicy text": lambda: P.SubagentPolicy("deep"),
    "SubagentPolicy negative": lambda: P.SubagentPolicy(-1),
    "SubagentPolicy None": lambda: P.SubagentPolicy(None),
    "UseGuards": lambda: P.UseGuards(5),
    "BudgetGuard": lambda: P.BudgetGuard(None),
    "Judge model": lambda: P.Judge(5),
    "Judge criteria": lambda: P.Judge("m", criteria=5),
    "Chosen": lambda: P.Chosen(5),
    "RetryingDriver driver": lambda: P.RetryingDriver(5),
    "RetryingDriver attempts": lambda: P.RetryingDriver(ScriptedDriver([]), attempts=0),
    "RetryingDriver base": lambda: P.RetryingDriver(ScriptedDriver([]), base=NAN),
    "RetryingDriver cap": lambda: P.RetryingDriver(ScriptedDriver([]), cap=-1),
    "AutoCompaction share": lambda: P.AutoCompaction(2),
    "AutoCompaction option": lambda: P.AutoCompaction(keep=2),
    "CompactionOptions keep_last": lambda: P.CompactionOptions(keep_last="x"),
    "CompactionOptions strategy": lambda: P.CompactionOptions(compact_strategy="magic"),
    "Rejected reason": lambda: P.Rejected(None),
    "Warned text": lambda: P.Warned(5),
    "Blocked reason": lambda: P.Blocked(None),
    # Actions
    "SendMessage None": lambda: P.SendMessage(None, LOOPS),
    "SendMessage number": lambda: P.SendMessage(5, LOOPS),
    "SendMessage bytes": lambda: P.SendMessage(b"x", LOOPS),
    "SendMessage nothing": lambda: P.SendMessage([], LOOPS),
    "SendMessage loops": lambda: P.SendMessage("x", 5),
    "SendMessage key": lambda: P.SendMessage("x", LOOPS, key=5),
    "SendMessage empty key": lambda: P.SendMessage("x", LOOPS, key=""),
    "SendMessage half a character in its key": lambda: P.SendMessage("x", LOOPS, key=HALF),
    "SendMessage when_busy": lambda: P.SendMessage("x", LOOPS, when_busy="wait"),
    "SendMessage any_role": lambda: P.SendMessage("x", LOOPS, any_role="yes"),
    "SendMessage half a character": lambda: P.SendMessage(Message.user("x", metadata={"a": HALF}), LOOPS),
    "SendMessage NaN": lambda: P.SendMessage(Message.user("x", metadata={"a": NAN}), LOOPS),
    "SendParallel strategy": lambda: P.SendParallel("x", LOOPS, configs=["a", "b"], strategy=5),
    "SendParallel strategy by name": lambda: P.SendParallel("x", LOOPS, configs=["a", "b"], strategy="first"),
    "SendParallel one config": lambda: P.SendParallel("x", LOOPS, configs=["a"]),
    "SendParallel configs number": lambda: P.SendParallel("x", LOOPS, configs=5),
    "SendParallel configs of numbers": lambda: P.SendParallel("x", LOOPS, configs=[5, 6]),
    "SendParallel loops": lambda: P.SendParallel("x", None, configs=["a", "b"]),
    "ApproveToolCalls loops": lambda: P.ApproveToolCalls(5),
    "ApproveToolCalls call_ids": lambda: P.ApproveToolCalls(LOOPS, call_ids=5),
    "ApproveToolCalls one id": lambda: P.ApproveToolCalls(LOOPS, call_ids="call_0"),
    "DenyToolCalls reason": lambda: P.DenyToolCalls(LOOPS, reason=None),
    "ResumeExecution": lambda: P.ResumeExecution(5),
    "CompactTranscript loops": lambda: P.CompactTranscript(loops=5),
    "CompactTranscript option": lambda: P.CompactTranscript(keep=3),
    "UncompactTranscript": lambda: P.UncompactTranscript(5),
    "AdoptBranch": lambda: P.AdoptBranch(5),
    "ForkSession at": lambda: P.ForkSession(at=1.5),
    "ForkSession negative": lambda: P.ForkSession(at=-1),
    "ForkSession dst": lambda: P.ForkSession(dst="a b"),
    "Rewind None": lambda: P.Rewind(None),
    "Rewind bool": lambda: P.Rewind(True),
    "Rewind version 0": lambda: P.Rewind(0),
    "TrimTranscript text": lambda: P.TrimTranscript("3"),
    "TrimTranscript negative": lambda: P.TrimTranscript(-1),
    "InjectMessage nothing": lambda: P.InjectMessage(),
    "InjectMessage None": lambda: P.InjectMessage(None),
    "ChangeSystemPrompt None": lambda: P.ChangeSystemPrompt(None),
    "ChangeSystemPrompt number": lambda: P.ChangeSystemPrompt(5),
    "ChangeSystemPrompt list": lambda: P.ChangeSystemPrompt(["x"]),
    "ChangeModel number": lambda: P.ChangeModel(5),
    "ChangeDefinition": lambda: P.ChangeDefinition("poet"),
    "WriteMetadata key": lambda: P.WriteMetadata(5, 1),
    "WriteMetadata value": lambda: P.WriteMetadata("k", {1, 2}),
    "WriteMetadata NaN": lambda: P.WriteMetadata("k", NAN),
    "UpdateTask number": lambda: P.UpdateTask(5),
    "UpdateTask list": lambda: P.UpdateTask(["x"]),
    "TagSession number": lambda: P.TagSession(5),
    "TagSession remove": lambda: P.TagSession(remove="vip"),
    "RenameSession blank": lambda: P.RenameSession(" "),
    # Sessions, runtime, stores
    "connect None": lambda: P.connect(None),
    "connect to a scheme that is none": lambda: P.connect("redis://x"),
    "connect without a path": lambda: P.connect("sqlite://"),
    "connect sqlite with an option": lambda: P.connect("sqlite:///s.db?timeout=30"),
    "connect file with an option": lambda: P.connect("file://s?lock_timeout=3"),
    "connect memory with an option": lambda: P.connect("memory://?x=1"),
    "connect postgres with an option": lambda: P.connect("postgresql://u@h/d?timeoutt=3"),
    "connect postgres schema": lambda: P.connect("postgresql://u@h/d?schema=a&schema=b"),
    "connect owner": lambda: P.connect("memory://", owner=5),
    "connect empty owner": lambda: P.connect("memory://", owner=""),
    "connect half an owner": lambda: P.connect("memory://", owner=HALF),
    "connect live": lambda: P.connect("memory://", live=0),
    "connect events": lambda: P.connect("memory://", events=5),
    "connect live text": lambda: P.connect("memory://", live="9"),
    "connect live None": lambda: P.connect("memory://", live=None),
    "connect grace": lambda: P.connect("memory://", grace=""),
    "connect grace None": lambda: P.connect("memory://", grace=None),
    "connect grace NaN": lambda: P.connect("memory://", grace=NAN),
    "connect controller": lambda: P.connect("memory://", controller=5),
    "connect empty controller": lambda: P.connect("memory://", controller=""),
    "connect owner bytes": lambda: P.connect("memory://", owner=b"ann"),
    "connect bytes": lambda: P.connect(b"memory://"),
    "connect tools": lambda: P.connect("memory://", tools=5),
    "connect model": lambda: P.connect("memory://", model=b"m"),
    "connect_blocking grace": lambda: P.connect_blocking("memory://", grace=-1),
    "Entry kind": lambda: P.Entry(5),
    "Entry run": lambda: P.Entry("x", run=5),
    "Claim epoch": lambda: P.Claim("s", "1", 1, "ann", 30.0),
    "Claim lease": lambda: P.Claim("s", 1, 1, "ann", -1),
    "connect unknown option": lambda: P.connect("memory://", tool=[plain]),
    "connect driver": lambda: P.connect("memory://", driver="openai"),
    "connect_blocking events": lambda: P.connect_blocking("memory://", events=5),
    "store_of number": lambda: P.store_of(5),
    "store_of cache": lambda: P.store_of("memory://", cache="big"),
    "Sessions store": lambda: Sessions(5, LOOPS, events=EventBus()),  # type: ignore[arg-type]
    "Sessions loops": lambda: Sessions(MemoryStore(), 5, events=EventBus()),  # type: ignore[arg-type]
    "BlockingSessions": lambda: P.BlockingSessions(5),
    "Chat sessions": lambda: Chat(5, P.SessionId("a")),  # type: ignore[arg-type]
    "SessionRuntime store": lambda: SessionRuntime(5),  # type: ignore[arg-type]
    "SessionRuntime controller": lambda: SessionRuntime(MemoryStore(), controller=5),  # type: ignore[arg-type]
    "SessionRuntime events": lambda: SessionRuntime(MemoryStore(), events=5),  # type: ignore[arg-type]
    "SessionHookStack priority": lambda: P.SessionHookStack.empty().with_hook(
        P.PassThroughSessionController(), priority="high"
    ),
    "SessionRepository": lambda: P.SessionRepository(None),
    "EventBus.subscribe kind": lambda: EventBus().subscribe(5, print),  # type: ignore[arg-type]
    "EventBus.subscribe subscriber": lambda: EventBus().subscribe(object, 5),  # type: ignore[arg-type]
    "EventBus.wiretap": lambda: EventBus().wiretap(5),  # type: ignore[arg-type]
    "SqliteStore path": lambda: P.SqliteStore(5),
    "SqliteStore cache": lambda: P.SqliteStore("s.db", cache="big"),
    "FileStore directory": lambda: P.FileStore(None),
    "FileStore lock_timeout": lambda: P.FileStore("s", lock_timeout=-1),
    "FileStore lock_timeout NaN": lambda: P.FileStore("s", lock_timeout=NAN),
    "PostgresStore dsn": lambda: P.PostgresStore(5),
    "PostgresStore pool text": lambda: P.PostgresStore("postgresql://u@h/d", pool="8"),
    "PostgresStore cache": lambda: P.PostgresStore("postgresql://u@h/d", cache="big"),
    "PostgresStore schema": lambda: P.PostgresStore("postgresql://u@h/d", schema=5),
    "SqliteStore lock_timeout": lambda: P.SqliteStore("s.db", lock_timeout="5"),
    "SqliteStore lock_timeout bool": lambda: P.SqliteStore("s.db", lock_timeout=True),
    "FileStore bytes": lambda: P.FileStore(b"s"),
    "PostgresStore pool": lambda: P.PostgresStore("postgresql://u@h/d", pool=0),
    "Workflow id": lambda: Workflow("a b", [Stage("s")]),
    "Workflow stages": lambda: Workflow("w", 5),  # type: ignore[arg-type]
    "Workflow a stage that is none": lambda: Workflow("w", ["draft"]),  # type: ignore[list-item]
    "Workflow none": lambda: Workflow("w", []),
    "Stage name": lambda: Stage(5),  # type: ignore[arg-type]
    "Stage agent": lambda: Stage("s", agent="poet"),  # type: ignore[arg-type]
    "Stage prompt": lambda: Stage("s", prompt=5),  # type: ignore[arg-type]
    "Stage session": lambda: Stage("s", session=5),  # type: ignore[arg-type]
    "Stage after": lambda: Stage("s", after="a"),
    "Stage after number": lambda: Stage("s", after=5),  # type: ignore[arg-type]
    "Stage fork_from": lambda: Stage("s", fork_from=5),  # type: ignore[arg-type]
}

Verb = Callable[[Sessions, Chat], Any]
VERBS: dict[str, Verb] = {
    "open number": lambda s, c: s.open(5),  # type: ignore[arg-type]
    "open a bad id": lambda s, c: s.open("a/b"),
    "open agent": lambda s, c: s.open("b", "poet"),  # type: ignore[arg-type]
    "open tags": lambda s, c: s.open("b", tags=5),  # type: ignore[arg-type]
    "open one tag": lambda s, c: s.open("b", tags="vip"),
    "open on_change": lambda s, c: s.open("b", on_change="ask"),  # type: ignore[arg-type]
    "close number": lambda s, c: s.close(5),  # type: ignore[arg-type]
    "subscribe number": lambda s, c: s.subscribe("s", 5),  # type: ignore[arg-type]
    "chat.subscribe number": lambda s, c: c.subscribe(5),  # type: ignore[arg-type]
    "send None": lambda s, c: c.send(None),
    "send number": lambda s, c: c.send(5),
    "send blank": lambda s, c: c.send(" "),
    "send list of numbers": lambda s, c: c.send([5]),
    "send key": lambda s, c: c.send("x", key=5),  # type: ignore[arg-type]
    "send half a key": lambda s, c: c.send("x", key=HALF),
    "send when_busy": lambda s, c: c.send("x", when_busy=True),  # type: ignore[arg-type]
    "send NaN": lambda s, c: c.send(Message.user("x", metadata={"a": NAN})),
    "send output": lambda s, c: c.send("x", output=5),
    "send output of no schema": lambda s, c: c.send("x", output={"type": "objekt"}),
    "send output NaN": lambda s, c: c.send("x", output={"default": NAN}),
    "send steering output": lambda s, c: c.send("x", output=int, when_busy="steer"),
    "stream output": lambda s, c: c.stream("x", output="City"),
    "run output": lambda s, c: s.run("x", output=[int]),
    "send a part of no kind": lambda s, c: c.send({"role": "user", "content": [{"type": "hologram"}]}),
    "inject an item of no kind": lambda s, c: c.inject([{"type": "web_search_call"}]),
    "inject a text among others": lambda s, c: c.inject([{"role": "user", "content": "x"}, "x"]),
    "export format": lambda s, c: c.export(io.BytesIO(), format="pdf"),  # type: ignore[arg-type]
    "export history of the archive": lambda s, c: c.export(io.BytesIO(), history=True),
    "export history": lambda s, c: c.export(io.BytesIO(), format="openai", history=5),  # type: ignore[arg-type]
    "export openai to a number": lambda s, c: c.export(5, format="openai"),  # type: ignore[arg-type]
    "import format": lambda s, c: s.import_(io.BytesIO(b"[]"), format="markdown"),  # type: ignore[arg-type]
    "import no messages": lambda s, c: s.import_(io.BytesIO(b"[]"), format="openai"),
    "import agent": lambda s, c: s.import_(io.BytesIO(b"[]"), format="openai", agent=5),  # type: ignore[arg-type]
    "import an archive for an agent": lambda s, c: s.import_(io.BytesIO(b""), agent=P.AgentDefinition("a")),
    "send to a number": lambda s, c: s.send(5, "x"),  # type: ignore[arg-type]
    "stream None": lambda s, c: c.stream(None),
    "stream key": lambda s, c: c.stream("x", key=5),  # type: ignore[arg-type]
    "follow number": lambda s, c: s.follow(5),  # type: ignore[arg-type]
    "follow after number": lambda s, c: c.follow(after=5),  # type: ignore[arg-type]
    "follow after text": lambda s, c: c.follow(after="yesterday"),
    "follow after half a character": lambda s, c: c.follow(after=HALF),
    "follow timeout": lambda s, c: c.follow(timeout="1"),  # type: ignore[arg-type]
    "follow timeout NaN": lambda s, c: c.follow(timeout=NAN),
    "run None": lambda s, c: s.run(None),
    "run blank agent": lambda s, c: s.run("x", agent=""),  # type: ignore[arg-type]
    "run agent": lambda s, c: s.run("x", agent="poet"),  # type: ignore[arg-type]
    "approve number": lambda s, c: c.approve(5),  # type: ignore[arg-type]
    "deny None": lambda s, c: c.deny(None),  # type: ignore[arg-type]
    "cancel number": lambda s, c: s.cancel(5),  # type: ignore[arg-type]
    "execute number": lambda s, c: s.execute("s", 5),  # type: ignore[arg-type]
    "execute a class": lambda s, c: s.execute("s", P.ClearSession),
    "execute on_conflict": lambda s, c: s.execute("s", P.ClearSession(), on_conflict="ignore"),  # type: ignore[arg-type]
    "inject blank": lambda s, c: c.inject(" "),
    "inject texts": lambda s, c: c.inject(["x", "y"]),
    "inject None": lambda s, c: c.inject(None),
    "inject NaN": lambda s, c: c.inject(Message.user("x", metadata={"a": NAN})),
    "inject half a character": lambda s, c: c.inject(Message("user", (P.Text(HALF),))),
    "trim text": lambda s, c: c.trim("1"),  # type: ignore[arg-type]
    "trim negative": lambda s, c: c.trim(-1),
    "compact option": lambda s, c: c.compact(keep=1),
    "compact keep_last": lambda s, c: c.compact(keep_last=NAN),
    "uncompact number": lambda s, c: c.uncompact(5),  # type: ignore[arg-type]
    "rewind None": lambda s, c: c.rewind(None),  # type: ignore[arg-type]
    "rewind 99": lambda s, c: c.rewind(99),
    "rewind huge": lambda s, c: c.rewind(2**70),
    "fork at": lambda s, c: c.fork("b", at=99),
    "fork at text": lambda s, c: c.fork("b", at="nobody"),
    "fork version": lambda s, c: c.fork("b", version="1"),  # type: ignore[arg-type]
    "fork to a bad id": lambda s, c: c.fork("a b"),
    "adopt None": lambda s, c: c.adopt(None),  # type: ignore[arg-type]
    "diff number": lambda s, c: c.diff(5),  # type: ignore[arg-type]
    "exists number": lambda s, c: s.exists(5),  # type: ignore[arg-type]
    "info number": lambda s, c: s.info(5),  # type: ignore[arg-type]
    "session version text": lambda s, c: c.session("1"),  # type: ignore[arg-type]
    "session version bool": lambda s, c: c.session(True),
    "session version 0": lambda s, c: c.session(0),
    "session version fraction": lambda s, c: c.session(1.0),  # type: ignore[arg-type]
    "session version huge": lambda s, c: c.session(2**70),
    "list limit": lambda s, c: s.list(limit=0),
    "list limit text": lambda s, c: s.list(limit="many"),  # type: ignore[typeddict-item]
    "list status": lambda s, c: s.list(status="sleeping"),
    "list half a status": lambda s, c: s.list(status=HALF),
    "list filter": lambda s, c: s.list(colour="red"),  # type: ignore[call-arg]
    "list time": lambda s, c: s.list(created_after=NAIVE),
    "list after": lambda s, c: s.list(after="nowhere"),
    "list owner number": lambda s, c: s.list(owner=5),  # type: ignore[typeddict-item]
    "length number": lambda s, c: s.length(5),  # type: ignore[arg-type]
    "snapshot number": lambda s, c: s.snapshot(5),  # type: ignore[arg-type]
    "history number": lambda s, c: s.history(5),  # type: ignore[arg-type]
    "search number": lambda s, c: s.search(5),  # type: ignore[arg-type]
    "search blank": lambda s, c: s.search(" "),
    "search limit": lambda s, c: s.search("x", limit=0),
    "search limit text": lambda s, c: s.search("x", limit="9"),  # type: ignore[arg-type]
    "record limit": lambda s, c: s.record("s", limit=-1),
    "record limit text": lambda s, c: s.record("s", limit="9"),  # type: ignore[arg-type]
    "record before": lambda s, c: s.record("s", before=2**70),
    "record before text": lambda s, c: s.record("s", before="9"),  # type: ignore[arg-type]
    "loop number": lambda s, c: s.loop("s", 5),  # type: ignore[arg-type]
    "loop nobody": lambda s, c: s.loop("s", "nobody"),
    "events after": lambda s, c: c.events(after="9"),  # type: ignore[arg-type]
    "events after negative": lambda s, c: c.events(after=-1),
    "events after huge": lambda s, c: c.events(after=2**70),
    "events last": lambda s, c: c.events(last=-1),
    "events last text": lambda s, c: c.events(last="9"),  # type: ignore[arg-type]
    "events follow": lambda s, c: c.events(follow="yes"),  # type: ignore[arg-type]
    "recover number": lambda s, c: s.recover(5),  # type: ignore[arg-type]
    "export number": lambda s, c: s.export(5),  # type: ignore[arg-type]
    "export half a path": lambda s, c: s.export(HALF),
    "export to a NUL": lambda s, c: s.export("a\0b"),
    "export ids": lambda s, c: s.export(io.BytesIO(), 5),  # type: ignore[arg-type]
    "export one id": lambda s, c: s.export(io.BytesIO(), "s"),
    "export progress": lambda s, c: s.export(io.BytesIO(), progress=5),  # type: ignore[arg-type]
    "import number": lambda s, c: s.import_(5),  # type: ignore[arg-type]
    "import half a path": lambda s, c: s.import_(HALF),
    "import from a NUL": lambda s, c: s.import_("a\0b"),
    "import nothing": lambda s, c: s.import_(io.BytesIO(b"nothing")),
    "purge everything": lambda s, c: s.purge(),
    "purge the future": lambda s, c: s.purge(older_than=timedelta(days=-1)),
    "purge tomorrow": lambda s, c: s.purge(older_than=datetime.fromisoformat("2999-01-01T00:00:00+00:00")),
    "purge number": lambda s, c: s.purge(older_than=5),  # type: ignore[arg-type]
    "purge naive": lambda s, c: s.purge(older_than=NAIVE),
    "purge status": lambda s, c: s.purge(status="old"),
    "delete number": lambda s, c: s.delete(5),  # type: ignore[arg-type]
    "erase number": lambda s, c: s.erase(5),  # type: ignore[arg-type]
    "restore number": lambda s, c: s.restore(5),  # type: ignore[arg-type]
    "start nothing": lambda s, c: c.start(""),
    "start option": lambda s, c: c.start("hi", key=5),  # type: ignore[arg-type]
    "stream detach": lambda s, c: anext(c.stream("hi", detach="yes")),  # type: ignore[arg-type]
    "result number": lambda s, c: c.result(5),  # type: ignore[arg-type]
    "context data": lambda s, c: c.send("hi", context_data=5),  # type: ignore[arg-type]
    "context factory": lambda s, c: asyncio.sleep(0, LoopFactory(context=5)),  # type: ignore[arg-type]
    "of number": lambda s, c: s.of(5),  # type: ignore[arg-type]
    "of nobody": lambda s, c: s.of(None),  # type: ignore[arg-type]
    "erase_owner number": lambda s, c: s.erase_owner(5),  # type: ignore[arg-type]
    "erase_owner nobody": lambda s, c: s.erase_owner(),
    "erase_owner wait": lambda s, c: s.erase_owner("ada", wait="long"),  # type: ignore[arg-type]
    "redact number": lambda s, c: c.redact(5),  # type: ignore[arg-type]
    "redact one id": lambda s, c: c.redact("m"),
    "redact numbers": lambda s, c: c.redact([5]),  # type: ignore[list-item]
    "redact nobody": lambda s, c: c.redact(["nobody"]),
    "redact replacement": lambda s, c: c.redact(["m-1"], replacement=5),  # type: ignore[arg-type]
    "check_and_rotate text": lambda s, c: c.check_and_rotate("1 h"),  # type: ignore[arg-type]
    "check_and_rotate NaN": lambda s, c: c.check_and_rotate(NAN),
    "check_and_rotate negative": lambda s, c: c.check_and_rotate(timedelta(days=-1)),
    "runtime.create definition": lambda s, c: s.runtime.create("poet"),  # type: ignore[arg-type]
    "runtime.create seed": lambda s, c: s.runtime.create(AgentDefinition("a"), seed=5),  # type: ignore[arg-type]
    "runtime.create id": lambda s, c: s.runtime.create(AgentDefinition("a"), session_id="a b"),
    "runtime.create owner": lambda s, c: s.runtime.create(AgentDefinition("a"), owner=5),  # type: ignore[arg-type]
    "runtime.create half an owner": lambda s, c: s.runtime.create(AgentDefinition("a"), owner=HALF),
    "runtime.create tags": lambda s, c: s.runtime.create(AgentDefinition("a"), tags=[5]),  # type: ignore[list-item]
    "runtime.get_session version": lambda s, c: s.runtime.get_session("s", version="1"),  # type: ignore[arg-type]
    "runtime.get_session_info number": lambda s, c: s.runtime.get_session_info(5),  # type: ignore[arg-type]
    "runtime.list_sessions": lambda s, c: s.runtime.list_sessions(limit=5000),
    "runtime.record before": lambda s, c: s.runtime.record("s", before=2**70),
    "runtime.loop number": lambda s, c: s.runtime.loop("s", 5),  # type: ignore[arg-type]
    "runtime.events last": lambda s, c: s.runtime.events("s", last=1.5),  # type: ignore[arg-type]
    "runtime.close grace": lambda s, c: s.runtime.close(grace=""),  # type: ignore[arg-type]
    "runtime.close grace None": lambda s, c: s.runtime.close(grace=None),  # type: ignore[arg-type]
    "runtime.close grace negative": lambda s, c: s.runtime.close(grace=-1),
    "runtime.add number": lambda s, c: s.runtime.add(5),  # type: ignore[arg-type]
    "runtime.follow number": lambda s, c: s.runtime.follow(5),  # type: ignore[arg-type]
    "recover runtime": lambda s, c: P.recover(5, LOOPS),
    "recover loops": lambda s, c: P.recover(s.runtime, 5),
    "recover session": lambda s, c: P.recover(s.runtime, LOOPS, session_id=5),
    "workflow.run sessions": lambda s, c: Workflow("w", [Stage("a")]).run(5, "x"),  # type: ignore[arg-type]
    "workflow.run input": lambda s, c: Workflow("w", [Stage("a")]).run(s, 5),  # type: ignore[arg-type]
    "workflow.run blank": lambda s, c: Workflow("w", [Stage("a")]).run(s, " "),
    "store.create owner": lambda s, c: s.store.create(session_with(owner=5)),
    "store.create tags": lambda s, c: s.store.create(session_with(tags=(5,))),
    "store.load version": lambda s, c: s.store.load("s", "1"),  # type: ignore[arg-type]
    "store.load number": lambda s, c: s.store.load(5),  # type: ignore[arg-type]
    "store.ids_with_prefix None": lambda s, c: s.store.ids_with_prefix(None),  # type: ignore[attr-defined]
    "store.ids_with_prefix limit": lambda s, c: s.store.ids_with_prefix("s", limit="9"),  # type: ignore[attr-defined]
    "fsck number": lambda s, c: fsck(5),  # type: ignore[arg-type]
    "repair number": lambda s, c: repair(5),  # type: ignore[arg-type]
    "copy number": lambda s, c: copy(s.store, 5),  # type: ignore[arg-type]
    "copy of a number": lambda s, c: copy(5, s.store),  # type: ignore[arg-type]
    "export_sessions number": lambda s, c: export_sessions(5, "all.jsonl"),  # type: ignore[arg-type]
    "import_sessions number": lambda s, c: import_sessions(5, "all.jsonl"),  # type: ignore[arg-type]
    "shared number": lambda s, c: P.shared(5),  # type: ignore[arg-type]
    "shared nonsense": lambda s, c: P.shared("nonsense"),
    "store.ids_with_suffix None": lambda s, c: s.store.ids_with_suffix(None),  # type: ignore[attr-defined]
    "store.ids_with_suffix short": lambda s, c: s.store.ids_with_suffix("abc"),  # type: ignore[attr-defined]
    "journal.runs before": lambda s, c: s.runtime.journal.runs("s", before=2**70),  # type: ignore[union-attr]
    "journal.runs limit": lambda s, c: s.runtime.journal.runs("s", limit="9"),  # type: ignore
    "journal.find_key half": lambda s, c: s.runtime.journal.find_key("s", HALF),  # type: ignore[union-attr]
}


def session_with(**info: Any) -> Any:
    agent = AgentDefinition("a")
    return P.AgentSession(P.AgentSessionInfo(P.SessionId("b"), "a", **info), agent, AgentState.of(agent))


def test_there_are_many() -> None:
    """The table covers the public names: constructors, actions, and every verb."""
    assert len(CONSTRUCTORS) + len(VERBS) >= 125


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_refuses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong argument is a PerdureError in the constructor itself, and leaves no file behind."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PerdureError) as caught:
        CONSTRUCTORS[name]()
    check_said(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["memory://", "sqlite:///s.db", "file://s", "postgresql://"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return postgres_server.url_of(tmp_path) if request.param == "postgresql://" else str(request.param)


@pytest.mark.sample(2)
async def test_a_verb_refuses(url: str) -> None:
    """A wrong argument is a PerdureError, the same on every store, and the session is unchanged."""
    async with P.store_of(url) as store:
        accepted = {name: told for name in VERBS if (told := await refused(store, name)) is not None}
    assert accepted == {}


async def refused(store: Any, name: str) -> str | None:
    """Return how a verb fails to refuse; None if it refuses properly."""
    async with perdure.connect(store, driver=ScriptedDriver(lambda _: "yes")) as sessions:
        chat = await sessions.open("s")
        if await chat.length() == 0:
            await chat.inject(Message.user("first", id="m-1"))
        before, listed = await chat.session(), len(await sessions.list())
        try:
            async with asyncio.timeout(5):
                await ended(VERBS[name](sessions, chat))
        except PerdureError as error:
            check_said(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        else:
            return "accepted"
        unchanged = (await chat.session(), len(await sessions.list())) == (before, listed)
        return None if unchanged else "something was changed"


async def ended(outcome: Any) -> None:
    if inspect.isawaitable(outcome):
        await outcome
    elif isinstance(outcome, AsyncIterator):
        async for _ in outcome:
            break


def check_said(error: PerdureError) -> None:
    assert len(str(error)) > 15
    if isinstance(error, InvalidData):
        assert error.path.startswith(("$", "line "))


NOT_ENTERED: dict[str, Verb] = {
    "open": lambda s, c: s.open("s"),
    "subscribe": lambda s, c: s.subscribe("s", print),
    "chat.subscribe": lambda s, c: c.subscribe(print),
    "send": lambda s, c: c.send("x"),
    "stream": lambda s, c: c.stream("x"),
    "follow": lambda s, c: c.follow(),
    "run": lambda s, c: s.run("x"),
    "inject": lambda s, c: c.inject(Message.user("x")),
    "exists": lambda s, c: s.exists("s"),
    "list": lambda s, c: s.list(),
    "history": lambda s, c: c.history(),
    "search": lambda s, c: s.search("x"),
    "find": lambda s, c: s.find("x"),
    "recover": lambda s, c: s.recover(),
    "export": lambda s, c: s.export(io.BytesIO()),
    "purge": lambda s, c: s.purge(status="deleted"),
    "gc": lambda s, c: s.gc(),
    "events": lambda s, c: c.events(),
}


@pytest.mark.parametrize("name", NOT_ENTERED)
async def test_a_connection_that_was_not_entered_does_nothing(name: str) -> None:
    """Every verb is a ConfigurationError that says how to open it, before and after its block."""
    sessions = perdure.connect("memory://", driver=ScriptedDriver(["yes"]))
    chat = Chat(sessions, P.SessionId("s"))
    for _ in range(2):
        with pytest.raises(P.ConfigurationError, match="async with"):
            await ended(NOT_ENTERED[name](sessions, chat))
        async with sessions:
            await sessions.open("s")


async def test_a_deleted_session_advises_what_works() -> None:
    """It cannot be resumed; forking it continues the conversation."""
    async with perdure.connect("memory://", driver=ScriptedDriver(lambda _: "yes")) as sessions:
        chat = await sessions.open("s")
        await chat.inject(Message.user("first"))
        await sessions.execute("s", P.DeleteSession())
        with pytest.raises(P.SessionNotActive, match="fork it") as caught:
            await chat.send("x")
        assert "ResumeSession" not in str(caught.value)
        fork = await chat.fork("t")
        assert (await fork.send("x")).text == "yes"


async def test_a_key_of_a_session_that_is_not_there_is_not_found(url: str) -> None:
    """Every store answers alike."""
    async with perdure.connect(url, driver=ScriptedDriver(["yes"])) as sessions:
        assert sessions.runtime.journal is not None
        assert await sessions.runtime.journal.find_key("nobody", "k") is None
