"""Fuzz targets: for each kind of input a function of bytes, which returns the texts that it would show.

Every foreign text goes through the code that meets it first. Errors of diag's own (diag/core/errors.py, and the two by
which a page or a server's answer counts as a failed one) are answers; anything else that is raised is a find.
"""

import asyncio
import csv
import gzip
import io
import json
import os
import re
import shutil
import socket
import tarfile
import tempfile
import threading
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from fuzz.answers import good, odd
from gpu import judge
from kubernetes.config import kube_config
from mcp import Client as Agent
from support import bad_servers, promql_cases, rewriting
from support.bad_servers import Reply, Request
from support.exporter_server import ANYWHERE, SAYING
from support.secrets import corpus, placed
from yaml import YAMLError, safe_load

from diag import promql
from diag.commands import budget, explain, lint
from diag.commands.mcp.server import DiagServer
from diag.commands.mcp.targets import AllowedTargets, own_texts
from diag.commands.observe import ObserveOptions, judge_observation, look, site, take_snapshot
from diag.commands.options import BudgetOptions, RampOptions
from diag.commands.ramp import run as run_ramp
from diag.core.contract import Contract, apply_overrides
from diag.core.contract import read as read_contract
from diag.core.errors import DiagError
from diag.core.files import parse_json, read_yaml
from diag.core.incident import Fix, Incident, LookAlike, Signal, judged
from diag.diagnosis import configuration, fleet
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report, Snapshot
from diag.diagnosis.roll_call import roll_call
from diag.exporter.http_server import PageServer
from diag.exporter.nccl import NcclStatus, NotRas, nccl_samples, read_status
from diag.exporter.process import stacks, table
from diag.exporter.process.kernel import control_group, last_vllm_kill
from diag.exporter.process.server import Owner
from diag.exporter.process.table import ProcessEntry
from diag.exporter.vllm_page import PageReader
from diag.exporter.web_config import AccessFiles
from diag.exposition import NotMetrics, plain
from diag.exposition.scrapes import Parser
from diag.http import prometheus_api
from diag.http.address import Credentials, parse
from diag.http.client import Client
from diag.http.failure import VLLM, Failure
from diag.http.vllm_server import VllmServer
from diag.knowledge.catalog import CatalogEntry, check, load
from diag.knowledge.other_engines import program_of_models
from diag.log.memory_sizes import read_memory_log
from diag.log.tail import LogTail
from diag.normal.baseline import learn, save
from diag.normal.baseline import read as read_baseline
from diag.normal.comparison import by_baseline
from diag.preflight.check import NotChecked, PreflightFacts
from diag.preflight.telemetry import pager_route, rules_loaded, scraped
from diag.ramp.comparison import compare, trend
from diag.report import html, markdown, ramps, settings, terminal
from diag.report import json as as_json
from diag.report import ramp as ramp_report
from diag.sources import kept_ramp
from diag.sources.kubernetes.cluster import Api, Place, cluster_of
from diag.sources.kubernetes.servers import find_with, gather
from diag.sources.recording.bundle import MAGIC, pack, unpacked
from diag.sources.recording.reader import read as read_recording
from diag.sources.source import open_prometheus
from diag.vllm.command.free_text import hidden
from diag.vllm.command.shown import shown
from diag.vllm.running_config import ServerFacts, read_launch, settle

ROOT = Path(__file__).parents[2]
CORPUS, RECORDINGS = Path(__file__).parent / "corpus", ROOT / "tests" / "recordings"
ANSWERS = (DiagError, NotMetrics, Failure)
MARKER = "mArKeR7secret"
"""A secret that the targets are given and never show."""
GPU_FILES = ("driver_calls.json", "ceilings.json", judge.MISSING, "run/metrics.prom", "run/recording.toml")
LAUNCH = f"HF_TOKEN={MARKER} vllm serve org/m --api-key {MARKER} --max-num-seqs 8"
FILES = ("metrics.prom", "recording.toml", "server.log")
MOST_QUOTED = 2**16
"""Characters beside the secrets: no text that diag quotes is longer."""
BETWEEN = b"\n=== next file\n"
"""The separator of the files of a recording in one text."""
prometheus_api._PAUSES = (0.0, 0.0)  # nobody is overloaded here


