"""`diag gpus`: judge the GPUs of this host, with or without a server, by the incidents and checks that know GPUs."""

import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from diag.commands.observe import judge_observation, site
from diag.core.contract import Contract
from diag.core.errors import BadUsage, Unreachable
from diag.core.incident import RANK, Severity
from diag.core.metric_families import Sample
from diag.diagnosis.report import Report
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.process.server import Owner
from diag.exporter.process.table import ProcessTable, read_table
from diag.exposition import labelled
from diag.exposition.scrapes import Target
from diag.knowledge.signals.gpu import MUCH_MEMORY
from diag.preflight.check import GpuSamples, PreflightFacts
from diag.preflight.checks import CHECKS, results
from diag.preflight.machine import Machine
from diag.report.answer import choose_actions
from diag.report.gpus import GpuFinding, GpuProcess, JudgedGpu, NodeGpus
from diag.report.sentences import titled
from diag.sources.observation import Origin, observation
from diag.vllm.flags.registry import default, versions

_CHECKS = ("memory_errors", "pcie_width", "power_limit", "persistence_mode", "idle_temperature")
_SHOW_HEALTH = ("memory_errors", "pcie_width")
"""Checks without which a GPU is not called healthy; a temperature before any load is no part of a busy GPU's health."""
_SEVERITIES: Mapping[str, Severity] = {"fail": "critical", "warn": "warning"}
_OF_A_GPU = ("instance", "gpu")
_NOT_BUSY = 0.05
"""Share of a GPU's time below which no process can take a fifth of it."""
_SHARE = "--gpu-memory-utilization"


def run(select: Sequence[str], duration: float, every: float, *site_files: Any) -> NodeGpus:
    """Read the GPUs for `duration` seconds and judge each; `select` are indices or UUIDs, all if it is empty.

    Raises Unreachable if no driver answers, BadUsage for a selection that names no GPU.
    """
    contract, incidents = site(*site_files)
    host = platform.node() or "this host"
    target, last = Target(host), list[Sample]()
    collector = GpuCollector(tuple(select), _Owners(), lambda: None)
    collector.start()
    begun = time.monotonic()
    try:
        while True:
            collected = collector.collect()
            if not any(name == "diag_gpu_info" for name, *_ in collected.samples):
                refuse = BadUsage if select and "names no GPU" in collected.problem else Unreachable
                raise refuse(f"no GPU to judge: {collected.problem or 'no driver answers, no GPU is on the PCI bus'}")
            last = list(_as_for_a_server(collected.samples))
            target.note(round(time.time() * 1000), labelled(last))
            if time.monotonic() - begun + every > duration:
                break
            time.sleep(every)
    finally:
        collector.stop()
    seen = observation(Origin("scrape", host, every), [target], {})
    known = tuple(incident for incident in incidents if incident.per == _OF_A_GPU)
    report = judge_observation(seen, contract, known).report
    by_gpu: dict[str, dict[str, list[tuple[Mapping[str, str], float]]]] = defaultdict(lambda: defaultdict(list))
    for labels, value in labelled(last):
        if "gpu" in labels:
            by_gpu[labels["gpu"]][labels["__name__"]].append((labels, value))
    in_order = sorted(by_gpu.items(), key=lambda gpu: (len(gpu[0]), gpu[0]))  # 10 behind 9
    gpus = [_judged(number, samples, report, contract) for number, samples in in_order]
    return NodeGpus(host, report.observed.end - report.observed.start, tuple(gpus))


class _Owners:
    """The processes of vLLM on this host, whichever server they belong to: their memory is no stranger's."""

    def __init__(self) -> None:
        self._table: ProcessTable = {}

    def __call__(self) -> Mapping[int, Owner]:
        self._table = read_table(self._table, {})
        roles = {pid: entry.role or "api_server" * entry.serves for pid, entry in self._table.items()}
        return {pid: Owner(role, "") for pid, role in roles.items() if role}


