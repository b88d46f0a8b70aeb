"""perdure gives an LLM agent a session that lasts. These are the names for daily use, each imported at its first use.

Less common names can be imported from here too. They are listed by `perdure.events`, `perdure.records`,
`perdure.parallel`, `perdure.replay`, `perdure.protocols` and `perdure.errors`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.actions.adopt import AdoptBranch as AdoptBranch
    from perdure.actions.approval import AnswerToolCalls as AnswerToolCalls
    from perdure.actions.approval import ApproveToolCalls as ApproveToolCalls
    from perdure.actions.approval import DenyToolCalls as DenyToolCalls
    from perdure.actions.approval import SettleToolCalls as SettleToolCalls
    from perdure.actions.clear import ClearSession as ClearSession
    from perdure.actions.compact import CompactTranscript as CompactTranscript
    from perdure.actions.compact import UncompactTranscript as UncompactTranscript
    from perdure.actions.definition import ChangeDefinition as ChangeDefinition
    from perdure.actions.definition import ChangeModel as ChangeModel
    from perdure.actions.definition import ChangeSystemPrompt as ChangeSystemPrompt
    from perdure.actions.fork import ForkSession as ForkSession
    from perdure.actions.lifecycle import CompleteSession as CompleteSession
    from perdure.actions.lifecycle import DeleteSession as DeleteSession
    from perdure.actions.lifecycle import FailSession as FailSession
    from perdure.actions.lifecycle import RestoreSession as RestoreSession
    from perdure.actions.lifecycle import ResumeSession as ResumeSession
    from perdure.actions.lifecycle import SuspendSession as SuspendSession
    from perdure.actions.metadata import RenameSession as RenameSession
    from perdure.actions.metadata import RetainSession as RetainSession
    from perdure.actions.metadata import TagSession as TagSession
    from perdure.actions.metadata import UpdateTask as UpdateTask
    from perdure.actions.metadata import WriteMetadata as WriteMetadata
    from perdure.actions.parallel import SendParallel as SendParallel
    from perdure.actions.resume import RecoveryReport as RecoveryReport
    from perdure.actions.resume import ResumeExecution as ResumeExecution
    from perdure.actions.resume import recover as recover
    from perdure.actions.send import SendMessage as SendMessage
    from perdure.actions.transcript import InjectMessage as InjectMessage
    from perdure.actions.transcript import ResetTranscript as ResetTranscript
    from perdure.actions.transcript import Rewind as Rewind
    from perdure.actions.transcript import TrimTranscript as TrimTranscript
    from perdure.actions.transcript import Undo as Undo
    from perdure.definition_files import load_definition as load_definition
    from perdure.definition_files import load_definitions as load_definitions
    from perdure.errors import AgentStop as AgentStop
    from perdure.errors import ClaimConflict as ClaimConflict
    from perdure.errors import ClaimLost as ClaimLost
    from perdure.errors import CompactionFailed as CompactionFailed
    from perdure.errors import ConfigurationError as ConfigurationError
    from perdure.errors import ContextTooLong as ContextTooLong
    from perdure.errors import CorruptRecord as CorruptRecord
    from perdure.errors import DriverError as DriverError
    from perdure.errors import ErasedMeanwhile as ErasedMeanwhile
    from perdure.errors import IllegalStatusChange as IllegalStatusChange
    from perdure.errors import InputRefused as InputRefused
    from perdure.errors import InvalidData as InvalidData
    from perdure.errors import InvalidSessionFile as InvalidSessionFile
    from perdure.errors import InvalidSessionId as InvalidSessionId
    from perdure.errors import KeyForgotten as KeyForgotten
    from perdure.errors import KeyMissing as KeyMissing
    from perdure.errors import KeyUnavailable as KeyUnavailable
    from perdure.errors import NotLoaded as NotLoaded
    from perdure.errors import OwnerBusy as OwnerBusy
    from perdure.errors import PendingCallsChanged as PendingCallsChanged
    from perdure.errors import PerdureError as PerdureError
    from perdure.errors import QueueFull as QueueFull
    from perdure.errors import RateLimited as RateLimited
    from perdure.errors import RedactionFailed as RedactionFailed
    from perdure.errors import RequestRefused as RequestRefused
    from perdure.errors import RetriesExhausted as RetriesExhausted
    from perdure.errors import RunFailed as RunFailed
    from perdure.errors import RunInterrupted as RunInterrupted
    from perdure.errors import SessionBusy as SessionBusy
    from perdure.errors import SessionConflict as SessionConflict
    from perdure.errors import SessionHeld as SessionHeld
    from perdure.errors import SessionLocked as SessionLocked
    from perdure.errors import SessionNotActive as SessionNotActive
    from perdure.errors import SessionNotFound as SessionNotFound
    from perdure.errors import StageFailed as StageFailed
    from perdure.errors import StoreError as StoreError
    from perdure.errors import ToolError as ToolError
    from perdure.errors import ToolUnavailable as ToolUnavailable
    from perdure.errors import TransientDriverError as TransientDriverError
    from perdure.errors import UnreadableFile as UnreadableFile
    from perdure.errors import VersionForgotten as VersionForgotten
    from perdure.errors import WrongKey as WrongKey
    from perdure.keys import FileKeyRing as FileKeyRing
    from perdure.loop.agent_loop import AgentLoop as AgentLoop
    from perdure.loop.agent_loop import LoopSetup as LoopSetup
    from perdure.loop.compaction.auto import AutoCompaction as AutoCompaction
    from perdure.loop.compaction.options import CompactionOptions as CompactionOptions
    from perdure.loop.drivers.offline import OfflineDriver as OfflineDriver
    from perdure.loop.drivers.pacing import RateLimit as RateLimit
    from perdure.loop.drivers.provider import ProviderDriver as ProviderDriver
    from perdure.loop.drivers.retry import RetryingDriver as RetryingDriver
    from perdure.loop.external import ExternalTool as ExternalTool
    from perdure.loop.external import external_tool as external_tool
    from perdure.loop.factory import LoopFactory as LoopFactory
    from perdure.loop.factory import UseGuards as UseGuards
    from perdure.loop.filters import Rejected as Rejected
    from perdure.loop.filters import Warned as Warned
    from perdure.loop.guards import BudgetGuard as BudgetGuard
    from perdure.loop.interceptors import Blocked as Blocked
    from perdure.loop.interceptors import Interceptor as Interceptor
    from perdure.loop.mcp.server import mcp as mcp
    from perdure.loop.memory import StoreMemory as StoreMemory
    from perdure.loop.memory import recall as recall
    from perdure.loop.memory import remember as remember
    from perdure.loop.response_format import final_value as final_value
    from perdure.loop.strategies import Branch as Branch
    from perdure.loop.strategies import Chosen as Chosen
    from perdure.loop.strategies import FewestTokens as FewestTokens
    from perdure.loop.strategies import First as First
    from perdure.loop.strategies import Judge as Judge
    from perdure.loop.strategies import LongestAnswer as LongestAnswer
    from perdure.loop.subagents import SubagentPolicy as SubagentPolicy
    from perdure.loop.tool_use import Outcome as Outcome
    from perdure.loop.tool_use import current_session as current_session
    from perdure.loop.tools import FunctionTool as FunctionTool
    from perdure.loop.tools import ToolRegistry as ToolRegistry
    from perdure.loop.tools import tool as tool
    from perdure.model.definition import AgentDefinition as AgentDefinition
    from perdure.model.definition import ModelConfig as ModelConfig
    from perdure.model.events import SessionActionExecuted as SessionActionExecuted
    from perdure.model.events import SessionLoaded as SessionLoaded
    from perdure.model.events import SessionLoadFailed as SessionLoadFailed
    from perdure.model.events import SessionSaved as SessionSaved
    from perdure.model.events import SessionSaveFailed as SessionSaveFailed
    from perdure.model.execution import ExecutionBudget as ExecutionBudget
    from perdure.model.execution import ExecutionState as ExecutionState
    from perdure.model.execution import ExecutionStatus as ExecutionStatus
    from perdure.model.execution import ModelOptions as ModelOptions
    from perdure.model.execution import PendingCall as PendingCall
    from perdure.model.execution import Spent as Spent
    from perdure.model.ids import SessionId as SessionId
    from perdure.model.lineage import ChildLoopRef as ChildLoopRef
    from perdure.model.lineage import SpawnRef as SpawnRef
    from perdure.model.loop_events import AgentEnd as AgentEnd
    from perdure.model.loop_events import AgentStart as AgentStart
    from perdure.model.loop_events import Compaction as Compaction
    from perdure.model.loop_events import CompactionBlock as CompactionBlock
    from perdure.model.loop_events import HoldChanged as HoldChanged
    from perdure.model.loop_events import InputRejected as InputRejected
    from perdure.model.loop_events import LoopEvent as LoopEvent
    from perdure.model.loop_events import MessageEnd as MessageEnd
    from perdure.model.loop_events import MessageStart as MessageStart
    from perdure.model.loop_events import MessageUpdate as MessageUpdate
    from perdure.model.loop_events import ParallelLoopEnd as ParallelLoopEnd
    from perdure.model.loop_events import ParallelLoopStart as ParallelLoopStart
    from perdure.model.loop_events import Redacted as Redacted
    from perdure.model.loop_events import ToolExecutionEnd as ToolExecutionEnd
    from perdure.model.loop_events import ToolExecutionStart as ToolExecutionStart
    from perdure.model.loop_events import ToolExecutionUpdate as ToolExecutionUpdate
    from perdure.model.loop_events import TurnEnd as TurnEnd
    from perdure.model.loop_events import TurnStart as TurnStart
    from perdure.model.loop_events import UnknownEvent as UnknownEvent
    from perdure.model.message import Envelope as Envelope
    from perdure.model.message import Media as Media
    from perdure.model.message import Message as Message
    from perdure.model.message import Opaque as Opaque
    from perdure.model.message import Text as Text
    from perdure.model.message import Thinking as Thinking
    from perdure.model.message import ToolCall as ToolCall
    from perdure.model.message import ToolResult as ToolResult
    from perdure.model.record import LoopRecord as LoopRecord
    from perdure.model.record import LoopStatus as LoopStatus
    from perdure.model.record import ParallelGroupRecord as ParallelGroupRecord
    from perdure.model.record import SessionRecord as SessionRecord
    from perdure.model.record import Turn as Turn
    from perdure.model.retention import Retention as Retention
    from perdure.model.retention import RetentionPolicy as RetentionPolicy
    from perdure.model.schema import schema_of as schema_of
    from perdure.model.session import AgentSession as AgentSession
    from perdure.model.session import AgentSessionInfo as AgentSessionInfo
    from perdure.model.session import ListedSession as ListedSession
    from perdure.model.session import SessionInfoList as SessionInfoList
    from perdure.model.session import SessionStatus as SessionStatus
    from perdure.model.state import AgentContext as AgentContext
    from perdure.model.state import AgentState as AgentState
    from perdure.model.step import AgentStep as AgentStep
    from perdure.model.step import AgentStepType as AgentStepType
    from perdure.model.step import InferenceResponse as InferenceResponse
    from perdure.model.step import StepExecution as StepExecution
    from perdure.model.step import ToolExecution as ToolExecution
    from perdure.model.stop import ExecutionContinuation as ExecutionContinuation
    from perdure.model.stop import StopReason as StopReason
    from perdure.model.stop import StopSignal as StopSignal
    from perdure.model.transcript import Block as Block
    from perdure.model.transcript import Transcript as Transcript
    from perdure.model.usage import Usage as Usage
    from perdure.model.value import ErrorRecord as ErrorRecord
    from perdure.protocols import Action as Action
    from perdure.protocols import ActionContext as ActionContext
    from perdure.protocols import Answer as Answer
    from perdure.protocols import Claim as Claim
    from perdure.protocols import DataKey as DataKey
    from perdure.protocols import Delta as Delta
    from perdure.protocols import Driver as Driver
    from perdure.protocols import Entry as Entry
    from perdure.protocols import Erasure as Erasure
    from perdure.protocols import EventHandler as EventHandler
    from perdure.protocols import Indexed as Indexed
    from perdure.protocols import Journal as Journal
    from perdure.protocols import JournalEntry as JournalEntry
    from perdure.protocols import KeyRing as KeyRing
    from perdure.protocols import LoopBuilder as LoopBuilder
    from perdure.protocols import Memory as Memory
    from perdure.protocols import ModelReply as ModelReply
    from perdure.protocols import ModelRequest as ModelRequest
    from perdure.protocols import Next as Next
    from perdure.protocols import Remembered as Remembered
    from perdure.protocols import Search as Search
    from perdure.protocols import SearchHit as SearchHit
    from perdure.protocols import SessionController as SessionController
    from perdure.protocols import SessionManager as SessionManager
    from perdure.protocols import SessionStage as SessionStage
    from perdure.protocols import SessionStore as SessionStore
    from perdure.protocols import Tool as Tool
    from perdure.protocols import ToolContext as ToolContext
    from perdure.protocols import Toolset as Toolset
    from perdure.protocols import ToolSpec as ToolSpec
    from perdure.recorder import SessionRecorder as SessionRecorder
    from perdure.recorder import SessionRecorderConfig as SessionRecorderConfig
    from perdure.records.files import FileRecordStore as FileRecordStore
    from perdure.records.files import SessionRecordList as SessionRecordList
    from perdure.records.files import delete_session as delete_session
    from perdure.records.files import list_session_ids as list_session_ids
    from perdure.records.files import load_session as load_session
    from perdure.records.files import load_sessions_for_agent as load_sessions_for_agent
    from perdure.records.files import redact_session as redact_session
    from perdure.records.files import save_session as save_session
    from perdure.redaction.redactors import Redactor as Redactor
    from perdure.replay.comparison import ReplayResult as ReplayResult
    from perdure.replay.recording import Recording as Recording
    from perdure.replay.replay import Replay as Replay
    from perdure.replay.script import RecordedDriver as RecordedDriver
    from perdure.runtime.bus import EventBus as EventBus
    from perdure.runtime.bus import Subscription as Subscription
    from perdure.runtime.hooks import PassThroughSessionController as PassThroughSessionController
    from perdure.runtime.hooks import SessionHookStack as SessionHookStack
    from perdure.runtime.repository import SessionFactory as SessionFactory
    from perdure.runtime.repository import SessionRepository as SessionRepository
    from perdure.runtime.runtime import SessionRuntime as SessionRuntime
    from perdure.sessions.attaching import attach as attach
    from perdure.sessions.blocking import BlockingChat as BlockingChat
    from perdure.sessions.blocking import BlockingQueued as BlockingQueued
    from perdure.sessions.blocking import BlockingRun as BlockingRun
    from perdure.sessions.blocking import BlockingSessions as BlockingSessions
    from perdure.sessions.chat import Chat as Chat
    from perdure.sessions.connect import connect as connect
    from perdure.sessions.connect import connect_blocking as connect_blocking
    from perdure.sessions.conversations import ImportReport as ImportReport
    from perdure.sessions.keeping import ErasureReceipt as ErasureReceipt
    from perdure.sessions.lineage import Ancestry as Ancestry
    from perdure.sessions.lineage import Diff as Diff
    from perdure.sessions.queueing import Queued as Queued
    from perdure.sessions.reply import Chunk as Chunk
    from perdure.sessions.reply import Reply as Reply
    from perdure.sessions.rounds import RetentionReport as RetentionReport
    from perdure.sessions.rounds import load_policy as load_policy
    from perdure.sessions.sessions import Sessions as Sessions
    from perdure.sessions.shared import SharedStore as SharedStore
    from perdure.sessions.shared import shared as shared
    from perdure.sessions.started_run import StartedRun as StartedRun
    from perdure.sessions.viewing import View as View
    from perdure.stores.file import FileStore as FileStore
    from perdure.stores.memory import MemoryStore as MemoryStore
    from perdure.stores.postgres import PostgresStore as PostgresStore
    from perdure.stores.redacting import redacting as redacting
    from perdure.stores.sqlite import SqliteStore as SqliteStore
    from perdure.stores.urls import store_of as store_of
    from perdure.telemetry.telemetry import Telemetry as Telemetry
    from perdure.workers.worker import Worker as Worker
    from perdure.workflow import Stage as Stage
    from perdure.workflow import Workflow as Workflow
    from perdure.workflow import WorkflowResult as WorkflowResult

if sys.platform == "win32":  # told here, before the import of a store fails for want of `fcntl`
    from perdure.errors import ConfigurationError as _Unsupported

    raise _Unsupported(
        "perdure does not run on Windows: its stores need locks and syncs that Windows does not have.",
        "Use Linux, macOS or the Windows Subsystem for Linux.",
    )

__version__ = "0.2.0"

_HOMES = {
    "actions.adopt": "AdoptBranch",
    "actions.approval": "AnswerToolCalls ApproveToolCalls DenyToolCalls SettleToolCalls",
    "actions.clear": "ClearSession",
    "actions.compact": "CompactTranscript UncompactTranscript",
    "actions.definition": "ChangeDefinition ChangeModel ChangeSystemPrompt",
    "actions.fork": "ForkSession",
    "actions.lifecycle": "CompleteSession DeleteSession FailSession RestoreSession ResumeSession SuspendSession",
    "actions.metadata": "RenameSession RetainSession TagSession UpdateTask WriteMetadata",
    "actions.parallel": "SendParallel",
    "actions.resume": "RecoveryReport ResumeExecution recover",
    "actions.send": "SendMessage",
    "actions.transcript": "InjectMessage ResetTranscript Rewind TrimTranscript Undo",
    "definition_files": "load_definition load_definitions",
    "errors": "AgentStop ClaimConflict ClaimLost CompactionFailed ConfigurationError ContextTooLong CorruptRecord "
    "DriverError ErasedMeanwhile IllegalStatusChange InputRefused InvalidData InvalidSessionFile InvalidSessionId "
    "KeyForgotten KeyMissing KeyUnavailable "
    "NotLoaded OwnerBusy PendingCallsChanged PerdureError QueueFull RateLimited RedactionFailed RequestRefused "
    "RetriesExhausted RunFailed RunInterrupted SessionBusy "
    "SessionConflict SessionHeld SessionLocked SessionNotActive SessionNotFound StageFailed StoreError ToolError "
    "ToolUnavailable TransientDriverError UnreadableFile VersionForgotten WrongKey",
    "keys": "FileKeyRing",
    "loop.agent_loop": "AgentLoop LoopSetup",
    "loop.compaction.auto": "AutoCompaction",
    "loop.compaction.options": "CompactionOptions",
    "loop.drivers.offline": "OfflineDriver",
    "loop.drivers.pacing": "RateLimit",
    "loop.drivers.provider": "ProviderDriver",
    "loop.drivers.retry": "RetryingDriver",
    "loop.external": "ExternalTool external_tool",
    "loop.factory": "LoopFactory UseGuards",
    "loop.filters": "Rejected Warned",
    "loop.guards": "BudgetGuard",
    "loop.interceptors": "Blocked Interceptor",
    "loop.mcp.server": "mcp",
    "loop.memory": "StoreMemory recall remember",
    "loop.response_format": "final_value",
    "loop.strategies": "Branch Chosen FewestTokens First Judge LongestAnswer",
    "loop.subagents": "SubagentPolicy",
    "loop.tool_use": "Outcome current_session",
    "loop.tools": "FunctionTool ToolRegistry tool",
    "model.definition": "AgentDefinition ModelConfig",
    "model.events": "SessionActionExecuted SessionLoadFailed SessionLoaded SessionSaveFailed SessionSaved",
    "model.execution": "ExecutionBudget ExecutionState ExecutionStatus ModelOptions PendingCall Spent",
    "model.ids": "SessionId",
    "model.lineage": "ChildLoopRef SpawnRef",
    "model.loop_events": "AgentEnd AgentStart Compaction CompactionBlock HoldChanged InputRejected LoopEvent "
    "MessageEnd MessageStart MessageUpdate ParallelLoopEnd ParallelLoopStart Redacted "
    "ToolExecutionEnd ToolExecutionStart ToolExecutionUpdate TurnEnd TurnStart UnknownEvent",
    "model.message": "Envelope Media Message Opaque Text Thinking ToolCall ToolResult",
    "model.record": "LoopRecord LoopStatus ParallelGroupRecord SessionRecord Turn",
    "model.retention": "Retention RetentionPolicy",
    "model.schema": "schema_of",
    "model.session": "AgentSession AgentSessionInfo ListedSession SessionInfoList SessionStatus",
    "model.state": "AgentContext AgentState",
    "model.step": "AgentStep AgentStepType InferenceResponse StepExecution ToolExecution",
    "model.stop": "ExecutionContinuation StopReason StopSignal",
    "model.transcript": "Block Transcript",
    "model.usage": "Usage",
    "model.value": "ErrorRecord",
    "protocols": "Action ActionContext Answer Claim DataKey Delta Driver Entry Erasure EventHandler Indexed Journal "
    "JournalEntry KeyRing LoopBuilder Memory ModelReply ModelRequest Next Remembered Search SearchHit "
    "SessionController SessionManager SessionStage SessionStore Tool ToolContext ToolSpec Toolset",
    "recorder": "SessionRecorder SessionRecorderConfig",
    "redaction.redactors": "Redactor",
    "replay.comparison": "ReplayResult",
    "replay.recording": "Recording",
    "replay.replay": "Replay",
    "replay.script": "RecordedDriver",
    "runtime.bus": "EventBus Subscription",
    "runtime.hooks": "PassThroughSessionController SessionHookStack",
    "runtime.repository": "SessionFactory SessionRepository",
    "runtime.runtime": "SessionRuntime",
    "sessions.attaching": "attach",
    "sessions.blocking": "BlockingChat BlockingQueued BlockingRun BlockingSessions",
    "sessions.chat": "Chat",
    "sessions.connect": "connect connect_blocking",
    "sessions.sessions": "Sessions",
    "sessions.shared": "SharedStore shared",
    "sessions.conversations": "ImportReport",
    "sessions.keeping": "ErasureReceipt",
    "sessions.lineage": "Ancestry Diff",
    "sessions.queueing": "Queued",
    "sessions.reply": "Chunk Reply",
    "sessions.rounds": "RetentionReport load_policy",
    "sessions.started_run": "StartedRun",
    "sessions.viewing": "View",
    "stores.file": "FileStore",
    "stores.memory": "MemoryStore",
    "stores.postgres": "PostgresStore",
    "stores.redacting": "redacting",
    "records.files": "FileRecordStore SessionRecordList delete_session list_session_ids load_session "
    "load_sessions_for_agent redact_session save_session",
    "stores.sqlite": "SqliteStore",
    "stores.urls": "store_of",
    "telemetry.telemetry": "Telemetry",
    "workers.worker": "Worker",
    "workflow": "Stage Workflow WorkflowResult",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

_SHOWN = """
connect connect_blocking Sessions Chat Reply Queued Replay Worker attach
AgentDefinition AgentSession AgentState ExecutionBudget ExecutionStatus Message ModelConfig SessionId SessionInfoList
SessionStatus ToolCall Usage
AdoptBranch ApproveToolCalls ChangeDefinition ChangeModel ChangeSystemPrompt ClearSession CompactTranscript
CompleteSession DeleteSession DenyToolCalls FailSession ForkSession InjectMessage RenameSession ResetTranscript
RestoreSession ResumeExecution ResumeSession Rewind SendMessage SendParallel SuspendSession TagSession TrimTranscript
UncompactTranscript Undo WriteMetadata
EventBus RecoveryReport SessionHookStack SessionRuntime SessionStage recover
AutoCompaction Blocked Interceptor LoopFactory ProviderDriver Rejected RetryingDriver load_definition
ToolContext external_tool load_definitions mcp recall remember tool
FileStore MemoryStore PostgresStore SqliteStore shared store_of
Stage Workflow WorkflowResult
ConfigurationError CorruptRecord DriverError InputRefused InvalidData
InvalidSessionId PendingCallsChanged PerdureError RunFailed RunInterrupted SessionBusy SessionConflict
SessionLocked SessionNotActive SessionNotFound StoreError ToolError
"""
"""The names in `__all__`: the face, values, actions, the runtime, the loop, stores, workflows, and common errors."""

__all__ = sorted(_SHOWN.split())


_MODULES = {"adapters", "backups", "errors", "events", "parallel", "protocols", "records", "redactors", "replay"}
"""The modules whose names are not shown here: `perdure.redactors.DEFAULT` works after `import perdure`."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"perdure.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    value = getattr(import_module(f"perdure.{home}"), name)
    globals()[name] = value  # kept, so that Python does not ask this function for the name again
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))
