"""Agent definitions kept in files: Markdown with front matter, YAML, TOML or JSON.

Each reader gives the same plain data, so that one set of checks serves all formats.
"""

from perdure.definition_files.files import load_definition as load_definition
from perdure.definition_files.files import load_definitions as load_definitions