class Target(NamedTuple):
    """`shows` is what is fuzzed; `seeds` yields texts to begin with. `seconds` of CPU time are enough for any input."""

    shows: Callable[[bytes], str]
    seeds: Callable[[], Iterator[bytes]]
    seconds: float = 5.0


def page(text: bytes) -> str:
    """A metrics page, and the same again after a good one, as the doctor and the exporter read it."""
    parser, reader = Parser("host:8000"), PageReader()
    for content in (text, _good_page(), text):
        with suppress(*ANSWERS):
            parser.parse(content)
        with suppress(*ANSWERS):
            reader.read(content, ServerFacts(launch=LAUNCH))
    return str(parser.labels)


def log(text: bytes) -> str:
    """A server's log, as the exporter follows it and as `diag budget --log` reads it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        tail = LogTail(file.name)
        tail.catch_up()
        read_memory_log(file.name)
        return plain(tail.collect().samples).decode()


def command(text: bytes) -> str:
    """A launch command: linted, read for its settings, and what is shown of it."""
    words = f"HF_TOKEN={MARKER} {text.decode('utf-8', 'replace')}"
    hidden(words)
    told = shown(words)
    with suppress(*ANSWERS):
        told += str(read_launch(words))
    return told + lint.run(words, lint.LintOptions(vllm_version="0.32.0"), as_json=True)[0]


def secrets(text: bytes) -> str:
    """A secret in every place where one may stand, between lines that somebody else wrote."""
    words = text.decode("utf-8", "replace")[:MOST_QUOTED]
    return hidden("\n".join([words, *placed(MARKER), words]))


def yaml(text: bytes) -> str:
    """A manifest, a Compose file or a --config file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.yaml")
        file.write_bytes(text)
        return lint.run(str(file), lint.LintOptions(vllm_version="0.32.0"), as_json=False)[0]


def notation(text: bytes) -> str:
    """A launch as Python, a Dockerfile, variables or JSON: linted as a file, and what is shown of the text."""
    told = shown(text.decode("utf-8", "replace"))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("server.py", "Dockerfile", "server.env", "server.json"):
            file = Path(folder, name)
            file.write_bytes(text)
            with suppress(*ANSWERS):
                told += lint.run(str(file), lint.LintOptions(vllm_version="0.32.0"), as_json=False)[0]
    return told


def toml(text: bytes) -> str:
    """A diag.toml."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(text)
        file.flush()
        contract = read_contract(Path(file.name))
        lint.ignored_rules((), contract)
        return str([incident.id for incident in apply_overrides(load(), contract)])


def baseline(text: bytes) -> str:
    """A baseline file, compared with and added to."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "normal.json")
        file.write_bytes(text)
        known = read_baseline(file)
        save(file, known)
        report, queries, _ = _healthy()
        return _every_form(report._replace(normality=by_baseline(queries, read_baseline(file), str(file))))


def expression(text: bytes) -> str:
    """An expression of a user's incident file: checked, then evaluated."""
    words = text.decode("utf-8", "replace")
    promql.parse.cache_clear()  # nobody else has so many expressions
    with suppress(*ANSWERS):
        check([CatalogEntry(_incident(words), Path("users_own.py"))], {})
    parsed = promql.parse(words)
    promql.metric_names(parsed), promql.instant_selectors(parsed), promql.output_labels(parsed)
    promql.add_matchers(words, 'instance="a:8000"')
    return str(promql.evaluate(parsed, _samples(), np.arange(5) * 60_000 + promql_cases.START + 1_200_000).labels)


