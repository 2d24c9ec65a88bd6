"""Imports go one way; a file that is not in the table may import nothing of ours."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "diag"
MAY_IMPORT = {
    "errors": set(),
    "incident": set(),
    "signals": {"incident"},
    "host_signals": {"incident", "signals"},
    "gpu_signals": {"incident", "signals"},
    "peer_signals": {"incident", "signals"},
    "feature_signals": {"incident", "signals"},
    "remedies": {"gpu_signals", "incident", "signals"},
    "yaml": {"errors"},
    "vllm": {"errors", "vllm", "yaml"},
    "contract": set(),
    "contract_file": {"contract", "errors"},
    "limits": {"contract", "errors", "incident"},
    "incidents": {"incident", "signals", "host_signals", "gpu_signals", "peer_signals", "feature_signals", "remedies"},
    "promql": {"errors", "promql"},
    "asking": {"contract", "incident"},
    "catalog": {"incidents", "incident", "promql", "contract", "asking", "errors", "vllm"},
    "table": {"asking", "incident"},
    "diagnose": {"asking", "incident", "table"},
    "onset": {"asking", "diagnose"},
    "progress": {"asking", "host_signals", "incident", "signals"},
    "fixes": {"asking", "diagnose", "errors", "incident", "signals", "table", "vllm"},
    "relaunch": {"fixes", "vllm"},
    "report": {"asking", "diagnose", "fixes", "incident", "onset", "progress", "relaunch"},
    "transitions": {"asking", "diagnose", "report"},
    "verify": {
        "asking", "diagnose", "feature_signals", "fixes", "gpu_signals", "incident", "report", "peer_signals",
        "signals", "table", "verify", "vllm",
    },
    "configuration": {"promql", "sources", "vllm"},
    "report": {
        "asking", "configuration", "contract", "diagnose", "fixes", "incident", "report", "lint", "progress",
        "relaunch", "report", "sources", "transitions", "verify", "vllm",
    },
    "sources": {"asking", "errors", "exporter", "incident", "promql", "sources", "vllm"},
    "telemetry": {"asking", "incident", "sources"},
    "fleet": {"asking", "contract", "fixes", "incident", "report", "sources", "telemetry"},
    "artefacts": {
        "artefacts", "contract", "diagnose", "errors", "host_signals", "incident", "peer_signals", "promql", "report",
        "signals", "vllm", "yaml",
    },
    "doctor": {
        "artefacts", "asking", "catalog", "configuration", "contract", "contract_file", "errors", "fixes", "fleet",
        "incident", "report", "limits", "progress", "report", "sources", "verify",
    },
    "exporter": {"errors", "exporter", "sources", "vllm"},
    "watching": {"doctor", "errors", "report", "report", "transitions"},
    "verifying": {"doctor", "errors", "report", "sources", "verify"},
    "lint": {"lint", "vllm"},
    "linting": {"errors", "exporter", "lint", "report", "sources", "vllm"},
    "budget": {"errors", "exporter", "report", "sources", "vllm"},
    "cli": {"budget", "doctor", "errors", "exporter", "linting", "sources", "verifying", "watching"},
}  # fmt: skip
ONE_FILE = {
    "grafanalib": "artefacts/grafana.py",
    "yaml": "yaml.py",
    "vllm": "vllm/parser.py",
    "typer": "cli.py",
    "rich": "report/terminal.py",
    "promql_parser": "promql/",
    "httpx": "sources/fetch.py",
    "prometheus_client": "exporter/families.py",
    "pandas": "report/frame.py",
    "prometheus_api_client": "sources/prometheus.py",
    "psutil": "exporter/process.py",
    "pynvml": "exporter/nvml.py",
    "requests": "sources/session.py",
}


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_what_lies_below_it(file: Path) -> None:
    own = file.relative_to(ROOT).parts[0].removesuffix(".py")
    ours = {part(name) for name in imported(file) if name.startswith("diag.")} - {"__version__"}
    assert ours <= MAY_IMPORT.get(own, set()), f"{own} may not import {ours - MAY_IMPORT.get(own, set())}"


def test_no_two_files_import_each_other() -> None:
    """Sources and exporter use each other's files, in one direction only."""
    files = {".".join(("diag", *file.relative_to(ROOT).with_suffix("").parts)): file for file in ROOT.rglob("*.py")}
    graph = {name: {each for each in imported(file) if each in files} for name, file in files.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_library_stands_behind_one_file(file: Path) -> None:
    inside = str(file.relative_to(ROOT))
    tops = {name.split(".")[0] for name in imported(file)}
    strangers = {name for name, home in ONE_FILE.items() if name in tops and not inside.startswith(home)}
    assert not strangers
