"""Replays: stored conversations run again with another model, prompt or tools, and compared step by step."""

from perdure.replay.allowance import Allowance
from perdure.replay.comparison import CallChange, ReplayResult, StepComparison, TurnComparison
from perdure.replay.recording import LeftOut, Recording
from perdure.replay.replay import Replay
from perdure.replay.rules import Rule
from perdure.replay.script import RecordedDriver
from perdure.replay.story import Call, PlayedTurn, Step

__all__ = [
    "Allowance",
    "Call",
    "CallChange",
    "LeftOut",
    "PlayedTurn",
    "RecordedDriver",
    "Recording",
    "Replay",
    "ReplayResult",
    "Rule",
    "Step",
    "StepComparison",
    "TurnComparison",
]
