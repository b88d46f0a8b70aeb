"""A command in a real pseudo-terminal: a person's keys go in, and the bytes for the screen come out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

SECONDS = 60.0
CTRL_C, CTRL_D = "\x03", "\x04"
PROMPT = b"\x1b[1;32m> \x1b[0m"
"""The prompt that a chat writes where a person types a line."""

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x01\x02\r]")


def command(*arguments: str) -> list[str]:
    """Return the installed command; `python -m perdure.cli` is the same where it is not on a path."""
    return [sys.executable, "-m", "perdure.cli", *arguments]


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """Return an environment without the machine's own settings, in which the built-in model is asked."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "PYTHONPATH") if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "TERM": "xterm",
        "PERDURE_MODEL": "offline",
        **more,
    }


class TerminalSession:
    """A process with a pseudo-terminal: a quick one, or one that reads a little and then pauses, in seconds."""

    def __init__(
        self, arguments: list[str], *, cwd: Path, env: Mapping[str, str], columns: int = 100, pause: float = 0.0
    ) -> None:
        self._pause = pause
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._process = subprocess.Popen(
            arguments, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=dict(env), preexec_fn=_own_terminal
        )
        os.close(slave)
        self.raw = b""
        self._seen = 0

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        """Return all text so far, without sequences that only move and colour."""
        return _ESCAPES.sub("", self.raw.decode("utf-8", "replace"))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def enter(self, text: str) -> None:
        self.type(f"{text}\r")

    def expect(self, *wanted: str) -> str:
        """Wait for texts, one after the other, after the last one found. Return the text until then."""
        deadline = time.monotonic() + SECONDS
        begin = self._seen
        for each in wanted:
            while (found := self.text.find(each, self._seen)) < 0:
                assert self._read(deadline), f"waited for {each!r}, and got:\n{self.text[self._seen :]}"
            self._seen = found + len(each)
        return self.text[begin : self._seen]

    def prompted(self, times: int) -> None:
        """Wait until the chat has asked for a line `times` times."""
        deadline = time.monotonic() + SECONDS
        while self.raw.count(PROMPT) < times:
            assert self._read(deadline), f"waited for prompt {times}, and got:\n{self.text}"

    def interrupt(self, wanted: str) -> int:
        """Press Ctrl-C, and wait for its effect. Return how often it was pressed.

        As a person would, press it again if nothing happens: one that comes in the instant between readline's prompt
        and its waiting for keys is not seen before the next key.
        """
        deadline, pressed = time.monotonic() + SECONDS, 0
        while self.text.find(wanted, self._seen) < 0:
            assert time.monotonic() < deadline, f"Ctrl-C did not lead to {wanted!r}:\n{self.text[self._seen :]}"
            self.type(CTRL_C)
            pressed += 1
            soon = time.monotonic() + 10.0
            while self.text.find(wanted, self._seen) < 0 and self._read(soon):
                pass
        self.expect(wanted)
        return pressed

    def ends(self) -> int:
        """Wait for the process to end. Return its exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read(deadline):
            pass
        return self._process.wait(timeout=SECONDS)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _read(self, deadline: float) -> bool:
        """Read what is there, or wait for it. Return False if nothing more will come."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            chunk = os.read(self._master, 512 if self._pause else 65536)
        except OSError:  # the other side is closed
            return False
        self.raw += chunk
        time.sleep(self._pause)
        return bool(chunk)


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
