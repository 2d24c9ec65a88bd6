"""Compare what was recorded with what is expected, row by row."""

import json
import math
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from diag.commands.observe import ObserveOptions, take_snapshot
from diag.diagnosis.snapshot import Snapshot
from diag.vllm import gpus
from gpu.stages import HOST_STAGES, Check

SLOW = 50_000
"""Microseconds above which a call of the driver is slow for a page that is scraped every second."""
SHEET = (0.6, 1.02)
"""Shares of the data sheet's rate that a measured ceiling may have: more than all of it is a wrong sheet."""


class Row(NamedTuple):
    """One line of the table; `ok` is None for a value without an expectation."""

    part: str
    what: str
    expected: str
    got: str
    ok: bool | None


def print_table(source: Path) -> int:
    """Print the table of a folder or an archive; return the exit status, 1 if a row differs."""
    if source.is_dir():
        found = [*rows(source)]
    else:
        with tempfile.TemporaryDirectory() as place, tarfile.open(source) as tar:
            tar.extractall(place, filter="data")
            (folder,) = Path(place).iterdir()
            found = [*rows(folder)]
    for row in found:
        mark = {True: "as expected", False: "DIFFERS", None: ""}[row.ok]
        print(f"{row.part}  {row.what:58}  {row.expected:36}  {row.got:44}  {mark}".rstrip())
    differ = sum(row.ok is False for row in found)
    print(f"{len(found)} rows, {differ} differ")
    return int(differ > 0)


def rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of a recorded folder."""
    if (calls := folder / "driver_calls.json").exists():
        yield from _call_rows(json.loads(calls.read_text()))
    for stage in HOST_STAGES:
        if (folder / stage.name).exists():
            snapshot = take_snapshot(ObserveOptions([str(folder / stage.name)]))
            yield from _check_rows("b", stage.name, stage.checks, snapshot)
            ill = [found.diagnosis.incident.id for found in snapshot.report.present if found.diagnosis.incident.id.startswith("gpu")]
            yield Row("b", f"{stage.name}: GPU incidents", "none", ", ".join(ill) or "none", not ill)
    if (file := folder / "ceilings.json").exists():
        yield from _ceiling_rows(json.loads(file.read_text()))
    for file in sorted(folder.glob("*/expected.toml")):
        yield from _server_rows(file.parent, tomllib.loads(file.read_text()))


def _call_rows(calls: list[dict[str, object]]) -> Iterator[Row]:
    by_family: dict[str, list[dict[str, object]]] = {}
    for call in calls:
        by_family.setdefault(f"{call['family']} {' '.join(map(str, call.get('labels', [])))}".strip(), []).append(call)
    for family, asked in by_family.items():
        answered = next((call for call in asked if "value" in call), None)
        tried = ", ".join(f"{call['call']} {call.get('means', '')}".strip() for call in asked if "value" not in call)
        if family:
            yield Row("a", family, "a value or a refusal", f"{answered['value']} ({answered['call']})" if answered else f"refused: {tried}", None)
    for call in by_family.get("", ()):
        yield Row("a", str(call["call"]), "", str(call.get("value", call.get("means"))), None)
    slow = [f"{call['call']} {int(str(call['microseconds'])) / 1000:.0f} ms" for call in calls if int(str(call.get("microseconds", 0))) > SLOW]
    yield Row("a", "calls slower than 50 ms", "none", ", ".join(slow) or "none", not slow)


def _check_rows(part: str, stage: str, checks: tuple[Check, ...], snapshot: Snapshot) -> Iterator[Row]:
    queries = snapshot.queries
    for check in checks:
        values = [row[-1] for row in queries.ask(check.promql, ("instance",), queries.whole).values()]
        value = values[0] if values else math.nan
        bounds = f"{check.low:.3g} to {check.high:.3g}"
        yield Row(part, f"{stage}: {check.name}", bounds, f"{value:.4g}", bool(check.low <= value <= check.high))


def _ceiling_rows(measured: dict[str, float | str]) -> Iterator[Row]:
    name = str(measured["name"])
    model = gpus.find(name)
    for key, sheet in (
        ("memory_gibibytes", model and model.memory / 2**30),
        ("bf16_teraflops", model and model.flops["bf16"] / 1e12),
        ("bandwidth_gigabytes", model and model.bandwidth / 1e9),
        ("pcie_gigabytes", model and model.pcie / 1e9),
    ):
        value = float(measured[key])
        if not sheet:
            yield Row("c", f"{name} {key}", "not in gpus.toml", f"{value:.5g}", None)
            continue
        ok = SHEET[0] <= value / sheet <= SHEET[1]
        yield Row("c", f"{name} {key}", f"{sheet:.5g} (gpus.toml)", f"{value:.5g} ({value / sheet:.1%})", ok)


def _server_rows(folder: Path, expected: dict[str, object]) -> Iterator[Row]:
    target = folder / "server.log" if expected.get("log_alone") else folder
    report = take_snapshot(ObserveOptions([str(target)], log_timezone="UTC")).report if not expected.get("log_alone") else _log_report(target)
    shown = ", ".join(f"{found.diagnosis.severity} {found.diagnosis.incident.id}" for found in report.present if found.diagnosis.severity != "info")
    got = f"{report.verdict}: {shown}" if shown else report.verdict
    present = {found.diagnosis.incident.id for found in report.present}
    wanted = set(expected.get("present", []))  # type: ignore[call-overload]
    ok = report.verdict == expected["verdict"] and wanted <= present
    yield Row("d", folder.name, f"{expected['verdict']}: {', '.join(sorted(wanted))}".rstrip(": "), got, ok)


def _log_report(log: Path):
    from support.reports import judged_logs

    return judged_logs(log)
