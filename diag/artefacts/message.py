"""The text of an alert: what, where, how bad, the likely cause, the evidence, what to do now, and the links.

A message is written twice: with templates that Prometheus fills in when the alert fires (`PrometheusTemplates`), and
with the values of a diagnosis (`DiagnosisValues`), for a site without a Prometheus. Templates query only while an alert
is active, so they cost nothing at rest.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple
from urllib.parse import quote_plus

from diag.artefacts.names import alert_label, alert_value, dashboard_uid, sanitized, subject_labels, threshold
from diag.core.contract import ENTRIES, SLOS, Contract, Site
from diag.core.formatting import printable, quantity
from diag.core.incident import Condition, Incident, Signal, regroup
from diag.diagnosis.decision_table import Reading
from diag.knowledge.formulas import formula, model_series
from diag.promql import add_matchers

PLACE_LABELS = {"model": "model_name", "namespace": "namespace", "pod": "pod", "job": "job"}
"""Labels that an alert gets beside those of its subject, and the labels of the server's series that hold them."""
_HOUR = 3600
_UNNAMED = re.compile(r"//+|[^\w.:/[\] -]", re.ASCII)
_LONGEST, _MOST_NAMES = 100, 5
_PLACES = {"value", "engine", "gpu", "instance"}
"""Places in the text of a fix that an alert can fill in; those of a culprit come with its series."""


class Message(NamedTuple):
    """Everything that a message about one alert is made of.

    `first` is the condition whose value the alert has; `windows` are those of each case, `causes` the incidents that
    explain this one and whose alerts do not mute its own.
    """

    incident: Incident
    contract: Contract
    first: Condition
    conditions: tuple[Condition, ...]
    windows: tuple[tuple[Condition, tuple[str, ...]], ...]
    series: Mapping[str, str]
    causes: tuple[Incident, ...] = ()

    @property
    def window(self) -> str:
        return self.windows[0][1][0]


def annotations(message: Message, writer: "PrometheusTemplates | DiagnosisValues") -> dict[str, str]:
    """Return the annotations of an alert."""
    incident, contract = message.incident, message.contract
    site, first = contract.site, message.first
    labels = subject_labels(incident, site)
    where = " ".join((writer.place(), *(f"{label} {writer.label(label)}" for label in labels[len(site.labels) :])))
    is_number = first.signal.unit != "bool" and not incident.outage
    bad = first.signal.sentence.format(value=writer.reading(first)) if is_number else incident.impact
    bad = writer.culprits(first.signal, "", bad) if incident.burns else bad  # a latency says more than the rate
    limits = []
    for judged, windows in message.windows:
        limit = "" if judged.signal.unit == "bool" else f"{threshold(judged, contract)} "
        limits.append(f"{limit}over {' and '.join(windows)}" if windows else limit.strip())
    limit = ", or ".join(limits)
    named = "" if incident.burns else writer.culprits(first.signal, ", ", "")  # which Xid, process, line of the log
    evidence = [f"{first.signal.name}: {writer.reading(first)}" + (f" ({limit})" if limit else "") + named]
    look_alikes = {look_alike.requires for look_alike in incident.looks_like}
    ruled_out = []
    for condition in dict.fromkeys(message.conditions):
        name, limit = condition.signal.name, threshold(condition, contract)
        if condition in look_alikes and limit in ("= no", "<= 0", "< 1"):
            ruled_out.append(name)
        elif condition != first:
            limit = "" if condition.signal.unit == "bool" else f" ({limit})"
            evidence.append(f"{name}: {writer.reading(condition)}{limit}")
    if incident.burns and first.signal.culprit_unit == "seconds":  # a latency is late by its SLO
        evidence += [f"{ENTRIES[name]['meaning']}: {quantity(getattr(contract, name), 'seconds')}" for name in SLOS]
    evidence += [f"ruled out: {'; '.join(ruled_out)}"] if ruled_out else []
    chosen = "".join(f"&var-{label}={writer.in_url(label)}" for label in labels)
    span = f"&from={writer.unix(_HOUR, 1000)}&to={writer.unix(0, 1000)}"
    server = " ".join(f"--match '{label}=\"{writer.label(label)}\"'" for label in site.labels)
    return {
        "title": incident.title,
        "summary": f"{incident.title} on {where}: {bad}{writer.causes()}",
        "do_now": writer.do_now(),
        "description": "; ".join(evidence),
        "impact": incident.impact,
        "runbook_url": site.runbook_url(incident.id),
        "dashboard_url": f"{site.grafana_url}/d/{dashboard_uid('server')}?var-incident={incident.id}{chosen}{span}",
        "doctor": f"diag doctor --prometheus {site.prometheus_url} {server} --from {writer.unix(_HOUR, 1)}",
    }


# -- templates of Prometheus ------------------------------------------------------------------------------------------


