"""Compare what was recorded with what is expected, row by row."""

import gzip
import json
import math
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import alert_rules, timelines
from support.firing import evaluated
from support.reports import judged_logs

from diag.commands.observe import ObserveOptions, take_snapshot
from diag.core.errors import DiagError
from diag.core.formatting import GIB, plural
from diag.vllm import gpus
from gpu.stages import AWAITED, HOST_STAGES, NOT_READ, PCIE_RATE, HostStage

MISSING = "not_recorded.json"
"""File with the stages that a run planned and did not record, each with the reason."""
BUSY = "host_cpu_starved"
"""Incident of a host on which no stage is what it is meant to be."""
TIME_IS_UP = "time is up"
"""How a reason begins that is no fault of the server."""

MOST_UNPACKED = 256 * 2**20
"""Bytes of an archive, unpacked; a whole run has 3 MiB."""
DAMAGED = (tarfile.TarError, zlib.error, DiagError, RecursionError)
"""Errors of a damaged archive, beside Python's own for values of another type."""
SLOW = 50_000
"""Microseconds above which a call of the driver is slow for a page that is scraped every second."""
SHEET = (0.6, 1.02)
"""Shares of the data sheet's rate that a measured ceiling may have: more than all of it is a wrong sheet."""
UNTOLD = ("cannot tell", "not recorded")
"""How the text of a row without an answer begins."""
FEW = 3
"""Scrapes of a stage without which a rate may be missing."""
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
    """Print the table of a folder or an archive; return the exit status, 1 if a row differs or none can be read."""
    try:
        if source.is_dir():
            found = [*rows(source)]
        else:
            with tempfile.TemporaryDirectory() as place:
                found = [*rows(_unpacked(source, Path(place)))]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, EOFError, *DAMAGED) as error:
        print(f"{source.name} cannot be judged: it is no record of this program ({type(error).__name__})")
        return 1
    for row in found:
        mark = {True: "as expected", False: "DIFFERS", None: ""}[row.ok]
        print(f"{row.part}  {row.what:58}  {row.expected:36}  {row.got:44}  {mark}".rstrip())
    differ = sum(row.ok is False for row in found)
    untold = sum(row.ok is None and row.got.startswith(UNTOLD) for row in found)
    print(f"{len(found)} rows, {differ} differ, {untold} without an answer")
    return int(differ > 0)


def _unpacked(source: Path, place: Path) -> Path:
    """Unpack a stranger's archive: no links, devices and paths that lead out of it, and 256 MiB at most."""
    plain = place / "archive.tar"
    with gzip.open(source) as packed, plain.open("wb") as unpacked:
        while part := packed.read(2**20):
            unpacked.write(part)
            if unpacked.tell() > MOST_UNPACKED:
                raise ValueError("too large")
    with tarfile.open(plain) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)  # 3.11.4 has it first
        if sum(member.size for member in tar) > MOST_UNPACKED:  # a sparse file may claim any size
            raise ValueError("too large")
        tar.extractall(place / "files")
    (folder,) = (place / "files").iterdir()
    return folder


def rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of a recorded folder."""
    if (calls := folder / "driver_calls.json").exists():
        yield from _call_rows(json.loads(calls.read_text()))
    for stage in HOST_STAGES:
        if (folder / stage.name).exists():
            yield from _check_rows(stage, folder / stage.name)
    if (file := folder / "ceilings.json").exists():
        yield from _ceiling_rows(json.loads(file.read_text()))
    yield from _budget_rows(folder)
    for file in sorted(folder.glob("*/recording.toml")):
        if truth := tomllib.loads(file.read_text()).get("truth"):
            yield from _server_rows(file.parent, truth)
    if (file := folder / MISSING).exists():
        yield from (_missing_row(name, why) for name, why in json.loads(file.read_text()).items())


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


def _check_rows(stage: HostStage, folder: Path) -> Iterator[Row]:
    """Yield a row for each check of a stage; a host that is too busy to read a value is no wrong value of the card."""
    snapshot = take_snapshot(ObserveOptions([str(folder)]))
    queries, scrapes = snapshot.queries, snapshot.report.observed.scrapes
    for check in stage.checks:
        values = [row[-1] for row in queries.ask(check.promql, ("instance",), queries.whole).values()]
        value = values[0] if values else math.nan
        is_right: bool | None = bool(check.low <= value <= check.high)
        got = f"{value:.4g}"
        if check is PCIE_RATE and (folder / NOT_READ).exists():
            is_right, got = None, f"{UNTOLD[0]}: not read in {AWAITED:.0f} s"
        elif math.isnan(value) and scrapes < FEW:
            is_right, got = None, f"{UNTOLD[0]}: {plural(scrapes, 'scrape')} on a busy host"
        yield Row("b", f"{stage.name}: {check.name}", f"{check.low:.3g} to {check.high:.3g}", got, is_right)
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
            got, is_close = f"{estimate:,.0f} ({error:+.1%})", abs(error) < BUDGET_ERROR
            yield Row("d", "KV cache, tokens", f"{logged:,.0f} (log)", got, is_close)


def _server_rows(folder: Path, truth: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the verdict on a stage, and the alerts that fire if it goes on after ten healthy minutes."""
    is_log = truth.get("log_alone", False)
    target = folder / "server.log" if is_log else folder
    report = judged_logs(target) if is_log else take_snapshot(ObserveOptions([str(target)])).report
    shown = [finding.diagnosis for finding in report.present if finding.diagnosis.severity != "info"]
    names = {diagnosis.incident.id for diagnosis in shown}
    verdict, present = f"{truth['verdict']}: {', '.join(truth['present'])}".removesuffix(": "), {*truth["present"]}
    got = f"{report.verdict}: {', '.join(diagnosis.incident.id for diagnosis in shown)}".removesuffix(": ")
    is_right = report.verdict == truth["verdict"] and names >= present
    is_busy = BUSY in names - present  # by the page's own figures of the host
    yield _stage_row(folder.name, verdict, got, is_right, is_busy)
    healthy = folder.with_name("healthy")
    if not is_log and healthy.exists():
        fired = evaluated(alert_rules.RULES, timelines.timeline(str(folder), lead=str(healthy))).incidents
        expected, got = (", ".join(sorted(ids)) or "none" for ids in (present, fired))
        is_right = fired >= present if present else not fired
        yield _stage_row(f"{folder.name}: alerts", expected, got, is_right, is_busy)


def _stage_row(what: str, expected: str, got: str, is_right: bool, is_busy: bool) -> Row:
    """Return the row of a stage; what differs while the host lacks CPU time is not the stage that was meant."""
    if is_busy and not is_right:
        return Row("d", what, expected, f"{UNTOLD[0]}: {got}", None)
    return Row("d", what, expected, got, is_right)


def _missing_row(name: str, why: str) -> Row:
    return Row("d", name, "recorded", f"{UNTOLD[1]}: {why}", None if why.startswith(TIME_IS_UP) else False)
