"""A disk on which a sync takes 1 ms."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import slow_disk

ROOT = Path(__file__).parents[2]
has_compiler = sys.platform.startswith("linux") and bool(shutil.which("cc") or shutil.which("gcc"))


@pytest.mark.skipif(not has_compiler, reason="needs Linux and a C compiler")
def test_a_sync_takes_a_millisecond_where_the_library_is_loaded(tmp_path: Path) -> None:
    """A process with the library finds the disk slow; `require_slow` refuses a quick disk without it."""
    code = "import sys, pathlib; from benchmarks.slow_disk import *; require_slow(pathlib.Path(sys.argv[1]))"
    library = slow_disk._library(tmp_path)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_a_compiler_the_figure_says_why_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the figure is not measured, and nothing fails."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(slow_disk.NotHere, match="cc or gcc"):
        slow_disk.rates_on_slow_disk(tmp_path)
