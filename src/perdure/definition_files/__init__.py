"""Agent definitions in files: Markdown with front matter, YAML, TOML or JSON.

All readers return the same plain data, so one set of checks serves all formats.
"""

from perdure.definition_files.files import load_definition as load_definition
from perdure.definition_files.files import load_definitions as load_definitions
