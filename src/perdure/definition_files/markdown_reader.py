"""Markdown: the fields stand in YAML front matter, and the text below is the system prompt."""

from __future__ import annotations

import re
from typing import Any

from perdure.definition_files.source import Source, line_at
from perdure.definition_files.yaml_reader import read_yaml_document


def read_markdown(source: Source) -> Any:
    first, _, rest = source.text.partition("\n")
    end = re.search(r"^---[ \t]*$", rest, re.MULTILINE)
    if first.rstrip() != "---":
        raise source.invalid((), "expected front matter: a line ---, the fields, a line ---, then the system prompt")
    if end is None:
        raise source.invalid((), "the front matter is not closed; end it with a line ---")
    fields = read_yaml_document(source, "\n" + rest[: end.start()])
    body = rest[end.end() :]
    if not body.strip() or not isinstance(fields, dict):
        return fields
    line = line_at(source.text, len(source.text) - len(body.lstrip()))
    if "system_prompt" in fields:
        raise source.invalid(
            ("system_prompt",), f"given twice: here, and as the text from line {line} on; keep one of them"
        )
    source.note(("system_prompt",), line)
    return {**fields, "system_prompt": re.sub(r"\A(?:[ \t]*\n)+", "", body).rstrip()}