def recording(text: bytes) -> str:
    """The folder of a recording: judged, and shown in every form."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip(FILES, text.split(BETWEEN), strict=False):
            Path(folder, name).write_bytes(content)
        seen = read_recording(Path(folder), LAUNCH)
    printed = settings.render_config(configuration.configurations(seen), configuration.notes(seen))
    return printed + _every_form(judge_observation(seen, Contract(), load()).report)


def bundle(text: bytes) -> str:
    """An archive that `diag bundle` may have written."""
    with tempfile.NamedTemporaryFile(suffix=".tar.zst") as file:
        file.write(MAGIC + text)
        file.flush()
        with unpacked(Path(file.name)) as folder:
            return " ".join(sorted(each.name for each in folder.iterdir()))


def k8s(text: bytes) -> str:
    """Pods, events and a container's log as an API server answers them: found, told, their logs followed, and kept."""
    pods, events, said = [*text.split(BETWEEN), b"{}", b""][:3]
    one = b"{}"
    with suppress(ValueError, RecursionError, LookupError, TypeError):
        one = json.dumps(json.loads(pods)["items"][0]).encode()

    def answer(request: Request) -> Reply:
        if "/proxy/" in request.path:
            return Reply() if b"proxied" in pods else Reply(b"connection refused", 503)
        if "/pods/" in request.path and "/log" not in request.path:
            return Reply(one)
        body = said if "/log" in request.path else events if "/events" in request.path else pods
        return Reply(body, 200, {"Content-Type": "application/json"})

    with bad_servers.serving(answer) as server:
        api = Api(parse(server.url), Credentials(), timeout=5.0)
        servers = find_with(api, Place("", "inference", ""))
        told = [*servers.notes, *(note for found in servers.servers.values() for note in found.notes())]
        for found in servers.servers.values():
            found.log._looked_at = 0.0
            told.append(plain(found.log.collect().samples).decode())
        told += [json.dumps([kept.facts, kept.summary, kept.missing]) for kept in gather(servers, 2**16)]
        return "".join(told)


def results(text: bytes) -> str:
    """The result of a load tool, as a ramp."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(text)
        file.flush()
        options = RampOptions(results=[Path(file.name)])
        ramp = run_ramp(options, ObserveOptions(()))
    return ramp_report.render(ramp) + ramp_report.DOCUMENT.text(ramp) + ramp_report.render_html(ramp)


def ramp(text: bytes) -> str:
    """A finished ramp, compared with another one and shown in every form."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ramp.json")
        file.write_bytes(text)
        read = [kept_ramp.read(name) for name in (CORPUS / "ramp" / "three_steps.json", file)]
    shown = []
    for before, after in (read, read[::-1]):
        found = compare(before, after)
        shown += [ramps.render(found), ramps.render_markdown(found), ramps.DOCUMENT.text((found, trend(read)))]
    return "".join([*shown, ramps.render_trend(trend(read)), ramps.render_trend_markdown(trend(read))])


def kernel(text: bytes) -> str:
    """Files of a process and its control group, and the kernel's log: each part has a file's name and its text.

    PID in a name stands for this process.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in text.split(BETWEEN):
            title, _, content = part.partition(b"\n")
            file = folder / title.decode("ascii", "ignore").strip("/").replace("PID", str(os.getpid()))
            with suppress(OSError, ValueError):
                if file.resolve().is_relative_to(folder.resolve()):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
        samples = [*control_group(7, folder / "proc", folder / "sys").samples()]
        samples.append(("diag_host_last_oom_kill_timestamp_seconds", (), last_vllm_kill(folder / "kmsg")))
        process = psutil.Process()
        table.read_from(str(folder / "proc"))
        try:
            usage = ProcessEntry(process, 1, 0.0, (content.decode("utf-8", "replace"),)).usage()
            told = str((usage, table.oom_kills()))
        finally:
            table.read_from("/proc")
        return plain(samples).decode() + told


def nccl(text: bytes) -> str:
    """Two statuses of NCCL's RAS service, as samples."""
    statuses: list[NcclStatus] = []
    for part in [*text.split(BETWEEN), text][:2]:
        with suppress(NotRas):
            statuses.append(read_status(part.decode("utf-8", "replace")))
    return plain(nccl_samples(statuses[-1], statuses[0])).decode() if statuses else ""


def model(text: bytes) -> str:
    """The config.json of a model and the index of its files: its memory, and the GPUs that it fits."""
    config, index = [*text.split(BETWEEN), b"{}"][:2]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(config)
        Path(folder, "model.safetensors.index.json").write_bytes(index)
        Path(folder, "model.safetensors").write_bytes(index)
        Path(folder, "adapter_config.json").write_bytes(config)
        beside = f"-tp 2 -q awq --enable-lora --lora-modules a={folder} --spec-model {folder} --spec-tokens 2"
        options = lint.LintOptions(vllm_version="0.32.0", gpu="h100")
        told = lint.run(f"vllm serve {folder} --gpu-memory-utilization 0.5 {beside}", options, as_json=False)[0]
        one, several = BudgetOptions(folder, "h100"), BudgetOptions(folder, "h100", context="2k", concurrency=4)
        for budgeted, as_json in ((one, False), (several, True)):
            with suppress(*ANSWERS):
                told += budget.run(budgeted, as_json)[0]
    return told


