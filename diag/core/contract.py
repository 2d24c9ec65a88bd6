"""The decisions of a site: its SLOs, its own thresholds, and how it names its servers, as diag.toml states them.

A declaration names a threshold that a site may set; the number is here. A key that diag.toml lacks keeps its default,
and an invalid file is refused with the line of the mistake:

[contract]    ttft_seconds = 2.5    ...      SLOs: the entries of `Contract`
[limits.kv_eviction_cascade]                 thresholds, by the signal that `diag explain` names, or "escalates"
"preemptions / finished request" = 0.3
[site]        labels = ["cluster", "pod"]    the entries of `Site`
[lint]        ignore = ["no_model"]          ids of rules whose findings `diag lint` drops
[baseline]    file = "normal.json"           the file that `diag baseline save` wrote, beside diag.toml
[preflight]   gpu_memory_share = 0.5         what `diag preflight` compares a launch with: the entries of `Intentions`
[ignore.kv_pool_saturated]                   an incident that is accepted, with the reason and the last day
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadContract
from diag.core.files import exists, read_toml
from diag.core.formatting import in_python, listed, printable, quantity
from diag.core.incident import RANK, Condition, Incident, LookAlike, Severity, judged
from diag.core.metric_prefix import ANY, OWN

ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""The buckets of vLLM's histograms (0.8 - 0.33); since 0.32 a server may have others: `buckets`."""
STALL_BUCKETS = tuple(sorted({*ITL_BUCKETS} & {*LATENCY_BUCKETS}))

ESCALATES = "escalates"
"""The key of the threshold from which a warning is critical: its signal may support the incident at another one."""
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def _entry(default: float, meaning: str, unit: str, buckets: tuple[float, ...] = ()) -> Any:
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "buckets": buckets})


PAGE = "{page}"
PUBLISHED = f"https://diag.readthedocs.io/en/stable/generated/incidents/{PAGE}.html"
"""The runbooks of the published documentation."""
_SITE_LABELS = "site_labels"
"""The name of `Site.labels` in the chart and of the option --set."""


class Site(NamedTuple):
    """The names of servers in this site's Prometheus, and the URLs of its pages.

    labels: the labels that identify a server. gpu_join: the labels that dcgm-exporter's series share with the server's.
    prefix: the prefix of vLLM's metrics. The URLs are bases without a slash at the end; a Prometheus fills in its own
    URL if none is given. extra_labels: labels of every alert. rule_labels: labels of the PrometheusRule.
    disabled_incidents: those without an alert. severity_overrides: severities by incident, of its only alert then.
    """

    labels: tuple[str, ...] = ("instance",)
    gpu_join: tuple[str, ...] = ("namespace", "pod")
    runbook_base_url: str = PUBLISHED
    grafana_url: str = "http://localhost:3000"
    prometheus_url: str = "{{ $externalURL }}"
    prefix: str = OWN
    extra_labels: Mapping[str, str] = {}
    rule_labels: Mapping[str, str] = {}
    disabled_incidents: tuple[str, ...] = ()
    severity_overrides: Mapping[str, Severity] = {}

    def runbook_url(self, page: str) -> str:
        """Return the address of a runbook: its file under the base, or the base with the name in place of {page}."""
        base = self.runbook_base_url
        return base.replace(PAGE, page) if PAGE in base else f"{base}/{page}.md"


class Ignored(NamedTuple):
    """An incident that the site accepts: why, and until which day (UTC, inclusive)."""

    reason: str
    until: date


class Intentions(NamedTuple):
    """Intentions of this site for a launch; None or "" if they are not stated.

    gpu_memory_share: the share of each GPU that this server may take. concurrency: the requests at a time that are to
    come. ramp: the file that `diag ramp --json` wrote, beside diag.toml. ignore: the ids of checks and lint rules whose
    results `diag preflight` drops, each with the reason.
    """

    gpu_memory_share: float | None = None
    concurrency: float | None = None
    ramp: str = ""
    ignore: Mapping[str, str] = {}


