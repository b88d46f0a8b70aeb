"""A new process until its first turn is durable: imports, a new SQLite file, a session, a turn. Beside Agno's.

Both sides do only what a save needs: a runtime on a store here, a `SqliteDb` there, an agent on neither.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Run, ms

ROUNDS = 9

_TOLD = "print(time.process_time(), time.monotonic())"
_SAID = """
text = "The quick brown fox jumps over the lazy dog. " * 11
turn = InjectMessage(
    Message.user(text),
    Message.assistant(tool_calls=[ToolCall("look_up", {"query": text}, "call-1")]),
    Message.tool("call-1", text, name="look_up"),
    Message.assistant(text),
)
"""
_OURS = f"""
import asyncio, sys, time
from perdure import AgentDefinition, InjectMessage, Message, SessionRuntime, SqliteStore, ToolCall
{_SAID}
async def main():
    async with SqliteStore(sys.argv[1]) as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("bench"), session_id="first")
        await runtime.execute(session.id, turn)
        {_TOLD}
        if sys.argv[2:]:
            print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("perdure", "apsw", "msgspec")))

asyncio.run(main())
"""
_FACE = f"""
import asyncio, sys, time
import perdure
from perdure import InjectMessage, Message, ToolCall
{_SAID}
async def main():
    async with perdure.connect("sqlite:///" + sys.argv[1]) as sessions:
        await sessions.execute((await sessions.open("first")).id, turn)
        {_TOLD}

asyncio.run(main())
"""
_AGNO = """
import json, sys, time
from agno.db.sqlite import SqliteDb
from agno.models.message import Message
from agno.run.agent import RunOutput
from agno.run.base import RunStatus
from agno.session import AgentSession

db = SqliteDb(db_file=sys.argv[1])
text = "The quick brown fox jumps over the lazy dog. " * 11
call = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": json.dumps({"query": text})}}
said = [
    Message(role="user", content=text),
    Message(role="assistant", tool_calls=[call]),
    Message(role="tool", tool_call_id="call-1", tool_name="look_up", content=text),
    Message(role="assistant", content=text),
]
session = AgentSession("first", agent_id="bench", session_data={}, runs=[])
run = RunOutput("1", "bench", session_id="first", messages=said, content=text, status=RunStatus.completed)
session.upsert_run(run)
db.upsert_session(session)
db.upsert_run(run, "first", run_index=0)
TOLD
""".replace("TOLD", _TOLD)


class Started(NamedTuple):
    """Seconds from the start of a process until it reported that it was done: of the processor, and on the clock."""

    cpu: float
    wall: float


def started(program: str, *arguments: str) -> tuple[Started, str]:
    """Run a program in a process of its own; return the time until it reported that it was done, and its output."""
    # Libraries are installed with their bytecode. So perdure's is written too, by the first run.
    written = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(arguments[0]).parent / "bytecode")}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **written},
    )
    first, _, rest = done.stdout.partition("\n")
    cpu, at = map(float, first.split())
    return Started(cpu, at - start), rest


async def measure(run: Run) -> None:
    with run.folder() as folder:
        programs = {"ours": _OURS, "face": _FACE, "imports": imports_of_a_save(folder)}
        if find_spec("agno") is None:
            run.skip("cold.agno", "Agno is not installed")
        else:
            programs["agno"] = _AGNO
        found = medians(programs, folder)
    if "agno" in found:
        ours, agno = found["ours"], found["agno"]
        own = f"{ms(found['imports'].cpu)} until all is imported; {ms(found['face'].cpu)} with `connect`"
        clock = f"on the clock {ms(ours.wall)} / {ms(agno.wall)}"
        run.report("cold.agno", ours.cpu / agno.cpu, f"processor {ms(ours.cpu)} / {ms(agno.cpu)}; {own}; {clock}")


def imports_of_a_save(folder: Path) -> str:
    """Return a program that only imports the modules of a process's first durable turn."""
    _, names = started(_OURS, str(folder / "named.db"), "names")
    return f"import time, asyncio\nfor name in {names.split()!r}:\n    __import__(name)\n{_TOLD}"


def medians(programs: dict[str, str], folder: Path) -> dict[str, Started]:
    samples: dict[str, list[Started]] = {name: [] for name in programs}
    for number in range(ROUNDS + 1):
        for name, program in programs.items():
            taken, _ = started(program, str(folder / f"{name}-{number}.db"))
            if number:  # the first may have to read from the disk, and writes the bytecode
                samples[name].append(taken)
    return {name: Started(*map(statistics.median, zip(*taken, strict=True))) for name, taken in samples.items()}
