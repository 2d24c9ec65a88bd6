"""Cause and consequence fire in a real Alertmanager with the generated rules: one message, as the runbooks say."""

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import alertmanager
from support.alertmanager import snippet
from support.paths import ROOT
from support.waiting import until

from diag.artefacts.generate import files
from diag.artefacts.inhibitions import severities
from diag.core.contract import Contract
from diag.core.incident import Incident, Severity
from diag.knowledge.catalog import load

KNOWN = {incident.id: incident for incident in load()}
Pair = tuple[Incident, Severity, Incident, Severity]


def pairs() -> Iterator[Pair]:
    """Yield every alert of a cause with every alert of a consequence; an info reaches no person."""
    for cause in KNOWN.values():
        for effect in (KNOWN[name] for name in cause.explains):
            for severity in severities(cause):
                yield from ((cause, severity, effect, other) for other in severities(effect) if severity != "info")


def muted_by_runbook(pair: Pair) -> bool:
    """Return True if the runbook of the cause says that its alert mutes that of the consequence."""
    cause, severity, effect, other = pair
    text = (ROOT / "runbooks" / f"{cause.id}.md").read_text(encoding="utf-8")
    alert = f"its {severity} alert" if cause.escalates else "this alert"
    _, _, sentence = text.partition(f"While {alert} fires, Alertmanager mutes ")
    sentence = re.split(r"\.(?:\s|$)", sentence, maxsplit=1)[0]
    everything, _, named = sentence.rpartition(" about [") if " about [" in sentence else (sentence, "", "")
    kind = {"critical": "pages", "warning": "tickets", "info": "tickets|infos"}[other]
    is_named = f"[{effect.id}]" in f"[{named}" and re.search(kind, everything.rpartition(" ")[2])
    return bool(is_named) or ("warnings and infos" in sentence and other != "critical")


def posted(number: int, incident: Incident, severity: Severity) -> dict[str, Any]:
    subject = {"instance": f"h{number}:1", "engine": "0", "gpu": "0"}
    labels = {label: subject[label] for label in incident.per}
    return {"labels": {"alertname": incident.id, "incident": incident.id, "severity": severity, **labels}}


@pytest.mark.prometheus
def test_cause_and_consequence_are_one_message_as_the_runbook_of_the_cause_says(tmp_path: Path) -> None:
    generated = files(load(), Contract())
    every = list(pairs())
    alerts = [posted(n, *half) for n, (a, b, c, d) in enumerate(every) for half in ((a, b), (c, d))]
    with alertmanager.running(tmp_path, generated, snippet(generated, "alertmanager.yml")) as address:
        url = f"http://{address}/api/v2/alerts"
        body = json.dumps(alerts).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})

        def is_taken() -> bool:
            with suppress(OSError), urllib.request.urlopen(request, timeout=10):  # it starts
                return True
            return False

        def heard() -> set[tuple[str, str]]:
            with urllib.request.urlopen(f"{url}?inhibited=false", timeout=10) as response:
                return {(each["labels"]["instance"], each["labels"]["incident"]) for each in json.load(response)}

        until(is_taken)
        until(lambda: len(heard()) <= len(every) and heard())
        left = heard()
    wrong = []
    for number, (cause, severity, effect, other) in enumerate(every):
        own = {incident for instance, incident in left if instance == f"h{number}:1"}
        expected = {cause.id} if muted_by_runbook((cause, severity, effect, other)) else {effect.id}
        if own != expected:
            wrong.append((cause.id, severity, effect.id, other, own))
    assert wrong == []