@dataclass(frozen=True)
class Contract:
    """One entry for each placeholder that an expression may use; `origin` is the file, "" for the defaults.

    `ignored_rules` are the ids of lint rules that [lint] ignores, with the place that names them. `baseline` is the
    baseline file, "" for none. `ignored` are accepted incidents. `stated` are the entries that the file sets. The
    default SLOs are so wide that a server which violates them is of no use to any client.
    """

    freeze_seconds: float = _entry(1.0, "stream pause threshold", "seconds", STALL_BUCKETS)
    queue_seconds: float = _entry(1.0, "queue time threshold", "seconds")
    kv_pool_fill: float = _entry(0.9, "KV cache fill of a proposed --max-num-seqs", "share")
    ttft_seconds: float = _entry(40.0, "TTFT SLO", "seconds", TTFT_BUCKETS)
    itl_seconds: float = _entry(2.5, "ITL SLO", "seconds", ITL_BUCKETS)
    e2e_seconds: float = _entry(1920.0, "end-to-end latency SLO", "seconds", LATENCY_BUCKETS)
    objective: float = _entry(0.99, "SLO objective", "share")
    site: Site = field(default_factory=Site)
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    ignored_rules: Mapping[str, str] = field(default_factory=dict)
    baseline: str = ""
    preflight: Intentions = field(default_factory=Intentions)
    ignored: Mapping[str, Ignored] = field(default_factory=dict)
    origin: str = ""
    stated: frozenset[str] = frozenset()
    is_found: bool = False
    """True if it was found in the working folder, not named by the user."""

    def values(self) -> dict[str, float]:
        """Return every entry by its placeholder's name."""
        return {name: getattr(self, name) for name in ENTRIES}

    def limit(self, limit: float | str) -> float:
        """Return a condition's threshold as a number: the number itself, or the entry of that name."""
        return self.values()[limit] if isinstance(limit, str) else limit

    def lines(self) -> list[str]:
        """Return a line for each SLO and threshold: its value, and the file that set it."""
        return [
            f"{entry['meaning']}: {quantity(getattr(self, name), entry['unit'])}"
            f" ({self.origin if name in self.stated else 'default'})"
            for name, entry in ENTRIES.items()
        ]

    def found_note(self) -> str:
        """Return the changes by a file that nobody has named, "" for none: another user may have written it."""
        if not self.is_found:
            return ""
        sets = [f"{name} = {getattr(self, name):g}" for name in ENTRIES if name in self.stated]
        sets += [
            printable(f"{incident}: {signal} = {limit:g}")
            for incident, limits in self.limits.items()
            for signal, limit in limits.items()
        ]
        return f"{self.origin} of this folder changes the thresholds: {listed(sets)}" if sets else ""


ENTRIES = {entry.name: entry.metadata for entry in fields(Contract) if entry.metadata}
"""Meaning, unit and buckets of each key that [contract] may have."""
SLOS = ("ttft_seconds", "itl_seconds", "e2e_seconds")


# -- diag.toml


def find(explicit: Path | None) -> Contract:
    """Read the file named on the command line, else ./diag.toml if it exists, else return the defaults."""
    here = Path("diag.toml")
    if explicit is None and not exists(here):
        return Contract()
    return read(explicit) if explicit else replace(read(here), is_found=True)


