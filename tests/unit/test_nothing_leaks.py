"""A marker in every place of a command that may hold a secret: no output of diag has it.

A short run each time; 10,000 cases by `DIAG_LEAK_CASES=10000 pytest -n 0 tests/unit/test_nothing_leaks.py`.
"""

import json
import os
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paths import MODELS, RECORDINGS

from diag.commands import budget
from diag.commands import lint as linting
from diag.commands.observe import ObserveOptions, take_snapshot
from diag.commands.options import BudgetOptions
from diag.core.errors import DiagError
from diag.diagnosis import configuration
from diag.diagnosis.build_report import build_report
from diag.diagnosis.proposals import Running
from diag.diagnosis.report import Snapshot
from diag.exporter.page import CollectionResult, HostCollectors, HostPage
from diag.exporter.vllm_page import PageReader
from diag.exposition import render
from diag.exposition.scrapes import Target
from diag.lint.rule import LintResult
from diag.report import gpu_sizing, html, markdown, terminal
from diag.report import json as json_report
from diag.report import settings as settings_report
from diag.sources.observation import Observation, Origin, observation
from diag.sources.recording.writer import Recorder
from diag.vllm.running_config import ServerFacts

CASES = int(os.environ.get("DIAG_LEAK_CASES", "30"))
MODEL = str(MODELS / "llama-3-8b")
PAGE = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="128"} 1\nprocess_start_time_seconds 1\n'
OPTIONS = BudgetOptions("", gpu_memory="80GiB", version="0.32.0")
MARKERS = ("swordfishmarker", "Sw0rdf1shMarker", "SWORDFISH_MARKER", "sword-fish.marker", "sword/fish+marker==")
QUOTED = (
    "{}",
    "-{}",
    "--{}",
    "a:{}",
    "{}=b",
    "\u2013{}",
    "'a b {}'",
    '"a {}"',
    '\'{{"a": "{}"}}\'',
    "$(echo {})",
    "`cat {}`",
)
"""How a value is written; `\u2013` is what a word processor makes of a dash."""
VARIABLES = (
    *(
        "JWT",
        "BEARER",
        "COOKIE",
        "CREDS",
        "PIN",
        "SALT",
        "SLACK_WEBHOOK",
        "DATABASE_URL",
        "A",
        "pgpass",
        "VLLM_API_KEY",
    ),
    *(
        "HF_TOKEN",
        "VLLM_LOGGING_PREFIX",
        "NCCL_NOT_KNOWN",
        "S3_SECRET_ACCESS_KEY",
        "HTTPS_PROXY",
        "AWS_SECRET_ACCESS_KEY",
    ),
)
FLAGS = (
    *(
        "--api-key {}",
        "--api-key={}",
        "--api_key {}",
        "--api-key a {}",
        "--hf-token {}",
        "--hf-tok {}",
        "--ssl-keyfile {}",
    ),
    *(
        "--ssl-certfile={}",
        "--api-kye {}",
        "--tokn={}",
        "--never-heard-of {}",
        "\u2013\u2013api-key {}",
        "\u2014api-key={}",
    ),
    *("--max-num-seqs {}", "--max-model-len={}", "-tp {}", "--gpu-memory-utilization {}", "--seed {}", "--port {}"),
    *(
        "--enforce-eager={}",
        "--enable-prefix-caching {}",
        "--block-size {}",
        "--swap-space {}",
        "--num-lookahead-slots {}",
    ),
    *("--additional-config {}", "--model-loader-extra-config {}", "--hf-overrides {}", "--kv-transfer-config {}"),
    *("--compilation-config {}", "-cc {}", "-O {}", "-O{}", "--rope-scaling {}", "--mm-processor-kwargs {}"),
    *("--speculative-config {}", "--guided-decoding-backend xgrammar {}", "-- {}", "{}", "--trust-remote-code {}"),
    *("--max-num-seqs 8 {}", "--num-speculative-tokens 5 --speculative-model m {}", "--limit-mm-per-prompt {}"),
)
PLAIN_FLAGS = (  # a marker stands in a part of the word, or in JSON
    """--kv-transfer-config '{{"kv_connector": "X", "kv_connector_extra_config": {{"redis": "{}"}}}}'""",
    """--hf-overrides '{{"{}": 1}}'""", """--model-loader-extra-config '["{}"]'""", "--no-{}", "-cc.{}=1",
    "--max-num-seqs{} 3",
    """--speculative-config '{{"method": "ngram", "prompt_lookup_max": "{}"}}'""", "--{} 1", "-{}",  "'--{} x'",
    "--otlp-traces-endpoint 'http://u:{}@h:4317/x'", "--otlp-traces-endpoint http://h/?x={}", "'--api-key {}'", "# {}",
    "--served-model-name hf_{}abcdefghijk", "--download-dir 's3://b/m?sig={}#{}'", "--config /nowhere/$({})",
    "> /tmp/{}",
    "--max-num-seqs ${{SEQS:-{}}}", "--port $({})", "${{MORE:---api-key {}}}", "2>&1 | tee {}", "<<< {}",
)  # fmt: skip
BEFORE = (
    "mysql -p{}", "echo {} | login --password-stdin", "export JWT={}", "curl -u me:{} http://h", 
    "psql 'postgres://u:{}@h/d'",
    "cat > /dev/null <<END\n{}\nEND", "K={}", "ARGS='--api-key {}'", "set -- {}", "# {}", "read X <<< {}",
    "A=(--api-key {})",
)  # fmt: skip
AFTER = ("wait {}", "curl -H 'X: {}' u", "# {}", "kill {}")
AROUND = (
    "",
    "timeout 5 ",
    "env -u {} ",
    "sshpass -p {} ",
    "sudo -u {} ",
    "nice -n 5 ",
    "time ",
    "numactl -C {} ",
    "./{} ",
)


