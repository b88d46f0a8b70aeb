"""`perdure chat`, used as a person would: in a pseudo-terminal, and through a pipe."""

from __future__ import annotations

import asyncio
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from perdure import InjectMessage, Message

sys.path.insert(0, str(Path(__file__).parent))

from terminal_session import CTRL_C, CTRL_D, TerminalSession, clean_environment, command

TOOLS = '''
import asyncio
from perdure import tool

@tool
async def slow(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "done at last"

@tool(needs_approval=True)
def charge(amount: int) -> str:
    """Take money."""
    with open("ledger.txt", "a") as ledger:
        ledger.write(f"{amount}\\n")
    return f"took {amount}"

@tool
def hostile() -> str:
    """Say something that a terminal must not obey."""
    return "\\x1b]0;pwned\\x07\\x1b[2Jgone"
'''
BACK = re.compile(r"perdure chat -s ([0-9a-f-]{4,36})\b")
WHOLE = re.compile(r"\b[0-9a-f-]{36}\b")

Chatting = Callable[..., TerminalSession]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


@pytest.fixture
def chatting(home: Path) -> Chatting:
    def start(*arguments: str, **environment: str) -> TerminalSession:
        call = command("chat", "--tools", "tools.py", *arguments)
        return TerminalSession(call, cwd=home, env=clean_environment(home, **environment))

    return start


def database(home: Path) -> str:
    return f"sqlite:///{home / 'data' / 'perdure' / 'sessions.db'}"


