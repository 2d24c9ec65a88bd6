"""Missing telemetry of a Prometheus is reported with the change to make; complete telemetry is not reported.

One Prometheus holds them all. The servers of a scene are called by its name, and a scene is looked at alone.
"""

import re
import zlib
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from support.prometheus_server import PLACES, Server, program, serving
from support.sampling import some
from support.timelines import CALM, STEP, TIMES, Key, Series, blocks, timeline

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.promql import STALE, Block
from diag.report.coverage import notes
from diag.sources.prometheus.scope import Scope, TimeSpan

pytestmark = pytest.mark.prometheus

Kept = npt.NDArray[np.bool_]
END = 1_790_000_000.5
AFTERWARDS = END + 7200
"""When there is a dcgm-exporter too."""
WINDOW = 900
AGO = TIMES[-1] - TIMES
"""Seconds before the end of each scrape, of which the last WINDOW are looked at."""
ALWAYS = AGO <= WINDOW + 300
KEPT = re.compile(r"up|process_start_time_seconds|http_requests_total|(vllm:|diag_).*(?<!_bucket)")


def named(name: str, **labels: str) -> Key:
    return frozenset({"__name__": name, **labels}.items())


def exporter() -> Series:
    """The page of an exporter of a healthy server, with one bucket of each histogram."""
    page = timeline("healthy", *CALM, before=CALM)
    kept = {
        key: values
        for key, values in page.items()
        if KEPT.fullmatch(dict(key)["__name__"]) or (dict(key).get("le") == "+Inf" and "token" in dict(key)["__name__"])
    }
    parts = {named("diag_scrape_success", collector=each): np.ones(TIMES.size) for each in ("nvml", "vllm")}
    served = {named("http_requests_total", handler="/v1/completions"): 2 * TIMES.astype(np.float64)}
    return {**kept, **parts, **served}


@cache
def page() -> Block:
    (block,) = blocks(exporter(), END - float(TIMES[-1]))
    return block


def server(name: str, drop: str = "", scraped: Kept = ALWAYS, job: str = "vllm", born: str = "") -> Block:
    """A server as it is stored: without the metrics to `drop`, at the times at which it was scraped."""
    whole = page()
    rows = [at for at, labels in enumerate(whole.labels) if not re.fullmatch(drop, labels["__name__"])]
    labels = tuple({**whole.labels[at], "instance": name, "job": job} for at in rows)
    values = whole.values[rows].copy()
    birth = [each["__name__"] == "vllm:generation_tokens_created" for each in labels]
    values[birth] = END - 3600 + zlib.crc32((born or name).encode()) / 1e6
    return Block(labels, whole.times[scraped], values[:, scraped])


def ended(block: Block) -> Block:
    """Return the series with the stale markers that Prometheus writes for a target that is gone."""
    times = np.append(block.times, block.times[-1] + 1000 * STEP)
    return Block(block.labels, times, np.column_stack([block.values, np.full(len(block.labels), STALE)]))


def renamed(block: Block) -> Block:
    """Return the series with vLLM's metrics as a Prometheus that negotiates OpenMetrics stores them."""
    labels = tuple({**each, "__name__": each["__name__"].replace("vllm:", "vllm_")} for each in block.labels)
    return Block(labels, block.times, block.values)


def without_driver(block: Block) -> Block:
    """Return the series of an exporter that finds no NVML."""
    broken = np.array([[each.get("collector") == "nvml"] for each in block.labels])
    return Block(block.labels, block.times, np.where(broken, 0.0, block.values))


def afterwards(block: Block) -> Block:
    """Two hours later, beside a dcgm-exporter."""
    dcgm = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "instance": "node:9400", "gpu": "0"}
    values = np.vstack([block.values, np.full(block.times.size, 95.0)])
    return Block((*block.labels, dcgm), block.times + round((AFTERWARDS - END) * 1000), values)


EXPORTED, STATS, GPUS, READINGS = "diag_.*", "vllm:.*", "diag_gpu_.*", "diag_gpu_(?!up).*"
FROM_DCGM = "diag_(?!gpu_).*|diag_gpu_(up|throttle_seconds_total)"
MINUTELY, EARLIER, LATER = ALWAYS & (AGO % 60 == 0), ALWAYS & (AGO > 400), AGO <= 400