class Case(NamedTuple):
    """A text and what must be in no output."""

    text: str
    marker: str


def filled(template: str, marker: str) -> str:
    return template.format(*[marker] * 3)


@st.composite
def commands(draw: st.DrawFn) -> Case:
    """A command in a script, a container, a unit or a manifest, with the marker in some of its places."""
    marker = draw(st.sampled_from(MARKERS))
    value = filled(draw(st.sampled_from(QUOTED)), marker)
    flags = [filled(flag, value) for flag in draw(st.lists(st.sampled_from(FLAGS), max_size=3))]
    flags += [filled(flag, marker) for flag in draw(st.lists(st.sampled_from(PLAIN_FLAGS), max_size=1))]
    flags = draw(st.permutations(["--max-model-len 2048", "--num-gpu-blocks-override 128", *flags]))
    variables = "".join(f"{name}={value} " for name in draw(st.lists(st.sampled_from(VARIABLES), max_size=2)))
    around = filled(draw(st.sampled_from(AROUND)), marker)
    uses = draw(st.sampled_from(["", "", " --api-key $K", " $ARGS", ' "${A[@]}"']))
    command = f"{variables}{around}vllm serve {MODEL}{uses} {' '.join(flags)}"
    lines = [filled(line, marker) for line in draw(st.lists(st.sampled_from(BEFORE), max_size=2))]
    lines += [command, *(filled(line, marker) for line in draw(st.lists(st.sampled_from(AFTER), max_size=1)))]
    return Case(wrapped(draw(st.sampled_from(WRAPPERS)), "\n".join(lines), flags, marker), marker)


WRAPPERS = (*("plain",) * 4, "sh", "ssh", "heredoc", "docker", "docker sh", "unit", "manifest", "compose", "wrapper")


