"""What of a command's JSON an agent gets: by default what it acts on, with detail all that is known of it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diag.diagnosis.report import Finding, Report
from diag.report import json, verify
from diag.report import sentences as words
from diag.report.summary import verdicts
from diag.verify.compare import Verification

Document = dict[str, Any]
_HEAD = ("incident", "state", "severity", "subject", "primary", "explained_by", "since", "until", "ongoing")
_OBSERVED = ("source", "target", "start", "end", "scrapes", "failed_scrapes")
_FIX = ("kind", "change", "trade_off", "restart", "rollback", "check_first")
_READING = ("signal", "value", "comparison", "threshold", "unit")
_TO_ACT = ("Meaning", "Impact", "Immediate mitigation", "Fix (remediation), trade-off, rollback", "Do NOT")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_MOST_NORMAL = 3


# -- doctor -----------------------------------------------------------------------------------------------------------


def report(found: Report, detail: bool) -> Document:
    """A diagnosis: every incident that is present; the others are named with detail."""
    whole = json.document(found._replace(findings=found.present))  # the readings of the others are never looked at
    present = zip(whole["diagnoses"], found.present, strict=True)
    page = {
        "verdict": found.verdict,
        "headlines": verdicts(found),
        "shared": words.shared(found),
        "observed": _observed(whole["observed"]),
        "servers": list(found.observed.servers),
        "diagnoses": [_diagnosis(known, finding, detail) for known, finding in present],
        "checked": f"{words.states(found)}; {words.found_nothing(found)}",
        "unknown": [each.sentence for each in found.not_judged],
        "not_collected": words.not_collected(found),
        "normal": words.normality(found)[:_MOST_NORMAL],
        "notes": list(found.observed.notes),
    }
    more = {
        "progress": whole["progress"],
        "ceilings": whole["ceilings"],
        "normal": whole["normal"]["readings"] and words.normality(found),
        "absent": list(found.absent),
        "needs_telemetry": sorted(found.needs_telemetry),
        "thresholds": whole["thresholds"],
    }
    return _filled(page | (more if detail else {}), "verdict", "headlines", "observed", "diagnoses")


def _diagnosis(known: Mapping[str, Any], finding: Finding, detail: bool) -> Document:
    """One incident; of those that another one explains, the head alone."""
    incident = finding.diagnosis.incident
    named = {"title": incident.title, "impact": incident.impact}
    if detail:
        return {**known, **named}
    head = _only(known, _HEAD)
    if not known["primary"]:
        return head
    evidence = {
        "symptoms": [_only(reading, _READING) | _culprits(reading) for reading in known["symptoms"]],
        "ruled_out": [refuted["look_alike"] for refuted in known["ruled_out"]],
        "not_ruled_out": [look_alike["look_alike"] for look_alike in known["not_ruled_out"]],
        "quotes": [_only(quote, ("text", "process", "cause")) for quote in known["quotes"]],
        "fixes": [
            _filled({"diff": words.change(proposal)} | _only(fix, _FIX), "change", "restart")
            for fix, proposal in zip(known["fixes"], finding.proposals, strict=True)
        ],
        "relaunch": known["relaunch"],
    }
    return head | _filled(named | evidence)


def _culprits(reading: Mapping[str, Any]) -> Document:
    return {"culprits": reading["culprits"]} if reading["culprits"] else {}


# -- the others -------------------------------------------------------------------------------------------------------


def runbook(markdown: str, section: str, detail: bool) -> Document:
    """The sections of a page: those that one acts on, the one that was asked for, or all."""
    head, *parts = _SECTION.split(markdown)
    sections = {title: text.strip() for title, text in zip(parts[::2], parts[1::2], strict=True)}
    wanted = [title for title in sections if section and section.lower() in title.lower()]
    if not section and not detail:
        wanted = [title for title in sections if title in _TO_ACT]
    shown = wanted or list(sections)
    return _filled(
        {
            "title": head.strip().partition("\n")[0].lstrip("# "),
            "sections": [{"title": title, "text": sections[title]} for title in shown]
            or [{"title": "", "text": head.strip()}],
            "other_sections": [title for title in sections if title not in shown],
        }
    )


def findings(whole: Document, detail: bool) -> Document:
    """What is wrong with a command; why it is wrong, with detail."""
    if detail:
        return whole
    found = [_only(finding, ("rule", "severity", "message", "fix")) for finding in whole["findings"]]
    page = _only(whole, ("vllm_version", "vllm_version_source", "model", "errors_left", "parser_error", "not_checked"))
    page |= {"findings": found, "corrected_command": whole["corrected_command"]}
    return _filled(page, "vllm_version", "findings", "corrected_command", "errors_left")


def memory(whole: Document, detail: bool) -> Document:
    """An estimate of memory, or a comparison of GPUs: of each kind the smallest that fits."""
    if detail:
        return whole
    if "configurations" in whole:
        first: dict[str, Document] = {}
        for configuration in whole["configurations"]:
            if configuration["verdict"] == "fits":
                first.setdefault(configuration["gpu"], configuration)
        names = ("gpu", "tensor_parallel_size", "requests", "batch")
        rows = [_only(row, names) | {"output_tokens_per_second": _rate(row)} for row in first.values()]
        page = _only(whole, ("model", "vllm", "context", "concurrency", "choices"))
        return _filled(page | {"configurations": rows}, "model")
    page = _only(whole, ("model", "gpu", "vllm", "verdict", "reasons", "notes", "max_model_len", "max_num_seqs"))
    rows = [_only(row, ("name", "bytes", "basis")) for row in whole["rows"]]
    return _filled(page | {"rows": rows, "suggestions": whole["suggestions"]}, "model", "verdict")


def _rate(configuration: Mapping[str, Any]) -> float | None:
    ceiling: Mapping[str, float] = configuration["decode"] or {}
    return ceiling.get("tokens_per_second")


def configuration(whole: Document, detail: bool) -> Document:
    """What servers run with: the settings that somebody chose; with detail the defaults too."""
    servers = [_one_server(server, detail) for server in whole["servers"]]
    return _filled({"servers": servers, "notes": whole["notes"]}, "servers")


def _one_server(server: Mapping[str, Any], detail: bool) -> Document:
    chosen = [row for row in server["settings"] if row["value"] is not None and not row["is_default"]]
    settings = server["settings"] if detail else [_only(row, ("name", "value", "source")) for row in chosen]
    environment = [{"name": name, "value": value} for name, value in server["environment"].items()]
    shown = {**server, "settings": settings, "environment": environment}
    return _filled(shown, "instance", "version", "model", "settings")


def comparison(found: Verification, detail: bool) -> Document:
    """What became of the incidents after a change; with detail also the loads and every signal."""
    whole = verify.document(found)
    servers = whole["servers"] if detail else [_compared(server) for server in whole["servers"]]
    sides = {side: {"verdict": whole[side]["verdict"]} | _observed(whole[side]) for side in ("before", "after")}
    page = _only(whole, ("verdict", "headlines", "unmatched")) | sides | {"servers": servers}
    return _filled(page, "verdict", "headlines", "servers")


def _compared(server: Mapping[str, Any]) -> Document:
    names = ("incident", "severity", "subject", "primary", "verdict", "because", "fixes")
    outcomes = [_filled(_only(outcome, names), "primary") for outcome in server["incidents"]]
    kept = _only(server, ("before", "after", "comparable", "reasons", "changes", "new_incidents", "user_metrics"))
    return _filled(kept | {"incidents": outcomes}, "comparable", "incidents")


def _observed(seen: Mapping[str, Any]) -> Document:
    """Which samples were judged; a recording is called by its name, not by its place on this host."""
    target = Path(seen["target"]).name if seen["source"] == "recording" else seen["target"]
    return _only(seen, _OBSERVED) | {"target": target}


def _only(document: Mapping[str, Any], names: Iterable[str]) -> Document:
    return {name: document[name] for name in names}


def _filled(document: Mapping[str, Any], *always: str) -> Document:
    """Without what is empty, except for what is always there."""
    empty: Sequence[object] = (None, "", [], {})
    return {name: value for name, value in document.items() if name in always or value not in empty}
