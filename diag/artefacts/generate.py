"""Every generated file: its text, and whether what lies on disk says the same."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diag.artefacts import alerts, dashboards, dcgm, guards, runbooks
from diag.artefacts.names import MARK
from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.core.incident import Incident
from diag.core.yaml import dump

FOLDERS = ("alerts", "dashboards", "runbooks")
RELABEL = {
    "metric_relabel_configs": [
        {"source_labels": ["__name__"], "regex": "vllm_(.+)", "target_label": "__name__", "replacement": "vllm:$1"}
    ]
}


def files(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """The text of every file by its path under the root of the artefacts."""
    return {
        **_alerts(incidents, contract),
        **dashboards.dashboards(incidents, contract),
        **runbooks.runbooks(incidents, contract),
    }


def _alerts(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    groups = [*alerts.groups(incidents, contract), guards.group(contract)]
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "diag", "labels": {"app.kubernetes.io/name": "diag"}},
        "spec": {"groups": groups},
    }
    by_dcgm = dcgm.group(contract.site.labels, contract.site.gpu_join)
    inhibit = {"inhibit_rules": alerts.inhibitions(incidents, contract.site)}
    texts: dict[str, tuple[str, dict[str, Any]]] = {
        "diag.rules.yaml": (f"{MARK}: a rule file of Prometheus.", {"groups": groups}),
        "prometheusrule.yaml": (f"{MARK}: the rules of diag.rules.yaml for the Prometheus Operator.", resource),
        "dcgm.yaml": (
            f"{MARK}: a rule file of Prometheus, for users of dcgm-exporter.\n{dcgm.LEFT_OUT}",
            {"groups": [by_dcgm]},
        ),
        "inhibit_rules.yaml": (f"{MARK}: what Alertmanager need not say; put it into alertmanager.yml.", inhibit),
        "relabel.yaml": (f"{MARK}: for a scrape job whose metrics are stored as vllm_ instead of vllm:.", RELABEL),
    }
    steps = (Path(__file__).parent / "steps.md").read_text(encoding="utf-8")
    return {
        "alerts/README.md": steps,
        **{f"alerts/{name}": dump(head, content) for name, (head, content) in texts.items()},
    }


def write(root: Path, texts: dict[str, str]) -> list[str]:
    """Write what differs, take away what is generated no more; returns one line for each.

    A file of somebody else's is never overwritten: BadUsage names it before anything is written.
    """
    changed = list(differences(root, texts))
    for name, _ in changed:
        if (root / name).exists() and MARK not in (_read(root / name) or ""):
            raise BadUsage(f"{root / name}: was not written by diag generate: move it, or name another folder")
    try:
        for name, _ in changed:
            _change(root / name, texts.get(name))
    except OSError as error:
        raise BadUsage(f"{root}: cannot be written: {error}") from error
    return [f"{name}: {what}" for name, what in changed]


def _change(file: Path, text: str | None) -> None:
    if text is None:
        return file.unlink()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return None


def differences(root: Path, texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The files that do not say what the declarations do, and how they differ."""
    for name, text in texts.items():
        there = _read(root / name)
        if there != text:
            yield name, "missing" if there is None else "differs"
    for folder in FOLDERS:
        for file in sorted((root / folder).glob("*")):
            name = f"{folder}/{file.name}"
            if name not in texts and MARK in (_read(file) or ""):
                yield name, "no longer generated"


def _read(file: Path) -> str | None:
    """The text of a file; None where there is none, or none that is ours."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
