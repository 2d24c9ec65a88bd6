"""Declarations as text: `diag explain` (runbook, signal, lint rule, flag), `diag incidents` and `diag generate`."""

import re
import sys
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from diag.core.contract import Contract
from diag.core.declarations import Mistake, read, typed
from diag.core.errors import BadDeclaration, BadUsage
from diag.core.formatting import plural, printable
from diag.core.incident import Incident, Part, Signal
from diag.core.metric_prefix import OWN, metric
from diag.knowledge.catalog import load
from diag.knowledge.signals import DECLARED
from diag.log.parse_line import MOST_CHARACTERS

_LIKELY, _FEW = 0.75, 8
_LONGEST = 200
"""Characters that are compared: the time grows with them, and no name has more."""
DO = "\n  Do: "
SHORTEST, MOST_KINDS = 6, 6
"""Characters of a text that is looked for in the table of failures, and kinds that are shown."""
ASKED = f"""\
diag explain TEXT, where TEXT is one of
  an incident           diag explain engine_stalled       (all of them: below)
  an alert              diag explain VllmEngineStalled
  a line of a log       diag explain 'CUDA error: an illegal memory access was encountered'
  an exception          diag explain EngineDeadError
  a variable, a flag    diag explain VLLM_USE_DEEP_GEMM, diag explain --max-num-seqs
  a metric, a signal    diag explain {metric("kv_cache_usage_perc")}, diag explain 'queue time (mean)'
  a lint rule, a check  docs/lint-rules.md, docs/preflight.md

"""
METRIC = re.compile(rf"(?:{OWN}|diag_|http_)?[a-z][a-z0-9]*_\w+")
SERIES = r"(?:_bucket|_sum|_count|_total)?"


def show(name: str, folder: Path | None, as_markdown: bool) -> None:
    """Print a page as Markdown, or laid out if standard output is a terminal."""
    text = run(name, folder) if name.strip() else ASKED + list_incidents(folder)
    if as_markdown or not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from diag.report import terminal

    terminal.page(text)


def run(name: str, folder: Path | None) -> str:
    """Return the page of the incident, lint rule, preflight check, signal or part, wrong advice, or flag of vLLM.

    A signal is found by its name, its id and the series that rules record of it; anything else by what a log, an alert
    or a page shows of it. BadUsage if nothing has that name.
    """
    from diag.artefacts.reference import (
        advice_or_flag,
        declared,
        lint_rule_page,
        preflight_page,
        signal_page,
        wrong_advice,
    )
    from diag.artefacts.runbook import judgement, runbook
    from diag.commands.observe import site
    from diag.knowledge.formulas import rule_set
    from diag.lint.rules import RULES
    from diag.preflight.checks import CHECKS

    if len(name) > MOST_CHARACTERS:
        raise BadUsage(
            f"the text has {len(name):,} characters; of at most {MOST_CHARACTERS:,}, those of a line, one is explained,"
            " and diag doctor LOG reads a whole log"
        )
    contract, incidents = site(folder, None)
    by_id = {incident.id: incident for incident in incidents}
    if name in by_id:
        incident, rules = by_id[name], rule_set(incidents, contract)
        page = runbook(incident, incidents, contract, rules)
        return f"{page}\n## Thresholds and PromQL\n\n{judgement(incident, incidents, contract, rules)}"
    if name in RULES:
        return lint_rule_page(RULES[name])
    if name in CHECKS:
        return preflight_page(CHECKS[name])
    signals = declared(incidents)
    found = next((id for id, signal in signals.items() if name in (id, signal.name)), "")
    if not found and (page := advice_or_flag(name)):
        return page
    found = found or next((id for id in signals if f":{id}:" in f"{name}:"), "")
    if found:
        return signal_page(signals[found], incidents, contract)
    if page := _found_by_text(
        name, incidents, contract, {name: each for name, each in signals.items() if isinstance(each, Signal)}
    ):
        return page
    close = [*near(name, list(by_id)), *near(name, [*RULES, *CHECKS, *signals, *wrong_advice()])][:_FEW]
    suggestion = f" (did you mean {', '.join(close)}?)" if close else ""
    raise BadUsage(
        f"there is no incident, signal, lint rule, check or vLLM flag '{printable(name, 40)}'{suggestion}; diag"
        " incidents lists the incidents, docs/lint-rules.md the rules, docs/preflight.md the checks"
    )


