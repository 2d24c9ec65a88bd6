"""A real vLLM on the CPU with a small KV cache: what it runs with, and a cascade from its first page to its fix.

The tests stand in the order in which they use the one server: the last one replaces it by the doctor's relaunch line.
"""

import ast
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import top_views
from support.bad_servers import Reply, Request, serving
from support.live import cure, load, ramps, server
from support.waiting import until

from diag.commands.observe import ObserveOptions
from diag.vllm.flags.registry import default
from diag.vllm.running_config import FLAGS

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
GIVEN = {flag: int(value) for flag, value in zip(cure.TINY[::2], cure.TINY[1::2], strict=True)}
FOUND = {"kv_cache_size_tokens": 4096, "kv_cache_max_concurrency": 2, "num_gpu_blocks": 128}
OBSERVE = ("--for", "30", "--every", "1")


def config(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([DIAG, "config", *arguments, "--json"], stdout=subprocess.PIPE, check=True)
    (one,) = json.loads(done.stdout)["servers"]
    return one


def config_by(wanted: set[str], *arguments: str) -> dict[str, Any]:
    """The configuration by these sources: one look waits 2 s for each, which a busy host may not answer within."""
    looks: list[dict[str, Any]] = []

    def answered() -> bool:
        looks.append(config(*arguments))
        names = {setting["name"] for setting in looks[-1]["settings"]}
        return "--max-num-seqs" in names and wanted <= set(sources(looks[-1], "--max-num-seqs"))

    until(answered)
    return looks[-1]


def values(one: Mapping[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["value"] for each in one["settings"]}


def sources(one: Mapping[str, Any], name: str) -> list[str]:
    """The sources of a setting, the most trusted first."""
    (setting,) = (setting for setting in one["settings"] if setting["name"] == name)
    return [setting["source"], *(other["source"] for other in setting["other_sources"])]


def disputed(one: Mapping[str, Any]) -> list[str]:
    """The settings on which sources conflict."""
    return [
        setting["name"]
        for setting in one["settings"]
        if any(other["value"] != setting["value"] for other in setting["other_sources"])
    ]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    folder = tmp_path_factory.mktemp("vllm")
    # the relaunch line is that of its command line, which shows the template's interpreter otherwise
    told = server.paced(folder / "plugin")
    with server.running(folder, "tiny", cure.TINY, cold=True, VLLM_SERVER_DEV_MODE="1", **told) as running:
        # at the first request vLLM gathers its environment, which may take longer than diag waits
        urllib.request.urlopen(f"{running.url}/server_info", timeout=server.READY_SECONDS).close()
        yield running


@pytest.fixture(scope="module")
def plain(vllm: server.Server) -> Iterator[str]:
    """Return the server without development mode, on a port of another process."""

    def answer(request: Request) -> Reply:
        if request.path.startswith("/server_info"):
            return Reply(b"", 404)
        try:
            with urllib.request.urlopen(vllm.url + request.path, timeout=10) as reply:
                return Reply(reply.read())
        except urllib.error.HTTPError as error:
            return Reply(b"", error.code)

    with serving(answer) as between:
        yield between.url


def test_every_source_of_the_configuration_agrees(vllm: server.Server) -> None:
    one = config_by({"/server_info", "process command line", "log"}, vllm.url, "--log", str(vllm.log))
    found = values(one)
    assert {name: found[name] for name in GIVEN} == GIVEN
    assert {name: found[name] for name in FOUND} == FOUND
    assert sources(one, "--max-num-seqs") == ["/server_info", "process command line", "log"]
    assert sources(one, "--block-size") == ["/server_info", "/metrics", "log", "process command line"]
    assert "/v1/models" in sources(one, "--max-model-len")
    assert sources(one, "--dtype") == ["/server_info", "log", "process command line"]
    assert disputed(one) == []
    assert one["incomplete"] is None
    assert one["environment"]["VLLM_SERVER_DEV_MODE"] == "1"


def test_configured_numbers_equal_those_of_the_log(vllm: server.Server) -> None:
    said = re.search(r"non-default args: (\{.*\})", text := vllm.log.read_text())
    assert said, text
    arguments = ast.literal_eval(said[1])
    found = values(config(vllm.url))
    for name in GIVEN:
        assert found[name] == arguments[name.removeprefix("--").replace("-", "_")]
    (size,) = re.findall(r"KV cache size: ([\d,]+) tokens", text)
    assert found["kv_cache_size_tokens"] == int(size.replace(",", ""))


def test_without_development_mode_the_numbers_are_the_same(vllm: server.Server, plain: str) -> None:
    dev = config_by({"/server_info"}, vllm.url)
    other = config_by({"log"}, plain, "--log", str(vllm.log))
    assert sources(other, "--max-num-seqs") == ["log"]
    assert disputed(other) == []
    assert other["incomplete"] is None, "the log lists what was set"
    both = values(dev).keys() & values(other).keys() & {*GIVEN, *FOUND, "--gpu-memory-utilization", "--enforce-eager"}
    assert len(both) == len(GIVEN) + len(FOUND) + 2
    assert {name: values(dev)[name] for name in both} == {name: values(other)[name] for name in both}


def test_configuration_from_the_page_alone_is_incomplete(plain: str) -> None:
    one = config(plain)
    assert one["incomplete"]
    assert sources(one, "--block-size") == ["/metrics"]
    assert {"--max-num-seqs", "--max-num-batched-tokens"} <= {each["name"] for each in one["unknown"]}


def test_server_runs_with_the_defaults_of_its_release(vllm: server.Server) -> None:
    """Every published setting that was not given has the value in the table of defaults."""
    found = values(config(vllm.url))
    flags = [f"--{name.replace('_', '-')}" for name in FLAGS]
    assumed = {name: default(name, "0.32.0") for name in flags if name not in GIVEN and name != "--enforce-eager"}
    known = {name: value for name, value in assumed.items() if value is not None}
    assert len(known) > 5
    assert {name: found[name] for name in known} == known


def test_recording_has_the_configuration_of_the_live_server(vllm: server.Server, tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    subprocess.run([DIAG, "record", vllm.url, str(folder), "--for", "2"], check=True, stdout=subprocess.DEVNULL)
    one = config(str(folder))
    assert values(one) == values(config(vllm.url))
    assert sources(one, "--max-num-seqs") == ["/server_info", "process command line"]


def said(*command: str) -> dict[str, Any]:
    done = subprocess.run([DIAG, *command, "--json"], stdout=subprocess.PIPE, check=False)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def preemptions(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        return float(re.findall(rf"(?m)^{cure.PREEMPTED}{{.*}} (\S+)$", page.read().decode())[0])


def primary(report: dict[str, Any]) -> dict[str, Any]:
    """The one primary incident of a report."""
    (diagnosis,) = (diagnosis for diagnosis in report["diagnoses"] if diagnosis["primary"])
    return dict(diagnosis)


@pytest.mark.nightly
def test_a_ramp_names_the_small_kv_cache_and_the_flag(vllm: server.Server) -> None:
    options = ("--from", "16", "--most", "32", "--rates", "0", "--step-seconds", "5")
    with load.alone():
        for _ in range(3):  # other tests start servers meanwhile
            found = ramps.ramp(vllm.url, (192, 192), *options)
            if found["binds"]:
                break
        else:
            if ramps.names_a_crowded_host(found):
                return
    assert found["binds"], json.dumps(found, indent=1)
    assert (found["binds"]["id"], found["binds"]["changes"][0]["flag"]) == ("kv_cache", "--num-gpu-blocks-override")
    assert [step["concurrency"] for step in found["steps"]] == [16, 32]
    assert found["steps"][0]["client"]["failed"] == 0


def test_a_cascade_is_named_while_it_lasts_and_fixed_by_the_relaunch_line(vllm: server.Server, tmp_path: Path) -> None:
    before = tmp_path / "before"
    with load.alone(), load.running(vllm.port, *cure.CASCADE.clients), ThreadPoolExecutor(2) as meanwhile:
        begun = time.time()
        until(lambda: preemptions(vllm.url) > 0)
        kept = meanwhile.submit(cure.recorded, vllm.url, before, 30)
        told = meanwhile.submit(said, "doctor", vllm.url, *OBSERVE)
        row, shown = top_views.first_judged(ObserveOptions([vllm.url], every=2.0))
        report, _ = told.result(), kept.result()
    named = primary(report)
    assert named["incident"] == "kv_eviction_cascade"
    assert "kv_eviction_cascade" in row.incidents
    assert "critical" in shown
    since = named["since"] or report["observed"]["start"]
    assert since - begun < 60  # by the scrapes: two busy cores start our process late, and have it watch on
    low, high = cure.CASCADE.bounds
    assert low <= {fix["name"]: fix["after"] for fix in named["fixes"]}[cure.CASCADE.flag] <= high
    line = primary(said("doctor", str(before)))["relaunch"]
    vllm.stop()
    with (
        server.relaunched(line, vllm.port, tmp_path / "relaunched.log", **server.paced(tmp_path / "plugin")) as fixed,
        load.alone(),
        load.running(fixed.port, *cure.CASCADE.clients) as clients,
    ):
        clients.wait_for(10, load.CASCADE[0])
        verdict = said("verify", str(before), fixed.url, *OBSERVE)
    assert verdict["verdict"] == "fixed", json.dumps(verdict, indent=1)
    (compared,) = verdict["servers"]
    assert compared["incidents"][0]["incident"] == "kv_eviction_cascade"
    changes = [change["name"] for change in compared["changes"] if not change["derived"]]
    assert changes == [cure.CASCADE.changed]
