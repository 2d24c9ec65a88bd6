"""`diag bundle`: what the next person needs of a sick server, in one file, or as an issue for vLLM's maintainers."""

import json
import os
import platform
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, judge_observation, record_servers, site
from diag.core.errors import BadUsage
from diag.core.files import read_json, refused_in_words, written_bytes, written_whole
from diag.core.formatting import gibibytes
from diag.diagnosis.report import Report
from diag.log import files as logs
from diag.report import html, markdown
from diag.report import json as report_json
from diag.sources.recording import bundle, reader
from diag.sources.source import SCRAPE_TIMEOUT, shown_targets
from diag.vllm.command.free_text import hidden, hidden_lines
from diag.vllm.command.shown import shown

HOST = "host.json"
WHAT = {
    "metrics.prom.gz": "the pages of the server and its host, as diag record writes them",
    "recording.toml": "release, model, configuration and launch command, without secrets",
    "server.log": "the beginning and the end of the log, without secrets",
    HOST: "the host: kernel, CPUs, memory, versions of vLLM, PyTorch and CUDA",
    "doctor.json": "the report of diag doctor, with the stacks of the processes",
    "report.html": "the same report as a page with plots",
}
FIRST, LAST = 2**20, 2**22
"""Bytes of the beginning and of the end of a log: the configuration and the first error, and the last minutes."""
_COMMAND = re.compile(r'(launch|process) = ("(?:[^"\\]|\\["\\/bfnrt])*")')
"""A command of recording.toml as a string that TOML and JSON write alike."""
MOST_HOST_BYTES = 2**20
_BODY = re.compile(r"\b((?:Received request|Generated response|Request) \S{1,200}?(?: [^:\n]{1,60})?:) .*")
_LEFT_OUT = r"\1 [left out]"
"""Lines of vLLM in which prompts and answers stand, with --enable-log-requests and VLLM_REQUEST_BODY_LOG_LEVEL."""
POD = "pod-"
"""The beginning of the names of files about pods; behind it the pod, its port, and one of OF_A_POD."""
OF_A_POD = {
    ".json": "a pod: launch, image, limits, probes, status and events, without secrets",
    ".previous.log": "both ends of the log of the previous run of a pod's container, without secrets",
    ".log": "both ends of the log of a pod's container, without secrets",
}
_NOT_HERE = "container status and events: ask the API server (kubectl describe pod), or use diag bundle --k8s"
_NOT_IN_PODS = (
    "GPUs, processes and the host: the API server does not show them",
    "annotations and labels of the pods, and the values of their environment variables except harmless settings",
)


def run(options: ObserveOptions, file: Path | None, *, as_issue: bool) -> str:
    """Write the bundle of servers, pods or a recording, and return a sentence about it, or the text of an issue.

    BadUsage for other targets, and for a file that exists.
    """
    if options.kind not in ("servers", "pods", "recording"):
        raise BadUsage("a bundle is made of live servers or of a recording: name their URLs, its folder, or --k8s")
    if file and os.path.lexists(file):
        raise BadUsage(f"{file} already exists: name a new file")
    with _gathered(options) as (folder, report, launch, left_out):
        text = markdown.render_issue(report, _read_host(folder / HOST), launch) if as_issue else ""
        if file:
            with refused_in_words(file), written_bytes(file, is_new=True) as out:
                bundle.pack(folder, {**WHAT, **_about_pods(folder)}, left_out, out)
        said = f"{file}: {file.stat().st_size / 2**20:.1f} MiB; diagnose it with: diag doctor {file}" if file else ""
    missing = [f"left out: {what}" for what in left_out] if file else []
    return "\n".join(filter(None, [text.rstrip(), said, *missing]))


