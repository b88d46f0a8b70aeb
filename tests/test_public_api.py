"""The names and the cost of `import perdure`."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import perdure

OPTIONAL = {
    "anthropic",
    "click",
    "genai_prices",
    "google.genai",
    "mcp",
    "openai",
    "opentelemetry",
    "psycopg",
    "pydantic_ai",
    "rich",
}


# Every name that could be imported from the root in 0.1.0. Add to it, and take nothing away.
NAMES = """
Action
ActionContext
AdoptBranch
AgentContext
AgentDefinition
AgentEnd
AgentLoop
AgentSession
AgentSessionInfo
AgentStart
AgentState
AgentStep
AgentStepType
AgentStop
Ancestry
AnswerToolCalls
ApproveToolCalls
AutoCompaction
Block
Blocked
BlockingChat
BlockingQueued
BlockingRun
BlockingSessions
Branch
BudgetGuard
ChangeDefinition
ChangeModel
ChangeSystemPrompt
Chat
ChildLoopRef
Chosen
Chunk
Claim
ClaimConflict
ClaimLost
ClearSession
CompactTranscript
Compaction
CompactionBlock
CompactionFailed
CompactionOptions
CompleteSession
ConfigurationError
ContextTooLong
CorruptRecord
DeleteSession
Delta
DenyToolCalls
Diff
Driver
DriverError
Entry
Envelope
ErasedMeanwhile
Erasure
ErasureReceipt
ErrorRecord
EventBus
EventHandler
ExecutionBudget
ExecutionContinuation
ExecutionState
ExecutionStatus
ExternalTool
FailSession
FewestTokens
FileRecordStore
FileStore
First
ForkSession
FunctionTool
HoldChanged
IllegalStatusChange
ImportReport
Indexed
InferenceResponse
InjectMessage
InputRefused
InputRejected
Interceptor
InvalidData
InvalidSessionFile
InvalidSessionId
Journal
JournalEntry
Judge
ListedSession
LongestAnswer
LoopBuilder
LoopEvent
LoopFactory
LoopRecord
LoopSetup
LoopStatus
Media
MemoryStore
Message
MessageEnd
MessageStart
MessageUpdate
ModelConfig
ModelOptions
ModelReply
ModelRequest
NotLoaded
OfflineDriver
Opaque
Outcome
ParallelGroupRecord
ParallelLoopEnd
ParallelLoopStart
PassThroughSessionController
PendingCall
PendingCallsChanged
PerdureError
PostgresStore
ProviderDriver
Queued
RateLimit
RateLimited
RecordedDriver
Recording
RecoveryReport
Redacted
Rejected
RenameSession
Replay
ReplayResult
Reply
RequestRefused
ResetTranscript
RestoreSession
ResumeExecution
ResumeSession
RetainSession
Retention
RetentionPolicy
RetentionReport
RetriesExhausted
RetryingDriver
Rewind
RunFailed
RunInterrupted
Search
SearchHit
SendMessage
SendParallel
SessionActionExecuted
SessionBusy
SessionConflict
SessionController
SessionFactory
SessionHeld
SessionHookStack
SessionId
SessionInfoList
SessionLoadFailed
SessionLoaded
SessionLocked
SessionManager
SessionNotActive
SessionNotFound
SessionRecord
SessionRecordList
SessionRecorder
SessionRecorderConfig
SessionRepository
SessionRuntime
SessionSaveFailed
SessionSaved
SessionStage
SessionStatus
SessionStore
Sessions
SettleToolCalls
SharedStore
SpawnRef
Spent
SqliteStore
Stage
StageFailed
StartedRun
StepExecution
StopReason
StopSignal
StoreError
SubagentPolicy
Subscription
SuspendSession
TagSession
Text
Thinking
Telemetry
Tool
ToolCall
ToolContext
ToolError
ToolExecution
ToolExecutionEnd
ToolExecutionStart
ToolExecutionUpdate
ToolRegistry
ToolResult
ToolSpec
ToolUnavailable
Toolset
Transcript
TransientDriverError
TrimTranscript
Turn
TurnEnd
TurnStart
UncompactTranscript
Undo
UnknownEvent
UnreadableFile
UpdateTask
Usage
UseGuards
VersionForgotten
View
Warned
Worker
Workflow
WorkflowResult
WriteMetadata
attach
connect
connect_blocking
current_session
delete_session
external_tool
final_value
list_session_ids
load_definition
load_definitions
load_policy
load_session
load_sessions_for_agent
mcp
recall
recover
redact_session
remember
save_session
schema_of
shared
store_of
tool
"""
IMPORTABLE = NAMES.split()
HOMES = ("archive", "copying", "errors", "events", "fsck", "parallel", "protocols", "records", "replay", "testing")
"""Modules that show names beside the root."""


def test_all_is_sorted() -> None:
    """Names are in alphabetical order, each of them once."""
    assert list(perdure.__all__) == sorted(set(perdure.__all__))


@pytest.mark.parametrize("name", perdure.__all__)
def test_a_name_resolves(name: str) -> None:
    """Every shown name works with getattr and dir."""
    assert getattr(perdure, name) is not None
    assert name in dir(perdure)


@pytest.mark.parametrize("name", IMPORTABLE)
def test_a_name_stays_importable(name: str) -> None:
    """A name of the root stays importable, shown or not."""
    assert getattr(perdure, name) is not None


def test_what_is_shown_can_be_read_at_a_glance() -> None:
    """The root shows the names for daily use, and each of them is known to be importable."""
    assert 80 <= len(perdure.__all__) <= 95
    assert set(perdure.__all__) <= set(IMPORTABLE)


@pytest.mark.parametrize("home", HOMES)
def test_a_home_shows_what_it_says(home: str) -> None:
    """Each of its names resolves, and is the same object as the root's if the root has the name."""
    module = import_module(f"perdure.{home}")
    for name in getattr(module, "__all__", ()):
        assert name not in IMPORTABLE or getattr(module, name) is getattr(perdure, name)