def _found_by_text(text: str, incidents: Sequence[Incident], contract: Contract, signals: Mapping[str, Signal]) -> str:
    """Return the page for a pasted text: an alert, an exception, an environment variable, a metric; "" for none."""
    from diag.artefacts.names import alert_name
    from diag.artefacts.runbook import runbook
    from diag.knowledge.formulas import expanded, rule_set
    from diag.knowledge.known_failures import PLACE, known_failure, table
    from diag.log.patterns import recognise

    bare = text.strip().strip("`'\"")
    for incident in incidents:
        if bare in (alert_name(incident.id), incident.title):
            return runbook(incident, incidents, contract, rule_set(incidents, contract))
    failure = known_failure([bare], "", "")
    if failure is not None and failure.basis != "by its place":
        sure = f"How sure: {failure.basis}. Source: {failure.source}\n"
        return f"# {failure.id}\n\n{failure.means}\n\n**Do:** {failure.do}\n\n{sure}"
    if METRIC.fullmatch(bare) and (page := _metric_page(bare, incidents, contract, signals)):
        return page
    event = recognise(bare, "ERROR")
    matching = [
        incident
        for incident in incidents
        if event is not None
        and any(re.search(rf'"{event.name}\b', expanded(row.signal.promql)) for row in incident.symptoms)
    ]
    if len(matching) == 1:
        return runbook(matching[0], incidents, contract, rule_set(incidents, contract))
    word = re.compile(rf"(?<![\w-]){re.escape(bare)}(?![\w-])")
    kinds = [row for row in table() if len(bare) >= SHORTEST and word.search(f"{row.means} {row.do} {row.example}")]
    if not kinds:
        return ""
    kinds.sort(key=lambda row: row.has_context)  # first what the text alone tells
    lines = [f"- **{row.id}**: {PLACE.sub('...', f'{row.means}{DO}{row.do}')}" for row in kinds[:MOST_KINDS]]
    more = f"\n\nand {len(kinds) - MOST_KINDS} more (docs/failures.md)" if len(kinds) > MOST_KINDS else ""
    return f"# {bare}\n\nNamed in {plural(len(kinds), 'kind')} of failure:\n\n" + "\n".join(lines) + more + "\n"


def _metric_page(name: str, incidents: Sequence[Incident], contract: Contract, signals: Mapping[str, Signal]) -> str:
    """Return the page of a metric, with or without its prefix: its readers and releases; "" if unknown."""
    from diag.artefacts.reference import signal_page
    from diag.knowledge.formulas import expanded
    from diag.vllm.metric_names import SUFFIX, why_unread
    from diag.vllm.metric_names import known as metrics

    full = name if ":" in name or SUFFIX.sub("", metric(name)) not in metrics() else metric(name)
    series = re.compile(rf"\b{re.escape(full)}{SERIES}\b")
    readers = {name: signal for name, signal in signals.items() if series.search(expanded(signal.promql))}
    users = [
        incident.id
        for incident in incidents
        if any(series.search(expanded(condition.signal.promql)) for condition in incident.every_condition)
    ]
    if len(readers) == 1 and not users:
        return signal_page(next(iter(readers.values())), incidents, contract)
    lines = [f"- incident {name}" for name in sorted(users)] + [f"- signal {name}" for name in sorted(readers)]
    releases = metrics().get(SUFFIX.sub("", full))
    of = f"A metric of vLLM {releases[0]} to {releases[1]}. " if releases else ""
    if not lines:
        return f"# {full}\n\n{of}No incident of diag reads it. {why_unread(full)}".rstrip() + "\n" if releases else ""
    return f"# {full}\n\n{of}Read by:\n\n" + "\n".join(lines) + "\n"


