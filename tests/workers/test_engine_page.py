"""The page about workflow engines shows the code of its examples."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "under-dbos-or-temporal.md"
PART = re.compile(
    r"^```python \{\.no-run\}\n# A part of (\S+), which the tests run\.\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def test_every_part_is_in_its_example() -> None:
    """They are equal word for word, part by part."""
    parts = PART.findall(PAGE.read_text())
    assert [name for name, _ in parts] == ["examples/dbos_workflow.py", "examples/temporal_workflow.py"]
    for name, body in parts:
        source = (ROOT / name).read_text()
        for part in re.split(r"\n\n+", body.strip("\n")):
            assert part in source, f"{name} has no\n{part}"
