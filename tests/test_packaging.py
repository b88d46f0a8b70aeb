"""The wheel has all code, and its metadata agrees with the documentation. `make wheel` installs it for real."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import perdure

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")


def built(target: str, into: Path) -> Path:
    """Build the wheel or the source archive as pip does, but with the hatchling that is installed here."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def name_of(requirement: str) -> str:
    """Return the name of the package in a requirement, in the form that PyPI compares."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=; ]", requirement)[0]).lower()


def in_table(title: str) -> dict[str, str]:
    """Return the second cell of each row of the first table under a heading, by the code in its first cell."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE))


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    """It has every file of src/perdure: code, types, SQL, templates and static files. It has no test."""
    source = ROOT / "src"
    files = {path for path in (source / "perdure").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == {str(path.relative_to(source)) for path in files}
    assert "perdure/py.typed" in names
    assert {Path(name).suffix for name in names} >= {".sql", ".html", ".css", ".js", ".svg"}


def test_the_wheel_runs_where_nothing_else_of_perdure_is(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, it works on the command line without a warning."""
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-W", "error", "-m", "perdure", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"perdure {perdure.__version__}\n", "")


def test_the_source_archive_has_what_a_packager_needs(tmp_path: Path) -> None:
    """It has the tests, the documentation and the examples, so a distribution can run them."""
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"tests/test_packaging.py", "docs/installation.md", "examples/demo.py", "Makefile", "LICENSE"}
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build/"))]


def test_one_version_is_everywhere(metadata: Message) -> None:
    """The package, its metadata, the changelog and the container file name the same release."""
    latest = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    container = re.search(r"PERDURE_VERSION=(.*)", (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8"))
    assert latest is not None
    assert container is not None
    assert metadata["Version"] == perdure.__version__ == latest[1] == container[1]


def test_what_is_installed_is_documented_with_its_reason() -> None:
    """Each package that `pip install perdure` installs has a row with its reason."""
    listed = in_table("What is installed")
    assert {name_of(name) for name in PROJECT["dependencies"]} <= listed.keys()


def test_every_extra_is_documented() -> None:
    """Each extra for users has a row; those for developers of perdure have none."""
    for_users = PROJECT["optional-dependencies"].keys() - {"dev", "docs", "engines", "peers"}
    assert in_table("Extras").keys() == for_users


def test_every_python_that_is_supported_is_named(metadata: Message) -> None:
    """The page names the versions of the classifiers, and pip requires the oldest."""
    versions = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if re.search(r":: 3\.\d+$", line)]
    assert f"Python {versions[0]} to {versions[-1]}" in PAGE
    assert metadata["Requires-Python"] == f">={versions[0]}"


def test_a_missing_package_is_named_with_its_extra() -> None:
    """Each extra that the code tells users to install exists, so the command in the message works."""
    told = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for names in re.findall(r"pip install (?:--upgrade )?'perdure\[([a-z,-]+)\]'", path.read_text(encoding="utf-8"))
        for name in names.split(",")
    }
    assert told <= PROJECT["optional-dependencies"].keys()
    assert {"schema", "llm", "postgres"} <= told
