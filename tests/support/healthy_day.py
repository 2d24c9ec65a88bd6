"""A day of a healthy but lively server: the recording `healthy`, replayed faster or slower as the load of a day asks.

Every counter stands where the recording's stood after as much work, so that all of them fit each other. Beside vLLM
stand two GPUs, their workers, the configuration and the log, as on the exporter's page. Three scrapes are missed, and
vLLM starts anew once, between two scrapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from support.expressions import expressions
from support.paths import RECORDINGS
from support.scenarios import GIB, PHASES, Beside, config, gpu, log, workers
from support.timelines import LEAD, STEP, Key, Series

from diag.core.metric_families import Sample, families
from diag.promql import STALE, Block, Labels, metric_names, parse
from diag.promql.data import Floats, Millis
from diag.sources.recording.reader import read

SECONDS = 86_400
AFTER_LEAD = LEAD // STEP
TARGET = {"instance": "h:1", "job": "vllm"}
SUFFIXES = ("_bucket", "_count", "_sum")
COUNTERS = (*SUFFIXES, "_total")

LEVELS = {0: 0, 5: 0, 5.01: 0.3, 7: 0.4, 10: 1, 11.75: 1, 12.25: 1.85, 13: 1.85, 13.75: 1, 18: 0.9, 21: 0.5, 24: 0.3}
"""The load by the hour, as a multiple of the recording's six clients."""
SPARSE = ((5, 7), (22, 24))
"""From hour to hour: a few requests now and then, with nothing between."""
BURSTS = {8.1: 3, 10.4: 5, 12.3: 2, 12.305: 4, 12.8: 6, 15.2: 3, 15.205: 3, 19.5: 4}
"""Requests that wait, by the hour; two scrapes in a row are 30 s."""
MISSED_PAGE, MISSED_VLLM, NOT_SCRAPED = 3.3, 11.2, 16.4
"""The hours of the failed scrapes: of the exporter's whole page, of vLLM's alone, and one that was not even tried."""
RESTART = 14.6
"""The hour at which vLLM's page fails once and its counters begin at 0."""

WAIT = 10.0
"""Seconds that a request of a burst waits."""
MAX_NUM_SEQS = 16
BLOCK_SIZE = 128
RECORDED_BLOCKS = 2047
BLOCKS = 40
"""A pool so small that a full server fills most of it."""
POOL = {"num_gpu_blocks": f"{BLOCKS}", "kv_cache_size_tokens": f"{BLOCKS * BLOCK_SIZE}"}
GPUS = 2
CAPPED = 0.8
"""The share of its time that a GPU with all hands full spends at its power cap."""


@dataclass(frozen=True)
class Course:
    """Events from scrape to scrape: shapes (N,). `load` is since the scrape before, `step` in seconds."""

    times: Millis
    load: Floats
    waiting: Floats
    step: int

    @property
    def busy(self) -> Floats:
        """The share of its time for which a GPU has work."""
        return np.minimum(self.load, 1)

    def at(self, hour: float) -> int:
        """The scrape of that hour."""
        return round(hour * 3600 / self.step)

    def total(self, each: Floats) -> Floats:
        """Seconds so far of something that took this share of the time since the scrape before."""
        return np.cumsum(each * self.step)


def day(end_ms: int, step_seconds: int = 15) -> list[Block]:
    """24 h that end at that moment (ms since 1970), scraped so often: vLLM's page, the exporter's own, and `up`."""
    count = SECONDS // step_seconds
    times = end_ms - 1000 * step_seconds * np.arange(count, dtype=np.int64)[::-1]
    hours = np.arange(count) * step_seconds / 3600
    course = Course(times, _load(hours, step_seconds), np.zeros(count), step_seconds)
    for hour, requests in BURSTS.items():
        course.waiting[course.at(hour)] = requests
    return [_vllm(course), _exporter(course), _up(course)]


def with_fault(blocks: list[Block], series: Series, at: int) -> list[Block]:
    """The day with the sick quarter of an hour of a timeline in it: its faults set in just after that scrape (ms).

    Later than the last hole: what the vLLM of the timeline has grown by is added to the day's own growth.
    """
    told = {key - {*TARGET.items()}: np.array(each)[AFTER_LEAD:] for key, each in series.items()}
    return [block._replace(values=_sick_values(block, told, at)) for block in blocks]


