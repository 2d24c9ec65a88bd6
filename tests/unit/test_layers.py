"""The structure of the tree: floors, libraries behind one file each, names that exist once, tests that stand alone."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from support.paths import ROOT, TESTS
from support.rows import each_row

PACKAGE = ROOT / "diag"
FILES = sorted(PACKAGE.rglob("*.py"))
ONE_FILE: dict[str, str | tuple[str, ...]] = {
    "grafanalib": "artefacts/grafana.py",
    "bcrypt": "exporter/web_config.py",
    "kubernetes": "sources/kubernetes/cluster.py",
    "mcp": "commands/mcp/server.py",
    "pydantic": "commands/mcp/",
    "yaml": "core/files.py",
    "vllm": "vllm/flags/parser.py",
    "typer": "cli/",
    "rich": ("report/terminal.py", "top/app.py"),
    "textual": "top/app.py",
    "promql_parser": "promql/",
    "prometheus_client": "exposition/__init__.py",
    "jinja2": "report/templates.py",
    "pandas": ("report/dataframe.py", "library.py"),
    "prometheus_api_client": "sources/prometheus/client.py",
    "psutil": "exporter/process/table.py",
    "amdsmi": "exporter/gpu/amdsmi.py",
    "pynvml": "exporter/gpu/nvml.py",
    "requests": "sources/prometheus/client.py",
    "http.client": ("http/", "exporter/http_server.py"),
    "urllib.request": "http/",
    "httpx": (),
}
"""The file or folder of each library, also of those in Python that send requests; nothing else lists them."""

IMPORT = re.compile(r"(?m)^ *(?:from|import) [^(\n]*(?:\([^)]*\))?")
"""A statement that imports; to parse the tests for them takes a second."""


@cache
def outline(file: Path) -> tuple[set[str], list[str]]:
    """Return what a file imports, and the names of its classes; each file is parsed once."""
    imports, classes = set[str](), list[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return imports, classes


def imported(file: Path) -> set[str]:
    return outline(file)[0]


def test_each_floor_imports_only_the_floors_below_it() -> None:
    """The contract is in pyproject.toml; import-linter judges it."""
    linter = str(Path(sys.executable).parent / "lint-imports")
    done = subprocess.run([linter, "--no-cache"], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_five_files_lie_beside_the_floors() -> None:
    beside = {"__init__.py", "__main__.py", "incident.py", "library.py", "signals.py"}
    assert {file.name for file in PACKAGE.glob("*.py")} == beside


def test_a_class_name_exists_once() -> None:
    names = Counter(name for file in FILES for name in outline(file)[1])
    assert [name for name, count in names.items() if count > 1] == []


@each_row("file", FILES)
def test_a_library_stands_behind_one_file(file: Path) -> None:
    inside, names = str(file.relative_to(PACKAGE)), imported(file)
    used = {library for library in ONE_FILE if any(f"{name}.".startswith(f"{library}.") for name in names)}
    assert not {library for library in used if not inside.startswith(ONE_FILE[library])}


def test_no_test_imports_another_one() -> None:
    tests = {file.stem for file in TESTS.rglob("test_*.py")}
    helpers = [file for file in TESTS.rglob("*.py") if file.name != "conftest.py"]
    texts = {file.name: " ".join(IMPORT.findall(file.read_text(encoding="utf-8"))) for file in helpers}
    assert [name for name, text in texts.items() if set(re.findall(r"\w+", text)) & tests] == []
