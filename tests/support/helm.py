"""The chart of deploy/helm/diag rendered by Helm, and the schemas of Kubernetes and the Prometheus Operator."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml
from support.paths import DATA, ROOT

CHART = ROOT / "deploy" / "helm" / "diag"
KUBERNETES = "1.30"
Values = Mapping[str, Any]
Document = dict[str, Any]


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def merged(values: Values, over: Values) -> Document:
    """Maps are merged, as Helm does; everything else is replaced."""
    both = {
        key: merged(values[key], value) if isinstance(value, dict) and isinstance(values.get(key), dict) else value
        for key, value in over.items()
    }
    return {**values, **both}


def texts(values: Values, name: str = "diag", namespace: str = "inference") -> dict[str, str]:
    """Return the output of each template by its name; HelmValuesError or HelmRenderError for a refused value."""
    made = chart().render(dict(values), name=name, namespace=namespace)
    return {path.removeprefix("diag/templates/"): text for path, text in made.items()}


def documents(values: Values, most_dashboards: int | None = 1, **release: str) -> list[Document]:
    """Every object that would be installed; of the dashboards, which are all alike and large, only the first."""
    found: list[Document] = []
    for name, text in texts(values, **release).items():
        if name.endswith(".yaml"):
            objects = filter(None, yaml.load_all(text, Loader=yaml.CSafeLoader))
            found += islice(objects, most_dashboards if name == "dashboards.yaml" else None)
    return found


def of_kind(found: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in found if document["kind"] == kind]


def validate(document: Document) -> None:
    """Validate an object by the schema of its kind; refuse a field that the schema does not name."""
    operators = _operators().get(document["kind"])
    if operators:
        operators.validate(document)
    else:
        assert kubernetes_validate.validate(document, KUBERNETES, strict=True)
    if "patch.yaml" in document.get("data", {}):
        validate(_patched(without_directives(yaml.safe_load(document["data"]["patch.yaml"]))))


def definitions() -> list[Document]:
    """The custom resources that kube-prometheus-stack brings, as far as the chart makes some.

    Without their empty defaults, which Kubernetes 1.20 takes for null.
    """
    found = []
    for kind, schema in json.loads(json.dumps(_schemas()).replace('"default": "", ', "")).items():
        names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower(), "listKind": f"{kind}List"}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        spec = {"group": "monitoring.coreos.com", "names": names, "scope": "Namespaced", "versions": [version]}
        about = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
        found.append({**about, "metadata": {"name": f"{names['plural']}.monitoring.coreos.com"}, "spec": spec})
    return found


def without_directives(patch: Any) -> Any:
    """A patch without what it takes away."""
    if isinstance(patch, list):
        return [without_directives(each) for each in patch if not isinstance(each, dict) or "$patch" not in each]
    if isinstance(patch, dict):
        return {key: without_directives(value) for key, value in patch.items() if value is not None}
    return patch


def _patched(patch: Document) -> Document:
    """A Deployment of nothing but what the patch has, and of what it must have."""
    labels = {"app": "vllm"}
    patch["spec"]["template"].setdefault("metadata", {})["labels"] = labels
    patch["spec"]["template"]["spec"]["containers"][0]["image"] = "vllm/vllm-openai:latest"
    spec = {**patch["spec"], "selector": {"matchLabels": labels}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}, "spec": spec}


@cache
def _operators() -> dict[str, jsonschema.Draft202012Validator]:
    return {kind: jsonschema.Draft202012Validator(_strict(schema)) for kind, schema in _schemas().items()}


def _schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads((DATA / "prometheus-operator.schemas.json").read_text())
    return schemas


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**closed, **{key: _strict(value) for key, value in schema.items()}}