def web_config(text: bytes) -> str:
    """A --web.config.file, whose hashes no message shows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "web.yml")
        file.write_bytes(text)
        users = AccessFiles(str(file), None).access().users
        return "" if users is None else "users"


def arguments(text: bytes) -> str:
    """The arguments of an agent: lines of a tool's name and its arguments as JSON."""
    targets = AllowedTargets(recordings=RECORDINGS, base=ObserveOptions(()))

    async def talk() -> str:
        told = ""
        async with Agent(DiagServer(targets, _own_texts(), "", 60)) as client:
            for line in text.decode("utf-8", "replace").split("\n")[:4]:
                name, _, given = line.partition(" ")
                try:
                    found = json.loads(given)
                    json.dumps(found).encode()
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict) and found.get("target") != "prometheus":
                    answer = await client.call_tool(name, found)
                    told += "".join(part.text for part in answer.content)
        assert "by a defect of diag" not in told, told
        return told

    return asyncio.run(talk())


def prometheus(text: bytes) -> str:
    """The answers of a Prometheus: about every other query gets one of the lines, the rest a good answer.

    A line that begins with ~ changes a good answer: ~OLD~NEW; one that begins with a number has that status.
    """
    lines = text.split(b"\n")

    def answer(request: Request) -> Reply:
        at = zlib.crc32(request.path.encode() + request.body) % (2 * len(lines))
        status, body = good(request.path, request.body) if at >= len(lines) else odd(lines[at], request)
        return Reply(body, status, {"Content-Type": "application/json"})

    with bad_servers.serving(answer) as server:
        contract, incidents = site(None, None)
        source = open_prometheus(ObserveOptions((), prometheus=server.url, timeout=10.0), contract)
        return _every_form(fleet.judge(source, incidents, QueryCache(source, contract), LAUNCH))


def labels(text: bytes) -> str:
    """A recording whose pages lack labels or have others: its name, then lines LABEL (dropped) or LABEL=VALUE."""
    name, *lines = text.decode("utf-8", "replace").split("\n")
    if name not in _truths():
        raise DiagError("no such recording")
    changes = [line.partition("=") for line in lines if re.match(r"[A-Za-z_]\w*(=|$)", line, re.ASCII)]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(RECORDINGS / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("metrics.prom.gz"))
        pages = gzip.decompress((RECORDINGS / name / "metrics.prom.gz").read_bytes()).decode()
        for label, has_value, value in changes:
            pages = rewriting.relabelled(pages, label, value if has_value else None)
        Path(folder, "metrics.prom").write_text(pages, encoding="utf-8")
        report = judge_observation(read_recording(Path(folder)), Contract(), load()).report
    if _truths()[name] == "healthy" and not any(value for _, _, value in changes):  # a value may feign an incident
        assert report.verdict in ("healthy", "no_incident", "unknown"), (
            f"a healthy server is {report.verdict} without its labels"
        )
    return _every_form(report)


def alone(text: bytes) -> str:
    """A log as the only evidence, in any layout of a collector or a log store: judged, and shown in every form.

    A watchdog's stack dump is such a log too.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "VLLM_STACK_DUMP_for_engine_0_4711.log")
        file.write_bytes(text)
        contract, incidents = site(None, None)
        return _every_form(look(ObserveOptions([str(file)], log_timezone="UTC"), contract, incidents).report)


def recorded_pages(text: bytes) -> str:
    """Read the compressed pages of a recording, cut or damaged."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metrics.prom.gz").write_bytes(text)
        seen = read_recording(Path(folder))
        return str((seen.notes, seen.versions, seen.models))