def near(name: str, ids: Sequence[str]) -> list[str]:
    """Return similar ids, the likeliest first: "kv" begins a word of some, "sats" nearly does."""

    def likeness(word: str, part: str) -> float:
        return max(SequenceMatcher(None, word, text).ratio() for text in (part, part[: len(word)]))

    words = dict.fromkeys(word for word in re.split(r"[\W_]+", name.lower()[:_LONGEST]) if word)
    scores = dict.fromkeys(ids if words else (), 0.0)
    for word in words:  # most ids are unlike the first one, and not compared with the others
        likely = {id: max(likeness(word, part) for part in id.split("_")) for id in scores}
        scores = {id: scores[id] + score for id, score in likely.items() if score >= _LIKELY}
    return sorted(scores, key=lambda id: -scores[id])[:_FEW]


def check_declarations(folder: Path | None = None) -> tuple[Incident, ...]:
    """Check every declaration and read every table, as no other start of diag does; return all incidents."""
    from diag.artefacts import alerts, recording_rules, reference
    from diag.core.metric_families import families
    from diag.diagnosis.roll_call import waits
    from diag.knowledge import known_failures, other_engines, platforms
    from diag.lint.rule import LintRule
    from diag.lint.rules import RULES
    from diag.log import patterns
    from diag.preflight.check import PreflightCheck
    from diag.preflight.checks import CHECKS
    from diag.report.coverage import sentences
    from diag.vllm.flags.registry import changes
    from diag.vllm.gpus import bare_gpus, gpus
    from diag.vllm.memory import architectures, profiling, quantization
    from diag.vllm.memory.config import aliases

    incidents = load(folder, check_all=True)
    tables = (known_failures.table, other_engines.programs, platforms.rocm_phrases, gpus, bare_gpus, waits, families)
    of_models = (architectures.families, architectures.encoders, quantization.tables, profiling.estimates, aliases)
    of_artefacts = (alerts.telemetry_alerts, recording_rules.declared, reference.texts, reference.wrong_advice)
    for read_table in (*tables, *of_models, changes, sentences, *of_artefacts):
        read_table()
    read(patterns.FILE, patterns.Checked)
    for kind, declared in ((Part | Signal, DECLARED), (LintRule, RULES), (PreflightCheck, CHECKS)):
        for name, declaration in declared.items():
            try:
                typed(declaration, kind)
            except Mistake as mistake:
                raise BadDeclaration(f"the {type(declaration).__name__} '{name}': {mistake}") from mistake
    return incidents


def list_incidents(folder: Path | None) -> str:
    """Return a line for each incident: id, severity, title."""
    incidents = check_declarations(folder)
    width = max(len(incident.id) for incident in incidents)
    return "".join(f"{incident.id:<{width}}  {incident.severity:<8}  {incident.title}\n" for incident in incidents)


def generate(
    root: Path,
    check: bool,
    folder: Path | None,
    contract_file: Path | None,
    only: Sequence[str] = (),
    per_incident: bool = False,
    settings: Sequence[str] = (),
) -> tuple[str, int]:
    """Write alerts, dashboards, runbooks and reference pages, or only compare them; return text and exit status."""
    from diag.artefacts.generate import differences, files, write
    from diag.commands.observe import site

    check_declarations(folder)
    contract, incidents = site(folder, contract_file, settings)
    texts = files(incidents, contract, only, per_incident)
    if not check:
        changed = write(root, texts)
        return "\n".join([*changed, f"{root}: {len(texts)} files, {len(changed)} of them changed"]), 0
    outdated = [f"{name}: {difference}" for name, difference in differences(root, texts)]
    if outdated:
        return "\n".join(
            [*outdated, f"{root}: {len(outdated)} of {len(texts)} files are out of date; run diag generate"]
        ), 1
    return f"{root}: all {len(texts)} files are up to date", 0