def read(path: Path) -> Contract:
    """Read the SLOs, thresholds and names in a diag.toml; BadContract, with the line, if it is invalid."""
    try:
        text, tables = read_toml(path)
    except OSError as error:
        raise BadContract(f"{printable(str(path))} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadContract(f"{path} is not valid TOML: {error}") from error
    return _File(path, text, tables).contract()


class _File(NamedTuple):
    """A diag.toml: its tables, and its text, in which the line of a mistake is found."""

    path: Path
    text: str
    tables: Mapping[str, Any]

    def contract(self) -> Contract:
        names = ("contract", "limits", "site", "lint", "baseline", "preflight", "ignore")
        for name in self.tables:
            if name not in names:
                tables = ", ".join(f"[{table}]" for table in names)
                place = f"{self.path}{self._line('', name)}"
                raise BadContract(f"{place}: there is no table [{name}]; the tables are {tables}")

        stated = self._table("contract", (*ENTRIES, "buckets"))
        more = stated.pop("buckets", [])
        self._must(isinstance(more, list), "contract", "buckets", "a list of numbers", more)
        buckets = [self._number("contract", "buckets", bucket) for bucket in more]
        entries = {name: self._entry(name, value, buckets) for name, value in stated.items()}
        site = Site(**self.site_entries())
        limits = {
            incident: {
                signal: self._number(f"limits.{incident}", signal, value, above_zero=False)
                for signal, value in self._table(f"limits.{incident}").items()
            }
            for incident in self._table("limits")
        }
        rules = self._table("lint", ("ignore",)).get("ignore", [])
        is_list = isinstance(rules, list) and all(isinstance(rule, str) for rule in rules)
        self._must(is_list, "lint", "ignore", "a list of lint rules", rules)
        baseline = self._file("baseline", "file", self._table("baseline", ("file",)))
        intended = self._table("preflight", Intentions._fields)
        unchecked = self._table("preflight.ignore") if intended.get("ignore") else {}
        numbers = {
            name: self._number("preflight", name, value)
            for name, value in intended.items()
            if name not in ("ramp", "ignore")
        }
        if numbers.get("gpu_memory_share", 1) > 1:
            raise self.bad("preflight", "gpu_memory_share", "gpu_memory_share must be a fraction of 1, such as 0.5")
        ramp = self._file("preflight", "ramp", intended)
        for name, reason in unchecked.items():
            is_reason = isinstance(reason, str) and bool(reason.strip())
            self._must(is_reason, "preflight.ignore", name, "the reason as a text", reason)
        ignored = {}
        for incident in self._table("ignore"):
            table = f"ignore.{incident}"
            entry: Mapping[str, Any] = dict.fromkeys(Ignored._fields) | self._table(table, Ignored._fields)
            reason, until = entry["reason"], entry["until"]
            is_reason = isinstance(reason, str) and bool(reason.strip())
            self._must(is_reason, table, "reason", "a text that says why", reason)
            is_day = isinstance(until, date) and not isinstance(until, datetime)
            self._must(is_day, table, "until", "the last day, such as 2027-01-31", until)
            ignored[incident] = Ignored(" ".join(reason.split()), until)
        return Contract(
            **entries,
            site=site,
            limits=limits,
            ignored_rules=dict.fromkeys(rules, f"{self.path}{self._line('lint', 'ignore')}"),
            baseline=baseline,
            preflight=Intentions(**numbers, ramp=ramp, ignore=unchecked),
            ignored=ignored,
            origin=str(self.path),
            stated=frozenset(entries),
            is_found=False,
        )

    def bad(self, table: str, key: str, reason: str) -> BadContract:
        return BadContract(f"{self.path}{self._line(table, key)}: [{table}] {reason}")

    def _line(self, table: str, key: str) -> str:
        """Return the line of a key, ":3"; empty if the key is written in a way that only a parser finds."""
        current = ""
        assignment = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[([^]]*)\]", line)
            current = header[1].strip() if header else current
            if (current == table and assignment.match(line)) or (header and current == key):
                return f":{number}"
        return ""

    def _table(self, name: str, keys: Sequence[str] = ()) -> dict[str, Any]:
        """Return a table, empty if missing; BadContract for a key that is none of `keys`, if there are any."""
        above, key = name.split(".", 1) if "." in name else ("", name)  # a key may have dots of its own
        table = (self._table(above) if above else self.tables).get(key, {})
        if not isinstance(table, dict):
            raise BadContract(f"{self.path}{self._line(above, key)}: [{name}] must be a table")
        for entry in table if keys else ():
            if entry not in keys:
                raise self.bad(name, entry, f"has no key '{entry}'; its keys are {', '.join(keys)}")
        return dict(table)

    def _must(self, is_valid: bool, table: str, key: str, be: str, value: object) -> None:
        """Raise BadContract unless the value is valid: the key must `be` something else."""
        if not is_valid:
            raise self.bad(table, key, f"{key} must be {be}, not {in_python(value)}")

    def _number(self, table: str, key: str, value: Any, above_zero: bool = True) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid = is_number and abs(value) <= sys.float_info.max and (value > 0 or not above_zero)
        self._must(is_valid, table, key, "a number above 0" if above_zero else "a number", value)
        return float(value)

    def _file(self, table: str, key: str, entries: Mapping[str, Any]) -> str:
        """Return the path of a file that stands beside diag.toml, "" for none."""
        name = entries.get(key, "")
        self._must(isinstance(name, str), table, key, "the name of a file", name)
        return str(self.path.parent / name) if name else ""

    def _entry(self, name: str, value: object, buckets: list[float]) -> float:
        number = self._number("contract", name, value)
        entry = ENTRIES[name]
        if entry["buckets"] and number not in (*entry["buckets"], *buckets):
            usual = ", ".join(f"{bucket:g}" for bucket in entry["buckets"])
            reason = f"{name} must be a bucket of vLLM's histogram ({usual}) or listed in `buckets`, not {number:g}"
            raise self.bad("contract", name, reason)
        if entry["unit"] == "share" and number >= 1:
            raise self.bad("contract", name, f"{name} must be a fraction below 1 (0.99 is 99 %), not {number:g}")
        return number

    def site_entries(self) -> dict[str, Any]:
        """Return the entries of [site] by their names in `Site`; each key may also have the chart's spelling."""
        site: dict[str, Any] = {}
        for written, value in self._table("site").items():
            name = re.sub(r"(?<=[a-z])[A-Z]", lambda capital: f"_{capital[0].lower()}", written)
            name = "labels" if name == _SITE_LABELS else name
            if name not in Site._fields:
                raise self.bad("site", written, f"has no key '{written}'; its keys are {', '.join(Site._fields)}")
            if name in ("labels", "gpu_join"):
                is_list = isinstance(value, list) and value != []
                are_labels = is_list and all(isinstance(label, str) and _LABEL.fullmatch(label) for label in value)
                self._must(are_labels, "site", written, "a list of label names", value)
                if len(set(value)) < len(value) or {"engine", "gpu", "le"} & set(value):
                    reason = f"{written} must list each label once, and none of engine, gpu and le"
                    raise self.bad("site", written, reason)
                site[name] = tuple(value)
            elif name == "disabled_incidents":
                is_list = isinstance(value, list) and all(isinstance(incident, str) for incident in value)
                self._must(is_list, "site", written, "a list of incidents", value)
                site[name] = tuple(value)
            elif name in ("extra_labels", "rule_labels", "severity_overrides"):
                is_table = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
                self._must(is_table, "site", written, "a table of texts", value)
                if name == "severity_overrides" and not {*value.values()} <= {*RANK}:
                    severities = ", ".join(RANK)
                    raise self.bad("site", written, f"{written} must have severities, {severities}: {in_python(value)}")
                if name == "extra_labels" and not all(map(_LABEL.fullmatch, value)):
                    raise self.bad("site", written, f"{written} must have names of labels, not {in_python(value)}")
                site[name] = dict(value)
            elif name == "prefix":
                if not isinstance(value, str) or not re.fullmatch(ANY, value):
                    reason = f'{written} must end in {OWN} or vllm_, such as "kserve_{OWN}", not {in_python(value)}'
                    raise self.bad("site", written, reason)
                site[name] = value
            else:
                is_runbook = isinstance(value, str) and name == "runbook_base_url"
                address = value.replace(PAGE, "page") if is_runbook else value
                is_url = isinstance(address, str) and bool(re.fullmatch(r"https?://[^\s\"'{}]+", address))
                self._must(is_url, "site", written, "a URL with http:// or https://", value)
                site[name] = value.rstrip("/")
        return site