class PrometheusTemplates(NamedTuple):
    """Writes templates that Prometheus fills in while the alert is active."""

    message: Message

    def label(self, name: str) -> str:
        return alert_label(name)

    def in_url(self, name: str) -> str:
        return f"{{{{ $labels.{name} | urlquery }}}}"

    def place(self) -> str:
        """Return the model and the server: its namespace and pod, if the site does not name its servers itself."""
        site = self.message.contract.site
        named = sanitized("(first .).Labels.place")
        server = "/".join(map(self.label, site.labels))
        return f"{{{{ with {_served(site)} }}}}{{{{ {named} }}}}{{{{ else }}}}{server}{{{{ end }}}}"

    def reading(self, condition: Condition) -> str:
        message, unit = self.message, condition.signal.unit
        if condition == message.first:
            return alert_value(unit)
        name = formula(condition.signal, message.incident.per, message.window, message.contract).name
        labels = subject_labels(message.incident, message.contract.site)
        matched = _query(f"{message.series[name]}{{{_matchers(labels)}}}", labels)
        value = alert_value(unit, "$v")
        return f"{{{{ with {matched} }}}}{{{{ $v := . | first | value }}}}{value}{{{{ else }}}}?{{{{ end }}}}"

    def culprits(self, signal: Signal, head: str, otherwise: str) -> str:
        """Return what the signal names, such as the latencies that are late, or the other text if it names nothing."""
        if not signal.culprit_promql:
            return otherwise
        found = self._of_subject(signal.culprit_promql, extra=True)
        text = _filled(signal.culprit_label, "$c", alert_value(signal.culprit_unit, "$c.Value"))
        each = f"{{{{ if lt $i {_MOST_NAMES} }}}}{{{{ if $i }}}}, {{{{ else }}}}{head}{{{{ end }}}}{text}{{{{ end }}}}"
        return f"{{{{ range $i, $c := {found} }}}}{each}{{{{ else }}}}{otherwise}{{{{ end }}}}"

    def causes(self) -> str:
        named = self._chosen_cause({cause.id: cause.title for cause in self.message.causes}, "; likely cause: ")
        return f"{named}{{{{ end }}}}" if named else ""

    def do_now(self) -> str:
        own = self._do_now(self.message.incident)
        actions = {cause.id: self._do_now(cause) for cause in self.message.causes}
        chosen = self._chosen_cause(actions, "")
        return f"{chosen}{{{{ else }}}}{own}{{{{ end }}}}" if chosen else own

    def unix(self, seconds_ago: int, scale: int) -> str:
        now = f"time() - {seconds_ago}" if seconds_ago else "time()"
        promql = f"({now}) * {scale}" if scale > 1 else now
        return f'{{{{ printf "%.0f" (query "vector({promql})" | first | value) }}}}'

    def _chosen_cause(self, texts: Mapping[str, str], head: str) -> str:
        """Return a template up to its `end` that writes the text of the first cause whose alert is active."""
        if not texts:
            return ""
        site = self.message.contract.site
        active = f'ALERTS{{alertstate="firing",incident=~"{"|".join(texts)}",{_matchers(site.labels)}}}'
        branches = "".join(
            f'{{{{ {"else if" if number else "if"} eq $cause "{name}" }}}}{text}'
            for number, (name, text) in enumerate(texts.items())
        )
        found = f'{_query(active, site.labels)} | sortByLabel "incident"'
        return f"{{{{ with {found} }}}}{{{{ $cause := (first .).Labels.incident }}}}{head}{branches}{{{{ end }}}}"

    def _do_now(self, incident: Incident) -> str:
        """Return the first action without a restart that applies and whose number is known, else the advice."""
        text = " ".join(incident.mitigate) or "Follow the runbook."
        labels = subject_labels(incident, self.message.contract.site)
        own = subject_labels(self.message.incident, self.message.contract.site)
        if not {*labels} <= {*own}:
            return text
        for fix in reversed([*takewhile(lambda fix: not fix.restart, incident.fixes)]):
            words = f"{fix.change} Run: {fix.command}" if fix.command else fix.change
            places = {*re.findall(r"\{(\w+)\}", words)}
            culprit = next((row.signal for row in fix.only_if if row.signal.culprit_promql), None)
            if isinstance(fix.value, Signal) and "value" in places <= _PLACES and not fix.flag:
                # rounded and bounded as the doctor does, if its conditions hold
                promql, extra = f"${fix.value.id}", culprit is not None
                rounding = {"nearest": "floor({} + 0.5)", "up": "ceil({})", "power_of_two_below": "2 ^ floor(log2({}))"}
                if fix.value.unit not in ("seconds", "watts", "share"):
                    promql = rounding.get(fix.rounding, "{}").format(promql)
                    promql = f"clamp_min({promql}, {fix.least:g})" if isinstance(fix.least, int | float) else promql
                if fix.current and fix.direction:
                    promql = f"{promql} {'<' if fix.direction == 'lower' else '>'} ${fix.current.id}"
                for condition in fix.only_if:
                    limit = self.message.contract.limit(condition.limit)
                    promql = f"({promql}) and (${condition.signal.id} {condition.op} {limit:g})"
            elif fix.command and places and culprit and places <= {*re.findall(r"\{(\w+)\}", culprit.culprit_label)}:
                promql, extra = culprit.culprit_promql, True
            else:
                continue
            value = self._of_subject(promql, incident=incident, extra=extra)
            unit = fix.value.unit if isinstance(fix.value, Signal) and not fix.command else ""
            row, filled = "{{ $f := first . }}{{ $v := $f.Value }}", _filled(words, "$f", alert_value(unit, "$v"))
            text = f"{{{{ with {value} }}}}{row}{filled}{{{{ else }}}}{text}{{{{ end }}}}"
        return text

    def _of_subject(self, promql: str, *, incident: Incident | None = None, extra: bool = False) -> str:
        """Return a template that queries an expression for the subject of the alert alone."""
        about, contract = incident or self.message.incident, self.message.contract
        labels = subject_labels(about, contract.site)
        servers = labels[: len(contract.site.labels)]
        text = formula(promql, about.per, self.message.window, contract).written_out(self.message.series)
        text = add_matchers(regroup(text, contract.site.labels), _matchers(servers))
        own = [label for label in labels[len(servers) :] if not extra or label in text]
        for label in own:
            text = f'({text}) and on ({label}) label_replace(vector(1), "{label}", {{{label}}}, "", "")'
        return _query(re.sub(r"\s+", " ", f"sort_desc({text})" if extra else text), labels)


