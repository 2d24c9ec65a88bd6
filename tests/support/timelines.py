"""Recordings continued for the rules: a healthy lead-in, then what was recorded, its rates going on for 15 minutes.

A timeline holds one value per series every 15 s from time 0 on, for `promtool test rules`. The fault sets in right
after the last healthy scrape, at LEAD.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from support.paths import RECORDINGS
from support.scenarios import (
    GIB,
    PHASES,
    Beside,
    config,
    crashed,
    eplb,
    gpu,
    health_check,
    log,
    logged,
    memory,
    model,
    reading,
    said,
    workers,
)
from support.thinning import truth

from diag.core.metric_families import Sample, families
from diag.promql import STALE, Block, is_stale
from diag.sources.recording.reader import read

STEP, LEAD, SICK = 15, 600, 900
TIMES = np.arange(0, LEAD + SICK + STEP, STEP)
BEFORE, AFTER = TIMES[TIMES <= LEAD], TIMES[TIMES > LEAD] - LEAD
RECOVERED = np.arange(STEP, 600 + STEP, STEP)
"""Seconds after the end of a timeline at which the server is healthy again."""
Floats = npt.NDArray[np.float64]
Key = frozenset[tuple[str, str]]
Series = dict[Key, Floats]
"""Labels (without `instance`) and a value for each time; a hole is NaN."""

STRETCHES = {
    "requests_failing": (8.0, 12.0, 44.0),  # from 6 s on
    "requests_refused_after_success": (14.0, 24.0, 90.0),  # from 18 s on
    "admission_deadlock": (10.0, 18.0, 54.0),  # the long prompt came at 8 s, and was given up at 58 s
    "engine_stalled": (24.0, 24.0, 60.0),  # SIGSTOP at 20 s, SIGCONT at 62 s
    "tp2_long_stall": (16.0, 76.0, 88.0),  # SIGSTOP at 14.5 s, a line in the log from 75 s on, SIGCONT at 88.9 s
    "compiling_while_serving": (20.0, 30.0, 58.0),  # from 22 s to 26 s
    "engine_dead": (27.0, 27.0, 63.0),  # killed at 24 s
    "engine_dead_answers_fail": (16.0, 24.0, 60.0),  # killed at 16 s
    "engine_dead_page_lives": (18.0, 24.0, 60.0),  # killed at 18 s
    "data_parallel_lockstep": (12.0, 12.0, 58.0),  # one page from 10 s on
    "tp_rank_missing_on_node_b": (24.0, 24.0, 56.0),  # from 14 s on, which NCCL shows from 22 s on
    "engine_device_fault": (20.0, 27.0, 63.0),  # the same, from before that
    "weights_not_reloaded": (30.0, 60.0, 148.0),  # asleep until 56 s
    "host_memory_killed": (20.0, 27.0, 63.0),
    "gpu_fault": (20.0, 27.0, 63.0),  # lost at 23 s
}
"""The seconds of a recording in which its fault lasts, where that is not all of it: played once, repeated from, to."""


RAY = ("Component", "NodeAddress", "ReplicaId", "SessionName", "Version", "WorkerId")
"""Labels that a server in Ray adds."""
MOMENTS = ("contention_long_prefill", "version_regression", "client_errors_surge")
"""Recordings of what does not repeat: the KV cache that one prompt takes cannot grow for a quarter of an hour, there is
one upgrade (tests/prometheus/test_upgrades.py), and a wave of errors that was always there is none."""
STAMPS = ("timestamp_seconds", "lora_requests_info")
"""How metrics end whose values are unix times."""
START_TIME = "process_start_time_seconds"
"""How those end that say when a process was started; it stays the same when a stretch is repeated."""


def is_counter(key: Key) -> bool:
    """Return True for the name of a counter in OpenMetrics."""
    return bool(re.search(r"_(total|count|sum|bucket)$", dict(key)["__name__"]))


@dataclass(frozen=True)
class Recording:
    """Scraped samples: seconds since the first scrape, the series, and the truth in recording.toml."""

    seconds: Floats
    series: Series
    start: float
    truth: Mapping[str, Any]

    @property
    def whole(self) -> tuple[float, float, float]:
        """The stretch that is all of it."""
        return 0.0, 0.0, float(self.seconds[-1])

    def at(self, seconds: Floats) -> Series:
        """The last scrape at or before each of these seconds."""
        rows = np.searchsorted(self.seconds, seconds, side="right") - 1
        return {key: values[rows] for key, values in self.series.items()}

    def looped(self, seconds: Floats, stretch: tuple[float, float, float], begun: float = LEAD) -> Series:
        """A stretch once and its end again and again: counters go on, time stamps stay as old as they were.

        `begun` is the time at which it begins.
        """
        first, again, last = stretch
        rounds = np.maximum(np.floor((seconds - (again - first)) / (last - again)), 0)
        played = first + seconds - rounds * (last - again)
        now, begin, from_, to = (self.at(each) for each in (played, *map(np.atleast_1d, stretch)))
        for key in now:
            if is_counter(key):
                # one that did not count yet when the stretch began is not on its first pages
                now[key] = now[key] - np.nan_to_num(begin[key]) + rounds * (to[key] - np.nan_to_num(from_[key]))
            elif dict(key)["__name__"].endswith(STAMPS):
                now[key] = np.where(now[key] > 0, now[key] - (self.start + played) + seconds + begun, now[key])
            elif dict(key)["__name__"].endswith(START_TIME):
                now[key] = np.maximum(now[key] - self.start + begun, 1.0)
        return now


@cache
def recording(name: str) -> Recording:
    """One that ships with the repository, on the times of its `up`; its first server, if it has several."""
    seen = read(RECORDINGS / name)
    blocks = seen.samples.select([])
    up = next(block for block in blocks if block.labels[0]["__name__"] == "up")
    times, server = up.times, up.labels[0]["instance"]
    series: Series = {}
    for block in blocks:
        own = [number for number, labels in enumerate(block.labels) if labels["instance"] == server]
        for number, values in zip(own, _spread(times, block)[own], strict=True):
            labels = block.labels[number]
            series[frozenset((name, value) for name, value in labels.items() if name != "instance")] = values
    return Recording((times - times[0]) / 1000, series, times[0] / 1000, truth(RECORDINGS / name))


def _spread(times: npt.NDArray[np.int64], block: Block) -> Floats:
    """The values of series on all times of the recording; NaN where there was no such scrape."""
    spread = np.full((len(block.labels), times.size), np.nan)
    values = np.where(is_stale(block.values), np.nan, block.values)
    spread[:, np.isin(times, block.times)] = values[:, np.isin(block.times, times)]
    return spread


def timeline(name: str, *beside: Beside, before: Iterable[Beside] = (), lead: str = "healthy") -> Series:
    """A recording ("" for a server that never answered) with its host beside it, after a lead-in."""
    served = _served(name, lead, AFTER) if name else _silent()
    hosts = _host(tuple(before), tuple(beside))
    return {**served, **hosts}


def lasting(name: str, seconds: float) -> Series:
    """A recording that goes on for so long after a lead-in of itself: a chronic incident has no onset."""
    return _served(name, name, np.arange(STEP, seconds + STEP, STEP))


def _served(name: str, lead: str, times: Floats) -> Series:
    sick = recording(name)
    stretch = STRETCHES.get(name, sick.whole)
    after = sick.looped(times, stretch)
    healthy = recording(lead)
    before = healthy.looped(BEFORE.astype(float), healthy.whole, begun=0.0)
    alike = {_alike(key): values for key, values in before.items()}
    return {key: _joined(key, alike.get(_alike(key)), values) for key, values in after.items()}


def _alike(key: Key) -> Key:
    """A series of any server under the same key: without what is called differently there, or is Ray's own."""
    return frozenset(each for each in key if each[0] not in ("model_name", "engine", *RAY))


