"""All generated files: their texts, writing them, and comparing them with the files on disk."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diag.artefacts import alerts
from diag.artefacts.dashboards.pages import dashboards
from diag.artefacts.inhibitions import inhibitions, of_one_page
from diag.artefacts.names import GENERATED_MARK
from diag.artefacts.recording_rules import dcgm_group, declared, kubernetes_group, normal_group, threshold_group
from diag.artefacts.reference import (
    alert_reference,
    failure_reference,
    lint_rule_reference,
    metric_reference,
    preflight_reference,
)
from diag.artefacts.runbook import runbooks
from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.core.files import dump_yaml, only_writer, written_whole
from diag.core.formatting import printable
from diag.core.incident import Incident
from diag.core.metric_prefix import OWN, with_prefix
from diag.report.spans import label

FOLDERS = ("alerts", "dashboards", "runbooks", "docs/failures", "docs/lint-rules")
"""Folders whose files are deleted if they are no longer generated; files of docs/ may quote the mark."""
ACTIONS = {"missing": "written", "differs": "changed", "no longer generated": "deleted"}
"""Differences of a file, and how `write` reports that it removed them."""
RELABEL = {
    "source_labels": ["__name__"],
    "regex": "(?:kserve_|ray_)?vllm[_:](.+)",
    "target_label": "__name__",
    "replacement": f"{OWN}$1",
}
RULE_FILES = ("diag.rules.yaml", "prometheusrule.yaml", "inhibit_rules.yaml")
"""Files in alerts/ with rules of incidents."""
NORMAL = "a rule file for Prometheus, of what is normal at this time of day; nothing alerts on it."


def files(
    incidents: Sequence[Incident], contract: Contract, only: Sequence[str] = (), per_incident: bool = False
) -> dict[str, str]:
    """Return the text of every file by its path under the root of the artefacts.

    With `only`, the rules and runbooks of these incidents alone; BadUsage if one does not exist. `per_incident` adds
    the dashboard of each incident.
    """
    pages = dashboards(incidents, contract, per_incident)
    of_site = {**_alerts(incidents, contract), **pages, **runbooks(incidents, contract)}
    reference: dict[str, str] = {}
    if only:
        known = {incident.id for incident in incidents}
        for name in only:
            if name not in known:
                raise BadUsage(f"--only {printable(name, 40)}: there is no such incident; diag incidents lists them")
        own = ("dashboards/{}.json", "runbooks/{}.md") if per_incident else ("runbooks/{}.md",)
        wanted = [file.format(name) for name in only for file in own]
        rules = _alerts([incident for incident in incidents if incident.id in only], contract)
        of_site = {file: of_site[file] for file in wanted} | {
            f"alerts/{name}": rules[f"alerts/{name}"] for name in RULE_FILES
        }
    else:
        reference = {
            **failure_reference(),
            **lint_rule_reference(),
            "docs/paging.md": alert_reference(incidents),
            "docs/metrics.md": metric_reference(incidents, pages),
            "docs/preflight.md": preflight_reference(),
        }
    return {name: with_prefix(text, contract.site.prefix) for name, text in of_site.items()} | reference


def _alerts(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    groups = [
        *alerts.groups(incidents, contract),
        alerts.telemetry_group(contract),
        threshold_group(incidents, contract),
    ]
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "diag", "labels": {"app.kubernetes.io/name": "diag", **contract.site.rule_labels}},
        "spec": {"groups": groups},
    }
    inhibit = {"inhibit_rules": inhibitions(incidents, contract.site)}
    texts: dict[str, tuple[str, dict[str, Any]]] = {
        "diag.rules.yaml": ("a rule file for Prometheus.", {"groups": groups}),
        "prometheusrule.yaml": ("the rules of diag.rules.yaml for the Prometheus Operator.", resource),
        "normal.rules.yaml": (NORMAL, {"groups": [normal_group()]}),
        "dcgm.yaml": (
            f"a rule file for Prometheus, for dcgm-exporter's metrics.\n{declared().dcgm_header}",
            {"groups": [dcgm_group(contract.site.labels, contract.site.gpu_join)]},
        ),
        "kubernetes.yaml": (
            f"a rule file for Prometheus in Kubernetes.\n{declared().kubernetes_header}",
            {"groups": [kubernetes_group(contract.site.labels)]},
        ),
        "inhibit_rules.yaml": ("Alertmanager's inhibition rules; add them to alertmanager.yml.", inhibit),
        "relabel.yaml": (
            f"for a scrape job whose metrics are stored under vllm_, kserve_{OWN} or ray_vllm_.",
            {"metric_relabel_configs": [RELABEL]},
        ),
    }
    here = Path(__file__).parent
    messages, steps = ((here / name).read_text(encoding="utf-8") for name in ("alertmanager.tmpl", "steps.md"))
    return {
        "alerts/README.md": steps.replace("@of_one_page@", "|".join(of_one_page(incidents))),
        "alerts/templates/diag.tmpl": messages.replace("@do_now@", label("do_now")),
        **{
            f"alerts/{name}": dump_yaml(f"{GENERATED_MARK}: {head}", content) for name, (head, content) in texts.items()
        },
    }


def write(root: Path, texts: dict[str, str]) -> list[str]:
    """Write files that differ, each whole or not at all, and delete those no longer generated; return a line for each.

    A file that diag did not write is never overwritten: BadUsage names it before anything is written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with only_writer(root):
            changed = list(differences(root, texts))
            for name, _ in changed:
                if (root / name).exists() and GENERATED_MARK not in (_read(root / name) or ""):
                    raise BadUsage(f"{root / name}: was not written by diag generate: move it, or name another folder")
            for name, _ in changed:
                file, text = root / name, texts.get(name)
                if text is None:
                    file.unlink(missing_ok=True)
                    continue
                file.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(file) as out:
                    out.write(text)
    except OSError as error:
        raise BadUsage(f"{root}: cannot be written: {error}") from error
    return [f"{name}: {ACTIONS[difference]}" for name, difference in changed]


def differences(root: Path, texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the files that do not match the declarations, and how they differ."""
    for name, text in texts.items():
        present = _read(root / name)
        if present != text:
            yield name, "missing" if present is None else "differs"
    for folder in FOLDERS:
        for file in sorted((root / folder).glob("*")):
            name = f"{folder}/{file.name}"
            if name not in texts and GENERATED_MARK in (_read(file) or ""):
                yield name, "no longer generated"


def _read(file: Path) -> str | None:
    """Return the text of a file; None if there is no file or it is not text."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