def dumped(text: bytes) -> str:
    """Read two answers of py-spy about this process, as `diag doctor --stacks` reads and tells them."""
    parts = [*text.split(BETWEEN), text][:2]
    with tempfile.TemporaryDirectory() as folder:
        program, answer = Path(folder, "py-spy"), Path(folder, "answer")
        program.write_text(f"#!/bin/sh\nexec cat {answer}\n", encoding="utf-8")
        program.chmod(0o755)
        dumps = []
        for part in parts:
            answer.write_bytes(part)
            dumps.append([stacks._stack(os.getpid(), Owner("engine", "0"), str(program))])
    report = _healthy().report._replace(roll_calls=(roll_call("h:1", dumps, works=False),))
    return _every_form(report)


def own_incident(text: bytes) -> str:
    """An incident file of a user's: data that may be broken."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "users_own.incident").write_bytes(text)
        return str([incident.title for incident in load(Path(folder)) if incident.id == "users_own"])


_SHOWN = ("server", "current-context", "context", "cluster", "user", "name")


def _shown_names(document: Any) -> Iterator[str]:
    """Addresses and names of a kubeconfig, which are shown and no secrets."""
    if isinstance(document, dict):
        yield from (str(document[key]) for key in _SHOWN if key in document)
        document = list(document.values())
    if isinstance(document, list):
        for part in document:
            yield from _shown_names(part)


def kubeconfig(text: bytes) -> str:
    """A kubeconfig, whose token no message shows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config")
        file.write_bytes(text.replace(b"exec:", b"exec_:"))  # a plugin is run: it is trusted
        with suppress(YAMLError, ValueError, RecursionError):  # as the client of Kubernetes reads it
            if any(MARKER in name for name in _shown_names(safe_load(text))):
                return ""
        os.environ["KUBECONFIG"] = str(file)
        try:
            where, address, _ = cluster_of("inference/app=vllm")
        finally:
            del os.environ["KUBECONFIG"]
            kube_config._cleanup_temp_files()
        return f"{where} {address.shown}"


def server(text: bytes) -> str:
    """Read what a live server answers beside its page: /version, /v1/models and /server_info."""
    documents = dict(zip(("/version", "/v1/models", "/server_info"), text.split(BETWEEN), strict=False))

    def answer(request: Request) -> Reply:
        path = request.path.partition("?")[0]
        found = _good_page() if path == "/metrics" else documents.get(path)
        return Reply(b"", 404) if found is None else Reply(found, 200, {"Content-Type": "application/json"})

    with bad_servers.serving(answer) as running:
        asked = VllmServer(parse(running.url), Client(parse(running.url), Credentials(), 5.0, VLLM))
        asked.page()
        asked.fetch_facts()
        document = documents.get("/v1/models", b"")
        return f"{asked.facts} {program_of_models(document)} {settle({}, asked.facts)} {asked.notes}"


def telemetry(text: bytes) -> str:
    """Read what a Prometheus and an Alertmanager answer to `diag preflight`."""
    parts = [json_or_none(part) for part in [*text.split(BETWEEN), b"null", b"null", b"null", b"null"][:4]]
    answers = dict(zip(("/api/v1/targets?state=active", "/api/v1/rules", "/api/v1/alertmanagers"), parts, strict=False))
    facts = PreflightFacts(
        Contract(),
        load(),
        "0.32.0",
        running=True,
        instance="h:1",
        prometheus=answers.get,
        alertmanager=lambda _: parts[3],
    )
    told = ""
    for check_of_telemetry in (scraped, rules_loaded, pager_route):
        with suppress(NotChecked, *ANSWERS):
            told += "".join(f"{outcome}" for outcome in check_of_telemetry(facts))
    return told


def json_or_none(text: bytes) -> object:
    """The document as diag's client for Prometheus reads one; None for none."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def pasted(text: bytes) -> str:
    """A name, a flag, a metric or a pasted line, to be explained."""
    return explain.run(text.decode("utf-8", "replace"), None)


def notebook(text: bytes) -> str:
    """A notebook: its launches linted, and its printed outputs judged as a log."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.ipynb")
        file.write_bytes(text)
        told = ""
        with suppress(*ANSWERS):
            told += lint.run(str(file), lint.LintOptions(vllm_version="0.32.0"), as_json=False)[0]
        contract, incidents = site(None, None)
        return told + _every_form(look(ObserveOptions([str(file)], log_timezone="UTC"), contract, incidents).report)


