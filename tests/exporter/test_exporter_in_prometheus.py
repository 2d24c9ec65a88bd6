"""A real Prometheus scrapes the exporter: every name keeps its colon; and what we ship to run it is valid."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from support.bad_servers import pages, serving
from support.exporter_server import listening, vllms_page
from support.forged_access import access_lines, behind_line_feeds, heads
from support.imitations import SERVER_0_32
from support.paths import ROOT
from support.prometheus_server import PLACES, answer, program
from support.prometheus_server import serving as prometheus
from typer.testing import CliRunner

from diag.cli.app import app
from diag.commands import doctor
from diag.commands.exporter import Exporter, ExporterOptions
from diag.commands.observe import ObserveOptions
from diag.core.metric_families import families
from diag.sources.prometheus.scope import Scope, TimeSpan

DEPLOY = ROOT / "deploy"
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["{target}"]}}]
"""


@contextmanager
def exporting() -> Iterator[str]:
    """The exporter in front of a server with that page; host:port."""
    with serving(pages(vllms_page())) as vllm, listening(answering=Exporter(ExporterOptions(vllm.url))) as url:
        yield url.removeprefix("http://")


def names(url: str) -> set[str]:
    """Every metric that a Prometheus holds."""
    with urllib.request.urlopen(f"{url}/api/v1/label/__name__/values", timeout=60) as answer:
        return set(json.load(answer)["data"])


def on_page(page: bytes) -> set[str]:
    return set(re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)", page.decode(), re.MULTILINE))


@pytest.mark.prometheus
@pytest.mark.parametrize("place", PLACES)
def test_every_metric_name_arrives_unchanged(place: str) -> None:
    with exporting() as target, prometheus(program(place), (), CONFIG.format(target=target)) as server:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
            wanted = on_page(answer.read())
        end = time.monotonic() + 180
        while not wanted <= (held := names_or_none(server.url)) and time.monotonic() < end:
            time.sleep(0.2)
        query = urllib.parse.urlencode({"query": 'up{job="vllm"}'})
        with urllib.request.urlopen(f"{server.url}/api/v1/query?{query}", timeout=60) as answer:
            up = json.load(answer)["data"]["result"]
    assert wanted <= held
    assert not [name for name in held if name.startswith("vllm_")]
    assert [(each["metric"]["instance"], each["value"][1]) for each in up] == [(target, "1")]


DIED = ("EngineCore encountered a fatal error.", "Traceback (most recent call last):", "RuntimeError: CUDA error: x")


def until(is_so: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait until a condition holds, however long a busy host takes for it."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.5)


def names_or_none(url: str) -> set[str]:
    try:
        return names(url)
    except OSError:  # it does not listen yet
        return set()


@pytest.mark.prometheus
def test_forged_access_lines_arrive_in_a_prometheus_as_nothing_and_a_death_among_them_as_one(tmp_path: Path) -> None:
    """Two servers, one of which dies; into the log of each a client writes before and after that."""
    started = SERVER_0_32.start
    with ExitStack() as running:
        ends = ExitStack()
        dead, alive = (
            ends.enter_context(serving(pages(vllms_page()))),
            running.enter_context(serving(pages(vllms_page()))),
        )
        exporters = []
        for name, vllm in (("dead", dead), ("alive", alive)):
            (tmp_path / name).write_text(started, encoding="utf-8")
            exporter = Exporter(ExporterOptions(vllm.url, log=str(tmp_path / name), log_timezone="UTC"))
            exporter.start()
            exporters.append(running.enter_context(listening(answering=exporter)).removeprefix("http://"))
        config = CONFIG.format(target='","'.join(exporters))
        server = running.enter_context(prometheus(program("PATH"), (), config))
        begun = time.time()
        until(lambda: len(answer(server, 'vllm:num_requests_running{engine="0"}') or ()) == 2)
        api, engine = heads(started)
        for name in ("dead", "alive"):
            at = time.time()
            clock = f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S}"
            died = [f"{engine}ERROR {clock} [core.py:1510] {text}" for text in DIED] if name == "dead" else []
            forged = [*access_lines(started, at), *behind_line_feeds(started, at)]
            last = f"{api}INFO {clock} [loggers.py:259] the last line"
            with (tmp_path / name).open("a", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in (*forged[:66], *died, *forged, last))
        ends.close()
        until(lambda: len(answer(server, f"diag_vllm_log_last_line_timestamp_seconds >= {begun - 1}") or ()) == 2)
        wanted = {(exporters[0], event) for event in ("engine_dead", "cuda_error")}

        def counted() -> set[tuple[str, str]]:
            events = answer(server, "diag_vllm_log_events_total > 0") or {}
            return {(dict(key)["instance"], dict(key)["event"]) for key in events}

        until(lambda: counted() >= wanted)
        assert counted() == wanted
        assert not answer(server, 'diag_vllm_log_claim_timestamp_seconds{event="engine_dead"}')
        options = ObserveOptions([], prometheus=server.url, scope=Scope(TimeSpan(since=f"{begun}")))

        def named() -> set[tuple[str, str]]:
            report = doctor.run(options)
            return {
                (found.diagnosis.incident.id, dict(found.diagnosis.subject)["instance"]) for found in report.present
            }

        until(lambda: ("engine_dead", exporters[0]) in named())
        assert not [incident for incident, instance in named() if instance == exporters[1]]


@pytest.mark.prometheus
def test_promtool_finds_nothing_wrong_with_our_families() -> None:
    program("PATH")
    with exporting() as target, urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
        page = answer.read()
    ours = page[len(vllms_page()) :]
    assert on_page(ours) <= set(families())
    checked = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.prometheus
def test_the_scrape_config_is_valid() -> None:
    program("PATH")
    subprocess.run(["promtool", "check", "config", DEPLOY / "prometheus.yml"], check=True, capture_output=True)


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: .ci/components installs it")
    installed = str(Path(sys.executable).parent / "diag")
    unit = tmp_path / "diag-exporter.service"
    unit.write_text((DEPLOY / "diag-exporter.service").read_text().replace("/opt/diag/bin/diag", installed))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def arguments() -> Iterator[tuple[str, list[str]]]:
    """How each of the files starts the exporter, without the variables of systemd."""
    unit = (DEPLOY / "diag-exporter.service").read_text()
    for line in re.findall(r"^#? ?ExecStart=.*?diag exporter (.*?)'?$", unit, re.MULTILINE):
        yield "systemd", line.replace("${DIAG_LISTEN}", "127.0.0.1:0").split()
    pod = yaml.safe_load((DEPLOY / "kubernetes-sidecar.yaml").read_text())["spec"]["template"]["spec"]
    yield "kubernetes", pod["containers"][1]["args"]
    entry, command = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    yield "container", (json.loads(entry) + json.loads(command))[2:]


@pytest.mark.parametrize(("where", "options"), list(arguments()))
def test_every_option_that_is_used_exists(where: str, options: list[str]) -> None:
    shown = CliRunner().invoke(app, ["exporter", "--help"], terminal_width=200).output
    assert {each for each in options if each.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown))
