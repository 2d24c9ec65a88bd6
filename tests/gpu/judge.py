"""Compare what was recorded with what is expected, row by row."""

import json
import math
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.reports import judged_logs

from diag.commands.observe import ObserveOptions, take_snapshot
from diag.core.formatting import GIB
from diag.diagnosis.report import Snapshot
from diag.vllm import gpus
from gpu.stages import HOST_STAGES, HostStage

SLOW = 50_000
"""Microseconds above which a call of the driver is slow for a page that is scraped every second."""
SHEET = (0.6, 1.02)
"""Shares of the data sheet's rate that a measured ceiling may have: more than all of it is a wrong sheet."""
BUDGET_ERROR = 0.05
"""Share by which the KV cache that is estimated before the start may differ from the logged one."""


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
            yield from _check_rows(stage, take_snapshot(ObserveOptions([str(folder / stage.name)])))
    if (file := folder / "ceilings.json").exists():
        yield from _ceiling_rows(json.loads(file.read_text()))
    yield from _budget_rows(folder)
    yield from (_server_row(file.parent) for file in sorted(folder.glob("*/expected.toml")))


def _call_rows(calls: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each family: the first call that answered, or why none did."""
    by_family: dict[str, list[Mapping[str, Any]]] = {}
    for call in calls:
        name = " ".join([call["family"], *call.get("labels", ())]) if call["family"] else call["call"]
        by_family.setdefault(name, []).append(call)
    for name, asked in by_family.items():
        answered = next((call for call in asked if "value" in call), None)
        refusals = ", ".join(f"{call['call']} {call['means']}" for call in asked if "value" not in call)
        got = f"{answered['value']} ({answered['call']})" if answered else f"refused: {refusals}"
        yield Row("a", name, "a value or a refusal", got, None)
    times = ((call["call"], call.get("microseconds", 0)) for call in calls)
    slow = [f"{name} {micros / 1000:.0f} ms" for name, micros in times if micros > SLOW]
    yield Row("a", "calls slower than 50 ms", "none", ", ".join(slow) or "none", not slow)


def _check_rows(stage: HostStage, snapshot: Snapshot) -> Iterator[Row]:
    queries = snapshot.queries
    for check in stage.checks:
        values = [row[-1] for row in queries.ask(check.promql, ("instance",), queries.whole).values()]
        value = values[0] if values else math.nan
        bounds = f"{check.low:.3g} to {check.high:.3g}"
        yield Row("b", f"{stage.name}: {check.name}", bounds, f"{value:.4g}", bool(check.low <= value <= check.high))
    present = [finding.diagnosis.incident.id for finding in snapshot.report.present]
    ill = [incident for incident in present if incident.startswith("gpu")]
    yield Row("b", f"{stage.name}: GPU incidents", "none", ", ".join(ill) or "none", not ill)


def _ceiling_rows(measured: Mapping[str, Any]) -> Iterator[Row]:
    gpu = gpus.find(measured["name"])
    sheet = (
        {
            "memory_gibibytes": gpu.memory / GIB,
            "bf16_teraflops": gpu.flops["bf16"] / 1e12,
            "bandwidth_gigabytes": gpu.bandwidth / 1e9,
            "pcie_gigabytes": gpu.pcie / 1e9,
        }
        if gpu
        else {}
    )
    for key, value in measured.items():
        if key in sheet:
            share = value / sheet[key]
            got = f"{value:.5g} ({share:.1%})"
            yield Row("c", key, f"{sheet[key]:.5g} (gpus.toml)", got, SHEET[0] <= share <= SHEET[1])
        else:
            yield Row("c", key, "", str(value), None)


def _budget_rows(folder: Path) -> Iterator[Row]:
    """Yield the estimate of the KV cache before the start beside the tokens that vLLM logged."""
    before, after = (folder / "budget.json"), (folder / "budget_with_log.json")
    if before.exists() and after.exists():
        estimate = json.loads(before.read_text())["kv_cache"]["tokens_estimate"]
        logged = json.loads(after.read_text())["kv_cache"]["logged"].get("tokens")
        if estimate and logged:
            error = estimate / logged - 1
            yield Row(
                "d", "KV cache, tokens", f"{logged:,.0f} (log)", f"{estimate:,.0f} ({error:+.1%})", abs(error) < 0.05
            )


def _server_row(folder: Path) -> Row:
    truth = tomllib.loads((folder / "expected.toml").read_text())
    is_log = truth.get("log_alone", False)
    target = folder / "server.log" if is_log else folder
    report = judged_logs(target) if is_log else take_snapshot(ObserveOptions([str(target)])).report
    shown = [finding.diagnosis for finding in report.present if finding.diagnosis.severity != "info"]
    names = {diagnosis.incident.id for diagnosis in shown}
    expected = f"{truth['verdict']}: {', '.join(truth['present'])}".removesuffix(": ")
    got = f"{report.verdict}: {', '.join(diagnosis.incident.id for diagnosis in shown)}".removesuffix(": ")
    return Row("d", folder.name, expected, got, report.verdict == truth["verdict"] and names >= {*truth["present"]})