def wrapped(kind: str, script: str, flags: list[str], marker: str) -> str:
    """The script as another program starts it, or a file that has it."""
    more = " ".join(flags)
    variables: dict[str, object] = {"env": [{"name": "JWT", "value": marker}]}
    container: dict[str, object] = {"image": "vllm/vllm-openai:v0.9.2", "name": marker}
    texts = {
        "plain": script,
        "sh": f"bash -lc {shlex.quote(script)}",
        "ssh": f"ssh -i {marker} {marker}@h {shlex.quote(script)}",
        "heredoc": f"ssh u:{marker}@h <<EOF\n{script}\nEOF",
        "docker": f"docker run -e A={marker} --label {marker} -v {marker}:/b vllm/vllm-openai --model {MODEL} {more}",
        "docker sh": f"docker run --name {marker} --entrypoint sh vllm/vllm-openai:v0.9.2 -c {shlex.quote(script)}",
        "unit": f"[Service]\nEnvironment=JWT={marker}\nExecStart=/opt/vllm/bin/vllm serve {MODEL} {more}",
        "manifest": json.dumps({"kind": "Pod", "spec": {"containers": [
            container | variables | {"command": ["sh", "-c"], "args": [script]}]}}),
        "compose": json.dumps({"services": {marker: {
            **container, "environment": {"PIN": marker}, "command": f"--model {MODEL} {more}"}}}),
        "wrapper": f"./start-{marker} {marker} {more}",
    }  # fmt: skip
    return texts[kind]


@cache
def snapshots() -> tuple[Snapshot, ...]:
    """A cascade, whose fix is a flag, and a start that failed, whose fixes are those of diag lint."""
    names = ("kv_cascade", "fail_max_model_len")
    return tuple(take_snapshot(ObserveOptions([str(RECORDINGS / name)])) for name in names)


def observed(text: str) -> Observation:
    """One scrape of a server that this command started."""
    target = Target("h:1")
    target.add(1_000_000, PAGE)
    return observation(Origin("scrape", "h:1"), [target], {"h:1": ServerFacts(launch=text, process=text)})


def reports(text: str) -> Iterator[str]:
    """Every format of what the doctor says of two recordings whose servers this command started."""
    launch = observed(text).launch.get("h:1", "")
    for snapshot in snapshots():
        before = snapshot.report
        present = [finding.diagnosis.incident for finding in before.findings if finding.proposals]
        present = sorted(present, key=lambda incident: not incident.lints)[:1]
        running = {name: Running("0.32.0", launch) for name in snapshot.running}
        report = build_report(before.observed, present, snapshot.queries, running)
        yield from (terminal.render(report, verbose=True), json_report.render(report))
        yield markdown.render(report, verbose=True)
        if len(launch) % 2 == present[0].lints:  # the slowest by far: of each launch one of the two
            yield html.render(report)


def configured(text: str) -> Iterator[str]:
    """Return the output of `diag config` and the exporter's page for the server."""
    seen = observed(text)
    servers, notes = configuration.configurations(seen), configuration.notes(seen)
    yield from (settings_report.render_config(servers, notes), settings_report.CONFIG.text((servers, notes)))
    scraped = PageReader().read(PAGE, ServerFacts(launch=text, process=text))
    page = HostPage(HostCollectors(None, None, None), render)
    yield b"".join(page.parts(CollectionResult(scraped, "", 0.0, True), [], 1.0)).decode()


def recorded(text: str, folder: Path) -> str:
    """The file beside the pages of a recording."""
    Recorder(folder).about({"h:1": ServerFacts(launch=text, process=text)}, (), 1.0)
    return (folder / "recording.toml").read_text()


def checked(target: str) -> Iterator[str]:
    """Return the output of `diag lint` and `diag budget`, including refusals."""
    try:
        found = LintResult(linting.judge_all(target, "0.32.0"))
        yield from (settings_report.render_lint(found), settings_report.LINT.text(found))
        estimate = budget.estimate(OPTIONS._replace(target=target))
        yield from (gpu_sizing.render_budget(estimate), gpu_sizing.BUDGET_DOCUMENT.text(estimate))
    except DiagError as error:
        yield str(error)


@pytest.mark.slow
@settings(max_examples=CASES, derandomize=CASES < 1000, suppress_health_check=[*HealthCheck])
@given(commands())
def test_a_marker_in_any_place_of_a_command_is_in_no_output(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    folder = tmp_path_factory.mktemp("leak")
    is_file = case.text.startswith("{")
    file = folder / "m.yaml"
    file.write_text(case.text)
    texts = [*checked(str(file) if is_file else case.text), recorded(case.text, folder)]
    texts += [*configured(case.text), *reports(case.text)]
    for text in texts:
        assert case.marker.lower() not in text.lower().replace(str(folder).lower(), "")