def _sick_values(block: Block, told: Mapping[Key, Floats], at: int) -> Floats:
    first = int(np.searchsorted(block.times, at))
    values = block.values.copy()
    for row, labels in zip(values, block.labels, strict=True):
        sick = told.get(frozenset(labels.items()) - {*TARGET.items()})
        if sick is not None and not np.isnan(sick).any():
            _make_sick(row[first:], sick, labels["__name__"].endswith(COUNTERS))
    return values


def _make_sick(row: Floats, sick: Floats, counts: bool) -> None:
    """Put `sick`, whose first value is the last healthy one, over the beginning of `row`; a counter goes on from it."""
    last = len(sick) - 1
    more = sick - sick[0] - (row[: last + 1] - row[0]) if counts else sick - row[: last + 1]
    row[1 : last + 1] += more[1:]
    row[last + 1 :] += more[-1] if counts else 0


def _load(hours: Floats, step: int) -> Floats:
    chance = np.random.default_rng(20)
    load = np.interp(hours, list(LEVELS), list(LEVELS.values())) * (1 + 0.1 * chance.standard_normal(hours.size))
    comes = chance.random(hours.size) < step / 150
    for begin, end in SPARSE:
        load[(begin <= hours) & (hours < end) & ~comes] = 0
    return np.clip(load, 0, 2)


def _block(course: Course, labels: Iterable[Labels], values: Floats, *missed: float) -> Block:
    """Series of the target, with holes at these hours."""
    values[:, [course.at(hour) for hour in missed]] = STALE
    return Block(tuple({**each, **TARGET} for each in labels), course.times, values)


# -- vLLM's page ------------------------------------------------------------------------------------------------------


def _vllm(course: Course) -> Block:
    labels, seconds, recorded = _recording()
    work = course.total(course.load)
    values = np.array([_series(*each, seconds, work, course) for each in zip(labels, recorded, strict=True)])
    told = ({**each, **POOL} if each["__name__"] == "vllm:cache_config_info" else each for each in labels)
    return _block(course, told, values, MISSED_PAGE, MISSED_VLLM, NOT_SCRAPED, RESTART)


@cache
def _recording() -> tuple[list[Labels], Floats, Floats]:
    """The series, seconds since the first scrape, and the values; of histograms only those that a signal asks for."""
    asked = {_family(name) for text in expressions("5m") for name in metric_names(parse(text))}
    every = read(RECORDINGS / "healthy").samples.select([])
    kept = [block for block in every if _is_kept(block.labels[0]["__name__"], asked)]
    labels = [each for block in kept for each in block.labels]
    return labels, (kept[0].times - kept[0].times[0]) / 1000, np.concatenate([block.values for block in kept])


def _is_kept(name: str, asked: set[str]) -> bool:
    vllms = name.startswith("vllm:") and not name.endswith("_created")
    return (vllms and (_family(name) in asked or not name.endswith(SUFFIXES))) or name == "process_start_time_seconds"


def _family(name: str) -> str:
    return name.removesuffix(next((each for each in SUFFIXES if name.endswith(each)), ""))


def _series(labels: Labels, recorded: Floats, seconds: Floats, work: Floats, course: Course) -> Floats:
    """The values of one series after so much work, in seconds of the recording, which begins anew where it ends."""
    rounds, rest = np.divmod(work, seconds[-1])
    if not labels["__name__"].endswith(COUNTERS):
        return _gauge(labels, recorded[np.searchsorted(seconds, rest)], course)
    grown = rounds * (recorded[-1] - recorded[0]) + np.interp(rest, seconds, recorded - recorded[0])
    whole = grown if labels["__name__"].endswith("_seconds_sum") else np.floor(grown)
    counted = np.cumsum(_waited(labels, np.diff(whole, prepend=0.0), course))
    counted[course.at(RESTART) :] -= counted[course.at(RESTART)]
    return counted


def _waited(labels: Labels, grown: Floats, course: Course) -> Floats:
    """How much a counter grows from scrape to scrape where requests have waited: they miss the edges below WAIT."""
    family = _family(labels["__name__"])
    if family not in ("vllm:request_queue_time_seconds", "vllm:e2e_request_latency_seconds"):
        return grown
    if labels["__name__"].endswith("_sum"):
        return grown + WAIT * course.waiting
    return np.maximum(grown - course.waiting, 0) if float(labels.get("le", "inf")) < WAIT else grown


