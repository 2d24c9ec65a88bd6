"""vLLM's page as Ray's agent serves it: names, labels and absent counters as Ray 2.49.2 showed them with vLLM 0.32.

Read off a page of a real agent, with vLLM's own ray_wrappers in two actors.
"""

import re
from collections.abc import Iterator

TAGS = {
    "Component": "core_worker",
    "NodeAddress": "192.0.2.2",
    "ReplicaId": "q0xw1c2e",
    "SessionName": "session_2026-11-22_11-48-40_590742_32228",
    "Version": "2.49.2",
    "WorkerId": "255a708ccef7300ef83f938795ae95c5c164a1b0daac93843a7de70b",
}
_LINE = re.compile(r"vllm:(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')


def as_ray(page: str, prefix: str = "ray_vllm_", replica: str = TAGS["ReplicaId"]) -> str:
    """The lines of vLLM alone; a counter or a histogram that has not counted anything is absent."""
    return "".join(_lines(page, prefix, {**TAGS, "ReplicaId": replica, "WorkerId": f"{TAGS['WorkerId']}{replica}"}))


def _lines(page: str, prefix: str, tags: dict[str, str]) -> Iterator[str]:
    found = [match.groups() for match in map(_LINE.fullmatch, page.splitlines()) if match]
    counts = {name.removesuffix("_count"): float(value) for name, _, value in found if name.endswith("_count")}
    for name, inside, value in found:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        if name.endswith("_created") or counts.get(family) == 0 or (name.endswith("_total") and not float(value)):
            continue
        labels = sorted({**dict(_LABEL.findall(inside or "")), **tags}.items())
        written = ",".join(f'{label}="{text}"' for label, text in labels)
        yield f"{prefix}{name}{{{written}}} {value}\n"
