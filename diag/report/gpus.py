"""`diag gpus` in print: one screen of plain text, and JSON of the schema "diag.gpus/1" (diag.gpus.schema.json)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diag.core.formatting import gibibytes, listed, plural, quantity
from diag.core.incident import RANK, Severity
from diag.diagnosis.decision_table import LOOK
from diag.report.documents import Document
from diag.report.layout import labelled, paragraph, table
from diag.report.spans import states

STATUS = {"healthy": 0, "no_incident": 0, "warning": 1, "critical": 2, "unknown": 3}
MOST = 8
"""Rows about findings, and about processes."""
_COLUMNS = {
    "memory used": ("diag_gpu_memory_used_bytes", "bytes"),
    "busy": ("diag_gpu_utilization_ratio", "share"),
    "power": ("diag_gpu_power_watts", "watts"),
    "limit": ("diag_gpu_power_limit_watts", "watts"),
    "temp.": ('diag_gpu_temperature_celsius{sensor="gpu"}', "celsius"),
}


class GpuFinding(NamedTuple):
    """A finding about a GPU: an incident or a check of `diag preflight` by its id, and the first thing to do."""

    id: str
    severity: Severity
    message: str
    do: str


class GpuProcess(NamedTuple):
    """A process that holds memory of a GPU, in bytes; `role` is "other" or "unknown" for one that is not vLLM's."""

    pid: int
    name: str
    role: str
    memory: float


class JudgedGpu(NamedTuple):
    """A GPU: its labels, what is wrong, who holds its memory, the incidents and checks without an answer, its values.

    `values` are the last samples, by the name of the series; `is_judged` is False if no incident could be judged.
    """

    gpu: str
    info: Mapping[str, str]
    findings: Sequence[GpuFinding]
    processes: Sequence[GpuProcess]
    not_seen: Sequence[str]
    is_judged: bool
    values: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """The worst of its findings; else "healthy" if nothing was left unseen, "unknown" if no incident was judged."""
        if self.findings:
            return max((finding.severity for finding in self.findings), key=lambda severity: RANK[severity])
        return "unknown" if not self.is_judged else "no_incident" if self.not_seen else "healthy"


class NodeGpus(NamedTuple):
    """The GPUs of a host, observed for `seconds`."""

    host: str
    seconds: float
    gpus: Sequence[JudgedGpu]

    @property
    def verdict(self) -> str:
        """The worst of its GPUs' verdicts."""
        return min((gpu.verdict for gpu in self.gpus), key=[*states("gpu")].index)


def render(node: NodeGpus) -> str:
    """Render as plain text: the verdict of the host, a row for each GPU, what to do, who holds memory."""
    kinds = Counter(gpu.info.get("name", "GPU that does not answer") for gpu in node.gpus)
    well = sum(STATUS[gpu.verdict] == 0 for gpu in node.gpus)
    what = listed([f"{count} x {name}" for name, count in kinds.items()])
    verdict, number = states("gpu")[node.verdict], plural(len(node.gpus), "GPU")
    head = f"{verdict}  {node.host}: {well} of {number} without an incident ({what})"
    rows = [("GPU", "verdict", *_COLUMNS, "findings")]
    for gpu in node.gpus:
        cells = (quantity(gpu.values[of], unit) if of in gpu.values else "-" for of, unit in _COLUMNS.values())
        ids = ", ".join(dict.fromkeys(finding.id for finding in gpu.findings))
        rows.append((gpu.gpu, gpu.verdict, *cells, ids or "-"))
    lines = [*paragraph(head), "", *table(rows)]
    told: dict[GpuFinding, list[str]] = {}
    for gpu in node.gpus:
        for finding in gpu.findings:
            told.setdefault(finding, []).append(gpu.gpu)
    worst = sorted(told.items(), key=lambda item: -RANK[item[0].severity])
    for finding, gpus in worst[:MOST]:
        lines += ["", *labelled(finding.severity.upper(), [f"GPU {listed(gpus)}: {finding.message}"])]
        lines += labelled("Do now", [finding.do] if finding.do else [])
    lines += [f"and {plural(len(worst) - MOST, 'more finding')} (--json)"] if len(worst) > MOST else []
    holders = sorted(((held, gpu.gpu) for gpu in node.gpus for held in gpu.processes), key=lambda one: -one[0].memory)
    texts = [
        f"GPU {gpu}: {gibibytes(held.memory, 1)} by process {held.pid} ({held.name or 'not visible here'}), {held.role}"
        for held, gpu in holders[:MOST]
    ]
    unseen = dict.fromkeys(name for gpu in node.gpus if gpu.verdict != "critical" for name in gpu.not_seen)
    why = f"too short: {LOOK:.0f} s are needed" if node.seconds + 2 < LOOK else "the driver does not tell"
    lines += ["", *labelled("Memory held", texts or ["by no process that the driver lists"])]
    lines += labelled("Not seen", [f"{listed(list(unseen))} ({why})"] if unseen else [])
    return "\n".join([*lines, *labelled("Source", [f"the driver, for {quantity(node.seconds, 'seconds')}"])]) + "\n"


DOCUMENT = Document(
    "gpus",
    {
        "NodeGpus": {"exit_status": lambda node: STATUS[node.verdict]},
        "JudgedGpu": {
            "labels": lambda gpu: {name: value for name, value in gpu.info.items() if name not in ("__name__", "gpu")},
            "samples": lambda gpu: dict(sorted(gpu.values.items())),
        },
    },
)