def test_what_the_root_does_not_show_is_shown_elsewhere() -> None:
    """The names of events, records and branches are in the modules with these names."""
    homes = {home: set(import_module(f"perdure.{home}").__all__) for home in ("events", "records", "parallel")}
    assert {"AgentStart", "AgentEnd", "SessionSaved", "UnknownEvent"} <= homes["events"]
    assert {"SessionRecorder", "save_session", "load_session", "delete_session", "LoopRecord"} <= homes["records"]
    assert {"SendParallel", "AdoptBranch", "Branch", "Judge"} <= homes["parallel"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it would on any module."""
    with pytest.raises(AttributeError, match="SessionRuntimes"):
        perdure.SessionRuntimes  # noqa: B018  # looking the name up is the test


def test_windows_is_refused_at_the_import() -> None:
    """Stores need functions that Windows lacks: `import perdure` says so, before a store fails with an ImportError."""
    code = "import sys\nsys.platform = 'win32'\nimport perdure"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("perdure.errors.ConfigurationError: perdure does not run on Windows")
    assert "Windows Subsystem for Linux" in last


def test_import_brings_in_no_optional_dependency() -> None:
    """`import perdure` works and stays quick on an install without extras."""
    code = f"import perdure, sys; print(*sorted(sys.modules.keys() & {OPTIONAL!r}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_a_prompt_completes_the_names_of_testing() -> None:
    """`dir()` lists its names before any of them is imported."""
    import perdure.testing

    assert dir(perdure.testing) == sorted(perdure.testing.__all__)


@pytest.mark.parametrize("name", sorted(perdure._MODULES))
def test_modules_with_names_of_their_own_are_at_hand(name: str) -> None:
    """`import perdure` is enough for `perdure.redactors.DEFAULT`, in a process without other imports."""
    command = [sys.executable, "-c", f"import perdure; print(perdure.{name}.__name__)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == f"perdure.{name}"