@cache
def _page_server() -> tuple[str, int]:
    running = PageServer(ANYWHERE, SAYING, 8.0)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    return running.server_address[0], running.server_address[1]


def http(text: bytes) -> str:
    """Send what a client may send to the exporter; a scrape behind it is answered whatever that was."""
    told = []
    for sent in (text, b"GET /metrics HTTP/1.0\r\n\r\n"):
        with suppress(ConnectionError), socket.create_connection(_page_server(), timeout=60) as connection:
            connection.sendall(sent)
            with suppress(OSError):  # refused, and closed before all of it was read
                connection.shutdown(socket.SHUT_WR)
            told.append(b"".join(iter(lambda: connection.recv(65536), b"")))
    assert told[-1].endswith(b"seconds 8.00\n"), told[-1][:200]
    return b"".join(told).decode("utf-8", "replace")


def gpu_archive(text: bytes) -> str:
    """The archive of the GPU recorder, as somebody sends it: its bytes, or the files that are packed into one."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as told:
        file = Path(folder, "card.tar.gz")
        file.write_bytes(text)
        if BETWEEN in text:
            with tarfile.open(file, "w:gz") as tar:
                for name, content in zip(GPU_FILES, text.split(BETWEEN), strict=False):
                    member = tarfile.TarInfo(f"card/{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        judge.print_table(file)
        return told.getvalue()


def _every_form(report: Report) -> str:
    short, whole = terminal.render(report), terminal.render(report, verbose=True)
    return short + whole + as_json.render(report) + markdown.render(report, True) + html.render(report)


@cache
def _own_texts() -> frozenset[str]:
    return own_texts(ObserveOptions(()))


@cache
def _good_page() -> bytes:
    return next(_pages("healthy", 1)).partition(b"\n")[2]


@cache
def _healthy() -> Snapshot:
    return take_snapshot(ObserveOptions([str(RECORDINGS / "healthy")]))


def _baselines() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "normal.json"), learn(_healthy().queries))
        yield Path(folder, "normal.json").read_bytes()


@cache
def _samples() -> promql.Samples:
    return promql.Samples(promql_cases.blocks())


def _incident(text: str) -> Incident:
    symptom = Signal("own", text, "it is {value}", "ratio").above(1.0, judged("an example"))
    fix = Fix("advice", "effect", judged("an example"), only_if=(symptom,))
    like = LookAlike("another one", "by it", refuted_by=symptom)
    return Incident("users_own", "title", "warning", ("instance",), "cause", "impact", (symptom,), (like,), (fix,))


def _pages(name: str, most: int) -> Iterator[bytes]:
    """Scrapes of a recording, spread over it."""
    whole = gzip.decompress((RECORDINGS / name / "metrics.prom.gz").read_bytes())
    scrapes = [b"# scrape" + part for part in whole.split(b"# scrape")[1:]]
    yield from scrapes[:: max(1, len(scrapes) // most)][:most]


def _bundles() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as place:
        Path(place, "server.log").write_bytes(b"INFO 11-20 02:16:07 [core.py:1] a line\n")
        out = io.BytesIO()
        pack(Path(place), {"server.log": "the log"}, (), out)
        yield out.getvalue().removeprefix(MAGIC)


def _recordings(*names: str, most: int = 4) -> Iterator[bytes]:
    for name in names:
        files = [(RECORDINGS / name / file) for file in FILES[1:]]
        yield BETWEEN.join(
            [_thinned(b"".join(_pages(name, most))), *(file.read_bytes()[-20_000:] for file in files if file.exists())]
        )


@cache
def _truths() -> dict[str, str]:
    """The true verdict of each recording."""
    abouts = {file.parent.name: tomllib.loads(file.read_text("utf-8")) for file in RECORDINGS.glob("*/recording.toml")}
    return {name: about["truth"]["verdict"] for name, about in sorted(abouts.items())}


def _lost_labels() -> Iterator[bytes]:
    """Every label of every recording, dropped by itself."""
    for name in _truths():
        for label in rewriting.label_names("".join(page.decode() for page in _pages(name, 3))):
            yield f"{name}\n{label}".encode()


def _own_pages() -> Iterator[bytes]:
    names = ("healthy", "lora_thrash", "renamed_by_ray", "contention_vllm_0_11_0", "engine_dead", "kv_transfer_failing")
    yield from (_thinned(next(_pages(name, 1)).partition(b"\n")[2]) for name in names)
    yield (ROOT / "tests" / "goldens" / "exporter.prom").read_bytes()


def _thinned(text: bytes) -> bytes:
    """Without most buckets of the histograms, which are alike."""
    lines = text.splitlines(keepends=True)
    return b"".join(line for line in lines if b"_bucket{" not in line or b'le="+Inf"' in line)


def _logs() -> Iterator[bytes]:
    yield from (file.read_bytes()[:20_000] for file in sorted((ROOT / "tests" / "data" / "logs").glob("*.log")))


def _secrets() -> Iterator[bytes]:
    yield from (secret.text.encode() for secret in corpus(60))
    yield from (line for log in _logs() for line in log.splitlines()[::50])


HEADS = (
    "2026-04-25T09:00:{:02d}.1Z stderr F ",
    "[pod/vllm-0/vllm] 2026-04-25T09:00:{:02d}Z ",
    "Apr 25 09:00:{:02d} h vllm[1]: ",
)


def _layouts() -> Iterator[bytes]:
    """A log as log stores export it: CSV, a document and lines of JSON, lines with a collector's head."""
    file = ROOT / "tests" / "data" / "logs" / "v1_0.8.5_no_kv_memory.log"
    lines = file.read_text("utf-8").splitlines()[:60]
    rows = io.StringIO()
    csv.writer(rows).writerows(
        [("timestamp", "message"), *((1745571600000 + at, line) for at, line in enumerate(lines))]
    )
    yield rows.getvalue().encode()
    records = [{"line": line, "timestamp": f"{1745571600 + at}"} for at, line in enumerate(lines)]
    yield json.dumps(records[::-1]).encode()
    for head in HEADS:
        yield "\n".join(head.format(at) + line for at, line in enumerate(lines)).encode()
    kept = ({"log": line + "\n", "stream": "stderr", "time": "2026-04-25T09:00:00.1Z"} for line in lines)
    yield "\n".join(map(json.dumps, kept)).encode()


