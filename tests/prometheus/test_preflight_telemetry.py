"""`diag preflight` with a real Prometheus and a real Alertmanager: targets, rules, the route of a critical alert."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support import alertmanager
from support.prometheus_server import EACH, Server, program, serving

from diag.artefacts.generate import files
from diag.commands import preflight as work
from diag.commands.observe import site
from diag.commands.options import PreflightOptions
from diag.core.contract import Contract
from diag.knowledge.catalog import load
from diag.preflight.check import State
from diag.preflight.checks import Preflight

LAUNCH = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --port {}"
PAGED = """
route:
  receiver: nobody
  routes:
  - matchers: ['severity="critical"']
    receiver: {receiver}
receivers:
- name: nobody
- name: pager
  webhook_configs:
  - url: http://127.0.0.1:9/
"""


def of(server: Server | None, port: int = 8000, **options: str) -> Preflight:
    url = server.url if server else ""
    return work.run(PreflightOptions(LAUNCH.format(port), vllm_version="0.32.0", prometheus=url, **options))


def results(server: Server | None, port: int = 8000, **options: str) -> Mapping[str, State]:
    return {each.id: each.state for each in of(server, port, **options).results if each.group == "telemetry"}


def settled(server: Server, expected: Mapping[str, State], port: int = 8000) -> Mapping[str, State]:
    """The results, once the Prometheus has loaded its rules and found its targets: within seconds of its start."""
    end = time.monotonic() + 120
    while (found := results(server, port)) != expected and time.monotonic() < end:
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module", params=EACH)
def prometheus(request: pytest.FixtureRequest) -> Path:
    return program(request.param)


def test_a_prometheus_without_rules_and_target_is_a_no_go(prometheus: Path) -> None:
    with serving(prometheus, []) as server:
        expected: Mapping[str, State] = {"scraped": "warn", "rules_loaded": "fail", "pager_route": "fail"}
        assert settled(server, expected) == expected
        assert next(check.id for check in of(server).results if check.id in expected) == "rules_loaded"


def test_a_prometheus_with_this_generation_of_the_rules_and_a_target(prometheus: Path, tmp_path: Path) -> None:
    with configured(prometheus, tmp_path, files(load(None), Contract())["alerts/diag.rules.yaml"]) as server:
        expected: Mapping[str, State] = {"scraped": "pass", "rules_loaded": "pass", "pager_route": "not checked"}
        assert settled(server, expected, port=8123) == expected


def test_rules_of_another_generation_are_a_warning(prometheus: Path, tmp_path: Path) -> None:
    rules = files(load(None), Contract())["alerts/diag.rules.yaml"].replace("generation: ", "generation: x")
    with configured(prometheus, tmp_path, rules) as server:
        expected: Mapping[str, State] = {"scraped": "pass", "rules_loaded": "warn", "pager_route": "not checked"}
        assert settled(server, expected, port=8123) == expected


def configured(prometheus: Path, folder: Path, rules: str) -> AbstractContextManager[Server]:
    (folder / "diag.rules.yaml").write_text(rules)
    config = f"""
rule_files: ['{folder}/diag.rules.yaml']
alerting:
  alertmanagers:
  - static_configs: [targets: ['127.0.0.1:9']]
scrape_configs:
- job_name: vllm
  static_configs: [targets: ['127.0.0.1:8123']]
"""
    return serving(prometheus, [], config)


@pytest.mark.parametrize(("receiver", "state"), [("pager", "pass"), ("nobody", "fail")])
def test_the_route_of_a_critical_alert(receiver: str, state: State, tmp_path: Path) -> None:
    generated = files(load(None), site(None, None)[0])
    with alertmanager.running(tmp_path, generated, PAGED.format(receiver=receiver)) as address:
        end = time.monotonic() + 120
        found: State = "not checked"
        while found == "not checked" and time.monotonic() < end:
            found = results(None, alertmanager=f"http://{address}")["pager_route"]
            time.sleep(0.3)
        assert found == state