def _gauge(labels: Labels, recorded: Floats, course: Course) -> Floats:
    """A gauge that follows the load; others are as recorded. Requests wait only while the cap is reached."""
    full = course.waiting > 0
    match labels["__name__"]:
        case "vllm:num_requests_running":
            return np.where(full, MAX_NUM_SEQS, np.round(recorded * course.load))
        case "vllm:num_requests_waiting":
            return course.waiting
        case "vllm:num_requests_waiting_by_reason":
            return course.waiting * (labels["reason"] == "capacity")
        case "vllm:kv_cache_usage_perc":
            return np.where(full, 2 * MAX_NUM_SEQS, np.round(recorded * RECORDED_BLOCKS * course.load)) / BLOCKS
        case "process_start_time_seconds":
            return np.where(course.times < _restarted(course), course.times[0] - 60_000, _restarted(course)) / 1000
    return recorded


def _restarted(course: Course) -> int:
    """Return the start of the second vLLM (ms): just before the scrape that misses it."""
    return int(course.times[course.at(RESTART)]) - 5000


# -- the exporter's own page ------------------------------------------------------------------------------------------


def _exporter(course: Course) -> Block:
    gpus = (_gpu(index, course) for index in range(GPUS))
    beside = (*gpus, _processes(course), _config(), _log(course), _own(course))
    told = [[sample for part in beside for sample in part(k * course.step)] for k in range(course.times.size)]
    assert len({tuple(sample[:2] for sample in each) for each in told}) == 1, "a series comes and goes"
    values = np.array([[value for *_, value in each] for each in told]).T
    return _block(course, map(_labels, told[0]), values, MISSED_PAGE, NOT_SCRAPED)


def _labels(sample: Sample) -> Labels:
    name, values, _ = sample
    return {"__name__": name, **dict(zip(families()[name].labels, values, strict=True))}


def _gpu(index: int, course: Course) -> Beside:
    """At its power cap while the load is full, at idle clocks while there is none; its memory is nearly full."""
    busy, capped = course.busy, CAPPED * (course.load >= 1)

    def of(values: Floats) -> Callable[[float], float]:
        return lambda t: float(values[round(t / course.step)])

    return gpu(
        index,
        utilization_ratio=of(0.97 * busy),
        power_watts=of(90 + 600 * busy),
        clock_hertz__sm=of(np.where(busy > 0, 1980e6 - 135e6 * capped, 345e6)),
        pcie_link_generation__current=of(np.where(busy > 0, 4, 1)),
        pcie_bytes_total__rx=of(1e9 * course.total(busy)),
        throttle_seconds_total__sw_power_cap=of(course.total(capped)),
        temperature_margin_celsius=20,
        memory_free_bytes=2 * GIB,
    )


def _processes(course: Course) -> Beside:
    """Workers compute while there is load; the restart has their seconds begin anew."""
    seconds = course.total(0.02 + 0.98 * course.busy)
    seconds[course.at(RESTART) :] -= seconds[course.at(RESTART)]
    each = workers(*np.linspace(1, 0.95, GPUS))
    return lambda t: each(float(seconds[round(t / course.step)]))


def _config() -> Beside:
    return config(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=BLOCKS,
        kv_cache_size_tokens=BLOCKS * BLOCK_SIZE,
        gpu_memory_utilization=0.9,
        tensor_parallel_size=GPUS,
        enable_prefix_caching=1,
    )


def _log(course: Course) -> Beside:
    """Ready since before the day began; loading weights at the scrape of the restart, and ready from then on."""
    spent = dict.fromkeys(PHASES[:-1], 10.0)
    again = _restarted(course) / 1000
    ready = log("ready", spent, start=course.times[0] / 1000 - 60)
    loading, anew = log("load_weights", spent, start=again), log("ready", spent, start=again)

    def beside(t: float) -> Iterable[Sample]:
        since = round(t / course.step) - course.at(RESTART)
        return (ready if since < 0 else anew if since else loading)(0)

    return beside


def _own(course: Course) -> Beside:
    """Return the exporter's samples about itself and vLLM's page."""

    def beside(t: float) -> Iterator[Sample]:
        answered = float(round(t / course.step) not in (course.at(MISSED_VLLM), course.at(RESTART)))
        yield "diag_vllm_up", (), answered
        for part in ("vllm", "nvml", "process", "log"):
            yield "diag_scrape_success", (part,), answered if part == "vllm" else 1.0

    return beside


def _up(course: Course) -> Block:
    values = np.ones((1, course.times.size))
    values[0, course.at(MISSED_PAGE)] = 0
    return _block(course, [{"__name__": "up"}], values, NOT_SCRAPED)
