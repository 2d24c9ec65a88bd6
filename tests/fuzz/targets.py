"""Fuzz targets: for each kind of input a function of bytes, which returns the texts that it would show.

Every foreign text goes through the code that meets it first. Errors of diag's own (diag/core/errors.py, and the two by
which a page or a server's answer counts as a failed one) are answers; anything else that is raised is a find.
"""

import gzip
import re
import shutil
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fuzz.answers import good, odd
from support import bad_servers, promql_cases, rewriting
from support.bad_servers import Reply, Request
from support.secrets import corpus, placed

from diag import promql
from diag.commands import lint
from diag.commands.observe import ObserveOptions, judge_observation, site, take_snapshot
from diag.core.contract import Contract, apply_overrides
from diag.core.contract import read as read_contract
from diag.core.errors import DiagError
from diag.core.incident import Fix, Incident, LookAlike, Signal, judged
from diag.core.metric_families import plain
from diag.diagnosis import configuration, fleet
from diag.diagnosis.report import Report
from diag.diagnosis.snapshot import Snapshot
from diag.exporter.log.memory_sizes import read_memory_log
from diag.exporter.log.tail import LogTail
from diag.exporter.vllm_page import PageReader
from diag.exposition import NotMetrics
from diag.exposition.scrapes import Parser
from diag.http import prometheus_api
from diag.http.failure import Failure
from diag.knowledge.catalog import CatalogEntry, check, load
from diag.normal.baseline import learn, save
from diag.normal.baseline import read as read_baseline
from diag.normal.comparison import by_baseline
from diag.report import html, markdown, settings, terminal
from diag.report import json as as_json
from diag.sources.recording.reader import read as read_recording
from diag.sources.source import open_prometheus
from diag.vllm.command.free_text import hidden
from diag.vllm.command.shown import shown
from diag.vllm.running_config import ServerFacts, read_launch

ROOT = Path(__file__).parents[2]
CORPUS, RECORDINGS = Path(__file__).parent / "corpus", ROOT / "tests" / "recordings"
ANSWERS = (DiagError, NotMetrics, Failure)
MARKER = "mArKeR7secret"
"""A secret that the targets are given and never show."""
LAUNCH = f"HF_TOKEN={MARKER} vllm serve org/m --api-key {MARKER} --max-num-seqs 8"
FILES = ("metrics.prom", "recording.toml", "server.log")
MOST_QUOTED = 2**16
"""Characters beside the secrets: no text that diag quotes is longer."""
BETWEEN = b"\n=== next file\n"
"""What parts the files of a recording in one text."""
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
        return _every_form(fleet.judge(source, incidents, contract, LAUNCH))


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
        assert report.verdict in ("healthy", "unknown"), f"a healthy server is {report.verdict} without its labels"
    return _every_form(report)


def _every_form(report: Report) -> str:
    short, whole = terminal.render(report), terminal.render(report, verbose=True)
    return short + whole + as_json.render(report) + markdown.render(report, True) + html.render(report)


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


def _deploy() -> Iterator[bytes]:
    yield (ROOT / "deploy" / "kubernetes-sidecar.yaml").read_bytes()


def _expressions() -> Iterator[bytes]:
    yield from (text.encode() for text in promql_cases.EXPRESSIONS)


def _incidents() -> Iterator[bytes]:
    conditions = {condition.signal.promql for incident in load() for condition in incident.every_condition}
    yield from (text.encode() for text in sorted(conditions))


TARGETS: Mapping[str, Target] = {
    "page": Target(page, _own_pages),
    "log": Target(log, _logs),
    "secrets": Target(secrets, _secrets),
    "command": Target(command, lambda: iter(())),
    "yaml": Target(yaml, _deploy),
    "toml": Target(toml, lambda: iter(())),
    "baseline": Target(baseline, _baselines),
    "promql": Target(expression, lambda: (text for seeds in (_expressions, _incidents) for text in seeds())),
    "recording": Target(
        recording, lambda: _recordings("healthy", "kv_cascade", "engine_dead", "startup_hang", "lora_thrash")
    ),
    "prometheus": Target(prometheus, lambda: iter(()), 20.0),
    "labels": Target(labels, _lost_labels, 20.0),
}


@cache
def saved(name: str) -> Sequence[bytes]:
    """The corpus: inputs as people write them, and those that fuzzing found something with."""
    return [file.read_bytes() for file in sorted((CORPUS / name).glob("*"))]


@cache
def seeds(name: str) -> Sequence[bytes]:
    """Return the inputs to mutate: the corpus, and the recordings, logs and expressions of other tests."""
    return (*saved(name), *TARGETS[name].seeds())