@contextmanager
def _gathered(options: ObserveOptions) -> Iterator[tuple[Path, Report, str, list[str]]]:
    """Yield a folder with all files of the bundle, the report, the launch command, and what could not be had."""
    contract, incidents = site(options.incidents, options.contract)
    with tempfile.TemporaryDirectory(prefix="diag-") as place:
        folder, left_out = Path(place) / "bundle", list[str]()
        if options.kind == "recording":
            _copy(Path(options.targets[0]), folder)
            shown_as = options.targets[0]
        elif options.kind == "pods":
            from diag.sources.kubernetes.servers import MOST_PODS_KEPT, find, gather

            pods = find(options.k8s, options.timeout or SCRAPE_TIMEOUT)
            record_servers(options, folder, pods)
            shown_as = pods.shown
            left_out += _NOT_IN_PODS
            summaries = {}
            for evidence in gather(pods, FIRST):
                summaries[evidence.shown] = evidence.summary
                _write_json(evidence.facts, folder / f"{POD}{evidence.name}.json")
                for run, ends in evidence.logs.items():
                    _write_ends(ends.first, ends.last, folder / f"{POD}{evidence.name}.{run}")
                left_out += evidence.missing
            _write_json(summaries, folder / HOST)
            if len(pods.servers) > MOST_PODS_KEPT:
                many = len(pods.servers) - MOST_PODS_KEPT
                left_out.append(f"status, events and logs of {many} more pods: name a selector")
        else:
            record_servers(options, folder)
            shown_as = shown_targets(options.targets)
        has_pods = any(_about_pods(folder))
        if not has_pods:
            left_out.append(_NOT_HERE)
        if options.log and options.log != logs.STDIN:
            _write_log(Path(options.log), folder / reader.LOG)
        elif not has_pods and not (folder / reader.LOG).exists():
            left_out.append("the log: name it with --log FILE")
        observation = reader.read(folder, options.launch, shown=shown_as)
        report = judge_observation(observation, contract, incidents).report
        launch = shown(next(filter(None, observation.launch.values()), ""))
        if options.kind == "servers":
            report = report._replace(roll_calls=tuple(doctor.roll_calls(report, options.targets)))
            left_out += [f"stacks of {call.server}: {call.conclusion}" for call in report.roll_calls if call.unread]
        elif options.kind == "pods":
            command = f"diag doctor --k8s {shlex.quote(options.k8s)} --stacks"
            left_out.append(f"stacks: {command} prints the command that reads them in each pod")
        else:
            left_out.append("stacks: a recording has none")
        if not (folder / HOST).exists():
            # a recording may be of another host
            _write_json(_host(launch) if options.kind == "servers" else {}, folder / HOST)
        _write(report_json.render(report), folder / "doctor.json")
        _write(html.render(report), folder / "report.html")
        yield folder, report, launch, left_out


def _about_pods(folder: Path) -> dict[str, str]:
    """Return the files about pods, each with its description."""
    files = sorted(path.name for path in folder.glob(f"{POD}*"))
    kinds = {name: next((end for end in OF_A_POD if name.endswith(end)), "") for name in files}
    return {name: OF_A_POD[end] for name, end in kinds.items() if end}


def _copy(source: Path, folder: Path) -> None:
    """Copy the files of a recording; its texts are redacted again, since diag may not have written them."""
    folder.mkdir()
    with bundle.unpacked(source) as recording:
        place = recording if recording.is_dir() else recording.parent
        for name in logs.PAGES:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
        about = []
        for line in reader.read_about(place)[0].removesuffix("\n").split("\n"):
            if command := _COMMAND.fullmatch(line):
                about.append(f"{command[1]} = {json.dumps(shown(json.loads(command[2])), ensure_ascii=False)}\n")
            else:  # a line with a secret is empty
                about.append(f"{line if hidden(line) == line else ''}\n")
        _write("".join(about), folder / reader.ABOUT)
        if (place / HOST).is_file():
            _write_json(_read_host(place / HOST), folder / HOST)
        for name in (reader.LOG, *_about_pods(place)):
            if (place / name).is_file():
                _write_log(place / name, folder / name)


def _read_host(file: Path) -> dict[str, str]:
    """Return the facts about a host, without secrets; none if the file has another content."""
    try:
        facts = read_json(file, MOST_HOST_BYTES)
    except (OSError, ValueError):
        return {}
    rows = facts.items() if isinstance(facts, dict) else ()
    return {hidden(name): hidden(str(fact)) for name, fact in rows if fact is not None}


def _write_log(log: Path, to: Path) -> None:
    (ends,) = logs.read_logs([str(log)])
    _write_ends(ends.first, ends.last, to)


def _write_ends(first: bytes, last: bytes, to: Path) -> None:
    """Write whole lines of the beginning and of the end of a log, each without secrets."""
    text = first + last
    parts = [text]
    if last or len(text) > FIRST + LAST:  # a part of a line may lack the name before a secret
        parts = [text[:FIRST].rpartition(b"\n")[0], b"[... left out ...]", text[-LAST:].partition(b"\n")[2]]
    with to.open("w", encoding="utf-8", newline="") as out:
        for part in parts:
            lines = part.decode("utf-8", "replace").removesuffix("\n").split("\n")  # no other character ends one
            out.writelines(f"{line}\n" for line in hidden_lines(_BODY.sub(_LEFT_OUT, line) for line in lines))


def _write_json(content: Any, to: Path) -> None:
    _write(json.dumps(content, indent=1) + "\n", to)


def _write(text: str, to: Path) -> None:
    with written_whole(to) as out:
        out.write(text)


def _host(launch: str) -> dict[str, Any]:
    """Return facts about this host, and the releases beside the interpreter of the launch."""
    from diag.preflight.machine import Machine, wheel

    machine = Machine()
    python = next((word for word in launch.split() if word.startswith("/")), shutil.which("vllm") or "")
    return {
        "system": platform.platform(),
        "cpus": machine.cores,
        "memory": gibibytes(machine.memory_total) if machine.memory_total else None,
        "shared_memory_free": gibibytes(machine.shared_memory_free() or 0),
        **(wheel(python)._asdict() if python else {}),
    }