def with_settings(contract: Contract, settings: Sequence[str]) -> Contract:
    """Return the contract with entries of [site] from the command line; BadContract for one that is invalid.

    A setting is written as Helm's --set: `grafanaUrl=URL`, `siteLabels=namespace,pod`, `extraLabels.team=inference`.
    """
    entries: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, _, key = path.partition(".")
        table = entries.setdefault(name, {}) if key else {}
        if not equals or not isinstance(table, dict):
            raise BadContract(f"--set {printable(setting, 60)}: must be NAME=VALUE, such as grafanaUrl=https://grafana")
        if key:
            table[key] = text
        else:
            is_list = name.lower().replace("_", "") in ("labels", "sitelabels", "gpujoin", "disabledincidents")
            entries[name] = text.split(",") if is_list else text
    site = _File(Path("--set"), "", {"site": entries}).site_entries()
    return replace(contract, site=contract.site._replace(**site)) if site else contract


def apply_overrides(incidents: Sequence[Incident], contract: Contract) -> tuple[Incident, ...]:
    """Return the incidents with the site's thresholds and severities; BadContract where there is no such incident."""
    ids = [incident.id for incident in incidents]
    site = contract.site
    places = [(f"[limits.{name}]", name) for name in contract.limits]
    places += [(f"[ignore.{name}]", name) for name in contract.ignored]
    places += [("disabledIncidents", name) for name in site.disabled_incidents]
    places += [("severityOverrides", name) for name in site.severity_overrides]
    for place, name in places:
        if name not in ids:
            there = f"{contract.origin}: {place}" if contract.origin else place
            raise BadContract(f"{there}: there is no incident '{printable(name, 40)}'; diag incidents lists them")
    return tuple(_overridden(incident, contract) for incident in incidents)