def servers() -> list[Block]:
    return [
        server("well-0:1"),
        server("well-1:1"),
        server("born-0:1"),
        server("born-1:1", scraped=LATER),
        server("past-0:1"),
        ended(server("past-1:1", scraped=AGO > WINDOW + 60)),
        server("rejob-0:1", GPUS, job="old", scraped=EARLIER),
        server("rejob-0:1", GPUS, job="new", scraped=LATER),
        server("odd-0:1"),
        server("odd-1:1", scraped=ALWAYS & (AGO % 60 != 30)),
        server("lost-0:1"),
        server("lost-1:1", READINGS),
        server("hole-0:1", scraped=ALWAYS & ((AGO < 300) | (AGO > 600))),
        server("hole-1:1"),
        *(ended(server(f"rolled-old{n}:1", scraped=EARLIER)) for n in range(3)),
        *(server(f"rolled-new{n}:1", scraped=LATER) for n in range(3)),
        ended(server("over-0:1", scraped=EARLIER)),
        server("slow-0:1", scraped=MINUTELY),
        server("mixed-0:1"),
        server("mixed-1:1", scraped=MINUTELY),
        renamed(server("renamed-0:1", EXPORTED)),
        server("twice-0:1", GPUS, job="old"),
        server("twice-0:1", GPUS, job="new"),
        server("beside-0:1", EXPORTED, born="beside"),
        server("beside-0:9400", born="beside"),
        server("silent-0:1", f"{STATS}|{EXPORTED}", job="silent"),
        server("cards-0:1"),
        server("cards-1:1", EXPORTED),
        server("driverless-0:1"),
        without_driver(server("driverless-1:1", GPUS)),
        afterwards(server("dcgm-0:1", EXPORTED)),
        server("reasonless-0:1", FROM_DCGM),
        *(server(f"several-{n}:1", "process_.*") for n in range(4)),
    ]


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Server]:
    with serving(program(PLACES[1]), servers()) as running:
        yield running


def judged(prometheus: Server, scene: str) -> Report:
    """Look at a scene's servers; the one without statistics is not known to be a server, but by its job."""
    at = AFTERWARDS if scene == "dcgm" else END
    servers, jobs = ((), ("silent",)) if scene == "silent" else ((rf"{scene}-.*",), ())
    scope = Scope(TimeSpan(at=str(at), window=f"{WINDOW}s"), servers, jobs=jobs)
    return doctor.run(ObserveOptions([], prometheus=prometheus.url, scope=scope))


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param("well", id="of whom everything is seen"),
        pytest.param("born", id="one of whom was born meanwhile"),
        pytest.param("past", id="one of whom went before that"),
        pytest.param("rejob", id="whose job got another name"),
        pytest.param("odd", id="one of whom is scraped at a pace of its own"),
        pytest.param("lost", id="one of whom lost its GPU, which is an incident"),
    ],
)
def test_healthy_telemetry_has_no_notes(prometheus: Server, scene: str) -> None:
    assert not notes(judged(prometheus, scene))


FAULTS = {
    "hole": ("scrapes missing: hole-0:1, up to 34 % of them", "Prometheus was down or overloaded"),
    "rolled": ("no longer scraped: rolled-old0:1, rolled-old1:1, rolled-old2:1, since 2026-", "service discovery"),
    "over": ("nothing was scraped after 2026-", "Status > Targets"),
    "slow": ("scraped only every 60 s: slow-0:1", "too rare for the alerts", "scrape_interval to 15s"),
    "mixed": ("scraped only every 60 s: mixed-1:1;", "scrape_interval to 15s"),
    "renamed": ("vllm_... instead of vllm:...", "renamed-0:1", "alerts/relabel.yaml"),
    "twice": ("several targets have the same instance label", "twice-0:1 (jobs new, old)", "scrape each server once"),
    "beside": ("the same server is scraped as several instances", "beside-0:1 = beside-0:9400", "scrape it once"),
    "silent": ("silent-0:1", "runs with --disable-log-stats: remove that flag"),
    "cards": ("no GPU telemetry", "cards-1:1;", "scrape `diag exporter` there too"),
    "driverless": ("collectors of `diag exporter` that failed all the time: nvml on driverless-1:1", "standard error"),
    "dcgm": ("not joined with dcgm-0:1", "load alerts/dcgm.yaml", "gpu_join"),
    "reasonless": ("without throttle reasons: reasonless-0:1", "the head of alerts/dcgm.yaml"),
    "several": ("no process_start_time_seconds", "all 4 servers;", "--api-server-count 1"),
}


@pytest.mark.parametrize("scene", some(FAULTS, 4))
def test_missing_telemetry_is_reported_in_one_sentence_with_the_change(prometheus: Server, scene: str) -> None:
    (note,) = notes(judged(prometheus, scene))
    assert [each for each in FAULTS[scene] if each not in note] == []


def test_server_that_ended_before_the_time_range_is_not_part_of_it(prometheus: Server) -> None:
    assert judged(prometheus, "past").observed.servers == (("past-0:1", "0.32.0", "tiny"),)


def test_servers_that_replaced_others_are_judged_up_to_the_end(prometheus: Server) -> None:
    report = judged(prometheus, "rolled")
    assert report.observed.end == END
    assert (report.verdict, report.gone) == ("healthy", tuple(f"rolled-old{n}:1" for n in range(3)))
    assert {dict(each.subject)["instance"] for each in report.progress} == {f"rolled-new{n}:1" for n in range(3)}


def test_server_with_old_healthy_scrapes_is_not_called_healthy(prometheus: Server) -> None:
    report = judged(prometheus, "over")
    assert report.verdict == "unknown"
    assert "nothing was scraped in the last 6.75 min" in report.not_judged[0].sentence
