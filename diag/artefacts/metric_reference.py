"""The reference of the exporter's metrics, docs/metrics.md: each with the signals and incidents that read it."""

from collections.abc import Iterator, Mapping, Sequence

from diag.artefacts.names import GENERATED_MARK
from diag.core.contract import Contract
from diag.core.formatting import listed, quantity
from diag.core.incident import Incident, Signal
from diag.core.log_events import LOG_EVENTS, STARTUP_PHASES
from diag.core.metric_families import FAMILIES, LABELS, MetricFamily
from diag.knowledge.formulas import formula
from diag.promql import metric_names, parse

SECTIONS = {
    "diag_vllm_startup_": "Start-up of vLLM, from its log",
    "diag_vllm_log_": "Log of vLLM",
    "diag_vllm_process_": "Processes of vLLM",
    "diag_vllm_": "vLLM server",
    "diag_probe_": "Probe request (with `--probe`)",
    "diag_gpu_": "GPUs",
    "diag_": "The exporter itself",
}
"""A metric is in the first section whose prefix it has."""
UNITS = {
    "_timestamp_seconds": "Unix time in seconds",
    "_bytes_per_second": "bytes/s",
    "_cpu_seconds": "CPU seconds",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_celsius": "°C",
    "_hertz": "Hz",
    "_watts": "W",
    "_joules": "J",
    "_ratio": "share (0 to 1)",
    "_info": "always 1",
}
"""The unit by the end of the name, without `_total`."""
INTRODUCTION = f"""\
# Metrics of the exporter

*{GENERATED_MARK}.* `diag exporter` serves these metrics beside vLLM's own, which it passes through unchanged.

A value that the exporter cannot know has no sample; it is never written as 0, -1 or NaN. The last two columns name
signals and incidents that read a metric; `diag explain INCIDENT` prints the runbook of an incident.
"""
BY_THE_DOCTOR = "`diag doctor` reads it to describe a server."
DESCRIBED_BELOW = {"event": "a log event, see below", "field": "a field of a log event", "phase": "a phase, see below"}


def metric_reference(incidents: Sequence[Incident], dashboards: Mapping[str, str]) -> str:
    """The page: a table of metrics per section, then the values of labels. `dashboards` are their texts by file."""
    readers = _readers(incidents)
    sections: dict[str, list[tuple[str, ...]]] = {}
    for name, family in FAMILIES.items():
        cells = _cells(name, family, readers.get(name, []))
        use = cells[-1] or _used_by_dashboards(name, dashboards) or family.unread or BY_THE_DOCTOR
        sections.setdefault(_section(name), []).append((*cells[:-1], use))
    columns = ("metric", "type", "labels", "unit", "meaning", "signals", "incidents, or what it is for")
    tables = [_table(title, columns, rows) for title, rows in sections.items()]
    return INTRODUCTION + "".join([*tables, *_label_tables()])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return f"\n## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _label_tables() -> list[str]:
    labels = [(f"`{name}`", DESCRIBED_BELOW.get(name, meaning)) for name, meaning in LABELS.items()]
    phases = [
        (f"`{phase.name}`", phase.meaning, quantity(phase.usual_seconds, "seconds") if phase.usual_seconds else "")
        for phase in STARTUP_PHASES
    ]
    events = [(f"`{event.name}`", event.meaning, ", ".join(event.fields)) for event in LOG_EVENTS]
    return [
        _table("Labels", ("label", "value"), labels),
        _table("Start-up phases (label `phase`)", ("phase", "meaning", "takes at most, as reported"), phases),
        _table("Log events (label `event`)", ("event", "meaning", "fields of `diag_vllm_log_value`"), events),
    ]


def _readers(incidents: Sequence[Incident]) -> dict[str, list[tuple[Signal, Incident]]]:
    """The signals and incidents that read a metric."""
    found: dict[str, list[tuple[Signal, Incident]]] = {}
    for incident in incidents:
        for signal in dict.fromkeys(_signals(incident)):
            for name in _metrics(signal):
                found.setdefault(name, []).append((signal, incident))
    return found


def _signals(incident: Incident) -> Iterator[Signal]:
    """All that is read of a server for an incident: what it is judged by and what its fixes are computed from."""
    yield from (condition.signal for condition in incident.every_condition)
    yield from (look.refuted_by.signal for look in incident.looks_like if look.refuted_by)
    for fix in incident.fixes:
        yield from fix.signals
        yield from (condition.signal for condition in (*fix.only_if, *fix.expects))
    if incident.quotes:
        yield incident.quotes


def _metrics(signal: Signal) -> set[str]:
    texts = (signal.promql, signal.culprit_promql)
    formulas = (formula(text, ("instance",), "5m", Contract()) for text in texts if text)
    return {name for found in formulas for name in metric_names(parse(found))}


def _section(name: str) -> str:
    return next(title for prefix, title in SECTIONS.items() if name.startswith(prefix))


def _cells(name: str, family: MetricFamily, readers: Sequence[tuple[Signal, Incident]]) -> tuple[str, ...]:
    signals = sorted({signal.name for signal, _ in readers})
    incidents = sorted({incident.id for _, incident in readers})
    return (
        f"`{name}`",
        family.kind,
        ", ".join(f"`{label}`" for label in family.labels),
        _unit(name, family),
        family.help,
        listed(signals, "; "),
        ", ".join(f"`{incident}`" for incident in incidents),
    )


def _used_by_dashboards(name: str, dashboards: Mapping[str, str]) -> str:
    """The dashboards that show a metric, "dashboard gpus"; in their text a metric is followed by its matchers."""
    pages = [
        file.removeprefix("dashboards/").removesuffix(".json") for file in dashboards if f"{name}{{" in dashboards[file]
    ]
    return f"dashboards: {', '.join(pages)}" if pages else ""


def _unit(name: str, family: MetricFamily) -> str:
    stem = name.removesuffix("_total")
    unit = next((unit for suffix, unit in UNITS.items() if stem.endswith(suffix)), "")
    return unit or ("count" if family.kind == "counter" else "")
