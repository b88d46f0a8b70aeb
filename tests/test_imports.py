"""The imports of a process before its first save and its first answer: by name, since they are its start-up cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SAVE = """
import asyncio, sys
from perdure import AgentDefinition, InjectMessage, Message, SessionRuntime, SqliteStore

async def main():
    async with SqliteStore(sys.argv[1]) as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("a"))
        assert (await runtime.execute(session.id, InjectMessage(Message.user("hi")))).version == 2
"""
_ANSWER = """
import asyncio, sys
import perdure

class Fixed:
    async def respond(self, request, on_delta):
        return perdure.ModelReply(perdure.Message.assistant("yes"), perdure.InferenceResponse())

async def main():
    async with perdure.connect(f"sqlite:///{sys.argv[1]}", driver=Fixed()) as sessions:
        chat = await sessions.open()
        assert (await chat.send("hi")).text == "yes"
"""
_TELL = """
asyncio.run(main())
print(*sys.modules, sep="\\n")
"""

SAVE = """
actions actions.transcript aio codec codec.attachments codec.documents codec.field_checks codec.json_checks
codec.messages codec.pieces codec.unknown codec.values errors model model.checks model.definition model.events
model.execution model.ids model.indexed model.lineage model.message model.retention model.schema model.secrets
model.session model.state model.step model.stop model.tool_refs model.transcript model.usage model.value
protocols runtime runtime.bus runtime.hooks
runtime.repository runtime.runtime runtime.under_way stores stores.cache stores.checked stores.claims stores.engine
stores.file_lock stores.folder stores.format stores.format.blocks stores.format.gathering stores.format.heads
stores.format.metadata stores.format.packing stores.format.placement stores.format.rows stores.format.settled
stores.jobs stores.jobs.attachments stores.jobs.claiming stores.jobs.lines stores.jobs.listing stores.jobs.loading
stores.jobs.record stores.jobs.saving stores.jobs.values stores.pages stores.sql
stores.sqlite stores.sqlite.deferred stores.sqlite.engine stores.sqlite.glimpse stores.sqlite.readers
stores.lock_holder stores.sqlite.marks stores.sqlite.schema stores.sqlite.steps
stores.sqlite.worker
stores.sealed_jobs stores.sealing stores.store stores.tapes
"""
"""The modules of perdure that a first save through a runtime may need."""
ANSWER = f"""{SAVE}
actions.callers actions.children actions.claimed_work actions.continuing actions.given actions.inbox actions.run
actions.send actions.subagents actions.waiting loop loop.agent_loop loop.compaction loop.compaction.auto
loop.compaction.options loop.compaction.windows loop.cut_off loop.drivers loop.drivers.provider loop.drivers.retry
loop.factory loop.filters loop.guards loop.interceptors loop.prompt loop.response_format loop.results loop.run_events
loop.subagents loop.tokens loop.tool_use loop.tools model.loop_events paging run_journal sessions sessions.attaching
sessions.changing sessions.chat sessions.connect sessions.connection sessions.cursors sessions.keeping sessions.looking
sessions.open_sessions sessions.opening sessions.operating sessions.queueing sessions.reach sessions.reply
sessions.retaining sessions.sessions sessions.started_run sessions.streaming sessions.talking sessions.timing sketching
stores.urls
"""
"""The modules that the first answer of a connection may also need."""
OTHERS = {"apsw", "msgspec", "typing_extensions", "uuid_utils"}
"""The imports from other packages; msgspec needs typing_extensions."""
SLOW = {"tempfile", "shutil", "email", "http", "json", "urllib.request", "sqlite3", "importlib.metadata", "unittest"}
"""Parts of the standard library that load slowly, and are not needed."""


@pytest.mark.parametrize(("script", "allowed"), [(_SAVE, SAVE), (_ANSWER, ANSWER)], ids=["save", "answer"])
def test_a_first_turn_imports_no_more_than_it_needs(script: str, allowed: str, tmp_path: Path) -> None:
    """A new module here is imported where it is used; or it is needed, and then it belongs on the list."""
    bare, met = (_modules_of(code, tmp_path) for code in ("import asyncio, sys\nasync def main(): pass\n", script))
    new = met - bare
    own = {name.removeprefix("perdure.") for name in new if name.startswith("perdure.")}
    assert own - set(allowed.split()) == set()
    tops = {name.partition(".")[0] for name in new} - sys.stdlib_module_names - {"perdure"}
    assert tops - OTHERS == set()
    assert new & SLOW == set()


def test_the_lists_name_modules_that_are_there() -> None:
    """A renamed module leaves the list."""
    root = Path(__file__).parent.parent / "src" / "perdure"
    places = [root / name.replace(".", "/") for name in ANSWER.split()]
    assert [str(place) for place in places if not place.is_dir() and not place.with_suffix(".py").exists()] == []


def test_a_scripted_driver_brings_no_contract_along() -> None:
    """A program that needs a scripted driver does not import the tests of stores."""
    met = _modules_of(
        "import asyncio, sys\nfrom perdure.testing import ScriptedDriver\nasync def main(): pass\n", Path()
    )
    assert {name for name in met if name.startswith("perdure.testing.")} == {"perdure.testing.scripted"}


def _modules_of(script: str, folder: Path) -> set[str]:
    command = [sys.executable, "-c", script + _TELL, str(folder / "a.db")]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