def renamed_thresholds(incidents: Sequence[Incident], contract: Contract) -> Iterator[str]:
    """Yield a sentence for each threshold to which the site gives a former name."""
    for incident in incidents:
        for old, new in _former_names(incident).items():
            if old in contract.limits.get(incident.id, {}):
                yield f"{contract.origin}: [limits.{incident.id}]: '{old}' is now called '{new}'; rename it"


def _former_names(incident: Incident) -> dict[str, str]:
    """Return the present name of each former name of a signal."""
    today = threshold_names(incident)
    signals = [condition.signal for condition in (*incident.conditions, *incident.supports)]
    return {old: signal.name for signal in signals for old in signal.formerly if old not in today}


def threshold_names(incident: Incident) -> list[str]:
    """Return the signals of an incident whose threshold a site may set."""
    escalates = [ESCALATES] if incident.escalates else []
    return [condition.signal.name for condition in (*incident.conditions, *incident.supports)] + escalates


def _overridden(incident: Incident, contract: Contract) -> Incident:
    former, stated = _former_names(incident), contract.limits.get(incident.id, {})
    limits = {former.get(name, name): limit for name, limit in stated.items() if former.get(name) not in stated}
    names = threshold_names(incident)
    for name in limits:
        if name not in names:
            quoted = ", ".join(f"'{signal}'" for signal in names)
            raise BadContract(f"{contract.origin}: [limits.{incident.id}] has no threshold '{name}'; it has {quoted}")

    def of_site(condition: Condition, key: str = "") -> Condition:
        key = key or condition.signal.name
        if key not in limits:
            return condition
        default = quantity(contract.limit(condition.limit), condition.signal.unit)
        why = judged(f"set in {contract.origin}; the default is {default}: {condition.why.says}")
        return condition._replace(limit=limits[key], why=why)

    def look_alike_of_site(look_alike: LookAlike) -> LookAlike:
        return look_alike._replace(
            requires=of_site(look_alike.requires) if look_alike.requires else None,
            refuted_by=of_site(look_alike.refuted_by) if look_alike.refuted_by else None,
        )

    severity = contract.site.severity_overrides.get(incident.id)
    return incident._replace(
        symptoms=tuple(map(of_site, incident.symptoms)),
        supports=tuple(map(of_site, incident.supports)),
        looks_like=tuple(map(look_alike_of_site, incident.looks_like)),
        escalates=of_site(incident.escalates, ESCALATES) if incident.escalates and not severity else None,
        serious=of_site(incident.serious) if incident.serious else None,
        mild=of_site(incident.mild) if incident.mild else None,
        severity=severity or incident.severity,
    )
