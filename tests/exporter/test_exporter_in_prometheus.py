"""A real Prometheus scrapes the exporter: every name keeps its colon; and what we ship to run it is valid."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from support.bad_servers import pages, serving
from support.exporter_server import listening, vllms_page
from support.paths import ROOT
from support.prometheus_server import PLACES, program
from support.prometheus_server import serving as prometheus
from typer.testing import CliRunner

from diag.cli.app import app
from diag.commands.exporter import Exporter, ExporterOptions
from diag.core.metric_families import families

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
    with urllib.request.urlopen(f"{url}/api/v1/label/__name__/values", timeout=10) as answer:
        return set(json.load(answer)["data"])


def on_page(page: bytes) -> set[str]:
    return set(re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)", page.decode(), re.MULTILINE))


@pytest.mark.prometheus
@pytest.mark.parametrize("place", PLACES)
def test_every_metric_name_arrives_unchanged(place: str) -> None:
    with exporting() as target, prometheus(program(place), (), CONFIG.format(target=target)) as server:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            wanted = on_page(answer.read())
        end = time.monotonic() + 30
        while not wanted <= (held := names_or_none(server.url)) and time.monotonic() < end:
            time.sleep(0.2)
        query = urllib.parse.urlencode({"query": 'up{job="vllm"}'})
        with urllib.request.urlopen(f"{server.url}/api/v1/query?{query}", timeout=10) as answer:
            up = json.load(answer)["data"]["result"]
    assert wanted <= held
    assert not [name for name in held if name.startswith("vllm_")]
    assert [(each["metric"]["instance"], each["value"][1]) for each in up] == [(target, "1")]


def names_or_none(url: str) -> set[str]:
    try:
        return names(url)
    except OSError:  # it does not listen yet
        return set()


@pytest.mark.prometheus
def test_promtool_finds_nothing_wrong_with_our_families() -> None:
    program("PATH")
    with exporting() as target, urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
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
