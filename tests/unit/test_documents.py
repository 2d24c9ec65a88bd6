"""Values that the schemas of the JSON documents forbid are null in a document, or left out."""

import json

from diag.diagnosis.decision_table import LOOK
from diag.report.documents import Document
from diag.report.gpu_sizing import BUDGET_DOCUMENT
from diag.report.gpus import DOCUMENT, GpuFinding, GpuProcess, JudgedGpu, NodeGpus
from diag.report.json import DOCTOR


def test_a_forbidden_value_is_null_and_every_document_is_json() -> None:
    finding = GpuFinding("gpu_fault", "critical", "it fell off the bus", "")
    process = GpuProcess(7, "", "unknown", float("nan"))
    gpu = JudgedGpu("0", {"name": "H100", "gpu": "0"}, [finding], [process], (), True, {"b": 1.0, "a": float("inf")})
    drawn = json.loads(DOCUMENT.text(NodeGpus("node-a", LOOK, [gpu])))["gpus"][0]
    assert drawn["findings"] == [{"id": "gpu_fault", "severity": "critical", "message": finding.message, "do": None}]
    assert drawn["processes"] == [{"pid": 7, "name": None, "role": "unknown", "bytes": None}]
    assert drawn["info"] == {"name": "H100"} and drawn["values"] == {"a": None, "b": 1.0}


def test_a_field_that_must_be_there_and_not_null_keeps_its_value() -> None:
    document, texts = Document("lint", {}), {"type": "array", "minItems": 1, "items": {"type": "string"}}
    document.schema = {"properties": {"launches": texts, "notes": texts}, "required": ["launches"]}
    assert document.of({"launches": [], "notes": []}) == {"launches": []}


def test_every_schema_names_the_schema_and_the_release_first() -> None:
    for document in (DOCTOR, DOCUMENT, BUDGET_DOCUMENT):
        assert list(document.schema["properties"])[:2] == ["schema", "diag"]
        assert document.schema["properties"]["schema"]["const"] == document.schema["$id"]