def _compressed() -> Iterator[bytes]:
    pages = [_thinned(page) for page in _pages("healthy", 3)]
    yield gzip.compress(b"".join(pages))
    yield b"".join(map(gzip.compress, pages))


def _own_incidents() -> Iterator[bytes]:
    for name in ("requests_refused", "kv_cache_filling", "gpu_power_brake", "engine_stalled"):
        yield (ROOT / "diag" / "knowledge" / "incidents" / f"{name}.incident").read_bytes()


def _names() -> Iterator[bytes]:
    yield from (b"vllm:num_requests_running", b"--max-num-seqs", b"kv_eviction_cascade", b"DiagEngineDead", b"nccl")
    texts = (ROOT / "tests" / "data" / "logs" / "texts.tsv").read_bytes()
    yield from (line.rpartition(b"\t")[2] for line in texts.splitlines()[::9])


def _deploy() -> Iterator[bytes]:
    yield (ROOT / "deploy" / "kubernetes-sidecar.yaml").read_bytes()


def _notebooks() -> Iterator[bytes]:
    texts = [text.decode("utf-8", "replace") for text in (*list(_launches())[:6], *list(_logs())[:4])]
    for text in texts:
        cells = [
            {"cell_type": "code", "source": f"!{text}", "outputs": [{"text": text[:4000].splitlines(keepends=True)}]},
            {"cell_type": "markdown", "source": ["```\n", text, "\n```"]},
            {"cell_type": "code", "source": text, "outputs": [{"traceback": text[:2000].splitlines()}]},
        ]
        yield json.dumps({"cells": cells, "nbformat": 4}).encode()


def _requests() -> Iterator[bytes]:
    heads = "Host: h", "Accept: */*", "X-Prometheus-Scrape-Timeout-Seconds: 10", "Authorization: Basic bWU6cHc="
    body = "Content-Length: 3", "Transfer-Encoding: chunked", "Connection: keep-alive"
    for method, path in (("GET", "/metrics"), ("HEAD", "/"), ("POST", "/livez"), ("GET", "/metrics?a=%00")):
        yield "\r\n".join([f"{method} {path} HTTP/1.1", *heads, *body, "", "abc"]).encode()
        yield "\r\n".join([f"{method} {path} HTTP/1.0", *heads, "", ""]).encode()