def _joined(key: Key, before: Floats | None, after: Floats) -> Floats:
    """The lead-in of a series and what comes after; a series that the healthy server lacks is there from the start."""
    if dict(key)["__name__"] == "diag_vllm_config" or before is None:
        before = np.full(BEFORE.size, 0.0 if is_counter(key) else after[0])
        if dict(key)["__name__"].endswith(STAMPS):  # before its time, nothing has a time stamp
            before[before > BEFORE] = np.nan
    return np.concatenate([before, after + (before[-1] if is_counter(key) else 0)])


def _silent() -> Series:
    """A server that is being started: no page, after a time in which it was not there at all."""
    values = np.concatenate([np.full(BEFORE.size, np.nan), np.zeros(AFTER.size)])
    return {frozenset({("__name__", name)}): values for name in ("up", "diag_vllm_up")}


def _host(before: tuple[Beside, ...], after: tuple[Beside, ...]) -> Series:
    calm, sick = _sampled(before, BEFORE), _sampled(after, AFTER)
    hole = np.full(TIMES.size, np.nan)
    return {
        key: np.concatenate([calm.get(key, hole[: BEFORE.size]), sick.get(key, hole[: AFTER.size]) + _grown(key, calm)])
        for key in (calm | sick)
    }


def _grown(key: Key, calm: Series) -> float:
    return float(calm[key][-1]) if is_counter(key) and key in calm else 0.0


