"""Answers to an agent: the part of a command's JSON that it acts on, foreign text as quotations, at a bounded length.

With detail, an answer has everything. Default deny: any text that is not one of diag's own declarations counts as
written by others, a single word too, for one word is enough for an instruction.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diag.core.formatting import escaped
from diag.diagnosis.report import Report
from diag.report import coverage, verify
from diag.report import json as report_json
from diag.report import sentences as words
from diag.report.answer import verdicts
from diag.report.spans import label
from diag.verify.compare import Verification

Document = dict[str, Any]
_HEAD = ("incident", "state", "severity", "subject", "primary", "explained_by", "since", "until", "ongoing")
_OBSERVED = ("source", "target", "start", "end", "scrapes", "failed_scrapes")
_ANSWER = ("incident", "where", "since", "when", "is_over", "do_now", "fix", "do_not")
_FIX = ("kind", "change", "trade_off", "restart", "rollback", "check_first")
_READING = ("signal", "value", "comparison", "threshold", "unit")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_MOST_NORMAL = 3
COMPACT, DETAILED = 2_000, 20_000
"""Tokens of an answer at most: without and with detail."""
CHARACTERS = 3
"""Characters per token. JSON has 3.5 and more with the usual tokenizers, so this overestimates tokens."""
OPEN, CLOSE = "⟦", "⟧"
MOST_ESCAPED = 4_000
WHOLE = ("relaunch", "corrected_command")
"""Texts that are left out rather than cut: half a command is a different command."""
_STEPS = ((50, 4000), (40, 2000), (30, 1200), (20, 800), (12, 500), (8, 300), (5, 200), (3, 140), (2, 100), (1, 60))
"""Entries of a list and characters of a text; the first pair with which an answer fits is used."""
_NOT_IN_NAMES = re.compile(r"[^\w .:/@+=,%()\[\]-]", re.ASCII)
LONGEST_NAME = 128
LONGEST_COMMAND = 65_536
"""Characters of a launch command."""
ADDED = ("headlines", "checked", "not_collected", "needs_telemetry", "impact", "diff", "1/s")
"""Fields and units in answers that no schema of a command's JSON declares."""


# -- doctor -----------------------------------------------------------------------------------------------------------


def report(judged: Report, detail: bool) -> Document:
    """Return a diagnosis: every incident that is present; with detail, the names of the absent ones."""
    whole = report_json.DOCTOR.of(judged._replace(findings=judged.present))  # no other readings are shown
    diagnoses = []
    for diagnosis, finding in zip(whole["diagnoses"], judged.present, strict=True):
        incident = finding.diagnosis.incident
        named, head = {"title": incident.title, "impact": incident.impact}, _pick(diagnosis, _HEAD)
        if detail:
            diagnoses.append({**diagnosis, **named})
        elif not diagnosis["primary"]:  # another one explains it
            diagnoses.append(head)
        else:
            evidence = {
                "symptoms": [
                    _pick(reading, (*_READING, "culprits") if reading["culprits"] else _READING)
                    for reading in diagnosis["symptoms"]
                ],
                "ruled_out": [refuted["look_alike"] for refuted in diagnosis["ruled_out"]],
                "not_ruled_out": [look_alike["look_alike"] for look_alike in diagnosis["not_ruled_out"]],
                "quotes": [_pick(quote, ("text", "process", "cause")) for quote in diagnosis["quotes"]],
                "fixes": [
                    _without_empty({"diff": words.change(proposal)} | _pick(fix, _FIX), "change", "restart")
                    for fix, proposal in zip(diagnosis["fixes"], finding.proposals, strict=True)
                ],
                "relaunch": diagnosis["relaunch"],
            }
            diagnoses.append(head | _without_empty(named | evidence))
    page = {
        "verdict": judged.verdict,
        "headlines": verdicts(judged),
        "answers": [_pick(answer, _ANSWER) for answer in whole["answers"] if answer["incident"]],
        "shared": words.shared(judged),
        "observed": _observed(whole["observed"]),
        "servers": coverage.servers(judged),
        "diagnoses": diagnoses,
        "checked": f"{words.states(judged)}; {words.found_nothing(judged)}",
        "unknown": [reason.sentence for reason in judged.not_judged],
        "not_shown": coverage.not_seen(judged),
        "not_collected": coverage.not_collected(judged),
        "normal": coverage.normality(judged)[:_MOST_NORMAL],
        "notes": coverage.notes(judged),
    }
    more = {
        "progress": whole["progress"],
        "ceilings": whole["ceilings"],
        "normal": whole["normal"]["readings"] and coverage.normality(judged),
        "absent": list(judged.absent),
        "needs_telemetry": sorted(judged.needs_telemetry),
        "thresholds": whole["thresholds"],
    }
    return _without_empty(page | (more if detail else {}), "verdict", "headlines", "observed", "diagnoses")