def _matchers(labels: Sequence[str]) -> str:
    return ",".join(f"{label}={{{label}}}" for label in labels)


def _query(promql: str, labels: Sequence[str]) -> str:
    """Return the pipeline that fills the labels' values, `{instance}` for example, into PromQL and queries it."""
    used = [label for label in labels if f"{{{label}}}" in promql]
    text = promql.replace("%", "%%")
    for number, label in enumerate(used, 1):
        text = text.replace(f"{{{label}}}", f"%[{number}]q")
    values = " ".join(f"$labels.{label}" for label in used)
    return f"printf `{text}` {values} | query"


def _served(site: Site) -> str:
    """Return the pipeline with the series that names the model, namespace and pod of the alert's server."""
    series = f"{model_series(site.labels)}{{{_matchers(site.labels)}}}"
    return f'{_query(series, site.labels)} | sortByLabel "model_name"'


def _filled(text: str, row: str, value: str) -> str:
    """Write a text with `{value}` and labels of a series as templates."""

    def put(found: re.Match[str]) -> str:
        return value if found[1] == "value" else f"{{{{ {sanitized(f'{row}.Labels.{found[1]}')} }}}}"

    return re.sub(r"\{(\w+)\}", put, text)


def place_labels(site: Site) -> dict[str, str]:
    """Return the templates of the labels that an alert gets from the server's series: its model, namespace, pod, job.

    They stay the same while a server is down, so that its alert stays the same alert.
    """
    served = _served(site)
    return {
        name: f"{{{{ with {served} }}}}{{{{ (first .).Labels.{label} }}}}{{{{ end }}}}"
        for name, label in PLACE_LABELS.items()
        if name not in site.labels
    }


# -- values of a diagnosis, for a site without a Prometheus -----------------------------------------------------------


class DiagnosisValues(NamedTuple):
    """Writes the values of a diagnosis into a message."""

    labels: Mapping[str, str]
    readings: Sequence[Reading]
    site: Site
    model: str
    actions: str
    now: float

    def label(self, name: str) -> str:
        return shown(self.labels.get(name, ""))

    def in_url(self, name: str) -> str:
        return quote_plus(self.labels.get(name, ""))

    def place(self) -> str:
        server = "/".join(map(self.label, self.site.labels))
        return f"{shown(self.model)} at {server}" if self.model else server

    def reading(self, condition: Condition) -> str:
        return next((reading.shown for reading in self.readings if reading.condition == condition), "?")

    def culprits(self, signal: Signal, head: str, otherwise: str) -> str:
        named = [name for each in self.readings if each.condition.signal == signal for name in each.culprits]
        return head + ", ".join(map(printable, named[:_MOST_NAMES])) if named else otherwise

    def causes(self) -> str:
        return ""

    def do_now(self) -> str:
        return self.actions

    def unix(self, seconds_ago: int, scale: int) -> str:
        return f"{(self.now - seconds_ago) * scale:.0f}"


def shown(label: str) -> str:
    """Write a label's value as Prometheus writes the template of `alert_label`."""
    return _UNNAMED.sub("?", label)[:_LONGEST]