def _sampled(beside: tuple[Beside, ...], times: Floats) -> Series:
    """Return the samples beside vLLM's page at each time."""
    series: Series = {}
    for at, second in enumerate(times):
        for name, values, value in (sample for each in beside for sample in each(float(second))):
            labels = zip(families()[name].labels, values, strict=True)
            key = frozenset({("__name__", name), *labels})
            series.setdefault(key, np.full(times.size, np.nan))[at] = value
    return series


SPINS = {"utilization_ratio": 0.96, "power_watts": 20, "power_limit_watts": 70}
TWO = config(tensor_parallel_size=2)
CAPTURE = {"process_start": 20.0, "load_weights": 100.0, "compile": 50.0, "cuda_graph_capture": 0.0}
FULL = 24e9  # bytes a second, of 31.5e9 that 16 lanes of generation 4 carry


def hot(clock: float) -> Beside:
    """A GPU that is too hot, at this SM clock."""
    seconds = {"throttle_seconds_total__sw_thermal": lambda t: 0.4 * t}
    return gpu(**seconds, clock_hertz__sm=clock, temperature_margin_celsius=1)


def linked(rate: float, nvlinks: int = 0) -> tuple[Beside, ...]:
    """Two ranks' GPUs with that much PCIe traffic."""
    return (TWO, *(gpu(i, nvlink_active_links=nvlinks, pcie_bytes_total__rx=lambda t: rate * t) for i in (0, 1)))


def faulty(incident: str) -> tuple[Series, float]:
    """A timeline on which the incident is there, and the seconds after LEAD at which it sets in.

    A chronic one has been there before LEAD as well.
    """
    if incident in CHRONIC:
        return lasting(RECORDED[incident], SICK), 0.0
    if incident in RECORDED:
        return {**timeline(RECORDED[incident]), **_peers(incident)}, 0.0
    name, beside, before = HOSTS[incident]
    return timeline(name, *beside, before=before), 300.0 if incident == "cuda_graph_capture_hang" else 0.0


def recovered(incident: str, anew: bool = False) -> Series:
    """The timeline of an incident, then ten minutes in which the server is healthy, from the end of TIMES on.

    `anew`: another process serves from then on, whose counters begin at 0.
    """
    series, _ = faulty(incident)
    well = recording("healthy").looped(RECOVERED, recording("healthy").whole)
    own = {_alike(key): values for key, values in well.items()}
    _, _, calm = HOSTS.get(incident, ("", (), ()))
    host = _sampled(calm or CURED.get(incident, ()), RECOVERED)
    hole = np.full(TIMES.size, np.nan)
    page = {key: series.get(key, hole) for key in well if incident in HOSTS and HOSTS[incident][0] == ""}
    silent = {*_sampled(HOSTS[incident][1], AFTER)} - {*host} if incident in HOSTS else set()
    found = {}
    for key, before in (dict.fromkeys(host, hole) | page | series).items():
        name, last = dict(key)["__name__"], before[-1]
        page_key = _alike(frozenset(each for each in key if each[0] != "instance"))
        after = host[key] if key in host else own.get(page_key, np.full(RECOVERED.size, _idle(key, last)))
        after = np.full(RECOVERED.size, np.nan) if key in silent else after
        if name.endswith(START_TIME) and page_key in own:
            after = np.full(RECOVERED.size, float(TIMES[-1]) if anew else before[-1])
        elif is_counter(key) and page_key in own and not anew:
            after = after - after[0] + np.nan_to_num(last)
        found[key] = np.concatenate([before, after])
    return found


