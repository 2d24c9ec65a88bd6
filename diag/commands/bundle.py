"""`diag bundle`: what the next person needs of a sick server, in one file, or as an issue for vLLM's maintainers."""

import json
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, judge_observation, record_servers, site
from diag.core.errors import BadUsage
from diag.core.files import refused_in_words
from diag.core.formatting import gibibytes
from diag.diagnosis.report import Report
from diag.report import html, issue
from diag.report import json as report_json
from diag.sources.log import files as logs
from diag.sources.recording import bundle, reader
from diag.sources.source import shown_targets
from diag.vllm.command.free_text import hidden
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
_NOT_HERE = "container status and events: ask the API server (kubectl describe pod), or use diag doctor --k8s"


def run(options: ObserveOptions, file: Path | None, *, as_issue: bool) -> str:
    """Write the bundle of live servers or of a recording, and return a sentence about it, or the text of an issue.

    BadUsage for other targets, and for a file that exists.
    """
    if options.kind not in ("servers", "recording"):
        raise BadUsage("a bundle is made of live servers or of a recording: name their URLs, or its folder")
    if file and file.exists():
        raise BadUsage(f"{file} already exists: name a new file")
    with _gathered(options) as (folder, report, launch, left_out):
        host = json.loads((folder / HOST).read_text(encoding="utf-8"))
        text = issue.render(report, host, launch) if as_issue else ""
        if file:
            with refused_in_words(file), file.open("xb") as out:
                bundle.pack(folder, WHAT, left_out, out)
        said = f"{file}: {file.stat().st_size / 2**20:.1f} MiB; diagnose it with: diag doctor {file}" if file else ""
    missing = [f"left out: {each}" for each in left_out] if file else []
    return "\n".join(filter(None, [text.rstrip(), said, *missing]))


@contextmanager
def _gathered(options: ObserveOptions) -> Iterator[tuple[Path, Report, str, list[str]]]:
    """Yield a folder with all files of the bundle, the report, the launch command, and what could not be had."""
    contract, incidents = site(options.incidents, options.contract)
    with tempfile.TemporaryDirectory(prefix="diag-") as place:
        folder, left_out = Path(place) / "bundle", [_NOT_HERE]
        if options.kind == "servers":
            record_servers(options, folder)
        else:
            _copy(Path(options.targets[0]), folder)
        if options.log and options.log != logs.STDIN:
            _write_log(Path(options.log), folder / reader.LOG)
        elif not (folder / reader.LOG).exists():
            left_out.append("the log: name it with --log FILE")
        shown_as = shown_targets(options.targets) if options.kind == "servers" else options.targets[0]
        observation = reader.read(folder, options.launch, shown=shown_as)
        report = judge_observation(observation, contract, incidents).report
        if options.kind == "servers":
            report = report._replace(roll_calls=tuple(doctor.roll_calls(report, options.targets)))
            left_out += [f"stacks of {call.server}: {call.conclusion}" for call in report.roll_calls if call.unread]
        else:
            left_out.append("stacks: a recording has none")
        launch = shown(next(filter(None, observation.launch.values()), ""))
        if not (folder / HOST).exists():
            facts = _host(launch) if options.kind == "servers" else {}  # a recording may be of another host
            (folder / HOST).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (folder / "doctor.json").write_text(report_json.render(report), encoding="utf-8")
        (folder / "report.html").write_text(html.render(report), encoding="utf-8")
        yield folder, report, launch, left_out


def _copy(source: Path, folder: Path) -> None:
    """Copy the files of a recording; its texts are redacted again, since diag may not have written them."""
    folder.mkdir()
    with bundle.unpacked(source) as recording:
        place = recording if recording.is_dir() else recording.parent
        for name in filter(lambda name: (place / name).is_file(), (*logs.PAGES, HOST)):
            shutil.copyfile(place / name, folder / name)
        about = reader.read_about(place)[0].splitlines()
        (folder / reader.ABOUT).write_text("".join(f"{_without_secrets(line)}\n" for line in about), encoding="utf-8")
        if (place / reader.LOG).is_file():
            _write_log(place / reader.LOG, folder / reader.LOG)


def _without_secrets(line: str) -> str:
    """Return a line of recording.toml; of a command, its secrets are replaced, and any other line with one is empty."""
    command = _COMMAND.fullmatch(line)
    if command:
        return f"{command[1]} = {json.dumps(shown(json.loads(command[2])), ensure_ascii=False)}"
    return line if hidden(line) == line else ""


def _write_log(log: Path, to: Path) -> None:
    """Write the beginning and the end of a log, each line without secrets."""
    (found,) = logs.read_logs([str(log)])
    text = found.first + found.last
    whole = not found.last and len(text) <= FIRST + LAST
    parts = [text] if whole else [text[:FIRST], b"[... left out ...]", text[-LAST:]]
    with to.open("w", encoding="utf-8") as out:
        for part in parts:
            for line in part.decode("utf-8", "replace").splitlines():
                out.write(hidden(line) + "\n")


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
