"""The part of SARIF 2.1.0 (OASIS, errata 01) that `diag lint --format sarif` writes, as a JSON schema of our own.

OASIS's whole schema is no data of ours; what it allows for these objects is said here, and nothing else passes.
"""

from typing import Any

INDEX = {"type": "integer", "minimum": 0}
LINE = {"type": "integer", "minimum": 1}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
TEXT = {"type": "string"}
ADDRESS = {"type": "string", "pattern": "^[^ ]*$"}


def record(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties alone."""
    needed = required.split()
    return {"type": "object", "required": needed, "properties": properties, "additionalProperties": False}


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


MESSAGE = record("text", text=TEXT)
LOCATION = record(
    "physicalLocation",
    physicalLocation=record(
        "artifactLocation",
        artifactLocation=record("uri", uri=ADDRESS, uriBaseId=TEXT),
        region=record("startLine", startLine=LINE),
    ),
    logicalLocations=many(record("", name=TEXT, fullyQualifiedName=TEXT, kind=TEXT)),
)
RULE = record(
    "id",
    id=TEXT,
    shortDescription=MESSAGE,
    fullDescription=MESSAGE,
    help=MESSAGE,
    helpUri=ADDRESS,
    defaultConfiguration=record("level", level=LEVEL),
)
NOTIFICATION = record("message", message=MESSAGE, level=LEVEL, locations=many(LOCATION))
RESULT = record(
    "message ruleId",
    ruleId=TEXT,
    ruleIndex=INDEX,
    level=LEVEL,
    message=MESSAGE,
    locations=many(LOCATION),
    partialFingerprints={"type": "object", "additionalProperties": TEXT},
)
RUN = record(
    "tool results",
    tool=record("driver", driver=record("name", name=TEXT, version=TEXT, informationUri=ADDRESS, rules=many(RULE))),
    invocations=many(
        record(
            "executionSuccessful",
            executionSuccessful={"type": "boolean"},
            toolExecutionNotifications=many(NOTIFICATION),
        )
    ),
    results=many(RESULT),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
)
SCHEMA = record("version runs", **{"$schema": ADDRESS}, version={"const": "2.1.0"}, runs=many(RUN))