def followed(first: Series, second: Series) -> Series:
    """Join two timelines of one server: after the first comes the second from LEAD on, whose counters go on."""
    sick = {_alike(key): values[LEAD // STEP :] for key, values in second.items()}
    size = max(values.size for values in sick.values())
    found = {}
    for key, values in first.items():
        after = sick.get(_alike(key), np.full(size, values[-1]))
        if is_counter(key) and _alike(key) in sick:
            after = after - after[0] + values[-1]
        after = np.full(after.size, values[-1]) if dict(key)["__name__"].endswith(START_TIME) else after
        found[key] = np.concatenate([values, after[1:]])
    return found


def _idle(key: Key, last: float) -> float:
    """Return the value of a series that a healthy page lacks: a counter stands still, no request is there."""
    name = dict(key)["__name__"]
    return 0.0 if name.startswith("vllm:num_requests") else 1.0 if name in ("up", "diag_vllm_up") else last


def _peers(incident: str) -> Series:
    """The servers that stand beside the sick one: h:2 on."""
    peers = enumerate(PEERS.get(incident, ()), 2)
    return {key | {("instance", f"h:{n}")}: values for n, name in peers for key, values in timeline(name).items()}


RECORDED = {
    "admission_deadlock": "admission_deadlock",
    "engine_dead": "engine_dead",
    "engine_stalled": "engine_stalled",
    "kv_eviction_cascade": "kv_cascade",
    "kv_pool_saturated": "kv_saturated_fit",
    "kv_pool_undersized": "kv_undersized",
    "prefill_decode_contention": "contention_bigbatch",
    "queue_saturation": "queue_saturation",
    "prefix_cache_ineffective": "prefix_unique",
    "replicas_unbalanced": "queue_saturation",
    "speculation_ineffective": "speculation_ineffective",
    "speculation_lost_at_length": "speculation_lost_at_length",
    "lora_thrash": "lora_thrash",
    "api_server_bound": "api_server_bound",
    "data_parallel_lockstep": "data_parallel_lockstep",
    "kv_offload_failing": "kv_offload_failing",
    "kv_transfer_failing": "kv_transfer_failing",
    "multimodal_cache_desync": "multimodal_cache_desync",
    "output_corrupted": "output_corrupted",
    "requests_aborted": "requests_aborted",
    "requests_cancelled": "requests_cancelled",
    "requests_failing": "requests_failing",
    "requests_refused": "requests_refused_after_success",
    "weights_not_reloaded": "weights_not_reloaded",
}
"""The recording that shows an incident from vLLM's page alone."""
CHRONIC = ("prefix_cache_ineffective", "speculation_ineffective", "speculation_lost_at_length")
"""Infos about the mix of clients, judged over an hour: their alerts wait for hours, longer than a timeline is."""
JUDGED_AFTER = {"speculation_lost_at_length": 720.0}
"""Seconds until a chronic one can be judged: it compares two kinds of load, which come one after the other."""
PEERS = {"replicas_unbalanced": ("healthy", "healthy")}
"""What other servers of the same model do meanwhile, where an incident is about one of them."""
CALM = (gpu(0), gpu(1), TWO, workers(1.0, 1.0))
HOSTS: dict[str, tuple[str, tuple[Beside, ...], tuple[Beside, ...]]] = {
    "crash_loop": ("", (log("load_weights", {}, start=LEAD), crashed(3), workers(1.0)), ()),
    "cuda_graph_capture_hang": ("", (log("cuda_graph_capture", CAPTURE, start=LEAD), TWO, workers(1.0, 1.0)), ()),
    "elastic_scaling": ("healthy", (log("ready", {}, 600, LEAD, elastic_scaling_started=-1),), ()),
    "engine_awaits_recovery": ("healthy", (log("ready", {}, 600, LEAD, engine_fault_held=-1),), ()),
    "engine_device_fault": ("engine_dead", (log("ready", {}, 600, LEAD, engine_dead=-2, cuda_error=-1),), ()),
    "experts_unbalanced": ("healthy", (eplb(20_000, 50_000),), (eplb(20_000, 23_000),)),
    "gpu_fault": ("healthy", (gpu(0), gpu(1, up=0)), CALM),
    "gpu_memory_contended": (
        "healthy",
        (gpu(**{"process_memory_bytes:7,other,": 10 * GIB, "memory_free_bytes": 0.5 * GIB}),),
        CALM,
    ),
    "gpu_compute_contended": ("healthy", (gpu(**{"process_utilization_ratio:7,other,": 0.66}),), CALM),
    "gpu_out_of_memory": ("healthy", (log("ready", {}, start=LEAD, cuda_out_of_memory=-1),), ()),
    "gpu_power_brake": ("healthy", (gpu(throttle_seconds_total__hw_power_brake=lambda t: 0.2 * t),), CALM),
    "gpu_thermal_throttling": ("healthy", (hot(1800e6),), CALM),
    "host_memory_exhausted": ("healthy", (memory(lambda t: 0.95 + 0.0005 * t),), (memory(lambda _: 0.95),)),
    "kv_offload_oversized": (
        "healthy",
        (memory(lambda _: 0.45), config(kv_offloading_size=96)),
        (memory(lambda _: 0.45), config(kv_offloading_size=40)),
    ),
    "shutdown_drops_requests": (
        "healthy",
        (
            log("ready", {}, 600, LEAD, requests_cut_at_shutdown=-1),
            said("requests_cut_at_shutdown", requests=6, refused=2),
        ),
        (),
    ),
    "startup_failed": ("", (log("load_weights", {}, silent=10, start=LEAD, engine_start_failed=-1),), ()),
    "startup_slow": ("", (log("load_weights", {"load_weights": 900}, start=LEAD), workers(1.0), reading(60e6)), ()),
    "structured_output_failing": ("healthy", (logged("grammar_rejected", 0.5),), (logged("grammar_rejected", 0),)),
    "tp_communication_stall": ("tp2_long_stall", (TWO, workers(1.0, 0.0, stopped=[1])), CALM),
    "tp_interconnect_bound": ("healthy", linked(FULL), CALM),
}
"""What a host adds: the recording ("" for a server that never answers), what is beside it then, and before."""
READY = (log("ready", dict.fromkeys(PHASES[:-1], 10.0), start=float(TIMES[-1])), TWO, workers(1.0, 1.0))
CURED: dict[str, tuple[Beside, ...]] = {
    "crash_loop": (*READY, crashed(0)),
    "cuda_graph_capture_hang": READY,
    "engine_device_fault": READY,
    "gpu_memory_contended": (gpu(),),
    "gpu_compute_contended": (gpu(**{"process_utilization_ratio:7,other,": 0.05}),),
    "gpu_out_of_memory": READY,
    "startup_failed": READY,
    "startup_slow": READY,
    "weights_not_reloaded": (log("ready", {}, start=float(TIMES[-1]), weights_reloaded=-1),),
}
"""What the host of a server says after recovery, where it said nothing before the fault."""

TOLD = (
    model("mixtral-8x7b", "--tensor-parallel-size 2"),
    config(tensor_parallel_size=2, gpu_memory_utilization=0.9),
    log("ready", dict.fromkeys(PHASES[:-1], 10.0), 600, LEAD, cuda_out_of_memory=500, engine_start_failed=900),
    health_check,
)
"""What the log, the configuration and the health check of a server that serves say."""
ALL_GPU_FAULTS: dict[str, object] = {"resets_total": 0, "nvlink_errors_total:recovery": 0}
"""Counters of GPUs of either vendor that stand still."""


def network(_: float) -> list[Sample]:
    """A node whose ports are sound, and an NCCL job in which no rank is missing."""
    states = ("answering", "behind", "unresponsive", "dead")
    return [
        *(("diag_nccl_processes", (state,), 2.0 * (state == "answering")) for state in states),
        ("diag_infiniband_port_active", ("mlx5_0/1", "node-a"), 1.0),
        ("diag_infiniband_errors_total", ("mlx5_0/1", "node-a", "link_downed"), 0.0),
    ]


NAN_CAUSES = (log("ready", {}, start=LEAD, float16_cast=60, kv_scales_missing=60),)
"""What the log of a server with NaN says of the cause."""


SICK_FOR = 480
"""Seconds for which the fault has lasted when the servers start."""


def blocks(series: Series, start: float | None = None) -> list[Block]:
    """The timeline as samples from that unix time on; without one, its fault set in SICK_FOR seconds ago."""
    begin = time.time() - SICK_FOR - LEAD if start is None else start
    labels = tuple({"instance": "h:1", "job": "vllm", **dict(key)} for key in series)
    values = np.array([_told(key, each, begin) for key, each in series.items()])
    return [Block(labels, np.round((begin + TIMES) * 1000).astype(np.int64), values)]


def _told(key: Key, values: Floats, begin: float) -> Floats:
    """The values with time stamps that count from then, and holes as Prometheus has them."""
    stamped = dict(key)["__name__"].endswith((*STAMPS, START_TIME))
    moved = np.where(stamped & (values > 0), values + begin, values)
    return np.where(np.isnan(values), STALE, moved)