# -- the others -------------------------------------------------------------------------------------------------------


def runbook(markdown: str, section: str, detail: bool) -> Document:
    """Return sections of a page: the ones to act on, a requested one, or all."""
    head, *parts = _SECTION.split(markdown)
    sections = {title: text.strip() for title, text in zip(parts[::2], parts[1::2], strict=True)}
    wanted = [title for title in sections if section and section.lower() in title.lower()]
    if not section and not detail:
        to_act = ("Impact", "Meaning", *map(label, ("do_now", "fix", "do_not")))
        wanted = [title for title in sections if title in to_act]
    chosen = wanted or list(sections)
    return _without_empty(
        {
            "title": head.strip().partition("\n")[0].lstrip("# "),
            "sections": [{"title": title, "text": sections[title]} for title in chosen]
            or [{"title": "", "text": head.strip()}],
            "other_sections": [title for title in sections if title not in chosen],
        }
    )


def findings(whole: Document, detail: bool) -> Document:
    """Return the findings about each server of a text; with detail, the reasons too."""
    if detail:
        return whole
    pages = []
    names = ("name", "line", "vllm_version", "vllm_version_source", "model", "errors_left", "parser_error")
    for launch in whole["launches"]:
        short = [_pick(finding, ("rule", "severity", "message", "fix")) for finding in launch["findings"]]
        page = _pick(launch, (*names, "not_checked"))
        page |= {"findings": short, "corrected_command": launch["corrected_command"]}
        pages.append(_without_empty(page, "vllm_version", "findings", "corrected_command", "errors_left"))
    return {"launches": pages}


def memory(whole: Document, detail: bool) -> Document:
    """Return an estimate of memory, or a comparison of GPUs: for each kind the smallest number that fits."""
    if detail:
        return whole
    if "configurations" in whole:
        rows: dict[str, Document] = {}
        for row in whole["configurations"]:
            if row["verdict"] == "fits" and row["gpu"] not in rows:
                rate = (row["decode"] or {}).get("tokens_per_second")
                rows[row["gpu"]] = _pick(row, ("gpu", "tensor_parallel_size", "requests", "batch"))
                rows[row["gpu"]]["output_tokens_per_second"] = rate
        page = _pick(whole, ("model", "vllm", "context", "concurrency", "choices"))
        return _without_empty(page | {"configurations": list(rows.values())}, "model")
    page = _pick(whole, ("model", "gpu", "vllm", "verdict", "reasons", "notes", "max_model_len", "max_num_seqs"))
    page["rows"] = [_pick(row, ("name", "bytes", "basis")) for row in whole["rows"]]
    return _without_empty(page | _pick(whole, ("suggestions",)), "model", "verdict")


def configuration(whole: Document, detail: bool) -> Document:
    """Return the settings that servers run with, except defaults; with detail the defaults too."""
    servers = []
    for server in whole["servers"]:
        chosen = [row for row in server["settings"] if row["value"] is not None and not row["is_default"]]
        settings = server["settings"] if detail else [_pick(row, ("name", "value", "source")) for row in chosen]
        environment = [{"name": name, "value": value} for name, value in server["environment"].items()]
        shown = {**server, "settings": settings, "environment": environment}
        servers.append(_without_empty(shown, "instance", "version", "model", "settings"))
    return _without_empty({"servers": servers, "notes": whole["notes"]}, "servers")


def comparison(found: Verification, detail: bool) -> Document:
    """Return the incidents after a change beside those before; with detail also the loads and every signal."""
    whole = verify.DOCUMENT.of(found)
    servers = whole["servers"]
    if not detail:
        names = ("before", "after", "comparable", "reasons", "changes", "new_incidents", "user_metrics")
        parts = ("incident", "severity", "subject", "primary", "verdict", "because", "fixes")
        servers = []
        for server in whole["servers"]:
            incidents = [_without_empty(_pick(one, parts), "primary") for one in server["incidents"]]
            servers.append(_without_empty(_pick(server, names) | {"incidents": incidents}, "comparable", "incidents"))
    sides = {side: {"verdict": whole[side]["verdict"]} | _observed(whole[side]) for side in ("before", "after")}
    page = _pick(whole, ("verdict", "headlines", "unmatched")) | sides | {"servers": servers}
    return _without_empty(page, "verdict", "headlines", "servers")