def piped(home: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    call = command("chat", "--tools", "tools.py", *arguments)
    return subprocess.run(
        call, input=text, capture_output=True, text=True, cwd=home, env=clean_environment(home), timeout=60, check=False
    )


def left(terminal: TerminalSession) -> str:
    """Leave, and return the end of the id that the chat says to come back with."""
    terminal.type(CTRL_D)
    assert terminal.ends() == 0
    (session_id,) = {each for each in WHOLE.findall(terminal.text) if each.endswith(BACK.findall(terminal.text)[-1])}
    return session_id


def test_a_message_is_answered_and_the_chat_can_be_continued(chatting: Chatting, home: Path) -> None:
    """A message gets its answer; Ctrl-D leaves and says how to come back; `-c` comes back."""
    with chatting() as terminal:
        terminal.expect("/help lists commands", "> ")
        terminal.enter("Hello, my name is Ada.")
        terminal.expect("Nice to meet you, Ada.", "> ")
        session_id = left(terminal)
    with chatting("-c") as terminal:
        terminal.expect(session_id, "2 messages so far", "> ")
        terminal.enter("What is my name?")
        terminal.expect("Your name is Ada.", "> ")
        assert left(terminal) == session_id
    history = home / "data" / "perdure" / "chat_history"
    assert "What is my name?" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_what_to_type_is_not_broken_into_lines(chatting: Chatting) -> None:
    """Only the terminal may wrap it, however narrow it is, so that a copy of it is whole."""
    store = f"{'a-long-name-' * 8}.db"
    with chatting("--store", store) as terminal:
        terminal.expect("> ")
        terminal.enter("Hello.")
        terminal.expect("> ")
        session_id = left(terminal)
    assert f"chat -s {session_id[-4:]} --store {store} --tools tools.py\n" in terminal.text


def test_ctrl_c_stops_the_run_and_keeps_the_session(chatting: Chatting) -> None:
    """Ctrl-C ends a slow run, says that the session is kept, and the next message is answered."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.enter("slow(seconds=60)")
        terminal.expect("slow(seconds=60)", "slow(seconds=60)")
        terminal.type(CTRL_C)
        terminal.expect("Stopped. The session is kept", "> ")
        terminal.enter("What is 6 * 7?")
        terminal.expect("The answer is 42.", "> ")
        left(terminal)


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_leaves(chatting: Chatting) -> None:
    """The typed line is dropped; a second Ctrl-C leaves, and a session without a message is not kept."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.type("What is 1 + 1?")
        terminal.expect("1 + 1?")
        terminal.interrupt("Ctrl-C again or Ctrl-D leaves")
        pressed = terminal.interrupt("nothing is kept")
        # A second press may come while the chat is leaving, and then ends it as Ctrl-C ends a program.
        assert terminal.ends() in ((0,) if pressed == 1 else (0, 130))
        assert "The answer is" not in terminal.text


def test_a_call_is_approved_and_another_denied_in_place(chatting: Chatting, home: Path) -> None:
    """The chat asks about calls that need approval: yes makes the call, any other words tell the model why not."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.enter("charge(amount=5)")
        terminal.expect("Allow charge(amount=5)?")
        terminal.enter("y")
        terminal.expect("charge says: took 5", "> ")
        terminal.enter("charge(amount=900)")
        terminal.expect("Allow charge(amount=900)?")
        terminal.enter("far too much")
        terminal.expect("charge failed", "far too much", "> ")
        left(terminal)
    assert (home / "ledger.txt").read_text() == "5\n"


def test_a_session_that_waits_is_asked_about_when_it_is_opened(chatting: Chatting, home: Path) -> None:
    """A pipe cannot approve: it says who can, with an exit code of its own. A chat in a terminal asks at once."""
    waits = piped(home, "charge(amount=5)\n")
    assert waits.returncode == 10
    assert "perdure approve" in waits.stderr
    assert not (home / "ledger.txt").exists()
    with chatting("-c") as terminal:
        terminal.expect("Allow charge(amount=5)?")
        terminal.enter("yes")
        terminal.expect("took 5", "> ")
        left(terminal)


def test_a_killed_run_is_recovered_when_the_session_is_opened(chatting: Chatting) -> None:
    """After SIGKILL in the middle of a tool, the next chat says so, and continues the run."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.enter("slow(seconds=60)")
        terminal.expect("slow(seconds=60)  1 s")  # by then its start is on record
        terminal.kill()
    with chatting("-c") as terminal:
        terminal.expect("was killed", "outcome is unknown", "> ")
        left(terminal)


def test_commands_change_the_session(chatting: Chatting) -> None:
    """/fork continues elsewhere, /undo takes back, /model and /system show and set, an unknown one prints the list."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.enter("My dog is Rex.")
        terminal.expect("I will remember", "> ")
        terminal.enter("/undo")
        terminal.expect("the model is shown 0 messages", "> ")
        terminal.enter("/history")
        terminal.expect("user: My dog is Rex.", "> ")
        terminal.enter("/search dog")
        terminal.expect("user:", "> ")
        terminal.enter("/fork")
        terminal.expect("Forked: you are in", "> ")
        terminal.enter("/search snail")
        terminal.expect("It was forked from", "search snail --in", "> ")
        terminal.enter("/nonsense")
        terminal.expect("/nonsense is not a command", "/uncompact", "/quit", "> ")
        terminal.enter("/system Be brief.")
        terminal.expect("The system prompt is: Be brief.", "> ")
        terminal.enter("/model")
        terminal.expect("The model is offline.", "> ")
        terminal.enter("/tree")
        terminal.expect("assistant  active", "> ")
        terminal.enter("/quit")
        assert terminal.ends() == 0
    fork = re.findall(r"you are in ([0-9a-f-]{36})", terminal.text)[0]
    assert fork.endswith(BACK.findall(terminal.text)[-1])


def test_files_go_with_the_next_message(chatting: Chatting, home: Path) -> None:
    """/attach takes a path; an unreadable file gets an error, and the conversation continues."""
    (home / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(9_992))
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.enter("/attach")
        terminal.expect("Nothing is attached: /attach FILE", "> ")
        terminal.enter("/attach none.png")
        terminal.expect("the file none.png does not exist", "> ")
        terminal.enter("/attach a.png")
        terminal.expect("With your next message: image a.png, 10.0 KB", "> ")
        terminal.enter("My dog is Rex.")
        terminal.expect("I will remember", "> ")
        terminal.enter("/attach")
        terminal.expect("Nothing is attached", "> ")
        terminal.enter("/history")
        terminal.expect("[image a.png, 10.0 KB]", "> ")
        left(terminal)


def test_compacting_and_uncompacting(chatting: Chatting) -> None:
    with chatting() as terminal:
        terminal.expect("> ")
        for number in range(1, 4):
            terminal.enter(f"What is {number} + 1?")
            terminal.expect(f"The answer is {number + 1}.", "> ")
        terminal.enter("/compact 2")
        terminal.expect("Compacted: the model is shown 3 messages, before 6; 1 in place of 4 messages: ", "> ")
        terminal.enter("/compact 9")
        terminal.expect("There is nothing to compact.", "> ")
        terminal.enter("/uncompact")
        terminal.expect("the model is shown 6 messages, before 3.", "> ")
        left(terminal)


def test_history_shows_the_result_of_a_tool_once(chatting: Chatting) -> None:
    """The text of a tool's message is its result."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.enter("slow(seconds=0)")
        terminal.expect("slow says", "> ")
        terminal.enter("/history")
        shown = terminal.expect("assistant: slow says", "> ")
        assert shown.count("tool: done at last") == 1
        assert shown.count("done at last") == 2, "once by the tool, and once in the answer"
        left(terminal)


def test_ctrl_c_while_a_command_is_completed(chatting: Chatting) -> None:
    """The typed line is dropped, and no traceback is shown."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.type("/\t\t")
        terminal.expect("/uncompact")
        terminal.interrupt("Ctrl-C again or Ctrl-D leaves")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.ends() == 0
        assert "Traceback" not in terminal.text


def test_tab_completes_commands(chatting: Chatting) -> None:
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.type("/unc\t")
        terminal.expect("/uncompact")
        terminal.enter("")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.ends() == 0


def test_escape_sequences_do_not_reach_the_terminal(chatting: Chatting, home: Path) -> None:
    """Sequences in messages, tools and Markdown entities are shown in writing, never obeyed."""
    with chatting() as terminal:
        terminal.expect("> ")
        terminal.enter("hostile()")
        terminal.expect("gone", "> ")
        session_id = left(terminal)

    async def inject() -> None:
        async with perdure.connect(database(home)) as sessions:
            nasty = Message.assistant("\x1b]52;c;cHduZWQ=\x07 and [bold]markup[/bold] &#x202e;")
            await sessions.execute(session_id, InjectMessage(nasty))

    asyncio.run(inject())
    with chatting("-s", session_id[:13]) as second:
        second.expect("> ")
        second.enter("/history")
        second.expect("[bold]markup[/bold]", "> ")
        second.enter("Repeat that")
        second.expect("markup[/bold]", "> ")
        left(second)
    for raw in (terminal.raw, second.raw):
        assert b"\x1b]" not in raw
        assert b"\x1b[2J" not in raw
        assert "\u202e".encode() not in raw


def test_a_pipe_is_read_line_by_line(home: Path) -> None:
    """Every line is a message; only answers go to stdout, and calls and notes go to stderr."""
    talk = piped(home, "Hello, my name is Ada.\n\nWhat is my name?\nslow(seconds=0)\n")
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout == "Nice to meet you, Ada.\nYour name is Ada.\nslow says: done at last.\n"
    assert "✓ slow" in talk.stderr
    assert BACK.search(talk.stderr)
    assert "\x1b" not in talk.stdout + talk.stderr


def test_a_pipe_may_attach_files(home: Path) -> None:
    """A missing file ends it, like any error in a pipe."""
    (home / "a.txt").write_text("hello")
    talk = piped(home, "/attach a.txt\nHello, my name is Ada.\n/history\n")
    assert talk.returncode == 0, talk.stderr
    assert "[file a.txt, 5 bytes]" in talk.stdout
    missing = piped(home, "/attach none.txt\nHello\n")
    assert missing.returncode != 0
    assert "the file none.txt does not exist" in missing.stderr


def test_what_cannot_be_opened_is_an_error_in_a_line(home: Path) -> None:
    """Without a session to continue, or one of that name, one line says what to do, with its exit code."""
    assert piped(home, "", "-c").returncode == 3
    unknown = piped(home, "", "-s", "nobody")
    assert unknown.returncode == 3
    assert "Traceback" not in unknown.stderr
    assert piped(home, "", "-s", "a", "-c").returncode == 2
