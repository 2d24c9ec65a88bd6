"""The arguments and answers of the tools, as JSON schemas; an answer may have more than its schema names."""

from typing import Any

Schema = dict[str, Any]


def text(says: str, longest: int = 200) -> Schema:
    """An argument that is a text."""
    return {"type": "string", "description": says, "minLength": 1, "maxLength": longest}


def _list(of: Schema | None = None) -> Schema:
    return {"type": "array", "items": {"type": "string"} if of is None else of}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def _answer(*required: str, **properties: Schema) -> Schema:
    cut = {"left_out": {**_list(), "description": "what was cut: ask with detail, or for less"}}
    return {"type": "object", "required": list(required), "properties": {**properties, **cut}}


_STRING: Schema = {"type": "string"}
_MAYBE: Schema = {"type": ["string", "null"]}
_NUMBER: Schema = {"type": ["number", "null"]}
_YES: Schema = {"type": "boolean"}
_SEVERITY: Schema = {"enum": ["info", "warning", "critical"]}

DETAIL: Schema = {"type": "boolean", "description": "all that is known, in up to ten times as many tokens"}
TARGET = text("URL, name of a recording, or prometheus: one of the targets that the server's instructions list")
COMMAND = text(
    "the launch command itself (vllm serve MODEL --flag value), a script or a manifest; no file name", 65_536
)
VERSION = text("vLLM release: 0.32.0")
SCOPE = {
    "at": text("with the target prometheus: end of the time window, 2026-11-20T03:12Z or -2h; default now"),
    "window": text("with the target prometheus: length of the window, 15m or 24h"),
    "instance": text("with the target prometheus: regular expression of the servers' instance label"),
    "model": text("with the target prometheus: regular expression of the model's name"),
}
SIZES = {
    "gpu": text("h100, a100-80, l40s ...; default: this host's"),
    "gpu_memory": text("memory of one GPU: 79.1GiB"),
    "all_gpus": {"type": "boolean", "description": "compare all GPUs that diag knows"},
    "context": text("tokens of each request: 32k"),
    "concurrency": {"type": "integer", "minimum": 1, "maximum": 2**20, "description": "requests at a time"},
}

_DIAGNOSIS = _object(
    incident=_STRING,
    state={"enum": ["present"]},
    severity=_SEVERITY,
    subject={"type": "object", "additionalProperties": _STRING},
    primary=_YES,
    explained_by=_MAYBE,
    since={**_NUMBER, "description": "unix seconds; null: before the first scrape"},
    until=_NUMBER,
    ongoing=_YES,
    title=_STRING,
    impact=_STRING,
    symptoms=_list({"type": "object"}),
    ruled_out=_list({}),
    not_ruled_out=_list({}),
    quotes=_list({}),
    fixes=_list({"type": "object"}),
    relaunch=_MAYBE,
)
REPORT = _answer(
    *("verdict", "headlines", "diagnoses", "observed"),
    verdict={"enum": ["healthy", "warning", "critical", "unknown"]},
    headlines={**_list(), "description": "the verdict in a line for each primary incident"},
    shared={**_list(), "description": "the label that the ill servers of a fleet have and its healthy ones lack"},
    observed={"type": "object"},
    diagnoses={**_list(_DIAGNOSIS), "description": "the incidents that are present, primary ones first"},
    unknown={**_list(), "description": "why finding nothing does not mean health"},
    not_collected={**_list(), "description": "telemetry that is missing, and how to get it"},
    notes=_list(),
    normal=_list(),
)
PAGE = _answer(
    title=_STRING,
    sections=_list(_object(title=_STRING, text=_STRING)),
    other_sections=_list(),
    incidents=_list(),
)
FINDINGS = _answer(
    *("vllm_version", "findings", "corrected_command"),
    vllm_version=_STRING,
    findings=_list(
        _object(rule=_STRING, severity={"enum": ["error", "warning", "info"]}, message=_STRING, fix=_STRING)
    ),
    corrected_command=_MAYBE,
    errors_left={"type": "integer"},
    not_checked=_list(),
)
MEMORY = _answer(
    "model",
    model=_STRING,
    verdict={"enum": ["fits", "does not fit", "cannot tell"]},
    reasons=_list(),
    notes=_list(),
    rows=_list({"type": "object"}),
    suggestions=_list(_object(flag=_STRING, value=_STRING)),
    choices=_list(),
    configurations=_list({"type": "object"}),
)
CONFIGURATION = _answer(
    "servers",
    servers=_list(_object(instance=_STRING, version=_MAYBE, model=_MAYBE, settings=_list({"type": "object"}))),
    notes=_list(),
)
COMPARISON = _answer(
    *("verdict", "headlines", "servers"),
    verdict={"enum": ["fixed", "better", "no effect", "worse", "not comparable"]},
    headlines=_list(),
    servers=_list({"type": "object"}),
    unmatched=_list(),
)