def _cards() -> Iterator[bytes]:
    calls = [{"family": "power", "call": "p", "labels": ["a"], "value": 3, "microseconds": 60_000, "means": "no"}]
    pages, truth = next(_pages("h100_healthy", 1)), (RECORDINGS / "h100_healthy" / "recording.toml").read_bytes()
    ceilings = json.dumps({"gpu": "h100", "ceilings": {"bytes": 1e12}}).encode()
    yield BETWEEN.join([json.dumps(calls).encode(), ceilings, b'{"server": "why"}', pages, truth])


def _expressions() -> Iterator[bytes]:
    yield from (text.encode() for text in promql_cases.EXPRESSIONS)


def _incidents() -> Iterator[bytes]:
    conditions = {condition.signal.promql for incident in load() for condition in incident.every_condition}
    yield from (text.encode() for text in sorted(conditions))


def _results() -> Iterator[bytes]:
    yield from (file.read_bytes() for file in sorted((ROOT / "tests" / "data" / "load_tools").glob("*.json")))


def _models() -> Iterator[bytes]:
    index = b'{"metadata": {"total_size": 16e9}, "weight_map": {"lm_head.weight": "model.safetensors"}}'
    folders = sorted((ROOT / "tests" / "data" / "models").iterdir())
    yield from (BETWEEN.join([(folder / "config.json").read_bytes(), index]) for folder in folders)


def _launches() -> Iterator[bytes]:
    for file in sorted((ROOT / "tests" / "data" / "launches").glob("*.yaml")):
        yield from (entry["text"].encode() for entry in read_yaml(file))


TARGETS: Mapping[str, Target] = {
    "page": Target(page, _own_pages),
    "log": Target(log, _logs),
    "secrets": Target(secrets, _secrets),
    "command": Target(command, lambda: iter(())),
    "yaml": Target(yaml, _deploy),
    "notation": Target(notation, _launches, 10.0),
    "toml": Target(toml, lambda: iter(())),
    "baseline": Target(baseline, _baselines),
    "promql": Target(expression, lambda: (text for seeds in (_expressions, _incidents) for text in seeds())),
    "recording": Target(
        recording, lambda: _recordings("healthy", "kv_cascade", "engine_dead", "startup_hang", "lora_thrash")
    ),
    "bundle": Target(bundle, _bundles),
    "k8s": Target(k8s, lambda: iter(())),
    "results": Target(results, _results),
    "ramp": Target(ramp, lambda: iter(())),
    "kernel": Target(kernel, lambda: iter(())),
    "model": Target(model, _models, 10.0),  # three commands, each of which sizes for every release
    "nccl": Target(nccl, lambda: iter(())),
    "web_config": Target(web_config, lambda: iter(())),
    "arguments": Target(arguments, lambda: iter(()), 20.0),
    "prometheus": Target(prometheus, lambda: iter(()), 20.0),
    "labels": Target(labels, _lost_labels, 20.0),
    "alone": Target(alone, lambda: (*_logs(), *_layouts())),
    "pages_gz": Target(recorded_pages, _compressed),
    "stacks": Target(dumped, lambda: iter(())),
    "incident": Target(own_incident, _own_incidents),
    "kubeconfig": Target(kubeconfig, lambda: iter(())),
    "server": Target(server, lambda: iter(())),
    "telemetry": Target(telemetry, lambda: iter(())),
    "explain": Target(pasted, _names),
    "notebook": Target(notebook, _notebooks, 10.0),
    "http": Target(http, _requests),
    "gpu_archive": Target(gpu_archive, _cards),
}


@cache
def saved(name: str) -> Sequence[bytes]:
    """The corpus: inputs as people write them, and those that fuzzing found something with."""
    return [file.read_bytes() for file in sorted((CORPUS / name).glob("*"))]


@cache
def seeds(name: str) -> Sequence[bytes]:
    """Return the inputs to mutate: the corpus, and the recordings, logs and expressions of other tests."""
    return (*saved(name), *TARGETS[name].seeds())