def _observed(observed: Mapping[str, Any]) -> Document:
    """Return which samples were judged; a recording has its name in it, not its path on this host."""
    target = Path(observed["target"]).name if observed["source"] == "recording" else observed["target"]
    return _pick(observed, _OBSERVED) | {"target": target}


def _pick(document: Mapping[str, Any], names: Iterable[str]) -> Document:
    return {name: document[name] for name in names}


def _without_empty(document: Mapping[str, Any], *always: str) -> Document:
    """Leave out empty values, except of the names that are `always` there."""
    empty: Sequence[object] = (None, "", [], {})
    return {name: value for name, value in document.items() if name in always or value not in empty}


# -- quoting and shortening --------------------------------------------------------------------------------------------


def declared_texts(declared: object) -> Iterator[str]:
    """Yield every text in declarations of diag or of the site's incident files, however deep."""
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, Mapping):
        yield from declared_texts([*declared.keys(), *declared.values()])
    elif isinstance(declared, Sequence):
        for part in declared:
            yield from declared_texts(part)


def quote_foreign(document: Any, own: frozenset[str], hidden: Sequence[str] = ()) -> Any:
    """Return the document with foreign texts as quotations and numbers of four digits, None if JSON cannot hold them.

    The names of folders of this host in `hidden` are left out. Times keep all their digits.
    """

    def show(text: str) -> str:
        return text if text in own else quote(text)

    def shown(value: Any, text: Callable[[str], str]) -> Any:
        if isinstance(value, str):
            return text(without(value, hidden)) if value else value
        if isinstance(value, Mapping):
            return {show(key): shown(part, _FOREIGN.get(key, text)) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [shown(part, text) for part in value]
        if not isinstance(value, float):
            return value
        if not math.isfinite(value):
            return None
        return round(value, 3) if abs(value) >= 1000 else float(f"{value:.4g}")

    return shown(document, show)


def without(text: str, folders: Sequence[str]) -> str:
    """Return a text with paths below these folders of this host as they are called in there."""
    for folder in folders:
        text = re.sub(rf"{re.escape(folder)}(?![\w.-])/?", "", text)
    return text


def quote(text: str) -> str:
    """Return a foreign text between marks that it cannot close, with control and invisible characters as escapes."""
    inside = escaped(text, MOST_ESCAPED)
    for mark in (OPEN, CLOSE):
        inside = inside.replace(mark, mark.encode("unicode_escape").decode())
    return f"{OPEN}{inside}{CLOSE}"


def quote_name(name: str) -> str:
    """Return a name that others chose between marks: at most 128 characters, with a ? for any that is no name's.

    Letters and digits of ASCII, spaces and _.:/@+=,%()[]- are kept.
    """
    kept = _NOT_IN_NAMES.sub("?", name[:LONGEST_NAME])
    return f"{OPEN}{kept}{'…' * (len(name) > LONGEST_NAME)}{CLOSE}"


_FOREIGN: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys(("subject", "culprits", "instance", "model", "version", "target", "process"), quote_name),
    **dict.fromkeys(("text", "cause", "value"), quote),
}
"""Fields whose texts are never diag's own, even if they equal one of its declarations."""


def shorten(document: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Return the document in at most so many tokens; `left_out` names the lists and texts that are cut."""
    shortened: dict[str, Any] = {}
    for entries, characters in _STEPS:
        left: Counter[str] = Counter()
        shortened = {name: _cut(part, entries, characters, name, left) for name, part in document.items()}
        if left:
            shortened["left_out"] = [f"{place}: {count} more" for place, count in sorted(left.items())]
        if len(to_json(shortened)) <= tokens * CHARACTERS:
            return shortened
    return shortened


def to_json(document: Mapping[str, Any]) -> str:
    """Return the document as compact JSON."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _cut(value: Any, entries: int, characters: int, place: str, left: Counter[str]) -> Any:
    if isinstance(value, str) and len(value) > characters:
        left[f"{place} (characters)"] += len(value) - characters
        is_quoted = value.endswith(CLOSE)
        return None if place.rpartition(".")[2] in WHOLE else value[:characters] + "…" + CLOSE * is_quoted
    if isinstance(value, Mapping):
        return {name: _cut(part, entries, characters, f"{place}.{name}", left) for name, part in value.items()}
    if isinstance(value, list):
        if len(value) > entries:
            left[place] += len(value) - entries
        return [_cut(part, entries, characters, place, left) for part in value[:entries]]
    return value
