"""`diag config` and `diag lint` in print: the running configuration, and the findings in a launch command.

Each has plain text of at most 100 columns and JSON: schemas "diag.config/2" and "diag.lint/3" (diag.*.schema.json).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from diag.core.formatting import gibibytes, plural
from diag.lint.rule import SEVERITIES, LintFinding, LintReport, LintResult, is_open
from diag.report.documents import Document
from diag.report.layout import labelled, paragraph, table, verbatim
from diag.report.spans import states
from diag.vllm.running_config import EXPORTER, FLAGS, PAGE, SET, Value

if TYPE_CHECKING:
    from diag.diagnosis.configuration import ConfigEntry, Configuration

LABEL = 13
"""The column of labels in a lint report."""
PARTLY = 18
_METRICS = {PAGE: f"{PAGE}: cache_config_info", EXPORTER: f"{EXPORTER}: diag_vllm_config"}
"""Sources of settings that publish them in a metric worth naming."""


UNKNOWN = states("setting")
"""Reasons why the value of a setting is unknown, by `Unknown`."""


# -- the running configuration ----------------------------------------------------------------------------------------


def render_config(servers: "Sequence[Configuration]", notes: Sequence[str]) -> str:
    parts = []
    for server in servers:
        kinds = [f"{gpu.name} ({gibibytes(gpu.memory, 0)})" for gpu in server.gpus]
        gpus = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "no GPU found"
        runs = f"vLLM {server.version or 'version unknown'}, {server.model or 'model unknown'}"
        rows = []
        for entry in server.entries:
            if entry.value is not None:
                remarks = [source_text(entry) if entry.default else _METRICS.get(entry.source, entry.source)]
                remarks += ["value hidden or unreadable"] if entry.value == SET else []
                for other in entry.conflicts:
                    value = format_setting(entry.name, other.value)
                    remarks.append(f"{_METRICS.get(other.source, other.source)} has {value}")
                rows.append((entry.name, format_setting(entry.name, entry.value), "; ".join(remarks)))
        not_set = ", ".join(entry.name for entry in server.entries if entry.value is None)
        unknown = [f"{', '.join(names)}: {UNKNOWN[reason]}" for reason, names in server.unknown.items()]
        environment = "  ".join(f"{name}={value}" for name, value in server.environment.items())
        lines = [
            *paragraph(f"{server.instance}: {runs}, {gpus}"),
            *(table(rows) if rows else []),
            *labelled("not set", [not_set] if not_set else []),
            *labelled("environment", [environment] if environment else []),
            *labelled("incomplete", [f"more flags may be set: {server.incomplete}"] if server.incomplete else []),
            *labelled("unknown", unknown),
        ]
        parts.append("\n".join(lines))
    parts += ["\n".join(labelled("note", notes))] if notes else []
    return "\n\n".join(parts) + "\n"


def source_text(entry: "ConfigEntry") -> str:
    """Return the source of a value, "default of 0.32.0 on 80 GiB" for a default, "" for a setting that is not set."""
    if entry.default is None:
        return entry.source
    which = entry.default.release or "every release"
    newest = ", the newest known" if entry.default.is_newest_known else ""
    on = f" on {gibibytes(entry.default.memory, 0)}" if entry.default.memory is not None else ""
    return f"default of {which}{newest}{on}{', unless set' if entry.default.unless_set else ''}"


def format_setting(name: str, value: Value | None) -> str:
    """Format a value as a person writes it: switches on and off, counts whole."""
    plain = _json_value(name, value)
    if isinstance(plain, bool):
        return "on" if plain else "off"
    return "not set" if plain is None else f"{plain:g}" if isinstance(plain, float) else str(plain)


def _json_value(name: str, value: Value | None) -> Value | int | bool | None:
    """Turn the number of a switch into a boolean and a whole number into an integer."""
    if isinstance(value, float) and FLAGS.get(name.removeprefix("--").replace("-", "_")) == "switch":
        return bool(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


CONFIG = Document(
    "config",
    {
        "Configuration": {
            "unknown": lambda server: [(name, UNKNOWN[why]) for why, names in server.unknown.items() for name in names]
        },
        "ConfigEntry": {
            "value": lambda entry: _json_value(entry.name, entry.value),
            "origin": source_text,
            "is_default": lambda entry: entry.default is not None,
            "others": lambda entry: [(_json_value(entry.name, each.value), each.source) for each in entry.others],
        },
    },
)
"""The document of servers, and of notes about them."""


# -- the findings in a launch command ---------------------------------------------------------------------------------


def render_lint(result: LintResult) -> str:
    """Render the findings as plain text, server by server; servers without any share one line."""
    several = len(result.launches) > 1
    clean = [report for report in result.launches if several and not (report.findings or report.every)]
    parts = [_render_launch(report) for report in result.launches if report not in clean]
    places = [place(report) or report.model or "a server" for report in clean]
    below = labelled("nothing found", places, LABEL + 2) if clean else []
    if any(report.not_checked for report in clean):
        below += labelled("not checked", ["what their text does not show: --all lists it"], LABEL + 2)
    below += labelled("not read", [f"{name}: {why}" for name, why in result.unread.items()], LABEL)
    if several or result.files > 1 or result.unread:
        servers, errors = plural(len(result.launches), "server"), [report.status for report in result.launches]
        bad = f"{errors.count(2)} with errors, {errors.count(1)} with warnings only"
        files = f" in {plural(result.files, 'file')}" if result.files > 1 else ""
        unread = f"; {plural(len(result.unread), 'file')} not read" if result.unread else ""
        below += ["", *paragraph(f"{servers}{files}: {bad}{unread}")]
    parts += ["\n".join(below).strip("\n") + "\n"] if below else []
    return "\n".join(parts)


def place(report: LintReport) -> str:
    """Return the place of a server: file, line, and its service, container or function."""
    parts = [f"{report.file}:{report.line}" if report.file and report.line else report.file, report.place]
    return ", ".join(filter(None, parts))


def _render_launch(report: LintReport) -> str:
    """Render a server: a headline with the counts, each finding, the corrected command, notes."""
    severities = [finding.severity for finding in report.findings]
    counts = [plural(severities.count(name), name) for name in SEVERITIES if name in severities]
    model = f"model unknown: {report.model}" if is_open(report.model) else report.model or "model unknown"
    server = f"{model} with vLLM {report.version} ({report.version_source})"
    where = place(report)
    nothing = "nothing found in what was checked" if report.not_checked else "nothing found"
    lines = paragraph(f"{f'{where}: ' if where else ''}{server}: {', '.join(counts) or nothing}")
    for finding in report.findings:
        lines += ["", *finding_lines(finding)]

    if report.corrected and report.errors_left:
        left = plural(report.errors_left, "error is", "errors are")
        lines += ["", *labelled("partly corrected", [f"{left} left"], PARTLY), *verbatim("", report.corrected, LABEL)]
    elif report.corrected:
        lines += ["", *verbatim("corrected", report.corrected, LABEL)]

    notes: dict[str, list[str]] = {}
    corrected = "the corrected command starts the same server as a command line" if report.writing else ""
    if report.is_part:
        corrected = "the corrected words are vLLM's own; what stands around them stays as it is"
    if origin := [each for each in (report.writing, corrected if report.corrected else "") if each]:
        notes["read from" if report.writing else "note"] = ["; ".join(origin)]
    notes["read as"] = [report.command] if report.every else []
    if report.parser_error is not None:
        answer = f"refuses it: {report.parser_error}" if report.parser_error else "accepts the command"
        notes["parser"] = [f"that of the installed vLLM {report.version} {answer}"]
    notes["not checked"] = list(report.not_checked)
    if report.left_out:
        notes["left out"] = [f"{plural(report.left_out, 'info')} (--all shows them)"]
    if report.ignored:
        notes["ignored"] = [f"{plural(len(report.ignored), 'finding')} ({', '.join(dict.fromkeys(report.ignored))})"]
    if report.findings:
        notes["more"] = ["diag explain RULE explains a finding, diag lint --ignore RULE drops it"]
    below = [line for label, texts in notes.items() for line in labelled(label, texts, LABEL)]
    return "\n".join([*lines, *[""] * bool(below), *below]) + "\n"


def finding_lines(finding: LintFinding) -> Iterator[str]:
    """Yield the lines of a finding: severity, message and rule id, then why and how to fix it."""
    margin = LABEL + 2
    place = f", line {finding.line}" if finding.line else ""
    yield from paragraph(
        f"{finding.message} [{finding.rule}{place}]", f"{finding.severity.upper():<{margin}}", " " * margin
    )
    yield from labelled("why", [finding.why], LABEL)
    yield from labelled("fix", [finding.fix], LABEL)


LINT = Document(
    "lint",
    {
        "LintReport": {"counts": lambda report: Counter(report.ignored)},
        "LintFinding": {"corrected": lambda finding: bool(finding.edits) and finding.severity != "info"},
    },
)
"""`corrected_command` is null if nothing can be corrected mechanically."""
