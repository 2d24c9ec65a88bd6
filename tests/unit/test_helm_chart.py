"""The chart of deploy/helm/diag: every mode and value renders what Kubernetes and the Prometheus Operator take."""

import base64
import gzip
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from support.helm import (
    CHART,
    Document,
    Values,
    definitions,
    documents,
    merged,
    of_kind,
    texts,
    validate,
    without_directives,
)
from support.kubernetes import cluster
from support.kubernetes.cluster import Cluster
from support.paths import ROOT

from diag.artefacts.generate import files
from diag.core.contract import Contract, apply_overrides, read, with_settings
from diag.knowledge.catalog import load

DOCS = (ROOT / "docs" / "kubernetes.md").read_text()
DOCS_OF_THE_PROBE = (ROOT / "docs" / "exporter.md").read_text()
EXAMPLE = ROOT / "deploy" / "kubernetes-sidecar.yaml"
SIDECAR: Values = {"image": {"repository": "registry.example.com/diag"}, "sidecar": {"podLabels": {"app": "vllm"}}}
"""What has no default."""
BARE: Values = {**SIDECAR, "prometheusRule": {"enabled": False}, "dashboards": {"enabled": False}}
MODES: dict[str, Values] = {
    "sidecar": {"mode": "sidecar"},
    "daemonset": {"mode": "daemonset"},
    "standalone": {"mode": "standalone", "vllm": {"url": "http://vllm.inference:8000"}},
}
KINDS = {
    "sidecar": ["ConfigMap", "PodMonitor"],
    "daemonset": ["DaemonSet", "PodMonitor"],
    "standalone": ["Deployment", "PodMonitor"],
}
VOLUME = ("extraVolumes", [{"name": "web", "secret": {"secretName": "web"}}])
SWITCHES: dict[str, tuple[str, Any]] = {
    "mode": ("sidecar", "daemonset"),
    "nameOverride": ("daemonset", "watch"),
    "fullnameOverride": ("daemonset", "watch"),
    "image.repository": ("sidecar", "registry.example.com/other"),
    "image.tag": ("sidecar", "1.2.3"),
    "image.digest": ("sidecar", f"sha256:{'0' * 64}"),
    "image.pullPolicy": ("sidecar", "Always"),
    "imagePullSecrets": ("sidecar", [{"name": "registry"}]),
    "vllm.url": ("daemonset", "http://127.0.0.1:8080"),
    "log.file": ("sidecar", ""),
    "log.timezone": ("sidecar", "Europe/Berlin"),
    "log.sizeLimit": ("sidecar", "500Mi"),
    "log.hostPath": ("daemonset", "/var/log/vllm"),
    "sidecar.container": ("sidecar", "server"),
    "sidecar.podLabels": ("sidecar", {"model": "qwen"}),
    "sidecar.namespaces": ("sidecar", ["chat", "search"]),
    "sidecar.probes": ("sidecar", False),
    "monitor.kind": ("sidecar", "ServiceMonitor"),
    "monitor.labels": ("sidecar", {"release": "kube-prometheus-stack"}),
    "monitor.interval": ("sidecar", "5s"),
    "monitor.scrapeTimeout": ("sidecar", "4s"),
    "monitor.podTargetLabels": ("sidecar", ["model"]),
    "monitor.endpoint": ("sidecar", {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}),
    "runbookBaseUrl": ("sidecar", "https://wiki.example/vllm"),
    "grafanaUrl": ("sidecar", "https://grafana.example"),
    "siteLabels": ("sidecar", ["namespace", "pod"]),
    "ruleLabels": ("sidecar", {"release": "kube-prometheus-stack"}),
    "disabledIncidents": ("sidecar", ["gpu_fault"]),
    "severityOverrides": ("sidecar", {"queue_saturation": "info"}),
    "extraLabels": ("sidecar", {"team": "inference"}),
    "prometheusRule.enabled": ("sidecar", True),
    "prometheusRule.sets": ("sidecar", ["dcgm", "normal"]),
    "dashboards.enabled": ("sidecar", True),
    "dashboards.labels": ("sidecar", {"grafana": "vllm"}),
    "dashboards.annotations": ("sidecar", {"grafana_folder": "Inference"}),
    "networkPolicy.enabled": ("standalone", True),
    "networkPolicy.from": ("standalone", [{"podSelector": {}}]),
    "ptrace": ("daemonset", True),
    "containerSecurityContext": ("sidecar", {"runAsUser": 1000}),
    "listen": ("standalone", "::"),
    "port": ("standalone", 9401),
    "extraArgs": ("standalone", ["--probe", "60"]),
    "extraEnv": ("standalone", [{"name": "VLLM_API_KEY", "value": "key"}]),
    VOLUME[0]: ("standalone", VOLUME[1]),
    "extraVolumeMounts": ("standalone", [{"name": "web", "mountPath": "/web"}]),
    "resources": ("standalone", {"limits": {"cpu": "1"}}),
    "livenessProbe": ("standalone", {"httpGet": None, "tcpSocket": {"port": "diag-metrics"}}),
    "readinessProbe": ("standalone", {"periodSeconds": 3}),
    "podLabels": ("daemonset", {"team": "inference"}),
    "podAnnotations": ("daemonset", {"note": "text"}),
    "nodeSelector": ("daemonset", {"gpu": "true"}),
    "tolerations": ("daemonset", [{"key": "nvidia.com/gpu", "operator": "Exists"}]),
    "affinity": ("daemonset", {"podAntiAffinity": {}}),
    "priorityClassName": ("daemonset", "high"),
    "runtimeClassName": ("daemonset", "nvidia"),
}
"""Of every value: another one than the default, and a mode in which it changes something."""
PROBES = ("livenessProbe", "readinessProbe")
MAPS = ("containerSecurityContext", "resources", "livenessProbe", "readinessProbe", "labels", "annotations")
OF_ALERTS = ("runbookBaseUrl", "grafanaUrl", "ruleLabels", "disabledIncidents", "severityOverrides", "extraLabels")
"""Values that change the rules only."""