def _as_for_a_server(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples as if a server with vLLM's default share of the memory was to use each GPU.

    Where the GPU itself shows that nobody holds its memory or computes, the driver need not list its processes: then a
    process of the server to come, with the PID 0, uses none of either.
    """
    by_gpu = {(name, labels): value for name, labels, value in samples}
    for name, labels, value in samples:
        if name != "diag_gpu_serving":
            yield name, labels, value
        if name == "diag_gpu_info":
            gpu = labels[:2]
            yield "diag_gpu_serving", gpu, 1.0
            used, total = (by_gpu.get((f"diag_gpu_memory_{kind}_bytes", gpu)) for kind in ("used", "total"))
            if used is not None and total and used < MUCH_MEMORY * total:
                yield "diag_gpu_process_memory_bytes", (*gpu, "0", "worker", ""), 0.0
            if by_gpu.get(("diag_gpu_utilization_ratio", gpu), 1.0) < _NOT_BUSY:
                yield "diag_gpu_process_utilization_ratio", (*gpu, "0", "worker", ""), 0.0
    yield "diag_vllm_config", (_SHARE.strip("-").replace("-", "_"),), float(default(_SHARE, versions()[-1]) or 0.9)


def _judged(number: str, samples: GpuSamples, report: Report, contract: Contract) -> JudgedGpu:
    of_gpu = [finding for finding in report.findings if dict(finding.diagnosis.subject).get("gpu") == number]
    findings, unseen = [], [finding.diagnosis.incident.id for finding in of_gpu if finding.diagnosis.state == "unknown"]
    for finding in of_gpu:
        if finding.diagnosis.state == "present" and RANK[finding.diagnosis.severity]:
            do = next(iter(choose_actions(finding, report).do_now), "")
            names, incident = ", ".join(finding.diagnosis.culprits), finding.diagnosis.incident
            message = f"{titled(incident)}{f': {names}' * bool(names)}"
            findings.append(GpuFinding(incident.id, finding.diagnosis.severity, message, do))
    facts = PreflightFacts(contract, (), versions()[-1], gpus=samples)
    for check in (CHECKS[name] for name in _CHECKS if name not in contract.preflight.ignore):
        for result in results(check, facts):
            unseen += [check.id] * (result.state == "not checked" and check.id in _SHOW_HEALTH)
            if severity := _SEVERITIES.get(result.state):
                message = result.message.removeprefix(f"GPU {number} ").removesuffix(f" on GPU {number}")
                findings.append(GpuFinding(check.id, severity, message, result.do))
    processes = [
        GpuProcess(int(labels["pid"]), Machine().process_name(labels["pid"]), labels["role"], value)
        for labels, value in samples.get("diag_gpu_process_memory_bytes", ())
        if labels["pid"] != "0"
    ]
    hidden = sum(process.memory for process in processes if process.role == "unknown")
    if hidden >= MUCH_MEMORY * sum(value for _, value in samples.get("diag_gpu_memory_total_bytes", ())) > 0:
        unseen = sorted({*unseen, "gpu_memory_contended"})  # its owner may be the server to come, or a stranger
    judged = {finding.diagnosis.incident.id for finding in of_gpu} - {*unseen}
    info = next((labels for labels, _ in samples.get("diag_gpu_info", ())), {})  # a GPU that is lost has none
    values = {}
    drawn = (rows for name, rows in samples.items() if name not in ("diag_gpu_info", "diag_gpu_serving"))
    for labels, value in chain.from_iterable(drawn):
        if "pid" not in labels:
            more = ",".join(
                f'{name}="{text}"' for name, text in labels.items() if name not in ("__name__", "gpu", "uuid")
            )
            values[labels["__name__"] + f"{{{more}}}" * bool(more)] = value
    return JudgedGpu(number, info, tuple(findings), tuple(processes), tuple(unseen), bool(judged), values)