def leaves(values: Values, above: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in MAPS:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield above + key


def setting(path: str, value: Any) -> Document:
    first, _, rest = path.partition(".")
    return {first: setting(rest, value) if rest else value}


def patched(deployment: str, values: Values, path: Path) -> Document:
    """A Deployment with the chart's patch, as kubectl applies it."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: .ci/components installs it")
    path.write_text(deployment)
    (config,) = of_kind(documents(merged(BARE, values)), "ConfigMap")
    command = ["kubectl", "patch", "--local", "-f", path, "-o", "yaml", "-p", config["data"]["patch.yaml"]]
    return yaml.safe_load(subprocess.run(command, check=True, capture_output=True).stdout)


def test_every_value_has_a_test() -> None:
    assert sorted(leaves(yaml.safe_load((CHART / "values.yaml").read_text()))) == sorted(SWITCHES)
    described = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(described) - {"global", "enabled"} == {path.partition(".")[0] for path in SWITCHES}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_installs_its_objects(mode: str) -> None:
    found = documents(merged(BARE, MODES[mode]))
    assert sorted(document["kind"] for document in found) == KINDS[mode]
    for document in found:
        validate(document)


@pytest.mark.slow
@pytest.mark.parametrize("path", SWITCHES)
def test_each_value_changes_objects_which_stay_valid(path: str) -> None:
    mode, value = SWITCHES[path]
    section = path.partition(".")[0]
    shown = {section: {"enabled": True}} if section in ("prometheusRule", "dashboards", "networkPolicy") else {}
    shown = {"prometheusRule": {"enabled": True}} if path in OF_ALERTS else shown
    base = merged(merged(BARE, MODES[mode]), {} if path.endswith(".enabled") else shown)
    found = documents(merged(base, setting(path, value)))
    assert found != documents(base)
    for document in found:
        validate(document)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"mode": "deployment"}, "at '/mode': value must be one of"),
        ({"prot": 9400}, "additional properties 'prot' not allowed"),
        ({"monitor": {"kind": "podMonitor"}}, "at '/monitor/kind': value must be one of"),
        ({"monitor": {"interval": "15"}}, "at '/monitor/interval'"),
        ({"port": "9400"}, "at '/port': got string, want integer"),
        ({"image": {"digest": "latest"}}, "at '/image/digest'"),
        ({"image": {"repository": ""}}, "image.repository is empty"),
        ({"mode": "standalone"}, "vllm.url: in mode standalone no vLLM runs at 127.0.0.1"),
        ({"networkPolicy": {"enabled": True}}, "networkPolicy.enabled: only in mode standalone"),
        (
            {"monitor": {"kind": "ServiceMonitor"}, "sidecar": {"namespaces": ["chat"]}},
            "monitor.kind: a Service selects",
        ),
        ({"disabledIncidents": ["gpu_fire"]}, 'there is no incident "gpu_fire"'),
        ({"severityOverrides": {"gpu_fault": "page"}}, "at '/severityOverrides/gpu_fault': value must be one of"),
        ({"siteLabels": ["pod"], "monitor": {"kind": "Annotations"}}, "siteLabels: only a PodMonitor"),
    ],
    ids=lambda case: case[:30] if isinstance(case, str) else "",
)
def test_invalid_chart_value_is_refused(values: Values, sentence: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(sentence)):
        documents(merged(BARE, values))


def test_scrape_target_has_no_default() -> None:
    with pytest.raises(helm_python.HelmError, match="podLabels is empty"):
        documents({**BARE, "sidecar": {}})


def test_the_rules_are_those_of_the_rule_files_each_group_small_enough_for_the_api_server() -> None:
    rules = of_kind(
        documents(merged(SIDECAR, {"prometheusRule": {"sets": ["diag", "kubernetes", "dcgm", "normal"]}})),
        "PrometheusRule",
    )
    files = [
        ROOT / "alerts" / name for name in ("diag.rules.yaml", "kubernetes.yaml", "dcgm.yaml", "normal.rules.yaml")
    ]
    groups = [group for file in files for group in yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["groups"]]
    for rule in (rule for group in groups for rule in group["rules"]):
        rule.get("annotations", {}).pop("dashboard_url", None)  # without grafanaUrl
    assert [group for rule in rules for group in rule["spec"]["groups"]] == groups
    assert any("{{" in str(group) for group in groups)
    assert len({rule["metadata"]["name"] for rule in rules}) == len(rules)
    assert max(len(json.dumps(rule)) for rule in rules) < 2**20
    assert {json.dumps(rule["metadata"]["annotations"]) for rule in rules} == {
        '{"argocd.argoproj.io/sync-options": "ServerSideApply=true"}'
    }


WEB: Values = {"runbookBaseUrl": "https://wiki.example/vllm", "grafanaUrl": "https://grafana.example/"}
SITE: Values = {
    **WEB,
    "disabledIncidents": ["gpu_fault", "crash_loop"],
    "severityOverrides": {"queue_saturation": "info", "requests_failing": "critical"},
    "extraLabels": {"team": "inference", "severity": "none"},
    "ruleLabels": {"release": "kube-prometheus-stack"},
}


@pytest.mark.slow
def test_values_make_the_rules_and_links_that_diag_generate_makes_of_the_same_names(tmp_path: Path) -> None:
    """diag.toml takes the chart's names too; severities also change which cause mutes, which a chart cannot compute."""
    flat = dict(SITE) | {"severityOverrides": {}}
    lines = [f"{name} = {json.dumps(value).replace(': ', ' = ')}" for name, value in flat.items()]
    (tmp_path / "diag.toml").write_text("[site]\n" + "\n".join(lines) + "\n")
    contract = read(tmp_path / "diag.toml")
    generated = files(load(), contract)
    (resource,) = yaml.load_all(generated["alerts/prometheusrule.yaml"], Loader=yaml.CSafeLoader)
    made = documents(merged(SIDECAR, flat), most_dashboards=None)
    rules = of_kind(made, "PrometheusRule")
    assert [group for each in rules for group in each["spec"]["groups"]] == resource["spec"]["groups"]
    assert {each["metadata"]["labels"]["release"] for each in rules} == {resource["metadata"]["labels"]["release"]}
    boards = {
        name: text for each in of_kind(made, "ConfigMap") for name, text in each["data"].items() if name[-1] == "n"
    }
    assert {name: json.loads(text) for name, text in boards.items()} == {
        name: json.loads(generated[f"dashboards/{name}"]) for name in boards
    }


def test_an_overridden_severity_is_that_of_the_only_alert() -> None:
    made = of_kind(documents(merged(SIDECAR, SITE)), "PrometheusRule")
    alerts = [rule for each in made for group in each["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    overridden = SITE["severityOverrides"]
    found = {
        name: [each["labels"]["severity"] for each in alerts if each["labels"].get("incident") == name]
        for name in overridden
    }
    assert found == {name: [severity] for name, severity in overridden.items()}
    settings = [f"severityOverrides.{name}={severity}" for name, severity in overridden.items()]
    incidents = {each.id: each for each in apply_overrides(load(), with_settings(Contract(), settings))}
    assert {name: (incidents[name].severity, incidents[name].escalates) for name in overridden} == {
        name: (severity, None) for name, severity in overridden.items()
    }


def test_a_message_has_no_link_to_an_unknown_grafana() -> None:
    made = of_kind(documents(SIDECAR), "PrometheusRule")
    alerts = [rule for each in made for group in each["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert not any("dashboard_url" in rule["annotations"] for rule in alerts)
    assert all(rule["annotations"]["runbook_url"].startswith("https://") for rule in alerts)


def test_site_labels_are_the_instance_of_the_target() -> None:
    own = {"monitor": {"endpoint": {"relabelings": [{"action": "labeldrop", "regex": "container"}]}}}
    (monitor,) = of_kind(documents(merged(BARE, {**own, "siteLabels": ["namespace", "pod"]})), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [
        *own["monitor"]["endpoint"]["relabelings"],
        {"sourceLabels": ["namespace", "pod"], "separator": "/", "targetLabel": "instance"},
    ]


def test_every_dashboard_is_a_config_map_for_grafanas_sidecar() -> None:
    maps = [
        found
        for found in of_kind(documents(SIDECAR, most_dashboards=None), "ConfigMap")
        if "patch.yaml" not in found["data"]
    ]
    assert {name: json.loads(text) for found in maps for name, text in found["data"].items()} == {
        file.name: json.loads(file.read_text()) for file in (ROOT / "dashboards").glob("*.json")
    }
    assert {found["metadata"]["labels"]["grafana_dashboard"] for found in maps} == {"1"}
    assert {found["metadata"]["annotations"]["grafana_folder"] for found in maps} == {"vLLM"}


def test_a_packaged_chart_has_all_and_its_release_fits_into_a_secret(tmp_path: Path) -> None:
    with helm_python.Chart.load(helm_python.package(CHART, destination=tmp_path)) as packaged:
        rendered = packaged.render(dict(SIDECAR), name="diag", namespace="inference")
        parts = {"templates": packaged.templates, "files": packaged.files, "schema": packaged.schema}
    encoded = {
        part: [base64.b64encode(str(each).encode()).decode() for each in content] for part, content in parts.items()
    }
    release = {"chart": encoded, "manifest": "\n".join(rendered.values())}
    assert set(rendered) == {
        f"diag/templates/{file.name}" for file in (CHART / "templates").iterdir() if file.suffix != ".tpl"
    }
    size = len(base64.b64encode(gzip.compress(json.dumps(release).encode())))  # Helm's own is 1 % larger
    assert size < 0.95 * 2**20


@pytest.mark.parametrize("part", ["prometheusRule", "dashboards"])
def test_chart_copy_without_its_links_fails_with_a_message(part: str, tmp_path: Path) -> None:
    copy = shutil.copytree(CHART, tmp_path / "diag", ignore=shutil.ignore_patterns("files"))
    with (
        helm_python.Chart.load(copy) as chart,
        pytest.raises(helm_python.HelmError, match="package the chart with helm"),
    ):
        chart.render(merged(BARE, {part: {"enabled": True}}), name="diag", namespace="inference")


def test_helm_lint_finds_no_error() -> None:
    report = helm_python.lint(CHART, dict(SIDECAR), strict=True)
    assert [found for found in report["messages"] if "icon" not in found["error"]] == []


def test_sidecar_example_equals_the_patched_deployment(tmp_path: Path) -> None:
    deployment = patched(EXAMPLE.read_text(), {"monitor": {"kind": "Annotations"}}, tmp_path / "vllm.yaml")
    assert deployment["spec"] == yaml.safe_load(EXAMPLE.read_text())["spec"]
    validate(deployment)


@pytest.mark.parametrize("probes", [(), PROBES], ids=["none", "of /health"])
def test_patch_replaces_existing_probes(probes: tuple[str, ...], tmp_path: Path) -> None:
    deployment = yaml.safe_load(EXAMPLE.read_text())
    pod = deployment["spec"]["template"]["spec"]
    vllm = {key: value for key, value in pod["containers"][0].items() if key not in (*PROBES, "volumeMounts")}
    health = {"httpGet": {"path": "/health", "port": "http"}}
    pod |= {"containers": [vllm | dict.fromkeys(probes, health)], "volumes": [{"name": "models", "emptyDir": {}}]}
    found = patched(yaml.safe_dump(deployment), {}, tmp_path / "vllm.yaml")
    assert found["spec"]["template"]["spec"]["containers"] == example()["containers"]
    assert {volume["name"] for volume in found["spec"]["template"]["spec"]["volumes"]} == {"models", "vllm-log"}


@pytest.mark.parametrize(("status", "passes"), [(200, True), (401, True), (503, False), (None, True)])
def test_vllm_probe_fails_only_at_status_503(status: int | None, passes: bool, tmp_path: Path) -> None:
    curl = tmp_path / "curl"  # prints what -w '%{http_code}' does; an image may have none
    if status is not None:
        curl.write_text(f"#!/bin/sh\necho {status}\n")
        curl.chmod(0o755)
    for probe in PROBES:
        command = example()["containers"][0][probe]["exec"]["command"]
        assert command[2] in DOCS_OF_THE_PROBE or probe == "readinessProbe"
        assert (
            subprocess.run(["/bin/sh", *command[1:]], env={"PATH": str(tmp_path)}, check=False).returncode == 0
        ) is passes


def test_second_patch_removes_all_of_the_first(tmp_path: Path) -> None:
    changed = {"port": 9401, "extraEnv": [{"name": "B", "value": "2"}], "resources": {"limits": {"cpu": "1"}}}
    once = patched(EXAMPLE.read_text(), {"extraEnv": [{"name": "A", "value": "1"}]}, tmp_path / "once.yaml")
    twice = patched(yaml.safe_dump(once), changed, tmp_path / "twice.yaml")
    assert twice["spec"]["template"]["spec"]["containers"][1] == container(documents(merged(BARE, changed)))


def test_an_exporter_that_fails_its_probe_does_not_take_vllm_out_of_service(tmp_path: Path) -> None:
    _, diag = patched(EXAMPLE.read_text(), {}, tmp_path / "vllm.yaml")["spec"]["template"]["spec"]["containers"]
    assert "readinessProbe" not in diag


@pytest.mark.parametrize("mode", MODES)
def test_the_container_meets_the_restricted_standard_and_ptrace_asks_for_one_capability(mode: str) -> None:
    for ptrace, user, capabilities in [
        (False, 65532, {"drop": ["ALL"]}),
        (True, 0, {"drop": ["ALL"], "add": ["SYS_PTRACE"]}),
    ]:
        context = container(documents(merged(merged(BARE, MODES[mode]), {"ptrace": ptrace})))["securityContext"]
        assert (context["runAsUser"], context["runAsNonRoot"]) == (user, not ptrace)
        assert context["capabilities"] == capabilities
        assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def container(found: list[Document]) -> Document:
    """Return the container of the exporter."""
    pods = [document["spec"] for document in found if document["kind"] in ("DaemonSet", "Deployment")]
    pods += [
        without_directives(yaml.safe_load(document["data"]["patch.yaml"]))["spec"]
        for document in of_kind(found, "ConfigMap")
    ]
    return next(each for pod in pods for each in pod["template"]["spec"]["containers"] if each["name"] == "diag")


def blocks(language: str) -> list[str]:
    """Yield the code blocks of docs/kubernetes.md."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every `helm install` of docs/kubernetes.md, in words."""
    lines = "".join(blocks("console")).replace("\\\n", "").splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ helm install")]


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[2])
def test_documented_helm_command_installs_the_documented_objects(words: list[str]) -> None:
    assert (words[3], words[6:8]) == ("deploy/helm/diag", ["-f", "values.yaml"])
    values = yaml.safe_load(next(block for block in blocks("yaml") if block.startswith("image:")))
    for option, text in zip(words[8::2], words[9::2], strict=True):
        parse = {"--set": helm_python.parse_set_string, "--set-string": helm_python.parse_set_string_values}[option]
        values = merged(values, parse(text))
    for document in documents(values, name=words[2], namespace=words[5]):
        validate(document)
        if document["kind"] in ("PodMonitor", "PrometheusRule"):
            assert document["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_a_chart_that_depends_on_this_one_takes_the_parts_by_name(tmp_path: Path) -> None:
    for folder in ("charts", "templates"):
        (tmp_path / folder).mkdir()
    (tmp_path / "charts" / "diag").symlink_to(CHART)
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: own\nversion: 1.0.0\n")
    (tmp_path / "templates" / "pod.yaml").write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: vllm}\n" + blocks("text")[0]
    )
    with helm_python.Chart.load(tmp_path) as chart:
        rendered = chart.render({"diag": dict(SIDECAR)}, name="own", namespace="inference")
    pod = yaml.safe_load(rendered["own/templates/pod.yaml"])
    validate(pod)
    vllm, diag = pod["spec"]["containers"]
    assert diag == container(documents(BARE))
    assert vllm["livenessProbe"]["exec"]["command"] == example()["containers"][0]["livenessProbe"]["exec"]["command"]
    assert pod["spec"]["volumes"] == example()["volumes"]


def example() -> Document:
    return yaml.safe_load(EXAMPLE.read_text())["spec"]["template"]["spec"]


def test_grafana_reads_the_annotation_that_the_dashboards_have() -> None:
    (values,) = (yaml.safe_load(block) for block in blocks("yaml") if block.startswith("grafana:"))
    annotation = values["grafana"]["sidecar"]["dashboards"]["folderAnnotation"]
    assert annotation in yaml.safe_load((CHART / "values.yaml").read_text())["dashboards"]["annotations"]


def test_the_notes_name_the_patch_and_kubectl_prints_it(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: .ci/components installs it")
    rendered = texts(BARE)
    (path,) = re.findall(r"-o (jsonpath=\S+)", rendered["NOTES.txt"])
    assert path in DOCS
    file = tmp_path / "configmap.yaml"
    file.write_text(rendered["sidecar.yaml"])
    command = ["kubectl", "patch", "--local", "-f", file, "-p", "{}", "-o", path.replace("'", "")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == yaml.safe_load(rendered["sidecar.yaml"])["data"]["patch.yaml"]


# -- a real API server with the Prometheus Operator's definitions


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.running(tmp_path_factory.mktemp("bare"), [], {}) as running:
        running.kubectl("create", "-f", "-", given=yaml.safe_dump_all(definitions()))
        running.kubectl("wait", "--for=condition=Established", "crd", "--all")
        running.kubectl("create", "namespace", "inference")
        yield running


def installed(lab: Cluster, found: list[Document], *words: str) -> list[Document]:
    """Apply the objects to the namespace as a release does, and return what the server took."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": found})
    taken = lab.kubectl("-n", "inference", "apply", "--server-side", "-o", "json", *words, "-f", "-", given=text)
    answer: Document = json.loads(taken)
    return list(answer.get("items", [answer]))


def kept(asked: Any, got: Any) -> bool:
    """True if the server has kept all that was asked for; it adds defaults."""
    if isinstance(asked, dict):
        return all(key in got and kept(value, got[key]) for key, value in asked.items() if value is not None)
    if isinstance(asked, list):
        return len(asked) == len(got) and all(map(kept, asked, got))
    return bool(asked == got)


@cluster.needed
def test_the_chart_is_installed_on_kube_prometheus_stack_as_its_page_says(bare: Cluster) -> None:
    page = (ROOT / "docs" / "kube-prometheus-stack.md").read_text()
    (values,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    found = documents(merged(yaml.safe_load(values), {"sidecar": {"podLabels": {"app": "vllm"}}}), most_dashboards=None)
    taken = installed(bare, found)
    assert [each for each, got in zip(found, taken, strict=True) if not kept(each, got)] == []
    selected = [each for each in taken if each["apiVersion"] == "monitoring.coreos.com/v1"]
    assert {each["kind"] for each in selected} == {"PodMonitor", "PrometheusRule"}
    assert {each["metadata"]["labels"]["release"] for each in selected} == {"kube-prometheus-stack"}
    pod = {"metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [{"name": "vllm", "image": "vllm"}]}}
    spec = {"selector": {"matchLabels": {"app": "vllm"}}, "template": pod}
    installed(bare, [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}, "spec": spec}])
    (path,) = re.findall(r"-o (jsonpath=\S+)", page)
    patch = bare.kubectl("-n", "inference", "get", "configmap", "diag", "-o", path.replace("'", ""))
    bare.kubectl("-n", "inference", "patch", "deployment", "vllm", "-p", patch)
    made = json.loads(bare.kubectl("-n", "inference", "get", "deployment", "vllm", "-o", "json"))
    assert [each["name"] for each in made["spec"]["template"]["spec"]["containers"]] == ["vllm", "diag"]


@cluster.needed
def test_a_real_api_server_takes_and_keeps_what_each_value_makes(bare: Cluster) -> None:
    found: list[Document] = []
    for path, (mode, value) in SWITCHES.items():
        section = path.partition(".")[0]
        shown = {section: {"enabled": True}} if section in ("dashboards", "networkPolicy") else {}
        shown |= {"prometheusRule": {"enabled": True}} if path in OF_ALERTS else {}
        shown |= setting(*VOLUME) if path == "extraVolumeMounts" else {}
        base = merged(merged(BARE, MODES[mode]), shown)
        made, before = documents(merged(base, setting(path, value))), documents(base) if path in OF_ALERTS else []
        changed = [each for each in of_kind(made, "PrometheusRule") if each not in before]
        assert changed or path not in OF_ALERTS
        found += [each for each in made if each["kind"] != "PrometheusRule"] + changed[:1]
    taken = installed(bare, found, "--dry-run=server")
    assert [each for each, got in zip(found, taken, strict=True) if not kept(each, got)] == []
